package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
)

const (
	version = 1
	magic   = "kvs"

	headerBytes    = 8
	lifeBytes      = 1 + id.MaxNode + 8 // at most
	arenaBytes     = 2 + 8
	maxHelloBody   = 2 * lifeBytes
	maxWelcomeBody = lifeBytes + 1 + id.MaxRanks*arenaBytes
	fileBytes      = headerBytes + 2
	refusalBody    = 1
	sealTable      = 0xffff // as the rank of a file
	maxAnswerBody  = maxWelcomeBody
)

// errGarbage: what came does not follow the protocol. The connection is closed.
var errGarbage = errors.New("not a frame of this protocol")

type kind uint8

const (
	kindHello kind = iota + 1
	kindWelcome
	kindFile
	kindRefusal
)

func (k kind) String() string {
	switch k {
	case kindHello:
		return "hello"
	case kindWelcome:
		return "welcome"
	case kindFile:
		return "file"
	case kindRefusal:
		return "refusal"
	default:
		return fmt.Sprintf("kind %d", uint8(k))
	}
}

// refusal is why an owner lets a reader see nothing.
type refusal uint8

const (
	refusedLife refusal = iota + 1 // the hello was meant for another life
	refusedUser                    // the reader's process is another user's
	refusedFull                    // there are as many links as may be
)

func (r refusal) err() error {
	switch r {
	case refusedLife:
		return fmt.Errorf("refused by the owner: %w", transfer.ErrIdentity)
	case refusedUser:
		return fmt.Errorf("refused by the owner, which serves its own user and root alone; run both nodes as one user, in one user namespace: %w", transfer.ErrUnavailable)
	case refusedFull:
		return fmt.Errorf("refused by the owner: %d readers are connected to it", maxConns)
	default:
		return fmt.Errorf("refusal %d: %w", uint8(r), errGarbage)
	}
}

// frame is a header with its body.
func frame(k kind, body []byte) []byte {
	b := append([]byte(magic), version, byte(k), 0)
	b = binary.BigEndian.AppendUint16(b, uint16(len(body)))
	return append(b, body...)
}

// parseHeader takes the first [headerBytes] of a frame.
func parseHeader(b []byte) (k kind, length int, err error) {
	switch {
	case len(b) != headerBytes:
		return 0, 0, fmt.Errorf("header of %d bytes: %w", len(b), errGarbage)
	case string(b[:len(magic)]) != magic:
		return 0, 0, fmt.Errorf("magic %x: %w", b[:len(magic)], errGarbage)
	case b[3] != version:
		return 0, 0, fmt.Errorf("protocol version %d, want %d: %w", b[3], version, errGarbage)
	case b[5] != 0:
		return 0, 0, fmt.Errorf("reserved byte %x: %w", b[5], errGarbage)
	}
	return kind(b[4]), int(binary.BigEndian.Uint16(b[6:])), nil
}

// receive takes one frame of at most limit bytes of body from a connection, and
// not a byte more: files may follow.
func receive(c io.Reader, limit int) (kind, []byte, error) {
	var head [headerBytes]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return 0, nil, err
	}
	k, length, err := parseHeader(head[:])
	if err != nil {
		return 0, nil, err
	}
	if length > limit {
		return 0, nil, fmt.Errorf("%v of %d bytes, at most %d: %w", k, length, limit, errGarbage)
	}
	body := make([]byte, length)
	if _, err := io.ReadFull(c, body); err != nil {
		return 0, nil, err
	}
	return k, body, nil
}

// hello is what a reader says: whom it wants, and who it is.
type hello struct {
	owner, reader id.Life
}

func (h hello) encode() []byte {
	return frame(kindHello, appendLife(appendLife(nil, h.owner), h.reader))
}

