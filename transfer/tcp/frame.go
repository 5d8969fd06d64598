package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
)

// Bounds of the protocol. A server announces its own in Welcome; a reader keeps
// to the lesser of both.
const (
	version = 1
	magic   = "kvf"

	headerBytes  = 32
	sealBytes    = 12
	copyBytes    = 16
	maxHelloBody = 2*(1+id.MaxNode) + 8

	maxSeals       = 1024     // of one request
	maxCopies      = 4096     // of one request, what a server takes
	maxFrameBytes  = 16 << 20 // of one answer, what a server gives
	maxInFlight    = 1024     // requests of one connection
	frameCopies    = 1023     // of one request, what a reader asks: one writev takes 1024 vectors
	frameBytes     = 4 << 20  // of one answer, what a reader asks
	laneBytes      = 4 << 20  // of a read, for each of its lanes, at least
	maxRequestBody = 4 + maxSeals*sealBytes + maxCopies*copyBytes
)

// errGarbage: what came does not follow the protocol. The connection is closed.
var errGarbage = errors.New("not a frame of this protocol")

// errDevice: the memory that was asked for is on a device that does not give it.
var errDevice = errors.New("device memory cannot be read")

type kind uint8

const (
	kindHello kind = iota + 1
	kindWelcome
	kindRead
	kindData
	kindVerdict
)

func (k kind) String() string {
	switch k {
	case kindHello:
		return "hello"
	case kindWelcome:
		return "welcome"
	case kindRead:
		return "read"
	case kindData:
		return "data"
	case kindVerdict:
		return "verdict"
	default:
		return fmt.Sprintf("kind %d", uint8(k))
	}
}

// verdict is what an owner says about one request.
type verdict uint32

const (
	verdictHeld     verdict = iota + 1 // every seal word held after the last byte was copied out
	verdictStale                       // at least one did not, before or after
	verdictRange                       // a copy or a seal lies outside of its region
	verdictIdentity                    // the request was meant for another life
	verdictUnproven                    // the reader's certificate does not name it
	verdictMemory                      // the owner cannot read its own memory
)

// err is the error of the transfer package that the verdict stands for.
func (v verdict) err() error {
	switch v {
	case verdictHeld:
		return nil
	case verdictStale:
		return transfer.ErrStale
	case verdictRange:
		return fmt.Errorf("refused by the owner: %w", transfer.ErrRange)
	case verdictIdentity:
		return fmt.Errorf("refused by the owner: %w", transfer.ErrIdentity)
	case verdictUnproven:
		return fmt.Errorf("refused by the owner: this node's certificate does not name it, or the owner does not allow it: see security.certificate here, security.peers there: %w", identity.ErrRefused)
	case verdictMemory:
		return fmt.Errorf("refused by the owner: %w: its log says why", errDevice)
	default:
		return fmt.Errorf("verdict %d: %w", uint32(v), errGarbage)
	}
}

// keeps reports whether the connection is good for more after the verdict.
func (v verdict) keeps() bool {
	return v == verdictHeld || v == verdictStale || v == verdictRange || v == verdictMemory
}

// header begins every frame.
type header struct {
	kind    kind
	owner   id.Incarnation
	request uint64
	length  uint32 // bytes that follow
	aux     uint32 // copies of a read, the verdict of a verdict, else 0
}

func appendHeader(b []byte, h header) []byte {
	b = append(b, magic...)
	b = append(b, version, byte(h.kind), 0, 0, 0)
	b = binary.BigEndian.AppendUint64(b, uint64(h.owner))
	b = binary.BigEndian.AppendUint64(b, h.request)
	b = binary.BigEndian.AppendUint32(b, h.length)
	return binary.BigEndian.AppendUint32(b, h.aux)
}

