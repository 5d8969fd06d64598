package pairtest

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/publish"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

const pageSize = 4

var soak = flag.Duration("soak", 5*time.Second, "time of the random operations")

type streamName struct {
	request id.Request
	label   id.Label
}

// side is one node without its processes: what a node wires together.
type side struct {
	life   id.Life
	layout page.Layout
	arena  *memory.Region
	seals  *memory.SealTable
	local  *transfertest.Memory
	m      *manager.Manager
	// content names the bytes that a stream must have: they differ from one life
	// of a request to the next, so that old ones show.
	content map[streamName]string
}

func newSide(t *testing.T, net *transfertest.Network, name id.Node, order page.Order, pages int) *side {
	t.Helper()
	s := &side{
		life:    id.Life{Node: name, Incarnation: 7},
		layout:  page.Layout{Order: order, DType: page.BF16, Layers: 2, Pages: pages, PageSize: pageSize, Heads: 2, HeadDim: 4},
		content: make(map[streamName]string),
	}
	var err error
	if s.arena, err = memory.New("pairtest", s.layout.Bytes()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.arena.Close() })
	if s.seals, err = memory.NewSealTable(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.seals.Close() })
	s.local = net.Listen(transfer.Local{Life: s.life, Arenas: map[id.Rank]*memory.Region{0: s.arena}, Seals: s.seals})
	t.Cleanup(func() { s.local.Close() })
	return s
}

// begin gives the side a new manager on the same memory, which holds what was
// there before.
func (s *side) begin(t *rapid.T) {
	var err error
	s.m, err = manager.New(manager.Options{Life: s.life, Geometry: s.geometry(), Check: true})
	if err != nil {
		t.Fatal(err)
	}
	for i := range uint32(memory.Words) {
		if v, _ := s.seals.Load(i); v != 0 {
			s.seals.Store(i, 0)
		}
	}
	clear(s.content)
}

func (s *side) geometry() page.Geometry {
	return page.Geometry{Model: "pair", WorldSize: 1, Layout: s.layout}
}

// vector is where a head's elements of one token lie. The address is computed
// here from the definition of the layouts, not by the code under test.
func (s *side) vector(p page.Index, slot, layer, kv, head int) []byte {
	l := s.layout
	bytes := l.HeadDim * 2
	at := ((layer*l.Pages+int(p))*2 + kv) * l.PageSize * l.Heads
	if l.Order == page.NHD {
		at += slot*l.Heads + head
	} else {
		at += head*l.PageSize + slot
	}
	return s.arena.Bytes()[at*bytes : (at+1)*bytes]
}

func (s *side) each(p page.Index, slot int, visit func(layer, kv, head int, b []byte)) {
	for layer := range s.layout.Layers {
		for kv := range 2 {
			for head := range s.layout.Heads {
				visit(layer, kv, head, s.vector(p, slot, layer, kv, head))
			}
		}
	}
}

func pattern(content string, label id.Label, token, layer, kv, head int) []byte {
	h := fnv.New64a()
	fmt.Fprintf(h, "%s/%s/%d/%d/%d/%d", content, label, token, layer, kv, head)
	return h.Sum(nil)
}

// write appends tokens to streams in one step, as an engine would.
func (s *side) write(t *rapid.T, r id.Request, n int, labels []id.Label) {
	var step manager.Step
	for _, l := range labels {
		step.Segments = append(step.Segments, manager.Segment{Request: r, Label: l, Span: n})
	}
	token, err := s.m.Admit(step)
	if err != nil {
		mayFail(t, "admit", err, manager.ErrNoPages, manager.ErrReading, manager.ErrUnknownRequest)
		return
	}
	plans, err := s.m.Plan(token)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range plans {
		for i, v := range p.Views {
			first := int(p.Indptrs.QO[i])
			for j := range v.Compute {
				at := p.Slots[first+j]
				s.each(at.Page, int(at.Slot), func(layer, kv, head int, b []byte) {
					copy(b, pattern(s.content[streamName{r, v.Label}], v.Label, v.Length-v.Compute+j, layer, kv, head))
				})
			}
		}
	}
	if missing, err := s.m.Commit(token); err != nil || len(missing) > 0 {
		t.Fatalf("commit: %v, %v", missing, err)
	}
}

