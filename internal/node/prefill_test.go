package node

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/publish"
)

// newTestOwner has room for so many publications, and 63 pages of 8 tokens.
func newTestOwner(t *testing.T, timers holdTimers, most int) *owner {
	t.Helper()
	life := id.Life{Node: "alpha", Incarnation: 7}
	layout := page.Layout{Order: page.NHD, DType: page.BF16, Layers: 1, Pages: 64, PageSize: 8, Heads: 1, HeadDim: 8}
	m, err := manager.New(manager.Options{Life: life, Geometry: page.Geometry{Model: "test", WorldSize: 1, Layout: layout}, Host: 64, Check: true})
	if err != nil {
		t.Fatal(err)
	}
	seals, err := memory.NewSealTable()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { seals.Close() })
	timers.live = most
	return newOwner(m, publish.NewLog(publish.LogOptions{Life: life, Live: most}), seals, newHolds(timers), &keyring{}, most)
}

// written ingests a request and commits tokens of it.
func (o *owner) written(t *testing.T, r id.Request, tokens int) {
	t.Helper()
	if err := o.manager.Ingest(r, manager.RequestConfig{}); err != nil {
		t.Fatal(err)
	}
	token, err := o.manager.Admit(manager.Step{Segments: []manager.Segment{{Request: r, Label: id.Main, Span: tokens}}})
	if err == nil {
		_, err = o.manager.Commit(token)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// sealed says whether the word of a publication holds its value.
func (o *owner) sealed(t *testing.T, seal uint32) bool {
	t.Helper()
	v, ok := o.seals.Load(seal)
	if !ok {
		t.Fatalf("no word %d", seal)
	}
	return v != 0
}

// TestFullOwnerRefusesAndForgets: a publish that finds no room changes nothing,
// so that it can be tried again.
func TestFullOwnerRefusesAndForgets(t *testing.T) {
	o := newTestOwner(t, holdTimers{}, 2)
	now := time.Now()
	for _, r := range []id.Request{"r1", "r2", "r3"} {
		o.written(t, r, 20)
	}
	for _, r := range []id.Request{"r1", "r2"} {
		if _, err := o.publish(now, nil, r, publishOptions{hold: time.Minute}); err != nil {
			t.Fatal(err)
		}
	}
	before := o.manager.Counts()
	for range 3 {
		if _, err := o.publish(now, nil, "r3", publishOptions{hold: time.Minute}); !errors.Is(err, publish.ErrFull) {
			t.Fatalf("a third one of two: %v, want ErrFull", err)
		}
	}
	if after := o.manager.Counts(); after != before {
		t.Errorf("a refusal changed %+v to %+v", before, after)
	}
	if _, err := o.publish(now, nil, "r1", publishOptions{hold: time.Minute, final: true}); err != nil {
		t.Errorf("growing finds no room: %v", err)
	}
	if _, err := o.revoke(now, 2); err != nil {
		t.Fatal(err)
	}
	if _, err := o.publish(now, nil, "r3", publishOptions{hold: time.Minute}); err != nil {
		t.Errorf("after one has ended: %v", err)
	}
}

// TestOwnersRule: for every way in which a publication ends, the word is cleared
// and the pages are free, exactly once.
func TestOwnersRule(t *testing.T) {
	reader := reader{life: id.Life{Node: "beta", Incarnation: 1}, attempt: 1}
	for name, end := range map[string]func(t *testing.T, o *owner, p published) (ends []ending, cause string){
		"removed": func(t *testing.T, o *owner, p published) ([]ending, string) {
			ends, _, err := o.remove(time.Now(), "r1", true)
			if err != nil {
				t.Error(err)
			}
			return ends, "revoked"
		},
		"reset": func(t *testing.T, o *owner, p published) ([]ending, string) {
			ends, err := o.reset(time.Now(), "r1", true)
			if err != nil {
				t.Error(err)
			}
			return ends, "revoked"
		},
		"revoked": func(t *testing.T, o *owner, p published) ([]ending, string) {
			ends, err := o.revoke(time.Now(), p.name.Sequence)
			if err != nil {
				t.Error(err)
			}
			return ends, "revoked"
		},
		"expired": func(t *testing.T, o *owner, p published) ([]ending, string) {
			time.Sleep(29 * time.Second)
			if ends := o.sweep(time.Now()); len(ends) > 0 {
				t.Errorf("%v ended before its hold", ends)
			}
			time.Sleep(time.Second)
			ends := o.sweep(time.Now())
			return ends, "expired"
		},
		"read": func(t *testing.T, o *owner, p published) ([]ending, string) {
			if _, err := o.holds.lease(time.Now(), p.name.Sequence, reader); err != nil {
				t.Error(err)
			}
			time.Sleep(15 * time.Second)
			o.holds.acknowledge(time.Now(), p.name.Sequence, reader, kvferrypb.CompleteItem_LANDED)
			ends := o.sweep(time.Now())
			return ends, "released"
		},
		"abandoned by its reader": func(t *testing.T, o *owner, p published) ([]ending, string) {
			time.Sleep(29 * time.Second)
			if _, err := o.holds.lease(time.Now(), p.name.Sequence, reader); err != nil {
				t.Error(err)
			}
			time.Sleep(19 * time.Second)
			if ends := o.sweep(time.Now()); len(ends) > 0 {
				t.Errorf("%v ended under its lease", ends)
			}
			time.Sleep(time.Second)
			ends := o.sweep(time.Now())
			return ends, "expired"
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newTestOwner(t, holdTimers{}, 10)
				o.written(t, "r1", 20)
				p, err := o.publish(time.Now(), nil, "r1", publishOptions{hold: 30 * time.Second, final: true})
				if err != nil {
					t.Fatal(err)
				}
				if !o.sealed(t, p.seal) {
					t.Error("announced, and the word is not set")
				}
				if name != "reset" && name != "removed" {
					if _, _, err := o.remove(time.Now(), "r1", false); err != nil {
						t.Fatal(err)
					}
					if c := o.manager.Counts(); c.Limbo != 3 || !o.sealed(t, p.seal) {
						t.Errorf("%+v, sealed %v after Remove", c, o.sealed(t, p.seal))
					}
				}
				ends, cause := end(t, o, p.published)
				if len(ends) != 1 || ends[0].cause != cause || ends[0].name != p.name {
					t.Errorf("ended as %+v, want once as %s", ends, cause)
				}
				if o.sealed(t, p.seal) {
					t.Error("ended, and the word is set")
				}
				if c := o.manager.Counts(); c.Limbo != 0 || c.Publications != 0 || name != "reset" && c.Free != 63 {
					t.Errorf("%+v", c)
				}
				if _, err := o.revoke(time.Now(), p.name.Sequence); !errors.Is(err, publish.ErrUnknown) {
					t.Errorf("it ends again: %v", err)
				}
				if _, err := o.holds.lease(time.Now(), p.name.Sequence, reader); !errors.Is(err, publish.ErrEnded) {
					t.Errorf("a lease after the end: %v", err)
				}
				if _, _, _, err := o.find(time.Now(), p.name.Sequence, "r1"); err == nil {
					t.Error("it is found after its end")
				}
			})
		})
	}
}

