package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/kvferry/kvferry/internal/id"
)

var (
	// ErrPlain: gossip has no keys that could be changed.
	ErrPlain = errors.New("gossip is plain: set cluster.keyring to one key on all nodes, and restart them")
	// ErrUnknownKey: no key of that id is on the ring.
	ErrUnknownKey = errors.New("unknown gossip key")
	// ErrOvertaken: somebody else has changed the keys at the same time.
	ErrOvertaken = errors.New("the gossip keys were changed by somebody else meanwhile: look at them, and repeat what is still wanted")

	errNoAnswer = errors.New("waited long enough")
	errBusy     = errors.New("too many questions wait for answers: repeat it later")
)

// RingError is what stands in the way of a change of the gossip keys.
type RingError struct {
	Step string // add, use, remove
	Key  KeyID
	// Begun: this node has made the change, and tells it to all. Repeat the step
	// to see it through. Else nothing was changed.
	Begun   bool
	Missing map[id.Node]string // live members that do not have this node's ring, and what is known of why
	Lost    []id.Node          // of the last 24 hours, gone without a goodbye: not known to have the keys that they would need
	Err     error              // why nobody waited longer; nil if that would not have helped
}

func (e *RingError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s gossip key %s", e.Step, e.Key)
	if e.Begun {
		b.WriteString(": it has begun, repeat it to see it through")
	}
	if len(e.Missing) > 0 {
		b.WriteString(": members without this node's ring: ")
		for i, node := range slices.Sorted(maps.Keys(e.Missing)) {
			if i > 0 {
				b.WriteString(", ")
			}
			fmt.Fprintf(&b, "%s (%s)", node, e.Missing[node])
		}
	}
	if len(e.Lost) > 0 {
		fmt.Fprintf(&b, ": gone without a goodbye and not known to have the keys that they would need to come back: %s: start them, or leave them behind by force", joinNodes(e.Lost))
	}
	if e.Err != nil {
		fmt.Fprintf(&b, ": %v", e.Err)
	}
	return b.String()
}

func (e *RingError) Unwrap() error { return e.Err }

func joinNodes(nodes []id.Node) string {
	text := make([]string, len(nodes))
	for i, n := range nodes {
		text[i] = string(n)
	}
	return strings.Join(text, ", ")
}

// MemberRing is what a member says of its ring.
type MemberRing struct {
	Node       id.Node
	Generation uint64
	Keys       []KeyID
	Same       bool  // as ours
	Err        error // no answer, or why it could not take a newer ring
}

// Ring is the gossip keys in use. Nobody may change their bytes.
func (c *Cluster) Ring() Ring {
	r, _ := c.keys.now()
	return r
}

// Rings asks every member for its ring, by name, ourselves included. It waits
// for all, or until ctx ends, and some seconds at most. With plain gossip there
// is nobody to ask.
func (c *Cluster) Rings(ctx context.Context) ([]MemberRing, error) {
	_, own := c.keys.now()
	all := []MemberRing{{Node: c.life.Node, Generation: own.generation, Keys: own.ids, Same: true}}
	if c.keys.plain() {
		return all, nil
	}
	q := c.keys.ask()
	if q == nil {
		return nil, fmt.Errorf("ask members for their gossip keys: %w", errBusy)
	}
	defer c.keys.forget(q)
	err := c.poll(ctx, q, func(answer) bool { return true })
	if errors.Is(err, ErrClosed) {
		return nil, fmt.Errorf("ask members for their gossip keys: %w", err)
	}
	answers := c.keys.said(q)
	_, own = c.keys.now()
	for _, p := range c.calls.roster.pick(maxNodes) {
		m := MemberRing{Node: p.Life.Node}
		if a, ok := answers[p.Life]; ok {
			m.Generation, m.Keys, m.Same = a.edition.generation, a.edition.ids, a.edition.same(own)
			if a.trouble != "" {
				m.Err = errors.New(a.trouble)
			}
		} else {
			m.Err = fmt.Errorf("no answer: %w", err)
		}
		all = append(all, m)
	}
	slices.SortFunc(all, func(a, b MemberRing) int { return strings.Compare(string(a.Node), string(b.Node)) })
	return all, nil
}

