package manager

import (
	"fmt"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// One decode step of 256 requests, a thousand tokens each: admit, plan, commit.
func BenchmarkDecodeStep256(b *testing.B) {
	const requests, size = 256, 16
	o := Options{Geometry: geometry(requests*128, size)}
	m, err := New(o)
	if err != nil {
		b.Fatal(err)
	}
	var prompt, step Step
	for i := range requests {
		r := id.Request(fmt.Sprintf("request-%08d", i))
		if err := m.Ingest(r, RequestConfig{}); err != nil {
			b.Fatal(err)
		}
		prompt.Segments = append(prompt.Segments, Segment{r, id.Main, 1000})
		step.Segments = append(step.Segments, Segment{r, id.Main, 1})
	}
	var plans Plans
	run := func(s Step, plan bool) {
		t, err := m.Admit(s)
		if err != nil {
			b.Fatal(err)
		}
		if plan {
			if err := m.Plan(t, &plans); err != nil {
				b.Fatal(err)
			}
		}
		if _, err := m.Commit(t); err != nil {
			b.Fatal(err)
		}
	}
	for _, plan := range []bool{true, false} {
		b.Run(fmt.Sprintf("plan=%v", plan), func(b *testing.B) {
			b.ReportAllocs()
			left := 0
			for b.Loop() {
				if left == 0 {
					b.StopTimer()
					for _, g := range step.Segments {
						if _, err := m.Reset(g.Request, false); err != nil {
							b.Fatal(err)
						}
					}
					run(prompt, false)
					left = 1000
					b.StartTimer()
				}
				left--
				run(step, plan)
			}
		})
	}
}

// A decode step allocates nothing once its buffers are there.
func TestDecodeAllocatesNothing(t *testing.T) {
	m, err := New(Options{Geometry: geometry(64*16, 16)})
	if err != nil {
		t.Fatal(err)
	}
	var s Step
	var plans Plans
	for i := range 64 {
		r := id.Request(fmt.Sprint(i))
		if err := m.Ingest(r, RequestConfig{}); err != nil {
			t.Fatal(err)
		}
		s.Segments = append(s.Segments, Segment{r, id.Main, 1})
	}
	step := func() {
		tok, err := m.Admit(s)
		if err == nil {
			err = m.Plan(tok, &plans)
		}
		if err == nil {
			_, err = m.Commit(tok)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for range 2 * 16 { // pages are taken every 16 steps
		step()
	}
	if n := testing.AllocsPerRun(14, step); n > 0 {
		t.Errorf("%v allocations a step", n)
	}
}

const benchPages, benchSize = 8192, 16

// One request of 8,192 pages in 64 runs, as a worn arena gives, is published.
func BenchmarkPublish8192(b *testing.B) {
	owner := worn(b)
	b.ReportAllocs()
	for b.Loop() {
		p, err := owner.Publish("r", false)
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer() // end it, so that the next one names all pages again
		owner.Unsealed(p.ID)
		owner.requests["r"].ended = false
		b.StartTimer()
	}
}

// It is brought in by another manager.
func BenchmarkAdmitRetrieve8192(b *testing.B) {
	p, err := worn(b).Publish("r", true)
	if err != nil {
		b.Fatal(err)
	}
	reader := ready(b, "reader")
	src := &Source{
		Name:     id.Publication{Owner: id.Life{Node: "owner", Incarnation: 1}, Sequence: 1},
		Geometry: geometry(benchPages+1, benchSize), Publication: p,
	}
	b.ReportAllocs()
	for b.Loop() {
		out, err := reader.AdmitRetrieve("r", At{}, src, 0)
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := reader.Failed(out.Start.ID); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

// What the two have to do at least: write the list of pages once.
func BenchmarkCopyList8192(b *testing.B) {
	from, to := make([]page.Index, benchPages), make([]page.Index, benchPages)
	for b.Loop() {
		copy(to, from)
	}
}

// worn returns a manager with a request of many runs: two are filled in turns,
// and one of them is kept.
func worn(b *testing.B) *Manager {
	const runs = 64
	m := ready(b, "owner")
	grow := func(r id.Request, tokens int) {
		t, err := m.Admit(Step{Segments: []Segment{{r, id.Main, tokens}}})
		if err == nil {
			_, err = m.Commit(t)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	err := m.Ingest("other", RequestConfig{})
	for range runs / 2 {
		grow("r", benchPages/runs*benchSize)
		grow("other", benchPages/runs*benchSize)
	}
	if err == nil {
		_, err = m.Remove("other", false)
	}
	if err != nil {
		b.Fatal(err)
	}
	grow("r", benchPages/2*benchSize)
	list := m.requests["r"].streams[0].pages
	if n := len(page.Runs(list)); n > runs || len(list) != benchPages {
		b.Fatalf("%d pages in %d runs", len(list), n)
	}
	return m
}

func ready(b *testing.B, name id.Node) *Manager {
	m, err := New(Options{Life: id.Life{Node: name, Incarnation: 1}, Geometry: geometry(benchPages+1, benchSize)})
	if err == nil {
		err = m.Ingest("r", RequestConfig{})
	}
	if err != nil {
		b.Fatal(err)
	}
	return m
}
