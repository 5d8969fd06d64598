package replay

import (
	"encoding/binary"
	"hash/fnv"

	"github.com/kvferry/kvferry/internal/id"
)

// Odd constants that spread small counters over 64 bits.
const (
	stepPlane = 0x9e3779b97f4a7c15
	stepToken = 0xd6e8feb86659fd93
	stepWord  = 0xa0761d6478bd642f
)

// stream is one label of a request. It begins as a copy of main's first tokens,
// and then grows by itself.
type stream struct {
	label  id.Label
	forked int // tokens that are main's
}

// pattern is the KV of one label on one rank: a function of request, label,
// and rank in seed, of layer, K or V, and head in plane, of token, and of
// element. Every byte depends on each of them.
type pattern struct{ seed uint64 }

func newPattern(r id.Request, l id.Label, rank id.Rank) pattern {
	h := fnv.New64a()
	var length [8]byte
	// Lengths in front, so that no two pairs of names spell the same bytes.
	binary.LittleEndian.PutUint64(length[:], uint64(len(r)))
	_, _ = h.Write(length[:])
	_, _ = h.Write([]byte(r))
	_, _ = h.Write([]byte(l))
	return pattern{seed: mix(mix(h.Sum64()) + uint64(rank))}
}

// plane is what the vectors of one layer, K or V, and head share.
type plane struct{ seed uint64 }

// plane numbers (layer, kv, head) without gaps, heads being the layout's.
func (p pattern) plane(layer, kv, head, heads int) plane {
	n := (uint64(layer)*2+uint64(kv))*uint64(heads) + uint64(head)
	return plane{seed: mix(p.seed + n*stepPlane)}
}

// fill writes the vector of a token: the elements of one head.
func (p plane) fill(dst []byte, token int) {
	x := mix(p.seed + uint64(token)*stepToken)
	for len(dst) >= 8 {
		binary.LittleEndian.PutUint64(dst, mix(x))
		dst = dst[8:]
		x += stepWord
	}
	if len(dst) > 0 {
		var word [8]byte
		binary.LittleEndian.PutUint64(word[:], mix(x))
		copy(dst, word[:])
	}
}

// wrong counts the bytes of src that are not what fill writes.
func (p plane) wrong(src []byte, token int) int64 {
	x := mix(p.seed + uint64(token)*stepToken)
	rest := src
	var differ uint64
	for len(rest) >= 8 {
		differ |= binary.LittleEndian.Uint64(rest) ^ mix(x)
		rest = rest[8:]
		x += stepWord
	}
	if len(rest) > 0 {
		var have, want [8]byte
		binary.LittleEndian.PutUint64(want[:], mix(x))
		copy(want[len(rest):], have[len(rest):])
		copy(have[:], rest)
		differ |= binary.LittleEndian.Uint64(have[:]) ^ binary.LittleEndian.Uint64(want[:])
	}
	if differ == 0 {
		return 0
	}
	n, _, _ := p.differences(src, token)
	return max(n, 1) // it differed, even if it no longer does
}

// differences counts the wrong bytes, slowly, and tells the first one: its
// index in src and what it should be.
func (p plane) differences(src []byte, token int) (n int64, first int, want byte) {
	good := make([]byte, len(src))
	p.fill(good, token)
	for i := range src {
		if src[i] != good[i] {
			if n == 0 {
				first, want = i, good[i]
			}
			n++
		}
	}
	return n, first, want
}

// mix is a bijection of 64 bits after which every bit depends on every other:
// two rounds of multiply, xor, and shift.
func mix(x uint64) uint64 {
	x ^= x >> 32
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 29
	x *= 0x94d049bb133111eb
	return x ^ x>>32
}
