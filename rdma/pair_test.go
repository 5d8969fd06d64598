//go:build linux && cgo && rdma && (amd64 || arm64)

package rdma_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/rdma/rdmatest"
)

// fabric is where a test runs: on the devices that KVFERRY_RDMA_DEVICE names,
// or on the double.
type fabric struct {
	world         *rdmatest.World // nil on devices
	owner, reader string
}

func newFabric(tb testing.TB, devices ...rdmatest.DeviceSpec) fabric {
	tb.Helper()
	switch names := rdmatest.Hardware(); len(names) {
	case 0:
		return fabric{rdmatest.Use(tb, devices...), "double0", "double1"}
	case 1:
		return fabric{nil, names[0], names[0]}
	default:
		return fabric{nil, names[0], names[1]}
	}
}

func (f fabric) real() bool { return f.world == nil }

// node is one side: a device, a domain, mapped memory, and its registration.
type node struct {
	dev    *rdma.Device
	pd     *rdma.PD
	mem    []byte
	region *rdma.Region
	port   rdma.Port
	gid    rdma.GID
}

func newNode(tb testing.TB, device string, size int, a rdma.Access) *node {
	tb.Helper()
	n := &node{}
	var err error
	if n.dev, err = rdma.Open(device); err != nil {
		tb.Fatal(err)
	}
	closeAtEnd(tb, "device", n.dev.Close)
	if n.port, err = n.dev.Port(1); err != nil {
		tb.Fatal(err)
	}
	gids, err := n.dev.GIDs(1)
	if err != nil {
		tb.Fatal(err)
	}
	if n.gid, err = rdma.ChooseGID(gids, n.port.Link, n.gid.Addr); err != nil {
		tb.Fatal(err)
	}
	if n.pd, err = n.dev.NewPD(); err != nil {
		tb.Fatal(err)
	}
	closeAtEnd(tb, "domain", n.pd.Close)
	n.mem = mapped(tb, size)
	if n.region, err = n.pd.Register(n.mem, a); err != nil {
		tb.Fatal(err)
	}
	closeAtEnd(tb, "region", n.region.Close)
	return n
}

func mapped(tb testing.TB, size int) []byte {
	tb.Helper()
	mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { unix.Munmap(mem) })
	return mem
}

func closeAtEnd(tb testing.TB, what string, f func() error) {
	tb.Cleanup(func() {
		if err := f(); err != nil {
			tb.Errorf("close %s: %v", what, err)
		}
	})
}

// pair is an owner, whose memory holds word, and a reader.
type pair struct {
	fabric        fabric
	owner, reader *node
}

func newPair(tb testing.TB, size int, devices ...rdmatest.DeviceSpec) *pair {
	tb.Helper()
	f := newFabric(tb, devices...)
	p := &pair{f, newNode(tb, f.owner, size, rdma.RemoteRead|rdma.RelaxedOrdering), newNode(tb, f.reader, size, rdma.LocalWrite|rdma.RelaxedOrdering)}
	spell(p.owner.mem, 0)
	return p
}

// spell writes the words of the owner's memory from an offset on. The race
// detector looks at memory that nobody else has yet for a long time.
//
//go:norace
func spell(m []byte, offset int) {
	for i := 0; i < len(m); i += 8 {
		binary.LittleEndian.PutUint64(m[i:], word(offset+i))
	}
}

// word is what the owner has at offset i, so that any 8 bytes of it tell
// where they came from.
func word(offset int) uint64 {
	i := uint64(offset) + 0x9e3779b97f4a7c15
	i = (i ^ i>>30) * 0xbf58476d1ce4e5b9
	i = (i ^ i>>27) * 0x94d049bb133111eb
	return i ^ i>>31
}

const blank = 0xa5a5a5a5a5a5a5a5

func (p *pair) wipe() { blacken(p.reader.mem) }

func blacken(m []byte) {
	binary.LittleEndian.PutUint64(m, blank)
	for n := 8; n < len(m); n *= 2 {
		copy(m[n:], m[:n])
	}
}

func newQP(tb testing.TB, pd *rdma.PD, o rdma.QPOptions) *rdma.QP {
	tb.Helper()
	q, err := pd.NewQP(o)
	if err != nil {
		tb.Fatal(err)
	}
	closeAtEnd(tb, "queue pair", q.Close)
	return q
}

