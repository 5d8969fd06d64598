package transfer_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
)

// fake is a transport whose links move nothing. It keeps what it was asked for.
type fake struct {
	name string
	// open tells how the n-th attempt ends, from 0; nil: well.
	open func(ctx context.Context, n int) error

	mu     sync.Mutex
	peers  []transfer.Peer
	links  []*fakeLink
	inOpen int // attempts that run
	most   int // of them at once
}

func (f *fake) Name() string       { return f.name }
func (f *fake) Descriptor() []byte { return []byte(f.name) }
func (f *fake) Close() error       { return nil }

func (f *fake) Open(ctx context.Context, peer transfer.Peer) (transfer.Link, error) {
	f.mu.Lock()
	n := len(f.peers)
	f.peers = append(f.peers, peer)
	f.inOpen++
	f.most = max(f.most, f.inOpen)
	f.mu.Unlock()
	var err error
	if f.open != nil {
		err = f.open(ctx, n)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inOpen--
	if err != nil {
		return nil, err
	}
	l := &fakeLink{closing: make(chan struct{})}
	f.links = append(f.links, l)
	return l, nil
}

// attempts is how often it was opened.
func (f *fake) attempts() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.peers)
}

// opened are all links that it has opened.
func (f *fake) opened() []*fakeLink {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.links)
}

// closings is how often each of its links was closed.
func (f *fake) closings() (times []int) {
	for _, l := range f.opened() {
		closed, _ := l.state()
		times = append(times, closed)
	}
	return times
}

// fakeLink holds the reads of hold, and ends others at once.
type fakeLink struct {
	closing chan struct{}

	mu     sync.Mutex
	closed int
	now    int // reads that run
	reads  sync.WaitGroup
}

// state is how often it was closed, and how many reads run.
func (l *fakeLink) state() (closed, running int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.closed, l.now
}

// count counts a read that begins or ends, which it may not on a closed link.
func (l *fakeLink) count(by int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed > 0 && by > 0 {
		return transfer.ErrClosed
	}
	l.now += by
	l.reads.Add(by)
	return nil
}

func (l *fakeLink) Read(ctx context.Context, _ []transfer.Seal, _ []transfer.Copy) error {
	if err := l.count(1); err != nil {
		return err
	}
	defer l.count(-1)
	h, ok := ctx.Value(heldKey{}).(*held)
	if !ok {
		return nil
	}
	select {
	case err := <-h.end:
		return err
	case <-l.closing:
		return transfer.ErrClosed
	}
}

func (l *fakeLink) Close() error {
	l.mu.Lock()
	if l.closed == 0 {
		close(l.closing)
	}
	l.closed++
	l.mu.Unlock()
	l.reads.Wait()
	return nil
}

var (
	errNoDevice = fmt.Errorf("no device on this machine: %w", transfer.ErrUnavailable)
	errWedged   = errors.New("device is wedged")
	routePeer   = transfer.Peer{Life: id.Life{Node: "prefill-1", Incarnation: 17}, ArenaBytes: map[id.Rank]int64{0: 1 << 20}}
)

// fails answers the first attempts with the errors, the others well.
func fails(errs ...error) func(context.Context, int) error {
	return func(_ context.Context, n int) error {
		if n < len(errs) {
			return errs[n]
		}
		return nil
	}
}

// always answers every attempt with err.
func always(err error) func(context.Context, int) error {
	return func(context.Context, int) error { return err }
}

// route is a route by these, all of which the peer has. It is closed at the end,
// and then every link must be.
func route(t testing.TB, o transfer.RouteOptions, ours ...*fake) *transfer.Route {
	t.Helper()
	var transports []transfer.Transport
	descriptors := make(map[string][]byte)
	for _, f := range ours {
		transports = append(transports, f)
		descriptors[f.name] = []byte(f.name)
	}
	r := transfer.NewRoute(transports, routePeer, descriptors, o)
	t.Cleanup(func() { closeRoute(t, r, ours...) })
	return r
}

func closeRoute(t interface{ Errorf(string, ...any) }, r *transfer.Route, ours ...*fake) {
	if err := r.Close(); err != nil {
		t.Errorf("Close = %v", err)
	}
	for _, f := range ours {
		for i, n := range f.closings() {
			if n != 1 {
				t.Errorf("link %d of %s was closed %d times, want once", i, f.name, n)
			}
		}
	}
}

// take is Link, which must be by the transport.
func take(t testing.TB, r *transfer.Route, by string) transfer.Link {
	t.Helper()
	transport, link, err := r.Link(t.Context())
	if err != nil {
		t.Fatalf("Link: %v, want one by %s", err, by)
	}
	if transport.Name() != by {
		t.Fatalf("Link is by %s, want %s; %+v", transport.Name(), by, r.State())
	}
	return link
}

// refused are the reasons of a route, and what is in use.
func refused(r *transfer.Route) (lines []string) {
	for _, s := range r.State() {
		line := s.Name
		if s.InUse {
			line += " in use"
		}
		if s.Reason != "" {
			line += ": " + s.Reason
		}
		lines = append(lines, line)
	}
	return lines
}

