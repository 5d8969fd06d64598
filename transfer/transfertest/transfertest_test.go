package transfertest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// inMemory is the factory of the in-memory transport.
func inMemory() Factory {
	var network Network
	return Factory{Name: MemoryName, Start: func(local transfer.Local, _ transfer.Limits) (transfer.Transport, error) {
		return network.Listen(local), nil
	}}
}

func TestMemory(t *testing.T) { Run(t, inMemory()) }

func TestMemoryStaged(t *testing.T) { RunStaged(t, inMemory()) }

// The wrapper is a transport itself, and keeps what every transport must while
// it only delays and reorders.
func TestFaulty(t *testing.T) {
	Run(t, inMemory().faulty(Calm(transfer.Limits{}), always(Fault{Delay: 50 * time.Microsecond, Reorder: true})))
}

func TestRunRecordsWhatWasTested(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tested")
	t.Setenv(TestedFile, path)
	record(t, "one")
	record(t, "two")
	got, err := os.ReadFile(path)
	if err != nil || string(got) != "one\ntwo\n" {
		t.Errorf("file says %q, %v", got, err)
	}
}

// In a bubble the clock stands still while a lost read waits.
func TestFaultyInABubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limits := transfer.Limits{Stall: 2 * time.Second}
		p := newPair(t, inMemory().faulty(limits, always(Fault{Lose: true})), 1, 4*kib)
		started := time.Now()
		err := p.link.Read(t.Context(), p.seals, one(0, 0, 10))
		if took := time.Since(started); !errors.Is(err, transfer.ErrStalled) || took != limits.Stall {
			t.Errorf("a lost read: %v after %v, want ErrStalled after %v", err, took, limits.Stall)
		}
	})
}

// Whoever gives the destination away when the context ends, and not when Read
// has returned, finds foreign bytes in it.
func TestLateLandingFindsWhoFreesEarly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // where late is behind all that is done here
		p := newPair(t, inMemory().faulty(Calm(transfer.Limits{}), always(Fault{Late: time.Millisecond})), 1, 4*kib)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- p.link.Read(ctx, p.seals, one(0, 0, 4*kib)) }()
		cancel()
		p.reader.clear() // freed and zeroed for the next one
		wait(t, "Read", done)
		if !slices.Equal(p.reader.bytes(0), p.owner.bytes(0)) {
			t.Error("the late bytes did not land in the memory that was given away early")
		}
	})
}

