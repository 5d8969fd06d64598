package transfertest

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
)

// Sizes of a soak: every group of pages has a publication of its own, every
// reader a part of the arena that it reads into.
const (
	soakGroups     = 8
	soakGroupBytes = 256 * kib
	soakReaders    = 4
	soakPartBytes  = 512 * kib
)

// Soak is the promise under fire, for d: readers read what an owner publishes
// into pages of theirs, and cancel at random; the owner ends publications at
// random and uses their pages again at once; links are closed, and the owner
// restarts, with the same memory and with other. A destination belongs to
// somebody else as soon as Read has returned with an error. Any byte that is
// not of the publication that a read named, after a read that held, and any
// byte that lands after a read has returned, is an error.
func Soak(t *testing.T, f Factory, d time.Duration) {
	available(t, f)
	runSoak(t, f, d)
}

func runSoak(t testing.TB, f Factory, d time.Duration) {
	seed := rand.Uint64()
	s := &soak{t: t, f: f, seed: seed, reader: f.reader(t, 1, soakReaders*soakPartBytes)}
	s.reader.start(t, f)
	s.restart(nil)
	defer func() {
		s.life.Load().end(t)
		s.life.Load().forget(t)
	}()

	stop := make(chan struct{})
	var work sync.WaitGroup
	for n := range soakReaders {
		work.Go(func() { s.read(n, stop) })
	}
	func() {
		defer work.Wait()
		defer close(stop)
		rng := rand.New(rand.NewPCG(seed, 0))
		end := time.Now().Add(d)
		last := end.Add(patience) // on a machine that is too busy to see everything in time
		for !t.Failed() && (time.Now().Before(end) || !s.saw() && time.Now().Before(last)) {
			pause(time.Duration(rng.IntN(20)) * time.Millisecond)
			if rng.IntN(3) == 0 {
				s.restart(rng)
			} else {
				s.life.Load().closeLink()
			}
		}
	}()

	t.Logf("seed %d: %d reads were right, %d stale, %d cancelled, %d failed otherwise; %d lives of the owner, %d publications",
		seed, s.right.Load(), s.stale.Load(), s.cancelled.Load(), s.failed.Load(), s.lives, s.published.Load())
	if !s.saw() && !t.Failed() {
		t.Error("not every end of a read was seen")
	}
}

type soak struct {
	t      testing.TB
	f      Factory
	seed   uint64
	reader *side
	lives  int
	life   atomic.Pointer[soakLife] // of the owner, the newest

	cancels [soakReaders]atomic.Pointer[context.CancelFunc] // of the newest reads

	right, stale, cancelled, failed, published atomic.Int64
}

// saw reports whether reads have ended in every way.
func (s *soak) saw() bool {
	return s.right.Load() > 0 && s.stale.Load() > 0 && s.cancelled.Load() > 0
}

// soakLife is one life of the owner.
type soakLife struct {
	side *side
	peer transfer.Peer // as it was at the start; the memory may be given back
	stop chan struct{}
	work sync.WaitGroup // publish

	mu     sync.Mutex
	link   transfer.Link
	groups [soakGroups]publication
}

// publication is what a group of pages holds; seal 0 is nothing.
type publication struct {
	seal    transfer.Seal
	content uint64
}

// restart ends the owner and starts its next life, at random with the memory of
// the last one. rng is nil for the first.
func (s *soak) restart(rng *rand.Rand) {
	old := s.life.Load()
	var next *side
	if old != nil {
		old.end(s.t)
		if rng.IntN(2) == 0 {
			// The rule of a new life: every word first, then any page.
			for g := range uint32(soakGroups) {
				old.side.local.Seals.Store(g, 0)
			}
			old.side.fill(0, rng.Uint64())
			next = &side{local: old.side.local}
			next.local.Life.Incarnation++
		} else {
			old.forget(s.t)
		}
	}
	if next == nil {
		next = s.f.owner(s.t, 1, soakGroups*soakGroupBytes)
	}
	tr, err := s.f.Start(next.local, Calm(transfer.Limits{}))
	if err != nil {
		s.t.Fatalf("start life %d of the owner: %v", s.lives, err)
	}
	next.transport = tr
	s.lives++
	l := &soakLife{side: next, peer: next.peer(), stop: make(chan struct{})}
	seed := s.seed + uint64(s.lives)
	l.work.Go(func() { s.publish(l, rand.New(rand.NewPCG(seed, 1))) })
	s.life.Store(l)
}

// end ends a life: nothing is published any more, nothing served.
func (l *soakLife) end(t testing.TB) {
	close(l.stop)
	l.work.Wait()
	shut(t, l.side.transport.Close)
	l.closeLink()
}

// forget gives the memory of a life back.
func (l *soakLife) forget(t testing.TB) {
	shut(t, l.side.local.Arenas[0].Close)
	shut(t, l.side.local.Seals.Close)
}

func (l *soakLife) closeLink() {
	l.mu.Lock()
	link := l.link
	l.link = nil
	l.mu.Unlock()
	if link != nil {
		_ = link.Close() // what it says is tested elsewhere
	}
}

