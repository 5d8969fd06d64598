package wire

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/kvferry/kvferry/internal/id"
)

// form says what a msgpack value must look like.
type form struct {
	is       shape
	max      uint64 // number: its value; text and blob: bytes; list: elements
	min      uint64 // the same
	of       []form // list: the one element; record: the fields
	optional bool   // may be nil
}

type shape uint8

const (
	number shape = iota + 1 // unsigned
	text
	blob
	list
	record // an array of fields; further ones are skipped
)

//nolint:gochecknoglobals // values that nobody assigns to
var (
	u8  = form{is: number, max: math.MaxUint8}
	u32 = form{is: number, max: math.MaxUint32}
	u64 = form{is: number, max: math.MaxUint64}
	raw = form{is: blob, max: math.MaxUint32}

	refForm = form{is: record, of: []form{
		u8,                           // label
		u64,                          // rank mask
		u8,                           // list
		{is: number, max: maxTokens}, // prefix
		{is: number, max: maxTokens}, // start
		{is: number, max: maxTokens}, // tokens
		{is: number, max: lastState}, // state
	}}
	announcementForm = form{is: record, of: []form{
		u32,                          // sequence - floor
		u32,                          // publication - floor
		{is: blob, min: 16, max: 16}, // request
		u32,                          // seal
		u32,                          // content epoch
		u32,                          // ttl
		u8,                           // flags
		u64,                          // digest
		u32,                          // pages
		labelsForm, refsForm, listsForm,
	}}
	labelsForm = form{is: list, max: id.MaxLabels, of: []form{{is: text, min: 1, max: id.MaxLabel}}}
	refsForm   = form{is: list, max: maxRefs, of: []form{refForm}}
	listsForm  = form{is: list, max: maxLists, of: []form{raw}, optional: true}
	tableForm  = form{is: record, of: []form{labelsForm, refsForm, listsForm}}
	batchForm  = form{is: list, max: math.MaxUint32, of: []form{{is: record, of: []form{
		u64, u64, u64, // owner, incarnation, floor
		{is: list, max: math.MaxUint32, of: []form{announcementForm}},
		raw, // releases
	}}}}
	checkForm     = form{is: record, of: []form{u64, u64, u64, u64, u64, u32, u64}}
	nackForm      = form{is: record, of: []form{u64, u64, u64, raw}}
	byeForm       = form{is: record, of: []form{u64, u64, u64}}
	beaconForm    = form{is: record, of: []form{u64, u64, {is: number, min: 1, max: math.MaxUint64}, {is: number, min: 1, max: math.MaxUint32}}}
	echoForm      = form{is: record, of: []form{u64, u64, u64, u64}}
	stateForm     = form{is: list, max: MaxChecks, of: []form{checkForm}}
	referenceForm = form{is: record, of: []form{
		{is: text, min: 1, max: id.MaxNode},
		u64, // incarnation
		u64, // sequence
		{is: text, min: 1, max: id.MaxRequest},
		u32, // seal
		{is: blob, max: macBytes},
	}}
)

// check walks b, which must be one value of form f and nothing after it. It
// allocates nothing unless it fails, and does at most one step a byte.
func (f *form) check(b []byte) error {
	rest, err := f.walk(b)
	if err != nil {
		return err
	}
	if len(rest) != 0 {
		return fmt.Errorf("%d bytes after the end: %w", len(rest), ErrMessage)
	}
	return nil
}

// walk is as deep as the forms are, whatever b says.
func (f *form) walk(b []byte) (rest []byte, err error) {
	h, b, err := head(b)
	if err != nil {
		return nil, err
	}
	if f.optional && h.is == null {
		return b, nil
	}
	want := f.is
	if want == record {
		want = list
	}
	if h.is != want {
		return nil, fmt.Errorf("value of another type: %w", ErrMessage)
	}
	if f.is == record {
		if h.n < uint64(len(f.of)) {
			return nil, fmt.Errorf("record with %d of %d fields: %w", h.n, len(f.of), ErrMessage)
		}
		for i := range f.of {
			if b, err = f.of[i].walk(b); err != nil {
				return nil, err
			}
		}
		return skip(b, h.n-uint64(len(f.of)), maxDepth)
	}
	if h.n < f.min || h.n > f.max {
		return nil, fmt.Errorf("%d is not in %d..%d: %w", h.n, f.min, f.max, ErrMessage)
	}
	if f.is == text || f.is == blob {
		return b[h.n:], nil
	}
	if f.is == list {
		for range h.n {
			if b, err = f.of[0].walk(b); err != nil {
				return nil, err
			}
		}
	}
	return b, nil
}

