package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/internal/page"
)

// openTimeout bounds what is done once a life: open, geometry, arenas.
const openTimeout = 30 * time.Second

// life is an engine's hold on one life of its node: a session, and the mapped
// arenas of its ranks. It is lost with its node and never comes back; whoever
// works on it then ends with [CodeNodeLost].
type life struct {
	client    *client.Client
	session   *client.Session
	memory    []io.Closer // what its arenas are reached by, in order of opening
	ranks     []rank
	hostPages int // of the node's host tier
	pages     *budget
	moved     moves

	ctx     context.Context         //nolint:containedctx // the life itself: it ends with the node's, the cause says how
	end     context.CancelCauseFunc // of ctx
	leaving chan struct{}           // closed when the node takes no new request
	leave   func()                  // closes it
	work    sync.WaitGroup
	users   sync.WaitGroup // who works on it; see [engine.take]

	mu       sync.Mutex
	released map[id.Request]chan string // of size 1: how the request's publication ended
}

// moves counts what was seen of the node's host tier.
type moves struct {
	offloading atomic.Int64 // answers that a request's tokens are on the host
	reloads    atomic.Int64 // calls that have brought some back
}

// rank is one local rank's arena.
type rank struct {
	id     id.Rank
	arena  arena
	device *device // nil: the arena is in host memory
}

// write is [arena.write].
func (r rank) write(kv pattern, from int, places []place) (int64, error) {
	if r.device != nil {
		return r.device.write(kv, from, places)
	}
	return r.arena.write(kv, from, places), nil
}

// check is [arena.check].
func (r rank) check(request id.Request, s stream, pages []page.Index, tokens int) (looked, wrong int64, first *mistake, err error) {
	if r.device != nil {
		return r.device.check(request, s, r.id, pages, tokens)
	}
	looked, wrong, first = r.arena.check(request, s, r.id, pages, tokens)
	return looked, wrong, first, nil
}

// openLife begins a session on the node at the socket and maps its arenas. The
// caller closes it. It outlives ctx.
func openLife(ctx context.Context, socket, role, library string) (_ *life, err error) {
	l := &life{leaving: make(chan struct{}), released: make(map[id.Request]chan string)}
	l.leave = sync.OnceFunc(func() { close(l.leaving) })
	l.ctx, l.end = context.WithCancelCause(context.WithoutCancel(ctx))
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("node at %s: %w", socket, err), l.close())
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	if l.client, err = client.Dial(socket); err != nil {
		return nil, err
	}
	if l.session, err = l.client.Open(ctx, client.OpenOptions{Engine: "replay", Role: role, OnEvent: l.onEvent}); err != nil {
		return nil, err
	}
	if err := l.openArenas(ctx, library); err != nil {
		return nil, err
	}
	if len(l.ranks) == 0 {
		return nil, errors.New("it has no rank")
	}
	status, err := l.client.Admin().Status(ctx, &kvferrypb.StatusRequest{})
	if err != nil {
		return nil, err
	}
	l.hostPages = int(status.GetPages().GetHostTotal())
	l.pages = newBudget(l.layout().Pages-1, 0) // but the sink
	if role == "decode" {
		l.pages.host = l.hostPages // what a reader waits for stays where it can be read
	}
	l.work.Go(l.watch)
	return l, nil
}

// openArenas opens those of all ranks: in host memory, or on devices by the
// library of CUDA, which is looked for only then.
func (l *life) openArenas(ctx context.Context, library string) error {
	var runtime *cuda.Runtime
	for _, r := range l.session.Ranks() {
		a, err := l.session.AnyArena(ctx, r, runtime)
		if runtime == nil && errors.Is(err, client.ErrDeviceMemory) {
			if runtime, err = cuda.Open(cuda.Options{Library: library}); err != nil {
				return fmt.Errorf("rank %d is in device memory: %w", r, err)
			}
			l.memory = append(l.memory, runtime)
			a, err = l.session.AnyArena(ctx, r, runtime)
		}
		if err != nil {
			return err
		}
		l.memory = append(l.memory, a)
		rank, err := newRank(r, a, l.layout())
		if err != nil {
			return fmt.Errorf("rank %d: %w", r, err)
		}
		if rank.device != nil {
			l.memory = append(l.memory, rank.device)
		}
		l.ranks = append(l.ranks, rank)
	}
	return nil
}

func newRank(r id.Rank, a memory.Arena, l page.Layout) (rank, error) {
	switch a := a.(type) {
	case *memory.Region:
		host, err := newArena(a.Bytes(), l)
		return rank{id: r, arena: host}, err
	case memory.Stager:
		d, err := newDevice(a, l)
		return rank{id: r, arena: arena{layout: l}, device: d}, err
	default:
		return rank{}, fmt.Errorf("an arena of kind %T", a)
	}
}

func (l *life) name() id.Life       { return l.session.Life() }
func (l *life) node() id.Node       { return l.session.Life().Node }
func (l *life) layout() page.Layout { return l.session.Geometry().Layout }

// watch waits for the end of the session.
func (l *life) watch() {
	select {
	case <-l.session.Lost():
		l.lose(errors.New("its session has ended"))
	case <-l.ctx.Done():
	}
}

// lose ends whatever works on the life.
func (l *life) lose(why error) {
	l.end(&failure{CodeNodeLost, fmt.Errorf("node %s was lost: %w", l.name(), why)})
}

// lost reports whether the life is over.
func (l *life) lost() bool { return l.ctx.Err() != nil }

// over reports whether no new request may be given to the life.
func (l *life) over() bool {
	select {
	case <-l.leaving:
		return true
	default:
		return l.lost()
	}
}

// within is ctx, which also ends when the life is lost.
func (l *life) within(ctx context.Context) (context.Context, context.CancelFunc) {
	return with(ctx, l.ctx)
}

// judge draws the conclusion from a call that failed: a node that is not there
// is lost, one that drains gets no new request.
func (l *life) judge(err error) {
	switch codeOf(err) {
	case CodeNodeLost, kvferrypb.Failure_NO_SESSION.String():
		l.lose(err)
	case kvferrypb.Failure_DRAINING.String():
		l.leave()
	}
}

// close ends the session, then gives memory and connection back. Nobody works
// on the life any more. It may be called of a life that was not opened whole.
func (l *life) close() error {
	l.end(errClosed)
	l.work.Wait()
	var errs []error
	if l.session != nil {
		errs = append(errs, l.session.Close())
	}
	for _, m := range slices.Backward(l.memory) {
		errs = append(errs, m.Close())
	}
	if l.client != nil {
		errs = append(errs, l.client.Close())
	}
	return errors.Join(errs...)
}

var errClosed = errors.New("engine is closed")

// expectRelease returns where the end of a request's publication will be
// told. It is asked for before anything is published.
func (l *life) expectRelease(r id.Request) <-chan string {
	l.mu.Lock()
	defer l.mu.Unlock()
	told := make(chan string, 1)
	l.released[r] = told
	return told
}

func (l *life) forgetRelease(r id.Request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.released, r)
}

func (l *life) onEvent(event *kvferrypb.Event) {
	if event.GetKind() != kvferrypb.Event_RELEASED {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if told, ok := l.released[id.Request(event.GetRequest())]; ok {
		select {
		case told <- event.GetOutcome():
		default: // a second end of one publication: the first one counts
		}
	}
}

// with is ctx, which also ends with other, and then for its cause.
func with(ctx, other context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(other, func() { cancel(context.Cause(other)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}
