package rendezvous

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
)

const (
	magicBytes   = 3
	headerBytes  = 8
	lifeBytes    = 1 + id.MaxNode + 8 // at most
	maxHelloBody = 2 * lifeBytes
	fileBytes    = headerBytes + 2
	refusalBody  = 1
)

// MaxBody is how many bytes the body of a frame can have.
const MaxBody = 1<<16 - 1

// MaxWelcome is how many bytes of a welcome can be the protocol's.
const MaxWelcome = MaxBody - lifeBytes

// Kind of a frame.
type Kind uint8

const (
	kindHello Kind = iota + 1
	kindWelcome
	kindFile
	kindRefusal
)

// Own is the first kind that a protocol may give a meaning of its own.
const Own Kind = 16

func (k Kind) String() string {
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
	refusedBusy                    // there is no room for one of this kind
)

func (r refusal) err() error {
	switch r {
	case refusedLife:
		return fmt.Errorf("refused by the owner: %w", transfer.ErrIdentity)
	case refusedUser:
		return fmt.Errorf("refused by the owner, which serves its own user and root alone; run both nodes as one user, in one user namespace: %w", transfer.ErrUnavailable)
	case refusedFull:
		return fmt.Errorf("refused by the owner: %d readers are connected to it", maxConns)
	case refusedBusy:
		return fmt.Errorf("refused by the owner, which serves as many readers of this kind as it has room for: %w: %w", ErrBusy, transfer.ErrUnavailable)
	default:
		return fmt.Errorf("refusal %d: %w", uint8(r), ErrGarbage)
	}
}

// Frame is a header with its body.
func (p Protocol) Frame(k Kind, body []byte) []byte {
	b := make([]byte, 0, headerBytes+len(body))
	b = append(append(b, p.Magic...), p.Version, byte(k), 0)
	b = binary.BigEndian.AppendUint16(b, uint16(len(body)))
	return append(b, body...)
}

// parseHeader takes the first [headerBytes] of a frame.
func (p Protocol) parseHeader(b []byte) (k Kind, length int, err error) {
	switch {
	case len(b) != headerBytes:
		return 0, 0, fmt.Errorf("header of %d bytes: %w", len(b), ErrGarbage)
	case string(b[:magicBytes]) != p.Magic:
		return 0, 0, fmt.Errorf("magic %x: %w", b[:magicBytes], ErrGarbage)
	case b[3] != p.Version:
		return 0, 0, fmt.Errorf("protocol version %d, want %d: %w", b[3], p.Version, ErrGarbage)
	case b[5] != 0:
		return 0, 0, fmt.Errorf("reserved byte %x: %w", b[5], ErrGarbage)
	}
	return Kind(b[4]), int(binary.BigEndian.Uint16(b[6:])), nil
}

// receive takes one frame of at most limit bytes of body from a connection, and
// not a byte more: files may follow. The body is in room, if that is large enough.
func (p Protocol) receive(c io.Reader, limit int, room []byte) (Kind, []byte, error) {
	var head [headerBytes]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return 0, nil, err
	}
	k, length, err := p.parseHeader(head[:])
	if err != nil {
		return 0, nil, err
	}
	if length > limit {
		return 0, nil, fmt.Errorf("%v of %d bytes, at most %d: %w", k, length, limit, ErrGarbage)
	}
	if cap(room) < length {
		room = make([]byte, length)
	}
	body := room[:length]
	if _, err := io.ReadFull(c, body); err != nil {
		return 0, nil, err
	}
	return k, body, nil
}

// hello is what a reader says: whom it wants, and who it is.
type hello struct {
	owner, reader id.Life
}

func (h hello) encode(p Protocol) []byte {
	return p.Frame(kindHello, appendLife(appendLife(nil, h.owner), h.reader))
}

func parseHello(body []byte) (h hello, err error) {
	if h.owner, body, err = cutLife(body); err != nil {
		return hello{}, fmt.Errorf("owner of a hello: %w", err)
	}
	if h.reader, body, err = cutLife(body); err != nil {
		return hello{}, fmt.Errorf("reader of a hello: %w", err)
	}
	if len(body) != 0 {
		return hello{}, fmt.Errorf("hello has %d bytes too many: %w", len(body), ErrGarbage)
	}
	return h, nil
}

// Welcome is the frame of a welcome: who the owner is, and what the protocol says.
func (p Protocol) Welcome(owner id.Life, says []byte) []byte {
	return p.Frame(kindWelcome, append(appendLife(nil, owner), says...))
}

// File is the frame that goes with a file.
func (p Protocol) File(label uint16) []byte {
	return p.Frame(kindFile, binary.BigEndian.AppendUint16(nil, label))
}

// parseFile checks that a frame is that of one label.
func (p Protocol) parseFile(b []byte, label uint16) error {
	if len(b) != fileBytes {
		return fmt.Errorf("file with %d bytes, want %d: %w", len(b), fileBytes, ErrGarbage)
	}
	k, length, err := p.parseHeader(b[:headerBytes])
	if err != nil {
		return err
	}
	if got := binary.BigEndian.Uint16(b[headerBytes:]); k != kindFile || length != fileBytes-headerBytes || got != label {
		return fmt.Errorf("%v of %d bytes and label %d, want the file of label %d: %w", k, length, got, label, ErrGarbage)
	}
	return nil
}

func parseRefusal(body []byte) (refusal, error) {
	if len(body) != refusalBody {
		return 0, fmt.Errorf("refusal of %d bytes: %w", len(body), ErrGarbage)
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
		return id.Life{}, nil, fmt.Errorf("life is cut off: %w", ErrGarbage)
	}
	n := id.Node(b[1 : 1+int(b[0])])
	if err := n.Validate(); err != nil {
		return id.Life{}, nil, fmt.Errorf("%w: %w", ErrGarbage, err)
	}
	b = b[1+len(n):]
	return id.Life{Node: n, Incarnation: id.Incarnation(binary.BigEndian.Uint64(b))}, b[8:], nil
}