// TestPublishAfterTheHold: what has run out and was not swept yet does not grow.
func TestPublishAfterTheHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newTestOwner(t, holdTimers{maxHold: time.Minute}, 10)
		o.written(t, "r1", 20)
		p, err := o.publish(time.Now(), nil, "r1", publishOptions{hold: 30 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		o.written(t, "r1", 8)
		late, err := o.publish(time.Now(), nil, "r1", publishOptions{hold: 30 * time.Second, final: true})
		if !errors.Is(err, publish.ErrEnded) {
			t.Fatalf("publish: %v, want ErrEnded", err)
		}
		if len(late.ends) != 1 || late.ends[0].cause != "expired" || o.log.Stats().Waiting == 0 || o.sealed(t, p.seal) {
			t.Errorf("%+v, sealed %v", late, o.sealed(t, p.seal))
		}
		if f, _ := failureOf(err); f.GetCode() != kvferrypb.Failure_STALE && f.GetCode() != kvferrypb.Failure_EXPIRED {
			t.Errorf("%v", f)
		}
		if ends := o.sweep(time.Now()); len(ends) != 0 {
			t.Errorf("it ends twice: %+v", ends)
		}
	})
}

func TestQueue(t *testing.T) {
	q := newQueue[int](3)
	for i := range 5 {
		if got := q.add(i); got != (i < 3) {
			t.Errorf("add %d = %v", i, got)
		}
	}
	select {
	case <-q.wake:
	default:
		t.Error("nobody was woken")
	}
	if got := fmt.Sprint(q.take(2), q.take(2), q.take(2)); got != "[0 1] [2] []" {
		t.Errorf("took %s", got)
	}
	first := q.add(7) // does not write into what was taken
	if !first || fmt.Sprint(q.take(9)) != "[7]" {
		t.Error("a queue that was emptied takes nothing")
	}
}

