package cluster

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"
)

// bridgeLines bounds the lines a second: strangers cause one with every packet.
const bridgeLines = 20

// bridge writes memberlist's log lines to ours. It lowers their level by one,
// since memberlist calls every lost packet an error, and puts the name of the
// node for memberlist's own.
type bridge struct {
	log    *slog.Logger
	roster *roster
	count  *counters
	keys   chan<- struct{} // gets a token when something cannot be read for want of a key
	closed atomic.Bool
	lines  hush
}

func (b *bridge) Write(p []byte) (int, error) {
	switch {
	case bytes.Contains(p, []byte("handler queue full")):
		b.count.queueDrops.Add(1)
		b.count.handoffDrops.Add(1)
	case isRefusal(p):
		b.count.badMessages.Add(1)
	}
	if bytes.Contains(p, []byte(errStranger.Error())) || bytes.Contains(p, []byte(errKeys.Error())) {
		return len(p), nil // it was told of
	}
	if isKeyTrouble(string(p)) {
		b.count.unreadable.Add(1)
		poke(b.keys)
	}
	line := strings.TrimSpace(string(p))
	level := slog.LevelInfo
	if tag, rest, ok := strings.Cut(line, "] "); ok && strings.HasPrefix(tag, "[") {
		line = rest
		switch tag {
		case "[DEBUG", "[INFO":
			level = slog.LevelDebug
		case "[ERR", "[ERROR":
			level = slog.LevelWarn
		}
	}
	ctx := context.Background()
	if b.closed.Load() || !b.log.Enabled(ctx, level) {
		return len(p), nil
	}
	hidden, ok := b.lines.pass(time.Now(), bridgeLines, time.Second)
	if !ok {
		return len(p), nil
	}
	if hidden > 0 {
		b.log.Info("memberlist lines not shown", "lines", hidden)
	}
	b.log.Log(ctx, level, "memberlist", "text", b.roster.rename(strings.TrimPrefix(line, "memberlist: ")))
	return len(p), nil
}

// isRefusal says that memberlist tells of a packet or stream that it could not
// read. It drops them before any callback, and keeps no count of them.
func isRefusal(line []byte) bool {
	for _, text := range []string{
		"unacceptable label", "label header", "Decrypt packet failed", "invalid checksum", "missing message type",
		"not supported", "Failed to decode", "Failed to decompress", "nvalid msgType", "failed to receive: ",
		"Failed to receive user message", "Failed to read remote state", "cannot decode label",
	} {
		if bytes.Contains(line, []byte(text)) {
			return true
		}
	}
	return false
}

// isKeyTrouble says that one side has gossip keys that the other has not.
func isKeyTrouble(text string) bool {
	for _, trouble := range []string{
		"no installed keys could decrypt", "encryption is not configured", "remote state is not encrypted", "Decrypt packet failed",
	} {
		if strings.Contains(text, trouble) {
			return true
		}
	}
	return false
}

// rename puts the stable name for every name of memberlist in a line.
func (r *roster) rename(line string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	words := strings.Split(line, " ")
	for i, w := range words {
		bare := strings.Trim(w, `'"(),:;`)
		node := ""
		if bare == r.selfName {
			node = string(r.self.Node)
		} else if l := r.lives[bare]; l != nil {
			node = string(l.peer.Life.Node)
		}
		if node != "" {
			words[i] = strings.Replace(w, bare, node, 1)
		}
	}
	return strings.Join(words, " ")
}
