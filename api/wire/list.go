package wire

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"

	"github.com/kvferry/kvferry/internal/page"
)

// A page list keeps the order of the tokens. It is a tag, the number of pages
// as a uvarint, and the pages in one of two codes, whichever is shorter:
//
//   - tagRuns: runs of step +1 or -1 (allocators that free in reverse order hand
//     out descending runs). Each is two uvarints: the zigzag of the first page's
//     distance to the last page of the run before (0 at the start), and
//     (pages-1)<<1, plus 1 if it descends.
//   - tagPacked: a byte w in 1..32, then w bits a page, the lowest bit first.
const (
	tagRuns   = 1
	tagPacked = 2
)

// appendList appends the code of p.
func appendList(dst []byte, p []page.Index) []byte {
	width := 1
	for _, v := range p {
		width = max(width, bits.Len32(uint32(v)))
	}
	start := len(dst)
	packed := 1 + uvarintBytes(uint64(len(p))) + 1 + (len(p)*width+7)/8
	dst = append(dst, tagRuns)
	dst = binary.AppendUvarint(dst, uint64(len(p)))
	last := int64(0)
	for i := 0; i < len(p); {
		n, step := run(p[i:])
		dst = binary.AppendUvarint(dst, zigzag(int64(p[i])-last))
		code := uint64(n-1) << 1
		if step < 0 {
			code |= 1
		}
		dst = binary.AppendUvarint(dst, code)
		last = int64(p[i+n-1])
		i += n
		if len(dst)-start > packed {
			return appendPacked(dst[:start], p, width)
		}
	}
	return dst
}

// run returns how many pages p begins with that follow each other, and whether
// they go up or down.
func run(p []page.Index) (n, step int) {
	if len(p) < 2 {
		return len(p), 1
	}
	d := p[1] - p[0]
	if d != 1 && d != math.MaxUint32 {
		return 1, 1
	}
	for n = 2; n < len(p) && p[n]-p[n-1] == d; n++ {
	}
	if d == 1 {
		return n, 1
	}
	return n, -1
}

func appendPacked(dst []byte, p []page.Index, width int) []byte {
	dst = append(dst, tagPacked)
	dst = binary.AppendUvarint(dst, uint64(len(p)))
	dst = append(dst, byte(width))
	var held uint64
	var n int // bits in held
	for _, v := range p {
		held |= uint64(v) << n
		for n += width; n >= 8; n -= 8 {
			dst = append(dst, byte(held))
			held >>= 8
		}
	}
	if n > 0 {
		dst = append(dst, byte(held))
	}
	return dst
}

// decodeList decodes what appendList made. A list of more than most pages is
// refused before it is unfolded.
func decodeList(b []byte, most int) ([]page.Index, error) {
	if len(b) == 0 {
		return nil, fmt.Errorf("page list is empty: %w", ErrMessage)
	}
	tag := b[0]
	n, b, ok := uvarint(b[1:])
	if !ok {
		return nil, fmt.Errorf("page list is cut short: %w", ErrMessage)
	}
	if n > uint64(most) {
		return nil, fmt.Errorf("page list has %d pages, at most %d are allowed: %w", n, most, ErrMessage)
	}
	switch tag {
	case tagRuns:
		return decodeRuns(b, int(n))
	case tagPacked:
		return decodePacked(b, int(n))
	default:
		return nil, fmt.Errorf("page list has tag %d: %w", tag, ErrMessage)
	}
}

func decodeRuns(b []byte, n int) ([]page.Index, error) {
	p := make([]page.Index, 0, n)
	last := int64(0)
	for len(p) < n {
		away, rest, ok := uvarint(b)
		if !ok {
			return nil, fmt.Errorf("page list is cut short: %w", ErrMessage)
		}
		code, rest, ok := uvarint(rest)
		if !ok {
			return nil, fmt.Errorf("page list is cut short: %w", ErrMessage)
		}
		b = rest
		more, step := code>>1, int64(1)
		if code&1 == 1 {
			step = -1
		}
		if more >= uint64(n-len(p)) {
			return nil, fmt.Errorf("page list has a run over its end: %w", ErrMessage)
		}
		// What overflows becomes negative, and is refused.
		first := last + unzigzag(away)
		last = first + step*int64(more)
		if first < 0 || last < 0 || first > math.MaxUint32 || last > math.MaxUint32 {
			return nil, fmt.Errorf("page list has a page out of range: %w", ErrMessage)
		}
		for i := int64(0); i <= int64(more); i++ {
			p = append(p, page.Index(first+step*i))
		}
	}
	if len(b) != 0 {
		return nil, fmt.Errorf("page list has %d bytes after its end: %w", len(b), ErrMessage)
	}
	return p, nil
}

func decodePacked(b []byte, n int) ([]page.Index, error) {
	if len(b) == 0 {
		return nil, fmt.Errorf("page list is cut short: %w", ErrMessage)
	}
	width := int(b[0])
	b = b[1:]
	if width < 1 || width > 32 || len(b) != (n*width+7)/8 {
		return nil, fmt.Errorf("page list has %d bytes for %d pages of %d bits: %w", len(b), n, width, ErrMessage)
	}
	p := make([]page.Index, n)
	mask := uint64(1)<<width - 1
	var held uint64
	var have int // bits in held
	for i := range p {
		for have < width {
			held |= uint64(b[0]) << have
			b = b[1:]
			have += 8
		}
		p[i] = page.Index(held & mask)
		held >>= width
		have -= width
	}
	return p, nil
}

func zigzag(d int64) uint64   { return uint64(d<<1) ^ uint64(d>>63) }
func unzigzag(u uint64) int64 { return int64(u>>1) ^ -int64(u&1) }

func uvarint(b []byte) (v uint64, rest []byte, ok bool) {
	v, n := binary.Uvarint(b)
	if n <= 0 {
		return 0, nil, false
	}
	return v, b[n:], true
}

func uvarintBytes(v uint64) int { return (bits.Len64(v|1) + 6) / 7 }
