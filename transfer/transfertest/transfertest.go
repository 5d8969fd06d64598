// Package transfertest says what a transport must keep, as a suite: [Run]. The
// in-memory transport ([Network], [Memory]) and the faulty wrapper ([Faulty])
// pass the same suite as the real ones, so that what is tested with them holds
// with those. Where the arenas of the two sides lie is an input: in host memory,
// on an emulated device ([Device], [RunStaged]), or on a real one.
//
// The suite compares whole arenas, byte by byte, with what a naive copier of
// its own expects, so that a byte beside a destination is found too. It knows
// nothing of how a transport works; what needs the inside (frames, queue pairs,
// mute servers) is tested beside the transport. A transport's own test is
//
//	func TestSuite(t *testing.T) {
//		transfertest.Run(t, transfertest.Factory{
//			Name: mine.Name,
//			Start: func(local transfer.Local, limits transfer.Limits) (transfer.Transport, error) {
//				return mine.Listen(mine.Options{Local: local, Limits: limits})
//			},
//		})
//	}
package transfertest

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
)

// TestedFile names the environment variable with the path of a file to which
// Run appends a line with the transport's name when the suite has passed. A
// test run can so tell which transports it has tested.
const TestedFile = "KVFERRY_TESTED_FILE"

// Factory starts the transport that is tested.
type Factory struct {
	// Name is what Transport.Name must say.
	Name string
	// Start starts a transport that serves local, with these limits if it has
	// any. The suite closes it. If it wraps transfer.ErrUnavailable the suite is
	// skipped.
	Start func(local transfer.Local, limits transfer.Limits) (transfer.Transport, error)
	// Owner and Reader are where the arenas of the two sides lie; nil: [Host].
	Owner, Reader Place
}

func (f Factory) owner(t testing.TB, ranks int, size int64) *side {
	t.Helper()
	return newSide(t, "owner", f.Owner, ranks, size)
}

func (f Factory) reader(t testing.TB, ranks int, size int64) *side {
	t.Helper()
	return newSide(t, "reader", f.Reader, ranks, size)
}

// testCase is one claim. It takes a testing.TB, so that the tests of this
// package can see it fail.
type testCase struct {
	name   string
	run    func(t testing.TB, f Factory)
	placed bool // it is another one where only one side's arenas are on a device
}

// Run runs the suite, and its fault half: the same transport below [Faulty].
func Run(t *testing.T, factory Factory) {
	available(t, factory)
	t.Run("conformance", func(t *testing.T) {
		for _, c := range conformance() {
			t.Run(c.name, func(t *testing.T) { c.run(t, factory) })
		}
	})
	t.Run("faults", func(t *testing.T) {
		for _, c := range faults() {
			t.Run(c.name, func(t *testing.T) { c.run(t, factory) })
		}
	})
	if !t.Failed() {
		record(t, factory.Name)
	}
}

// available skips the suite if this machine cannot run the transport.
func available(t *testing.T, f Factory) {
	t.Helper()
	for _, s := range []*side{f.owner(t, 1, 4096), f.reader(t, 1, 4096)} {
		tr, err := f.Start(s.local, Calm(transfer.Limits{}))
		if errors.Is(err, transfer.ErrUnavailable) {
			t.Skipf("%s: %v", f.Name, err)
		}
		if err != nil {
			t.Fatalf("start %s: %v", f.Name, err)
		}
		if err := tr.Close(); err != nil {
			t.Fatalf("close %s: %v", f.Name, err)
		}
	}
}

