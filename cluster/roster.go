package cluster

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/kvferry/kvferry/internal/id"
)

const (
	// maxNodes bounds the nodes that are remembered, live and lost; maxLives
	// the memberlist names, of which a node that restarts has several.
	maxNodes = 16384
	maxLives = 2 * maxNodes
	// remember is how long a lost node is called again, and its incarnation known.
	remember = 24 * time.Hour
)

var errRefused = errors.New("refused")

// listName is the name that memberlist knows a life by.
func listName(l id.Life) string {
	return string(l.Node) + "." + strconv.FormatUint(uint64(l.Incarnation), 32)
}

// parseListName accepts exactly what listName returns.
func parseListName(name string) (id.Life, error) {
	dot := strings.LastIndexByte(name, '.')
	if dot < 0 {
		return id.Life{}, fmt.Errorf("member name %.80q has no incarnation: %w", name, errMalformed)
	}
	n, err := strconv.ParseUint(name[dot+1:], 32, 64)
	l := id.Life{Node: id.Node(name[:dot]), Incarnation: id.Incarnation(n)}
	if err != nil || n == 0 || l.Node.Validate() != nil || listName(l) != name {
		return id.Life{}, fmt.Errorf("member name %.80q: %w", name, errMalformed)
	}
	return l, nil
}

// peer is another member, and how memberlist wants it addressed.
type peer struct {
	Member
	to   memberlist.Node
	hash id.NodeHash
}

// life is what memberlist says of one of its names.
type life struct {
	peer    peer
	alive   bool
	proved  bool      // it has been called by its name, which it proved
	calling bool      // it is
	call    time.Time // not before this
	bye     time.Time // when it said goodbye
	round   uint64    // reconciliation that last heard of it
	strikes int       // reconciliations in a row that found memberlist of another opinion
}

// name is what we remember of a node.
type name struct {
	node   id.Node
	newest id.Incarnation
	gossip netip.AddrPort // of the newest life
	ring   []KeyID        // what it last said of its gossip keys; nil: nothing
	lost   time.Time      // since when there is no live member; zero: there is one, or never was
	bye    bool           // it left by its own will: nobody calls it back
	round  uint64
}

// roster is the table of members. memberlist's callbacks write what they hear
// into lives; the one goroutine that serves the Handler asks settle what that
// means. There is no queue of events between them, so none can be lost: the
// table is the truth, and wake only says that it has changed.
//
// Only the newest life of a node that was ever heard of can be a member: a
// newer one ends the older at once, a late word of the older changes nothing.
// Where names are proved, it is one once it has been called by its name
// (prove.go).
//
// It never calls memberlist, whose locks its callers may hold.
type roster struct {
	self     id.Life
	selfName string
	loopback bool // we are reached by loopback only, and so must others be
	hash     func(id.Node) id.NodeHash
	wake     chan<- struct{}
	proves   chan struct{} // one token: somebody has to prove its name; nil: nobody has to
	fenced   chan struct{} // closed when our name lives on without us
	count    *counters
	maxNodes int
	maxLives int

	mu      sync.Mutex
	closed  bool
	dirty   bool           // settle has something to do
	own     id.Incarnation // highest of our name
	lives   map[string]*life
	names   map[id.NodeHash]*name
	members []peer // as last settled, by name
	round   uint64
}

func newRoster(self id.Life, advertise netip.Addr, wake chan<- struct{}, count *counters) roster {
	return roster{
		self: self, selfName: listName(self), own: self.Incarnation, loopback: advertise.IsLoopback(), hash: id.Node.Hash,
		wake: wake, fenced: make(chan struct{}), count: count, maxNodes: maxNodes, maxLives: maxLives,
		lives: map[string]*life{}, names: map[id.NodeHash]*name{},
	}
}

