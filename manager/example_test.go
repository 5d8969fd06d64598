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
	var plans manager.Plans
	if err := m.Plan(step, &plans); err != nil {
		log.Fatal(err)
	}
	first := plans.Plans[0].Slots[0]
	fmt.Printf("%s: %d tokens from page %d slot %d on\n", r, tokens, first.Page, first.Slot)
	if _, err := m.Commit(step); err != nil {
		log.Fatal(err)
	}
}

// One request: computed on a prefill node, pulled and continued on a decode
// node.
func Example() {
	prefill, decode := open("prefill", 8), open("decode", 16)

	_ = prefill.Ingest("r", manager.RequestConfig{})
	compute(prefill, "r", 20)
	p, _ := prefill.Publish("r", true) // the node sets the seal word and announces it
	removed, _ := prefill.Remove("r", false)
	fmt.Println("lives on:", removed.Lives, "pages in limbo:", prefill.Counts().Limbo)

	_ = decode.Ingest("r", manager.RequestConfig{})
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
	_ = m.Ingest("a", manager.RequestConfig{})
	_ = m.Ingest("b", manager.RequestConfig{})
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
	_ = m.Ingest("a", manager.RequestConfig{})
	step, _ := m.Admit(manager.Step{
		Segments: []manager.Segment{{Request: "a", Label: id.Main, Span: 9}, {Request: "a", Label: "cfg", Span: 2}},
		Combined: []manager.Combined{{Sources: []id.Label{id.Main, "cfg"}, Label: "batched"}},
	})
	var plans manager.Plans
	_ = m.Plan(step, &plans)
	for _, p := range plans.Plans {
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
	_ = m.Ingest("a", manager.RequestConfig{})
	step, _ := m.Admit(manager.Step{Segments: []manager.Segment{{Request: "a", Label: id.Main, Span: 16}}})
	_ = m.Abort(step)
	main := m.Requests(0)[0].Streams[0]
	fmt.Println(main.Label, "has", main.Tokens, "tokens and", main.Pages, "pages")
	// Output: main has 0 tokens and 2 pages
}

// Published pages are let go when their seal word has been cleared, not before.
func ExampleManager_Reset() {
	m := open("node", 8)
	_ = m.Ingest("a", manager.RequestConfig{})
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
	_ = m.Ingest("a", manager.RequestConfig{})
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

// Classifier-free guidance: the prompt is computed once, then goes on twice.
func ExampleManager_PostForks() {
	m := open("node", 8)
	_ = m.Ingest("a", manager.RequestConfig{})
	step, _ := m.Admit(manager.Step{
		Segments:  []manager.Segment{{Request: "a", Label: id.Main, Span: 12}},
		PostForks: []manager.Fork{{From: id.Main, To: "cfg"}},
	})
	// Here the engine writes the planned slots.
	copies, _ := m.PostForks(step)
	for _, c := range copies {
		fmt.Println("copy", c.Tokens, "tokens from pages", c.Source, "to", c.Target)
	}
	_, _ = m.Commit(step)
	tokens, _ := m.Stored("a", "cfg")
	fmt.Println("cfg has", tokens)
	// Output:
	// copy 12 tokens from pages [3 4] to [1 2]
	// cfg has 12
}

// The next step is planned while nobody waits for it.
func ExampleManager_Stage() {
	m := open("node", 8)
	_ = m.Ingest("a", manager.RequestConfig{})
	next := manager.Step{Segments: []manager.Segment{{Request: "a", Label: id.Main, Span: 1}}, Lane: 1}
	staged, _ := m.Stage(next)
	step, _ := m.Admit(next)
	fmt.Println("the staged one:", step == staged)
	_, _ = m.Commit(step)

	staged, _ = m.Stage(next)
	next.Segments[0].Span = 2
	step, _ = m.Admit(next)
	fmt.Println("the staged one:", step == staged)
	// Output:
	// the staged one: true
	// the staged one: false
}

// A request that rests makes room on the device.
func ExampleManager_Offload() {
	m, _ := manager.New(manager.Options{
		Geometry: page.Geometry{Model: "tiny", WorldSize: 1, Layout: page.Layout{
			Order: page.NHD, DType: page.BF16, Layers: 2, Pages: 8, PageSize: 8, Heads: 2, HeadDim: 64,
		}},
		Host: 4,
	})
	_ = m.Ingest("a", manager.RequestConfig{})
	compute(m, "a", 20)
	move, _ := m.Offload("a")
	for _, s := range move.Streams {
		fmt.Println("copy", s.Tokens, "tokens of", s.Label, "from pages", s.Device, "to host pages", s.Host)
	}
	done, _ := m.Offloaded(move.ID)
	fmt.Println("freed", done.Freed)

	move, _ = m.Reload("a")
	fmt.Println("back to pages", move.Streams[0].Device)
	_ = m.Reloaded(move.ID)
	// Output:
	// a: 20 tokens from page 1 slot 0 on
	// copy 20 tokens of main from pages [1 2 3] to host pages [0 1 2]
	// freed 3
	// back to pages [4 5 6]
}