func wantState(t testing.TB, r *transfer.Route, want ...string) {
	t.Helper()
	if got := refused(r); !slices.Equal(got, want) {
		t.Errorf("State is %q, want %q", got, want)
	}
}

func TestRouteTakesTheBestThatBothHave(t *testing.T) {
	all := map[string][]byte{"shm": []byte("s"), "rdma": {}, "tcp": []byte("t")}
	const absent = ": the peer does not have it"
	const gone = ": no device on this machine: transport not available"
	for name, tt := range map[string]struct {
		ours        []*fake
		descriptors map[string][]byte
		want        string // "" if none
		opened      []string
		state       []string
		text        []string // of the error
	}{
		"the first": {
			ours: []*fake{{name: "shm"}, {name: "tcp"}}, descriptors: all,
			want: "shm", opened: []string{"shm"}, state: []string{"shm in use", "tcp"},
		},
		"ours decides the order": {
			ours: []*fake{{name: "tcp"}, {name: "shm"}}, descriptors: all,
			want: "tcp", opened: []string{"tcp"}, state: []string{"tcp in use", "shm"},
		},
		"an empty descriptor is one": {
			ours: []*fake{{name: "rdma"}}, descriptors: all,
			want: "rdma", opened: []string{"rdma"}, state: []string{"rdma in use"},
		},
		"passes what cannot be used": {
			ours: []*fake{{name: "cudaipc"}, {name: "rdma", open: always(errNoDevice)}, {name: "tcp"}}, descriptors: all,
			want: "tcp", opened: []string{"rdma", "tcp"},
			state: []string{"cudaipc" + absent, "rdma" + gone, "tcp in use"},
		},
		"none is left": {
			ours: []*fake{{name: "cudaipc"}, {name: "shm", open: always(errNoDevice)}}, descriptors: all,
			opened: []string{"shm"}, state: []string{"cudaipc" + absent, "shm" + gone},
			text: []string{"prefill-1.17", "cudaipc" + absent, "shm: no device"},
		},
		"the peer has none": {
			ours: []*fake{{name: "tcp"}}, state: []string{"tcp" + absent},
			text: []string{"prefill-1.17", "tcp" + absent},
		},
		"we have none": {descriptors: all, text: []string{"no transport is configured"}},
	} {
		t.Run(name, func(t *testing.T) {
			var ours []transfer.Transport
			for _, f := range tt.ours {
				ours = append(ours, f)
			}
			r := transfer.NewRoute(ours, routePeer, tt.descriptors, transfer.RouteOptions{})
			transport, link, err := r.Link(t.Context())
			if tt.want == "" && (transport != nil || link != nil || !errors.Is(err, transfer.ErrUnavailable)) {
				t.Errorf("Link = %v, %v, %v, want one that wraps ErrUnavailable", transport, link, err)
			}
			if tt.want != "" && (err != nil || transport.Name() != tt.want || link == nil) {
				t.Errorf("Link = %v, %v, %v, want %s", transport, link, err, tt.want)
			}
			for _, text := range tt.text {
				if err == nil || !strings.Contains(err.Error(), text) {
					t.Errorf("error %v does not say %q", err, text)
				}
			}
			var opened []string
			for _, f := range tt.ours {
				for _, p := range f.peers {
					opened = append(opened, f.name)
					if p.Life != routePeer.Life || p.ArenaBytes[0] != 1<<20 || string(p.Descriptor) != string(tt.descriptors[f.name]) {
						t.Errorf("%s was opened for %+v", f.name, p)
					}
				}
			}
			if !slices.Equal(opened, tt.opened) {
				t.Errorf("opened %v, want %v", opened, tt.opened)
			}
			wantState(t, r, tt.state...)
			closeRoute(t, r, tt.ours...)
		})
	}
}

func TestRouteKeepsItsLinkOpen(t *testing.T) {
	shm := &fake{name: "shm"}
	r := route(t, transfer.RouteOptions{}, shm)
	for range 3 {
		link := take(t, r, "shm")
		if err := link.Read(t.Context(), nil, nil); err != nil {
			t.Fatal(err)
		}
		r.Ended(link, nil)
		link.Close() // it is the route's
	}
	if shm.attempts() != 1 || !slices.Equal(shm.closings(), []int{0}) {
		t.Errorf("%d attempts, links closed %v times, want one that stays open", shm.attempts(), shm.closings())
	}
}

func TestRouteShowsABrokenTransportOnceAndThenTakesTheNext(t *testing.T) {
	shm, tcp := &fake{name: "shm", open: always(errWedged)}, &fake{name: "tcp"}
	r := route(t, transfer.RouteOptions{}, shm, tcp)
	_, _, err := r.Link(t.Context())
	if !errors.Is(err, errWedged) || errors.Is(err, transfer.ErrUnavailable) || !strings.Contains(err.Error(), "prefill-1.17: shm: device is wedged") || tcp.attempts() != 0 {
		t.Fatalf("Link = %v, want that it is broken", err)
	}
	take(t, r, "tcp")
	wantState(t, r, "shm: device is wedged", "tcp in use")
}