func record(t *testing.T, name string) {
	path := os.Getenv(TestedFile)
	if path == "" {
		return
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(name + "\n"); err != nil {
		t.Error(err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

// Calm fills the limits of which a test says nothing: shorter than patience, and
// longer than a busy machine stands still.
func Calm(l transfer.Limits) transfer.Limits {
	l.Dial, l.Stall = cmp.Or(l.Dial, patience/3), cmp.Or(l.Stall, patience/3)
	return l
}

// patience is how long the suite waits for what must come, on a busy machine too.
const patience = time.Minute

// Seals of the tests: publication sequences of the owner, one word each.
const (
	sealIndex = 7
	sealSeq   = 41
)

// side is one node: arenas, seal table, and the transport once it is started.
type side struct {
	local     transfer.Local
	transport transfer.Transport
}

func newSide(t testing.TB, node id.Node, place Place, ranks int, size int64) *side {
	t.Helper()
	if place == nil {
		place = Host
	}
	seals, err := memory.NewSealTable()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shut(t, seals.Close) })
	s := &side{local: transfer.Local{
		Life:   id.Life{Node: node, Incarnation: id.Incarnation(rand.Uint64() | 1)},
		Arenas: map[id.Rank]memory.Arena{},
		Seals:  seals,
	}}
	for r := range id.Rank(ranks) {
		arena, err := place(size)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { shut(t, arena.Close) })
		s.local.Arenas[r] = arena
	}
	return s
}

func (s *side) start(t testing.TB, f Factory) {
	t.Helper()
	tr, err := f.Start(s.local, Calm(transfer.Limits{}))
	if err != nil {
		t.Fatalf("start %s: %v", f.Name, err)
	}
	t.Cleanup(func() { shut(t, tr.Close) })
	if tr.Name() != f.Name {
		t.Errorf("Name() = %q, want %q", tr.Name(), f.Name)
	}
	s.transport = tr
}

// peer is what others know of the side.
func (s *side) peer() transfer.Peer {
	p := transfer.Peer{Life: s.local.Life, Descriptor: s.transport.Descriptor(), ArenaBytes: map[id.Rank]int64{}}
	for r, a := range s.local.Arenas {
		p.ArenaBytes[r] = a.Size()
	}
	return p
}

// bytes are those of an arena, as they are now.
func (s *side) bytes(r id.Rank) []byte { return s.stretch(r, 0, s.local.Arenas[r].Size()) }

func (s *side) stretch(r id.Rank, at, n int64) []byte {
	b := make([]byte, n)
	Peek(s.local.Arenas[r], at, b)
	return b
}

// put writes b to offset at of the arena of rank 0.
func (s *side) put(at int64, b []byte) { Poke(s.local.Arenas[0], at, b) }

// view is an arena to be looked at.
func (s *side) view(r id.Rank) []byte { return view(s.local.Arenas[r], 0, s.local.Arenas[r].Size()) }

// fill fills an arena with bytes that depend on seed and place.
func (s *side) fill(r id.Rank, seed uint64) {
	edit(s.local.Arenas[r], 0, s.local.Arenas[r].Size(), func(b []byte) { fill(b, seed) })
}

// clear fills the arena of rank 0 with zeros.
func (s *side) clear() {
	edit(s.local.Arenas[0], 0, s.local.Arenas[0].Size(), func(b []byte) { clear(b) })
}

// pair is an owner, a reader, and a link from the reader to the owner.
type pair struct {
	owner, reader *side
	link          transfer.Link
	seals         []transfer.Seal // held
}

// newPair fills the owner's arenas with bytes that tell their place, the
// reader's with others, and holds one seal.
func newPair(t testing.TB, f Factory, ranks int, size int64) *pair {
	t.Helper()
	p := &pair{owner: f.owner(t, ranks, size), reader: f.reader(t, ranks, size)}
	for r := range p.owner.local.Arenas {
		p.owner.fill(r, uint64(r)+1)
		p.reader.fill(r, uint64(r)+1001)
	}
	p.seals = []transfer.Seal{p.hold(sealIndex, sealSeq)}
	p.owner.start(t, f)
	p.reader.start(t, f)
	p.link = p.open(t)
	return p
}

func (p *pair) open(t testing.TB) transfer.Link {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	link, err := p.reader.transport.Open(ctx, p.owner.peer())
	if err != nil {
		t.Fatalf("Open: %v", err)
	}
	t.Cleanup(func() { shut(t, link.Close) })
	return link
}

// hold sets a seal word of the owner.
func (p *pair) hold(index uint32, seq id.Sequence) transfer.Seal {
	value, _ := id.SealValue(p.owner.local.Life.Incarnation, seq)
	p.owner.local.Seals.Store(index, value)
	return transfer.Seal{Index: index, Value: value}
}

// read reads with a deadline that only a hang meets.
func (p *pair) read(copies []transfer.Copy) error {
	return within(p.link, p.seals, copies)
}

func within(link transfer.Link, seals []transfer.Seal, copies []transfer.Copy) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return link.Read(ctx, seals, copies)
}

