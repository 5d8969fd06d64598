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
		if err := m.Ingest(r, Needs{}); err != nil {
			b.Fatal(err)
		}
		prompt.Segments = append(prompt.Segments, Segment{r, id.Main, 1000})
		step.Segments = append(step.Segments, Segment{r, id.Main, 1})
	}
	run := func(s Step, plan bool) {
		t, err := m.Admit(s)
		if err != nil {
			b.Fatal(err)
		}
		if plan {
			if _, err := m.Plan(t); err != nil {
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

// One request of 8,192 pages is published, and retrieved by another manager.
// The page list is in 64 runs, as a worn arena gives.
func BenchmarkPublish8192(b *testing.B) {
	const pages, size, runs = 8192, 16, 64
	owner, reader := ready(b, pages+1, size, "owner"), ready(b, pages+1, size, "reader")
	// Runs are interleaved by filling two requests in turns and keeping one.
	grow := func(r id.Request, tokens int) {
		t, err := owner.Admit(Step{Segments: []Segment{{r, id.Main, tokens}}})
		if err == nil {
			_, err = owner.Commit(t)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	must := func(err error) {
		if err != nil {
			b.Fatal(err)
		}
	}
	must(owner.Ingest("other", Needs{}))
	for range runs / 2 {
		grow("r", pages/runs*size)
		grow("other", pages/runs*size)
	}
	_, err := owner.Remove("other", false)
	must(err)
	grow("r", pages/2*size)

	var p Publication
	b.Run("publish", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			p, err = owner.Publish("r", false)
			must(err)
			b.StopTimer() // end it, so that the next one names all pages again
			owner.Unsealed(p.ID)
			owner.requests["r"].ended = false
			b.StartTimer()
		}
	})
	src := &Source{
		Name:     id.Publication{Owner: id.Life{Node: "owner", Incarnation: 1}, Sequence: 1},
		Geometry: geometry(pages+1, size), Publication: p,
	}
	if n := len(page.Runs(p.Streams[0].Pages)); n > runs {
		b.Fatalf("%d runs", n)
	}
	b.Run("retrieve", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			out, err := reader.AdmitRetrieve("r", At{}, src, 0)
			must(err)
			b.StopTimer()
			must(reader.Failed(out.Start.ID))
			b.StartTimer()
		}
	})
}

func ready(b *testing.B, pages, size int, name id.Node) *Manager {
	m, err := New(Options{Life: id.Life{Node: name, Incarnation: 1}, Geometry: geometry(pages, size)})
	if err == nil {
		err = m.Ingest("r", Needs{})
	}
	if err != nil {
		b.Fatal(err)
	}
	return m
}