func TestRouteCountsFailuresInARow(t *testing.T) {
	t.Run("of Open", func(t *testing.T) {
		shm, tcp := &fake{name: "shm", open: fails(errWedged, nil, errWedged, nil, errWedged, errWedged)}, &fake{name: "tcp"}
		r := route(t, transfer.RouteOptions{}, shm, tcp)
		for range 2 {
			if _, _, err := r.Link(t.Context()); !errors.Is(err, errWedged) {
				t.Fatalf("Link = %v, want that it is broken", err)
			}
			link := take(t, r, "shm")
			r.Ended(link, nil)
			r.Ended(link, transfer.ErrIdentity) // drops it
		}
		if _, _, err := r.Link(t.Context()); !errors.Is(err, errWedged) {
			t.Fatalf("Link = %v, want that it is broken", err)
		}
		take(t, r, "tcp")
	})
	t.Run("of reads", func(t *testing.T) {
		shm, tcp := &fake{name: "shm"}, &fake{name: "tcp"}
		r := route(t, transfer.RouteOptions{}, shm, tcp)
		for range 5 { // one read fails, the next one does not
			r.Ended(take(t, r, "shm"), errWedged)
			r.Ended(take(t, r, "shm"), nil)
		}
		r.Ended(take(t, r, "shm"), errWedged)
		wantState(t, r, "shm in use", "tcp")
		r.Ended(take(t, r, "shm"), errWedged)
		wantState(t, r, "shm: device is wedged", "tcp")
		take(t, r, "tcp")
		wantState(t, r, "shm: device is wedged", "tcp in use")
		if !slices.Equal(shm.closings(), []int{1}) {
			t.Errorf("links of what rests were closed %v times, want once", shm.closings())
		}
	})
	t.Run("of reads, each of which ends its link", func(t *testing.T) {
		shm, tcp := &fake{name: "shm"}, &fake{name: "tcp"}
		r := route(t, transfer.RouteOptions{}, shm, tcp)
		first, beside := take(t, r, "shm"), take(t, r, "shm")
		r.Ended(first, transfer.ErrClosed)
		r.Ended(beside, transfer.ErrClosed)
		r.Ended(take(t, r, "shm"), nil)
		wantClosings(t, shm, 1, 0)
		r.Ended(take(t, r, "shm"), transfer.ErrClosed)
		wantState(t, r, "shm", "tcp")
		r.Ended(take(t, r, "shm"), transfer.ErrClosed)
		take(t, r, "tcp")
		wantState(t, r, "shm: closed", "tcp in use")
		wantClosings(t, shm, 1, 1, 1)
	})
	t.Run("of Open and a read", func(t *testing.T) {
		shm, tcp := &fake{name: "shm", open: fails(errWedged)}, &fake{name: "tcp"}
		r := route(t, transfer.RouteOptions{}, shm, tcp)
		if _, _, err := r.Link(t.Context()); !errors.Is(err, errWedged) {
			t.Fatalf("Link = %v, want that it is broken", err)
		}
		r.Ended(take(t, r, "shm"), errWedged)
		take(t, r, "tcp")
	})
	t.Run("of reads at once, which count as one", func(t *testing.T) {
		shm, tcp := &fake{name: "shm"}, &fake{name: "tcp"}
		r := route(t, transfer.RouteOptions{}, shm, tcp)
		var links []transfer.Link
		for range 10 {
			links = append(links, take(t, r, "shm"))
		}
		for _, l := range links {
			r.Ended(l, errWedged)
			r.Ended(l, errWedged)
		}
		last := take(t, r, "shm")
		r.Ended(last, errWedged)
		take(t, r, "tcp")
	})
}

