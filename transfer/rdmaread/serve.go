package rdmaread

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer"
)

// served is a queue pair that a peer reads us by.
type served struct {
	reader id.Life
	port   *port
	ring   *ring         // nil: nothing of the port's device is staged
	broken chan struct{} // closed when its device has failed

	gone bool // broken is closed; guarded by the mutex of the transport
}

// refused is a hello that is not taken.
type refused struct {
	why refusal
	err error
}

func (r *refused) Error() string { return r.err.Error() }
func (r *refused) Unwrap() error { return r.err }

func refuse(why refusal, format string, args ...any) error {
	return &refused{why: why, err: fmt.Errorf(format, args...)}
}

// Serve answers a hello of reader, which the caller has proved to be that life,
// and then the questions of the [Call], in order: answer, which sends what it is
// given, is called once for each of them, by one goroutine at a time. It is not
// called for a hello if ctx has ended before. That to a question may wait for a
// reader who takes none, as long as Serve has not returned, which does not wait for
// it; Close does.
//
// Serve returns when ctx has ended, which is to be when the Call has, when the
// transport closes, when a question is none, or at once if the hello is refused, of
// which the reader is told why. The queue pair has been destroyed then: nothing is
// read by it any more. It returns nil if only ctx has ended it.
func (t *Transport) Serve(ctx context.Context, reader id.Life, hello []byte, asked <-chan []byte, answer func([]byte) error) error {
	if err := t.serve(ctx, reader, hello, asked, answer); err != nil {
		return fmt.Errorf("serve RDMA reads of %s: %w", reader, err)
	}
	return nil
}

func (t *Transport) serve(ctx context.Context, reader id.Life, b []byte, asked <-chan []byte, answer func([]byte) error) error {
	h, err := parseHello(b)
	if err != nil {
		t.stats.garbage.Add(1)
		return err // there is no generation to refuse
	}
	s := &served{reader: reader, broken: make(chan struct{})}
	qp, a, err := t.admit(ctx, s, h)
	if no, ok := errors.AsType[*refused](err); ok {
		switch no.why {
		case refusedLife, refusedStranger:
			t.stats.strangers.Add(1)
		default:
			t.stats.refused.Add(1)
			if t.speaks() {
				t.o.Logger.Warn("an RDMA queue pair was refused", "reader", reader.String(), "err", err)
			}
		}
		return errors.Join(err, answer(encodeRefusal(h.generation, no.why)))
	}
	if err != nil {
		return err
	}
	defer t.dismiss(s, qp)
	if err := answer(a.encode()); err != nil {
		return err
	}
	t.stats.served.Add(1)
	return t.stand(ctx, s, asked, answer)
}

// speaks reports whether to log what a reader is told no more of than its kind:
// once in ten seconds, whoever asks.
func (t *Transport) speaks() bool {
	now := time.Now().UnixNano()
	last := t.told.Load()
	return now-last >= int64(10*time.Second) && t.told.CompareAndSwap(last, now)
}

// admit waits for its turn, checks a hello, and makes its queue pair. Without an
// error dismiss must follow.
func (t *Transport) admit(ctx context.Context, s *served, h hello) (*rdma.QP, *answer, error) {
	switch {
	case h.owner != t.o.Local.Life:
		return nil, nil, refuse(refusedLife, "the hello is meant for %s, this is %s: %w", h.owner, t.o.Local.Life, transfer.ErrIdentity)
	case h.reader != s.reader:
		return nil, nil, refuse(refusedStranger, "the hello says that it comes from %s: %w", h.reader, transfer.ErrIdentity)
	case int(h.port) >= len(t.ports):
		return nil, nil, refuse(refusedPort, "the hello asks for port %d of %d", h.port, len(t.ports))
	}
	s.port = t.ports[h.port]
	if err := t.enter(s); err != nil {
		return nil, nil, err
	}
	qp, a, err := t.queuePair(ctx, s, h)
	if err != nil {
		t.dismiss(s, qp) // out of its turn, which others wait for
		return nil, nil, err
	}
	return qp, a, nil
}

// enter counts a lane of a peer, if there may be one more.
func (t *Transport) enter(s *served) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
		return refuse(refusedClosed, "transport: %w", transfer.ErrClosed)
	case len(t.accepted) >= maxAccepted:
		return refuse(refusedFull, "%d queue pairs of peers are there, and no more may be", maxAccepted)
	case t.readers[s.reader] >= maxLanesOfReader:
		return refuse(refusedReader, "this reader has %d queue pairs here already", maxLanesOfReader)
	}
	t.accepted[s] = struct{}{}
	t.readers[s.reader]++
	t.serving.Add(1)
	return nil
}

func (t *Transport) leave(s *served) {
	t.mu.Lock()
	delete(t.accepted, s)
	if t.readers[s.reader]--; t.readers[s.reader] == 0 {
		delete(t.readers, s.reader)
	}
	t.mu.Unlock()
	t.serving.Done()
}

// dismiss destroys a queue pair, if there is one, then gives back what it was read
// by, and forgets it.
func (t *Transport) dismiss(s *served, qp *rdma.QP) {
	if qp != nil {
		t.destroy(qp, s.reader)
	}
	if s.ring != nil {
		s.ring.drop()
	}
	t.leave(s)
}

// queuePair makes the owner's end: ready to be read before its reader hears of it.
// With an error there may be a queue pair, to be destroyed.
func (t *Transport) queuePair(ctx context.Context, s *served, h hello) (*rdma.QP, *answer, error) {
	select { // not all at once: what is read already would suffer
	case t.admitting <- struct{}{}:
		defer func() { <-t.admitting }()
	case <-ctx.Done():
		return nil, nil, transfer.Reason(ctx)
	case <-t.ending:
		return nil, nil, refuse(refusedClosed, "transport: %w", transfer.ErrClosed)
	}
	info, gids, err := s.port.works()
	if err != nil {
		return nil, nil, refuse(refusedPort, "%w", err)
	}
	gid, err := rdma.ChooseGID(gids, info.Link, h.end.gid)
	if err != nil {
		return nil, nil, refuse(refusedPort, "%w", err)
	}
	offered := s.port.d.offered
	if s.port.d.staged {
		if s.ring, err = s.port.d.newRing(s.reader); err != nil {
			return nil, nil, err
		}
		s.ring.offer(&offered)
	}
	// It posts nothing: the smallest there is will do.
	qp, err := s.port.d.pd.NewQP(rdma.QPOptions{Depth: 1})
	if err != nil {
		return nil, nil, refuse(refusedVerb, "make a queue pair: %w", err)
	}
	reads := max(1, min(int(h.end.reads), s.port.d.dev.Limits().MaxReadsServed, maxReads))
	ours := s.port.self(info, gid.Addr, qp, reads)
	ours.mtu = min(ours.mtu, h.end.mtu)
	to, err := s.port.route(gid, ours, h.end)
	if err != nil {
		return qp, nil, refuse(refusedPath, "%w", err)
	}
	to.Access, to.ReadsServed = rdma.RemoteRead, uint8(reads)
	if err := qp.Connect(to); err != nil {
		return qp, nil, refuse(refusedVerb, "connect a queue pair: %w", err)
	}
	return qp, &answer{generation: h.generation, owner: t.o.Local.Life, end: ours, regions: offered}, nil
}

// dropServed ends what peers have on a port. That a single queue pair of theirs
// has failed ends nothing: its reader finds out by what it reads, and hangs up.
func (t *Transport) dropServed(p *port) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for s := range t.accepted {
		if s.port == p && !s.gone {
			s.gone = true
			close(s.broken)
		}
	}
}
