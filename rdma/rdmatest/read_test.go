//go:build linux && cgo && rdma && (amd64 || arm64)

package rdmatest_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/rdma/rdmatest"
)

// side is a device with memory that is registered on it.
type side struct {
	device *rdma.Device
	pd     *rdma.PD
	region *rdma.Region
	memory []byte
	gid    rdma.GID
	port   rdma.Port
}

func open(tb testing.TB, device string, size int, access rdma.Access) *side {
	tb.Helper()
	s := &side{memory: mapped(tb, size)}
	var err error
	if s.device, err = rdma.Open(device); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { closed(tb, s.device) })
	if s.pd, err = s.device.NewPD(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { closed(tb, s.pd) })
	if s.region, err = s.pd.Register(s.memory, access); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { closed(tb, s.region) })
	if s.port, err = s.device.Port(1); err != nil {
		tb.Fatal(err)
	}
	gids, err := s.device.GIDs(1)
	if err != nil {
		tb.Fatal(err)
	}
	if s.gid, err = rdma.ChooseGID(gids, s.port.Link, netip.Addr{}); err != nil {
		tb.Fatal(err)
	}
	return s
}

func mapped(tb testing.TB, size int) []byte {
	tb.Helper()
	m, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { unix.Munmap(m) })
	return m
}

func closed(tb testing.TB, c interface{ Close() error }) {
	tb.Helper()
	if err := c.Close(); err != nil {
		tb.Error(err)
	}
}

func (s *side) qp(tb testing.TB, o rdma.QPOptions) *rdma.QP {
	tb.Helper()
	q, err := s.pd.NewQP(o)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { closed(tb, q) })
	return q
}

// path is from s to a queue pair behind a GID or LID.
func (s *side) path(num uint32, gid netip.Addr, lid uint16) rdma.Path {
	return rdma.Path{
		Port: 1, GIDIndex: uint8(s.gid.Index), HopLimit: 64, Global: s.port.Link == rdma.LinkEthernet, MTU: s.port.ActiveMTU,
		Timeout: 14, RetryCount: 6, RNRRetry: 6, MinRNRTimer: 12, ReadsInitiated: 16, ReadsServed: 16,
		DLID: lid, DestQPN: num, RecvPSN: 7, SendPSN: 7, Access: rdma.RemoteRead, DestGID: gid.As16(),
	}
}

// pair is a reader and an owner in one process.
type pair struct {
	reader, owner     *side
	readerQP, ownerQP *rdma.QP
	remoteAddr        uint64
	remoteKey         uint32
}

const size = 8 << 20

// paint makes byte i byte(i*times + i>>shift). The race detector looks at
// memory that nobody else has yet for a long time.
//
//go:norace
func paint(m []byte, times, shift int) {
	for i := range m {
		m[i] = byte(i*times + i>>shift)
	}
}

func newPair(tb testing.TB, devices ...string) *pair {
	tb.Helper()
	if len(devices) == 0 {
		devices = []string{"double0", "double1"}
	}
	p := &pair{owner: open(tb, devices[0], size, rdma.RemoteRead), reader: open(tb, devices[1], size, rdma.LocalWrite)}
	paint(p.owner.memory, 7, 12)
	p.remoteAddr, p.remoteKey = p.owner.region.Addr(), p.owner.region.Keys()[0].R
	p.connect(tb, nil)
	return p
}

// connect makes a queue pair on each side; change may spoil the reader's path
// and the owner's.
func (p *pair) connect(tb testing.TB, change func(reader, owner *rdma.Path)) {
	tb.Helper()
	p.readerQP = p.reader.qp(tb, rdma.QPOptions{Events: true})
	p.ownerQP = p.owner.qp(tb, rdma.QPOptions{})
	r := p.reader.path(p.ownerQP.Num(), p.owner.gid.Addr, p.owner.port.LID)
	o := p.owner.path(p.readerQP.Num(), p.reader.gid.Addr, p.reader.port.LID)
	if change != nil {
		change(&r, &o)
	}
	if err := p.ownerQP.Connect(o); err != nil {
		tb.Fatal(err)
	}
	if err := p.readerQP.Connect(r); err != nil {
		tb.Fatal(err)
	}
}

func (p *pair) op(local, remote, n int) rdma.Op {
	return rdma.Op{
		Local: p.reader.region.Addr() + uint64(local), Remote: p.remoteAddr + uint64(remote), Len: uint32(n),
		LKey: p.reader.region.Keys()[0].L, RKey: p.remoteKey,
	}
}

// pages are n ops of so many bytes each, from the beginning.
func (p *pair) pages(n, bytes int) []rdma.Op {
	ops := make([]rdma.Op, n)
	for i := range ops {
		ops[i] = p.op(i*bytes, i*bytes, bytes)
	}
	return ops
}

func (p *pair) read(ops []rdma.Op) (rdma.Stats, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return p.readerQP.Read(ctx, ops, rdma.ReadOptions{Single: true, Stall: 10 * time.Second})
}

func wantStatus(tb testing.TB, err error, want rdma.Status) *rdma.CompletionError {
	tb.Helper()
	var c *rdma.CompletionError
	if !errors.As(err, &c) || c.Status != want {
		tb.Fatalf("error %v, want status %v", err, want)
	}
	return c
}

// Scattered reads of all sizes and alignments, with several pieces each, bring
// what a loop of copies would, and touch nothing beside it.
func TestReadBringsTheRightBytes(t *testing.T) {
	for name, devices := range map[string][]rdmatest.DeviceSpec{
		"ethernet":   {{Name: "double0"}, {Name: "double1"}},
		"infiniband": {{Name: "double0", InfiniBand: true}, {Name: "double1", InfiniBand: true}},
	} {
		for fault, f := range map[string]rdmatest.Faults{
			"": {}, "reorder": {Reorder: true, Seed: 3, Delay: 20 * time.Microsecond, Jitter: 100 * time.Microsecond}, "few reads": {MaxReads: 1},
			"bandwidth": {Bandwidth: 500 << 20},
		} {
			t.Run(name+"/"+fault, func(t *testing.T) {
				w := rdmatest.Use(t, devices...)
				p := newPair(t)
				w.Set(f)
				random := rand.New(rand.NewPCG(1, uint64(len(name))))
				want := make([]byte, size)
				for range 4 {
					var ops []rdma.Op
					for at := 0; at < size-80<<10 && len(ops) < 200; {
						n := 1 + random.IntN(64<<10)
						from := random.IntN(size - n)
						ops = append(ops, p.op(at, from, n))
						copy(want[at:at+n], p.owner.memory[from:])
						at += n + random.IntN(9000)
					}
					if st, err := p.read(ops); err != nil || st.Done != len(ops) {
						t.Fatal(st, err)
					}
					if !bytes.Equal(p.reader.memory, want) {
						t.Fatal("the memories differ")
					}
				}
				n := w.Counts()
				if n.QPs != 2 || n.Regions != 2 || n.ReadBytes != n.ServedBytes || n.Devices["double1"].ReadBytes != n.ReadBytes || n.Devices["double0"].ServedBytes != n.ReadBytes || n.Errors != 0 {
					t.Errorf("%+v", n)
				}
			})
		}
	}
}