func TestRouteKnowsWhoseFaultAnErrorIs(t *testing.T) {
	refused := errors.New("certificate refused")
	exempt := func(err error) bool { return errors.Is(err, refused) }
	for name, tt := range map[string]struct {
		err  error
		by   string // after three such reads
		open int    // attempts of shm
	}{
		"stale":       {transfer.ErrStale, "shm", 1},
		"range":       {transfer.ErrRange, "shm", 1},
		"cancelled":   {fmt.Errorf("request was cancelled: %w", context.Canceled), "shm", 1},
		"too late":    {context.DeadlineExceeded, "shm", 1},
		"exempt":      {fmt.Errorf("shake hands: %w", refused), "shm", 1},
		"identity":    {transfer.ErrIdentity, "shm", 4},
		"closed":      {transfer.ErrClosed, "tcp", 2},
		"stalled":     {transfer.ErrStalled, "tcp", 1},
		"anything":    {errWedged, "tcp", 1},
		"unavailable": {errNoDevice, "tcp", 1},
	} {
		t.Run(name, func(t *testing.T) {
			shm, tcp := &fake{name: "shm"}, &fake{name: "tcp"}
			r := route(t, transfer.RouteOptions{Exempt: exempt}, shm, tcp)
			for range 3 {
				_, link, err := r.Link(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if transport, _, _ := r.Link(t.Context()); transport.Name() == "shm" {
					r.Ended(link, &transfer.Error{Transport: "shm", Err: tt.err})
				}
			}
			take(t, r, tt.by)
			if shm.attempts() != tt.open {
				t.Errorf("%d attempts, want %d", shm.attempts(), tt.open)
			}
		})
	}
	for name, err := range map[string]error{"another life": transfer.ErrIdentity, "refused": refused} {
		t.Run("Open of "+name, func(t *testing.T) {
			shm, tcp := &fake{name: "shm", open: always(err)}, &fake{name: "tcp"}
			r := route(t, transfer.RouteOptions{Exempt: exempt}, shm, tcp)
			for range 5 {
				if _, _, got := r.Link(t.Context()); !errors.Is(got, err) {
					t.Errorf("Link = %v, want %v", got, err)
				}
			}
			if tcp.attempts() != 0 {
				t.Error("the next transport was taken")
			}
		})
	}
	for name, err := range map[string]error{"a peer that lies of its memory": transfer.ErrRange, "a peer that is slow": context.DeadlineExceeded} {
		t.Run("Open of "+name, func(t *testing.T) {
			shm, tcp := &fake{name: "shm", open: always(err)}, &fake{name: "tcp"}
			r := route(t, transfer.RouteOptions{Exempt: exempt}, shm, tcp)
			if _, _, got := r.Link(t.Context()); !errors.Is(got, err) {
				t.Errorf("Link = %v, want %v", got, err)
			}
			take(t, r, "tcp")
		})
	}
}

// Who looks tells a transport that cannot reach the peer from one that should.
func TestRouteTellsWhatIsBroken(t *testing.T) {
	cannot, broken, tcp := &fake{name: "rdma", open: always(errNoDevice)}, &fake{name: "shm", open: fails(errWedged, errWedged, errNoDevice)}, &fake{name: "tcp"}
	synctest.Test(t, func(t *testing.T) {
		r := transfer.NewRoute([]transfer.Transport{&fake{name: "cudaipc"}, cannot, broken, tcp}, routePeer, map[string][]byte{"rdma": nil, "shm": nil, "tcp": nil}, transfer.RouteOptions{})
		defer closeRoute(t, r, cannot, broken, tcp)
		said := func() (names []string) {
			for _, s := range r.State() {
				if s.Broken {
					names = append(names, s.Name)
				}
			}
			return names
		}
		_, _, _ = r.Link(t.Context())
		take(t, r, "tcp")
		if got := said(); !slices.Equal(got, []string{"shm"}) {
			t.Errorf("%v are broken, want shm", got)
		}
		time.Sleep(5 * time.Second)
		r.Probe(t.Context()) // now it says that it cannot
		if got := said(); len(got) > 0 {
			t.Errorf("%v are broken, want none", got)
		}
		time.Sleep(10 * time.Second)
		r.Probe(t.Context())
		take(t, r, "shm")
		if got := said(); len(got) > 0 {
			t.Errorf("%v are broken, want none", got)
		}
	})
}

func TestRouteBoundsAReason(t *testing.T) {
	shm := &fake{name: "shm", open: always(fmt.Errorf("%s: %w", strings.Repeat("é", 10_000), transfer.ErrUnavailable))}
	r := route(t, transfer.RouteOptions{}, shm)
	if _, _, err := r.Link(t.Context()); !errors.Is(err, transfer.ErrUnavailable) || len(err.Error()) > 700 {
		t.Errorf("an error of %d bytes", len(err.Error()))
	}
	if reason := r.State()[0].Reason; len(reason) > 510 || len(reason) < 490 || strings.ToValidUTF8(reason, "?") != reason {
		t.Errorf("a reason of %d bytes", len(reason))
	}
}

// held is a read that ends as it is told, or when its link is closed.
type held struct {
	link transfer.Link
	end  chan error
	done chan error
}

type heldKey struct{}

// hold starts a read that is under way when hold returns. In a bubble alone.
func hold(link transfer.Link) *held {
	h := &held{link, make(chan error, 1), make(chan error, 1)}
	ctx := context.WithValue(context.Background(), heldKey{}, h)
	go func() { h.done <- link.Read(ctx, nil, nil) }()
	synctest.Wait()
	return h
}

// finish ends the read with err, and returns what Read did when all is quiet.
func (h *held) finish(err error) error {
	h.end <- err
	got := <-h.done
	synctest.Wait()
	return got
}

func wantClosings(t testing.TB, f *fake, want ...int) {
	t.Helper()
	if got := f.closings(); !slices.Equal(got, want) {
		t.Errorf("links of %s were closed %v times, want %v", f.name, got, want)
	}
}

// A link that says that it is closed, or that it is of another life, is dropped,
// and reads that run on it are not disturbed.
func TestRouteDropsALinkThatIsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shm := &fake{name: "shm"}
		r := route(t, transfer.RouteOptions{}, shm)
		running := hold(take(t, r, "shm"))
		r.Ended(take(t, r, "shm"), transfer.ErrIdentity)
		take(t, r, "shm")
		wantClosings(t, shm, 0, 0)
		if err := running.finish(nil); err != nil {
			t.Errorf("the read that ran ends with %v", err)
		}
		wantClosings(t, shm, 1, 0)
		r.Ended(take(t, r, "shm"), transfer.ErrClosed) // nobody reads
		wantClosings(t, shm, 1, 1)
		shm.open = always(errWedged)
		if _, _, err := r.Link(t.Context()); !errors.Is(err, errWedged) {
			t.Errorf("Link = %v after what was open was dropped", err)
		}
	})
}