// TestSessionEvents: acknowledged events are forgotten, others kept, within
// their bound.
func TestSessionEvents(t *testing.T) {
	s := newSession(time.Now(), "t", "e")
	_, more := s.since(0)
	for range maxEvents + 10 {
		s.emit(&kvferrypb.Event{})
	}
	select {
	case <-more:
	default:
		t.Error("nobody was woken")
	}
	events, _ := s.since(0)
	if len(events) != maxEvents || events[0].GetSequence() != 11 {
		t.Fatalf("%d events from %d", len(events), events[0].GetSequence())
	}
	if events, _ = s.since(maxEvents); len(events) != 10 {
		t.Errorf("%d events after %d", len(events), maxEvents)
	}
	s.acknowledge(maxEvents + 9)
	if events, _ = s.since(0); len(events) != 1 || events[0].GetSequence() != maxEvents+10 {
		t.Errorf("%v", events)
	}
	s.acknowledge(1 << 60)
	s.acknowledge(0)
	if events, _ = s.since(1 << 60); len(events) != 0 {
		t.Errorf("%v", events)
	}
}

// TestSessionKeepsEachPageOnce: the events that a session keeps name no more pages
// than there are, whatever an engine does that acknowledges nothing, and none is lost
// that it has not heard of, if it gives only pages that it has heard of.
func TestSessionKeepsEachPageOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const all = 20
		s := newSession(time.Now(), "t", "e")
		s.most = all
		given := upTo(all) // to requests, by an engine that has heard everything up to heard
		var heard uint64
		for range rapid.IntRange(1, 200).Draw(t, "calls") {
			switch rapid.IntRange(0, 5).Draw(t, "call") {
			default: // some come back
				given = rapid.Permutation(given).Draw(t, "given")
				n := rapid.IntRange(0, len(given)).Draw(t, "back")
				s.emit(&kvferrypb.Event{Kind: kvferrypb.Event_PAGES, Pages: given[:n]})
				given = slices.Clone(given[n:])
			case 0: // it hears of the next, and gives them again
				events, _ := s.since(heard)
				if len(events) == 0 {
					continue
				}
				if heard++; events[0].GetSequence() != heard {
					t.Fatalf("event %d is lost, the next is %d", heard, events[0].GetSequence())
				}
				given = append(given, events[0].GetPages()...)
			case 1:
				s.acknowledge(rapid.Uint64Range(0, heard).Draw(t, "after"))
			}
			kept := 0
			events, _ := s.since(0)
			for _, e := range events {
				kept += len(e.GetPages())
			}
			if kept > all || kept != s.pages {
				t.Fatalf("%d pages are kept, it counts %d, there are %d", kept, s.pages, all)
			}
		}
		s.end()
		if s.pages != 0 {
			t.Errorf("%d pages are kept at the end", s.pages)
		}
	})
}

func upTo(n uint32) (list []uint32) {
	for i := range n {
		list = append(list, i)
	}
	return list
}

// TestSessionEndWaitsForItsCalls: nothing of a session begins after its end.
func TestSessionEndWaitsForItsCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSession(time.Now(), "t", "e")
		if err := s.enter(); err != nil {
			t.Fatal(err)
		}
		ctx, stop := s.within(t.Context())
		defer stop()
		ended := make(chan []manager.Token, 1)
		go func() { ended <- s.end() }()
		synctest.Wait()
		if ctx.Err() == nil {
			t.Error("the call is not told")
		}
		if err := s.enter(); !errors.Is(err, errNoSession) {
			t.Errorf("a call after the end: %v", err)
		}
		select {
		case <-ended:
			t.Error("it has ended under a call")
		default:
		}
		s.begin(5) // the call had got so far
		s.leave()
		if steps := <-ended; len(steps) != 1 || steps[0] != 5 {
			t.Errorf("steps %v are left", steps)
		}
	})
}

func TestSessionGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const grace = 10 * time.Second
		s := newSession(time.Now(), "t", "e")
		time.Sleep(grace)
		if s.lost(time.Now(), grace) {
			t.Error("lost within the grace")
		}
		first := s.attach()
		time.Sleep(time.Hour)
		second := s.attach()
		select {
		case <-first:
		default:
			t.Error("two streams stand")
		}
		s.detach(time.Now(), first) // it notices late
		time.Sleep(time.Hour)
		if s.lost(time.Now(), grace) {
			t.Error("lost, and a stream stands")
		}
		s.detach(time.Now(), second)
		time.Sleep(grace + 1)
		if !s.lost(time.Now(), grace) {
			t.Error("not lost after the grace")
		}
	})
}

