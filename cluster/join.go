package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/kvferry/kvferry/internal/id"
)

const (
	askMin, askMax = 20 * time.Millisecond, 500 * time.Millisecond
	askMembers     = 8  // at a time
	askRounds      = 40 // about 15 s of them, once we are joined
	deafAnswers    = 3  // after so many a member is called
	callSeeds      = 3  // at a time
	callers        = 16 // of all members, who call one that has just been lost
)

// joining is how far we are in the cluster. That memberlist joined without an
// error proves nothing, so members are asked whether they list us. Those that
// do not, since memberlist's gossip loses some of its own messages too, are
// called.
type joining struct {
	nonce uint64
	done  chan struct{} // closed when we are joined
	over  chan struct{} // closed when we call nobody any more
	loss  chan struct{} // one token: a member was lost

	mu       sync.Mutex
	list     []string // seeds, as they were given
	seeds    int      // of them that are not ourselves
	listedBy map[id.Node]bool
	callings map[uint64]*calling // by nonce
	deaf     map[id.Node]int     // how often they have said that they do not
	refused  bool                // somebody has
	last     error               // why the last call failed
	joined   bool
	stopped  bool
}

func (j *joining) init(seeds []string) {
	j.nonce = rand.Uint64()
	j.list, j.seeds = slices.Clone(seeds), len(seeds)
	j.callings = map[uint64]*calling{}
	j.done, j.over, j.loss = make(chan struct{}), make(chan struct{}), make(chan struct{}, 1)
	j.listedBy, j.deaf = map[id.Node]bool{}, map[id.Node]int{}
}

func (j *joining) stop() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.stopped {
		j.stopped = true
		close(j.over)
	}
}

// need is how many members must list us, knowing so many others; j.mu is held.
func (j *joining) need(others int) int {
	if j.seeds == 0 {
		return 0
	}
	return min(2, j.seeds, max(1, others))
}

// check notes that one more node lists us, if any, and says whether we are joined.
func (j *joining) check(by id.Node, others int) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	if by != "" {
		j.listedBy[by] = true
		delete(j.deaf, by)
	}
	if !j.joined && len(j.listedBy) >= j.need(others) {
		j.joined = true
		close(j.done)
	}
	return j.joined
}

// count notes how many seeds are not ourselves.
func (j *joining) count(seeds int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.seeds = seeds
}

// unlisted notes that a member has said that it does not list us.
func (j *joining) unlisted(by id.Node) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.deaf[by]++
	j.refused = true
}

// overdue returns one node that has to be called, if any.
func (j *joining) overdue() (id.Node, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for node, n := range j.deaf {
		if n >= deafAnswers {
			delete(j.deaf, node)
			return node, true
		}
	}
	return "", false
}

// silent returns those of the peers who have not yet said that they list us.
func (j *joining) silent(all []peer) []peer {
	j.mu.Lock()
	defer j.mu.Unlock()
	var rest []peer
	for _, p := range all {
		if !j.listedBy[p.Life.Node] {
			rest = append(rest, p)
		}
	}
	return rest
}

// Joined waits until min(2, configured seeds, known others) other members list
// us; with no seeds, or none but ourselves, it returns at once. The error wraps
// [ErrFenced] if this life is over; see [Cluster.Newest].
func (c *Cluster) Joined(ctx context.Context) error {
	select { // a fence counts for more than having joined, and that for more than ctx
	case <-c.Fenced():
		return fmt.Errorf("join: %w", ErrFenced)
	default:
	}
	select {
	case <-c.joining.done:
		return nil
	default:
	}
	select {
	case <-c.joining.done:
		return nil
	case <-c.Fenced():
		return fmt.Errorf("join: %w", ErrFenced)
	case <-c.done:
		return fmt.Errorf("join: %w", ErrClosed)
	case <-ctx.Done():
		c.joining.mu.Lock()
		defer c.joining.mu.Unlock()
		err := fmt.Errorf("join %s: only %d members list us, want %d: %w", strings.Join(c.joining.list, ", "),
			len(c.joining.listedBy), c.joining.need(c.calls.roster.len()), context.Cause(ctx))
		if last := c.suspect(c.joining.last); last != nil {
			err = fmt.Errorf("%w; last: %w", err, last)
		}
		return err
	}
}