// path leads from n to q of other.
func (n *node) path(other *node, qpn uint32) rdma.Path {
	return rdma.Path{
		Port: 1, GIDIndex: uint8(n.gid.Index), HopLimit: 64, Global: true, MTU: min(n.port.ActiveMTU, other.port.ActiveMTU),
		Timeout: 16, RetryCount: 6, RNRRetry: 6, MinRNRTimer: 12, ReadsInitiated: 16, ReadsServed: 16,
		DLID: other.port.LID, DestQPN: qpn, RecvPSN: 0x123456, SendPSN: 0x123456, Access: rdma.RemoteRead, DestGID: other.gid.Addr.As16(),
	}
}

// connect makes a queue pair of the reader, and the owner's that serves it.
func (p *pair) connect(tb testing.TB, o rdma.QPOptions) (reader, owner *rdma.QP) {
	tb.Helper()
	reader, owner = newQP(tb, p.reader.pd, o), newQP(tb, p.owner.pd, rdma.QPOptions{Depth: 1})
	if err := owner.Connect(p.owner.path(p.reader, reader.Num())); err != nil {
		tb.Fatal(err)
	}
	if err := reader.Connect(p.reader.path(p.owner, owner.Num())); err != nil {
		tb.Fatal(err)
	}
	return reader, owner
}

// page is a stretch of the owner's memory, and where it goes.
type page struct{ local, remote, bytes int }

// scatter lays n pages of so many bytes out at random places of both sides,
// none overlapping another on the reader's, with gaps between.
func (p *pair) scatter(n, least, most int) []page {
	r := rand.New(rand.NewPCG(uint64(n), 1))
	pages := make([]page, n)
	total := 0
	for i := range pages {
		pages[i].bytes = (least + r.IntN(most-least+1)) &^ 7
		total += pages[i].bytes
	}
	gap := (len(p.reader.mem) - total) / n &^ 7
	if gap <= 0 {
		panic("the memory is too small")
	}
	at := 0
	for _, i := range r.Perm(n) {
		pages[i].local = at
		at += pages[i].bytes + gap
	}
	for i := range pages {
		pages[i].remote = r.IntN((len(p.owner.mem)-pages[i].bytes)/8) * 8
	}
	return pages
}

func (p *pair) ops(pages []page) []rdma.Op {
	ops := make([]rdma.Op, len(pages))
	for i, g := range pages {
		ops[i] = rdma.Op{
			Local: p.reader.region.Addr() + uint64(g.local), Remote: p.owner.region.Addr() + uint64(g.remote), Len: uint32(g.bytes),
			LKey: p.reader.region.Keys()[0].L, RKey: p.owner.region.Keys()[0].R,
		}
	}
	return ops
}

// verify checks every byte of the reader: the pages hold what the owner has,
// and nothing else was written.
func (p *pair) verify(tb testing.TB, pages []page) {
	tb.Helper()
	m, want := p.reader.mem, make([]byte, len(p.reader.mem))
	blacken(want)
	for _, g := range pages {
		spell(want[g.local:g.local+g.bytes], g.remote)
	}
	if bytes.Equal(m, want) {
		return
	}
	for i, g := range pages {
		if got, want := m[g.local:g.local+g.bytes], want[g.local:g.local+g.bytes]; !bytes.Equal(got, want) {
			tb.Fatalf("page %d has other bytes, such as % x, want % x", i, got[:8], want[:8])
		}
	}
	tb.Fatal("bytes that belong to no page were written")
}

// patient are options that do not give up an emulated machine.
var patient = rdma.ReadOptions{Stall: 20 * time.Second}

// eventually waits for something that another party does.
func eventually(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); {
		if time.Now().After(end) {
			tb.Fatalf("not within 20 s: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

func status(tb testing.TB, err error, want ...rdma.Status) *rdma.CompletionError {
	tb.Helper()
	e, ok := errors.AsType[*rdma.CompletionError](err)
	if !ok {
		tb.Fatalf("error %v, want a completion error", err)
	}
	if slices.Contains(want, e.Status) {
		return e
	}
	tb.Fatalf("status %v, want one of %v: %v", e.Status, want, err)
	return nil
}
