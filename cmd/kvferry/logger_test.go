package main

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestLogIsNotFlooded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := newLogger(&out, slog.LevelDebug)
		flood := log.With("self", "n.1")
		lines := func() (all []string) {
			all = strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
			out.Reset()
			return all
		}
		for i := range 1000 {
			flood.Warn("caller refused", "address", i)
			log.Debug("of debug nothing is hidden", "i", i)
		}
		log.Info("another message")
		if all := lines(); len(all) != mostLines+1000+1 || !strings.Contains(all[len(all)-1], "another message") {
			t.Errorf("%d lines, want %d of the flood and all others", len(all), mostLines)
		}
		time.Sleep(time.Second) // of the bubble
		flood.WithGroup("g").Log(context.Background(), slog.LevelError, "caller refused", "address", "late")
		all := lines()
		if len(all) != 1 || !strings.Contains(all[0], "hidden=980") {
			t.Errorf("a second later: %q, want one line that tells of 980 hidden ones", all)
		}
		flood.Warn("caller refused")
		if all := lines(); strings.Contains(all[0], "hidden") {
			t.Errorf("told twice: %q", all)
		}
	})
}
