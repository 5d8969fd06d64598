package manager

import (
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// keptBed has a request whose publication, final and of the epoch 1, is on the
// host: 20 tokens of main.
func keptBed(t *testing.T) (b bed, p Publication) {
	t.Helper()
	b = newBed(t, 16, 8, func(o *Options) { o.Host = 8 })
	b.ingest("a")
	b.reset("a", true)
	b.grow("a", "main", 20)
	b.away("a", 3)
	return b, b.publish("a", true)
}

// What is published as final outlives its request on the host, too: under a key
// it comes back, goes again, and ends with its publication, while its id has
// another life.
func TestKept(t *testing.T) {
	b, p := keptBed(t)
	step := b.admit(Segment{"a", "cfg", 3}) // another stream of it
	out := b.remove("a", false)
	b.same("removed", out, Removed{Lives: []PublicationID{p.ID}, Kept: out.Kept})
	b.fails(out.Kept.Validate(), id.ErrInvalid)
	b.same("counts", b.Counts(), Counts{Free: 15, Sink: 1, Kept: 1, Steps: 1, Publications: 1, HostFree: 5, HostUsed: 3})
	b.commit(step, "a") // which it has lost
	_, err := b.Request("a")
	b.fails(err, ErrUnknownRequest)
	b.ingest("a")
	b.grow("a", "main", 9)
	b.fails(b.Ingest(out.Kept, RequestConfig{}), ErrInvalid)
	_, err = b.Admit(Step{Segments: []Segment{{out.Kept, "main", 1}}})
	b.fails(err, ErrUnknownRequest)
	list := b.Requests(0)
	b.same("requests", []id.Request{list[0].Request, list[0].Kept, list[1].Request, list[1].Kept}, []id.Request{"a", "", "a", out.Kept})

	b.same("move", b.back(out.Kept).Request, out.Kept)
	back, ok := b.Republish(out.Kept)
	b.same("republished", []any{ok, back.ID, back.Request, back.ContentEpoch, back.Final}, []any{true, p.ID, id.Request("a"), p.ContentEpoch, true})
	b.same("streams", back.Streams, []Stream{{Label: "main", Ranks: []id.Rank{0}, Tokens: 20, Pages: back.Streams[0].Pages}})
	at := back.Streams[0].Pages[2]
	look, err := b.Page(at)
	b.ok(err)
	b.same("page", look, PageState{
		Page: at, Place: "owned", Request: "a", Kept: out.Kept, Label: "main", First: 16, Tokens: 4, Publications: []PublicationID{p.ID},
	})
	victims := map[id.Request]int{}
	for _, v := range b.Victims() {
		victims[v.Request] = v.Pages
	}
	b.same("victims", victims, map[id.Request]int{"a": 2, out.Kept: 3})
	b.same("reclaimable", b.Reclaimable(out.Kept), 3)

	w, err := b.Offload(out.Kept)
	b.ok(err)
	b.same("moving", b.Moving(w.ID), out.Kept)
	gone, err := b.Offloaded(w.ID)
	b.ok(err)
	b.same("offloaded", gone, Offloaded{Freed: 3, Unseal: []PublicationID{p.ID}})
	b.Unsealed(p.ID)
	again, err := b.Publish(out.Kept, false)
	b.ok(err)
	b.same("again", []any{again.Request, again.ContentEpoch, again.Final}, []any{id.Request("a"), p.ContentEpoch, true})
	b.Unsealed(again.ID)
	b.same("counts", b.Counts(), Counts{Free: 13, Owned: 2, Sink: 1, Requests: 1, HostFree: 8})
	b.stored("a", "main", 9)
}

// It may end by its publication, or by its key, wherever it is and whatever moves it.
func TestKeptEnds(t *testing.T) {
	ends := map[string]func(b bed, key id.Request, p PublicationID){
		"its publication": func(b bed, _ id.Request, p PublicationID) { b.Unsealed(p) },
		"its key": func(b bed, key id.Request, p PublicationID) {
			b.same("removed", b.remove(key, false), Removed{Unseal: []PublicationID{p}})
			b.Unsealed(p)
		},
	}
	for at, begin := range map[string]func(b bed, key id.Request) MoveID{
		"on the host": func(bed, id.Request) MoveID { return 0 },
		"on its way back": func(b bed, key id.Request) MoveID {
			w, err := b.Reload(key)
			b.ok(err)
			return w.ID
		},
		"back": func(b bed, key id.Request) MoveID {
			b.back(key)
			_, ok := b.Republish(key)
			b.same("live", ok, true)
			return 0
		},
		"on its way again": func(b bed, key id.Request) MoveID {
			b.back(key)
			_, ok := b.Republish(key)
			b.same("live", ok, true)
			w, err := b.Offload(key)
			b.ok(err)
			return w.ID
		},
	} {
		for by, end := range ends {
			t.Run(at+" by "+by, func(t *testing.T) {
				b, p := keptBed(t)
				key := b.remove("a", false).Kept
				w := begin(b, key)
				end(b, key, p.ID)
				b.same("kept", b.Counts().Kept, 0)
				if w != 0 {
					b.same("moving", b.Moving(w), id.Request(""))
					b.ok(b.Abandon(w))
				}
				b.same("counts", b.Counts(), Counts{Free: 15, Sink: 1, HostFree: 8})
			})
		}
	}
}

// A move that has begun goes on for what is kept, in both directions.
func TestKeptInTheWindow(t *testing.T) {
	b := newBed(t, 16, 8, func(o *Options) { o.Host = 8 })
	b.ingest("a")
	b.grow("a", "main", 20)
	p := b.publish("a", true)
	w, err := b.Offload("a")
	b.ok(err)
	key := b.remove("a", false).Kept
	b.same("moving", b.Moving(w.ID), key)
	out, err := b.Offloaded(w.ID)
	b.ok(err)
	b.same("offloaded", out, Offloaded{Freed: 3, Unseal: []PublicationID{p.ID}})
	p, err = b.Publish(key, true)
	b.ok(err)
	b.same("state", p.Streams[0].State, OnHost)

	b, p = keptBed(t)
	w, err = b.Reload("a")
	b.ok(err)
	key = b.remove("a", false).Kept
	b.ok(b.Reloaded(w.ID))
	again, ok := b.Republish(key)
	b.same("back", []any{ok, again.ID, len(again.Streams[0].Pages)}, []any{true, p.ID, 3})
}

// Only what is needed of it is kept: neither reserve, nor what was committed or
// made since, nor a stream that nobody was offered.
func TestKeptInPart(t *testing.T) {
	b := newBed(t, 16, 8, func(o *Options) { o.Host = 1 })
	b.ingest("a")
	b.grow("a", "main", 3)
	b.grow("a", "other", 9)
	b.away("a", 1) // other has no room there
	p := b.publish("a", true)
	b.grow("a", "other", 20)
	b.grow("a", "third", 20)
	key := b.remove("a", false).Kept
	b.same("counts", b.Counts(), Counts{Free: 13, Owned: 2, Sink: 1, Kept: 1, Publications: 1, Published: 2, HostUsed: 1})
	again, ok := b.Republish(key)
	b.same("publication", []any{ok, again}, []any{true, p})
	b.Unsealed(p.ID)
	b.same("counts", b.Counts(), Counts{Free: 15, Sink: 1, HostFree: 1})
}

// Retention lets go of what was offered: what is on the device stays for its
// readers, and what is not can't be given any more.
func TestKeptOnlyWhole(t *testing.T) {
	for _, bare := range []bool{false, true} {
		b := newBed(t, 16, 8, func(o *Options) { o.Host = 8 })
		b.ok(b.Ingest("a", keep("main", 8, 0)))
		b.grow("a", "main", 8)
		var p Publication
		if bare {
			b.away("a", 1)
			p = b.publish("a", true)
			b.back("a") // and nobody announces it
		} else {
			p = b.publish("a", true)
		}
		b.grow("a", "main", 8)
		b.same("released", b.state("a", "main").Released, 8)
		want := Removed{Lives: []PublicationID{p.ID}}
		if bare {
			want = Removed{Unseal: want.Lives}
		}
		b.same("removed", b.remove("a", false), want)
		b.Unsealed(p.ID)
		b.same("counts", b.Counts(), Counts{Free: 15, Sink: 1, HostFree: 8})
	}
}

// While a read or a fork is at its pages, they are not let go, and it does not move.
func TestKeptWhileInUse(t *testing.T) {
	b := newBed(t, 24, 8, func(o *Options) { o.Host = 1 })
	b.ok(b.Ingest("a", RequestConfig{Needs: Needs{Labels: []id.Label{"main"}}}))
	b.grow("a", "cfg", 3)
	b.grow("a", "main", 13)
	b.away("a", 1) // cfg; main has no room there
	p := b.publish("a", true)
	read := b.retrieve("a", peer(true, remote("main", 30, 11)), 0, Reading)
	out := b.remove("a", false)
	b.same("removed", out, Removed{Lives: []PublicationID{p.ID}, Kept: out.Kept, Cancel: []RetrievalID{read.ID}})
	_, err := b.Reload(out.Kept)
	b.fails(err, ErrReading)
	again, ok := b.Republish(out.Kept)
	b.same("publication", []any{ok, again}, []any{true, p})
	b.Unsealed(p.ID) // the read may still write behind the 13 tokens
	b.same("quarantine", b.Counts().Quarantine, page.Count(30, 8)-1)
	b.fails(b.Landed(read.ID), ErrUnknownRetrieval)
	b.ok(b.Failed(read.ID))
	b.same("counts", b.Counts(), Counts{Free: 23, Sink: 1, HostFree: 1})

	b.ingest("a")
	b.grow("a", "cfg", 3)
	b.grow("a", "main", 13)
	b.away("a", 1)
	p = b.publish("a", true)
	fork := b.step(Step{Segments: []Segment{{"a", "main", 0}}, PreForks: []Fork{{"main", "x"}}})
	key := b.remove("a", false).Kept
	for _, v := range b.Victims() {
		t.Errorf("%+v", v)
	}
	_, err = b.Reload(key)
	b.fails(err, ErrStepInFlight)
	b.Unsealed(p.ID)
	b.same("quarantine", b.Counts().Quarantine, 2)
	b.commit(fork, "a")
	b.same("counts", b.Counts(), Counts{Free: 23, Sink: 1, HostFree: 1})
}
