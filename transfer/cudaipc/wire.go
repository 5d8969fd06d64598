package cudaipc

import (
	"encoding/binary"
	"fmt"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer/rendezvous"
)

// protocol is how we meet.
func protocol() rendezvous.Protocol {
	return rendezvous.Protocol{Name: Name, Magic: "kvc", Version: 1}
}

const (
	kindArena = rendezvous.Own

	welcomeBytes = 8 + 1
	rankBytes    = 2
	sealTable    = 0xffff // as the label of a file
)

// welcome is what an owner says first.
type welcome struct {
	pidns  uint64 // number of its PID namespace
	arenas int    // that follow
}

func (w welcome) encode() []byte {
	return append(binary.BigEndian.AppendUint64(nil, w.pidns), byte(w.arenas))
}

func parseWelcome(b []byte) (welcome, error) {
	if len(b) != welcomeBytes || b[8] > id.MaxRanks {
		return welcome{}, fmt.Errorf("welcome says %.40x: %w", b, rendezvous.ErrGarbage)
	}
	return welcome{pidns: binary.BigEndian.Uint64(b), arenas: int(b[8])}, nil
}

// arena is what is said of one rank.
type arena struct {
	rank   id.Rank
	handle cuda.Handle
}

// encode is the body of a frame. It wraps [cuda.ErrNotShareable] where that has no
// room for all pieces of the arena.
func (a arena) encode() ([]byte, error) {
	b := a.handle.Append(binary.BigEndian.AppendUint16(nil, uint16(a.rank)))
	if len(b) > rendezvous.MaxBody {
		return nil, fmt.Errorf("the memory of rank %d consists of %d pieces, which are too many for a frame: %w", int(a.rank), len(a.handle.Chunks), cuda.ErrNotShareable)
	}
	return b, nil
}

func parseArena(b []byte) (arena, error) {
	if len(b) < rankBytes {
		return arena{}, fmt.Errorf("arena of %d bytes: %w", len(b), rendezvous.ErrGarbage)
	}
	rank := id.Rank(binary.BigEndian.Uint16(b))
	if err := rank.Validate(); err != nil {
		return arena{}, fmt.Errorf("arena: %w: %w", rendezvous.ErrGarbage, err)
	}
	h, err := cuda.ParseHandle(b[rankBytes:])
	if err != nil {
		return arena{}, fmt.Errorf("arena of rank %d: %w: %w", int(rank), rendezvous.ErrGarbage, err)
	}
	return arena{rank, h}, nil
}
