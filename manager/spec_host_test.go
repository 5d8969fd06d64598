package manager

import (
	"errors"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

func hostBed(t *testing.T, pages, host int) bed {
	return newBed(t, pages, 8, func(o *Options) { o.Host = host })
}

// tokens is a memory of one number a slot.
type tokens map[page.Slot]int

// move copies what a HostMove says, and nothing else.
func (from tokens) move(to tokens, source, target []page.Index, count int) {
	for i := range count {
		to[at(target[i/8], int32(i%8))] = from[at(source[i/8], int32(i%8))]
	}
}

func spec044(t *testing.T) {
	b := hostBed(t, 16, 16)
	b.ingest("a")
	device, host := tokens{}, tokens{}
	for i, s := range b.grow("a", "main", 24).Slots {
		device[s] = 100 + i
	}
	w, err := b.Offload("a")
	b.ok(err)
	b.same("streams", w.Streams, []HostStream{{"main", 24, []page.Index{1, 2, 3}, []page.Index{0, 1, 2}}})
	device.move(host, w.Streams[0].Device, w.Streams[0].Host, 24)
	out, err := b.Offloaded(w.ID)
	b.ok(err)
	b.same("offloaded", out, Offloaded{Freed: 3})
	b.free(15)
	b.same("reclaimable", b.Reclaimable("a"), 0)
	b.same("offloaded", b.OffloadedRequest("a"), true)
	clear(device)

	w, err = b.Reload("a")
	b.ok(err)
	b.same("streams", w.Streams, []HostStream{{"main", 24, []page.Index{4, 5, 6}, []page.Index{0, 1, 2}}})
	b.same("offloaded", b.OffloadedRequest("a"), true)
	host.move(device, w.Streams[0].Host, w.Streams[0].Device, 24)
	b.ok(b.Reloaded(w.ID))
	b.pages("a", "main", 4, 5, 6)
	b.stored("a", "main", 24)
	b.same("offloaded", b.OffloadedRequest("a"), false)
	for i := range 24 {
		b.same("token", device[at(page.Index(4+i/8), int32(i%8))], 100+i)
	}
	b.same("slots", b.grow("a", "main", 1).Slots, slots(at(7, 0)))
}

func spec045(t *testing.T) {
	b := hostBed(t, 16, 16)
	b.ok(b.Ingest("a", RequestConfig{Retention: map[id.Label]Retention{"main": {Budget: 16, Prefix: 8}}}))
	b.grow("a", "main", 44)
	b.ok(b.SetPosition("a", "main", 17))
	want := b.state("a", "main")
	b.same("pages of what is held", len(b.away("a", 3).Streams[0].Device), 3)
	b.back("a")
	got := b.state("a", "main")
	got.Generation = want.Generation
	b.same("stream", got, want)
	// The next token goes where it would have gone.
	b.same("slot", b.grow("a", "main", 1).Slots[0].Slot, int32(4))
}

func spec046(t *testing.T) {
	b := hostBed(t, 16, 16)
	b.ingest("a")
	s := mainStep(12)
	s.PostForks = toCfg
	b.commit(b.step(s))
	w := b.away("a", 4)
	b.same("streams", []id.Label{w.Streams[0].Label, w.Streams[1].Label}, []id.Label{"main", "cfg"})
	b.same("counts", b.Counts(), Counts{Free: 15, Sink: 1, Requests: 1, HostFree: 12, HostUsed: 4})
	b.back("a")
	b.pages("a", "main", 5, 6)
	b.pages("a", "cfg", 7, 8)
	b.same("counts", b.Counts(), Counts{Free: 11, Owned: 4, Sink: 1, Requests: 1, HostFree: 16})
}

func spec047(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("a")
	b.grow("a", "main", 10)
	_, err := b.Offload("a")
	b.fails(err, ErrNoHost)
	_, err = b.Reload("a")
	b.fails(err, ErrNoHost)
	b.same("reclaimable", b.Reclaimable("a"), 2)
	b.same("reclaimable of none", b.Reclaimable("nosuch"), 0)
	b.same("victims", b.Victims(), []Victim(nil))
}

func spec048(t *testing.T) {
	b := hostBed(t, 16, 2)
	b.ingest("a")
	b.commit(b.admit(Segment{"a", "main", 16}, Segment{"a", "other", 16}))
	b.away("a", 2)
	b.same("offloaded", b.OffloadedRequest("a"), true)
	b.same("main", b.state("a", "main").State, OnHost)
	b.grow("a", "other", 1)
	_, err := b.Admit(mainStep(1))
	b.offloading(err, "a", "main")
	// No more fits, and what stays can be used.
	_, err = b.Offload("a")
	full, ok := errors.AsType[*HostError](err)
	if !ok || !errors.Is(err, ErrHostFull) {
		t.Fatalf("error is %v", err)
	}
	b.same("host", *full, HostError{Short: 3, Free: 0})
	b.grow("a", "other", 1)
	b.back("a")
	b.grow("a", "main", 1)
}

func spec049(t *testing.T) {
	b := hostBed(t, 16, 1)
	b.ingest("a")
	b.grow("a", "main", 16)
	_, err := b.Offload("a")
	b.fails(err, ErrHostFull)
	b.same("offloaded", b.OffloadedRequest("a"), false)
	b.same("host", b.Counts().HostFree, 1)
	b.grow("a", "main", 1)
}

func spec050(t *testing.T) {
	b := hostBed(t, 8, 8)
	b.ingest("a", "b")
	b.grow("a", "main", 24)
	b.away("a", 3)
	b.grow("b", "main", 56)
	before := b.Counts()
	_, err := b.Reload("a")
	short, ok := errors.AsType[*AllocationError](err)
	if !ok {
		t.Fatalf("error is %v", err)
	}
	b.same("shortage", *short, AllocationError{"a", "main", 3, 0})
	b.same("counts", b.Counts(), before)
	b.same("stream", b.state("a", "main"), StreamState{Label: "main", State: OnHost, Tokens: 24, HostPages: 3, Generation: 3})
	b.remove("b", false)
	b.back("a")
	b.stored("a", "main", 24)
}

func spec051(t *testing.T) {
	b := hostBed(t, 16, 4)
	b.ingest("a")
	b.grow("a", "main", 24)
	b.away("a", 3)
	b.same("host", b.Counts().HostFree, 1)
	b.remove("a", false)
	b.same("counts", b.Counts(), Counts{Free: 15, Sink: 1, HostFree: 4})
}

func spec052(t *testing.T) {
	b := hostBed(t, 16, 8)
	b.ingest("a")
	b.grow("a", "main", 16)
	w, err := b.Offload("a")
	b.ok(err)
	b.same("reclaimable", b.Reclaimable("a"), 2)
	_, err = b.Admit(mainStep(1))
	b.offloading(err, "a", "main")
	_, err = b.Stage(mainStep(1))
	b.offloading(err, "a", "main")
	out, err := b.Offloaded(w.ID)
	b.ok(err)
	b.same("freed", out.Freed, 2)
	b.fails(b.Abandon(w.ID), ErrUnknownMove)
	b.back("a")
	b.stored("a", "main", 16)
}

func spec053(t *testing.T) {
	b := hostBed(t, 16, 8)
	b.ingest("a")
	b.grow("a", "main", 16)
	_, err := b.Offload("a")
	b.ok(err)
	before := b.Counts()
	for _, s := range []Step{
		{Segments: []Segment{{"a", "other", 1}}, PreForks: toCfg},
		{Segments: []Segment{{"a", "other", 1}}, PostForks: toCfg},
	} {
		_, err = b.Admit(s)
		b.offloading(err, "a", "main")
		b.same("counts", b.Counts(), before)
		b.same("streams", len(b.requests["a"].streams), 1)
	}
}

// A claim is refused while a step is in flight, and a claimed stream refuses
// steps: a fork never writes what is being copied.
func spec054(t *testing.T) {
	b := hostBed(t, 16, 8)
	b.ingest("a")
	b.commit(b.admit(Segment{"a", "main", 16}, Segment{"a", "cfg", 16}))
	s := mainStep(0)
	s.PostForks = toCfg
	tok := b.step(s)
	_, err := b.Offload("a")
	b.fails(err, ErrStepInFlight)
	b.same("host", b.Counts().HostFree, 8)
	b.commit(tok)

	w, err := b.Offload("a")
	b.ok(err)
	_, err = b.Admit(s)
	b.offloading(err, "a", "main")
	_, err = b.Admit(Step{Segments: []Segment{{"a", "other", 1}}, PostForks: []Fork{{"other", "cfg"}}})
	b.offloading(err, "a", "cfg")
	out, err := b.Offloaded(w.ID)
	b.ok(err)
	b.same("freed", out.Freed, 4)
}

func spec055(t *testing.T) {
	for _, end := range []func(bed, MoveID){
		func(b bed, w MoveID) {
			out, err := b.Offloaded(w)
			b.ok(err)
			b.same("offloaded", out, Offloaded{})
		},
		func(b bed, w MoveID) { b.ok(b.Abandon(w)) },
	} {
		b := hostBed(t, 16, 8)
		b.ingest("a")
		b.grow("a", "main", 16)
		w, err := b.Offload("a")
		b.ok(err)
		b.remove("a", false)
		// The copy still reads the pages of one side and writes those of the other.
		b.same("counts", b.Counts(), Counts{Free: 13, Quarantine: 2, Sink: 1, HostFree: 6, HostUsed: 2, Moves: 1})
		end(b, w.ID)
		b.same("counts", b.Counts(), Counts{Free: 15, Sink: 1, HostFree: 8})
	}
	// The other way it writes the device's.
	b := hostBed(t, 16, 8)
	b.ingest("a")
	b.grow("a", "main", 16)
	b.away("a", 2)
	w, err := b.Reload("a")
	b.ok(err)
	b.remove("a", false)
	b.same("counts", b.Counts(), Counts{Free: 13, Owned: 2, Sink: 1, HostFree: 6, HostUsed: 2, Moves: 1})
	b.fails(b.Reloaded(w.ID), ErrUnknownMove)
	b.ok(b.Abandon(w.ID))
	b.same("counts", b.Counts(), Counts{Free: 15, Sink: 1, HostFree: 8})
}

func spec056(t *testing.T) {
	b := hostBed(t, 16, 8)
	b.ingest("a")
	b.commit(b.admit(Segment{"a", "main", 16}, Segment{"a", "cfg", 9}))
	w, err := b.Offload("a")
	b.ok(err)
	b.ok(b.Abandon(w.ID))
	_, err = b.Offloaded(w.ID)
	b.fails(err, ErrUnknownMove)
	b.same("offloaded", b.OffloadedRequest("a"), false)
	b.same("host", b.Counts().HostFree, 8)
	b.pages("a", "main", 1, 2)
	b.grow("a", "cfg", 1)
	b.away("a", 4)

	// A reload that fails has lost nothing.
	w, err = b.Reload("a")
	b.ok(err)
	_, err = b.Offloaded(w.ID)
	b.fails(err, ErrUnknownMove)
	b.ok(b.Abandon(w.ID))
	b.same("counts", b.Counts(), Counts{Free: 15, Sink: 1, Requests: 1, HostFree: 4, HostUsed: 4})
	b.back("a")
	b.stored("a", "cfg", 10)
}

func spec057(t *testing.T) {
	b := hostBed(t, 16, 8)
	b.ingest("a", "b")
	b.grow("a", "main", 16)
	w, err := b.Offload("a")
	b.ok(err)
	b.same("offloaded", b.OffloadedRequest("a"), true)
	b.same("offloaded", b.OffloadedRequest("b"), false)
	b.grow("b", "main", 16)
	b.away("b", 2)
	_, err = b.Offloaded(w.ID)
	b.ok(err)
}

func spec058(t *testing.T) {
	b := hostBed(t, 16, 8)
	b.ingest("a")
	b.grow("a", "main", 12)
	for _, begin := range []func(Step) Token{b.step, b.stage} {
		tok := begin(mainStep(1))
		before := b.Counts()
		_, err := b.Offload("a")
		b.fails(err, ErrStepInFlight)
		b.same("victims", b.Victims(), []Victim(nil))
		b.same("counts", b.Counts(), before)
		b.ok(b.Abort(tok))
	}
	b.commit(b.step(mainStep(1)))
	b.same("victims", len(b.Victims()), 1)
	b.away("a", 2)
}

func spec059(t *testing.T) {
	b := hostBed(t, 16, 8)
	b.ingest("a")
	b.grow("a", "main", 20)
	b.reset("a", false)
	b.grow("a", "main", 4)
	b.pages("a", "main", 1, 2, 3)
	w := b.away("a", 3)
	b.same("freed at once", w.Freed, 2)
	b.same("streams", w.Streams, []HostStream{{"main", 4, []page.Index{1}, []page.Index{0}}})
	b.free(15)
	b.back("a")
	b.pages("a", "main", 4)
	b.stored("a", "main", 4)
	// A request with reserve alone has nothing to copy.
	b.reset("a", false)
	w, err := b.Offload("a")
	b.ok(err)
	b.same("move", w, HostMove{Request: "a", Freed: 1})
	b.same("offloaded", b.OffloadedRequest("a"), false)
}

func spec060(t *testing.T) {
	b := hostBed(t, 16, 8)
	b.ingest("a")
	b.grow("a", "main", 16)
	w, err := b.Offload("a")
	b.ok(err)
	_, err = b.Reload("a")
	b.fails(err, ErrOffloading)
	_, err = b.Offload("a")
	b.fails(err, ErrOffloading)
	_, err = b.Offloaded(w.ID)
	b.ok(err)
	w, err = b.Reload("a")
	b.ok(err)
	_, err = b.Offload("a")
	b.fails(err, ErrOffloading)
	b.ok(b.Reloaded(w.ID))
	b.same("counts", b.Counts(), Counts{Free: 13, Owned: 2, Sink: 1, Requests: 1, HostFree: 8})
}

func spec061(t *testing.T) {
	b := hostBed(t, 16, 8)
	b.ingest("a")
	b.grow("a", "main", 16)
	w, err := b.Offload("a")
	b.ok(err)
	b.remove("a", false)
	b.ingest("a")
	b.grow("a", "main", 16)
	again, err := b.Offload("a")
	b.ok(err)
	out, err := b.Offloaded(w.ID)
	b.ok(err)
	b.same("offloaded", out, Offloaded{})
	b.pages("a", "main", 3, 4)
	b.ok(b.Abandon(again.ID))
	b.grow("a", "main", 1)
	b.free(12)
}

func spec062(t *testing.T) {
	b := hostBed(t, 16, 8)
	b.ingest("a")
	b.grow("a", "main", 20)
	b.away("a", 3)
	_, err := b.Reset("a", false)
	b.offloading(err, "a", "main")
	b.stored("a", "main", 20)
	b.same("removed", b.reset("a", true), Removed{})
	b.same("counts", b.Counts(), Counts{Free: 15, Sink: 1, Requests: 1, HostFree: 8})
	w, err := b.Reload("a")
	b.ok(err)
	b.same("move", w, HostMove{Request: "a"})
	b.stored("a", "main", 0)
	b.grow("a", "main", 1)
	// In either window.
	for _, begin := range []func(id.Request) (HostMove, error){b.Offload, b.Reload} {
		w, err := begin("a")
		b.ok(err)
		b.reset("a", true)
		b.ok(b.Abandon(w.ID))
		b.stored("a", "main", 0)
		b.same("counts", b.Counts(), Counts{Free: 15, Sink: 1, Requests: 1, HostFree: 8})
		b.grow("a", "main", 1)
		b.away("a", 1)
	}
}

func spec063(t *testing.T) {
	b := hostBed(t, 16, 8)
	b.ingest("a")
	b.grow("a", "main", 10)
	b.away("a", 2)
	_, err := b.Admit(mainStep(0))
	b.offloading(err, "a", "main")
}

// The claim is refused while a read into the victim runs, or may still land.
func spec064(t *testing.T) {
	b := hostBed(t, 16, 8)
	b.ingest("r")
	b.grow("r", "main", 13)
	got := b.retrieve("r", peer(true, remote("main", 30, 11)), 0, Reading)
	for range 2 {
		_, err := b.Offload("r")
		b.fails(err, ErrReading)
		b.same("victims", b.Victims(), []Victim(nil))
		b.ok(b.Cancel(got.ID))
	}
	b.ok(b.Failed(got.ID))
	b.away("r", 2)
}

func spec081(t *testing.T) {
	b := hostBed(t, 16, 8)
	b.ingest("r")
	b.grow("r", "main", 5)
	src := peer(true, remote("main", 20, 11))
	w, err := b.Offload("r")
	b.ok(err)
	b.offloading(b.refused("r", src, ErrOffloading), "r", "main")
	_, err = b.Offloaded(w.ID)
	b.ok(err)
	for _, s := range []*Source{src, nil} { // not even nothing to be read is ready
		b.offloading(b.refused("r", s, ErrOffloading), "r", "main")
	}
	w, err = b.Reload("r")
	b.ok(err)
	b.refused("r", src, ErrOffloading)
	b.ok(b.Reloaded(w.ID))
	b.ok(b.Landed(b.retrieve("r", src, 0, Reading).ID))
	b.stored("r", "main", 20)
}
