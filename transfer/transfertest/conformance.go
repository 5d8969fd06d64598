package transfertest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
)

const (
	kib = 1 << 10
	mib = 1 << 20
)

// conformance is what every transport must keep while nothing is wrong with the
// wire.
func conformance() []testCase {
	return []testCase{
		{name: "one byte", run: testOneByte},
		{name: "scattered copies of odd sizes", run: testScattered, placed: true},
		{name: "many ranks", run: testRanks, placed: true},
		{name: "ten thousand tiny copies", run: testTiny},
		{name: "copies larger than a frame", run: testLarge, placed: true},
		{name: "no copies", run: testNoCopies},
		{name: "the last bytes of the regions", run: testLastBytes, placed: true},
		{name: "out of range", run: testOutOfRange, placed: true},
		{name: "the peer has less than it said", run: testLyingPeer},
		{name: "no seals", run: testNoSeals},
		{name: "seals that are not held", run: testNotHeld, placed: true},
		{name: "seal changed while the read runs", run: testSealChanged, placed: true},
		{name: "pages reused while reads run", run: testReuse, placed: true},
		{name: "another life", run: testIdentity},
		{name: "not the peer's descriptor", run: testDescriptor},
		{name: "concurrent reads on one link", run: testConcurrent},
		{name: "context that has ended", run: testEnded},
		{name: "cancelled at random times", run: testCancel, placed: true},
		{name: "link closed while reads run", run: testCloseLink, placed: true},
		{name: "reader closed while reads run", run: testCloseReader},
		{name: "owner closed while reads run", run: testCloseOwner, placed: true},
		{name: "closed twice, and used after", run: testClosed},
		{name: "nothing is left open", run: testLeaks},
	}
}

func testOneByte(t testing.TB, f Factory) {
	p := newPair(t, f, 1, 64*kib)
	for _, c := range [][3]int64{{0, 0, 1}, {1, 2, 1}, {4095, 4097, 1}, {64*kib - 1, 64*kib - 1, 1}} {
		copies := one(c[0], c[1], c[2])
		want := p.before().apply(p, copies)
		if err := p.read(copies); err != nil {
			t.Fatalf("Read(%+v): %v", copies, err)
		}
		want.compare(t, p)
	}
}

func testScattered(t testing.TB, f Factory) {
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 1))
	p := newPair(t, f, 1, 2*mib)
	for _, shape := range []struct {
		copies   int
		maxBytes int64
	}{{3, mib}, {31, 64 * kib}, {257, 8 * kib}, {1025, 2 * kib}, {3000, 100}} {
		copies := scattered(rng, 0, 2*mib, shape.copies, shape.maxBytes)
		want := p.before().apply(p, copies)
		if err := p.read(copies); err != nil {
			t.Fatalf("Read of %d copies, seed %d: %v", shape.copies, seed, err)
		}
		want.compare(t, p)
	}
}

func testRanks(t testing.TB, f Factory) {
	const ranks = 8
	rng := rand.New(rand.NewPCG(rand.Uint64(), 2))
	p := newPair(t, f, ranks, 256*kib)
	var copies []transfer.Copy
	for r := range id.Rank(ranks) {
		copies = append(copies, scattered(rng, r, 256*kib, 20, 8*kib)...)
	}
	rng.Shuffle(len(copies), func(i, j int) { copies[i], copies[j] = copies[j], copies[i] })
	want := p.before().apply(p, copies)
	if err := p.read(copies); err != nil {
		t.Fatal(err)
	}
	want.compare(t, p)
}

func testTiny(t testing.TB, f Factory) {
	rng := rand.New(rand.NewPCG(rand.Uint64(), 3))
	p := newPair(t, f, 1, mib)
	copies := scattered(rng, 0, mib, 10_000, 9)
	want := p.before().apply(p, copies)
	if err := p.read(copies); err != nil {
		t.Fatal(err)
	}
	want.compare(t, p)
}

func testLarge(t testing.TB, f Factory) {
	p := newPair(t, f, 1, 4*mib)
	copies := []transfer.Copy{
		{Remote: 13, Local: 7, Bytes: 3*mib + 5},
		{Remote: 4*mib - 100, Local: 4*mib - 77, Bytes: 77},
	}
	want := p.before().apply(p, copies)
	if err := p.read(copies); err != nil {
		t.Fatal(err)
	}
	want.compare(t, p)
}