// verify compares every byte of a stream with what it must be.
func (s *side) verify(t *rapid.T, what string, r id.Request, l id.Label) {
	if _, err := s.m.Stored(r, l); err != nil {
		return // no such stream
	}
	token, err := s.m.Admit(manager.Step{Segments: []manager.Segment{{Request: r, Label: l}}})
	if err != nil {
		mayFail(t, "admit to look", err, manager.ErrReading)
		return
	}
	plans, err := s.m.Plan(token)
	if err != nil {
		t.Fatal(err)
	}
	v := plans[0].Views[0]
	for i := range v.Length {
		s.each(v.Pages[i/pageSize], i%pageSize, func(layer, kv, head int, b []byte) {
			if want := pattern(s.content[streamName{r, l}], l, i, layer, kv, head); !bytes.Equal(b, want) {
				t.Fatalf("%s: %s request %s label %s token %d layer %d kv %d head %d: % x, want % x", what, s.life.Node, r, l, i, layer, kv, head, b, want)
			}
		})
	}
	if err := s.m.Abort(token); err != nil {
		t.Fatal(err)
	}
}

func mayFail(t *rapid.T, what string, err error, allowed ...error) {
	for _, a := range allowed {
		if errors.Is(err, a) {
			return
		}
	}
	t.Fatalf("%s: %v", what, err)
}

// pull is a retrieval that was begun and has not been settled.
type pull struct {
	r      id.Request
	start  manager.Retrieval
	source manager.Source
	seal   uint32
}

// pair is the state of one run.
type pair struct {
	owner, reader *side
	log           *publish.Log
	board         *publish.Board
	now           time.Time
	link          transfer.Link
	lives         int
	live          map[manager.PublicationID]id.Request // ours, not ended
	ended         []manager.PublicationID              // word cleared late: at a later step
	contents      map[id.Publication]string
	pulls         []pull
	retrieved     map[id.Request]bool
	counts        map[string]int
}

func (p *pair) requests() []id.Request { return []id.Request{"a", "b"} }

func (p *pair) labels() []id.Label { return []id.Label{id.Main, "cfg"} }

func (p *pair) ingest(t *rapid.T, s *side, r id.Request) {
	if err := s.m.Ingest(r, manager.Needs{Labels: p.labels()}); err != nil {
		t.Fatal(err)
	}
}

// end is the owner's rule: the word, then the log, then the pages.
func (p *pair) end(t *rapid.T, i manager.PublicationID) {
	if _, ok := p.live[i]; !ok {
		return
	}
	_, seal, _, err := p.log.Reserve(i)
	if err != nil {
		t.Fatal(err)
	}
	p.owner.seals.Store(seal, 0)
	if err := p.log.Release(p.now, i); err != nil {
		t.Fatal(err)
	}
	p.gossip(t)
	p.owner.m.Unsealed(i)
	delete(p.live, i)
}

// gossip delivers at random: what is lost is lost.
func (p *pair) gossip(t *rapid.T) {
	for _, item := range p.log.Outgoing(p.now, 1<<20) {
		if rapid.IntRange(0, 9).Draw(t, "lose") < 3 {
			p.counts["gossip lost"]++
			continue
		}
		if _, _, err := p.board.Receive(p.now, item); err != nil {
			t.Fatal(err)
		}
	}
}

