package bench

import (
	"container/heap"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// What is announced: 1,024 tokens of one rank in pages of 16, in four runs.
const (
	loadTokens   = 1024
	loadPageSize = 16
	loadRun      = 16 // pages that follow each other
	loadPool     = 1 << 17
)

const (
	loadHold = 30 * time.Second
	// maxLate is how late announcements may be made until they are given up: the
	// rate is not reached.
	maxLate = time.Second
	// sightings is how many announcements a second are watched at most.
	sightings = 250
)

// load is announcements at a fixed rate, whoever is late, by all members of a
// mesh in turn. Each is of another request, which is released some time between
// half its life and the whole of it, so that ends fall in no step with begins.
// What is measured is the window that begins after one life: from then on as
// many end as begin.
type load struct {
	rate         float64 // announcements a second, of all members together
	life, window time.Duration
	// settle is how long after the last announcement all have to know all of
	// them, and after the last release that all have ended.
	settle time.Duration
}

// loaded is what became of a load.
type loaded struct {
	made     float64 // announcements a second in the window
	complete float64 // share of (announcement, other member) that knew each other in time
	cleared  bool    // all that had ended was known to have, in time
	lost     int64   // members that one of the others took for gone
	cores    float64 // CPU seconds a second of the whole process
	traffic  traffic // a second and member
	// From the call that announces until a random other member shows it to who
	// watches it, and until all do.
	one, all delay
}

// delay is how long something took, in microseconds.
type delay struct {
	p50, p99 float64
	samples  int64
}

func delayOf(h *hdrhistogram.Histogram) delay {
	return delay{float64(h.ValueAtQuantile(50)), float64(h.ValueAtQuantile(99)), h.TotalCount()}
}

// holds says that nothing was lost or late beyond repair, at the rate asked for:
// who makes more in the window has made less before.
func (l loaded) holds(rate float64) bool {
	return l.complete == 1 && l.cleared && l.lost == 0 && math.Abs(l.made/rate-1) < 0.02
}

// traffic is what members put on the wire and take from it.
type traffic struct{ bytes, packets float64 }

func (m *mesh) traffic() (t traffic) {
	for _, n := range m.members {
		s := n.cluster.Stats()
		t.bytes += float64(s.BytesIn + s.BytesOut)
		t.packets += float64(s.PacketsIn + s.PacketsOut)
	}
	return t
}

// since is the traffic of a second and member.
func (m *mesh) since(then traffic, d time.Duration) traffic {
	now, per := m.traffic(), d.Seconds()*float64(len(m.members))
	return traffic{(now.bytes - then.bytes) / per, (now.packets - then.packets) / per}
}

// idle is the traffic of members that have nothing to say.
func (m *mesh) idle(ctx context.Context, d time.Duration) (traffic, error) {
	before, start := m.traffic(), time.Now()
	if err := pause(ctx, d); err != nil {
		return traffic{}, err
	}
	return m.since(before, time.Since(start)), nil
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// announcement is one that lives.
type announcement struct {
	member *member
	id     manager.PublicationID
	end    time.Time
}

// living is a heap of announcements, the one that ends next first.
type living []announcement

func (l living) Len() int           { return len(l) }
func (l living) Less(i, j int) bool { return l[i].end.Before(l[j].end) }
func (l living) Swap(i, j int)      { l[i], l[j] = l[j], l[i] }
func (l *living) Push(x any)        { *l = append(*l, x.(announcement)) }

func (l *living) Pop() any {
	last := len(*l) - 1
	a := (*l)[last]
	*l = (*l)[:last]
	return a
}

// run is one load on one mesh.
type run struct {
	load
	mesh    *mesh
	request string // prefix
	live    living
	made    int
	begun   time.Time
	watches sync.WaitGroup

	mu  sync.Mutex // guards what follows
	one *hdrhistogram.Histogram
	all *hdrhistogram.Histogram
}

// run puts the load on the mesh and waits until nothing of it is left.
func (l load) run(ctx context.Context, m *mesh) (loaded, error) {
	const second = 1_000_000
	r := &run{
		load: l, mesh: m, request: fmt.Sprintf("bench-%08x", rand.Uint32()),
		begun: time.Now(), one: hdrhistogram.New(1, 100*second, 3), all: hdrhistogram.New(1, 100*second, 3),
	}
	watch, stop := context.WithCancel(ctx)
	defer r.watches.Wait()
	defer stop()
	lost, known := m.lost.Load(), m.known()

	if err := r.announce(watch, l.life, false); err != nil {
		return loaded{}, err
	}
	before, cpu, start, made := m.traffic(), cpuSeconds(), time.Now(), r.made
	if err := r.announce(watch, l.life+l.window, true); err != nil {
		return loaded{}, err
	}
	took := time.Since(start)
	out := loaded{
		made: float64(r.made-made) / took.Seconds(), cores: (cpuSeconds() - cpu) / took.Seconds(),
		traffic: m.since(before, took),
	}

	want := float64(r.made * (len(m.members) - 1))
	if err := within(ctx, l.settle, func() bool {
		out.complete = float64(m.known()-known) / want
		return out.complete == 1
	}); err != nil {
		return loaded{}, err
	}
	stop() // who does not see it now has waited so long at least
	r.watches.Wait()
	out.one, out.all = delayOf(r.one), delayOf(r.all)
	for len(r.live) > 0 {
		if err := r.release(); err != nil {
			return loaded{}, err
		}
	}
	if err := within(ctx, l.settle, func() bool {
		out.cleared = m.entries() == 0
		return out.cleared
	}); err != nil {
		return loaded{}, err
	}
	out.lost = m.lost.Load() - lost
	return out, nil
}

// known is how many announcements members have learnt of others.
func (m *mesh) known() (n uint64) {
	for _, member := range m.members {
		n += member.board.Stats().News
	}
	return n
}

func (m *mesh) entries() (n int) {
	for _, member := range m.members {
		n += member.board.Stats().Entries
	}
	return n
}

// within waits until ok holds, no longer than d.
func within(ctx context.Context, d time.Duration, ok func() bool) error {
	for end := time.Now().Add(d); !ok() && time.Now().Before(end); {
		if err := pause(ctx, tickInterval); err != nil {
			return err
		}
	}
	return nil
}

// announce announces what is due until so long after the begin, watched or not.
func (r *run) announce(ctx context.Context, until time.Duration, watched bool) error {
	every := max(1, int(r.rate/sightings))
	for ; time.Since(r.begun) < until+maxLate; r.made++ {
		due := time.Duration(float64(r.made) / r.rate * float64(time.Second))
		if due >= until {
			break
		}
		if wait := time.Until(r.begun.Add(due)); wait > 0 {
			if err := pause(ctx, wait); err != nil {
				return err
			}
		}
		for len(r.live) > 0 && !time.Now().Before(r.live[0].end) {
			if err := r.release(); err != nil {
				return err
			}
		}
		if err := r.publish(ctx, watched && r.made%every == 0); err != nil {
			return err
		}
	}
	return nil
}

// publish announces one publication, and has it watched.
func (r *run) publish(ctx context.Context, watched bool) error {
	owner := r.made % len(r.mesh.members)
	n := r.mesh.members[owner]
	p := manager.Publication{
		ID: manager.PublicationID(r.made + 1), Request: id.Request(fmt.Sprintf("%s-%d", r.request, r.made)), Final: true,
		Streams: []manager.Stream{{Label: id.Main, Ranks: []id.Rank{benchRank}, Tokens: loadTokens, Pages: somePages()}},
	}
	start := time.Now()
	if _, _, _, err := n.log.Reserve(p.ID); err != nil {
		return fmt.Errorf("%s: %w", n.life, err)
	}
	if _, err := n.log.Announce(start, p, loadHold); err != nil {
		return fmt.Errorf("%s: %w", n.life, err)
	}
	n.flush()
	heap.Push(&r.live, announcement{n, p.ID, start.Add(r.life/2 + rand.N(r.life/2))})
	if watched {
		r.watches.Go(func() { r.watch(ctx, owner, p.Request, start) })
	}
	return nil
}

func somePages() []page.Index {
	pages := make([]page.Index, 0, loadTokens/loadPageSize)
	for len(pages) < cap(pages) {
		first := 1 + page.Index(rand.IntN(loadPool-loadRun))
		for i := range page.Index(loadRun) {
			pages = append(pages, first+i)
		}
	}
	return pages
}

// release ends the publication that ends next.
func (r *run) release() error {
	a := heap.Pop(&r.live).(announcement)
	if err := a.member.log.Release(time.Now(), a.id); err != nil {
		return fmt.Errorf("%s: %w", a.member.life, err)
	}
	a.member.flush()
	return nil
}

// watch waits until the other members show the request, a random one first.
func (r *run) watch(ctx context.Context, owner int, request id.Request, start time.Time) {
	others := rand.Perm(len(r.mesh.members) - 1)
	for i := range others { // all but the owner
		if others[i] >= owner {
			others[i]++
		}
	}
	r.mesh.members[others[0]].sight(ctx, request)
	one := time.Since(start)
	for _, i := range others[1:] {
		r.mesh.members[i].sight(ctx, request)
	}
	all := time.Since(start)
	r.mu.Lock()
	defer r.mu.Unlock()
	_ = r.one.RecordValue(max(1, one.Microseconds()))
	_ = r.all.RecordValue(max(1, all.Microseconds()))
}

// sight returns when the board shows the request, or ctx ends.
func (n *member) sight(ctx context.Context, request id.Request) {
	for ctx.Err() == nil {
		changed, cancel := n.board.Watch(request)
		if len(n.board.ByRequest(time.Now(), request)) > 0 {
			cancel()
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
		cancel()
	}
}
