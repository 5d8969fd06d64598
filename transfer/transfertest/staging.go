package transfertest

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
)

// lateness is what a copy of the suite's devices waits at least before it
// begins, so that who does not wait for it is found out.
const lateness = 50 * time.Microsecond

// errDevice is what the suite's devices die of.
var errDevice = errors.New("an illegal address was met, restart the process")

// RunStaged runs the suite with arenas in the memory of emulated devices at both
// sides, and what must hold of a device's copies besides; and that part of both
// which hangs on where the bytes are with a device at the owner alone, and at the
// reader alone. The factory's places are not used. A transport that moves device
// memory by itself passes as well as one that stages.
func RunStaged(t *testing.T, factory Factory) {
	for _, where := range []struct {
		name          string
		owner, reader bool // on a device
	}{{"device to host", true, false}, {"host to device", false, true}, {"device to device", true, true}} {
		t.Run(where.name, func(t *testing.T) {
			device := NewDevice(DeviceOptions{Delay: lateness})
			t.Cleanup(func() { shut(t, device.Close) }) // behind its arenas
			f := factory.placed(device, device, where.owner, where.reader)
			available(t, f)
			cases := append(conformance(), faults()...)
			if !where.owner || !where.reader {
				cases = slices.DeleteFunc(cases, func(c testCase) bool { return !c.placed })
			}
			for _, c := range cases {
				t.Run(c.name, func(t *testing.T) { c.run(t, f) })
			}
			for _, c := range staging() {
				if (where.owner || !c.owner) && (where.reader || !c.reader) {
					t.Run(c.name, func(t *testing.T) { c.run(t, factory, where.owner, where.reader) })
				}
			}
			if c := device.Counts(); c.Live > 0 {
				t.Errorf("%d copies still run", c.Live)
			}
		})
	}
}

// RunScarce is the part of RunStaged that is for transports which stage, and
// which the factory gives the least memory for it: everybody waits for buffers,
// and nobody for ever.
func RunScarce(t *testing.T, factory Factory) {
	available(t, factory)
	for _, c := range staging() {
		t.Run(c.name, func(t *testing.T) { c.run(t, factory, true, true) })
	}
}

// placed puts the arenas of the sides on devices, or into host memory.
func (f Factory) placed(owners, readers *Device, owner, reader bool) Factory {
	f.Owner, f.Reader = nil, nil
	if owner {
		f.Owner = owners.Alloc
	}
	if reader {
		f.Reader = readers.Alloc
	}
	return f
}

// stagedCase is one claim about a pair whose owner, or reader, has its arenas on
// a device.
type stagedCase struct {
	name          string
	owner, reader bool // it needs a device there
	claim         func(t testing.TB, p *stagedPair)
	o             DeviceOptions
	size          int64
	ranks         int
}

// stagedPair is a pair with a device for each side; the other kind of side has
// one that it does not use.
type stagedPair struct {
	*pair
	f       Factory
	devices [2]*Device // of the owner, of the reader
	size    int64
}

func staging() []stagedCase {
	slow := DeviceOptions{Delay: lateness}
	return []stagedCase{
		{name: "a scatter that does not end", reader: true, claim: testHeldScatter, o: slow},
		{name: "a gather that does not end", owner: true, claim: testHeldGather, o: slow},
		{name: "closed while a scatter does not end", reader: true, claim: testHeldClose, o: slow},
		{name: "closed while a gather does not end", owner: true, claim: testHeldOwnerClose, o: slow},
		{name: "the reader's device dies in mid-read", reader: true, claim: testReaderDies, o: slow},
		{name: "the owner's device dies in mid-read", owner: true, claim: testOwnerDies, o: slow},
		{name: "a copy of the reader fails", reader: true, claim: testScatterFails, o: slow},
		{name: "a copy of the owner fails", owner: true, claim: testGatherFails, o: slow},
		{name: "seal changed between gather and send", owner: true, claim: testSealBehindGather, o: slow},
		{name: "no call a page", claim: testCalls, o: slow, ranks: 4},
		{name: "memory that cannot be pinned", claim: testUnpinned, o: DeviceOptions{Pin: errors.New("memory lock limit")}},
		{name: "many reads both ways", claim: testBothWays, o: slow},
	}
}