// A node with one transport is not out of reach for the time of a rest.
func TestRouteNeverRestsWithoutAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tcp, rdma := &fake{name: "tcp"}, &fake{name: "rdma", open: always(errNoDevice)}
		r := route(t, transfer.RouteOptions{}, rdma, tcp)
		start := time.Now()
		for range 20 {
			r.Ended(take(t, r, "tcp"), errWedged)
		}
		tcp.open = always(errWedged)
		for range 5 {
			_, _, err := r.Link(t.Context())
			if err == nil || !errors.Is(err, errWedged) || errors.Is(err, transfer.ErrUnavailable) {
				t.Fatalf("Link = %v, want that tcp is broken", err)
			}
		}
		tcp.open = nil
		take(t, r, "tcp")
		if time.Since(start) != 0 {
			t.Errorf("that took %v", time.Since(start))
		}
	})
}

// With nothing else to use, what is refused is tried at once, and that does not
// put off when it is due.
func TestRouteTriesAgainWhatIsRefusedIfNothingElseIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		no := func(n int) error { return fmt.Errorf("no route, attempt %d: %w", n, transfer.ErrUnavailable) }
		shm, tcp := &fake{name: "shm", open: always(errNoDevice)}, &fake{name: "tcp", open: fails(no(0), no(1), no(2))}
		r := route(t, transfer.RouteOptions{}, shm, tcp)
		for n := range 3 {
			_, _, err := r.Link(t.Context())
			if !errors.Is(err, transfer.ErrUnavailable) || !strings.Contains(err.Error(), "shm: no device") || !strings.Contains(err.Error(), fmt.Sprintf("tcp: no route, attempt %d", n)) {
				t.Errorf("Link = %v, want every refusal", err)
			}
		}
		take(t, r, "tcp")
		if s := r.State(); s[0].RetryIn != 5*time.Second || s[1].RetryIn != 0 || !s[1].InUse {
			t.Errorf("State = %+v, want that shm is tried again in 5s", s)
		}
	})
}

// The one that has rested longest is tried first when all rest.
func TestRouteTakesTurnsIfAllFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shm, tcp := &fake{name: "shm"}, &fake{name: "tcp"}
		r := route(t, transfer.RouteOptions{}, shm, tcp)
		for range 3 {
			for _, by := range []string{"shm", "tcp"} {
				r.Ended(take(t, r, by), errWedged)
				time.Sleep(time.Millisecond)
				r.Ended(take(t, r, by), errWedged)
			}
			if s := r.State(); s[0].Reason == "" || s[1].Reason == "" {
				t.Fatalf("State = %+v, want reasons", s)
			}
			time.Sleep(2 * time.Minute)
		}
	})
}

func TestRouteProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var works bool
		shm := &fake{name: "shm", open: func(context.Context, int) error {
			if works {
				return nil
			}
			return errNoDevice
		}}
		cudaipc, tcp := &fake{name: "cudaipc"}, &fake{name: "tcp"}
		r := transfer.NewRoute([]transfer.Transport{cudaipc, shm, tcp}, routePeer, map[string][]byte{"shm": nil, "tcp": nil}, transfer.RouteOptions{})
		defer closeRoute(t, r, cudaipc, shm, tcp)

		if next := r.Probe(t.Context()); next != 0 || shm.attempts()+tcp.attempts() != 0 {
			t.Errorf("Probe = %v before anything is refused, want 0 and no attempt", next)
		}
		old := take(t, r, "tcp")
		running := hold(old)

		// Tried when it is due, and half as often each time.
		for i, want := range []time.Duration{5, 10, 20, 40, 60, 60} {
			if next := r.Probe(t.Context()); next != want*time.Second || shm.attempts() != i+1 {
				t.Fatalf("Probe = %v after %d attempts, want %v", next, shm.attempts(), want*time.Second)
			}
			if s := r.State()[1]; s.RetryIn != want*time.Second || s.Reason == "" {
				t.Errorf("State = %+v, want it tried in %v", s, want*time.Second)
			}
			if next := r.Probe(t.Context()); next != want*time.Second || shm.attempts() != i+1 {
				t.Fatalf("Probe = %v, and %d attempts before it was due", next, shm.attempts())
			}
			time.Sleep(want * time.Second)
		}
		works = true
		if next := r.Probe(t.Context()); next != 0 {
			t.Errorf("Probe = %v with the best in use, want 0", next)
		}
		wantState(t, r, "cudaipc: the peer does not have it", "shm in use", "tcp")
		if cudaipc.attempts() != 0 {
			t.Error("what the peer does not have was tried")
		}

		// The read that ran is not disturbed, and what it read is closed at its end.
		wantClosings(t, tcp, 0)
		if err := running.finish(nil); err != nil {
			t.Errorf("the read that ran ends with %v", err)
		}
		wantClosings(t, tcp, 1)
		r.Ended(old, nil)

		// Who has taken the old link and had not begun reads the new one.
		if err := hold(old).finish(nil); err != nil {
			t.Errorf("a read of a link that was replaced ends with %v", err)
		}

		// It opens, but reads fail: it rests longer than before, until one ends well.
		for range 2 {
			r.Ended(take(t, r, "shm"), errWedged)
		}
		take(t, r, "tcp")
		if next := r.Probe(t.Context()); next != 60*time.Second {
			t.Errorf("Probe = %v after what was refused often failed, want 1m", next)
		}
		time.Sleep(60 * time.Second)
		r.Probe(t.Context())
		r.Ended(take(t, r, "shm"), nil)
		for range 2 {
			r.Ended(take(t, r, "shm"), errWedged)
		}
		take(t, r, "tcp")
		if next := r.Probe(t.Context()); next != 5*time.Second {
			t.Errorf("Probe = %v after a read had ended well, want 5s", next)
		}
	})
}

