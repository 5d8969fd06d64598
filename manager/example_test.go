package manager_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

func open(node id.Node, pages int) *manager.Manager {
	m, err := manager.New(manager.Options{
		Life: id.Life{Node: node, Incarnation: 1},
		Geometry: page.Geometry{Model: "tiny", WorldSize: 1, Layout: page.Layout{
			Order: page.NHD, DType: page.BF16, Layers: 2, Pages: pages, PageSize: 8, Heads: 2, HeadDim: 64,
		}},
	})
	if err != nil {
		log.Fatal(err)
	}
	return m
}

// compute is one step of one request: the engine writes KV at the planned slots.
func compute(m *manager.Manager, r id.Request, tokens int) {
	step, err := m.Admit(manager.Step{Segments: []manager.Segment{{Request: r, Label: id.Main, Span: tokens}}})
	if err != nil {
		log.Fatal(err)
	}
	plans, err := m.Plan(step)
	if err != nil {
		log.Fatal(err)
	}
	first := plans[0].Slots[0]
	fmt.Printf("%s: %d tokens from page %d slot %d on\n", r, tokens, first.Page, first.Slot)
	if _, err := m.Commit(step); err != nil {
		log.Fatal(err)
	}
}

// One request: computed on a prefill node, pulled and continued on a decode
// node.
func Example() {
	prefill, decode := open("prefill", 8), open("decode", 16)

	_ = prefill.Ingest("r", manager.Needs{})
	compute(prefill, "r", 20)
	p, _ := prefill.Publish("r", true) // the node sets the seal word and announces it
	removed, _ := prefill.Remove("r", false)
	fmt.Println("lives on:", removed.Lives, "pages in limbo:", prefill.Counts().Limbo)

	_ = decode.Ingest("r", manager.Needs{})
	src := &manager.Source{
		Name:        id.Publication{Owner: id.Life{Node: "prefill", Incarnation: 1}, Sequence: 1},
		Geometry:    page.Geometry{Model: "tiny", WorldSize: 1, Layout: page.Layout{Order: page.NHD, DType: page.BF16, Layers: 2, Pages: 8, PageSize: 8, Heads: 2, HeadDim: 64}},
		Publication: p,
	}
	out, _ := decode.AdmitRetrieve("r", manager.At{}, src, 0)
	move := out.Start.Moves[0]
	fmt.Println(out.Readiness, "tokens", move.From, "to", move.To, "from pages", move.Remote, "into", move.Local)
	_ = decode.Landed(out.Start.ID) // everything has landed, and then the seal word held
	out, _ = decode.AdmitRetrieve("r", manager.At{}, src, 0)
	fmt.Println(out.Readiness)
	compute(decode, "r", 1)

	prefill.Unsealed(p.ID) // acknowledged, and the seal word cleared
	fmt.Println("free again:", prefill.Counts().Free)
	// Output:
	// r: 20 tokens from page 1 slot 0 on
	// lives on: [1] pages in limbo: 3
	// reading tokens 0 to 20 from pages [1 2 3] into [1 2 3]
	// ready
	// r: 1 tokens from page 3 slot 4 on
	// free again: 7
}

func ExampleManager_Admit() {
	m := open("node", 4)
	_ = m.Ingest("a", manager.Needs{})
	_ = m.Ingest("b", manager.Needs{})
	_, err := m.Admit(manager.Step{Segments: []manager.Segment{
		{Request: "a", Label: id.Main, Span: 16},
		{Request: "b", Label: id.Main, Span: 16},
	}})
	if short, ok := errors.AsType[*manager.AllocationError](err); ok {
		fmt.Println(short.Request, "is", short.Short, "page short; free:", m.Counts().Free)
	}
	// Output: b is 1 page short; free: 3
}

func ExampleManager_Plan() {
	m := open("node", 8)
	_ = m.Ingest("a", manager.Needs{})
	step, _ := m.Admit(manager.Step{
		Segments: []manager.Segment{{Request: "a", Label: id.Main, Span: 9}, {Request: "a", Label: "cfg", Span: 2}},
		Combined: []manager.Combined{{Sources: []id.Label{id.Main, "cfg"}, Label: "batched"}},
	})
	plans, _ := m.Plan(step)
	for _, p := range plans {
		fmt.Println(p.Label, p.Indptrs.QO, p.Indptrs.Pages, p.Indptrs.Indices, p.Indptrs.LastPageLen)
		fmt.Println(p.Slots[8:])
	}
	// Output:
	// batched [0 9 11] [0 2 3] [1 2 3] [1 2]
	// [{2 0} {3 0} {3 1}]
}

// A step that did not run leaves its pages as reserve.
func ExampleManager_Abort() {
	m := open("node", 8)
	_ = m.Ingest("a", manager.Needs{})
	step, _ := m.Admit(manager.Step{Segments: []manager.Segment{{Request: "a", Label: id.Main, Span: 16}}})
	_ = m.Abort(step)
	fmt.Println(m.Requests(0)[0].Streams)
	// Output: [{main 0 2}]
}

// Published pages are let go when their seal word has been cleared, not before.
func ExampleManager_Reset() {
	m := open("node", 8)
	_ = m.Ingest("a", manager.Needs{})
	compute(m, "a", 16)
	_, _ = m.Publish("a", false)
	removed, _ := m.Reset("a", true)
	fmt.Println("free:", m.Counts().Free, "in limbo:", m.Counts().Limbo)
	// Here the node clears the words of removed.Unseal.
	m.Unsealed(removed.Unseal...)
	fmt.Println("free:", m.Counts().Free)
	// Output:
	// a: 16 tokens from page 1 slot 0 on
	// free: 5 in limbo: 2
	// free: 7
}

// A read that was given up may still write: its pages wait for Failed.
func ExampleManager_Cancel() {
	m := open("node", 8)
	_ = m.Ingest("a", manager.Needs{})
	out, _ := m.AdmitRetrieve("a", manager.At{}, &manager.Source{
		Name: id.Publication{Owner: id.Life{Node: "other", Incarnation: 1}, Sequence: 1},
		Geometry: page.Geometry{Model: "tiny", WorldSize: 1, Layout: page.Layout{
			Order: page.NHD, DType: page.BF16, Layers: 2, Pages: 64, PageSize: 8, Heads: 2, HeadDim: 64,
		}},
		Publication: manager.Publication{Streams: []manager.Stream{
			{Label: id.Main, Ranks: []id.Rank{0}, Tokens: 10, Pages: []page.Index{40, 41}},
		}},
	}, 0)
	_ = m.Cancel(out.Start.ID)
	fmt.Println("in quarantine:", m.Counts().Quarantine, "landed:", m.Landed(out.Start.ID))
	_ = m.Failed(out.Start.ID) // nothing can land any more
	fmt.Println("free:", m.Counts().Free)
	// Output:
	// in quarantine: 2 landed: land retrieval 1: unknown or finished retrieval
	// free: 7
}
