package manager

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
)

var soak = flag.Duration("soak", time.Second, "how long the random tests run at least")

// Eight drivers share requests and pages, and do whatever comes. Each ends what
// it has begun; then every page must be free.
func TestSoak(t *testing.T) {
	b := newBed(t, 512, 16, func(o *Options) { o.Check = false })
	deadline := time.Now().Add(*soak)
	var work sync.WaitGroup
	for i := range 8 {
		work.Go(func() { drive(t, b.Manager, i, deadline) })
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
		}
	})
	work.Wait()
	for _, r := range b.Requests(0) {
		out := b.remove(r.Request, true)
		b.Unsealed(out.Unseal...)
		b.same("reads", len(out.Cancel), 0)
	}
	b.ok(b.verify())
	b.same("counts", b.Counts(), Counts{Free: 511, Sink: 1})
}

func drive(t *testing.T, m *Manager, driver int, deadline time.Time) {
	rnd := rand.New(rand.NewPCG(uint64(driver), 1))
	expect := func(err error, allowed ...error) {
		if err == nil {
			return
		}
		for _, a := range allowed {
			if errors.Is(err, a) {
				return
			}
		}
		t.Errorf("driver %d: %v", driver, err)
	}
	let := func(out Removed, err error) {
		expect(err)
		for _, r := range out.Cancel { // its driver may have ended it by itself
			expect(m.Cancel(r), ErrUnknownRetrieval)
		}
		m.Unsealed(append(out.Unseal, out.Lives...)...)
	}
	for i := 0; time.Now().Before(deadline) && !t.Failed(); i++ {
		r := id.Request(fmt.Sprint(rnd.IntN(16)))
		switch rnd.IntN(8) {
		case 0, 1, 2:
			expect(m.Ingest(r, Needs{}))
			tok, err := m.Admit(Step{
				Segments: []Segment{{r, "main", rnd.IntN(40)}, {id.Request(fmt.Sprint(16 + driver)), "main", 1}},
				Discard:  rnd.IntN(4) == 0,
			})
			expect(m.Ingest(id.Request(fmt.Sprint(16+driver)), Needs{}))
			if err != nil {
				expect(err, ErrUnknownRequest, ErrReading, ErrNoPages)
				continue
			}
			_, err = m.Plan(tok)
			expect(err, ErrUnknownRequest, ErrInvalid)
			if rnd.IntN(4) == 0 {
				expect(m.Abort(tok))
			} else {
				_, err = m.Commit(tok)
				expect(err)
			}
		case 3, 4:
			_, err := m.Publish(r, rnd.IntN(4) == 0)
			expect(err, ErrUnknownRequest, ErrFinal, ErrEnded, ErrInvalid, ErrStepInFlight)
		case 5:
			src := peer(true, remote("main", rnd.IntN(100), 100))
			src.Geometry.Layout.PageSize = 16
			src.Publication.ContentEpoch = uint32(rnd.IntN(3))
			out, err := m.AdmitRetrieve(r, At{}, src, rnd.IntN(50))
			m.Unsealed(out.Unseal...)
			expect(err, ErrUnknownRequest, ErrStepInFlight, ErrNoPages, ErrDiverged)
			if out.Start == nil {
				continue
			}
			if rnd.IntN(3) == 0 || m.Landed(out.Start.ID) != nil {
				expect(m.Failed(out.Start.ID))
			}
		case 6:
			let(m.Reset(r, rnd.IntN(2) == 0))
		case 7:
			let(m.Remove(r, rnd.IntN(2) == 0))
		}
	}
}