func parseHello(body []byte) (h hello, err error) {
	if h.owner, body, err = cutLife(body); err != nil {
		return hello{}, fmt.Errorf("owner of a hello: %w", err)
	}
	if h.reader, body, err = cutLife(body); err != nil {
		return hello{}, fmt.Errorf("reader of a hello: %w", err)
	}
	if len(body) != 0 {
		return hello{}, fmt.Errorf("hello has %d bytes too many: %w", len(body), errGarbage)
	}
	return h, nil
}

// welcome is the owner's answer: who it is, and the arenas whose files follow.
type welcome struct {
	owner  id.Life
	arenas map[id.Rank]int64 // bytes of the region
}

// ranks are in the order in which files follow.
func (w welcome) ranks() []id.Rank { return slices.Sorted(maps.Keys(w.arenas)) }

func (w welcome) encode() []byte {
	b := appendLife(nil, w.owner)
	b = append(b, byte(len(w.arenas)))
	for _, r := range w.ranks() {
		b = binary.BigEndian.AppendUint16(b, uint16(r))
		b = binary.BigEndian.AppendUint64(b, uint64(w.arenas[r]))
	}
	return frame(kindWelcome, b)
}

func parseWelcome(body []byte) (w welcome, err error) {
	if w.owner, body, err = cutLife(body); err != nil {
		return welcome{}, fmt.Errorf("owner of a welcome: %w", err)
	}
	if len(body) == 0 || len(body) != 1+int(body[0])*arenaBytes {
		return welcome{}, fmt.Errorf("welcome ends with %d bytes: %w", len(body), errGarbage)
	}
	w.arenas = make(map[id.Rank]int64, body[0])
	last := id.Rank(-1)
	for b := body[1:]; len(b) > 0; b = b[arenaBytes:] {
		rank, size := id.Rank(binary.BigEndian.Uint16(b)), binary.BigEndian.Uint64(b[2:])
		if rank <= last || rank.Validate() != nil || size == 0 || size > math.MaxInt64 {
			return welcome{}, fmt.Errorf("welcome with %d bytes of rank %d after rank %d: %w", size, rank, last, errGarbage)
		}
		w.arenas[rank], last = int64(size), rank
	}
	return w, nil
}

// fileFrame goes with the memfd of one arena, or of the seal table.
func fileFrame(rank int) []byte {
	return frame(kindFile, binary.BigEndian.AppendUint16(nil, uint16(rank)))
}

// parseFile checks that a frame is that of one rank.
func parseFile(b []byte, rank int) error {
	if len(b) != fileBytes {
		return fmt.Errorf("file with %d bytes, want %d: %w", len(b), fileBytes, errGarbage)
	}
	k, length, err := parseHeader(b[:headerBytes])
	if err != nil {
		return err
	}
	if got := int(binary.BigEndian.Uint16(b[headerBytes:])); k != kindFile || length != fileBytes-headerBytes || got != rank {
		return fmt.Errorf("%v of %d bytes and rank %d, want the file of rank %d: %w", k, length, got, rank, errGarbage)
	}
	return nil
}

func parseRefusal(body []byte) (refusal, error) {
	if len(body) != refusalBody {
		return 0, fmt.Errorf("refusal of %d bytes: %w", len(body), errGarbage)
	}
	return refusal(body[0]), nil
}

func appendLife(b []byte, l id.Life) []byte {
	b = append(b, byte(len(l.Node)))
	b = append(b, l.Node...)
	return binary.BigEndian.AppendUint64(b, uint64(l.Incarnation))
}

func cutLife(b []byte) (id.Life, []byte, error) {
	if len(b) == 0 || len(b) < 1+int(b[0])+8 {
		return id.Life{}, nil, fmt.Errorf("life is cut off: %w", errGarbage)
	}
	n := id.Node(b[1 : 1+int(b[0])])
	if err := n.Validate(); err != nil {
		return id.Life{}, nil, fmt.Errorf("%w: %w", errGarbage, err)
	}
	b = b[1+len(n):]
	return id.Life{Node: n, Incarnation: id.Incarnation(binary.BigEndian.Uint64(b))}, b[8:], nil
}