// mutant is a transport that breaks one promise.
type mutant struct {
	transfer.Transport
	local transfer.Local
	peer  func(transfer.Peer) transfer.Peer // what Open gets
	read  func(m *mutant, inner transfer.Link, ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error
	stray sync.WaitGroup
}

type mutantLink struct {
	transfer.Link
	m *mutant
}

func (m *mutant) Open(ctx context.Context, peer transfer.Peer) (transfer.Link, error) {
	if m.peer != nil {
		peer = m.peer(peer)
	}
	l, err := m.Transport.Open(ctx, peer)
	if err != nil {
		return nil, err
	}
	return mutantLink{l, m}, nil
}

func (l mutantLink) Read(ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
	if l.m.read == nil {
		return l.Link.Read(ctx, seals, copies)
	}
	return l.m.read(l.m, l.Link, ctx, seals, copies)
}

func (m *mutant) Close() error {
	err := m.Transport.Close()
	m.stray.Wait()
	return err
}

// TestTheSuiteFindsMutants breaks the in-memory transport in one way after the
// other; the named case must fail. That it passes otherwise is TestMemory's.
func TestTheSuiteFindsMutants(t *testing.T) {
	type readFunc = func(m *mutant, inner transfer.Link, ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error
	for name, tt := range map[string]struct {
		finds string // the case
		read  readFunc
		peer  func(known *known) func(transfer.Peer) transfer.Peer
	}{
		"seals do not matter": {finds: "seals that are not held", read: func(_ *mutant, inner transfer.Link, ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
			return unlessStale(inner.Read(ctx, seals, copies))
		}},
		"only the first seal matters": {finds: "seals that are not held", read: func(_ *mutant, inner transfer.Link, ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
			return inner.Read(ctx, seals[:min(1, len(seals))], copies)
		}},
		"seals are checked before only": {finds: "seal changed while the read runs", read: func(_ *mutant, inner transfer.Link, ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
			if err := inner.Read(ctx, seals, nil); err != nil {
				return err
			}
			return unlessStale(inner.Read(ctx, seals, copies))
		}},
		"seals are checked before only, and pages reused": {finds: "pages reused while reads run", read: func(m *mutant, inner transfer.Link, ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
			if err := inner.Read(ctx, seals, nil); err != nil {
				return err
			}
			time.Sleep(time.Millisecond) // a slow wire
			return unlessStale(inner.Read(ctx, seals, copies))
		}},
		"returns when the context ends": {finds: "cancelled at random times", read: func(m *mutant, inner transfer.Link, ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
			done := make(chan error, 1)
			m.stray.Go(func() {
				time.Sleep(time.Duration(runtime.NumGoroutine()) * 100 * time.Microsecond)
				done <- inner.Read(context.WithoutCancel(ctx), seals, copies)
			})
			select {
			case err := <-done:
				return err
			case <-ctx.Done():
				return &transfer.Error{Transport: MemoryName, Total: transfer.Bytes(copies), Err: ctx.Err()}
			}
		}},
		"writes one byte too many": {finds: "one byte", read: func(m *mutant, inner transfer.Link, ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
			err := inner.Read(ctx, seals, copies)
			for _, c := range copies {
				if a, at := m.local.Arenas[c.Rank], c.Local+c.Bytes; at < a.Size() {
					b := make([]byte, 1)
					Peek(a, at, b)
					b[0]++
					Poke(a, at, b)
				}
			}
			return err
		}},
		"forgets the last copy": {finds: "scattered copies of odd sizes", read: func(_ *mutant, inner transfer.Link, ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
			return inner.Read(ctx, seals, copies[:len(copies)-1])
		}},
		"mixes up ranks": {finds: "many ranks", read: func(_ *mutant, inner transfer.Link, ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
			copies = slices.Clone(copies)
			copies[0].Rank = (copies[0].Rank + 1) % 8
			return inner.Read(ctx, seals, copies)
		}},
		"clips what is out of range": {finds: "out of range", read: func(_ *mutant, inner transfer.Link, ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
			if err := inner.Read(ctx, seals, copies); !errors.Is(err, transfer.ErrRange) {
				return err
			}
			return nil
		}},
		"writes before it checks the range": {finds: "out of range", read: func(_ *mutant, inner transfer.Link, ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
			for i := range copies {
				if err := inner.Read(ctx, seals, copies[i:i+1]); err != nil {
					return err
				}
			}
			return inner.Read(ctx, seals, nil)
		}},
		"needs no seal": {finds: "no seals", read: func(_ *mutant, inner transfer.Link, ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
			if len(seals) == 0 {
				return nil
			}
			return inner.Read(ctx, seals, copies)
		}},
		"errors have no form": {finds: "context that has ended", read: func(_ *mutant, inner transfer.Link, ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
			return errors.Unwrap(inner.Read(ctx, seals, copies))
		}},
		"any life will do": {finds: "another life", peer: func(k *known) func(transfer.Peer) transfer.Peer {
			return func(p transfer.Peer) transfer.Peer {
				p.Life = k.at(p.Descriptor)
				return p
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			f, k := inMemory(), &known{lives: map[string]id.Life{}}
			start := f.Start
			f.Start = func(local transfer.Local, limits transfer.Limits) (transfer.Transport, error) {
				inner, err := start(local, limits)
				m := &mutant{Transport: inner, local: local, read: tt.read}
				k.add(inner.Descriptor(), local.Life)
				if tt.peer != nil {
					m.peer = tt.peer(k)
				}
				return m, err
			}
			if !fails(t, tt.finds, f) {
				t.Errorf("%q passes", tt.finds)
			}
		})
	}
}

// hasty is an arena of a device through which a transport breaks one promise: it
// shows what a transport does that does not wait, or does not look.
type hasty struct {
	memory.Stager
	waits  bool // for the device
	cares  bool // what the device says
	listed bool // it asks for all pages at once
}

func (h hasty) ReadInto(b []byte, segments []memory.Segment) memory.Ticket {
	return h.start(h.Stager.ReadInto, b, segments)
}

func (h hasty) WriteFrom(b []byte, segments []memory.Segment) memory.Ticket {
	return h.start(h.Stager.WriteFrom, b, segments)
}

func (h hasty) start(by func([]byte, []memory.Segment) memory.Ticket, b []byte, segments []memory.Segment) memory.Ticket {
	if !h.waits { // what it is given will be used for something else
		b, segments = slices.Clone(b), slices.Clone(segments)
	}
	if h.listed {
		return hastyTicket{by(b, segments), h}
	}
	var last memory.Ticket
	for i := range segments {
		last = by(b, segments[i:i+1])
		if i < len(segments)-1 {
			_ = last.Wait()
		}
	}
	return hastyTicket{last, h}
}

type hastyTicket struct {
	memory.Ticket
	h hasty
}

func (t hastyTicket) Wait() error {
	if !t.h.waits {
		go func() { _ = t.Ticket.Wait() }()
		return nil
	}
	if err := t.Ticket.Wait(); t.h.cares {
		return err
	}
	return nil
}

// TestTheStagingCasesFindMutants lets the in-memory transport treat devices
// badly, each time in one way; the named case must fail, which otherwise passes in
// TestMemoryStaged.
func TestTheStagingCasesFindMutants(t *testing.T) {
	for name, tt := range map[string]struct {
		hasty
		finds []string
	}{
		"does not wait for the device": {hasty{listed: true}, []string{
			"a scatter that does not end", "closed while a scatter does not end", "closed while a gather does not end", "seal changed between gather and send",
			"the reader's device dies in mid-read",
		}},
		"does not care what the device says": {hasty{waits: true, listed: true}, []string{
			"the reader's device dies in mid-read", "the owner's device dies in mid-read", "a copy of the reader fails", "a copy of the owner fails",
		}},
		"one call a page": {hasty{waits: true, cares: true}, []string{"no call a page"}},
	} {
		for _, c := range staging() {
			if !slices.Contains(tt.finds, c.name) {
				continue
			}
			t.Run(name+"/"+c.name, func(t *testing.T) {
				f := inMemory()
				start := f.Start
				f.Start = func(local transfer.Local, limits transfer.Limits) (transfer.Transport, error) {
					arenas := map[id.Rank]memory.Arena{}
					for r, a := range local.Arenas {
						if arenas[r] = a; !isHost(a) {
							h := tt.hasty
							h.Stager = a.(memory.Stager)
							arenas[r] = h
						}
					}
					local.Arenas = arenas
					return start(local, limits)
				}
				if !failing(t, func(t testing.TB) { c.run(t, f, true, true) }) {
					t.Errorf("%q passes", c.name)
				}
			})
		}
	}
}

func isHost(a memory.Arena) bool {
	_, ok := transfer.InHost(a)
	return ok
}

// The same for the soak, of what only a race shows.
func TestTheSoakFindsMutants(t *testing.T) {
	for name, read := range map[string]func(m *mutant, inner transfer.Link, ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error{
		"seals are checked before only": func(_ *mutant, inner transfer.Link, ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
			if err := inner.Read(ctx, seals, nil); err != nil {
				return err
			}
			return unlessStale(inner.Read(ctx, seals, copies))
		},
		"returns when the context ends": func(m *mutant, inner transfer.Link, ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
			done := make(chan error, 1)
			m.stray.Go(func() { done <- inner.Read(context.WithoutCancel(ctx), seals, copies) })
			select {
			case err := <-done:
				return err
			case <-ctx.Done():
				return &transfer.Error{Transport: MemoryName, Total: transfer.Bytes(copies), Err: ctx.Err()}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := inMemory()
			start := f.Start
			f.Start = func(local transfer.Local, limits transfer.Limits) (transfer.Transport, error) {
				inner, err := start(local, limits)
				return &mutant{Transport: inner, local: local, read: read}, err
			}
			if !failing(t, func(t testing.TB) { runSoak(t, f, 3*patience) }) {
				t.Error("the soak passes")
			}
		})
	}
}

func TestMemorySoak(t *testing.T) { Soak(t, inMemory(), time.Second) }

// unlessStale takes a stale end for a good one.
func unlessStale(err error) error {
	if errors.Is(err, transfer.ErrStale) {
		return nil
	}
	return err
}

// known remembers which life listens where.
type known struct {
	mu    sync.Mutex
	lives map[string]id.Life
}

func (k *known) add(descriptor []byte, l id.Life) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.lives[string(descriptor)] = l
}

func (k *known) at(descriptor []byte) id.Life {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.lives[string(descriptor)]
}

// fails runs one case and reports whether it failed.
func fails(t *testing.T, name string, f Factory) bool {
	t.Helper()
	all := append(conformance(), faults()...)
	i := slices.IndexFunc(all, func(c testCase) bool { return c.name == name })
	if i < 0 {
		t.Fatalf("no case %q", name)
	}
	return failing(t, func(t testing.TB) { all[i].run(t, f) })
}

func TestACaseThatPassesIsNoFailure(t *testing.T) {
	if fails(t, "no copies", inMemory()) {
		t.Error("a case that passes counts as one that fails")
	}
}

// failing reports whether a test fails.
func failing(t *testing.T, run func(t testing.TB)) bool {
	r := &recorder{TB: t}
	done := make(chan struct{})
	go func() { // Fatal ends the goroutine
		defer close(done)
		defer r.cleanUp()
		run(r)
	}()
	<-done
	return r.Failed()
}

// recorder is a testing.TB that keeps failures to itself.
type recorder struct {
	testing.TB

	mu       sync.Mutex
	failed   bool
	cleanups []func()
}

func (r *recorder) Fail() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = true
}

func (r *recorder) Failed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failed
}

func (r *recorder) FailNow()                     { r.Fail(); runtime.Goexit() }
func (r *recorder) Error(args ...any)            { r.Fail() }
func (r *recorder) Errorf(f string, args ...any) { r.Fail() }
func (r *recorder) Fatal(args ...any)            { r.FailNow() }
func (r *recorder) Fatalf(f string, args ...any) { r.FailNow() }
func (r *recorder) Log(args ...any)              {}
func (r *recorder) Logf(f string, args ...any)   {}
func (r *recorder) Helper()                      {}
func (r *recorder) Cleanup(f func())             { r.cleanups = append(r.cleanups, f) }

func (r *recorder) cleanUp() {
	for _, f := range slices.Backward(r.cleanups) {
		f()
	}
}
