package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

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

// todo is what nobody has asked for yet, of a read that several lanes share. A
// lane takes a piece whenever it may have one more request under way, so that a
// slow one takes fewer. It is safe for concurrent use.
type todo struct {
	lanes int

	mu   sync.Mutex
	cut  transfer.Cutter
	more bool
}

// newTodo cuts copies of so many bytes into at least two pieces a lane, if there
// are several.
func newTodo(copies []transfer.Copy, total int64, lanes int) *todo {
	piece := int64(frameBytes)
	if lanes > 1 {
		piece = min(piece, total/int64(2*lanes)+1)
	}
	return &todo{lanes: lanes, cut: transfer.Cut(copies, piece, frameCopies), more: true}
}

// ahead is how many of the requests that a connection may have under way one
// lane is to have: the lanes of a read share them, else the first would take
// all.
func (t *todo) ahead(inFlight int) int { return min(inFlight, max(2, inFlight/t.lanes)) }

// next appends the next piece to dst, and reports false if there is none left. A
// read without copies is one piece without any.
func (t *todo) next(dst []transfer.Copy) (piece []transfer.Copy, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.more {
		return dst, false
	}
	piece, t.more = t.cut.Next(dst)
	return piece, true
}

// left reports whether next has one more.
func (t *todo) left() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.more
}

// exchange is what one lane does for a read: requests go out, up to inFlight
// ahead, and answers are received straight into the arenas, or landed.
type exchange struct {
	owner   id.Incarnation
	bounds  bounds
	seals   []transfer.Seal
	todo    *todo
	first   uint64   // id of the first request; the others follow
	landing *landing // nil: arenas are host memory

	asked    uint64 // requests
	landed   int64  // bytes, also when it fails
	answered bool   // a whole header came
}

// scratch is what one connection needs again and again.
type scratch struct {
	piece []transfer.Copy      // the sender's, of todo
	cut   transfer.Cutter      // of piece, by the bounds of this connection
	more  bool                 // cut has more
	out   []byte               // the sender's
	head  [headerBytes]byte    // the receiver's: of an answer
	tail  [headerBytes]byte    // its verdict
	have  bool                 // head is of the next answer already
	spare chan []transfer.Copy // a list for each request that may be under way and is not

	landing *landing // nil until an answer is landed
}

// grow makes the lists for n requests under way.
func (s *scratch) grow(n int) {
	s.spare = make(chan []transfer.Copy, n)
	for range n {
		s.spare <- nil
	}
}

// run sends and receives until nothing is left to do. It returns when neither
// can touch the wire any more. After an error the wire is of no use, unless
// whole is true.
//
// Sending has a goroutine of its own as soon as there are several requests: an
// owner that writes an answer reads no requests meanwhile, and two that only
// write wait for each other.
func (x *exchange) run(ctx context.Context, w *wire, s *scratch, arenas map[id.Rank]memory.Arena) (whole bool, err error) {
	s.more, s.have = false, false
	copies, ok := x.next(s, <-s.spare)
	if !ok {
		s.spare <- copies
		return true, nil // other lanes were faster
	}
	if !s.more && !x.todo.left() {
		defer func() { s.spare <- copies }()
		if err := x.ask(w, s, copies); err != nil {
			return false, err
		}
		return x.receive(&w.in, s, 0, copies, false, arenas)
	}

	ctx, cancel := context.WithCancel(ctx)
	// What was asked for. The receiver has one, or two; the sender waits with another.
	under := make(chan []transfer.Copy, max(0, x.todo.ahead(x.bounds.inFlight)-2))
	sent := make(chan error, 1)
	go func() { sent <- x.send(ctx, w, s, copies, under) }()
	copies, more := <-under
	for i := uint64(0); more; i++ {
		// What was sent already will be answered: the header of that answer is
		// received with the end of this one.
		var next []transfer.Copy
		ahead := false
		select {
		case next, ahead = <-under:
		default:
		}
		if _, err = x.receive(&w.in, s, i, copies, ahead, arenas); err != nil {
			break
		}
		s.spare <- copies
		if copies, more = next, ahead; !more {
			copies, more = <-under
		}
	}
	cancel()
	if err != nil {
		w.abort() // a sender that is blocked in a write
	}
	// If sending failed first, it closed the wire under the receiver.
	if sendErr := <-sent; sendErr != nil && (err == nil || errors.Is(err, net.ErrClosed)) {
		return false, sendErr
	}
	return err == nil, err
}