// parseHeader takes the first [headerBytes] of a frame.
func parseHeader(b []byte) (header, error) {
	if len(b) != headerBytes {
		return header{}, fmt.Errorf("header of %d bytes: %w", len(b), errGarbage)
	}
	if string(b[:len(magic)]) != magic {
		return header{}, fmt.Errorf("magic %x: %w", b[:len(magic)], errGarbage)
	}
	if b[3] != version {
		return header{}, fmt.Errorf("protocol version %d, want %d: %w", b[3], version, errGarbage)
	}
	if b[5] != 0 || b[6] != 0 || b[7] != 0 {
		return header{}, fmt.Errorf("reserved bytes %x: %w", b[5:8], errGarbage)
	}
	return header{
		kind:    kind(b[4]),
		owner:   id.Incarnation(binary.BigEndian.Uint64(b[8:])),
		request: binary.BigEndian.Uint64(b[16:]),
		length:  binary.BigEndian.Uint32(b[24:]),
		aux:     binary.BigEndian.Uint32(b[28:]),
	}, nil
}

// hello is what a reader says first: whom it wants, and who it is.
type hello struct {
	owner  id.Life
	reader id.Life
}

func (h hello) encode() []byte {
	body := appendName(nil, h.owner.Node)
	body = appendName(body, h.reader.Node)
	body = binary.BigEndian.AppendUint64(body, uint64(h.reader.Incarnation))
	b := appendHeader(nil, header{kind: kindHello, owner: h.owner.Incarnation, length: uint32(len(body))})
	return append(b, body...)
}

func parseHello(head header, body []byte) (hello, error) {
	if head.aux != 0 || head.request != 0 {
		return hello{}, fmt.Errorf("hello with fields of a request: %w", errGarbage)
	}
	owner, rest, err := cutName(body)
	if err != nil {
		return hello{}, fmt.Errorf("owner of a hello: %w", err)
	}
	reader, rest, err := cutName(rest)
	if err != nil {
		return hello{}, fmt.Errorf("reader of a hello: %w", err)
	}
	if len(rest) != 8 {
		return hello{}, fmt.Errorf("hello ends with %d bytes, want 8: %w", len(rest), errGarbage)
	}
	return hello{
		owner:  id.Life{Node: owner, Incarnation: head.owner},
		reader: id.Life{Node: reader, Incarnation: id.Incarnation(binary.BigEndian.Uint64(rest))},
	}, nil
}

// welcome is the owner's answer: who it is, and its bounds of one request.
type welcome struct {
	owner    id.Life
	bytes    uint32
	copies   uint32
	seals    uint32
	inFlight uint32
}

const maxWelcomeBody = 1 + id.MaxNode + 16

func appendWelcome(b []byte, w welcome) []byte {
	body := appendName(nil, w.owner.Node)
	for _, n := range [...]uint32{w.bytes, w.copies, w.seals, w.inFlight} {
		body = binary.BigEndian.AppendUint32(body, n)
	}
	b = appendHeader(b, header{kind: kindWelcome, owner: w.owner.Incarnation, length: uint32(len(body))})
	return append(b, body...)
}

func parseWelcome(head header, body []byte) (welcome, error) {
	if head.aux != 0 || head.request != 0 {
		return welcome{}, fmt.Errorf("welcome with fields of a request: %w", errGarbage)
	}
	owner, rest, err := cutName(body)
	if err != nil {
		return welcome{}, fmt.Errorf("owner of a welcome: %w", err)
	}
	if len(rest) != 16 {
		return welcome{}, fmt.Errorf("welcome ends with %d bytes, want 16: %w", len(rest), errGarbage)
	}
	w := welcome{
		owner:    id.Life{Node: owner, Incarnation: head.owner},
		bytes:    binary.BigEndian.Uint32(rest),
		copies:   binary.BigEndian.Uint32(rest[4:]),
		seals:    binary.BigEndian.Uint32(rest[8:]),
		inFlight: binary.BigEndian.Uint32(rest[12:]),
	}
	if w.bytes == 0 || w.copies == 0 || w.seals == 0 || w.inFlight == 0 {
		return welcome{}, fmt.Errorf("welcome with a bound of 0: %w", errGarbage)
	}
	return w, nil
}