func testNoCopies(t testing.TB, f Factory) {
	p := newPair(t, f, 1, 4*kib)
	want := p.before()
	if err := p.read(nil); err != nil {
		t.Errorf("Read without copies under a held seal: %v", err)
	}
	p.owner.local.Seals.Store(sealIndex, 0)
	if err := p.read(nil); !errors.Is(err, transfer.ErrStale) {
		t.Errorf("Read without copies under a seal that is gone: %v, want ErrStale", err)
	}
	want.compare(t, p)
}

func testLastBytes(t testing.TB, f Factory) {
	const size = 2*mib + 4*kib
	p := newPair(t, f, 2, size)
	copies := []transfer.Copy{
		{Rank: 1, Remote: size - 1, Local: size - 1, Bytes: 1},
		{Rank: 1, Remote: size - 300, Local: size - 301, Bytes: 300},
		{Rank: 0, Remote: 0, Local: 0, Bytes: size},
	}
	want := p.before().apply(p, copies)
	if err := p.read(copies); err != nil {
		t.Fatal(err)
	}
	want.compare(t, p)
}

func testOutOfRange(t testing.TB, f Factory) {
	p := newPair(t, f, 2, 64*kib)
	theirs, ours := p.owner.local.Arenas[0].Size(), p.reader.local.Arenas[0].Size()
	before := p.before()
	bad := map[string]transfer.Copy{
		"remote end beyond the arena":         {Remote: theirs - 10, Bytes: 11},
		"remote start beyond the arena":       {Remote: theirs, Bytes: 1},
		"remote offset right in 32 bits":      {Remote: 1 << 32, Bytes: 1},
		"remote offset negative":              {Remote: -1, Bytes: 2},
		"remote offset and length overflow":   {Remote: math.MaxInt64 - 5, Bytes: 10},
		"remote offset the least number":      {Remote: math.MinInt64, Bytes: 1},
		"local end beyond the arena":          {Local: ours - 10, Bytes: 11},
		"local start beyond the arena":        {Local: ours, Bytes: 1},
		"local offset right in 32 bits":       {Local: 1 << 32, Bytes: 1},
		"local offset negative":               {Local: -1, Bytes: 2},
		"local offset and length overflow":    {Local: math.MaxInt64 - 5, Bytes: 10},
		"no bytes":                            {Bytes: 0},
		"negative bytes":                      {Remote: 100, Local: 100, Bytes: -50},
		"the most negative bytes":             {Bytes: math.MinInt64},
		"the most bytes":                      {Bytes: math.MaxInt64},
		"length right in 32 bits":             {Bytes: 1<<32 + 1},
		"rank that neither has":               {Rank: 2, Bytes: 1},
		"negative rank":                       {Rank: -1, Bytes: 1},
		"rank that would be right in 32 bits": {Rank: 1 << 32, Bytes: 1},
	}
	for name, c := range bad {
		// Beside a good copy, of which nothing may be written either.
		for _, copies := range [][]transfer.Copy{{c}, {{Remote: 5, Local: 6, Bytes: 7}, c}, {c, {Remote: 5, Local: 6, Bytes: 7}}} {
			if err := p.read(copies); !errors.Is(err, transfer.ErrRange) {
				t.Errorf("%s, %d copies: %v, want ErrRange", name, len(copies), err)
			}
		}
	}
	seals := []transfer.Seal{p.seals[0], {Index: memory.Words, Value: p.seals[0].Value}}
	if err := within(p.link, seals, one(0, 0, 1)); !errors.Is(err, transfer.ErrRange) {
		t.Errorf("seal word beyond the table: %v, want ErrRange", err)
	}
	before.compare(t, p)
	if err := p.read(one(0, 0, 10)); err != nil {
		t.Errorf("a good read afterwards: %v", err)
	}
}

func testLyingPeer(t testing.TB, f Factory) {
	p := newPair(t, f, 1, 64*kib)
	size := p.owner.local.Arenas[0].Size()
	before := p.before()
	peer := p.owner.peer()
	peer.ArenaBytes = map[id.Rank]int64{0: 1 << 40, 1: 1 << 40}
	link, err := p.reader.transport.Open(context.Background(), peer)
	if err != nil {
		return // refusing it is as good
	}
	defer shut(t, link.Close)
	for _, c := range []transfer.Copy{{Remote: size, Bytes: 1}, {Remote: size - 5, Bytes: 10}, {Remote: 1 << 39, Bytes: 100}} {
		if err := within(link, p.seals, []transfer.Copy{c}); err == nil {
			t.Errorf("Read(%+v) beyond the owner's arena: no error", c)
		}
	}
	before.compare(t, p)
}

