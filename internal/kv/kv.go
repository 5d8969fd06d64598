// Package kv reads, writes, copies and converts the bytes of a KV cache in
// host memory: one rank's arena, or the pages of the host tier. Of memory that
// no processor reaches it says where the bytes lie ([Moves], [Cells], [Summed]).
//
// A [Cache] is a layout and the bytes that lie in it. Tokens are written and
// read at slots ([Cache.Write], [Cache.Read]), in any element type; pages are
// copied up to a token border, within a cache or between two ([Copy]);
// [Convert] turns elements of one type into another. A layer can also be used in place
// ([Cache.Layer]).
//
// The package knows no stream and no owner: who may touch which page, and
// when, is decided elsewhere. It holds no lock and starts nothing. Calls may
// run at the same time as long as none writes what another one reads or
// writes.
//
// Whatever is refused is refused before a byte is written; the error wraps
// [ErrInvalid] or [ErrRange].
package kv

import (
	"errors"
	"fmt"

	"github.com/kvferry/kvferry/internal/page"
)

var (
	// ErrInvalid is wrapped when arguments do not fit each other: layouts that
	// differ, a buffer that is too short, an unknown element type.
	ErrInvalid = errors.New("invalid argument")
	// ErrRange is wrapped when a layer, a page, a slot or a token is not there.
	ErrRange = errors.New("out of range")
)

// Cache is the KV of one rank in memory. It is a value: copies of it share
// their bytes. The methods hold for caches made by [NewCache].
type Cache struct {
	Layout page.Layout
	Bytes  []byte // Layout.Bytes() of them
}

// NewCache lays l over the first l.Bytes() bytes of b, which stay the caller's
// and as they are.
func NewCache(l page.Layout, b []byte) (Cache, error) {
	if err := l.Validate(); err != nil {
		return Cache{}, fmt.Errorf("lay out a cache: %w: %w", err, ErrInvalid)
	}
	n := l.Bytes()
	if int64(len(b)) < n {
		return Cache{}, fmt.Errorf("lay out a cache: %d bytes of memory, want %d: %w", len(b), n, ErrInvalid)
	}
	return Cache{Layout: l, Bytes: b[:n:n]}, nil
}

// View is one layer of a cache in place, all its pages.
type View struct {
	Bytes   []byte // the cache's own, not a copy
	DType   page.DType
	Order   page.Order
	Shape   [5]int   // NHD: page, K or V, slot, head, element; HND: head before slot
	Strides [5]int64 // in bytes, in the order of Shape
}

// Layer is a view of one layer.
func (c Cache) Layer(layer int) (View, error) {
	if err := checkLayer(c.Layout, layer); err != nil {
		return View{}, fmt.Errorf("view: %w", err)
	}
	l, s := c.Layout, c.Layout.Strides()
	from, to := int64(layer)*s.Layer, int64(layer+1)*s.Layer
	v := View{
		Bytes:   c.Bytes[from:to:to],
		DType:   l.DType,
		Order:   l.Order,
		Shape:   [5]int{l.Pages, 2, l.PageSize, l.Heads, l.HeadDim},
		Strides: [5]int64{s.Page, s.KV, s.Slot, s.Head, s.Element},
	}
	if l.Order == page.HND {
		v.Shape[2], v.Shape[3] = v.Shape[3], v.Shape[2]
		v.Strides[2], v.Strides[3] = v.Strides[3], v.Strides[2]
	}
	return v, nil
}

func checkLayer(l page.Layout, layer int) error {
	if layer < 0 || layer >= l.Layers {
		return fmt.Errorf("layer %d is not in 0..%d: %w", layer, l.Layers-1, ErrRange)
	}
	return nil
}

func checkPage(l page.Layout, p page.Index) error {
	if int64(p) >= int64(l.Pages) {
		return fmt.Errorf("page %d is not in 0..%d: %w", p, l.Pages-1, ErrRange)
	}
	return nil
}
