package publish

import (
	"container/list"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
)

// Entry is one live publication of another node. Its pages are shared with
// other readers: they are not to be changed.
type Entry struct {
	Name     id.Publication
	Sequence id.Sequence // of the newest announcement of it
	Request  id.RequestHash
	Seal     uint32
	Digest   uint64
	// HasTable: the pages are known. If not, look them up at the owner; the
	// streams may be missing, too.
	HasTable bool
	Expires  time.Time // by this node's clock
	// Publication has ID 0, and Request "" until the owner itself has told it.
	Publication manager.Publication
}

// entry is an Entry in its board's tables.
type entry struct {
	view        *view
	name        id.Sequence
	sequence    id.Sequence
	request     id.RequestHash
	seal        uint32
	digest      uint64
	expires     time.Time
	heard       time.Time // when the newest announcement came
	publication manager.Publication
	pages       int           // of the table; 0: no table, or an empty one
	table       *list.Element // nil: no table
	due         int           // index in the heap; -1: it has expired
	at          int           // index under its request
}

func newEntry(now time.Time, v *view, a *wire.Announcement) *entry {
	return &entry{
		view: v, name: a.Publication, sequence: a.Sequence, request: a.Request, seal: a.Seal, digest: a.Digest,
		expires: now.Add(time.Duration(a.TTLMillis) * time.Millisecond), heard: now,
		publication: fromWire(a), due: -1,
	}
}

func (e *entry) visible(now time.Time) bool { return e.view.presence == up && now.Before(e.expires) }

func (e *entry) export() Entry {
	return Entry{
		Name:     id.Publication{Owner: e.view.life(), Sequence: e.name},
		Sequence: e.sequence, Request: e.request, Seal: e.seal, Digest: e.digest,
		HasTable: e.table != nil, Expires: e.expires, Publication: e.publication,
	}
}

// dueHeap is the entries that have not expired, the next one first.
type dueHeap []*entry

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].expires.Before(h[j].expires) }
func (h dueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].due, h[j].due = i, j
}

func (h *dueHeap) Push(x any) {
	e := x.(*entry)
	e.due = len(*h)
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
