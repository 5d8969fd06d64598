package cluster

import (
	"bytes"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/kvferry/kvferry/internal/id"
)

const (
	inboxMessages = 16384 // of items, at most 23 MiB
	inboxCalls    = 1024  // asks, answers, and goodbyes
	inboxStates   = 8     // at most 8 MiB
)

// callbacks are what memberlist calls, from several goroutines and partly under
// its locks, where a call back into it deadlocks. So they hold nothing through
// which they could: they copy into roster and inbox, or read from ring and
// state.
type callbacks struct {
	wake   chan struct{} // one token: roster or inbox has something
	meta   atomic.Pointer[[]byte]
	state  atomic.Pointer[[]byte]
	roster roster
	inbox  inbox
	ring   ring
	count  *counters
}

var (
	_ memberlist.Delegate         = (*callbacks)(nil)
	_ memberlist.EventDelegate    = (*callbacks)(nil)
	_ memberlist.AliveDelegate    = (*callbacks)(nil)
	_ memberlist.ConflictDelegate = (*callbacks)(nil)
)

func newCallbacks(self id.Life, meta Meta, advertise netip.Addr, count *counters) *callbacks {
	wake := make(chan struct{}, 1)
	c := &callbacks{
		wake: wake, count: count,
		roster: newRoster(self, advertise, wake, count),
		inbox:  inbox{wake: wake, count: count},
		ring:   ring{count: count},
	}
	c.setMeta(meta)
	return c
}

func (c *callbacks) setMeta(m Meta) {
	b := m.encode()
	c.meta.Store(&b)
}

func (c *callbacks) setState(state []byte) {
	state = bytes.Clone(state)
	c.state.Store(&state)
}

func (c *callbacks) close() {
	c.roster.close()
	c.inbox.close()
}

func (c *callbacks) NodeMeta(int) []byte { return *c.meta.Load() }

func (c *callbacks) NotifyMsg(b []byte) { c.inbox.message(b) }

// GetBroadcasts returns one message: memberlist counts the messages of a packet
// in one byte and lets it overflow.
func (c *callbacks) GetBroadcasts(overhead, limit int) [][]byte {
	if m := c.ring.take(limit - overhead); m != nil {
		return [][]byte{m}
	}
	return nil
}

func (c *callbacks) LocalState(bool) []byte {
	if s := c.state.Load(); s != nil {
		return *s
	}
	return nil
}

func (c *callbacks) MergeRemoteState(b []byte, _ bool) { c.inbox.state(b) }

func (c *callbacks) NotifyAlive(n *memberlist.Node) error { return c.roster.admit(n) }

func (c *callbacks) NotifyJoin(n *memberlist.Node) { c.roster.heard(n) }

func (c *callbacks) NotifyUpdate(n *memberlist.Node) { c.roster.heard(n) }

func (c *callbacks) NotifyLeave(n *memberlist.Node) { c.roster.died(n, time.Now()) }

func (c *callbacks) NotifyConflict(_, _ *memberlist.Node) { c.count.conflicts.Add(1) }

// inbox holds copies of what came in until the Handler gets it.
type inbox struct {
	wake  chan<- struct{}
	count *counters

	mu       sync.Mutex
	closed   bool
	messages [][]byte
	calls    [][]byte
	states   [][]byte
}

func (i *inbox) message(b []byte) {
	if len(b) > maxMessage {
		i.count.badMessages.Add(1)
		return
	}
	if len(b) > 1 && b[1] != kindItems {
		i.put(&i.calls, inboxCalls, b)
		return
	}
	i.put(&i.messages, inboxMessages, b)
}

func (i *inbox) state(b []byte) {
	if len(b) > MaxState {
		i.count.badMessages.Add(1)
		return
	}
	i.put(&i.states, inboxStates, b)
}

func (i *inbox) put(queue *[][]byte, most int, b []byte) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.closed {
		return
	}
	if len(*queue) >= most {
		i.count.queueDrops.Add(1)
		return
	}
	*queue = append(*queue, bytes.Clone(b))
	poke(i.wake)
}

// takeCalls removes the calls, which do not wait behind items, nor are lost
// among too many of them.
func (i *inbox) takeCalls() [][]byte {
	i.mu.Lock()
	defer i.mu.Unlock()
	calls := i.calls
	i.calls = nil
	return calls
}

// take removes the others.
func (i *inbox) take() (states, messages [][]byte) {
	i.mu.Lock()
	defer i.mu.Unlock()
	states, messages = i.states, i.messages
	i.states, i.messages = nil, nil
	return states, messages
}

func (i *inbox) close() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.closed = true
	i.states, i.calls, i.messages = nil, nil, nil
}
