package cluster

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/kvferry/kvferry/internal/id"
)

// A message between members is a version, a kind, and a body:
//
//	items   (uvarint length, bytes)...
//	ask     nonce, life, its gossip address      "do you list me?"
//	bye     nonce, life, its gossip address      "I leave"
//	answer  nonce, life of who answers, 0 or 1 for listed, newest incarnation of the asker's name
//
// where a life is an incarnation and a name, numbers are 64 bits big endian,
// a string has a uvarint length, and an address is 0, or 4 or 16 with so many
// bytes of IP and two of port. A message that is not exactly this is dropped.
const (
	messageVersion = 1

	kindItems  = 1
	kindAsk    = 2
	kindBye    = 3
	kindAnswer = 4

	// packBytes is where a message of items is full: with memberlist's headers,
	// the longest label, and encryption it still fits into an Ethernet frame.
	packBytes = 1350
	// maxMessage is the longest that is looked at.
	maxMessage = 1400
)

var errMalformed = errors.New("malformed")

type message struct {
	kind   byte
	items  [][]byte
	nonce  uint64
	life   id.Life
	gossip netip.AddrPort
	listed bool
	newest id.Incarnation
}

func checkItem(item []byte) error {
	if len(item) > MaxItem {
		return fmt.Errorf("item of %d bytes, want at most %d: %w", len(item), MaxItem, ErrTooLong)
	}
	if len(item) == 0 {
		return errors.New("item is empty")
	}
	return nil
}

// packed is how many bytes an item takes in a message.
func packed(item []byte) int {
	if len(item) < 0x80 {
		return 1 + len(item)
	}
	return 2 + len(item)
}

// fitting is how many of the items one message of so many bytes holds.
func fitting(items [][]byte, bytes int) (n int) {
	for room := bytes - 2; n < len(items) && packed(items[n]) <= room; n++ {
		room -= packed(items[n])
	}
	return n
}

// pack returns a message of as many items as it holds, at least one, and the
// other items.
func pack(items [][]byte) (message []byte, rest [][]byte) {
	n := fitting(items, packBytes)
	return encodeItems(items[:n]), items[n:]
}

func encodeItems(items [][]byte) []byte {
	size := 2
	for _, item := range items {
		size += packed(item)
	}
	b := append(make([]byte, 0, size), messageVersion, kindItems)
	for _, item := range items {
		b = binary.AppendUvarint(b, uint64(len(item)))
		b = append(b, item...)
	}
	return b
}

// encodeCall is an ask or a bye.
func encodeCall(kind byte, nonce uint64, l id.Life, gossip netip.AddrPort) []byte {
	b := []byte{messageVersion, kind}
	b = binary.BigEndian.AppendUint64(b, nonce)
	return appendAddress(appendLife(b, l), gossip)
}

func encodeAnswer(nonce uint64, l id.Life, listed bool, newest id.Incarnation) []byte {
	b := []byte{messageVersion, kindAnswer}
	b = binary.BigEndian.AppendUint64(b, nonce)
	b = appendLife(b, l)
	if listed {
		b = append(b, 1)
	} else {
		b = append(b, 0)
	}
	return binary.BigEndian.AppendUint64(b, uint64(newest))
}

// decodeMessage's items lie in b.
func decodeMessage(b []byte) (message, error) {
	if len(b) > maxMessage {
		return message{}, fmt.Errorf("message of %d bytes, want at most %d: %w", len(b), maxMessage, errMalformed)
	}
	r := reader{b: b}
	if v := r.byte(); !r.bad && v != messageVersion {
		return message{}, fmt.Errorf("message version %d, want %d: %w", v, messageVersion, errMalformed)
	}
	m := message{kind: r.byte()}
	switch m.kind {
	case kindItems:
		for !r.bad && len(r.b) > 0 {
			item := r.bytes(MaxItem)
			r.bad = r.bad || len(item) == 0
			m.items = append(m.items, item)
		}
		r.bad = r.bad || len(m.items) == 0
	case kindAsk, kindBye:
		m.nonce, m.life, m.gossip = r.uint64(), r.life(), r.address()
		r.bad = r.bad || checkAddress(m.gossip) != nil
	case kindAnswer:
		m.nonce, m.life = r.uint64(), r.life()
		listed := r.byte()
		m.listed = listed == 1
		r.bad = r.bad || listed > 1
		m.newest = id.Incarnation(r.uint64())
	default:
		return message{}, fmt.Errorf("message kind %d: %w", m.kind, errMalformed)
	}
	if r.bad || len(r.b) > 0 {
		return message{}, fmt.Errorf("message kind %d of %d bytes: %w", m.kind, len(b), errMalformed)
	}
	return m, nil
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func appendLife(b []byte, l id.Life) []byte {
	return appendString(binary.BigEndian.AppendUint64(b, uint64(l.Incarnation)), string(l.Node))
}

func appendAddress(b []byte, a netip.AddrPort) []byte {
	if !a.IsValid() {
		return append(b, 0)
	}
	ip := a.Addr().Unmap().AsSlice()
	b = append(append(b, byte(len(ip))), ip...)
	return binary.BigEndian.AppendUint16(b, a.Port())
}

// reader takes hostile bytes apart. After the first thing that does not fit it
// is bad and returns zeros.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) take(n int) []byte {
	if r.bad || n > len(r.b) {
		r.bad = true
		return nil
	}
	b := r.b[:n:n]
	r.b = r.b[n:]
	return b
}

func (r *reader) byte() byte {
	if b := r.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (r *reader) uint64() uint64 {
	if b := r.take(8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

// bytes reads a length, of the shortest spelling, and so many bytes.
func (r *reader) bytes(most int) []byte {
	n, size := binary.Uvarint(r.b)
	if r.bad || size <= 0 || n > uint64(most) || size > 1 && n < 0x80 || size > 2 {
		r.bad = true
		return nil
	}
	r.b = r.b[size:]
	return r.take(int(n))
}

func (r *reader) string(most int) string { return string(r.bytes(most)) }

func (r *reader) life() id.Life {
	l := id.Life{Incarnation: id.Incarnation(r.uint64()), Node: id.Node(r.string(id.MaxNode))}
	if !r.bad && (l.Incarnation == 0 || l.Node.Validate() != nil) {
		r.bad = true
	}
	return l
}

func (r *reader) address() netip.AddrPort {
	n := r.byte()
	if n == 0 {
		return netip.AddrPort{}
	}
	if n != 4 && n != 16 {
		r.bad = true
		return netip.AddrPort{}
	}
	ip, ok := netip.AddrFromSlice(r.take(int(n)))
	port := r.take(2)
	if !ok || port == nil || n == 16 && ip.Is4In6() {
		r.bad = true
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(ip, binary.BigEndian.Uint16(port))
}