// AddKey puts a key on the ring of every member, as the last: what it encrypts
// can be read from then on. The error is a [*RingError] if members stand in the
// way, or wraps [ErrPlain], [ErrOvertaken], or what SaveRing has returned. What
// was begun and did not reach all is seen through by repeating it, by this or
// another member, and in time by itself.
func (c *Cluster) AddKey(ctx context.Context, key []byte) error {
	if err := (Ring{Keys: [][]byte{key}}).check(); err != nil {
		return fmt.Errorf("add gossip key: %w", err)
	}
	return c.change(ctx, "add", IDOf(key), func(r Ring, _ *question) (Ring, error) {
		if slices.ContainsFunc(r.Keys, func(k []byte) bool { return bytes.Equal(k, key) }) {
			return r, nil
		}
		if len(r.Keys) >= MaxKeys {
			return Ring{}, fmt.Errorf("there are %d already: remove one first", MaxKeys)
		}
		r.Keys = append(slices.Clone(r.Keys), key)
		return r, nil
	}, nil)
}

// UseKey has every member encrypt with a key of the ring. Live members must have
// it, and so must those that were lost, unless force leaves them behind. Errors
// are those of [Cluster.AddKey], or wrap [ErrUnknownKey].
func (c *Cluster) UseKey(ctx context.Context, key KeyID, force bool) error {
	return c.change(ctx, "use", key, func(r Ring, _ *question) (Ring, error) {
		at := slices.Index(r.IDs(), key)
		if at < 0 {
			return Ring{}, fmt.Errorf("on the ring are %s: %w", listKeys(r.IDs()), ErrUnknownKey)
		}
		keys := slices.Delete(slices.Clone(r.Keys), at, at+1)
		r.Keys = slices.Insert(keys, 0, r.Keys[at])
		return r, nil
	}, func(_ edition, known []KeyID) bool { return force || slices.Contains(known, key) })
}

// RemoveKey takes a key off the ring of every member: it opens nothing from then
// on. Nobody may encrypt with it, also none of those that were lost, who must
// know another key that stays, unless force leaves them behind. Errors are those
// of [Cluster.UseKey].
func (c *Cluster) RemoveKey(ctx context.Context, key KeyID, force bool) error {
	return c.change(ctx, "remove", key, func(r Ring, asked *question) (Ring, error) {
		at := slices.Index(r.IDs(), key)
		switch {
		case at == 0:
			return Ring{}, errors.New("it encrypts: use another first")
		case at > 0:
			r.Keys = slices.Delete(slices.Clone(r.Keys), at, at+1)
			return r, nil
		}
		if c.keys.seen(asked, key) { // a moment ago: it was removed before, and now is everywhere
			return r, nil
		}
		return Ring{}, fmt.Errorf("no member has it: on the ring are %s: %w", listKeys(r.IDs()), ErrUnknownKey)
	}, func(next edition, known []KeyID) bool {
		return force || len(known) > 0 && known[0] != key && slices.ContainsFunc(known, func(k KeyID) bool { return slices.Contains(next.ids, k) })
	})
}