// Shapes that only skip meets.
const (
	null  shape = iota + 100
	other       // a value of a fixed size, n bytes
	dict
)

// header is how a msgpack value begins. n is the number itself, the bytes that
// follow (there are so many), or the elements.
type header struct {
	is shape
	n  uint64
}

// head reads a header.
func head(b []byte) (h header, rest []byte, err error) {
	if len(b) == 0 {
		return h, nil, errShort()
	}
	c := b[0]
	b = b[1:]
	size := 0 // bytes of n
	switch {
	case c <= 0x7f:
		return header{number, uint64(c)}, b, nil
	case c <= 0x8f:
		return header{dict, uint64(c & 0x0f)}, b, nil
	case c <= 0x9f:
		return header{list, uint64(c & 0x0f)}, b, nil
	case c <= 0xbf:
		h = header{text, uint64(c & 0x1f)}
	case c == 0xc0:
		return header{is: null}, b, nil
	case c == 0xc2 || c == 0xc3 || c >= 0xe0: // bool, negative number
		h = header{other, 0}
	case c >= 0xc4 && c <= 0xc6:
		h.is, size = blob, 1<<(c-0xc4)
	case c >= 0xc7 && c <= 0xc9: // extension: length, then a type
		h.is, size = other, 1<<(c-0xc7)
	case c == 0xca || c == 0xcb: // float
		h = header{other, 4 << (c - 0xca)}
	case c >= 0xcc && c <= 0xcf:
		h.is, size = number, 1<<(c-0xcc)
	case c >= 0xd0 && c <= 0xd3: // signed
		h = header{other, 1 << (c - 0xd0)}
	case c >= 0xd4 && c <= 0xd8: // extension of a fixed size
		h = header{other, 1 + 1<<(c-0xd4)}
	case c >= 0xd9 && c <= 0xdb:
		h.is, size = text, 1<<(c-0xd9)
	case c == 0xdc || c == 0xdd:
		h.is, size = list, 2<<(c-0xdc)
	case c == 0xde || c == 0xdf:
		h.is, size = dict, 2<<(c-0xde)
	default:
		return h, nil, fmt.Errorf("byte %#x begins no value: %w", c, ErrMessage)
	}
	if len(b) < size {
		return h, nil, errShort()
	}
	switch size {
	case 1:
		h.n = uint64(b[0])
	case 2:
		h.n = uint64(binary.BigEndian.Uint16(b))
	case 4:
		h.n = uint64(binary.BigEndian.Uint32(b))
	case 8:
		h.n = binary.BigEndian.Uint64(b)
	}
	b = b[size:]
	if c >= 0xc7 && c <= 0xc9 {
		h.n++
	}
	if (h.is == text || h.is == blob || h.is == other) && h.n > uint64(len(b)) {
		return h, nil, errShort()
	}
	return h, b, nil
}

// maxDepth is how deep values may nest in fields that we do not know. The codec
// recurses into them, too.
const maxDepth = 16

// skip passes over n values of any kind.
func skip(b []byte, n uint64, depth int) (rest []byte, err error) {
	if n > uint64(len(b)) { // a value takes at least a byte
		return nil, errShort()
	}
	for range n {
		var h header
		if h, b, err = head(b); err != nil {
			return nil, err
		}
		switch h.is {
		case text, blob, other:
			b = b[h.n:]
			continue
		case dict:
			h.n *= 2
		case list:
		default:
			continue
		}
		if depth == 0 {
			return nil, fmt.Errorf("nested too deep: %w", ErrMessage)
		}
		if b, err = skip(b, h.n, depth-1); err != nil {
			return nil, err
		}
	}
	return b, nil
}

func errShort() error { return fmt.Errorf("cut short: %w", ErrMessage) }