func testNoSeals(t testing.TB, f Factory) {
	p := newPair(t, f, 1, 4*kib)
	before := p.before()
	for _, seals := range [][]transfer.Seal{nil, {}} {
		err := within(p.link, seals, one(0, 0, 10))
		if err == nil {
			t.Error("Read without a seal: no error")
		} else if _, ok := errors.AsType[*transfer.Error](err); !ok {
			t.Errorf("Read without a seal: %v (%T) is no *transfer.Error", err, err)
		}
	}
	before.compare(t, p)
}

func testNotHeld(t testing.TB, f Factory) {
	p := newPair(t, f, 1, 256*kib)
	held, life := p.seals[0], p.owner.local.Life
	second := p.hold(sealIndex+1, sealSeq+1)
	otherSeq, _ := id.SealValue(life.Incarnation, sealSeq+5)
	otherLife, _ := id.SealValue(life.Incarnation+1, sealSeq)
	copies := []transfer.Copy{{Bytes: 100 * kib}, {Remote: 200 * kib, Local: 200 * kib, Bytes: 10}}
	for name, seals := range map[string][]transfer.Seal{
		"never set":             {{Index: 100, Value: held.Value}},
		"another sequence":      {{Index: sealIndex, Value: otherSeq}},
		"another life":          {{Index: sealIndex, Value: otherLife}},
		"another word":          {{Index: sealIndex + 1, Value: held.Value}},
		"value 0 of a free one": {{Index: 100, Value: 0}},
		"first of two":          {{Index: 100, Value: 1}, held},
		"last of three":         {held, second, {Index: 100, Value: 1}},
	} {
		err := within(p.link, seals, copies)
		if !errors.Is(err, transfer.ErrStale) {
			t.Errorf("seal %s: %v, want ErrStale", name, err)
		}
		wholeError(t, f, p, err, transfer.Bytes(copies))
	}
	want := p.before().apply(p, copies)
	if err := within(p.link, []transfer.Seal{held, second, held}, copies); err != nil {
		t.Errorf("seals that are held: %v", err)
	}
	want.compare(t, p)
	p.owner.local.Seals.Store(sealIndex, 0)
	if err := p.read(copies); !errors.Is(err, transfer.ErrStale) {
		t.Errorf("seal ended: %v, want ErrStale", err)
	}
	p.hold(sealIndex, sealSeq+1)
	if err := p.read(copies); !errors.Is(err, transfer.ErrStale) {
		t.Errorf("seal word used again: %v, want ErrStale", err)
	}
}

// long is a read that takes a while with little memory: the arena over and
// over, to the same place. Its first byte is 0 there before and not after.
func (p *pair) long(size int64, times int) []transfer.Copy {
	p.owner.put(0, []byte{0xa5})
	p.reader.put(0, []byte{0})
	copies := make([]transfer.Copy, times)
	for i := range copies {
		copies[i] = transfer.Copy{Bytes: size}
	}
	return copies
}

// started waits until the first byte of a long read has landed, or ended says
// that there is nothing to wait for.
func (p *pair) started(t testing.TB, ended func() bool) {
	t.Helper()
	eventually(t, "no byte lands", func() bool { return p.reader.stretch(0, 0, 1)[0] != 0 || ended() })
}

func testSealChanged(t testing.TB, f Factory) {
	const size, rounds = mib, 10
	p := newPair(t, f, 1, size)
	for round := range rounds {
		times := 48 * (1 + round) // longer, where this machine is too busy to see a short one run
		copies := p.long(size, times)
		p.seals[0] = p.hold(sealIndex, sealSeq)
		done := make(chan error, 1)
		go func() { done <- p.read(copies) }()
		p.started(t, func() bool { return len(done) > 0 })
		p.owner.local.Seals.Store(sealIndex, 0)
		err := wait(t, "Read", done)
		switch {
		case err == nil: // it had looked at the word just before: try again
		case errors.Is(err, transfer.ErrStale):
			wholeError(t, f, p, err, int64(size*times))
			return
		default:
			t.Fatalf("Read: %v, want ErrStale", err)
		}
	}
	t.Errorf("in none of %d rounds did a read notice that its seal ended after its first byte", rounds)
}

