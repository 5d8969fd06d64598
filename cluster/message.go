package cluster

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/kvferry/kvferry/internal/id"
)

// A message between members is a version, a kind, and a body:
//
//	items   (uvarint length, bytes)...
//	ask     nonce, life, its gossip address      "do you list me?"
//	bye     nonce, life, its gossip address      "I leave"
//	answer  nonce, life of who answers, 0 or 1 for listed, newest incarnation of the asker's name
//	ring?   nonce, edition                       "which ring have you? I have this one"
//	ring    nonce, life of who answers, edition, its keys if it is the newer one, why it could not take a newer one
//
// where a life is an incarnation and a name, numbers are 64 bits big endian,
// a string has a uvarint length, and an address is 0, or 4 or 16 with so many
// bytes of IP and two of port. An edition is a generation and the ids of the
// keys, keys are 32 bytes each; of ids and keys a byte says how many. A message
// that is not exactly this is dropped.
//
// The last two travel in envelopes of their own (envelope.go), the others as
// messages of memberlist's; neither is taken from where the other belongs.
const (
	messageVersion = 1

	kindItems      = 1
	kindAsk        = 2
	kindBye        = 3
	kindAnswer     = 4
	kindRingAsk    = 5
	kindRingAnswer = 6

	// maxPacket is the longest that is sent: it fits into an Ethernet frame.
	maxPacket = 1400
	// packBytes is where a message of items is full: with memberlist's headers,
	// the longest label, and encryption it makes a packet of maxPacket.
	packBytes = maxPacket - userHeader - labelHeader - MaxLabel - encryption
	// maxMessage is the longest that is looked at.
	maxMessage = maxPacket

	// What memberlist puts around a message, in bytes. It adds the checksum
	// where it thinks that the receiver knows of it; see [Cluster.tell].
	userHeader, labelHeader, encryption, checksum = 1, 2, 29, 5

	maxTrouble = 200
)

var errMalformed = errors.New("malformed")

type message struct {
	kind    byte
	items   [][]byte
	nonce   uint64
	life    id.Life
	gossip  netip.AddrPort
	listed  bool
	newest  id.Incarnation
	edition edition
	keys    [][]byte
	trouble string
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
	b = appendBool(appendLife(b, l), listed)
	return binary.BigEndian.AppendUint64(b, uint64(newest))
}

func encodeRingAsk(nonce uint64, e edition) []byte {
	b := []byte{messageVersion, kindRingAsk}
	return appendEdition(binary.BigEndian.AppendUint64(b, nonce), e)
}

// encodeRingAnswer is without keys, or with those of the edition.
func encodeRingAnswer(nonce uint64, l id.Life, e edition, keys [][]byte, trouble string) []byte {
	b := []byte{messageVersion, kindRingAnswer}
	b = binary.BigEndian.AppendUint64(b, nonce)
	b = append(appendEdition(appendLife(b, l), e), byte(len(keys)))
	for _, key := range keys {
		b = append(b, key...)
	}
	return appendString(b, printable(trouble))
}

// printable is at most maxTrouble bytes of text in one line.
func printable(s string) string {
	s = strings.Map(func(c rune) rune {
		if unicode.IsControl(c) {
			return ' '
		}
		return c
	}, strings.ToValidUTF8(s, "?"))
	for cut := len(s); len(s) > maxTrouble; {
		_, size := utf8.DecodeLastRuneInString(s[:cut])
		cut -= size
		s = s[:cut]
	}
	return s
}

// decodeMessage's items and keys lie in b.
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
		m.nonce, m.life, m.listed = r.uint64(), r.life(), r.bool()
		m.newest = id.Incarnation(r.uint64())
	case kindRingAsk:
		m.nonce, m.edition = r.uint64(), r.edition()
	case kindRingAnswer:
		m.nonce, m.life, m.edition = r.uint64(), r.life(), r.edition()
		m.keys = r.keys(m.edition)
		m.trouble = r.string(maxTrouble)
		r.bad = r.bad || m.trouble != printable(m.trouble)
	default:
		return message{}, fmt.Errorf("message kind %d: %w", m.kind, errMalformed)
	}
	if r.bad || len(r.b) > 0 {
		return message{}, fmt.Errorf("message kind %d of %d bytes: %w", m.kind, len(b), errMalformed)
	}
	return m, nil
}

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func appendLife(b []byte, l id.Life) []byte {
	return appendString(binary.BigEndian.AppendUint64(b, uint64(l.Incarnation)), string(l.Node))
}

func appendEdition(b []byte, e edition) []byte {
	b = append(binary.BigEndian.AppendUint64(b, e.generation), byte(len(e.ids)))
	for _, k := range e.ids {
		b = append(b, k[:]...)
	}
	return b
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

func (r *reader) bool() bool {
	b := r.byte()
	r.bad = r.bad || b > 1
	return b == 1
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

// edition reads one of a ring that has keys.
func (r *reader) edition() edition {
	e := edition{generation: r.uint64()}
	n := int(r.byte())
	if n == 0 || n > MaxKeys || e.generation > MaxGeneration {
		r.bad = true
	}
	for range n {
		b := r.take(len(KeyID{}))
		if b == nil {
			return edition{}
		}
		k := KeyID(b)
		r.bad = r.bad || slices.Contains(e.ids, k)
		e.ids = append(e.ids, k)
	}
	return e
}

// keys reads none, or those of the edition.
func (r *reader) keys(e edition) (keys [][]byte) {
	n := int(r.byte())
	if n != 0 && n != len(e.ids) {
		r.bad = true
		return nil
	}
	for i := range n {
		key := r.take(KeyBytes)
		if key == nil || IDOf(key) != e.ids[i] {
			r.bad = true
			return nil
		}
		keys = append(keys, key)
	}
	return keys
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