// change makes one step of a rotation: all members have our ring; the next one
// is made of it; those that were lost will manage with it; it is saved, used,
// and spread; all members have it.
//
// next returns the ring that it got if there is nothing to change.
func (c *Cluster) change(ctx context.Context, step string, key KeyID, next func(Ring, *question) (Ring, error), manages func(next edition, known []KeyID) bool) error {
	wrap := func(err error) error { return fmt.Errorf("%s gossip key %s: %w", step, key, err) }
	if c.keys.plain() {
		return wrap(ErrPlain)
	}
	select { // one step at a time
	case c.rotating <- struct{}{}:
		defer func() { <-c.rotating }()
	case <-ctx.Done():
		return wrap(context.Cause(ctx))
	}
	q := c.keys.ask()
	if q == nil {
		return wrap(errBusy)
	}
	defer c.keys.forget(q)
	if err := c.agree(ctx, q); err != nil {
		return c.explain(&RingError{Step: step, Key: key, Err: err}, q)
	}
	ring, base := c.keys.now()
	after, err := next(ring, q)
	if err != nil {
		return wrap(err)
	}
	if after.edition().same(base) {
		return nil
	}
	if after.Generation++; after.Generation > MaxGeneration {
		return wrap(errors.New("the ring cannot be changed any more: set cluster.keyring anew on all nodes, and restart them together"))
	}
	made := after.edition()
	if manages != nil {
		e := &RingError{Step: step, Key: key}
		for node, known := range c.calls.roster.lostRings(time.Now()) {
			if !manages(made, known) {
				e.Lost = append(e.Lost, node)
			}
		}
		if len(e.Lost) > 0 {
			slices.Sort(e.Lost)
			return e
		}
	}
	if _, err := c.keys.replace(ctx, after, &base); err != nil {
		return wrap(err)
	}
	c.log.Info("changed the ring of gossip keys", "step", step, "key", key.String(), "ring", after)
	err = c.agree(ctx, q)
	if _, now := c.keys.now(); !now.same(made) {
		return wrap(ErrOvertaken)
	}
	if err != nil {
		return c.explain(&RingError{Step: step, Key: key, Begun: true, Err: err}, q)
	}
	return nil
}

// agree waits until all members have our ring, and some seconds at most. Those
// that have an older one take ours, and we theirs if it is newer.
func (c *Cluster) agree(ctx context.Context, q *question) error {
	return c.poll(ctx, q, func(a answer) bool {
		_, own := c.keys.now()
		return a.edition.same(own)
	})
}

// poll puts the question to the members until the last answer of each is enough,
// or ctx ends, and some seconds at most.
func (c *Cluster) poll(ctx context.Context, q *question, enough func(answer) bool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.time.barrier, errNoAnswer)
	defer cancel()
	again := askMin
	for next := time.Now(); ; {
		answers := c.keys.said(q)
		var silent []netip.AddrPort
		for _, p := range c.calls.roster.pick(maxNodes) {
			if a, ok := answers[p.Life]; !ok || !enough(a) {
				silent = append(silent, p.Gossip)
			}
		}
		if len(silent) == 0 {
			return nil
		}
		if now := time.Now(); !now.Before(next) {
			c.askRing(q.nonce, silent...)
			next = now.Add(again)
			again = min(again*3/2, askMax)
		}
		t := time.NewTimer(time.Until(next))
		select {
		case <-t.C:
		case <-q.news:
			t.Stop()
		case <-ctx.Done():
			t.Stop()
			return context.Cause(ctx)
		case <-c.done:
			t.Stop()
			return ErrClosed
		}
	}
}

// explain adds the members that are in the way.
func (c *Cluster) explain(e *RingError, q *question) error {
	answers := c.keys.said(q)
	_, own := c.keys.now()
	e.Missing = map[id.Node]string{}
	for _, p := range c.calls.roster.pick(maxNodes) {
		a, ok := answers[p.Life]
		switch {
		case !ok:
			e.Missing[p.Life.Node] = "no answer: is it reachable, and has it one of the keys?"
		case a.edition.same(own):
		case a.trouble != "":
			e.Missing[p.Life.Node] = a.trouble
		case a.edition.generation == 0 && own.generation == 0:
			e.Missing[p.Life.Node] = fmt.Sprintf("its configuration has %s: make cluster.keyring the same everywhere", listKeys(a.edition.ids))
		default:
			e.Missing[p.Life.Node] = a.edition.String()
		}
	}
	return e
}
