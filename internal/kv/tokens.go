package kv

import (
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/internal/page"
)

// Write stores token i of k and of v at slot at[i] of one layer. Both are
// contiguous, [token, head, element] of type from, and are converted to the
// type of the cache as [Convert] does; tokens beyond len(at) are ignored. Of a
// slot that is named twice the later token stays. k and v must not share memory
// with the cache.
func (c Cache) Write(layer int, at []page.Slot, k, v []byte, from page.DType) error {
	if err := check(c.Layout, layer, at, from); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	if want := len(at) * row(c.Layout, from); len(k) < want || len(v) < want {
		return fmt.Errorf("write %d tokens of %v: k has %d bytes and v %d, want %d of each: %w", len(at), from, len(k), len(v), want, ErrInvalid)
	}
	each(c.Layout, layer, at, from, func(p piece) {
		convert(c.Bytes[p.k:][:p.bytes], c.Layout.DType, k[p.outside:][:p.outsideBytes], from)
		convert(c.Bytes[p.v:][:p.bytes], c.Layout.DType, v[p.outside:][:p.outsideBytes], from)
	})
	return nil
}

// Read returns copies of what one layer holds at the slots, K and V, each
// contiguous, [token, head, element] of type as.
func (c Cache) Read(layer int, at []page.Slot, as page.DType) (k, v []byte, err error) {
	return c.Append(nil, nil, layer, at, as)
}

// Append is [Cache.Read] behind the bytes that k and v hold, in their memory
// where it has room; with an error they are returned as they were. k and v must
// not share memory with the cache or with each other.
func (c Cache) Append(k, v []byte, layer int, at []page.Slot, as page.DType) ([]byte, []byte, error) {
	if err := check(c.Layout, layer, at, as); err != nil {
		return k, v, fmt.Errorf("read: %w", err)
	}
	n := len(at) * row(c.Layout, as)
	k, v = slices.Grow(k, n)[:len(k)+n], slices.Grow(v, n)[:len(v)+n]
	newK, newV := k[len(k)-n:], v[len(v)-n:]
	each(c.Layout, layer, at, as, func(p piece) {
		convert(newK[p.outside:][:p.outsideBytes], as, c.Bytes[p.k:][:p.bytes], c.Layout.DType)
		convert(newV[p.outside:][:p.outsideBytes], as, c.Bytes[p.v:][:p.bytes], c.Layout.DType)
	})
	return k, v, nil
}

// row is the size of one token's K, or V, of one layer in type t.
func row(l page.Layout, t page.DType) int { return l.Heads * l.HeadDim * int(t.Bytes()) }

// piece is what is contiguous of one token in the cache and outside of it: all
// heads in NHD, one head in HND.
type piece struct {
	k, v, bytes           int64 // in the cache
	outside, outsideBytes int   // in [token, head, element], of K and of V alike
}

// each calls do with the pieces of the tokens at the slots, where type t is
// outside.
func each(l page.Layout, layer int, at []page.Slot, t page.DType, do func(piece)) {
	s := l.Strides()
	count := 1
	if l.Order == page.HND {
		count = l.Heads
	}
	p := piece{
		bytes:        int64(row(l, l.DType) / count),
		outsideBytes: row(l, t) / count,
	}
	for _, slot := range at {
		p.k = int64(layer)*s.Layer + int64(slot.Page)*s.Page + int64(slot.Slot)*s.Slot
		for range count {
			p.v = p.k + s.KV
			do(p)
			p.k += s.Head
			p.outside += p.outsideBytes
		}
	}
}

// check refuses what is not in the cache, and a type nobody knows.
func check(l page.Layout, layer int, at []page.Slot, t page.DType) error {
	if t.Bytes() == 0 {
		return fmt.Errorf("%v is unknown: %w", t, ErrInvalid)
	}
	if err := checkLayer(l, layer); err != nil {
		return err
	}
	for i, slot := range at {
		if err := checkPage(l, slot.Page); err != nil {
			return fmt.Errorf("token %d: %w", i, err)
		}
		if slot.Slot < 0 || int64(slot.Slot) >= int64(l.PageSize) {
			return fmt.Errorf("token %d: slot %d is not in 0..%d: %w", i, slot.Slot, l.PageSize-1, ErrRange)
		}
	}
	return nil
}