func appendName(b []byte, n id.Node) []byte {
	b = append(b, byte(len(n)))
	return append(b, n...)
}

func cutName(b []byte) (id.Node, []byte, error) {
	if len(b) == 0 || len(b) < 1+int(b[0]) {
		return "", nil, fmt.Errorf("name is cut off: %w", errGarbage)
	}
	n := id.Node(b[1 : 1+int(b[0])])
	if err := n.Validate(); err != nil {
		return "", nil, fmt.Errorf("%w: %w", errGarbage, err)
	}
	return n, b[1+int(b[0]):], nil
}

// request asks for the bytes of copies under seals. Copy.Local stays with the
// reader.
type request struct {
	id     uint64
	seals  []transfer.Seal
	copies []transfer.Copy
}

func appendRequest(b []byte, owner id.Incarnation, r request) []byte {
	body := 4 + len(r.seals)*sealBytes + len(r.copies)*copyBytes
	b = appendHeader(b, header{kind: kindRead, owner: owner, request: r.id, length: uint32(body), aux: uint32(len(r.copies))})
	b = binary.BigEndian.AppendUint32(b, uint32(len(r.seals)))
	for _, s := range r.seals {
		b = binary.BigEndian.AppendUint32(b, s.Index)
		b = binary.BigEndian.AppendUint64(b, s.Value)
	}
	for _, c := range r.copies {
		b = binary.BigEndian.AppendUint32(b, uint32(c.Rank))
		b = binary.BigEndian.AppendUint32(b, uint32(c.Bytes))
		b = binary.BigEndian.AppendUint64(b, uint64(c.Remote))
	}
	return b
}

// parse fills r, whose slices it uses again. It checks the form; whether the
// copies lie in a region is for [request.within].
func (r *request) parse(head header, body []byte) error {
	if len(body) < 4 {
		return fmt.Errorf("read of %d bytes: %w", len(body), errGarbage)
	}
	seals, copies := binary.BigEndian.Uint32(body), head.aux
	if seals == 0 || seals > maxSeals || copies > maxCopies {
		return fmt.Errorf("read with %d seals and %d copies: %w", seals, copies, errGarbage)
	}
	if want := 4 + int(seals)*sealBytes + int(copies)*copyBytes; len(body) != want {
		return fmt.Errorf("read of %d bytes, want %d: %w", len(body), want, errGarbage)
	}
	r.id, r.seals, r.copies = head.request, r.seals[:0], r.copies[:0]
	b := body[4:]
	for ; seals > 0; seals-- {
		r.seals = append(r.seals, transfer.Seal{Index: binary.BigEndian.Uint32(b), Value: binary.BigEndian.Uint64(b[4:])})
		b = b[sealBytes:]
	}
	var total uint64
	for ; copies > 0; copies-- {
		rank, n, at := binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint64(b[8:])
		if rank >= id.MaxRanks || n == 0 {
			return fmt.Errorf("copy of %d bytes of rank %d: %w", n, rank, errGarbage)
		}
		total += uint64(n)
		// An offset that needs 64 bits becomes negative here, and is refused as out of range.
		r.copies = append(r.copies, transfer.Copy{Rank: id.Rank(rank), Remote: int64(at), Bytes: int64(n)})
		b = b[copyBytes:]
	}
	if total > maxFrameBytes {
		return fmt.Errorf("read for %d bytes, at most %d: %w", total, maxFrameBytes, errGarbage)
	}
	return nil
}

// within reports whether every seal is a word and every copy lies in its arena.
func (r *request) within(arenas map[id.Rank]memory.Arena) bool {
	for _, s := range r.seals {
		if s.Index >= memory.Words {
			return false
		}
	}
	for _, c := range r.copies {
		a := arenas[c.Rank]
		if a == nil || !transfer.Inside(c.Remote, c.Bytes, a.Size()) {
			return false
		}
	}
	return true
}

// bytes is what the answer carries.
func (r *request) bytes() int64 { return transfer.Bytes(r.copies) }