func (c stagedCase) run(t testing.TB, f Factory, owner, reader bool) {
	p := &stagedPair{size: max(c.size, 2*mib)}
	for i := range p.devices {
		p.devices[i] = NewDevice(c.o)
		t.Cleanup(func() { shut(t, p.devices[i].Close) })
	}
	f = f.placed(p.devices[0], p.devices[1], owner, reader)
	p.f, p.pair = f, newPair(t, f, max(c.ranks, 1), p.size)
	// Whatever fails, nothing is held when the transports are closed.
	t.Cleanup(func() {
		for _, d := range p.devices {
			d.Release()
		}
	})
	c.claim(t, p)
}

// whole is a read of all of rank 0.
func (p *stagedPair) whole() []transfer.Copy { return one(0, 0, p.size) }

// begin starts a read that the test ends.
func (p *stagedPair) begin(copies []transfer.Copy) (cancel context.CancelFunc, done <-chan error) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- p.link.Read(ctx, p.seals, copies) }()
	return cancel, ended
}

// live waits until copies of a device run, or a read has ended before.
func live(t testing.TB, d *Device, ended <-chan error) {
	t.Helper()
	eventually(t, "no copy of the device runs", func() bool { return d.Counts().Live > 0 || len(ended) > 0 })
	if len(ended) > 0 {
		t.Fatalf("the read ended before its copies: %v", <-ended)
	}
}

// quiet wants no copy of the devices to run, and none that nobody waited for.
func (p *stagedPair) quiet(t testing.TB) {
	t.Helper()
	for i, d := range p.devices {
		eventually(t, "copies of device "+string(rune('0'+i))+" run, or were not waited for", func() bool {
			c := d.Counts()
			return c.Live == 0 && c.Unwaited == 0
		})
	}
}

// silent wants that nothing ends for a while; it fails early, never late.
func silent[T any](t testing.TB, what string, c <-chan T) {
	t.Helper()
	select {
	case v := <-c:
		t.Fatalf("%s ended with %v while a copy of its device ran", what, v)
	case <-time.After(30 * time.Millisecond):
	}
}

// testHeldScatter: the read's context ends while the device still writes. Read
// stays, and what it was given stays its own until the device is done.
func testHeldScatter(t testing.TB, p *stagedPair) {
	p.devices[1].Hold(FromHost)
	cancel, done := p.begin(p.whole())
	defer cancel()
	live(t, p.devices[1], done)
	cancel()
	silent(t, "Read", done)
	p.devices[1].Release(FromHost)
	err := wait(t, "Read", done)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Read: %v, want context.Canceled", err)
	}
	if c := p.devices[1].Counts(); c.Live > 0 || c.Unwaited > 0 {
		t.Errorf("Read returned, and %d copies run, %d were not waited for", c.Live, c.Unwaited)
	}
	p.reader.fill(0, 400) // the next owner of the pages
	given := p.before()
	shut(t, p.link.Close)
	p.quiet(t)
	given.compare(t, p.pair)
}

// testHeldGather: the reader's context ends while the owner's device copies;
// the owner goes on as if nothing had been.
func testHeldGather(t testing.TB, p *stagedPair) {
	p.devices[0].Hold(ToHost)
	cancel, done := p.begin(p.whole())
	defer cancel()
	live(t, p.devices[0], done)
	cancel()
	p.devices[0].Release(ToHost)
	if err := wait(t, "Read", done); !errors.Is(err, context.Canceled) {
		t.Errorf("Read: %v, want context.Canceled", err)
	}
	p.reader.fill(0, 401)
	want := p.before().apply(p.pair, p.whole())
	if err := p.read(p.whole()); err != nil {
		t.Errorf("the next read: %v", err)
	}
	want.compare(t, p.pair)
	p.quiet(t)
}

