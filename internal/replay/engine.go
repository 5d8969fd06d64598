package replay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// Waits between two looks for the next life of a node.
const (
	firstReopen = 10 * time.Millisecond
	lastReopen  = 500 * time.Millisecond
)

// engine is the simulated engine of the node at one socket, in all of that
// node's lives, of which it has one at a time: a life that is over is closed,
// and its arenas are unmapped, once nobody works on it any more, and only then
// is the next one opened. So nothing can be written into another life's arena,
// and the memory of a dead one is there for the next.
type engine struct {
	socket, role string
	library      string // of CUDA

	mu     sync.Mutex
	life   *life          // nil: no request can be given to it
	newest id.Incarnation // of the node, that was seen here
	down   error          // why there is no life
	report NodeReport
}

// kind is what the nodes of a run must have in common.
type kind struct {
	node     id.Node // the first one
	geometry page.Geometry
	ranks    []id.Rank
}

func (l *life) kind() kind { return kind{l.node(), l.session.Geometry(), l.session.Ranks()} }

// differs says why two nodes cannot exchange KV.
func (k kind) differs(other kind) error {
	if d := k.geometry.Differences(other.geometry); len(d) > 0 {
		return fmt.Errorf("nodes %s and %s cannot exchange KV: %s is %q and %q", k.node, other.node, d[0].Field, d[0].Ours, d[0].Theirs)
	}
	if len(k.ranks) != len(other.ranks) {
		return fmt.Errorf("nodes %s and %s cannot exchange KV: they have %d and %d local ranks", k.node, other.node, len(k.ranks), len(other.ranks))
	}
	for i := range k.ranks {
		if k.ranks[i] != other.ranks[i] {
			return fmt.Errorf("nodes %s and %s cannot exchange KV: they have ranks %d and %d", k.node, other.node, k.ranks[i], other.ranks[i])
		}
	}
	return nil
}

// openEngines opens all of them and makes sure that they can work together.
func openEngines(ctx context.Context, o Options) (engines []*engine, k kind, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, closeEngines(engines))
		}
	}()
	for i, socket := range slices.Concat(o.Prefill, o.Decode) {
		e := &engine{socket: socket, role: "prefill", library: o.CUDALibrary}
		if i >= len(o.Prefill) {
			e.role = "decode"
		}
		l, err := openLife(ctx, socket, e.role, e.library)
		if err != nil {
			return engines, k, err
		}
		e.report = NodeReport{Node: string(l.node()), Role: e.role, Left: []string{}}
		engines = append(engines, e)
		if i == 0 {
			k = l.kind()
		}
		if err := e.begin(l, k); err != nil {
			return engines, k, errors.Join(err, l.close())
		}
	}
	return engines, k, nil
}

// closeEngines closes those that nobody keeps.
func closeEngines(engines []*engine) error {
	var errs []error
	for _, e := range slices.Backward(engines) {
		if l := e.withdraw(nil); l != nil {
			errs = append(errs, l.close())
		}
	}
	return errors.Join(errs...)
}

func (e *engine) note(f func(*NodeReport)) { e.mu.Lock(); defer e.mu.Unlock(); f(&e.report) }

// begin makes a life the engine's. It must be of the same node as those
// before, not older than they, and fit the other nodes.
func (e *engine) begin(l *life, k kind) error {
	if err := k.differs(l.kind()); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	switch name := l.name(); {
	case string(name.Node) != e.report.Node:
		return fmt.Errorf("node at %s is %s now, it was %s", e.socket, name.Node, e.report.Node)
	case name.Incarnation < e.newest:
		return fmt.Errorf("node %s has incarnation %d after %d, it must grow", name.Node, name.Incarnation, e.newest)
	case name.Incarnation > e.newest:
		e.newest = name.Incarnation
		e.report.Lives++
	}
	e.life, e.down = l, nil
	return nil
}

// withdraw ends that requests are given to the engine's life, and returns it.
func (e *engine) withdraw(why error) *life {
	e.mu.Lock()
	defer e.mu.Unlock()
	l := e.life
	e.life, e.down = nil, why
	return l
}

// take lets the caller work on the engine's life until giveBack; nil if it has
// none that takes requests.
func (e *engine) take() *life {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.life == nil || e.life.over() {
		return nil
	}
	e.life.users.Add(1)
	return e.life
}

func (l *life) giveBack() { l.users.Done() }

// state is why the engine has no life.
func (e *engine) state() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return cmp.Or(e.down, errDown)
}

var errDown = errors.New("its node has just gone")

// keep holds on to the node, from one life to the next, until ctx ends; then
// nobody works on it any more.
func (e *engine) keep(ctx context.Context, r *run) {
	e.mu.Lock()
	l := e.life
	e.mu.Unlock()
	for l != nil {
		e.serve(ctx, r, l)
		l = e.reopen(ctx, r)
	}
}

// serve lets a life be used until it is over, and closes it.
func (e *engine) serve(ctx context.Context, r *run, l *life) {
	why := errClosed
	select {
	case <-l.ctx.Done():
		why = context.Cause(l.ctx)
	case <-l.leaving:
		why = fmt.Errorf("node %s drains", l.name())
	case <-ctx.Done():
	}
	e.withdraw(why)
	if l.over() {
		e.note(func(n *NodeReport) { n.Losses++ })
		r.log.Warn("node takes no requests", "node", l.name().String(), "err", why)
	}
	r.admission.wake()
	l.users.Wait()
	e.note(func(n *NodeReport) {
		n.Offloading += l.moved.offloading.Load()
		n.Reloads += l.moved.reloads.Load()
	})
	if err := l.close(); err != nil {
		r.log.Warn("session was not closed", "node", l.name().String(), "err", err)
	}
}

// reopen opens the next life of the node as soon as there is one; nil if ctx
// ended first. A node that has become another one ends the run.
func (e *engine) reopen(ctx context.Context, r *run) *life {
	for wait := firstReopen; ctx.Err() == nil; wait = min(2*wait, lastReopen) {
		l, err := openLife(ctx, e.socket, e.role, e.library)
		if err == nil {
			if err = e.begin(l, r.kind); err != nil {
				r.stop(errors.Join(err, l.close()))
				return nil
			}
			r.log.Info("node takes requests again", "node", l.name().String())
			r.admission.wake()
			return l
		}
		e.withdraw(err)
		_ = pause(ctx, wait/2+rand.N(wait/2)) // its end shows above
	}
	return nil
}
