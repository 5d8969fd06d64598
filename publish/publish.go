// Package publish holds what is published where: [Log], this node's own
// publications, and [Board], the replicas of all other owners' logs.
//
// There is one writer per log: only the owner says what its log holds, and
// only the owner repairs what a replica has missed. Every announcement takes
// the next sequence of its owner's life, so a replica knows what it lacks; what
// has ended is said sequence by sequence, and in bulk by a floor that only
// rises. Of one publication the newest announcement alone counts: it has grown,
// or its streams are in another state and on other pages, also once it is final.
// Of two lives of one owner the newer one makes the older one void.
//
//	Log                                              Board
//	Reserve → (seal word set) → Announce → Outgoing → Receive → ByRequest, Watch
//	(seal word cleared) → Release        → Outgoing → Receive
//	Tick: checkpoint                               → Receive
//	Nack, Live                                     ← Tick: what is missing; Sync
//	Beacon → Receive, by who is asked              → Echo
//
// The log keeps what is to be gossiped until there is room for it
// (outgoing.go), so nothing of it is dropped on the way out, and what has ended
// meanwhile is never announced.
//
// Gossip is a hint; what makes a read safe is the seal word. A board may be
// late and may lack something, but it never shows what it knows to have ended,
// in whatever order, however often, and however late messages arrive.
//
// Both types take the time as an argument, start nothing, and return what is
// to be sent; they are safe for concurrent use.
package publish

import (
	"errors"

	"github.com/kvferry/kvferry/internal/id"
)

var (
	// ErrFull: the table has reached its bound; the text names it.
	ErrFull = errors.New("table is full")
	// ErrEnded: the publication is known to have ended.
	ErrEnded = errors.New("publication has ended")
	// ErrUnknown: no such publication, as far as is known here.
	ErrUnknown = errors.New("unknown publication")
	// ErrConflict: an announcement contradicts an earlier one of the same
	// publication, or what the caller asked for.
	ErrConflict = errors.New("announcement contradicts what is known")
)

// Output is what is to be sent after a call, what [Log.Outgoing] hands over
// apart: items for all, items for some. Items are gossip messages of at most
// [wire.ItemBytes] bytes. What is lost is repaired, or said again, so the sender
// may drop.
type Output struct {
	Broadcast [][]byte
	Send      []Directed
	// Resync are owners of whose log this node has lost too much: read their
	// Snapshot (their [Log.Live]) and give it to [Board.Sync]. It is asked for
	// again, if need be.
	Resync []id.Life
	// Newer is a newer life of this very node that somebody has heard of, or 0:
	// two processes run under one name, or this one was taken for dead and
	// replaced. It must stop publishing.
	Newer id.Incarnation
}

// Directed is a message for one node.
type Directed struct {
	To   id.Node
	Item []byte
}