func testHeldClose(t testing.TB, p *stagedPair) {
	p.devices[1].Hold(FromHost)
	cancel, done := p.begin(p.whole())
	defer cancel()
	live(t, p.devices[1], done)
	closed := make(chan error, 1)
	go func() { closed <- p.reader.transport.Close() }()
	silent(t, "Close", closed)
	p.devices[1].Release(FromHost)
	if err := wait(t, "Close", closed); err != nil {
		t.Errorf("Close: %v", err)
	}
	if c := p.devices[1].Counts(); c.Live > 0 || c.Unwaited > 0 || c.Pinned > 0 {
		t.Errorf("Close returned, and %d copies run, %d were not waited for, %d bytes are pinned", c.Live, c.Unwaited, c.Pinned)
	}
	if err := wait(t, "Read", done); !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("Read: %v, want ErrClosed", err)
	}
}

// testHeldOwnerClose: a transport whose Close has returned touches no arena.
func testHeldOwnerClose(t testing.TB, p *stagedPair) {
	p.devices[0].Hold(ToHost)
	cancel, done := p.begin(p.whole())
	defer cancel()
	live(t, p.devices[0], done)
	closed := make(chan error, 1)
	go func() { closed <- p.owner.transport.Close() }()
	silent(t, "Close", closed)
	p.devices[0].Release(ToHost)
	if err := wait(t, "Close", closed); err != nil {
		t.Errorf("Close: %v", err)
	}
	if c := p.devices[0].Counts(); c.Live > 0 || c.Unwaited > 0 || c.Pinned > 0 {
		t.Errorf("Close returned, and %d copies run, %d were not waited for, %d bytes are pinned", c.Live, c.Unwaited, c.Pinned)
	}
	if err := wait(t, "Read", done); err == nil {
		t.Error("Read of a peer that is gone: no error")
	}
}

// midway holds a direction of a device, starts a read, and lets one copy pass.
func (p *stagedPair) midway(t testing.TB, d *Device, of Direction) (done <-chan error) {
	t.Helper()
	d.Hold(of)
	cancel, done := p.begin(p.whole())
	t.Cleanup(cancel)
	live(t, d, done)
	d.Let(of, 1)
	return done
}

func testReaderDies(t testing.TB, p *stagedPair) {
	done := p.midway(t, p.devices[1], FromHost)
	p.devices[1].Kill(errDevice)
	err := wait(t, "Read", done)
	if !errors.Is(err, errDevice) || !strings.Contains(err.Error(), errDevice.Error()) {
		t.Errorf("Read: %v, want what the device says", err)
	}
	wholeError(t, p.f, p.pair, err, p.size)
	if c := p.devices[1].Counts(); c.Live > 0 || c.Unwaited > 0 {
		t.Errorf("Read returned, and %d copies run, %d were not waited for", c.Live, c.Unwaited)
	}
	for range 5 { // as often as it is tried
		if err := p.read(p.whole()); !errors.Is(err, errDevice) {
			t.Errorf("Read on a dead device: %v, want what the device says", err)
		}
	}
	p.quiet(t)
}

func testOwnerDies(t testing.TB, p *stagedPair) {
	done := p.midway(t, p.devices[0], ToHost)
	p.devices[0].Kill(errDevice)
	err := wait(t, "Read", done)
	if err == nil {
		t.Error("Read from a dead device: no error")
	}
	wholeError(t, p.f, p.pair, err, p.size)
	for range 5 {
		err := p.read(p.whole())
		if err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Read from a dead device: %v, want an error in time", err)
		}
	}
	p.quiet(t)
}

func testScatterFails(t testing.TB, p *stagedPair) {
	p.devices[1].Fail(errDevice)
	err := p.read(p.whole())
	if !errors.Is(err, errDevice) {
		t.Errorf("Read: %v, want the error of the copy", err)
	}
	wholeError(t, p.f, p.pair, err, p.size)
	p.devices[1].Fail(nil)
	p.right(t)
}

func testGatherFails(t testing.TB, p *stagedPair) {
	p.devices[0].Fail(errDevice)
	err := p.read(p.whole())
	if err == nil {
		t.Error("Read: no error")
	}
	wholeError(t, p.f, p.pair, err, p.size)
	p.devices[0].Fail(nil)
	p.right(t)
}

// right wants a read that is right.
func (p *stagedPair) right(t testing.TB) {
	t.Helper()
	want := p.before().apply(p.pair, p.whole())
	if err := p.read(p.whole()); err != nil {
		t.Fatalf("Read: %v", err)
	}
	want.compare(t, p.pair)
	p.quiet(t)
}

