package manager

import (
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// Every page says who holds it and why.
func TestPage(t *testing.T) {
	b := newBed(t, 24, 8, func(o *Options) { o.Host = 8 })
	look := func(p page.Index, want PageState) {
		t.Helper()
		got, err := b.Page(p)
		b.ok(err)
		want.Page = p
		b.same("page", got, want)
	}
	for _, p := range []page.Index{24, 1 << 31, ^page.Index(0)} {
		_, err := b.Page(p)
		b.fails(err, ErrInvalid)
	}
	look(0, PageState{Place: "sink"})
	look(1, PageState{Place: "free"})

	b.ok(b.Ingest("a", RequestConfig{Retention: map[id.Label]Retention{"main": {Budget: 16, Prefix: 8}}}))
	b.ingest("r", "f", "h")
	one := b.admit(Segment{"a", "main", 37}) // 1 to 5
	look(5, PageState{Place: "owned", Request: "a", Label: "main", First: 32, Step: one})
	b.ok(b.Abort(one))
	look(5, PageState{Place: "owned", Request: "a", Label: "main", First: 32})
	b.grow("a", "main", 20)
	p := b.publish("a", false)
	look(3, PageState{Place: "owned", Request: "a", Label: "main", First: 16, Tokens: 4, Publications: []PublicationID{p.ID}})
	two := b.admit(Segment{"a", "main", 12})
	look(2, PageState{Place: "owned", Request: "a", Label: "main", First: 8, Tokens: 8, Publications: []PublicationID{p.ID}})
	look(3, PageState{Place: "owned", Request: "a", Label: "main", First: 16, Tokens: 4, Step: two, Publications: []PublicationID{p.ID}})
	look(4, PageState{Place: "owned", Request: "a", Label: "main", First: 24, Step: two})
	b.commit(two) // 2 and 3 are let go
	look(2, PageState{Place: "limbo", Publications: []PublicationID{p.ID}})
	look(1, PageState{Place: "owned", Request: "a", Label: "main", Tokens: 8, Publications: []PublicationID{p.ID}})
	look(4, PageState{Place: "owned", Request: "a", Label: "main", First: 24, Tokens: 8})
	look(5, PageState{Place: "owned", Request: "a", Label: "main", First: 32})
	b.Unsealed(p.ID)
	look(2, PageState{Place: "free"})

	b.grow("r", "main", 12) // 6 7
	read := b.retrieve("r", peer(true, remote("main", 20, 11)), 0, Reading)
	look(6, PageState{Place: "owned", Request: "r", Label: "main", Tokens: 8})
	look(7, PageState{Place: "owned", Request: "r", Label: "main", First: 8, Tokens: 4, Retrieval: read.ID})
	look(8, PageState{Place: "owned", Request: "r", Label: "main", First: 16, Tokens: 4, Retrieval: read.ID})
	b.ok(b.Cancel(read.ID))
	look(8, PageState{Place: "quarantine", Request: "r", Label: "main", First: 16, Tokens: 4, Retrieval: read.ID})
	b.remove("r", true)
	look(6, PageState{Place: "free"})
	look(7, PageState{Place: "quarantine", Retrieval: read.ID})

	b.grow("f", "main", 9) // 9 10
	fork, err := b.Admit(Step{Segments: []Segment{{"f", "main", 0}}, PreForks: []Fork{{"main", "cfg"}}})
	b.ok(err)
	look(9, PageState{Place: "owned", Request: "f", Label: "main", Tokens: 8})
	look(12, PageState{Place: "owned", Request: "f", Label: "cfg", First: 8, Tokens: 1, Step: fork})
	b.remove("f", true)
	look(9, PageState{Place: "quarantine", Step: fork})
	look(12, PageState{Place: "owned", Step: fork})
	b.ok(b.Abort(fork))
	look(9, PageState{Place: "free"})

	b.grow("h", "main", 9) // 13 14
	move, err := b.Offload("h")
	b.ok(err)
	look(14, PageState{Place: "owned", Request: "h", Label: "main", First: 8, Tokens: 1, Move: move.ID})
	_, err = b.Offloaded(move.ID)
	b.ok(err)
	look(14, PageState{Place: "free"})
	move, err = b.Reload("h")
	b.ok(err)
	look(move.Streams[0].Device[1], PageState{Place: "owned", Request: "h", Label: "main", First: 8, Tokens: 1, Move: move.ID})
	b.ok(b.Abandon(move.ID))
	move, err = b.Reload("h")
	b.ok(err)
	b.ok(b.Reloaded(move.ID))
	move, err = b.Offload("h")
	b.ok(err)
	b.remove("h", true)
	look(move.Streams[0].Device[0], PageState{Place: "quarantine", Move: move.ID})
	b.ok(b.Abandon(move.ID))
	look(move.Streams[0].Device[0], PageState{Place: "free"})
}