// testReuse is the promise itself: the owner ends the seal, then reuses the
// pages, at any moment of a read; a read that says it is right is right.
func testReuse(t testing.TB, f Factory) {
	const size, rounds = 256 * kib, 40
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 4))
	p := newPair(t, f, 1, size)
	copies := slices.Repeat(scattered(rng, 0, size, 40, 20*kib), 4) // more time, not more memory
	took := time.Millisecond
	var right, stale int
	for round := range rounds {
		p.owner.fill(0, uint64(round)+50)
		p.seals[0] = p.hold(sealIndex, id.Sequence(round+1))
		want := p.before().apply(p, copies)
		done := make(chan error, 1)
		started := time.Now()
		var elapsed time.Duration
		go func() {
			err := p.read(copies)
			elapsed = time.Since(started)
			done <- err
		}()
		for end := started.Add(time.Duration(rng.Int64N(2 * int64(took)))); time.Now().Before(end); {
			runtime.Gosched()
		}
		p.owner.local.Seals.Store(sealIndex, 0)
		p.owner.clear() // other data, as soon as the rule allows
		err := wait(t, "Read", done)
		switch {
		case err == nil:
			right++
			want.compare(t, p)
			if t.Failed() {
				t.Fatalf("round %d, seed %d: a read that held delivered bytes of other data", round, seed)
			}
			took = min(max(elapsed, 50*time.Microsecond), 5*time.Millisecond)
		case errors.Is(err, transfer.ErrStale):
			stale++
		default:
			t.Fatalf("round %d: %v", round, err)
		}
	}
	t.Logf("%d reads were right, %d stale", right, stale)
}

func testIdentity(t testing.TB, f Factory) {
	p := newPair(t, f, 1, 4*kib)
	before := p.before()
	for name, life := range map[string]id.Life{
		"an earlier life":   {Node: "owner", Incarnation: p.owner.local.Life.Incarnation - 1},
		"a later life":      {Node: "owner", Incarnation: p.owner.local.Life.Incarnation + 1},
		"no life":           {Node: "owner"},
		"another node":      {Node: "owner2", Incarnation: p.owner.local.Life.Incarnation},
		"the reader itself": p.reader.local.Life,
	} {
		peer := p.owner.peer()
		peer.Life = life
		link, err := p.reader.transport.Open(context.Background(), peer)
		if err == nil {
			err = within(link, p.seals, one(0, 0, 10))
			shut(t, link.Close)
		}
		if !errors.Is(err, transfer.ErrIdentity) {
			t.Errorf("link to %s: %v, want ErrIdentity", name, err)
		}
	}
	before.compare(t, p)
}

func testDescriptor(t testing.TB, f Factory) {
	p := newPair(t, f, 1, 4*kib)
	descriptor := p.owner.transport.Descriptor()
	if len(descriptor) == 0 || len(descriptor) > 4*kib {
		t.Errorf("descriptor of %d bytes, want 1 to 4 KiB", len(descriptor))
	}
	if string(descriptor) != string(p.owner.transport.Descriptor()) {
		t.Error("the descriptor is not constant")
	}
	for name, d := range map[string][]byte{
		"none": nil, "zeros": make([]byte, 100), "letters": []byte("qqqqqqqqqqqqqqqqqqqq"), "huge": make([]byte, 10*kib),
		"cut off": descriptor[:len(descriptor)/2], "longer": append(slices.Clone(descriptor), "xxxx"...),
	} {
		peer := p.owner.peer()
		peer.Descriptor = d
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		link, err := p.reader.transport.Open(ctx, peer)
		cancel()
		if err == nil {
			t.Errorf("Open with a descriptor that is %s: no error", name)
			shut(t, link.Close)
		}
		if name == "none" && !errors.Is(err, transfer.ErrUnavailable) {
			t.Errorf("Open of a peer without the transport: %v, want ErrUnavailable", err)
		}
	}
}