// testSealBehindGather: the owner ends the publication while its device has not
// copied a byte yet, and writes other data at once. Whoever looks at the word
// before the device is done sends it as right. The first copies of larger reads
// end before.
func testSealBehindGather(t testing.TB, p *stagedPair) {
	for n, bytes := range []int64{10, 10 * kib, 300 * kib, p.size} {
		for _, pass := range []int{0, 1} {
			p.seals[0] = p.hold(sealIndex, id.Sequence(sealSeq+2*n+pass))
			p.owner.fill(0, uint64(n+500))
			p.devices[0].Hold(ToHost)
			cancel, done := p.begin(one(0, 0, bytes))
			live(t, p.devices[0], done)
			silent(t, "Read", done)
			if pass == 1 && bytes == p.size {
				p.devices[0].Let(ToHost, 1)
			}
			p.owner.local.Seals.Store(sealIndex, 0)
			p.owner.clear()
			p.devices[0].Release(ToHost)
			if err := wait(t, "Read", done); !errors.Is(err, transfer.ErrStale) {
				t.Errorf("a read of %d bytes, whose pages were used again before they were copied: %v, want ErrStale", bytes, err)
			}
			cancel()
		}
	}
	p.quiet(t)
}

// testCalls: a read of many pages, of ranks that alternate, costs the devices
// few calls.
func testCalls(t testing.TB, p *stagedPair) {
	const pages, page = 250, 256
	var copies []transfer.Copy
	rng := rand.New(rand.NewPCG(rand.Uint64(), 10))
	for r := range id.Rank(4) {
		copies = append(copies, scattered(rng, r, p.size, pages, page)...)
	}
	rng.Shuffle(len(copies), func(i, j int) { copies[i], copies[j] = copies[j], copies[i] })
	want := p.before().apply(p.pair, copies)
	if err := p.read(copies); err != nil {
		t.Fatal(err)
	}
	want.compare(t, p.pair)
	for i, d := range p.devices {
		c := d.Counts()
		if calls := c.Calls[ToHost] + c.Calls[FromHost]; calls > 4*4 {
			t.Errorf("device %d got %d calls for %d pages of 4 ranks", i, calls, len(copies))
		}
		if c.Slow > 0 && p.f.Name != MemoryName { // which pins nothing
			t.Errorf("device %d copied %d times with memory that was not pinned", i, c.Slow)
		}
	}
	p.quiet(t)
}

func testUnpinned(t testing.TB, p *stagedPair) { p.right(t) }

// testBothWays: two nodes read from each other, more at once than there are
// buffers. Nobody waits for ever, and nobody much longer than the others.
func testBothWays(t testing.TB, p *stagedPair) {
	const readers, rounds, bytes = 24, 3, 300 * kib // more than a buffer of any transport that has few
	p.owner.fill(0, 600)
	p.reader.fill(0, 601)
	// The first half of each arena is read, the second is written to.
	half := p.size / 2
	value, _ := id.SealValue(p.reader.local.Life.Incarnation, sealSeq)
	p.reader.local.Seals.Store(sealIndex, value)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	back, err := p.owner.transport.Open(ctx, p.reader.peer())
	if err != nil {
		t.Fatal(err)
	}
	defer shut(t, back.Close)
	ways := []struct {
		from, to *side
		link     transfer.Link
		seals    []transfer.Seal
	}{{p.owner, p.reader, p.link, p.seals}, {p.reader, p.owner, back, []transfer.Seal{{Index: sealIndex, Value: value}}}}
	copies := one(0, half, bytes)
	var work sync.WaitGroup
	for _, w := range ways {
		for range readers {
			work.Go(func() {
				for range rounds {
					if err := within(w.link, w.seals, copies); err != nil {
						t.Errorf("Read: %v", err)
						return
					}
				}
			})
		}
	}
	work.Wait()
	for _, w := range ways {
		differ(t, "what "+string(w.to.local.Life.Node)+" read", w.to.stretch(0, half, bytes), w.from.stretch(0, 0, bytes))
	}
	p.quiet(t)
}
