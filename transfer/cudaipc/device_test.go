package cudaipc

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/cuda/cudatest"
	"github.com/kvferry/kvferry/transfer"
)

// aloneEnv names the test that has a process for itself.
const aloneEnv = "KVFERRY_CUDAIPC_TEST_ALONE"

// alone runs the test in a process of its own, with a driver made of these
// options, and reports whether this is that process.
func alone(t *testing.T, o cudatest.Options) bool {
	t.Helper()
	if os.Getenv(aloneEnv) == t.Name() {
		worldOptions = o
		return true
	}
	emulated(t) // or a reason to skip
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=2m")
	for _, e := range os.Environ() {
		// These options are the variant.
		if !strings.HasPrefix(e, "KVFERRY_CUDA_WORLD=") && !strings.HasPrefix(e, "KVFERRY_CUDA_VARIANT=") {
			cmd.Env = append(cmd.Env, e)
		}
	}
	cmd.Env = append(cmd.Env, aloneEnv+"="+t.Name(), noPause)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("in a process of its own: %v\n%s", err, out)
	}
	return false
}

// A driver that copies one stretch a call, and has no batch, copies the same bytes.
func TestDriverWithoutBatch(t *testing.T) {
	if !alone(t, cudatest.Options{Devices: 1, Version: 11080, Hide: []string{"cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"}}) {
		return
	}
	const size, page = 1 << 20, 4 << 10
	owner, reader := newPair(t, size, small)
	seal := owner.hold(1, 1)
	l := open(t, reader, owner.peer())
	for round := range 5 {
		from, want := owner.fill(0, round), reader.fill(0, 50+round)
		copies := shuffled(size, page)[:200]
		for _, c := range copies {
			copy(want[c.Local:][:c.Bytes], from[c.Remote:][:c.Bytes])
		}
		before := deviceCalls(reader.r)
		if err := l.Read(short(t), []transfer.Seal{seal}, copies); err != nil {
			t.Fatal(err)
		}
		differ(t, "the reader's arena", reader.peek(0), want)
		if after := deviceCalls(reader.r); after.Calls-before.Calls != 200 {
			t.Errorf("%d calls for 200 pages: is this a driver without batches?", after.Calls-before.Calls)
		}
	}
	done := under(short(t), t, driver.world, reader, l, seal)
	owner.local.Seals.Store(1, 0)
	go func() { _ = l.Close() }()
	driver.world.Clear()
	if err := <-done; err == nil {
		t.Error("a read that was closed, and is stale, held")
	}
}

// A device that cannot reach the peer's is a reason, and one that can is used all
// the same.
func TestDevicesThatDoNotReachEachOther(t *testing.T) {
	if !alone(t, cudatest.Options{Devices: 2}) {
		return
	}
	const size = 1 << 20
	r := gpu(t)
	dir := rendezvousDir(t)
	first, second := newNode(t, r, ownerLife, size, 0), newNode(t, r, readerLife, size, 1)
	first.listen(t, Options{Dir: dir})
	second.listen(t, Options{Dir: dir})
	_, err := second.t.Open(short(t), first.peer())
	if !errors.Is(err, transfer.ErrUnavailable) || !strings.Contains(err.Error(), deviceOf(t, r, 0).String()) {
		t.Errorf("Open: %v, want ErrUnavailable and the device", err)
	}
	third := newNode(t, r, readerLife, size, 0)
	third.listen(t, Options{Dir: dir})
	if err := open(t, third, first.peer()).Read(short(t), []transfer.Seal{first.hold(1, 1)}, []transfer.Copy{{Bytes: size}}); err != nil {
		t.Error(err)
	}
}

// A device that dies ends reads with the driver's words, at once and for ever, and
// everything can be closed.
func TestDeadDevice(t *testing.T) {
	if !alone(t, cudatest.Options{Devices: 1}) {
		return
	}
	const size = 1 << 20
	owner, reader := newPair(t, size, Options{Limits: transfer.Limits{Stall: 3 * time.Second}})
	l := open(t, reader, owner.peer())
	seal := owner.hold(1, 1)
	for range 3 { // several at once find out
		open(t, reader, owner.peer())
	}
	driver.world.Set(cudatest.Faults{Poison: cudatest.IllegalAddress, PoisonNth: 3})
	var err error
	for range 100 {
		if err = l.Read(short(t), []transfer.Seal{seal}, pages(size, 4096)); err != nil {
			break
		}
	}
	e, ok := errors.AsType[*transfer.Error](err)
	if !ok || !errors.Is(err, cuda.ErrDead) || errors.Is(err, transfer.ErrUnavailable) || !strings.Contains(err.Error(), "illegal") || e.Peer != ownerLife {
		t.Fatalf("Read: %v, want that the device is dead, and why", err)
	}
	t.Log(err)
	started := time.Now()
	for range 10 {
		if err := l.Read(short(t), []transfer.Seal{seal}, pages(size, 4096)); !errors.Is(err, cuda.ErrDead) {
			t.Errorf("Read afterwards: %v, want ErrDead", err)
		}
	}
	if took := time.Since(started); took > 20*time.Second {
		t.Errorf("ten reads of a dead device took %v", took)
	}
	<-reader.r.Dead()
	if _, err := reader.t.Open(short(t), owner.peer()); err != nil && errors.Is(err, transfer.ErrUnavailable) {
		t.Errorf("Open: %v, want nothing that would let another transport hide it", err)
	}
	if n := reader.t.turns.Taken(); n != 0 {
		t.Errorf("%d turns are taken", n)
	}
	for _, n := range []*node{reader, owner} {
		if err := n.t.Close(); err != nil {
			t.Error(err)
		}
	}
	if s := reader.t.Stats(); s.Links != 0 || s.Imported != 0 {
		t.Errorf("stats %+v", s)
	}
	// What a dead device says of memory that is given back is no news.
	_ = reader.r.Close()
	driver.runtime, reader.local.Arenas, owner.local.Arenas = nil, nil, nil
}
