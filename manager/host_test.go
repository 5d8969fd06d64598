package manager

import (
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// The publication of what goes to the host ends; another one says where the
// tokens are, and in the end names them again.
func TestPublishedOnHost(t *testing.T) {
	b := newBed(t, 16, 8, func(o *Options) { o.Host = 8 })
	b.ingest("a")
	b.grow("a", "main", 20)
	first := b.publish("a", true)
	b.same("victims", b.Victims(), []Victim{{"a", 3, b.requests["a"].active, first.ID}})
	w, err := b.Offload("a")
	b.ok(err)
	// While it is copied nothing has ended.
	p, ok := b.Republish("a")
	b.same("still", []any{p.ID, ok, p.Streams[0].State}, []any{first.ID, true, Offloading})
	b.same("published", b.Counts().Published, 3)
	out, err := b.Offloaded(w.ID)
	b.ok(err)
	b.same("offloaded", out, Offloaded{Freed: 3, Unseal: []PublicationID{first.ID}})
	b.same("limbo", b.Counts().Limbo, 3)
	_, ok = b.Republish("a")
	b.same("live", ok, false)
	again := b.publish("a", true)
	b.same("publication", again, Publication{ID: 2, Request: "a", Final: true, Streams: []Stream{
		{Label: "main", Ranks: []id.Rank{0}, Tokens: 20, State: OnHost},
	}})
	b.same("limbo", b.Counts().Limbo, 3) // the readers of the first may still read
	b.Unsealed(first.ID)
	b.free(15)

	w, err = b.Reload("a")
	b.ok(err)
	p, ok = b.Republish("a")
	b.same("reloading", []any{ok, p.Streams[0].State}, []any{true, OnHost})
	b.ok(b.Reloaded(w.ID))
	p, ok = b.Republish("a")
	b.same("reloaded", []any{ok, p.ID, p.Final}, []any{true, again.ID, true})
	b.same("streams", p.Streams, []Stream{{Label: "main", Ranks: []id.Rank{0}, Tokens: 20, Pages: []page.Index{4, 5, 6}}})
	b.same("published", b.Counts().Published, 3)
	b.same("removed", b.remove("a", false), Removed{Lives: []PublicationID{again.ID}})
	b.same("limbo", b.Counts().Limbo, 3)
}

// What was committed since the last Publish, or made, is not what the
// publication offers; least of all if that was the final one.
func TestRepublishedLength(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("a")
	b.grow("a", "main", 20)
	want := b.publish("a", true)
	one := b.admit(Segment{"a", "main", 6})
	two := b.admit(Segment{"a", "main", 9})
	b.commit(one)
	b.grow("a", "cfg", 3)
	got, ok := b.Republish("a")
	b.same("live", ok, true)
	b.same("publication", got, want)
	b.commit(two, "a")
	b.same("published", b.Counts().Published, 3)
}

// If retention has let go of what was offered, what is left is not that.
func TestRepublishedStart(t *testing.T) {
	b := newBed(t, 16, 8, func(o *Options) { o.Host = 8 })
	b.ok(b.Ingest("a", keep("main", 16, 8)))
	b.grow("a", "main", 16)
	b.away("a", 2)
	b.publish("a", false)
	b.back("a")
	b.grow("a", "main", 7)
	p, ok := b.Republish("a")
	b.same("stream", []any{ok, p.Streams[0].Tokens, p.Streams[0].Start}, []any{true, 16, 0})
	b.grow("a", "main", 1)
	b.same("released", b.state("a", "main").Released, 8)
	_, ok = b.Republish("a")
	b.same("live", ok, false)
	p = b.publish("a", false)
	b.same("stream", []int{p.Streams[0].Prefix, p.Streams[0].Start, p.Streams[0].Tokens}, []int{8, 16, 24})
	_, ok = b.Republish("a")
	b.same("live", ok, true)
}

// Only what leaves ends a publication: here main alone has room on the host.
func TestPublishedInPart(t *testing.T) {
	b := newBed(t, 16, 8, func(o *Options) { o.Host = 2 })
	b.ingest("a")
	b.grow("a", "main", 3)
	p := b.publish("a", false)
	b.grow("a", "other", 9) // not published
	b.same("ids", []PublicationID{p.ID}, []PublicationID{1})
	w, err := b.Offload("a")
	b.ok(err)
	b.same("label", w.Streams[0].Label, id.Label("main"))
	b.same("streams", len(w.Streams), 1)
	out, err := b.Offloaded(w.ID)
	b.ok(err)
	b.same("unseal", out.Unseal, []PublicationID{p.ID})
	b.Unsealed(p.ID)
	p = b.publish("a", false)
	b.same("streams", p.Streams, []Stream{
		{Label: "main", Ranks: []id.Rank{0}, Tokens: 3, State: OnHost},
		{Label: "other", Ranks: []id.Rank{0}, Tokens: 9, Pages: []page.Index{2, 3}},
	})
	b.grow("a", "other", 1) // the one that stays goes on, also while the other moves
	w, err = b.Reload("a")
	b.ok(err)
	tok := b.admit(Segment{"a", "other", 1})
	b.ok(b.Reloaded(w.ID))
	b.commit(tok)
	w, err = b.Reload("a")
	b.ok(err)
	b.same("nothing to do", w, HostMove{Request: "a"})
}

// Victims can be told apart by when they were active, and by their size.
func TestVictims(t *testing.T) {
	b := newBed(t, 32, 8, func(o *Options) { o.Host = 8 })
	b.ingest("empty", "old", "young", "moving", "reading", "busy")
	for _, r := range []id.Request{"old", "young", "moving", "busy"} {
		b.grow(r, "main", 12)
	}
	b.grow("young", "main", 12)
	_, err := b.Offload("moving")
	b.ok(err)
	b.retrieve("reading", peer(true, remote("main", 20, 11)), 0, Reading)
	b.admit(Segment{"busy", "main", 0})
	got := map[id.Request]Victim{}
	for _, v := range b.Victims() {
		got[v.Request] = v
	}
	b.same("victims", len(got), 2)
	b.same("pages", []int{got["old"].Pages, got["young"].Pages}, []int{2, 3})
	if got["old"].Active >= got["young"].Active {
		t.Errorf("%+v", got)
	}
	b.publish("old", false)
	for _, v := range b.Victims() {
		if v.Request == "old" && (v.Published != 1 || v.Active <= got["young"].Active) {
			t.Errorf("%+v", v)
		}
	}
}

func TestHostRefuses(t *testing.T) {
	b := newBed(t, 16, 8, func(o *Options) { o.Host = 4 })
	for _, call := range []func(id.Request) (HostMove, error){b.Offload, b.Reload} {
		_, err := call("nosuch")
		b.fails(err, ErrUnknownRequest)
	}
	_, err := b.Offloaded(9)
	b.fails(err, ErrUnknownMove)
	b.fails(b.Reloaded(9), ErrUnknownMove)
	b.fails(b.Abandon(9), ErrUnknownMove)
	for name, list := range map[string][]page.Index{"a free one": {3}, "out of range": {4}} {
		p := newPool(4)
		p.take(2)
		if err := p.release(list); err == nil {
			t.Errorf("%s was released", name)
		}
		b.same("free", p.free(), 2)
	}
	b.fails(b.SetPosition("nosuch", "main", 1), ErrUnknownRequest)
	b.ingest("a")
	b.fails(b.SetPosition("a", "nosuch", 1), ErrUnknownLabel)
	for _, host := range []int{-1, page.MaxPages + 1} {
		_, err := New(Options{Geometry: geometry(8, 8), Host: host})
		b.fails(err, ErrInvalid)
	}
}