func (p *pair) publish(t *rapid.T, r id.Request, final bool) {
	value, err := p.owner.m.Publish(r, final)
	if err != nil {
		mayFail(t, "publish", err, manager.ErrUnknownRequest, manager.ErrInvalid, manager.ErrFinal, manager.ErrEnded)
		return
	}
	name, seal, word, err := p.log.Reserve(value.ID)
	if err != nil {
		t.Fatal(err)
	}
	p.owner.seals.Store(seal, word)
	p.live[value.ID] = r
	p.contents[name] = p.owner.content[streamName{r, id.Main}]
	announced, err := p.log.Announce(p.now, value, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	p.gossip(t)
	if rapid.Bool().Draw(t, "push") {
		if _, err := p.board.Learn(p.now, p.owner.life, announced.Full, r); err != nil {
			mayFail(t, "learn", err, publish.ErrEnded)
		}
	}
	p.counts["publish"]++
}

// retrieve begins a pull with whatever the board knows, old or new.
func (p *pair) retrieve(t *rapid.T, r id.Request) {
	for _, e := range p.board.ByRequest(p.now, r) {
		if !e.HasTable {
			continue
		}
		source := manager.Source{Name: e.Name, Geometry: p.owner.geometry(), Publication: e.Publication}
		out, err := p.reader.m.AdmitRetrieve(r, manager.At{}, &source, rapid.IntRange(0, 8).Draw(t, "min"))
		if err != nil {
			mayFail(t, "admit retrieve", err, manager.ErrUnknownRequest, manager.ErrNoPages, manager.ErrDiverged)
			return
		}
		if out.Start == nil {
			return
		}
		p.pulls = append(p.pulls, pull{r: r, start: *out.Start, source: source, seal: e.Seal})
		for _, m := range out.Start.Moves { // from 0 if these are other bytes
			p.reader.content[streamName{r, m.Label}] = p.contents[e.Name]
		}
		p.retrieved[r] = true
		p.counts["retrieve"]++
		return
	}
}

// read does the work of a pull and settles it.
func (p *pair) read(t *rapid.T) {
	if len(p.pulls) == 0 {
		return
	}
	i := rapid.IntRange(0, len(p.pulls)-1).Draw(t, "pull")
	one := p.pulls[i]
	p.pulls = append(p.pulls[:i], p.pulls[i+1:]...)
	var copies []transfer.Copy
	for _, m := range one.start.Moves {
		var err error
		copies, err = transfer.Copies(copies, 0,
			transfer.Side{Layout: p.owner.layout, Start: m.RemoteStart, Pages: m.Remote},
			transfer.Side{Layout: p.reader.layout, Start: m.LocalStart, Pages: m.Local}, m.From, m.To)
		if err != nil {
			t.Fatal(err)
		}
	}
	word, _ := id.SealValue(one.source.Name.Owner.Incarnation, one.source.Name.Sequence)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	err := p.link.Read(ctx, []transfer.Seal{{Index: one.seal, Value: word}}, copies)
	switch {
	case err == nil:
		if err := p.reader.m.Landed(one.start.ID); err != nil {
			mayFail(t, "landed", err, manager.ErrUnknownRetrieval)
			p.failed(t, one)
			return
		}
		p.counts["landed"]++
		for _, l := range p.labels() {
			p.reader.verify(t, "landed", one.r, l)
		}
	case errors.Is(err, transfer.ErrStale):
		p.counts["stale"]++
		p.failed(t, one)
	default:
		p.counts["broken"]++
		p.failed(t, one)
	}
}

func (p *pair) failed(t *rapid.T, one pull) {
	if err := p.reader.m.Failed(one.start.ID); err != nil {
		t.Fatal(err)
	}
}

func (p *pair) removeOwner(t *rapid.T, r id.Request, discard bool) {
	removed, err := p.owner.m.Remove(r, discard)
	if err != nil {
		t.Fatal(err)
	}
	// Whoever lets published pages go may take its time.
	p.ended = append(p.ended, removed.Unseal...)
}

func (p *pair) removeReader(t *rapid.T, r id.Request) {
	if _, err := p.reader.m.Remove(r, true); err != nil {
		t.Fatal(err)
	}
	delete(p.retrieved, r)
}

// TestPair is the promise, over whole nodes but for processes and sockets.
func TestPair(t *testing.T) {
	for name, order := range map[string]page.Order{"NHD": page.NHD, "HND": page.HND} {
		t.Run(name, func(t *testing.T) {
			var net transfertest.Network
			owner, reader := newSide(t, &net, "owner", order, 24), newSide(t, &net, "reader", order, 17)
			faults := []transfertest.Fault{
				{}, {}, {Reorder: true}, {Err: errors.New("broken")}, {Cancel: true}, {Lose: true}, {Late: 2 * time.Millisecond},
			}
			next := 0
			faulty := transfertest.NewFaulty(reader.local, transfer.Limits{Stall: 5 * time.Millisecond}, func(int) transfertest.Fault { return faults[next] })
			link, err := faulty.Open(t.Context(), transfer.Peer{
				Life: owner.life, Descriptor: owner.local.Descriptor(), ArenaBytes: map[id.Rank]int64{0: owner.arena.Size()},
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { link.Close() })
			counts := make(map[string]int)
			check := func(t *rapid.T) {
				owner.begin(t)
				reader.begin(t)
				p := &pair{
					owner: owner, reader: reader, link: link, now: time.Unix(1_800_000_000, 0), counts: counts,
					log:   publish.NewLog(publish.LogOptions{Life: owner.life}),
					board: publish.NewBoard(publish.BoardOptions{Life: reader.life}),
					live:  make(map[manager.PublicationID]id.Request), contents: make(map[id.Publication]string), retrieved: make(map[id.Request]bool),
				}
				p.board.Member(p.now, owner.life, true)
				request := rapid.SampledFrom(p.requests())
				labels := rapid.SampledFrom([][]id.Label{p.labels(), p.labels(), {id.Main}})
				t.Repeat(map[string]func(*rapid.T){
					"owner works": func(t *rapid.T) {
						r := request.Draw(t, "request")
						p.ingest(t, owner, r)
						if owner.content[streamName{r, id.Main}] == "" {
							p.lives++
							for _, l := range p.labels() {
								owner.content[streamName{r, l}] = fmt.Sprintf("%s.%d", r, p.lives)
							}
						}
						owner.write(t, r, rapid.IntRange(1, 9).Draw(t, "tokens"), labels.Draw(t, "labels"))
						switch rapid.IntRange(0, 3).Draw(t, "publish") {
						case 0, 1:
							p.publish(t, r, false)
						case 2:
							p.publish(t, r, true)
						}
					},
					"owner removes": func(t *rapid.T) {
						r := request.Draw(t, "request")
						p.removeOwner(t, r, rapid.Bool().Draw(t, "discard"))
						for _, l := range p.labels() {
							delete(owner.content, streamName{r, l})
						}
					},
					"owner ends one": func(t *rapid.T) {
						if len(p.live) > 0 { // its hold has run out
							p.end(t, rapid.SampledFrom(slices.Sorted(maps.Keys(p.live))).Draw(t, "publication"))
						}
					},
					"owner catches up": func(t *rapid.T) {
						for _, i := range p.ended {
							p.end(t, i)
						}
						p.ended = nil
					},
					"reader retrieves": func(t *rapid.T) {
						r := request.Draw(t, "request")
						p.ingest(t, reader, r)
						p.retrieve(t, r)
					},
					"reader reads": func(t *rapid.T) {
						next = rapid.IntRange(0, len(faults)-1).Draw(t, "fault")
						p.read(t)
					},
					"reader decodes": func(t *rapid.T) {
						r := request.Draw(t, "request")
						if n, _ := reader.m.Stored(r, id.Main); p.retrieved[r] && n > 0 { // what it computes itself before that, it keeps
							reader.write(t, r, 1, []id.Label{id.Main})
						}
					},
					"reader removes": func(t *rapid.T) { p.removeReader(t, request.Draw(t, "request")) },
					"": func(t *rapid.T) { // after every operation
						for _, r := range p.requests() {
							for _, l := range p.labels() {
								owner.verify(t, "always", r, l)
								if p.retrieved[r] {
									reader.verify(t, "always", r, l)
								}
							}
						}
					},
				})
				// In the end every page comes back.
				for len(p.pulls) > 0 {
					next = 0
					p.read(t)
				}
				for _, r := range p.requests() {
					p.removeOwner(t, r, true)
					p.removeReader(t, r)
				}
				for i := range p.live {
					p.end(t, i)
				}
				for _, s := range []*side{owner, reader} {
					if c := s.m.Counts(); c.Free != s.layout.Pages-1 {
						t.Fatalf("%s: %+v", s.life.Node, c)
					}
				}
			}
			seldom := func() (what []string) {
				for _, w := range []string{"publish", "retrieve", "landed", "stale", "broken", "gossip lost"} {
					if counts[w] < 5 {
						what = append(what, w)
					}
				}
				return what
			}
			// Sequences are random: as many as it takes until each thing was tried.
			for start, rounds := time.Now(), 1; !t.Failed(); rounds++ {
				rapid.Check(t, check)
				if len(seldom()) == 0 && time.Since(start) > *soak/2 {
					break
				}
				if what := seldom(); rounds == 20 && len(what) > 0 {
					t.Errorf("%v were tried too seldom: the test claims more than it tries", what)
				}
			}
			t.Log(counts)
		})
	}
}