// image is the reader's arenas as they must look afterwards.
type image map[id.Rank][]byte

// before is the image of the reader's arenas now.
func (p *pair) before() image {
	m := image{}
	for r := range p.reader.local.Arenas {
		m[r] = p.reader.bytes(r)
	}
	return m
}

// apply does what the copies mean.
func (m image) apply(p *pair, copies []transfer.Copy) image {
	owner := image{}
	for r := range p.owner.local.Arenas {
		owner[r] = p.owner.view(r)
	}
	for _, c := range copies {
		copy(m[c.Rank][c.Local:][:c.Bytes], owner[c.Rank][c.Remote:][:c.Bytes])
	}
	return m
}

// compare finds the first byte in which the reader's arenas differ from m.
func (m image) compare(t testing.TB, p *pair) {
	t.Helper()
	for r, want := range m {
		differ(t, "rank "+string(rune('0'+int(r))), p.reader.view(r), want)
	}
}

func differ(t testing.TB, what string, got, want []byte) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d bytes, want %d", what, len(got), len(want))
	}
	if string(got) == string(want) { // fast path; the loop tells where
		return
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("%s: byte %d is %#x, want %#x", what, i, got[i], want[i])
			return
		}
	}
}

// fill writes bytes that depend on seed and place.
func fill(b []byte, seed uint64) {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	_, _ = rand.NewChaCha8(key).Read(b) // quick under the race detector too
}

// one is a copy of n bytes of rank 0 from the place remote to the place local.
func one(remote, local, n int64) []transfer.Copy {
	return []transfer.Copy{{Remote: remote, Local: local, Bytes: n}}
}

// scattered cuts the two arenas into stretches of random sizes, and pairs them
// at random: each byte of a destination is written once.
func scattered(rng *rand.Rand, rank id.Rank, size int64, n int, maxBytes int64) []transfer.Copy {
	slot := size / int64(n)
	remote, local := rng.Perm(n), rng.Perm(n)
	copies := make([]transfer.Copy, n)
	for i := range copies {
		length := 1 + rng.Int64N(min(maxBytes, slot))
		copies[i] = transfer.Copy{
			Rank:   rank,
			Remote: int64(remote[i])*slot + rng.Int64N(slot-length+1),
			Local:  int64(local[i])*slot + rng.Int64N(slot-length+1),
			Bytes:  length,
		}
	}
	return copies
}

// wholeError checks the form of a read's error.
func wholeError(t testing.TB, f Factory, p *pair, err error, total int64) {
	t.Helper()
	e, ok := errors.AsType[*transfer.Error](err)
	if !ok {
		t.Errorf("error %v (%T) is no *transfer.Error", err, err)
		return
	}
	if e.Transport != f.Name || e.Peer != p.owner.local.Life {
		t.Errorf("error names %s and %s, want %s and %s", e.Transport, e.Peer, f.Name, p.owner.local.Life)
	}
	if e.Total != total || e.Done < 0 || e.Done > e.Total {
		t.Errorf("error says %d of %d bytes, want at most %d of %d", e.Done, e.Total, total, total)
	}
}

func shut(t testing.TB, end func() error) {
	if err := end(); err != nil {
		t.Errorf("Close: %v", err)
	}
}

// eventually polls until done, and fails with what after patience.
func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	end := time.Now().Add(patience)
	for !done() {
		if time.Now().After(end) {
			t.Fatalf("%s: still not after %v", what, patience)
		}
		time.Sleep(100 * time.Microsecond)
	}
}

// wait receives from c, and fails with what after patience.
func wait[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		t.Fatalf("%s: nothing after %v", what, patience)
		panic("unreachable")
	}
}
