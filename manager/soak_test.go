package manager

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

var soak = flag.Duration("soak", time.Second, "how long the random tests run at least")

// Eight drivers share requests and pages, and do whatever comes. Each ends what
// it has begun; then every page must be free, on the device and on the host, and
// no stream away.
func spec101(t *testing.T) {
	b := newBed(t, 512, 16, func(o *Options) { o.Check, o.Host = false, 64 })
	deadline := time.Now().Add(*soak)
	var work sync.WaitGroup
	for i := range 8 {
		work.Go(func() { newDriver(t, b.Manager, i).drive(deadline) })
	}
	work.Go(func() { // the tables agree at every moment, not just in the end
		for time.Now().Before(deadline) {
			b.mu.Lock()
			err := b.verify()
			b.mu.Unlock()
			if err != nil {
				t.Error(err)
				return
			}
			b.Requests(3)
			b.Counts()
			if _, err := b.Page(page.Index(len(b.Victims()))); err != nil {
				t.Error(err)
			}
		}
	})
	work.Wait()
	for _, r := range b.Requests(0) {
		for _, s := range r.Streams {
			if s.State == Offloading || s.State == Reloading {
				t.Errorf("%q label %q is left %v", r.Request, s.Label, s.State)
			}
		}
		out := b.remove(r.Request, true)
		b.Unsealed(out.Unseal...)
		b.same("reads", len(out.Cancel), 0)
	}
	b.ok(b.verify())
	b.same("counts", b.Counts(), Counts{Free: 511, Sink: 1, HostFree: 64})
}

// driver is an engine with a lane of its own.
type driver struct {
	*testing.T
	*Manager
	*rand.Rand
	number int
	plans  Plans
}

func newDriver(t *testing.T, m *Manager, number int) *driver {
	return &driver{T: t, Manager: m, Rand: rand.New(rand.NewPCG(uint64(number), 1)), number: number}
}

func (d *driver) expect(err error, allowed ...error) {
	if err != nil && !slices.ContainsFunc(allowed, func(a error) bool { return errors.Is(err, a) }) {
		d.Errorf("driver %d: %v", d.number, err)
	}
}

// let takes what Remove and Reset leave to be done.
func (d *driver) let(out Removed, err error, allowed ...error) {
	d.expect(err, allowed...)
	for _, r := range out.Cancel { // its driver may have ended it by itself
		d.expect(d.Cancel(r), ErrUnknownRetrieval)
	}
	d.Unsealed(append(out.Unseal, out.Lives...)...)
}

// failed tells the two methods of that name apart.
func (d *driver) failed(i RetrievalID) error { m := d.Manager; return m.Failed(i) }

func (d *driver) request() id.Request { return id.Request(fmt.Sprint(d.IntN(16))) }
func (d *driver) own() id.Request     { return id.Request(fmt.Sprint(16 + d.number)) }
func (d *driver) label() id.Label     { return []id.Label{"main", "cfg", "x"}[d.IntN(6)/2] }

func (d *driver) drive(deadline time.Time) {
	for time.Now().Before(deadline) && !d.T.Failed() {
		r := d.request()
		switch d.IntN(14) {
		case 0, 1, 2, 3, 4:
			for _, r := range []id.Request{r, d.own()} {
				var c RequestConfig
				if d.IntN(2) == 0 {
					c.Retention = map[id.Label]Retention{"main": {Budget: 40, Prefix: 16}}
				}
				d.expect(d.Ingest(r, c))
			}
			d.step(r)
		case 5, 6:
			_, err := d.Publish(r, d.IntN(4) == 0)
			d.expect(err, ErrUnknownRequest, ErrFinal, ErrEnded, ErrInvalid, ErrStepInFlight)
		case 7:
			d.Republish(r)
			d.expect(d.SetPosition(r, d.label(), d.IntN(100)), ErrUnknownRequest, ErrUnknownLabel)
			d.Unstage(Lane(d.number))
		case 8, 9:
			src := peer(true, remote("main", d.IntN(100), 100))
			src.Geometry.Layout.PageSize = 16
			src.Publication.ContentEpoch = uint32(d.IntN(3))
			out, err := d.AdmitRetrieve(r, At{}, src, d.IntN(50))
			d.Unsealed(out.Unseal...)
			d.expect(err, ErrUnknownRequest, ErrStepInFlight, ErrNoPages, ErrDiverged, ErrOffloading)
			if out.Start != nil && (d.IntN(3) == 0 || d.Landed(out.Start.ID) != nil) {
				d.expect(d.failed(out.Start.ID))
			}
		case 10:
			out, err := d.Reset(r, d.IntN(2) == 0)
			d.let(out, err, ErrOffloading)
		case 11:
			out, err := d.Remove(r, d.IntN(2) == 0)
			d.let(out, err)
		case 12:
			w, err := d.Offload(r)
			d.expect(err, ErrUnknownRequest, ErrStepInFlight, ErrReading, ErrOffloading, ErrHostFull)
			if w.ID == 0 {
				continue
			}
			if d.IntN(4) == 0 {
				d.expect(d.Abandon(w.ID))
				continue
			}
			out, err := d.Offloaded(w.ID)
			d.expect(err)
			d.Unsealed(out.Unseal...)
		case 13:
			w, err := d.Reload(r)
			d.expect(err, ErrUnknownRequest, ErrStepInFlight, ErrReading, ErrOffloading, ErrNoPages)
			if w.ID != 0 && (d.IntN(4) == 0 || d.Reloaded(w.ID) != nil) {
				d.expect(d.Abandon(w.ID))
			}
		}
	}
	d.Unstage(Lane(d.number))
}

// step runs one, perhaps after it was staged, with forks or without.
func (d *driver) step(r id.Request) {
	s := Step{
		Segments: []Segment{{r, d.label(), d.IntN(40)}, {d.own(), "main", 1}},
		Discard:  d.IntN(4) == 0, Lane: Lane(d.number),
	}
	if d.IntN(3) == 0 {
		s.Rows = []id.Request{r}
		s.PreForks, s.PostForks = []Fork{{"main", "cfg"}}, []Fork{{"cfg", "x"}, {"main", "cfg"}}
	}
	refused := []error{ErrUnknownRequest, ErrReading, ErrNoPages, ErrOffloading, ErrStepInFlight}
	if d.IntN(3) == 0 {
		t, err := d.Stage(s)
		d.expect(err, append(refused, ErrStaged)...)
		if err == nil {
			d.expect(d.Plan(t, &d.plans), ErrUnknownRequest, ErrInvalid)
		}
		if d.IntN(2) == 0 {
			return
		}
	}
	t, err := d.Admit(s)
	if err != nil {
		d.expect(err, refused...)
		return
	}
	d.expect(d.Plan(t, &d.plans), ErrUnknownRequest, ErrInvalid)
	if d.IntN(4) == 0 {
		d.expect(d.Abort(t))
		return
	}
	_, err = d.PostForks(t)
	d.expect(err)
	out, err := d.Commit(t)
	d.expect(err)
	d.Unsealed(out.Unseal...)
}