func TestIncarnations(t *testing.T) {
	dir := t.TempDir()
	now := time.UnixMicro(1_700_000_000_000_000)
	s, err := openIncarnations(dir)
	if err != nil {
		t.Fatal(err)
	}
	next := func(now time.Time) id.Incarnation {
		t.Helper()
		i, err := s.next(now)
		if err != nil {
			t.Fatal(err)
		}
		return i
	}
	first := next(now)
	if first != id.Incarnation(now.UnixMicro()) {
		t.Errorf("%d, want the time", first)
	}
	if got := next(now.Add(-time.Hour)); got != first+1 {
		t.Errorf("%d with the clock set back, want %d", got, first+1)
	}
	if got := next(time.Time{}); got != first+2 {
		t.Errorf("%d without a clock, want %d", got, first+2)
	}
	if got := next(now.Add(time.Hour)); got != first+id.Incarnation(time.Hour.Microseconds()) {
		t.Errorf("%d an hour later", got)
	}
	s.atLeast = first * 2
	if got := next(now); got != first*2 {
		t.Errorf("%d, want what others remember", got)
	}
	for _, content := range []string{"", "-1", "soon", "18446744073709551615", "99999999999999999999"} {
		if err := writeSynced(s.path, []byte(content)); err != nil {
			t.Fatal(err)
		}
		if i, err := s.next(now); err == nil {
			t.Errorf("%q is followed by %d", content, i)
		}
	}
}

// TestFollows: one follow a request; a call that was ended makes none.
func TestFollows(t *testing.T) {
	fs := newFollows()
	n := &Node{follows: fs}
	n.peers = newPeers(n)
	a, b := id.Publication{Owner: id.Life{Node: "a", Incarnation: 1}, Sequence: 1}, id.Publication{Owner: id.Life{Node: "b", Incarnation: 1}, Sequence: 1}
	ctx, leave, err := fs.enter(t.Context(), "r1")
	if err != nil {
		t.Fatal(err)
	}
	f, _, made, err := n.accept(ctx, nil, "r1", a, 1)
	if err != nil || !made {
		t.Fatal(err)
	}
	if again, _, made, err := n.accept(ctx, nil, "r1", b, 1); err != nil || made || again != f {
		t.Errorf("a second one: %v, %v, %v", again, made, err)
	}
	if fs.from(a) != f || fs.from(b) != nil || len(fs.active()) != 1 {
		t.Errorf("%v", fs.active())
	}
	cause := errors.New("that is why")
	got, calls := fs.detach("r1", cause)
	if got != f || len(calls) != 1 || ctx.Err() == nil {
		t.Errorf("detach = %v, %d calls, %v", got, len(calls), ctx.Err())
	}
	if _, _, _, err := n.accept(ctx, nil, "r1", b, 1); !errors.Is(err, cause) {
		t.Errorf("a call that was ended: %v", err)
	}
	leave()
	select {
	case <-calls[0].done:
	default:
		t.Error("it has left, and nobody knows")
	}
	f.abandon(kvferrypb.CompleteItem_FAILED)
	if len(fs.byRequest)+len(fs.bySource)+len(fs.calls)+fs.waiting != 0 {
		t.Errorf("%d, %d, %d, %d are left", len(fs.byRequest), len(fs.bySource), len(fs.calls), fs.waiting)
	}
	n.finish(f, kvferrypb.CompleteItem_FAILED) // late, of nobody any more
	g, _, _, err := n.accept(t.Context(), nil, "r1", a, 1)
	if err != nil {
		t.Fatal(err)
	}
	n.finish(f, kvferrypb.CompleteItem_FAILED)
	if fs.from(a) != g {
		t.Error("the end of the former follow ended the next one")
	}
}

// TestFollowFailure: what fails is told once nothing drains, and not at all
// once all has landed.
func TestFollowFailure(t *testing.T) {
	n := &Node{follows: newFollows()}
	n.peers = newPeers(n)
	f, _, _, err := n.accept(t.Context(), nil, "r1", id.Publication{Owner: id.Life{Node: "a", Incarnation: 1}, Sequence: 1}, 1)
	if err != nil {
		t.Fatal(err)
	}
	changed := f.watch()
	var cancelled error
	f.running = &reading{cancel: func(cause error) { cancelled = cause }}
	n.follows.lost(id.Life{Node: "a", Incarnation: 2}, errOwnerLost) // of another life
	if cancelled != nil {
		t.Error("it fails with another life")
	}
	f.refuse("expired")
	n.follows.lost(f.source.Owner, errOwnerLost)
	select {
	case <-changed:
	default:
		t.Error("nobody was woken")
	}
	if !errors.Is(cancelled, errOwnerLost) || f.failure() != nil {
		t.Errorf("cancelled %v, failure %v while it drains", cancelled, f.failure())
	}
	f.running = nil
	if err := f.failure(); !errors.Is(err, errOwnerLost) {
		t.Errorf("failure %v, want the first cause", err)
	}
	f.err = nil
	if err := f.failure(); !errors.Is(err, errExpired) {
		t.Errorf("failure %v, want what the owner says", err)
	}
	f.acknowledge(kvferrypb.CompleteItem_LANDED)
	f.fail(errCancelled)
	if f.err != nil || len(n.follows.active()) != 0 {
		t.Errorf("what is over fails: %v", f.err)
	}
}