func TestRouteProbeTakesTheBestThatOpens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rdma := &fake{name: "rdma", open: always(errNoDevice)}
		shm, tcp, slow := &fake{name: "shm", open: fails(errNoDevice)}, &fake{name: "tcp", open: fails(errNoDevice)}, &fake{name: "slow"}
		r := route(t, transfer.RouteOptions{RetryMin: time.Second, RetryMax: time.Hour}, rdma, shm, tcp, slow)
		take(t, r, "slow")
		time.Sleep(time.Second)
		if next := r.Probe(t.Context()); next != 2*time.Second {
			t.Errorf("Probe = %v, want 2s, when rdma is due", next)
		}
		wantState(t, r, "rdma: no device on this machine: transport not available", "shm in use", "tcp: no device on this machine: transport not available", "slow")
		if tcp.attempts() != 1 {
			t.Error("one was tried that is worse than what opened")
		}
		wantClosings(t, slow, 1)
	})
}

func TestRouteProbeEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		shm := &fake{name: "shm", open: func(_ context.Context, n int) error {
			if n == 0 {
				return errNoDevice
			}
			<-gate
			return nil
		}}
		r := route(t, transfer.RouteOptions{}, shm, &fake{name: "tcp"})
		take(t, r, "tcp")
		time.Sleep(5 * time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		if next := r.Probe(ctx); next <= 0 || time.Since(start) != time.Second {
			t.Errorf("Probe = %v after %v, want more than 0 after 1s", next, time.Since(start))
		}
		take(t, r, "tcp") // which is open, whatever is tried
		close(gate)
		synctest.Wait()
		take(t, r, "shm")
	})
}

func TestRouteMakesOneAttemptForAll(t *testing.T) {
	for name, end := range map[string]error{"well": nil, "broken": errWedged} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				gate := make(chan struct{})
				shm := &fake{name: "shm", open: func(ctx context.Context, _ int) error {
					<-gate
					return errors.Join(ctx.Err(), end)
				}}
				r := route(t, transfer.RouteOptions{}, shm)
				impatient := errors.New("impatient")
				ctx, cancel := context.WithCancelCause(t.Context())
				results := make(chan error, 101)
				call := func(ctx context.Context) {
					_, _, err := r.Link(ctx)
					results <- err
				}
				go call(ctx) // the one that starts the attempt
				synctest.Wait()
				for range 100 {
					go call(t.Context())
				}
				synctest.Wait()
				cancel(impatient)
				if err := <-results; !errors.Is(err, impatient) {
					t.Errorf("Link = %v, want the cause", err)
				}
				synctest.Wait()
				if len(results) != 0 {
					t.Error("one caller gave up, and another with it")
				}
				close(gate)
				for range 100 {
					if err := <-results; !errors.Is(err, end) {
						t.Errorf("Link = %v, want %v", err, end)
					}
				}
				if shm.attempts() != 1 {
					t.Errorf("%d attempts, want 1", shm.attempts())
				}
				_, _, err := r.Link(ctx)
				if end != nil && (!errors.Is(err, impatient) || shm.attempts() != 1) {
					t.Errorf("Link = %v with a context that has ended, and %d attempts", err, shm.attempts())
				}
			})
		})
	}
}

