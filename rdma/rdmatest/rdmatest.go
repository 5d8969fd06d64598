// Package rdmatest is a double of libibverbs.so.1, for machines without an
// RDMA card: what package rdma does on hardware it does here, through the very
// same loading, the very same table of functions, and the very same headers.
//
// A [World] is a directory: a control file that every process of a test maps,
// and a tree that looks like sysfs. A process is in the world that its
// environment names ([World.Env]); without one the library has no device. A
// read is carried out by a thread of the process that posted it, with
// process_vm_readv: the process that is read from runs no instruction for it,
// and may be stopped. What connects, what is refused, in which order
// completions come, and when a notification is sent is as the specification
// has it for reliable connections, and where hardware differs the stricter way
// was taken: a completion queue holds what was asked for and no more, a place
// in the send queue is free once a completion behind it has been polled, and
// whatever still has something made of it cannot be closed.
//
// Faults are set from Go at any time, for all processes of the world
// ([World.Set]). They are what hardware and networks do, never what they
// cannot: bytes that land late land before the flush, or before the queue
// pair is destroyed.
//
// It is no model of how fast a card is. Delay and bandwidth are there so that
// too little under way is as slow as it would be; without them a read takes
// the time of a copy by the kernel. It serves READ on port 1 of reliable
// queue pairs, and nothing else: no SEND, WRITE, or atomics, no shared receive
// queues. A dma-buf is any file that can be mapped, such as a memfd: who
// registers one reads and writes its pages, as a card does those of a device.
// Memory that was unmapped while it was registered is an error here (remote
// operation error, local protection error); a card would go on reading it.
package rdmatest

import (
	"os"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/rdma"
)

// Hardware returns the devices that KVFERRY_RDMA_DEVICE names, the owner's
// first: where it is set, tests are to use them and no double.
func Hardware() []string {
	return strings.FieldsFunc(os.Getenv("KVFERRY_RDMA_DEVICE"), func(r rune) bool { return r == ',' })
}

// Use makes a world for a test of this process: the double is built and
// loaded, and the environment names the world until the test ends. Without
// devices it has "double0" and "double1". The test is skipped, with the
// reason, where the double cannot be built or package rdma is not built in,
// and where [Hardware] is to be used.
//
// As the environment belongs to the process, tests that use a world cannot be
// parallel.
func Use(tb testing.TB, devices ...DeviceSpec) *World {
	tb.Helper()
	if hardware := Hardware(); len(hardware) > 0 {
		tb.Skipf("only the verbs double can do this, and KVFERRY_RDMA_DEVICE asks for %s", strings.Join(hardware, ","))
	}
	path, err := Build()
	if err != nil {
		tb.Skip(err)
	}
	if err := rdma.Load(path); err != nil {
		tb.Skip(err)
	}
	if len(devices) == 0 {
		devices = []DeviceSpec{{Name: "double0"}, {Name: "double1"}}
	}
	w, err := NewWorld(tb.TempDir(), devices...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { w.Close() })
	tb.Setenv(environment, w.dir)
	return w
}
