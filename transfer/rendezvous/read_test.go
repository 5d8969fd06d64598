package rendezvous

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
)

// source is a peer's memory of one rank; copy is what a transport does.
type source struct {
	seals *memory.SealTable
	copy  func(ctx context.Context, r Read) (done int64, err error)
	asked int
}

func (s *source) Seals() *memory.SealTable { return s.seals }

func (s *source) Sizes(rank id.Rank) (remote, local int64, ok bool) { return 4096, 4096, rank == 0 }

func (s *source) Copy(ctx context.Context, r Read, total int64, _ []transfer.Copy) (int64, error) {
	s.asked++
	if s.copy == nil {
		return total, nil
	}
	return s.copy(ctx, r)
}

func newSource(t *testing.T) *source {
	t.Helper()
	seals, err := memory.NewSealTable()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = seals.Close() })
	seals.Store(3, 7)
	return &source{seals: seals}
}

// readPair is an owner, and a reader whose reads have no more than total.
func readPair(t *testing.T, total, stall time.Duration) (owner, reader *Server) {
	t.Helper()
	dir := closedDir(t)
	o := options(dir, readerLife)
	o.Limits.Base, o.Limits.Rate, o.Limits.Stall = total, 1<<50, stall
	return listen(t, options(dir, ownerLife)), listen(t, o)
}

func TestRead(t *testing.T) {
	held, page := []transfer.Seal{{Index: 3, Value: 7}}, []transfer.Copy{{Bytes: 4096}}
	failed := errors.New("the device is gone")
	for name, tt := range map[string]struct {
		seals  []transfer.Seal
		copies []transfer.Copy
		copy   func(s *source) func(context.Context, Read) (int64, error)
		want   error
		done   int64
		asked  int
	}{
		"holds":           {seals: held, copies: page, done: 4096, asked: 1},
		"nothing to copy": {seals: held},
		"stale before": {
			seals: []transfer.Seal{{Index: 3, Value: 8}}, copies: page, want: transfer.ErrStale,
		},
		"stale behind": {
			seals: held, copies: page, want: transfer.ErrStale, done: 4096, asked: 1,
			copy: func(s *source) func(context.Context, Read) (int64, error) {
				return func(context.Context, Read) (int64, error) { s.seals.Store(3, 0); return 4096, nil }
			},
		},
		"out of range": {
			seals: held, copies: []transfer.Copy{{Remote: 1, Bytes: 4096}}, want: transfer.ErrRange,
		},
		"fails halfway": {
			seals: held, copies: page, want: failed, done: 100, asked: 1,
			copy: func(*source) func(context.Context, Read) (int64, error) {
				return func(context.Context, Read) (int64, error) { return 100, failed }
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			owner, reader := readPair(t, patience, patience)
			h, s := open(t, reader, peerOf(owner)), newSource(t)
			if tt.copy != nil {
				s.copy = tt.copy(s)
			}
			err := h.Read(short(t), tt.seals, tt.copies, s)
			if e, ok := errors.AsType[*transfer.Error](err); !errors.Is(err, tt.want) || tt.want != nil && (!ok || e.Done != tt.done || e.Peer != ownerLife || e.Address != owner.Address() || e.Transport != testProtocol.Name) {
				t.Errorf("Read: %v, want %v", err, tt.want)
			}
			if s.asked != tt.asked {
				t.Errorf("copied %d times, want %d", s.asked, tt.asked)
			}
			n := reader.Stats()
			want := Stats{Holds: 1, ReadBytes: uint64(tt.done)}
			switch {
			case err == nil:
				want.Reads = 1
			case errors.Is(err, transfer.ErrStale):
				want.Stale = 1
			default:
				want.Errors = 1
			}
			if n != want {
				t.Errorf("stats %+v, want %+v", n, want)
			}
		})
	}
}

// Whatever ends a read ends what it waits for, be it a turn or an answer.
func TestWhatEndsARead(t *testing.T) {
	late := errors.New("nothing came")
	turns := NewTurns(1)
	if !turns.Try() || turns.Try() || turns.Taken() != 1 || turns.All() != 1 {
		t.Fatal("not one turn")
	}
	waits := map[string]func(ctx context.Context, r Read) (int64, error){
		"turn": func(ctx context.Context, r Read) (int64, error) { return 0, r.Turn(ctx, turns) },
		"answer": func(ctx context.Context, r Read) (int64, error) {
			_, err := Await(ctx, &r, make(chan int), late)
			return 0, errors.Join(err, r.Over(ctx))
		},
	}
	ends := map[string]struct {
		end   func(cancel context.CancelFunc, h *Hold)
		total time.Duration
		want  error
	}{
		"context":    {func(cancel context.CancelFunc, _ *Hold) { cancel() }, patience, context.Canceled},
		"link":       {func(_ context.CancelFunc, h *Hold) { h.Close() }, patience, transfer.ErrClosed},
		"total time": {func(context.CancelFunc, *Hold) {}, time.Millisecond, transfer.ErrTotal},
	}
	for waiting, wait := range waits {
		for name, tt := range ends {
			t.Run(waiting+"/"+name, func(t *testing.T) {
				owner, reader := readPair(t, tt.total, patience)
				h, s := open(t, reader, peerOf(owner)), newSource(t)
				begun := make(chan struct{})
				s.copy = func(ctx context.Context, r Read) (int64, error) { close(begun); return wait(ctx, r) }
				ctx, cancel := context.WithCancel(short(t))
				defer cancel()
				done := make(chan error, 1)
				go func() {
					done <- h.Read(ctx, []transfer.Seal{{Index: 3, Value: 7}}, []transfer.Copy{{Bytes: 4096}}, s)
				}()
				<-begun
				tt.end(cancel, h)
				if err := <-done; !errors.Is(err, tt.want) {
					t.Errorf("Read: %v, want %v", err, tt.want)
				}
			})
		}
	}
	if turns.Release(); turns.Taken() != 0 || turns.Wanted() {
		t.Error("a turn is taken, or waited for")
	}
}

func TestAnswerIsLate(t *testing.T) {
	owner, reader := readPair(t, patience, time.Millisecond)
	h, s := open(t, reader, peerOf(owner)), newSource(t)
	late := errors.New("nothing came")
	s.copy = func(ctx context.Context, r Read) (int64, error) {
		_, err := Await(ctx, &r, make(chan int), late)
		return 0, err
	}
	if err := h.Read(short(t), []transfer.Seal{{Index: 3, Value: 7}}, []transfer.Copy{{Bytes: 4096}}, s); !errors.Is(err, late) {
		t.Errorf("Read: %v", err)
	}
}

// A frame that cannot be sent ends the link, and the read says how.
func TestBrokenConnectionEndsARead(t *testing.T) {
	owner, reader := readPair(t, patience, patience)
	h, s := open(t, reader, peerOf(owner)), newSource(t)
	s.copy = func(_ context.Context, r Read) (int64, error) {
		var err error
		for err == nil {
			err = h.conn.Send(Own, nil) // the owner ends a connection that says anything
		}
		return 0, r.Broken(err)
	}
	err := h.Read(short(t), []transfer.Seal{{Index: 3, Value: 7}}, []transfer.Copy{{Bytes: 4096}}, s)
	if !errors.Is(err, ErrGone) || !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("Read: %v, want ErrGone", err)
	}
}
