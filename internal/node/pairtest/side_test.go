package pairtest

import (
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/publish"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

const (
	pageSize  = 4
	hostPages = 7 // fewer than a busy request has
	sealWords = 64
	headBytes = 8 // of one head's elements of one token, K or V
)

// side is one node without its processes: what a node wires together.
type side struct {
	life   id.Life
	layout page.Layout
	pieces []piece // of one token
	ranks  []id.Rank
	arenas map[id.Rank]*memory.Region
	device map[id.Rank][]byte // of the arenas
	host   map[id.Rank][]byte
	seals  *memory.SealTable
	local  *transfertest.Memory
	links  map[*side]transfer.Link

	// Of one run:
	*world
	m     *manager.Manager
	log   *publish.Log
	board *publish.Board
	model // what must be true
	plans manager.Plans
	wrote map[uint32]bool // by writer
}

func newSide(t *testing.T, net *transfertest.Network, name id.Node, order page.Order, ranks, pages int) *side {
	t.Helper()
	s := &side{
		life:   id.Life{Node: name, Incarnation: 7},
		layout: page.Layout{Order: order, DType: page.BF16, Layers: 2, Pages: pages, PageSize: pageSize, Heads: 2, HeadDim: headBytes / 2},
		arenas: make(map[id.Rank]*memory.Region),
		device: make(map[id.Rank][]byte),
		host:   make(map[id.Rank][]byte),
		links:  make(map[*side]transfer.Link),
	}
	for layer := range s.layout.Layers {
		for kv := range 2 {
			for head := range s.layout.Heads {
				s.pieces = append(s.pieces, piece{layer, kv, head})
			}
		}
	}
	for r := range id.Rank(ranks) {
		arena, err := memory.New("pairtest", s.layout.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { arena.Close() })
		s.ranks = append(s.ranks, r)
		s.arenas[r], s.device[r] = arena, arena.Bytes()
		s.host[r] = make([]byte, s.layout.Bytes()/int64(pages)*hostPages)
	}
	var err error
	if s.seals, err = memory.NewSealTable(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.seals.Close() })
	s.local = net.Listen(transfer.Local{Life: s.life, Arenas: s.asArenas(), Seals: s.seals})
	t.Cleanup(func() { s.local.Close() })
	return s
}

// open links the side to another one, with faults.
func (s *side) open(t *testing.T, to *side, plan func(int) transfertest.Fault) {
	t.Helper()
	sizes := make(map[id.Rank]int64)
	for r, a := range to.arenas {
		sizes[r] = a.Size()
	}
	faulty := transfertest.NewFaulty(s.local, transfer.Limits{Stall: stall}, plan)
	link, err := faulty.Open(t.Context(), transfer.Peer{Life: to.life, Descriptor: to.local.Descriptor(), ArenaBytes: sizes})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { link.Close() })
	s.links[to] = link
}

// begin gives the side a new manager on the same memory, which holds what was
// there before.
func (s *side) begin(w *world) {
	var err error
	s.world = w
	s.m, err = manager.New(manager.Options{Life: s.life, Geometry: s.geometry(), Ranks: s.ranks, Host: hostPages, Check: true})
	if err != nil {
		w.Fatal(err)
	}
	for i := range uint32(sealWords) {
		if v, _ := s.seals.Load(i); v != 0 {
			s.seals.Store(i, 0)
		}
	}
	s.log = publish.NewLog(publish.LogOptions{Life: s.life, Words: sealWords})
	s.board = publish.NewBoard(publish.BoardOptions{Life: s.life})
	s.model = newModel()
	s.wrote = make(map[uint32]bool)
}

func (s *side) geometry() page.Geometry {
	return page.Geometry{Model: "pair", WorldSize: len(s.ranks), Layout: s.layout}
}

// place is where one token of a rank lies: a page of the arena, or of the host.
type place struct {
	onHost bool
	page   page.Index
	slot   int
}

// at is the place of the i-th token of a list of pages.
func at(pages []page.Index, i int) place {
	return place{page: pages[i/pageSize], slot: i % pageSize}
}

func onHost(p place) place {
	p.onHost = true
	return p
}

// piece is one head's K or V of one token in one layer.
type piece struct{ layer, kv, head int }

// offset is where a piece lies in the arena. It is computed here from the
// definition of the layouts, not by the code under test. The host's is our own.
func (s *side) offset(p place, x piece) int64 {
	l := s.layout
	pages := l.Pages
	if p.onHost {
		pages = hostPages
	}
	n := ((x.layer*pages+int(p.page))*2 + x.kv) * l.PageSize * l.Heads
	if l.Order == page.NHD {
		n += p.slot*l.Heads + x.head
	} else {
		n += x.head*l.PageSize + p.slot
	}
	return int64(n) * headBytes
}

func (s *side) bytes(r id.Rank, p place, x piece) []byte {
	n := s.offset(p, x)
	if p.onHost {
		return s.host[r][n : n+headBytes]
	}
	return s.device[r][n : n+headBytes]
}

// put writes a token, as an engine would.
func (s *side) put(p place, k token) {
	for _, r := range s.ranks {
		for _, x := range s.pieces {
			binary.LittleEndian.PutUint64(s.bytes(r, p, x), k.bytes(r, x))
		}
	}
}

// move is the naive copier: token by token, piece by piece.
func (s *side) move(from, to place) {
	for _, r := range s.ranks {
		for _, x := range s.pieces {
			copy(s.bytes(r, to, x), s.bytes(r, from, x))
		}
	}
}

// want compares every byte of a token.
func (s *side) want(p place, k token, what func() string) {
	for _, r := range s.ranks {
		for _, x := range s.pieces {
			got := s.bytes(r, p, x)
			if want := k.bytes(r, x); binary.LittleEndian.Uint64(got) != want {
				s.Fatalf("%s: %s: rank %d %+v %+v: %#x, want %#x of %v", s.life.Node, what(), r, p, x, got, want, k)
			}
		}
	}
}

// wantAll compares a list of tokens.
func (s *side) wantAll(tokens []token, where func(i int) place, format string, args ...any) {
	for i, k := range tokens {
		s.want(where(i), k, func() string { return fmt.Sprintf(format, args...) + fmt.Sprintf(" token %d of %d", i, len(tokens)) })
	}
}

// asArenas are the arenas as a transport takes them.
func (s *side) asArenas() map[id.Rank]memory.Arena {
	list := make(map[id.Rank]memory.Arena)
	for r, a := range s.arenas {
		list[r] = a
	}
	return list
}
