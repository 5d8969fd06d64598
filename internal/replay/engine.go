package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// openTimeout bounds what is done once a node: open, geometry, arenas.
const openTimeout = 30 * time.Second

// engine is the simulated engine of one node: a session and the mapped arenas
// of its ranks.
type engine struct {
	index   int // in admission
	role    string
	client  *client.Client
	session *client.Session
	regions []io.Closer // mapped arenas
	ranks   []rank

	mu       sync.Mutex
	released map[id.Request]chan string // of size 1: how the request's publication ended
	report   NodeReport
}

// rank is one local rank's arena.
type rank struct {
	id    id.Rank
	arena arena
}

// openEngine begins a session on the node at the socket and maps its arenas.
func openEngine(ctx context.Context, socket, role string, index int) (*engine, error) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	c, err := client.Dial(socket)
	if err != nil {
		return nil, err
	}
	e := &engine{index: index, role: role, client: c, released: make(map[id.Request]chan string)}
	e.session, err = c.Open(ctx, client.OpenOptions{Engine: "replay", Role: role, OnEvent: e.onEvent})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("node at %s: %w", socket, err), e.close())
	}
	for _, r := range e.session.Ranks() {
		region, err := e.session.Arena(ctx, r)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("node at %s: %w", socket, err), e.close())
		}
		e.regions = append(e.regions, region)
		a, err := newArena(region.Bytes(), e.session.Geometry().Layout)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("node at %s: rank %d: %w", socket, r, err), e.close())
		}
		e.ranks = append(e.ranks, rank{r, a})
	}
	if len(e.ranks) == 0 {
		return nil, errors.Join(fmt.Errorf("node at %s has no rank", socket), e.close())
	}
	e.report = NodeReport{Node: string(e.node()), Role: role}
	return e, nil
}

func (e *engine) node() id.Node            { return e.session.Life().Node }
func (e *engine) layout() page.Layout      { return e.session.Geometry().Layout }
func (e *engine) note(f func(*NodeReport)) { e.mu.Lock(); defer e.mu.Unlock(); f(&e.report) }

// close ends the session, then gives memory and connection back.
func (e *engine) close() error {
	var errs []error
	if e.session != nil {
		errs = append(errs, e.session.Close())
	}
	for _, r := range e.regions {
		errs = append(errs, r.Close())
	}
	errs = append(errs, e.client.Close())
	return errors.Join(errs...)
}

// expectRelease returns where the end of a request's publication will be
// told. It is asked for before anything is published.
func (e *engine) expectRelease(r id.Request) <-chan string {
	e.mu.Lock()
	defer e.mu.Unlock()
	told := make(chan string, 1)
	e.released[r] = told
	return told
}

func (e *engine) forgetRelease(r id.Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.released, r)
}

func (e *engine) onEvent(event *kvferrypb.Event) {
	if event.GetKind() != kvferrypb.Event_RELEASED {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if told, ok := e.released[id.Request(event.GetRequest())]; ok {
		select {
		case told <- event.GetOutcome():
		default: // a second end of one publication: the first one counts
		}
	}
}

// openEngines opens all of them and makes sure that they can work together.
func openEngines(ctx context.Context, prefill, decode []string) (engines []*engine, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, closeEngines(engines))
			engines = nil
		}
	}()
	for i, socket := range append(append([]string(nil), prefill...), decode...) {
		role := "prefill"
		if i >= len(prefill) {
			role = "decode"
		}
		e, err := openEngine(ctx, socket, role, i)
		if err != nil {
			return engines, err
		}
		engines = append(engines, e)
		first := engines[0]
		if d := first.session.Geometry().Differences(e.session.Geometry()); len(d) > 0 {
			return engines, fmt.Errorf("nodes %s and %s cannot exchange KV: %s is %q and %q", first.node(), e.node(), d[0].Field, d[0].Ours, d[0].Theirs)
		}
		if len(e.ranks) != len(first.ranks) {
			return engines, fmt.Errorf("nodes %s and %s cannot exchange KV: they have %d and %d local ranks", first.node(), e.node(), len(first.ranks), len(e.ranks))
		}
		for j := range e.ranks {
			if e.ranks[j].id != first.ranks[j].id {
				return engines, fmt.Errorf("nodes %s and %s cannot exchange KV: they have ranks %d and %d", first.node(), e.node(), first.ranks[j].id, e.ranks[j].id)
			}
		}
	}
	return engines, nil
}

func closeEngines(engines []*engine) error {
	var errs []error
	for _, e := range slices.Backward(engines) {
		errs = append(errs, e.close())
	}
	return errors.Join(errs...)
}
