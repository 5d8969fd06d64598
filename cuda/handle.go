package cuda

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// Kind of a handle.
type Kind uint8

// The kinds.
const (
	Legacy Kind = 1 // cuIpcMemHandle, 64 bytes
	Files  Kind = 2 // descriptors of VMM chunks
)

// MaxChunks is how many chunks, each with a descriptor, an arena has at most:
// those of 20 MiB that engines make of 160 GiB.
const MaxChunks = 8192

// Handle is what another process of this host needs to import an arena. It is a
// value for the wire: [Handle.Append], [ParseHandle].
type Handle struct {
	Kind   Kind
	UUID   UUID
	Offset int64    // of the arena in the allocation
	Bytes  int64    // of the arena
	IPC    [64]byte // Legacy
	Word   uint64   // Legacy: another for each allocation, though the driver gave IPC again
	Chunks []int64  // Files: bytes of each, in the order of the files
}

// handleVersion is the first byte of the wire form.
const handleVersion = 1

// The wire form: version, kind, UUID, offset and bytes in eight bytes each, and
// then 64 bytes and the word in eight, or a count in four and eight bytes for each chunk. Little-endian.
const handleFixed = 1 + 1 + 16 + 8 + 8

// Append appends the handle's wire form to b.
func (h Handle) Append(b []byte) []byte {
	b = append(b, handleVersion, byte(h.Kind))
	b = append(b, h.UUID[:]...)
	b = binary.LittleEndian.AppendUint64(b, uint64(h.Offset))
	b = binary.LittleEndian.AppendUint64(b, uint64(h.Bytes))
	if h.Kind == Legacy {
		return binary.LittleEndian.AppendUint64(append(b, h.IPC[:]...), h.Word)
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(len(h.Chunks)))
	for _, n := range h.Chunks {
		b = binary.LittleEndian.AppendUint64(b, uint64(n))
	}
	return b
}

// ParseHandle reads what Append has written, and nothing behind it. What it
// returns makes sense in itself: the arena lies within the chunks.
func ParseHandle(b []byte) (Handle, error) {
	h, err := parseHandle(b)
	if err != nil {
		return Handle{}, fmt.Errorf("handle of an arena: %w", err)
	}
	return h, nil
}

func parseHandle(b []byte) (Handle, error) {
	if len(b) < handleFixed {
		return Handle{}, fmt.Errorf("%d bytes, want at least %d", len(b), handleFixed)
	}
	if b[0] != handleVersion {
		return Handle{}, fmt.Errorf("of version %d, this is version %d", b[0], handleVersion)
	}
	h := Handle{
		Kind:   Kind(b[1]),
		Offset: int64(binary.LittleEndian.Uint64(b[18:])),
		Bytes:  int64(binary.LittleEndian.Uint64(b[26:])),
	}
	copy(h.UUID[:], b[2:])
	rest := b[handleFixed:]
	switch h.Kind {
	case Legacy:
		if len(rest) != len(h.IPC)+8 {
			return Handle{}, fmt.Errorf("%d bytes of the driver and of the allocation, want %d", len(rest), len(h.IPC)+8)
		}
		h.Word = binary.LittleEndian.Uint64(rest[copy(h.IPC[:], rest):])
	case Files:
		if len(rest) < 4 {
			return Handle{}, errors.New("no number of chunks")
		}
		n, list := binary.LittleEndian.Uint32(rest), rest[4:]
		if n > MaxChunks || len(list) != 8*int(n) {
			return Handle{}, fmt.Errorf("%d chunks (at most %d) in %d bytes", n, MaxChunks, len(list))
		}
		h.Chunks = make([]int64, n)
		for i := range h.Chunks {
			h.Chunks[i] = int64(binary.LittleEndian.Uint64(list[8*i:]))
		}
	default:
		return Handle{}, fmt.Errorf("of kind %d", h.Kind)
	}
	return h, h.check()
}

// check says whether the handle makes sense in itself.
func (h Handle) check() error {
	if h.Offset < 0 || h.Bytes <= 0 || h.Bytes > math.MaxInt64-h.Offset {
		return fmt.Errorf("%d bytes at %d", h.Bytes, h.Offset)
	}
	switch h.Kind {
	case Legacy:
		return nil
	case Files:
		if len(h.Chunks) == 0 || len(h.Chunks) > MaxChunks {
			return fmt.Errorf("%d chunks, want 1 to %d", len(h.Chunks), MaxChunks)
		}
		total := int64(0)
		for _, n := range h.Chunks {
			if n <= 0 || n > math.MaxInt64-total {
				return fmt.Errorf("a chunk of %d bytes", n)
			}
			total += n
		}
		if h.Offset+h.Bytes > total {
			return fmt.Errorf("%d bytes at %d, of %d in all chunks", h.Bytes, h.Offset, total)
		}
		return nil
	}
	return fmt.Errorf("of kind %d", h.Kind)
}