// decode reads what memberlist knows of a member.
func (r *roster) decode(n *memberlist.Node) (peer, error) {
	l, err := parseListName(n.Name)
	if err != nil {
		return peer{}, err
	}
	ip, ok := netip.AddrFromSlice(n.Addr)
	if !ok {
		return peer{}, fmt.Errorf("address of %d bytes: %w", len(n.Addr), errMalformed)
	}
	gossip := netip.AddrPortFrom(ip.Unmap(), n.Port)
	if err := checkAddress(gossip); err != nil {
		return peer{}, fmt.Errorf("%w: %w", err, errMalformed)
	}
	meta, err := decodeMeta(n.Meta)
	if err != nil {
		return peer{}, err
	}
	return peer{
		Member: Member{Life: l, Gossip: gossip, Meta: meta},
		to:     memberlist.Node{Name: n.Name, Addr: slices.Clone(n.Addr), Port: n.Port, PMax: n.PMax},
		hash:   r.hash(l.Node),
	}, nil
}

// admit decides whether memberlist may believe that a member lives.
func (r *roster) admit(n *memberlist.Node) error {
	if n.Name == r.selfName {
		return nil
	}
	p, err := r.decode(n)
	if err == nil {
		err = r.enter(p)
	}
	if err != nil {
		r.count.refused.Add(1)
	}
	return err
}

func (r *roster) enter(p peer) error {
	if p.Life.Node == r.self.Node {
		r.fence(p.Life.Incarnation)
		return fmt.Errorf("it has our name, and incarnation %d where ours is %d: %w", p.Life.Incarnation, r.self.Incarnation, errRefused)
	}
	if p.Gossip.Addr().IsLoopback() != r.loopback {
		return fmt.Errorf("it advertises %s: a loopback address and another cannot reach each other: %w", p.Gossip, errRefused)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return ErrClosed
	}
	n := r.names[p.hash]
	if p.hash == r.hash(r.self.Node) || n != nil && n.node != p.Life.Node {
		r.count.collisions.Add(1)
		return fmt.Errorf("its name has the same hash as another member's: rename it: %w", errRefused)
	}
	if n != nil && p.Life.Incarnation < n.newest {
		return fmt.Errorf("incarnation %d is older than %d, which is known: %w", p.Life.Incarnation, n.newest, errRefused)
	}
	l := r.lives[p.to.Name]
	if l == nil && len(r.lives) >= r.maxLives || n == nil && len(r.names) >= r.maxNodes && !r.forget() {
		return fmt.Errorf("there are %d members already: %w", len(r.names), errRefused)
	}
	if n == nil {
		n = &name{node: p.Life.Node}
		r.names[p.hash] = n
	}
	if p.Life.Incarnation > n.newest {
		n.newest, n.bye = p.Life.Incarnation, false
		r.touch()
	}
	n.gossip, n.round = p.Gossip, r.round
	if l == nil {
		l = &life{peer: p}
		r.lives[p.to.Name] = l
	}
	l.round = r.round
	return nil
}

// forget makes room by giving up the node that was lost first; r.mu is held.
func (r *roster) forget() bool {
	var first id.NodeHash
	var since time.Time
	for h, n := range r.names {
		if !n.lost.IsZero() && (since.IsZero() || n.lost.Before(since)) {
			first, since = h, n.lost
		}
	}
	if since.IsZero() {
		return false
	}
	delete(r.names, first)
	return true
}