// next fills copies with the next request, and reports false if nothing is left.
func (x *exchange) next(s *scratch, copies []transfer.Copy) (_ []transfer.Copy, ok bool) {
	if !s.more {
		if s.piece, ok = x.todo.next(s.piece[:0]); !ok {
			return copies, false
		}
		s.cut = transfer.Cut(s.piece, x.bounds.bytes, x.bounds.copies)
	}
	copies, s.more = s.cut.Next(copies[:0])
	return copies, true
}

// send asks for copies and then for all that is left, as long as there are spare
// lists; it closes under at the end.
func (x *exchange) send(ctx context.Context, w *wire, s *scratch, copies []transfer.Copy, under chan<- []transfer.Copy) error {
	defer close(under)
	for {
		if err := x.ask(w, s, copies); err != nil {
			w.abort() // the receiver may wait for an answer that nobody will give
			return err
		}
		select {
		case under <- copies:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		select {
		case copies = <-s.spare:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		var ok bool
		if copies, ok = x.next(s, copies); !ok {
			s.spare <- copies
			return nil
		}
	}
}

func (x *exchange) ask(w *wire, s *scratch, copies []transfer.Copy) error {
	s.out = appendRequest(s.out[:0], x.owner, request{id: x.first + x.asked, seals: x.seals, copies: copies})
	x.asked++
	if err := w.out.one(s.out); err != nil {
		return fmt.Errorf("send a request: %w", err)
	}
	return nil
}

// receive receives the answer to the i-th request, and the header of the next
// one with it, if that was sent ahead and nothing is staged: between two frames
// there is nothing else, so no byte can go astray, and an answer costs one read.
// After an error whole reports whether the wire is at the end of the answer all the
// same.
func (x *exchange) receive(in *half, s *scratch, i uint64, copies []transfer.Copy, ahead bool, arenas map[id.Rank]memory.Arena) (whole bool, err error) {
	if !s.have {
		if err := in.one(s.head[:]); err != nil {
			return false, fmt.Errorf("receive an answer: %w", err)
		}
		x.answered = true
	}
	h, err := x.frame(s.head[:], i)
	if err != nil {
		return false, err
	}
	total := transfer.Bytes(copies)
	switch {
	case h.kind == kindVerdict && h.length == 0:
		if verdict(h.aux) == verdictHeld {
			return false, fmt.Errorf("verdict without the bytes: %w", errGarbage)
		}
		return !ahead && verdict(h.aux).keeps(), verdict(h.aux).err()
	case h.kind == kindData && int64(h.length) == total && h.aux == 0:
	default:
		return false, fmt.Errorf("%v of %d bytes, want data of %d: %w", h.kind, h.length, total, errGarbage)
	}

	if x.landing != nil {
		err = x.landing.receive(in, copies, s.tail[:])
	} else {
		in.v.reset()
		destinations(&in.v, copies, arenas)
		in.v.add(s.tail[:])
		if s.have = ahead; ahead {
			in.v.add(s.head[:])
		}
		err = in.all()
		x.landed += min(in.v.moved, total)
	}
	if err != nil {
		return false, fmt.Errorf("receive an answer: %w", err)
	}
	if h, err = x.frame(s.tail[:], i); err != nil {
		return false, err
	}
	if h.kind != kindVerdict || h.length != 0 {
		return false, fmt.Errorf("%v of %d bytes after the data, want a verdict: %w", h.kind, h.length, errGarbage)
	}
	return !ahead && verdict(h.aux).keeps(), verdict(h.aux).err()
}

// destinations adds where the copies go to v.
func destinations(v *vector, copies []transfer.Copy, arenas map[id.Rank]memory.Arena) {
	rank, arena := id.Rank(-1), []byte(nil)
	for _, c := range copies {
		if c.Rank != rank {
			rank = c.Rank
			arena, _ = transfer.InHost(arenas[c.Rank])
		}
		v.add(arena[c.Local : c.Local+c.Bytes])
	}
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