func testConcurrent(t testing.TB, f Factory) {
	const readers, rounds, part = 16, 4, 128 * kib
	p := newPair(t, f, 1, readers*part)
	want := p.before()
	parts := make([][]transfer.Copy, readers)
	rng := rand.New(rand.NewPCG(rand.Uint64(), 5))
	for i := range parts {
		parts[i] = scattered(rng, 0, part, 50, 3*kib)
		for j := range parts[i] { // read from anywhere, into a part of its own
			parts[i][j].Remote += int64(rng.IntN(readers)) * part
			parts[i][j].Local += int64(i) * part
		}
		want.apply(p, parts[i])
	}
	var work sync.WaitGroup
	for _, copies := range parts {
		work.Go(func() {
			for range rounds {
				if err := p.read(copies); err != nil {
					t.Errorf("Read: %v", err)
				}
			}
		})
	}
	work.Wait()
	want.compare(t, p)
}

func testEnded(t testing.TB, f Factory) {
	p := newPair(t, f, 1, 64*kib)
	before := p.before()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	err := p.link.Read(ctx, p.seals, one(0, 0, 60*kib))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Read with a context that has ended: %v, want context.Canceled", err)
	}
	wholeError(t, f, p, err, 60*kib)
	before.compare(t, p)
	if link, err := p.reader.transport.Open(ctx, p.owner.peer()); !errors.Is(err, context.Canceled) {
		t.Errorf("Open with a context that has ended: %v, want context.Canceled", err)
		if err == nil {
			shut(t, link.Close)
		}
	}
	cause := errors.New("the engine lost interest")
	ctx2, cancel2 := context.WithCancelCause(context.Background())
	cancel2(cause)
	if err := p.link.Read(ctx2, p.seals, one(0, 0, 1)); !errors.Is(err, cause) || !errors.Is(err, context.Canceled) {
		t.Errorf("Read with a cause: %v, want context.Canceled and the cause", err)
	}
	if err := p.read(one(0, 0, 10)); err != nil {
		t.Errorf("a read afterwards: %v", err)
	}
}

// testCancel cancels reads and uses the destination for something else as soon
// as Read has returned, as the page allocator does.
func testCancel(t testing.TB, f Factory) {
	const size, rounds, least = 512 * kib, 60, 20
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 6))
	p := newPair(t, f, 1, size)
	owners := [2][]byte{p.reader.stretch(0, 0, size/2), p.reader.stretch(0, size/2, size/2)} // what the new owner of each half wrote
	took := time.Millisecond
	cancelled := 0
	for round := 0; round < rounds || cancelled < least && round < 20*rounds; round++ {
		half := int64(round % 2)
		copies := scattered(rng, 0, size/2, 30, 30*kib)
		for i := range copies {
			copies[i].Local += half * size / 2
		}
		copies = slices.Repeat(copies, 10) // more time, not more memory
		ctx, cancel := context.WithCancel(context.Background())
		started := time.Now()
		after := time.Duration(rng.Int64N(int64(2 * took)))
		var canceller sync.WaitGroup
		canceller.Go(func() {
			for time.Since(started) < after {
				runtime.Gosched() // a timer is too coarse for a fast transport
			}
			cancel()
		})
		err := p.link.Read(ctx, p.seals, copies)
		elapsed := time.Since(started)
		fill(owners[half][:4*kib], uint64(round))
		p.reader.put(half*size/2, owners[half]) // at once where the first bytes would land
		canceller.Wait()
		switch {
		case err == nil:
			took = min(max(elapsed, 50*time.Microsecond), 5*time.Millisecond)
		case errors.Is(err, context.Canceled):
			cancelled++
			wholeError(t, f, p, err, transfer.Bytes(copies))
		default:
			t.Fatalf("round %d, seed %d: %v, want nil or the context's error", round, seed, err)
		}
		other := 1 - half
		differ(t, fmt.Sprintf("round %d, seed %d, the half given away before", round, seed), p.reader.view(0)[other*size/2:][:size/2], owners[other])
		if t.Failed() {
			return
		}
	}
	shut(t, p.link.Close)
	differ(t, "after Close", p.reader.view(0), slices.Concat(owners[0], owners[1]))
	t.Logf("%d reads were cancelled", cancelled)
	if cancelled == 0 {
		t.Error("no read was cancelled")
	}
}

// reading runs reads of the whole arena until each has failed, and returns when
// all are under way.
func (p *pair) reading(t testing.TB, link transfer.Link, size int64, n int) <-chan error {
	t.Helper()
	failed := make(chan error, n)
	copies := p.long(size, 8)
	for range n {
		go func() {
			for {
				if err := within(link, p.seals, copies); err != nil {
					failed <- err
					return
				}
			}
		}()
	}
	p.started(t, func() bool { return len(failed) > 0 })
	return failed
}

