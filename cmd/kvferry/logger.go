package main

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"time"
)

// Lines of one message a second, and messages that are told apart. Whoever can
// reach a port can cause a line with every connection; that must not fill a disk.
const (
	mostLines    = 20
	mostMessages = 1024
)

// newLogger writes lines of text, of one message so many a second at most. The
// next line of that message says how many were hidden. Debug hides nothing.
func newLogger(w io.Writer, level slog.Leveler) *slog.Logger {
	text := slog.NewTextHandler(w, &slog.HandlerOptions{Level: level})
	return slog.New(quiet{text, &volume{of: make(map[string]*second)}})
}

// quiet is a handler that leaves out what its volume is over.
type quiet struct {
	slog.Handler
	volume *volume // shared by all that came from one
}

func (q quiet) Handle(ctx context.Context, r slog.Record) error {
	if r.Level > slog.LevelDebug {
		hidden, ok := q.volume.pass(r.Message, r.Time)
		if !ok {
			return nil
		}
		if hidden > 0 {
			r = r.Clone()
			r.AddAttrs(slog.Int("hidden", hidden))
		}
	}
	return q.Handler.Handle(ctx, r)
}

func (q quiet) WithAttrs(attrs []slog.Attr) slog.Handler {
	return quiet{q.Handler.WithAttrs(attrs), q.volume}
}

func (q quiet) WithGroup(name string) slog.Handler {
	return quiet{q.Handler.WithGroup(name), q.volume}
}

// volume counts lines by message. Messages are fixed texts, so they are few.
type volume struct {
	mu sync.Mutex
	of map[string]*second
}

type second struct {
	begin  time.Time
	lines  int
	hidden int // since a line was last written
}

// pass says whether one more line may be written, and how many before were not.
func (v *volume) pass(message string, now time.Time) (hidden int, ok bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	s := v.of[message]
	if s == nil {
		if len(v.of) >= mostMessages {
			return 0, true
		}
		s = &second{}
		v.of[message] = s
	}
	if now.Sub(s.begin) >= time.Second {
		s.begin, s.lines = now, 0
	}
	if s.lines >= mostLines {
		s.hidden++
		return 0, false
	}
	s.lines++
	hidden, s.hidden = s.hidden, 0
	return hidden, true
}