// suspect adds to what went wrong with a call what an operator may have got
// wrong. nil stays nil, unless packets come that we have no key for.
func (c *Cluster) suspect(err error) error {
	switch {
	case c.counters.unreadable.Load() > 0 || err != nil && isKeyTrouble(err.Error()):
		_, own := c.keys.now()
		hint := fmt.Errorf("gossip keys may differ (cluster.keyring): this node has %s", own)
		if err != nil {
			hint = fmt.Errorf("%w; %w", err, hint)
		}
		return hint
	case err != nil && strings.HasSuffix(err.Error(), "EOF"):
		return fmt.Errorf("%w: they hang up: is cluster.name the same there, and security.certificate set on all nodes or on none", err)
	}
	return err
}

// NotJoined is nil once we are joined; until then it says what went wrong last,
// if anything did.
func (c *Cluster) NotJoined() error {
	c.joining.mu.Lock()
	defer c.joining.mu.Unlock()
	if c.joining.joined {
		return nil
	}
	last := c.suspect(c.joining.last)
	if last == nil && c.joining.refused && c.transport.identity != nil {
		last = errUnproved
	}
	if last != nil {
		return fmt.Errorf("%w: %w", errUnlisted, last)
	}
	return errUnlisted
}

var (
	errUnlisted = errors.New("no seed lists this node yet")
	errUnproved = errors.New("they answer, but may not be able to call it by its name: can they reach it, and is security.certificate of this node; their logs say more")
)

// join calls seeds and lost members until the cluster ends: often until we are
// joined, then from time to time, since after a long partition neither side
// calls the other, and more often after a loss, since who restarts without
// seeds calls nobody.
func (c *Cluster) join(ctx context.Context) {
	start := time.Now()
	call, ask, warn := start, askMin, start.Add(c.time.patience)
	backoff := 4 * askMin
	for rounds := 0; ; {
		joined := c.joining.check("", c.calls.roster.len())
		if now := time.Now(); !joined && !now.Before(warn) {
			c.log.Warn("not joined yet", "after", now.Sub(start).Round(time.Second), "seeds", c.joining.all(), "err", c.NotJoined())
			warn = now.Add(c.time.remind)
		}
		if now := time.Now(); !now.Before(call) {
			c.call(ctx, joined)
			if joined {
				call = now.Add(between(c.time.rejoinMin, c.time.rejoinMax))
			} else {
				call = now.Add(between(backoff/2, backoff))
				backoff = min(2*backoff, c.time.joinMax)
			}
		}
		if soon, ok := c.soon(); ok && joined && soon < time.Until(call) {
			call = time.Now().Add(soon)
		}
		pause := time.Until(call)
		silent := c.joining.silent(c.calls.roster.alive())
		if !joined || len(silent) > 0 && rounds < askRounds {
			if joined {
				rounds++
			}
			c.ask(silent)
			pause = min(pause, between(ask/2, ask))
			ask = min(ask*3/2, askMax)
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-c.joining.loss:
			t.Stop()
		case <-c.joining.over:
			t.Stop()
			return
		case <-c.done:
			t.Stop()
			return
		}
	}
}

// soon is how long to wait until the next call to a member that has just been
// lost. All of a cluster together call it a few times as often as one of two does.
func (c *Cluster) soon() (time.Duration, bool) {
	if len(c.calls.roster.lostSince(time.Now().Add(-c.time.fresh))) == 0 {
		return 0, false
	}
	least := c.time.rejoinSoon * time.Duration(1+c.calls.roster.len()/callers)
	return between(least/2, least), true
}

// Call tries at once to join whoever is now where a member is or was: a new life
// of it answers there, which nobody has told us of. Of many members a few do.
func (c *Cluster) Call(node id.Node) {
	others := c.calls.roster.len()
	p, ok := c.calls.roster.peer(node)
	if !ok || c.over() || rand.IntN(max(others, 1)) >= callers {
		return
	}
	c.learn(context.Background(), []netip.AddrPort{p.Gossip})
	if _, err := c.list.Join([]string{p.Gossip.String()}); err != nil {
		c.log.Debug("call member", "node", node, "err", oneLine(err))
	}
}