func testCloseLink(t testing.TB, f Factory) {
	testCloseHere(t, f, func(p *pair) error { return p.link.Close() })
}

func testCloseReader(t testing.TB, f Factory) {
	testCloseHere(t, f, func(p *pair) error { return p.reader.transport.Close() })
}

// testCloseHere: once Close has returned, no byte lands.
func testCloseHere(t testing.TB, f Factory, end func(*pair) error) {
	const size, reads = mib, 4
	for range 3 {
		p := newPair(t, f, 1, size)
		failed := p.reading(t, p.link, size, reads)
		shut(t, func() error { return end(p) })
		p.reader.fill(0, 77)
		want := p.before()
		for range reads {
			if err := wait(t, "Read after Close", failed); !errors.Is(err, transfer.ErrClosed) {
				t.Errorf("Read while closed: %v, want ErrClosed", err)
			}
		}
		want.compare(t, p)
	}
}

func testCloseOwner(t testing.TB, f Factory) {
	const size, reads = mib, 3
	p := newPair(t, f, 1, size)
	failed := p.reading(t, p.link, size, reads)
	shut(t, p.owner.transport.Close)
	p.owner.clear() // nobody reads it any more
	limit := Calm(transfer.Limits{}).Stall + patience/4
	started := time.Now()
	for range reads {
		err := wait(t, "Read of a peer that is gone", failed)
		if took := time.Since(started); took > limit {
			t.Errorf("the error took %v, want the stall time", took)
		}
		e, ok := errors.AsType[*transfer.Error](err)
		switch {
		case !ok:
			t.Errorf("error %v (%T) is no *transfer.Error", err, err)
		case e.Peer != p.owner.local.Life || e.Transport != f.Name:
			t.Errorf("error names %s and %s, want %s and %s", e.Peer, e.Transport, p.owner.local.Life, f.Name)
		case !strings.Contains(err.Error(), p.owner.local.Life.String()):
			t.Errorf("error %q does not name the peer %s", err, p.owner.local.Life)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if link, err := p.reader.transport.Open(ctx, p.owner.peer()); err == nil {
		t.Error("Open of a peer that is gone: no error")
		shut(t, link.Close)
	}
}

func testClosed(t testing.TB, f Factory) {
	p := newPair(t, f, 1, 4*kib)
	other := p.open(t)
	before := p.before()
	for range 2 {
		shut(t, p.link.Close)
	}
	if err := p.read(one(0, 0, 10)); !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("Read on a closed link: %v, want ErrClosed", err)
	}
	before.compare(t, p)
	if err := within(other, p.seals, one(0, 0, 10)); err != nil {
		t.Errorf("Read on another link: %v", err)
	}
	for range 2 {
		shut(t, p.reader.transport.Close)
	}
	if err := within(other, p.seals, one(0, 0, 10)); !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("Read on a link of a closed transport: %v, want ErrClosed", err)
	}
	if _, err := p.reader.transport.Open(context.Background(), p.owner.peer()); !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("Open on a closed transport: %v, want ErrClosed", err)
	}
}

func testLeaks(t testing.TB, f Factory) {
	const rounds = 50
	p := newPair(t, f, 1, 64*kib)
	cycle := func() {
		link, err := p.reader.transport.Open(context.Background(), p.owner.peer())
		if err != nil {
			t.Fatal(err)
		}
		if err := within(link, p.seals, one(0, 0, 64*kib)); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_ = link.Read(ctx, p.seals, one(0, 0, 64*kib)) // its failure must not leak either
		shut(t, link.Close)
		third := newSide(t, "third", nil, 0, 0)
		tr, err := f.Start(third.local, Calm(transfer.Limits{}))
		if err != nil {
			t.Fatal(err)
		}
		shut(t, tr.Close)
		shut(t, third.local.Seals.Close) // the cleanup closes it again
	}
	cycle() // what is opened once and kept
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	for range rounds {
		cycle()
	}
	eventually(t, "goroutines are left", func() bool { return runtime.NumGoroutine() <= goroutines })
	eventually(t, "files are left open", func() bool { return openFiles(t) <= files })
}

func openFiles(t testing.TB) int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
