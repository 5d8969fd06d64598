package pairtest

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/transfer"
)

// TestRuns says how many copies bring in a source whose pages lie in runs, when
// the reader's arena is worn by requests that came, grew a page at a time, and
// went: in pages as they were freed, and in those that a retrieval takes.
func TestRuns(t *testing.T) {
	const run, total = 16, 512
	for _, full := range []float64{0, 0.5, 0.8} {
		t.Run(fmt.Sprintf("full=%v", full), func(t *testing.T) {
			var list []page.Index
			for i := range page.Index(total) {
				list = append(list, 1+i+i/run)
			}
			// Two of the same life, of which one retrieves and the other one computes.
			mirrored, freed := newWorn(t, full), newWorn(t, full)
			src := &manager.Source{
				Name:     id.Publication{Owner: id.Life{Node: "source", Incarnation: 1}, Sequence: 1},
				Geometry: mirrored.geometry,
				Publication: manager.Publication{Request: "r", Final: true, Streams: []manager.Stream{
					{Label: id.Main, Ranks: []id.Rank{0}, Tokens: total * wornSize, Pages: list},
				}},
			}
			out, err := mirrored.AdmitRetrieve("r", manager.At{}, src, 0)
			if err != nil {
				t.Fatal(err)
			}
			before := copies(t, freed.layout(), list, freed.grow("r", total))
			after := copies(t, mirrored.layout(), list, out.Start.Moves[0].Local)
			t.Logf("%d pages in %d runs: %d copies into pages as they were freed, %d as they are taken", total, total/run, before, after)
			if full == 0 && after != total/run || full > 0 && 2*after > before {
				t.Errorf("%d copies, %d of pages as they were freed", after, before)
			}
		})
	}
}

// copies of one layer.
func copies(t *testing.T, l page.Layout, remote, local []page.Index) int {
	t.Helper()
	l.Layers = 1
	list, err := transfer.Copies(nil, 0, transfer.Side{Layout: l, Pages: remote}, transfer.Side{Layout: l, Pages: local}, 0, len(remote)*l.PageSize)
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

const wornPages, wornSize = 8192, 16

// worn is a manager with requests of many kinds.
type worn struct {
	*manager.Manager
	t        *testing.T
	geometry page.Geometry
	pages    map[id.Request]int
}

func newWorn(t *testing.T, full float64) *worn {
	w := &worn{t: t, pages: make(map[id.Request]int), geometry: page.Geometry{Model: "worn", WorldSize: 1, Layout: page.Layout{
		Order: page.NHD, DType: page.BF16, Layers: 1, Pages: wornPages, PageSize: wornSize, Heads: 1, HeadDim: 8,
	}}}
	var err error
	w.Manager, err = manager.New(manager.Options{Life: id.Life{Node: "worn", Incarnation: 1}, Geometry: w.geometry})
	if err != nil {
		t.Fatal(err)
	}
	random := rand.New(rand.NewPCG(5, 1))
	var live []id.Request
	used := 0
	for i := range 20000 {
		if full == 0 {
			break
		}
		switch x := random.Float64(); {
		case float64(used) > full*wornPages: // one goes
			k := random.IntN(len(live))
			used -= w.pages[live[k]]
			if _, err := w.Remove(live[k], false); err != nil {
				t.Fatal(err)
			}
			live[k] = live[len(live)-1]
			live = live[:len(live)-1]
		case x < 0.1 || len(live) == 0: // one comes with a prompt
			r := id.Request(fmt.Sprint(i))
			w.ingest(r)
			live = append(live, r)
			n := 1 + random.IntN(128)
			w.grow(r, n)
			used += n
		default: // one computes on
			w.grow(live[random.IntN(len(live))], 1)
			used++
		}
	}
	w.ingest("r")
	return w
}

func (w *worn) layout() page.Layout { return w.geometry.Layout }

func (w *worn) ingest(r id.Request) {
	w.t.Helper()
	if err := w.Ingest(r, manager.RequestConfig{}); err != nil {
		w.t.Fatal(err)
	}
}

// grow computes so many pages of tokens, and returns all pages of the request.
func (w *worn) grow(r id.Request, pages int) []page.Index {
	w.t.Helper()
	step, err := w.Admit(manager.Step{Segments: []manager.Segment{{Request: r, Label: id.Main, Span: pages * wornSize}}})
	var plans manager.Plans
	if err == nil {
		err = w.Plan(step, &plans)
	}
	if err == nil {
		_, err = w.Commit(step)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	w.pages[r] += pages
	return plans.Plans[0].Views[0].Pages
}