// publish fills groups, holds their words, and ends them, each at once where
// the rule allows it.
func (s *soak) publish(l *soakLife, rng *rand.Rand) {
	life := l.side.local.Life
	for seq := id.Sequence(1); ; seq++ {
		g := rng.Uint32N(soakGroups)
		l.side.local.Seals.Store(g, 0)
		content := rng.Uint64()
		edit(l.side.local.Arenas[0], int64(g)*soakGroupBytes, soakGroupBytes, func(b []byte) { fill(b, content) })
		value, ok := id.SealValue(life.Incarnation, seq)
		if !ok {
			continue
		}
		l.side.local.Seals.Store(g, value)
		s.published.Add(1)
		l.mu.Lock()
		l.groups[g] = publication{seal: transfer.Seal{Index: g, Value: value}, content: content}
		l.mu.Unlock()
		if rng.IntN(8*soakGroups) == 0 { // readers get ahead
			pause(time.Duration(rng.IntN(1000)) * time.Microsecond)
		}
		select {
		case <-l.stop:
			return
		default:
		}
		// From here, since it runs while others read; a timer is too coarse.
		for n := range s.cancels {
			if cancel := s.cancels[n].Swap(nil); cancel != nil && rng.IntN(3) == 0 {
				(*cancel)()
			}
		}
		runtime.Gosched()
	}
}

// open gives the link that all readers of a life share.
func (s *soak) open(ctx context.Context, l *soakLife) (transfer.Link, error) {
	l.mu.Lock()
	link := l.link
	l.mu.Unlock()
	if link != nil {
		return link, nil
	}
	link, err := s.reader.transport.Open(ctx, l.peer)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	old := l.link
	if old == nil {
		l.link = link
	}
	l.mu.Unlock()
	if old != nil {
		_ = link.Close() // another reader was faster
		return old, nil
	}
	return link, nil
}

// read is one reader. Its part of the arena is compared, all of it, before and
// after every read.
func (s *soak) read(n int, stop <-chan struct{}) {
	rng := rand.New(rand.NewPCG(s.seed, uint64(n)+2))
	want := make([]byte, soakPartBytes)
	same := func() bool {
		return bytes.Equal(view(s.reader.local.Arenas[0], int64(n)*soakPartBytes, soakPartBytes), want)
	}
	group := make([]byte, soakGroupBytes)
	give := func() { // the part to somebody else
		content := rng.Uint64()
		fill(want, content)
		s.reader.put(int64(n)*soakPartBytes, want)
	}
	give()
	for {
		select {
		case <-stop:
			if !same() {
				s.t.Errorf("seed %d: a byte landed after its read had returned", s.seed)
			}
			return
		default:
			runtime.Gosched() // few processors are for all
		}
		l := s.life.Load()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		link, err := s.open(ctx, l)
		if err != nil {
			if ctx.Err() != nil {
				s.t.Errorf("seed %d: Open hangs: %v", s.seed, err)
			}
			cancel()
			pause(100 * time.Microsecond)
			continue
		}
		l.mu.Lock()
		p := l.groups[rng.IntN(soakGroups)]
		l.mu.Unlock()
		if p.seal.Value == 0 {
			cancel()
			continue
		}
		copies := scattered(rng, 0, soakGroupBytes, 1+rng.IntN(60), 32*kib)
		for i := range copies { // the pieces lie in the part as they do in the group, or in its other half
			copies[i].Remote += int64(p.seal.Index) * soakGroupBytes
			copies[i].Local += int64(n)*soakPartBytes + rng.Int64N(2)*soakGroupBytes
		}
		copies = slices.Repeat(copies, 1+rng.IntN(64)) // more time, not more memory
		s.cancels[n].Store(&cancel)
		err = link.Read(ctx, []transfer.Seal{p.seal}, copies)
		hung := errors.Is(err, context.DeadlineExceeded)
		if err != nil {
			give()
		}
		cancel()
		if err == nil {
			fill(group, p.content)
			for _, c := range copies {
				copy(want[c.Local-int64(n)*soakPartBytes:][:c.Bytes], group[c.Remote-int64(p.seal.Index)*soakGroupBytes:][:c.Bytes])
			}
			if !same() {
				s.t.Errorf("seed %d: a read that held delivered another byte, or wrote beside its destinations", s.seed)
				return
			}
			s.right.Add(1)
			continue
		}
		_, typed := errors.AsType[*transfer.Error](err)
		switch {
		case !typed || hung:
			s.t.Errorf("seed %d: %v (%T), want a *transfer.Error in time", s.seed, err, err)
			return
		case errors.Is(err, transfer.ErrStale):
			s.stale.Add(1)
		case errors.Is(err, context.Canceled):
			s.cancelled.Add(1)
		default:
			s.failed.Add(1)
			l.closeLink()
			pause(100 * time.Microsecond) // the link has ended; the owner may be about to start
		}
		// Whatever is still on its way has time to land, before it is looked for.
		if rng.IntN(8) == 0 {
			pause(50 * time.Microsecond)
		}
		if !same() {
			s.t.Errorf("seed %d: a byte landed after its read had returned with %v", s.seed, err)
			return
		}
	}
}
