package publish

import (
	"cmp"
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// How the network carries what is gossiped, as package cluster does.
const (
	sweepEvery  = 10 * ms
	fanout      = 4    // members an item is pushed to at first sight
	packetBytes = 1350 // of items
)

// network is a cluster in virtual time, without a socket. What a member says is
// pushed to a few random others, who pass on what is news, and is offered once
// more later. Packets are late, out of order, and lost.
type network struct {
	t       testing.TB
	r       *rand.Rand
	tier    *rand.Rand // when what is published changes its state
	now     time.Time
	events  events
	n       uint64 // events so far
	members []*member
	loss    float64
	every   time.Duration               // between two sweeps of a member
	rate    int                         // bytes a second that a member may push; 0: any
	room    int                         // bytes of a member\'s outbox
	cut     func(from, to *member) bool // nil: nowhere
	lose    func(item []byte) bool      // nil: none; items that are lost everywhere
	tape    map[string]bool             // every item that was delivered; nil: not recorded
}

// member is one node.
type member struct {
	*network
	life  id.Life
	log   *Log
	board *Board
	gone  bool
	knows []*member // live members, itself apart

	next manager.PublicationID
	open []manager.PublicationID // published, not ended

	box   [][]byte
	bytes int
	free  time.Time // when the next packet may be pushed
	busy  bool      // a push is due
	again [][]byte
	lost  int // own items that found no room
	shut  int // items of others that were not passed on
}

type event struct {
	at time.Time
	n  uint64
	do func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return cmp.Or(e[i].at.Compare(e[j].at), cmp.Compare(e[i].n, e[j].n)) < 0
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := len(*e) - 1
	x := (*e)[last]
	(*e)[last] = event{}
	*e = (*e)[:last]
	return x
}

// newNetwork returns so many members that know each other.
func newNetwork(t testing.TB, seed uint64, members int) *network {
	n := &network{t: t, r: rand.New(rand.NewPCG(seed, 2)), tier: rand.New(rand.NewPCG(seed, 3)), now: t0, every: sweepEvery, room: 1 << 20}
	for i := range members {
		n.join(id.Life{Node: id.Node(fmt.Sprintf("n-%d", i)), Incarnation: 1}, BoardOptions{})
	}
	return n
}

// join adds a member that everybody knows at once. It begins to live at a
// random moment of the first sweep.
func (n *network) join(life id.Life, o BoardOptions) *member {
	o.Life = life
	m := &member{network: n, life: life, log: NewLog(LogOptions{Life: life}), board: NewBoard(o), next: 1}
	for _, other := range n.members {
		if !other.gone {
			m.meet(other)
			other.meet(m)
		}
	}
	n.members = append(n.members, m)
	n.after(n.ms(0, 10), m.sweep)
	n.after(n.ms(0, 10000), m.pull)
	return m
}

func (m *member) meet(other *member) {
	m.miss(other)
	m.knows = append(m.knows, other)
	m.board.Member(m.now, other.life, true)
}

// miss takes another for dead.
func (m *member) miss(other *member) {
	if i := slices.Index(m.knows, other); i >= 0 {
		m.knows = slices.Delete(m.knows, i, i+1)
		m.board.Member(m.now, other.life, false)
	}
}

func (n *network) after(d time.Duration, do func()) {
	n.n++
	heap.Push(&n.events, event{n.now.Add(d), n.n, do})
}

// ms is a random time of so many milliseconds.
func (n *network) ms(least, most int) time.Duration {
	return time.Duration(least)*ms + time.Duration(n.r.Int64N(int64(most-least)*int64(ms)))
}

// run lets time pass.
func (n *network) run(d time.Duration) {
	end := n.now.Add(d)
	for len(n.events) > 0 && !n.events[0].at.After(end) {
		e := heap.Pop(&n.events).(event)
		n.now = e.at
		e.do()
	}
	n.now = end
}

// sweep is what a node does because time passes.
func (m *member) sweep() {
	if m.gone {
		return
	}
	m.flush()
	m.send(m.log.Tick(m.now))
	m.send(m.log.Beacon(m.now, m.board.Members))
	out := m.board.Tick(m.now)
	// The same run for the same seed.
	slices.SortFunc(out.Send, func(a, b Directed) int { return cmp.Compare(a.To, b.To) })
	slices.SortFunc(out.Resync, func(a, b id.Life) int { return cmp.Compare(a.Node, b.Node) })
	m.send(out)
	m.after(m.every, m.sweep)
}

func (m *member) flush() {
	for _, item := range m.log.Outgoing(m.now, m.room-m.bytes-2*wire.ItemBytes) {
		if !m.say(item) {
			m.lost++
		}
	}
}

// say puts an item into the outbox; false: it is full.
func (m *member) say(item []byte) bool {
	if m.bytes+len(item) > m.room {
		return false
	}
	if m.lose != nil && m.lose(item) {
		return true
	}
	m.box = append(m.box, item)
	m.bytes += len(item)
	if !m.busy {
		m.busy = true
		m.after(max(0, m.free.Sub(m.now)), m.push)
	}
	return true
}

// push sends one packet to random members.
func (m *member) push() {
	m.busy = false
	if m.gone || len(m.box) == 0 {
		return
	}
	packet := pack(&m.box)
	sent := 0
	for i := range min(fanout, len(m.knows)) {
		j := i + m.r.IntN(len(m.knows)-i)
		m.knows[i], m.knows[j] = m.knows[j], m.knows[i]
		m.packet(m.knows[i], packet)
		sent += size(packet)
	}
	m.bytes -= size(packet)
	if m.again = append(m.again, packet...); len(m.again) == len(packet) {
		m.after(m.ms(0, 20), m.offer)
	}
	if m.rate > 0 {
		m.free = m.now.Add(time.Duration(float64(sent) / float64(m.rate) * float64(time.Second)))
	}
	if len(m.box) > 0 {
		m.busy = true
		m.after(max(0, m.free.Sub(m.now)), m.push)
	}
}

// offer sends once more what was pushed.
func (m *member) offer() {
	if m.gone {
		return
	}
	for range 3 {
		if packet := pack(&m.again); len(packet) > 0 && len(m.knows) > 0 {
			m.packet(m.knows[m.r.IntN(len(m.knows))], packet)
		}
	}
	if len(m.again) > 0 {
		m.after(20*ms, m.offer)
	}
}

// pack takes what fits into a packet.
func pack(box *[][]byte) [][]byte {
	n, bytes := 0, 0
	for n < len(*box) && (n == 0 || bytes+len((*box)[n]) <= packetBytes) {
		bytes += len((*box)[n])
		n++
	}
	packet := slices.Clone((*box)[:n])
	*box = (*box)[n:]
	return packet
}

func size(items [][]byte) (bytes int) {
	for _, item := range items {
		bytes += len(item)
	}
	return bytes
}

// packet is on its way for a while, and is lost now and then.
func (m *member) packet(to *member, items [][]byte) {
	if m.r.Float64() < m.loss {
		return
	}
	m.after(m.ms(0, 3), func() {
		if m.cut != nil && m.cut(m, to) {
			return
		}
		slices.Reverse(items) // memberlist delivers a burst last in, first out
		for _, item := range items {
			to.receive(item)
		}
	})
}

func (m *member) receive(item []byte) {
	if m.gone {
		return
	}
	if m.tape != nil {
		m.tape[string(item)] = true
	}
	out, forLog, err := m.board.Receive(m.now, item)
	if err != nil {
		m.t.Fatal(err)
	}
	if len(out.Broadcast) > 0 && m.bytes > m.room/2 {
		m.shut++
		out.Broadcast = nil
	}
	m.send(out)
	switch f := forLog.(type) {
	case *wire.Nack:
		m.send(m.log.Nack(m.now, f))
	case *wire.Echo:
		m.log.Echo(m.now, f)
	}
}

func (m *member) send(out Output) {
	if out.Newer > m.life.Incarnation {
		m.t.Fatalf("%s is fenced by %d", m.life, out.Newer)
	}
	for _, item := range out.Broadcast {
		m.say(item)
	}
	for _, d := range out.Send {
		if to := m.find(d.To); to != nil {
			m.packet(to, [][]byte{d.Item})
		}
	}
	for _, life := range out.Resync {
		owner := m.find(life.Node)
		if owner == nil {
			continue
		}
		m.after(m.ms(0, 3), func() { m.sync(owner) })
	}
}

// sync reads the owner's snapshot over a stream, which loses nothing.
func (m *member) sync(owner *member) {
	if m.gone || owner.gone || m.cut != nil && m.cut(m, owner) {
		return
	}
	items := owner.log.Live(m.now)
	m.after(m.ms(1, 5), func() {
		if err := m.board.Sync(m.now, owner.life, items); err != nil {
			m.t.Fatal(err)
		}
	})
}

// find returns a member that is known by its name.
func (m *member) find(name id.Node) *member {
	for _, other := range m.knows {
		if other.life.Node == name {
			return other
		}
	}
	return nil
}

// pull is push/pull with a random member, every ten seconds.
func (m *member) pull() {
	if m.gone {
		return
	}
	if len(m.knows) > 0 {
		m.exchange(m.knows[m.r.IntN(len(m.knows))])
	}
	m.after(10*time.Second, m.pull)
}

func (m *member) exchange(other *member) {
	if other.gone || m.cut != nil && m.cut(m, other) {
		return
	}
	ours, theirs := m.board.State(m.log.Check()), other.board.State(other.log.Check())
	for to, state := range map[*member][]byte{m: theirs, other: ours} {
		out, err := to.board.Merge(m.now, state)
		if err != nil {
			m.t.Fatal(err)
		}
		to.send(out)
	}
}

// publish publishes a request of 1k tokens, and returns its name.
func (m *member) publish(hold time.Duration) id.Publication {
	p := publication(m.next, id.Request(fmt.Sprintf("%s/%d", m.life, m.next)), 1024, false)
	m.open = append(m.open, m.next)
	m.next++
	return m.announce(p, hold)
}

func (m *member) announce(p manager.Publication, hold time.Duration) id.Publication {
	if _, _, _, err := m.log.Reserve(p.ID); err != nil {
		m.t.Fatal(err)
	}
	a, err := m.log.Announce(m.now, p, hold)
	if err != nil {
		m.t.Fatal(err)
	}
	m.flush()
	return a.Name
}

// grow makes a random one longer.
func (m *member) grow() {
	if len(m.open) == 0 {
		return
	}
	i := m.open[m.r.IntN(len(m.open))]
	if h := m.log.held[i]; !h.value.Final {
		m.announce(publication(i, h.value.Request, h.value.Streams[0].Tokens+100, false), time.Hour)
	}
}

// move brings a random one into another state, which may be its last growth, too.
func (m *member) move() {
	if len(m.open) == 0 {
		return
	}
	p := m.log.held[m.open[m.tier.IntN(len(m.open))]].value
	p.Final = p.Final || m.tier.IntN(2) == 0
	m.announce(in(after(p.Streams[0].State, m.tier), p, page.Index(m.tier.Uint32N(1000))), time.Hour)
}

// end ends a random one.
func (m *member) end() {
	if len(m.open) == 0 {
		return
	}
	i := m.r.IntN(len(m.open))
	if err := m.log.Release(m.now, m.open[i]); err != nil {
		m.t.Fatal(err)
	}
	m.open = slices.Delete(m.open, i, i+1)
	m.flush()
}

// traffic publishes so many times a second in the whole cluster, grows, moves,
// and ends, for a while. Of each member most live publications stay.
func (n *network) traffic(d time.Duration, rate, most int) {
	every := time.Second / time.Duration(rate)
	for end := n.now.Add(d); n.now.Before(end); n.run(every) {
		m := n.members[n.r.IntN(len(n.members))]
		if m.gone {
			continue
		}
		m.publish(time.Hour)
		if n.r.IntN(4) == 0 {
			m.grow()
		}
		if n.tier.IntN(8) == 0 {
			m.move()
		}
		for len(m.open) > most {
			m.end()
		}
	}
}

// differs says in how many ways replicas and logs differ, and names one.
func (n *network) differs() (ways int, example string) {
	for _, m := range n.members {
		if m.gone {
			continue
		}
		for _, owner := range m.knows {
			if owner.gone {
				continue
			}
			if why := m.lacks(owner); why != "" {
				ways++
				example = why
			}
		}
	}
	return ways, example
}

// lacks says how the replica of an owner differs from its log; "": it does not.
func (m *member) lacks(owner *member) string {
	v := m.board.views[owner.life.Node.Hash()]
	if v == nil || v.incarnation != owner.life.Incarnation {
		return fmt.Sprintf("%s knows nothing of %s", m.life, owner.life)
	}
	live := 0
	for _, h := range owner.log.held {
		if len(h.steps) == 0 {
			continue
		}
		live++
		if v.live[h.newest()] == nil {
			return fmt.Sprintf("%s lacks %d of %s (floor %d, max %d, %d ranges known)", m.life, h.newest(), owner.life, v.floor, v.max, len(v.known.ranges))
		}
		if why := v.live[h.newest()].differs(&h.entry); why != "" {
			return fmt.Sprintf("%s of %s: %s", m.life, owner.life, why)
		}
	}
	if live != len(v.live) {
		return fmt.Sprintf("%s holds %d of %s, which has %d", m.life, len(v.live), owner.life, live)
	}
	return ""
}

// settles fails unless every replica holds what its owner holds, within most. It
// returns when they did.
func (n *network) settles(most time.Duration) time.Duration {
	n.t.Helper()
	for start := n.now; ; n.run(10 * ms) {
		ways, example := n.differs()
		if ways == 0 {
			return n.now.Sub(start)
		}
		if n.now.Sub(start) >= most {
			n.t.Fatalf("%d replicas differ after %v: %s", ways, most, example)
		}
	}
}

// verify checks every board.
func (n *network) verify() {
	n.t.Helper()
	for _, m := range n.members {
		verify(n.t, m.board, n.now)
		if m.lost > 0 {
			n.t.Errorf("%s had no room for %d of its own items", m.life, m.lost)
		}
	}
}

// sees is what a member shows of a publication.
func (m *member) sees(p id.Publication) bool {
	_, err := m.board.ByName(m.now, p)
	return err == nil
}