// heard notes that memberlist believes a member to be alive.
func (r *roster) heard(n *memberlist.Node) {
	if n.Name == r.selfName {
		return
	}
	p, err := r.decode(n)
	if err != nil { // admitted, so this cannot be
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	l := r.lives[n.Name]
	if l == nil {
		l = &life{}
		r.lives[n.Name] = l
	}
	l.peer, l.alive, l.round, l.strikes = p, true, r.round, 0
	if !r.trusts(l) {
		poke(r.proves)
	}
	r.touch()
}

// trusts says that a life has proved its name, or need not; r.mu is held.
func (r *roster) trusts(l *life) bool { return r.proves == nil || l.proved }

// unproved returns a live member that has to be called by its name, and marks it
// as being called. If there is none it says how long none will be, at most an
// hour.
func (r *roster) unproved(now time.Time) (p peer, ok bool, wait time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	wait = time.Hour
	for _, l := range r.lives {
		n := r.names[l.peer.hash]
		if !l.alive || l.proved || l.calling || n == nil || n.newest != l.peer.Life.Incarnation {
			continue
		}
		if left := l.call.Sub(now); left > 0 {
			wait = min(wait, left)
			continue
		}
		l.calling = true
		return l.peer, true, 0
	}
	return peer{}, false, wait
}

// proved notes whether a member that was called has proved its name; if not, it
// is called again at a time.
func (r *roster) proved(p peer, yes bool, again time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if l := r.lives[p.to.Name]; l != nil {
		l.proved, l.calling, l.call = yes, false, again
		r.touch()
	}
}

// died notes that memberlist believes a member to be dead or gone.
func (r *roster) died(dead *memberlist.Node, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.lives[dead.Name]
	if l == nil {
		return
	}
	l.alive, l.round, l.strikes = false, r.round, 0
	if n := r.names[l.peer.hash]; n != nil && n.newest == l.peer.Life.Incarnation && n.lost.IsZero() && r.trusts(l) {
		n.lost = now
	}
	r.touch()
}

// bye notes a goodbye, which memberlist will hear of a little later.
func (r *roster) bye(who id.Life, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if l := r.lives[listName(who)]; l != nil {
		l.bye = now
		r.touch()
	}
}

// fence notes an incarnation of our own name.
func (r *roster) fence(i id.Incarnation) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i <= r.own {
		return
	}
	if r.own == r.self.Incarnation {
		close(r.fenced)
	}
	r.own = i
}

func (r *roster) newestOwn() id.Incarnation {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.own
}

// touch has settle look again; r.mu is held.
func (r *roster) touch() {
	r.dirty = true
	poke(r.wake)
}

// change is what the Handler is told.
type change struct {
	member   Member
	joined   bool
	updated  bool // neither: left
	graceful bool
}

// settle brings members up to date with lives and returns what has changed, of
// one node its end before its new beginning. A goodbye counts for so long: if
// the member is then still alive, somebody else said it.
func (r *roster) settle(now time.Time, goodbye time.Duration) []change {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.dirty {
		return nil
	}
	r.dirty = false
	want := map[id.Node]peer{}
	for _, l := range r.lives {
		n := r.names[l.peer.hash]
		if l.alive && now.Sub(l.bye) >= goodbye {
			l.bye = time.Time{}
		}
		if l.alive && l.bye.IsZero() && n != nil && l.peer.Life.Incarnation == n.newest && r.trusts(l) {
			want[l.peer.Life.Node] = l.peer
		}
	}
	var changes []change
	have := map[id.Node]bool{}
	for _, old := range r.members {
		node := old.Life.Node
		next, ok := want[node]
		if ok && next.Life == old.Life {
			have[node] = true
			if next.Member != old.Member {
				changes = append(changes, change{member: next.Member, updated: true})
			}
			continue
		}
		l := r.lives[old.to.Name]
		graceful := l != nil && !l.bye.IsZero()
		changes = append(changes, change{member: old.Member, graceful: graceful})
		if n := r.names[old.hash]; n != nil && !ok {
			n.lost, n.bye = now, graceful && n.newest == old.Life.Incarnation
		}
		if ok {
			have[node] = true
			changes = append(changes, change{member: next.Member, joined: true})
		}
	}
	for _, node := range slices.Sorted(maps.Keys(want)) {
		if !have[node] {
			changes = append(changes, change{member: want[node].Member, joined: true})
		}
	}
	for _, p := range want {
		n := r.names[p.hash]
		n.lost, n.bye = time.Time{}, false
	}
	if changes == nil {
		return nil
	}
	r.members = r.members[:0:0]
	for _, p := range want {
		r.members = append(r.members, p)
	}
	slices.SortFunc(r.members, func(a, b peer) int { return strings.Compare(string(a.Life.Node), string(b.Life.Node)) })
	return changes
}