func TestRouteClose(t *testing.T) {
	t.Run("ends an attempt and waits for it", func(t *testing.T) {
		for name, end := range map[string]error{"that fails": errWedged, "that opens": nil} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					shm := &fake{name: "shm", open: func(ctx context.Context, _ int) error {
						<-ctx.Done()
						time.Sleep(time.Second)
						return end
					}}
					r := route(t, transfer.RouteOptions{}, shm, &fake{name: "tcp"})
					result := make(chan error, 1)
					go func() {
						_, _, err := r.Link(t.Context())
						result <- err
					}()
					synctest.Wait()
					start := time.Now()
					go r.Close() // a second one waits too
					closeRoute(t, r, shm)
					if time.Since(start) != time.Second {
						t.Errorf("Close took %v, want 1s", time.Since(start))
					}
					if err := <-result; !errors.Is(err, transfer.ErrClosed) {
						t.Errorf("Link = %v, want ErrClosed", err)
					}
				})
			})
		}
	})
	t.Run("ends reads, also of what was replaced", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			shm, tcp := &fake{name: "shm", open: fails(errNoDevice)}, &fake{name: "tcp"}
			r := route(t, transfer.RouteOptions{}, shm, tcp)
			link := take(t, r, "tcp")
			old := hold(link)
			time.Sleep(5 * time.Second)
			r.Probe(t.Context())
			current := hold(take(t, r, "shm"))
			closeRoute(t, r, shm, tcp)
			for _, h := range []*held{old, current} {
				if err := <-h.done; !errors.Is(err, transfer.ErrClosed) {
					t.Errorf("a read ends with %v, want ErrClosed", err)
				}
			}
			if err := link.Read(t.Context(), nil, nil); !errors.Is(err, transfer.ErrClosed) {
				t.Errorf("Read = %v after Close, want ErrClosed", err)
			}
			if _, _, err := r.Link(t.Context()); !errors.Is(err, transfer.ErrClosed) {
				t.Errorf("Link = %v after Close, want ErrClosed", err)
			}
			if next := r.Probe(t.Context()); next != 0 {
				t.Errorf("Probe = %v after Close, want 0", next)
			}
			r.Ended(link, nil)
			if s := r.State(); s[0].InUse || s[1].InUse {
				t.Errorf("State = %+v after Close", s)
			}
		})
	})
}

// complaints are what a test finds where it may not end it.
type complaints []string

func (c *complaints) Errorf(format string, args ...any) {
	*c = append(*c, fmt.Sprintf(format, args...))
}

// Whatever happens in whatever order: one link is in use and every better
// transport has a reason; each other link that is open is read; at most one
// attempt runs; and in the end every link was closed once.
func TestRouteAtRandom(t *testing.T) {
	swaps := 0 // of links while they were read, of all schedules
	rapid.Check(t, func(rt *rapid.T) {
		seed := rapid.Uint64().Draw(rt, "seed")
		transports := rapid.IntRange(1, 4).Draw(rt, "transports")
		steps := rapid.IntRange(1, 300).Draw(rt, "steps")
		var found complaints
		synctest.Test(t, func(t *testing.T) {
			s := schedule{Rand: rand.New(rand.NewPCG(seed, 0)), found: &found}
			s.begin(transports)
			for range steps {
				s.step(t)
				if s.check(); len(found) > 0 {
					break
				}
			}
			s.close()
			swaps += s.swaps
		})
		if len(found) > 0 {
			rt.Fatal(strings.Join(found, "\n"))
		}
	})
	if swaps < 10 {
		t.Errorf("%d links were replaced while they were read: the test is not what it says", swaps)
	}
}

// schedule is a route, what was done with it, and what comes next at random.
type schedule struct {
	*rand.Rand
	found  *complaints
	route  *transfer.Route
	ours   []*fake
	has    map[string][]byte
	links  []transfer.Link
	reads  []*held
	closed bool
	swaps  int

	mu      sync.Mutex
	opens   map[string]error         // how an attempt ends
	takes   map[string]time.Duration // and when
	opening int
}

func (s *schedule) begin(transports int) {
	s.has, s.opens, s.takes = make(map[string][]byte), make(map[string]error), make(map[string]time.Duration)
	var ours []transfer.Transport
	for i := range transports {
		f := &fake{name: fmt.Sprintf("t%d", i)}
		f.open = func(ctx context.Context, _ int) error { return s.open(ctx, f.name) }
		s.ours, ours = append(s.ours, f), append(ours, f)
		if s.IntN(6) > 0 {
			s.has[f.name] = nil
		}
		s.opens[f.name] = s.outcome()
	}
	s.route = transfer.NewRoute(ours, routePeer, s.has, transfer.RouteOptions{RetryMin: time.Second, RetryMax: 4 * time.Second})
}