func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }

func between(low, high time.Duration) time.Duration { return low + rand.N(high-low+1) }

// call has memberlist join some of those that are not members.
func (c *Cluster) call(ctx context.Context, joined bool) {
	skip := map[netip.AddrPort]bool{c.advertise: true, c.bound: true}
	most := callSeeds
	if joined {
		most = 1
		for _, m := range c.Members() {
			skip[m.Gossip] = true
		}
	}
	var errs []error
	var call []netip.AddrPort
	all, seeds := c.joining.all(), 0
	for _, i := range rand.Perm(len(all)) {
		if _, err := netip.ParseAddrPort(all[i]); err != nil && len(call) >= most {
			seeds++ // a name: not worth a look-up
			continue
		}
		addrs, err := resolve(ctx, all[i])
		if err != nil {
			errs = append(errs, err)
		}
		if !slices.ContainsFunc(addrs, c.isSelf) {
			seeds++
		}
		for _, a := range addrs {
			if !skip[a] && len(call) < most {
				call = append(call, a)
			}
		}
	}
	c.joining.count(seeds)
	lost := c.calls.roster.lostSince(time.Now().Add(-c.time.fresh))
	if len(lost) == 0 {
		lost = c.calls.roster.lostSince(time.Time{})
	}
	if len(lost) > 0 {
		call = append(call, lost[rand.IntN(len(lost))])
	}
	c.learn(ctx, call)
	errs = append(errs, c.dial(ctx, call))
	err := lined(errors.Join(errs...))
	c.joining.mu.Lock()
	first := c.joining.last == nil
	c.joining.last = err
	c.joining.mu.Unlock()
	if err != nil && first {
		c.log.Info("call members that are missing; more will be tried", "err", err)
	}
}

// dial has memberlist join whoever is at the addresses.
func (c *Cluster) dial(ctx context.Context, addrs []netip.AddrPort) error {
	var errs []error
	for _, a := range addrs {
		if ctx.Err() != nil {
			break
		}
		if _, err := c.list.Join([]string{a.String()}); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// lined is an error in one line: memberlist's have several.
func lined(err error) error {
	if err == nil {
		return nil
	}
	return errors.New(oneLine(err))
}

func (c *Cluster) isSelf(a netip.AddrPort) bool { return a == c.advertise || a == c.bound }

// ask asks some members whether they list us, and calls one that does not.
func (c *Cluster) ask(silent []peer) {
	if node, ok := c.joining.overdue(); ok {
		if p, ok := c.calls.roster.peer(node); ok {
			_, _ = c.list.Join([]string{p.Gossip.String()}) // if it fails there will be more answers
		}
	}
	rand.Shuffle(len(silent), func(i, k int) { silent[i], silent[k] = silent[k], silent[i] })
	question := encodeCall(kindAsk, c.joining.nonce, c.life, c.advertise)
	for _, p := range silent[:min(askMembers, len(silent))] {
		if err := c.tell(p, question); err != nil {
			c.log.Debug("ask member", "node", p.Life.Node, "err", err)
		}
	}
}

// answer answers an ask or a bye of somebody that need not be a member.
func (c *Cluster) answer(m message) {
	listed, newest := c.calls.roster.lists(m.life)
	to := memberlist.Address{Addr: m.gossip.String(), Name: listName(m.life)}
	if err := c.list.SendToAddress(to, encodeAnswer(m.nonce, c.life, listed, newest)); err != nil {
		c.log.Debug("answer member", "node", m.life.Node, "err", err)
	}
}

// answered handles what came back.
func (c *Cluster) answered(m message) {
	switch {
	case m.life.Node != c.life.Node && c.joining.heard(m.nonce, m.listed):
	case m.nonce == c.leaving.nonce:
		c.leaving.heard(m.life.Node)
	case m.nonce == c.joining.nonce && m.life.Node != c.life.Node:
		c.calls.roster.fence(m.newest)
		if m.listed {
			c.joining.check(m.life.Node, c.calls.roster.len())
		} else if _, ok := c.calls.roster.peer(m.life.Node); ok { // so deaf is bounded
			c.joining.unlisted(m.life.Node)
		}
	default:
		c.counters.badMessages.Add(1)
	}
}
