package transfer

import (
	"errors"
	"fmt"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
)

// Check refuses a read that lies outside of a region on either side, before
// anything is moved, and returns the bytes of its copies. sizes are those of a
// rank's arenas at the owner and here, in bytes; not ok: one side has none.
//
// The error wraps [ErrRange], but for a read without a seal.
func Check(seals []Seal, copies []Copy, sizes func(id.Rank) (remote, local int64, ok bool)) (total int64, err error) {
	for i := range copies {
		c := &copies[i]
		remote, local, ok := sizes(c.Rank)
		switch {
		case !ok:
			return 0, fmt.Errorf("copy %d: rank %d, which this node or the peer does not have: %w", i, int(c.Rank), ErrRange)
		case !Inside(c.Remote, c.Bytes, remote):
			return 0, fmt.Errorf("copy %d: %d bytes at %d of rank %d of the peer, which has %d: %w", i, c.Bytes, c.Remote, int(c.Rank), remote, ErrRange)
		case !Inside(c.Local, c.Bytes, local):
			return 0, fmt.Errorf("copy %d: %d bytes at %d of rank %d here, which has %d: %w", i, c.Bytes, c.Local, int(c.Rank), local, ErrRange)
		}
		if total += c.Bytes; total < 0 {
			return 0, fmt.Errorf("copies are more than 2^63 bytes: %w", ErrRange)
		}
	}
	if len(seals) == 0 {
		return total, errors.New("read without a seal")
	}
	for _, s := range seals {
		if s.Index >= memory.Words {
			return total, fmt.Errorf("seal word %d of %d: %w", s.Index, memory.Words, ErrRange)
		}
	}
	return total, nil
}

// Inside reports whether [at, at+n) is a stretch of at least one byte in a
// region of size bytes. No sum can overflow.
func Inside(at, n, size int64) bool {
	return n > 0 && at >= 0 && n <= size && at <= size-n
}

// Held reports whether every seal word holds its value, read behind the fences
// of [memory.SealTable.Load]. Nothing is held by a value of 0: that is what a
// free word holds.
func Held(words *memory.SealTable, seals []Seal) bool {
	for _, s := range seals {
		if v, ok := words.Load(s.Index); !ok || v != s.Value || v == 0 {
			return false
		}
	}
	return true
}
