package manager

import (
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

func keep(l id.Label, budget, prefix int) RequestConfig {
	return RequestConfig{Retention: map[id.Label]Retention{l: {Budget: budget, Prefix: prefix}}}
}

// Whole pages behind the prefix go, oldest first; less than a page more than the
// budget stays, and positions are what they were.
func TestRetention(t *testing.T) {
	for name, c := range map[string]struct {
		budget, prefix, tokens, released, pages int
	}{
		"less than the budget":           {24, 0, 24, 0, 3},
		"less than a page more":          {24, 0, 31, 0, 4},
		"a page more":                    {24, 0, 32, 8, 3},
		"much more":                      {24, 0, 100, 72, 4},
		"budget inside a page":           {20, 0, 100, 80, 3},
		"a prefix":                       {24, 8, 100, 72, 4},
		"a prefix inside a page":         {24, 3, 100, 72, 4},
		"a prefix as large as all":       {16, 16, 100, 80, 3},
		"a prefix that fills the budget": {10, 10, 100, 80, 3},
		"the last page stays":            {1, 0, 100, 96, 1},
		"a page alone stays":             {1, 0, 8, 0, 1},
	} {
		b := newBed(t, 32, 8)
		b.ok(b.Ingest("a", keep("main", c.budget, c.prefix)))
		b.grow("a", "main", c.tokens)
		s := b.state("a", "main")
		b.same(name, []int{s.Tokens, s.Released, s.Pages}, []int{c.tokens, c.released, c.pages})
		list := b.requests["a"].stream("main").pages
		for i, x := range upFrom(1, page.Count(c.prefix, 8)) {
			if c.released > 0 {
				b.same(name, list[i], x)
			}
		}
		b.same(name, b.grow("a", "main", 1).Slots[0].Slot, int32(c.tokens%8))
	}
}

// Trimming in small steps ends where trimming at once does.
func TestRetentionStepByStep(t *testing.T) {
	b := newBed(t, 32, 8)
	b.ok(b.Ingest("a", keep("main", 20, 3)))
	for n := range 200 {
		p := b.grow("a", "main", 1)
		v := p.Views[0]
		b.same("length", v.Length, n+1)
		if held := v.Length - v.Released; held > 28 {
			t.Fatalf("%d tokens are held", held)
		}
		b.same("first page", v.Pages[0], page.Index(1))
		b.same("slot", p.Slots[0].Slot, int32(n%8))
	}
	b.same("released", b.state("a", "main").Released, 176)
}

// A step in flight counts from what is there: trimming waits for it.
func TestRetentionWaits(t *testing.T) {
	b := newBed(t, 32, 8)
	b.ok(b.Ingest("a", keep("main", 8, 0)))
	b.ok(b.Abort(b.admit(Segment{"a", "main", 64})))
	one := b.admit(Segment{"a", "main", 20})
	look := b.admit(Segment{"a", "cfg", 0})
	b.commit(one)
	b.same("released", b.state("a", "main").Released, 0)
	b.commit(look)
	b.same("released", b.state("a", "main").Released, 0) // cfg has no retention
	b.grow("a", "main", 0)
	b.same("released", b.state("a", "main").Released, 8)
}

// Published pages that are trimmed wait in limbo: their publication goes on, and
// what comes after it begins further behind.
func TestRetentionOfPublished(t *testing.T) {
	b := newBed(t, 32, 8)
	b.ok(b.Ingest("a", keep("main", 16, 8)))
	b.grow("a", "main", 16) // 1 2
	first := b.publish("a", false)
	b.grow("a", "main", 20) // 3 4 5; 2 and 3 go
	b.same("counts", b.Counts(), Counts{Free: 27, Owned: 3, Limbo: 1, Sink: 1, Published: 2, Requests: 1, Publications: 1})
	p := b.publish("a", false)
	b.same("id", p.ID, first.ID)
	b.same("epoch", p.ContentEpoch, first.ContentEpoch)
	b.same("streams", p.Streams, []Stream{
		{Label: "main", Ranks: []id.Rank{0}, Prefix: 8, Start: 24, Tokens: 36, Pages: []page.Index{1, 4, 5}},
	})
	b.same("published", b.Counts().Published, 4)
	b.Unsealed(first.ID)
	b.same("counts", b.Counts(), Counts{Free: 28, Owned: 3, Sink: 1, Requests: 1})
}

// A reset stream has the retention that it was begun with.
func TestRetentionAfterReset(t *testing.T) {
	b := newBed(t, 32, 8)
	b.ok(b.Ingest("a", keep("main", 8, 0)))
	s := mainStep(12)
	s.PostForks = toCfg
	b.commit(b.step(s))
	b.grow("a", "cfg", 20)
	b.same("released", b.state("a", "cfg").Released, 24)
	b.reset("a", true)
	for l, released := range map[id.Label]int{"main": 24, "cfg": 0} {
		b.grow("a", l, 32)
		b.same("released", b.state("a", l).Released, released)
	}
}

func TestBadRetention(t *testing.T) {
	b := newBed(t, 8, 8)
	for _, c := range []RequestConfig{keep("main", -1, 0), keep("main", 8, 9), keep("main", 8, -1), keep("", 8, 0), keep("main", 1<<40, 0)} {
		b.fails(b.Ingest("a", c), ErrInvalid)
	}
}
