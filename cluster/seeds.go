package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/memberlist"
)

const (
	maxSeeds = 64
	maxCalls = 64 // of JoinSeeds at once
)

var errSelf = errors.New("that is this node itself")

// all are the seeds.
func (j *joining) all() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.list)
}

// add adds seeds that are new.
func (j *joining) add(seeds []string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	list := slices.Clone(j.list)
	for _, seed := range seeds {
		if !slices.Contains(list, seed) {
			list = append(list, seed)
		}
	}
	if len(list) > maxSeeds && len(list) > len(j.list) {
		return fmt.Errorf("%d seeds are known already, want at most %d in all", len(j.list), maxSeeds)
	}
	j.seeds += len(list) - len(j.list)
	j.list = list
	return nil
}

// calling is one JoinSeeds. The mutex of joining guards it.
type calling struct {
	nonce  uint64        // in what is asked, and comes back
	listed chan struct{} // closed when somebody answers that it lists us
	done   bool          // it is
	last   error         // why the last calls failed
}

func (j *joining) begin() (*calling, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.callings) >= maxCalls {
		return nil, errBusy
	}
	c := &calling{nonce: rand.Uint64(), listed: make(chan struct{})}
	j.callings[c.nonce] = c
	return c, nil
}

// end says why the last calls failed.
func (j *joining) end(c *calling) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.callings, c.nonce)
	return c.last
}

func (j *joining) failed(c *calling, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	c.last = err
}

// heard notes an answer; false: it is to no JoinSeeds.
func (j *joining) heard(nonce uint64, listed bool) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	c := j.callings[nonce]
	if c != nil && listed && !c.done {
		c.done = true
		close(c.listed)
	}
	return c != nil
}

// JoinSeeds adds seeds, host:port each, and calls them at once, again and again,
// until who answers at one of them lists us, or ctx ends; the error then says
// what went wrong last. They stay, to be called whenever they are missing.
func (c *Cluster) JoinSeeds(ctx context.Context, seeds []string) error {
	if err := c.joinSeeds(ctx, seeds); err != nil {
		return fmt.Errorf("join %s: %w", strings.Join(seeds, ", "), err)
	}
	return nil
}

func (c *Cluster) joinSeeds(ctx context.Context, seeds []string) error {
	if len(seeds) == 0 {
		return errors.New("there are no seeds")
	}
	for _, seed := range seeds {
		if _, _, err := splitSeed(seed); err != nil {
			return err
		}
	}
	if err := checkSeeds(ctx, seeds, c.bound, c.advertise); err != nil {
		return err
	}
	if addrs, err := c.addresses(ctx, seeds); err == nil && len(addrs) == 0 {
		return errSelf
	}
	calls, stop := context.WithCancel(ctx)
	defer stop()
	k, err := c.joining.begin()
	if err != nil {
		return err
	}
	if err := c.startCalls(calls, seeds, k); err != nil {
		return errors.Join(err, c.joining.end(k))
	}
	select {
	case <-k.listed:
		err = nil
	case <-c.Fenced():
		err = ErrFenced
	case <-c.done:
		err = ErrClosed
	case <-ctx.Done():
		err = fmt.Errorf("none of them lists us: %w", context.Cause(ctx))
	}
	last := c.suspect(c.joining.end(k))
	if err != nil && last != nil {
		err = fmt.Errorf("%w; last: %w", err, last)
	}
	return err
}

func (c *Cluster) startCalls(ctx context.Context, seeds []string, k *calling) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.left {
		return ErrClosed
	}
	if err := c.joining.add(seeds); err != nil {
		return err
	}
	c.work.Go(func() { c.callSeeds(ctx, seeds, k) })
	return nil
}

// callSeeds calls seeds and asks them whether they list us, until ctx ends.
func (c *Cluster) callSeeds(ctx context.Context, seeds []string, k *calling) {
	question := encodeCall(kindAsk, k.nonce, c.life, c.advertise)
	backoff, ask := 4*askMin, askMin
	var addrs []netip.AddrPort
	for call := time.Now(); ctx.Err() == nil && !c.over(); {
		if now := time.Now(); !now.Before(call) {
			var err error
			addrs, err = c.addresses(ctx, seeds)
			c.learn(ctx, addrs)
			c.joining.failed(k, lined(errors.Join(err, c.dial(ctx, addrs))))
			call = time.Now().Add(between(backoff/2, backoff))
			backoff = min(2*backoff, c.time.joinMax)
		}
		for _, a := range addrs {
			if err := c.list.SendToAddress(memberlist.Address{Addr: a.String()}, question); err != nil {
				c.log.Debug("ask seed", "address", a, "err", err)
			}
		}
		t := time.NewTimer(min(between(ask/2, ask), time.Until(call)))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
		case <-c.done:
			t.Stop()
		}
		ask = min(ask*3/2, askMax)
	}
}

// addresses are where seeds are, without ourselves.
func (c *Cluster) addresses(ctx context.Context, seeds []string) (all []netip.AddrPort, err error) {
	for _, seed := range seeds {
		addrs, e := resolve(ctx, seed)
		err = errors.Join(err, e)
		for _, a := range addrs {
			if !c.isSelf(a) && !slices.Contains(all, a) && len(all) < maxSeeds {
				all = append(all, a)
			}
		}
	}
	return all, err
}
