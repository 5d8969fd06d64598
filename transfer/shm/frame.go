package shm

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rendezvous"
)

const (
	arenaBytes   = 2 + 8
	welcomeBytes = 1 + 4 + 1
	sealLabel    = 0xffff // of the file of the seal table
	ringLabel    = 0xfffe

	maxCopies     = 4096 // of an ask: a device fills a buffer in one call, see transfer.StagedCopies
	copyBytes     = 2 + 8 + 4
	maxAskBody    = 1 + maxCopies*copyBytes
	maxReason     = 512
	maxFilledBody = 1 + maxReason

	// What a reader maps of a ring, and keeps under way, is bounded.
	maxBuffers     = 16
	maxBufferBytes = 16 << 20
)

const (
	kindAsk rendezvous.Kind = rendezvous.Own + iota
	kindFilled
)

// welcome is what the owner says of its memory; files follow.
type welcome struct {
	buffers int // of the ring; 0: the arenas are host memory, and their files follow
	bytes   int // of a buffer
	arenas  map[id.Rank]int64
}

// ranks are in the order in which files follow.
func (w welcome) ranks() []id.Rank { return slices.Sorted(maps.Keys(w.arenas)) }

func (w welcome) encode() []byte {
	b := binary.BigEndian.AppendUint32([]byte{byte(w.buffers)}, uint32(w.bytes))
	b = append(b, byte(len(w.arenas)))
	for _, r := range w.ranks() {
		b = binary.BigEndian.AppendUint16(b, uint16(r))
		b = binary.BigEndian.AppendUint64(b, uint64(w.arenas[r]))
	}
	return b
}

func parseWelcome(b []byte) (w welcome, err error) {
	if len(b) < welcomeBytes || len(b) != welcomeBytes+int(b[5])*arenaBytes {
		return welcome{}, fmt.Errorf("welcome with %d bytes of arenas: %w", len(b), rendezvous.ErrGarbage)
	}
	buffers, bytes := int(b[0]), int64(binary.BigEndian.Uint32(b[1:]))
	if buffers > maxBuffers || bytes > maxBufferBytes || (buffers == 0) != (bytes == 0) {
		return welcome{}, fmt.Errorf("welcome with a ring of %d buffers of %d bytes: %w", buffers, bytes, rendezvous.ErrGarbage)
	}
	w = welcome{buffers: buffers, bytes: int(bytes), arenas: make(map[id.Rank]int64, b[5])}
	last := id.Rank(-1)
	for b := b[welcomeBytes:]; len(b) > 0; b = b[arenaBytes:] {
		rank, size := id.Rank(binary.BigEndian.Uint16(b)), binary.BigEndian.Uint64(b[2:])
		if rank <= last || rank.Validate() != nil || size == 0 || size > math.MaxInt64 {
			return welcome{}, fmt.Errorf("welcome with %d bytes of rank %d after rank %d: %w", size, rank, last, rendezvous.ErrGarbage)
		}
		w.arenas[rank], last = int64(size), rank
	}
	return w, nil
}

// appendAsk appends the body of an ask; the copies have been checked, and are at
// most maxCopies that fit into a buffer.
func appendAsk(b []byte, buffer int, copies []transfer.Copy) []byte {
	b = append(b, byte(buffer))
	for i := range copies {
		c := &copies[i]
		b = binary.BigEndian.AppendUint16(b, uint16(c.Rank))
		b = binary.BigEndian.AppendUint64(b, uint64(c.Remote))
		b = binary.BigEndian.AppendUint32(b, uint32(c.Bytes))
	}
	return b
}

// parseAsk appends the copies of an ask to dst. Each lies in an arena of these
// sizes, and all of them fit into a buffer of the ring.
func parseAsk(dst []transfer.Copy, body []byte, w *welcome) (buffer int, copies []transfer.Copy, err error) {
	if len(body) < 1+copyBytes || (len(body)-1)%copyBytes != 0 || len(body) > maxAskBody {
		return 0, dst, fmt.Errorf("ask of %d bytes: %w", len(body), rendezvous.ErrGarbage)
	}
	if buffer = int(body[0]); buffer >= w.buffers {
		return 0, dst, fmt.Errorf("ask for buffer %d of %d: %w", buffer, w.buffers, rendezvous.ErrGarbage)
	}
	room := int64(w.bytes)
	copies = dst
	for b := body[1:]; len(b) > 0; b = b[copyBytes:] {
		c := transfer.Copy{
			Rank:   id.Rank(binary.BigEndian.Uint16(b)),
			Remote: int64(binary.BigEndian.Uint64(b[2:])),
			Bytes:  int64(binary.BigEndian.Uint32(b[10:])),
		}
		if size := w.arenas[c.Rank]; !transfer.Inside(c.Remote, c.Bytes, size) {
			return 0, dst, fmt.Errorf("ask for %d bytes at %d of rank %d, which has %d: %w", c.Bytes, c.Remote, int(c.Rank), size, rendezvous.ErrGarbage)
		}
		if room -= c.Bytes; room < 0 {
			return 0, dst, fmt.Errorf("ask for more than the %d bytes of a buffer: %w", w.bytes, rendezvous.ErrGarbage)
		}
		copies = append(copies, c)
	}
	return buffer, copies, nil
}

// filledBody is that of an answer; why is nil if the buffer is filled.
func filledBody(buffer int, why error) []byte {
	b := []byte{byte(buffer)}
	if why == nil {
		return b
	}
	text := strings.ToValidUTF8(why.Error(), "?")
	if text == "" {
		text = "for no reason"
	}
	return append(b, text[:min(len(text), maxReason)]...)
}

// parseFilled takes an answer; why says what the owner says.
func parseFilled(body []byte, buffers int) (buffer int, why error, err error) {
	if len(body) == 0 || len(body) > maxFilledBody || int(body[0]) >= buffers {
		return 0, nil, fmt.Errorf("answer of %d bytes, for a buffer of %d: %w", len(body), buffers, rendezvous.ErrGarbage)
	}
	if len(body) > 1 {
		why = fmt.Errorf("the peer can't read its device: %q", body[1:])
	}
	return int(body[0]), why, nil
}
