package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
)

// bounds are those that both sides of a connection keep.
type bounds struct {
	bytes    int64
	copies   int
	seals    int
	inFlight int
}

// exchange is one read's work on one connection: requests go out, up to
// inFlight ahead, and answers are received straight into the arenas.
type exchange struct {
	owner  id.Incarnation
	bounds bounds
	seals  []transfer.Seal
	copies []transfer.Copy
	first  uint64 // id of the first request; the others follow

	landed   int64 // bytes, also when it fails
	answered bool  // a whole header came
	requests uint64
}

func (x *exchange) cutter() transfer.Cutter {
	return transfer.Cut(x.copies, x.bounds.bytes, x.bounds.copies)
}

// run sends and receives. It returns when neither can touch the wire any more.
// After an error the wire is of no use, unless whole is true.
//
// Sending has a goroutine of its own as soon as there are several requests: an
// owner that writes an answer reads no requests meanwhile, and two that only
// write wait for each other.
func (x *exchange) run(ctx context.Context, w *wire, scratch *scratch, arenas map[id.Rank]*memory.Region) (whole bool, err error) {
	cut := x.cutter()
	copies, more := cut.Next(scratch.asked[:0])
	scratch.asked = copies
	if !more {
		if err := x.ask(w, scratch, 0); err != nil {
			return false, err
		}
		return x.receive(&w.in, scratch, arenas, nil)
	}
	ctx, cancel := context.WithCancel(ctx)
	tickets := make(chan struct{}, x.bounds.inFlight) // one a request under way
	sent := make(chan error, 1)
	go func() { sent <- x.send(ctx, w, scratch, tickets) }()
	whole, err = x.receive(&w.in, scratch, arenas, tickets)
	cancel()
	if err != nil {
		w.abort() // a sender that is blocked in a write
		whole = false
	}
	// If sending failed first, it closed the wire under the receiver.
	if sendErr := <-sent; sendErr != nil && (err == nil || errors.Is(err, net.ErrClosed)) {
		return false, sendErr
	}
	return whole, err
}

// send writes every request, each with a ticket of the receiver.
func (x *exchange) send(ctx context.Context, w *wire, s *scratch, tickets chan<- struct{}) error {
	cut := x.cutter()
	for i, more := uint64(0), true; more; i++ {
		select {
		case tickets <- struct{}{}:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		s.asked, more = cut.Next(s.asked[:0])
		if err := x.ask(w, s, i); err != nil {
			w.abort() // the receiver waits for an answer that nobody was asked for
			return err
		}
	}
	return nil
}

func (x *exchange) ask(w *wire, s *scratch, i uint64) error {
	s.out = appendRequest(s.out[:0], x.owner, request{id: x.first + i, seals: x.seals, copies: s.asked})
	if err := w.out.one(s.out); err != nil {
		return fmt.Errorf("send a request: %w", err)
	}
	return nil
}

// scratch is what one connection needs again and again: the sender's asked and
// out, the receiver's the rest.
type scratch struct {
	asked  []transfer.Copy
	out    []byte
	expect []transfer.Copy
	head   [headerBytes]byte
	tail   [headerBytes]byte
}

// receive receives the answer to every request, in order. The header of an
// answer is read together with the end of the one before it: between two
// frames there is nothing else, so no byte can go astray, and an answer costs
// one read. whole reports whether the wire is between two answers and none is
// outstanding.
func (x *exchange) receive(in *half, s *scratch, arenas map[id.Rank]*memory.Region, tickets <-chan struct{}) (whole bool, err error) {
	// With one request in flight, the next is sent only after this one's end.
	ahead := x.bounds.inFlight > 1
	cut := x.cutter()
	have := false // s.head is already the header of this answer
	for i, more := uint64(0), true; more; i++ {
		s.expect, more = cut.Next(s.expect[:0])
		x.requests++
		if !have {
			if err := in.one(s.head[:]); err != nil {
				return false, fmt.Errorf("receive an answer: %w", err)
			}
			x.answered = true
		}
		h, err := x.frame(s.head[:], i)
		if err != nil {
			return false, err
		}
		total := transfer.Bytes(s.expect)
		switch {
		case h.kind == kindVerdict && h.length == 0:
			if verdict(h.aux) == verdictHeld {
				return false, fmt.Errorf("verdict without the bytes: %w", errGarbage)
			}
			return !more && verdict(h.aux).keeps(), verdict(h.aux).err()
		case h.kind == kindData && int64(h.length) == total && h.aux == 0:
		default:
			return false, fmt.Errorf("%v of %d bytes, want data of %d: %w", h.kind, h.length, total, errGarbage)
		}

		in.v.reset()
		for _, c := range s.expect {
			in.v.add(arenas[c.Rank].Bytes()[c.Local : c.Local+c.Bytes])
		}
		in.v.add(s.tail[:])
		if have = more && ahead; have {
			in.v.add(s.head[:])
		}
		err = in.all()
		x.landed += min(in.v.moved, total)
		if err != nil {
			return false, fmt.Errorf("receive an answer: %w", err)
		}
		if h, err = x.frame(s.tail[:], i); err != nil {
			return false, err
		}
		if h.kind != kindVerdict || h.length != 0 {
			return false, fmt.Errorf("%v of %d bytes after the data, want a verdict: %w", h.kind, h.length, errGarbage)
		}
		if err := verdict(h.aux).err(); err != nil {
			return !more && verdict(h.aux).keeps(), err
		}
		if tickets == nil {
			continue
		}
		select {
		case <-tickets:
		default:
			return false, fmt.Errorf("answer to a request that was not sent: %w", errGarbage)
		}
	}
	return true, nil
}

// frame parses a header that must belong to the i-th request.
func (x *exchange) frame(b []byte, i uint64) (header, error) {
	h, err := parseHeader(b)
	if err != nil {
		return header{}, err
	}
	if h.owner != x.owner {
		return header{}, fmt.Errorf("a frame of incarnation %d, want %d: %w", h.owner, x.owner, transfer.ErrIdentity)
	}
	if h.request != x.first+i {
		return header{}, fmt.Errorf("answer to request %d, want %d: %w", h.request, x.first+i, errGarbage)
	}
	return h, nil
}