// reconcile takes the names that memberlist lists as alive. Callbacks and list
// cannot differ for long unless one of us is wrong; then the list is right. It
// also forgets what has been gone for long.
func (r *roster) reconcile(listed []string, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.round++
	alive := make(map[string]bool, len(listed))
	for _, n := range listed {
		alive[n] = true
	}
	for n, l := range r.lives {
		if alive[n] {
			l.round = r.round
		}
		if l.alive == alive[n] {
			l.strikes = 0
		} else if l.strikes++; l.strikes > 1 {
			l.alive, l.strikes = alive[n], 0
			r.count.diverged.Add(1)
		}
		if l.alive || r.round-l.round < 3 {
			if n := r.names[l.peer.hash]; n != nil {
				n.round = r.round
			}
			continue
		}
		delete(r.lives, n)
	}
	for h, n := range r.names {
		// A name without a life was lost, or was admitted and never came.
		if r.round-n.round >= 3 && (n.lost.IsZero() || now.Sub(n.lost) > remember) {
			delete(r.names, h)
		}
	}
	r.touch()
}

// close makes the roster deaf and dumb.
func (r *roster) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	clear(r.lives)
	clear(r.names)
	r.members = nil
}

// list returns the members and self, by name.
func (r *roster) list(self Member) []Member {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]Member, 0, len(r.members)+1)
	for _, p := range r.members {
		all = append(all, p.Member)
	}
	at, _ := slices.BinarySearchFunc(all, self, func(a, b Member) int { return strings.Compare(string(a.Life.Node), string(b.Life.Node)) })
	return slices.Insert(all, at, self)
}

func (r *roster) len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.members)
}

func (r *roster) peer(node id.Node) (peer, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i, ok := slices.BinarySearchFunc(r.members, node, func(p peer, n id.Node) int { return strings.Compare(string(p.Life.Node), string(n)) })
	if !ok {
		return peer{}, false
	}
	return r.members[i], true
}

// pick returns so many other members at random, all if there are not more.
func (r *roster) pick(n int) []peer {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n >= len(r.members) {
		return slices.Clone(r.members)
	}
	picked := make([]peer, 0, n)
	for taken := make([]int, 0, n); len(picked) < n; {
		if i := rand.IntN(len(r.members)); !slices.Contains(taken, i) {
			taken, picked = append(taken, i), append(picked, r.members[i])
		}
	}
	return picked
}

// alive returns the newest lives that memberlist believes to live, settled or not.
func (r *roster) alive() []peer {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []peer
	for _, l := range r.lives {
		if n := r.names[l.peer.hash]; l.alive && n != nil && n.newest == l.peer.Life.Incarnation {
			all = append(all, l.peer)
		}
	}
	return all
}

// lists says whether a life is a member, and the newest incarnation of its node.
func (r *roster) lists(l id.Life) (bool, id.Incarnation) {
	p, ok := r.peer(l.Node)
	r.mu.Lock()
	defer r.mu.Unlock()
	var newest id.Incarnation
	if n := r.names[r.hash(l.Node)]; n != nil && n.node == l.Node {
		newest = n.newest
	}
	return ok && p.Life == l, newest
}

// hasRing notes what a node says of its gossip keys.
func (r *roster) hasRing(node id.Node, ids []KeyID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := r.names[r.hash(node)]; n != nil && n.node == node {
		n.ring = ids
	}
}

// lostRings are the nodes that are gone without a goodbye since a day at most,
// and what they have last said of their gossip keys.
func (r *roster) lostRings(now time.Time) map[id.Node][]KeyID {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := map[id.Node][]KeyID{}
	for _, n := range r.names {
		if !n.lost.IsZero() && now.Sub(n.lost) <= remember && !n.bye {
			all[n.node] = n.ring
		}
	}
	return all
}

// lostSince returns where nodes were that are gone without a goodbye since then,
// and where nobody else is now.
func (r *roster) lostSince(then time.Time) []netip.AddrPort {
	r.mu.Lock()
	defer r.mu.Unlock()
	taken := map[netip.AddrPort]bool{}
	for _, p := range r.members {
		taken[p.Gossip] = true
	}
	var all []netip.AddrPort
	for _, n := range r.names {
		if !n.lost.IsZero() && !n.lost.Before(then) && !n.bye && !taken[n.gossip] {
			all = append(all, n.gossip)
		}
	}
	return all
}
