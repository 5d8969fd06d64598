package publish

import (
	"cmp"
	"slices"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// Entry is one live publication of another node. It is the caller's own.
type Entry struct {
	Name     id.Publication
	Sequence id.Sequence // of the newest announcement of it
	Request  id.RequestHash
	Seal     uint32
	Digest   uint64
	// HasTable: the pages are known, or there are none since no stream is
	// resident. If not, look them up at the owner; the streams may be missing, too.
	HasTable bool
	Expires  time.Time // by this node's clock
	// Publication has ID 0, and Request "" until the owner itself has told it.
	Publication manager.Publication
}

// entry is an Entry in its board's tables, of which there may be very many: its
// streams stay as they travel, and times are since the board's epoch.
type entry struct {
	view      *view
	name      id.Sequence
	sequence  id.Sequence
	request   id.RequestHash
	digest    uint64
	expires   time.Duration
	heard     time.Duration // when the newest announcement came
	requestID id.Request    // "" until the owner has told it
	table     []byte        // of wire.EncodeTable
	seal      uint32
	epoch     uint32 // of the content
	pages     uint32 // in the table; 0: it is not in the board's tables
	due       int32  // index in the heap; -1: it has expired
	final     bool
	hasTable  bool // its pages are there, as far as it has any

	sameBefore, sameAfter *entry // of the same request
	older, newer          *entry // with pages
}

func newEntry(now time.Duration, v *view, a *wire.Announcement) *entry {
	return &entry{
		view: v, name: a.Publication, sequence: a.Sequence, request: a.Request, digest: a.Digest,
		expires: now + time.Duration(a.TTLMillis)*time.Millisecond, heard: now,
		seal: a.Seal, epoch: a.ContentEpoch, final: a.Final, due: -1,
	}
}

func (e *entry) visible(now time.Duration) bool { return e.view.presence == up && now < e.expires }

// keep stores the streams of e, and their pages if they came along. Those that
// are not resident have none that could be missing.
func (e *entry) keep(refs []wire.Ref, lists [][]page.Index) {
	if lists == nil && len(refs) > 0 && !slices.ContainsFunc(refs, isResident) {
		last := slices.MaxFunc(refs, func(a, b wire.Ref) int { return cmp.Compare(a.List, b.List) }).List
		lists = make([][]page.Index, last+1)
	}
	table, err := wire.EncodeTable(refs, lists)
	if err != nil {
		panic(err) // it was decoded from the same
	}
	e.table, e.hasTable, e.pages = table, lists != nil, 0
	for _, l := range lists {
		e.pages += uint32(len(l))
	}
}

func isResident(r wire.Ref) bool { return manager.State(r.State) == manager.Resident }

// streams is what keep has kept.
func (e *entry) streams() (refs []wire.Ref, lists [][]page.Index) {
	refs, lists, err := wire.DecodeTable(e.table)
	if err != nil {
		panic(err) // keep encoded it
	}
	return refs, lists
}

func (e *entry) export(epoch time.Time) Entry {
	refs, lists := e.streams()
	return Entry{
		Name:     id.Publication{Owner: e.view.life(), Sequence: e.name},
		Sequence: e.sequence, Request: e.request, Seal: e.seal, Digest: e.digest,
		HasTable: e.hasTable, Expires: epoch.Add(e.expires),
		Publication: manager.Publication{Request: e.requestID, ContentEpoch: e.epoch, Final: e.final, Streams: fromWire(refs, lists)},
	}
}

// dueHeap is the entries that have not expired, the next one first.
type dueHeap []*entry

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].expires < h[j].expires }
func (h dueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].due, h[j].due = int32(i), int32(j)
}

func (h *dueHeap) Push(x any) {
	e := x.(*entry)
	e.due = int32(len(*h))
	*h = append(*h, e)
}

func (h *dueHeap) Pop() any {
	last := len(*h) - 1
	e := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	e.due = -1
	return e
}

// byRequest holds the entries of each request, in no order.
type byRequest map[id.RequestHash]*entry

func (m byRequest) put(e *entry) {
	if first := m[e.request]; first != nil {
		e.sameAfter, first.sameBefore = first, e
	}
	m[e.request] = e
}

func (m byRequest) take(e *entry) {
	if e.sameAfter != nil {
		e.sameAfter.sameBefore = e.sameBefore
	}
	switch {
	case e.sameBefore != nil:
		e.sameBefore.sameAfter = e.sameAfter
	case e.sameAfter != nil:
		m[e.request] = e.sameAfter
	default:
		delete(m, e.request)
	}
	e.sameBefore, e.sameAfter = nil, nil
}

// tables are the entries with pages, by age.
type tables struct {
	oldest, newest *entry
	bytes          int64
}

func (t *tables) put(e *entry) {
	if e.older = t.newest; e.older != nil {
		e.older.newer = e
	} else {
		t.oldest = e
	}
	t.newest = e
	t.bytes += int64(e.pages) * pageBytes
}

func (t *tables) take(e *entry) {
	if e.older != nil {
		e.older.newer = e.newer
	} else {
		t.oldest = e.newer
	}
	if e.newer != nil {
		e.newer.older = e.older
	} else {
		t.newest = e.older
	}
	e.older, e.newer = nil, nil
	t.bytes -= int64(e.pages) * pageBytes
}