func (s *schedule) open(ctx context.Context, name string) error {
	s.mu.Lock()
	if s.opening++; s.opening > 1 {
		s.found.Errorf("two attempts at once")
	}
	err, wait := s.opens[name], s.takes[name]
	s.mu.Unlock()
	select {
	case <-time.After(wait):
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	s.mu.Lock()
	s.opening--
	s.mu.Unlock()
	return err
}

// outcome is how an attempt or a read ends.
func (s *schedule) outcome() error {
	return []error{
		nil, nil, nil, nil, errWedged, errWedged, errNoDevice, transfer.ErrStalled, transfer.ErrIdentity, transfer.ErrClosed, transfer.ErrStale, context.Canceled,
	}[s.IntN(12)]
}

func (s *schedule) patience(t *testing.T) (context.Context, context.CancelFunc) {
	return context.WithTimeout(t.Context(), time.Duration(s.IntN(4))*time.Second)
}

func (s *schedule) step(t *testing.T) {
	r := s.route
	switch n := s.IntN(100); {
	case n < 30:
		ctx, cancel := s.patience(t)
		defer cancel()
		transport, link, err := r.Link(ctx)
		switch {
		case s.closed && !errors.Is(err, transfer.ErrClosed):
			s.found.Errorf("Link = %v after Close", err)
		case err == nil:
			if !slices.ContainsFunc(r.State(), func(s transfer.RouteState) bool { return s.InUse && s.Name == transport.Name() }) {
				s.found.Errorf("Link is by %s, State is %+v", transport.Name(), r.State())
			}
			s.links = append(s.links, link)
		}
	case n < 35:
		var callers sync.WaitGroup
		for range 5 {
			callers.Go(func() { _, _, _ = r.Link(t.Context()) })
		}
		callers.Wait()
	case n < 55 && len(s.links) > 0:
		h := hold(s.links[s.IntN(len(s.links))])
		select {
		case err := <-h.done: // the link was closed, and nothing has replaced it
			if !errors.Is(err, transfer.ErrClosed) || slices.ContainsFunc(r.State(), func(s transfer.RouteState) bool { return s.InUse }) {
				s.found.Errorf("a read ends with %v, State is %+v", err, r.State())
			}
			r.Ended(h.link, err)
		default:
			s.reads = append(s.reads, h)
		}
	case n < 75 && len(s.reads) > 0:
		i := s.IntN(len(s.reads))
		h, err := s.reads[i], s.outcome()
		s.reads = slices.Delete(s.reads, i, i+1)
		if got := h.finish(err); !errors.Is(got, err) {
			s.found.Errorf("a read that ends with %v ended with %v", err, got)
		}
		r.Ended(h.link, err)
	case n < 80 && len(s.links) > 0:
		r.Ended(s.links[s.IntN(len(s.links))], s.outcome())
	case n < 88:
		ctx, cancel := s.patience(t)
		defer cancel()
		if next := r.Probe(ctx); next < 0 || next > 4*time.Second || s.closed && next != 0 {
			s.found.Errorf("Probe = %v", next)
		}
	case n < 93:
		time.Sleep(time.Duration(s.IntN(5000)) * time.Millisecond)
	case n < 99:
		name := s.ours[s.IntN(len(s.ours))].name
		s.mu.Lock()
		s.opens[name], s.takes[name] = s.outcome(), time.Duration(s.IntN(3))*time.Second
		s.mu.Unlock()
	case s.IntN(3) == 0:
		s.close()
	}
}

func (s *schedule) close() {
	s.closed = true
	closeRoute(s.found, s.route, s.ours...)
	for _, h := range s.reads {
		if err := <-h.done; !errors.Is(err, transfer.ErrClosed) {
			s.found.Errorf("a read ends with %v at Close, want ErrClosed", err)
		}
	}
	s.reads = nil
}

func (s *schedule) check() {
	synctest.Wait()
	states := s.route.State()
	used := slices.IndexFunc(states, func(s transfer.RouteState) bool { return s.InUse })
	for i, state := range states {
		_, has := s.has[state.Name]
		if i < used && state.Reason == "" || i == used && state.Reason != "" || i > used && state.InUse || !has && state.Reason == "" {
			s.found.Errorf("State is %+v", states)
		}
	}
	open, readers := 0, 0
	for i, f := range s.ours {
		for n, l := range f.opened() {
			closings, running := l.state()
			readers += running
			switch {
			case closings > 1:
				s.found.Errorf("link %d of %s was closed %d times", n, f.name, closings)
			case closings == 0 && i != used && running == 0:
				s.found.Errorf("link %d of %s is open, and neither read nor in use", n, f.name)
			case closings == 0 && running == 0:
				open++
			}
			if closings == 0 && running > 0 && i != used {
				s.swaps++
			}
		}
	}
	if open > 1 || readers != len(s.reads) || s.closed && used >= 0 {
		s.found.Errorf("%d idle links are open, %d reads run, want %d; State is %+v", open, readers, len(s.reads), states)
	}
}

func ExampleRoute() {
	ours := []transfer.Transport{&fake{name: "rdma"}, &fake{name: "tcp"}}
	peer := transfer.Peer{Life: id.Life{Node: "prefill-1", Incarnation: 17}}
	r := transfer.NewRoute(ours, peer, map[string][]byte{"tcp": []byte("10.0.0.1:7902")}, transfer.RouteOptions{})
	defer r.Close()
	transport, link, err := r.Link(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	err = link.Read(context.Background(), []transfer.Seal{{Index: 1, Value: 2}}, nil)
	r.Ended(link, err)
	fmt.Println(transport.Name(), err)
	for _, s := range r.State() {
		fmt.Println(s.Name, s.InUse, s.Reason)
	}
	// Output:
	// tcp <nil>
	// rdma false the peer does not have it
	// tcp true
}

// What has broken is said once, also where the last attempt was by it.
func TestWhatHasBrokenIsSaidOnce(t *testing.T) {
	for name, ours := range map[string][]*fake{
		"alone":       {{name: "shm", open: always(errWedged)}},
		"with others": {{name: "rdma", open: always(errNoDevice)}, {name: "shm", open: always(errWedged)}},
	} {
		t.Run(name, func(t *testing.T) {
			r := route(t, transfer.RouteOptions{}, ours...)
			for attempt := range 4 { // the later ones find nothing that works
				_, _, err := r.Link(t.Context())
				if !errors.Is(err, errWedged) || strings.Count(err.Error(), errWedged.Error()) != 1 {
					t.Errorf("attempt %d: %v", attempt, err)
				}
			}
		})
	}
}
