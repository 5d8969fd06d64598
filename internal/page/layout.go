package page

import (
	"fmt"
	"math/bits"
)

// Bounds of a layout. They keep every product but that of the whole arena
// within 63 bits; Validate checks that one.
const (
	MaxLayers   = 1024
	MaxPages    = 1 << 24
	MaxPageSize = 4096
	MaxHeads    = 1024
	MaxHeadDim  = 4096
)

// Order is the order of the dimensions inside a layer-page.
type Order uint8

const (
	// NHD is [layer, page, K or V, slot, head, element].
	NHD Order = iota + 1
	// HND is [layer, page, K or V, head, slot, element].
	HND
)

// String is the name that configurations and ParseOrder know.
func (o Order) String() string {
	switch o {
	case NHD:
		return "NHD"
	case HND:
		return "HND"
	}
	return fmt.Sprintf("order(%d)", uint8(o))
}

// ParseOrder is the inverse of [Order.String].
func ParseOrder(s string) (Order, error) {
	for o := NHD; o <= HND; o++ {
		if s == o.String() {
			return o, nil
		}
	}
	return 0, fmt.Errorf("order %.40q is not NHD or HND: %w", s, ErrInvalid)
}

// DType is the type of one element.
type DType uint8

// Element types; the comment gives the bytes of one.
const (
	BF16    DType = iota + 1 // 2
	FP16                     // 2
	FP32                     // 4
	FP8E4M3                  // 1
	FP8E5M2                  // 1
)

// String is the name that configurations and ParseDType know.
func (d DType) String() string {
	switch d {
	case BF16:
		return "bf16"
	case FP16:
		return "fp16"
	case FP32:
		return "fp32"
	case FP8E4M3:
		return "fp8_e4m3"
	case FP8E5M2:
		return "fp8_e5m2"
	}
	return fmt.Sprintf("dtype(%d)", uint8(d))
}

// ParseDType is the inverse of [DType.String].
func ParseDType(s string) (DType, error) {
	for d := BF16; d <= FP8E5M2; d++ {
		if s == d.String() {
			return d, nil
		}
	}
	return 0, fmt.Errorf("dtype %.40q is not bf16, fp16, fp32, fp8_e4m3 or fp8_e5m2: %w", s, ErrInvalid)
}

// Bytes is the size of one element, 0 of an unknown type.
func (d DType) Bytes() int64 {
	switch d {
	case BF16, FP16:
		return 2
	case FP32:
		return 4
	case FP8E4M3, FP8E5M2:
		return 1
	}
	return 0
}

// Layout is how one rank's arena lies in memory. All fields are required. The
// methods other than Validate hold for valid layouts only.
type Layout struct {
	Order    Order
	DType    DType
	Layers   int
	Pages    int // of the arena, the sink included
	PageSize int // token slots of a page
	Heads    int // KV heads on this rank
	HeadDim  int // elements of a head
}

// Validate checks every field against its bounds and the whole arena against
// 63 bits. The error names the field and wraps [ErrInvalid].
func (l Layout) Validate() error {
	if l.Order != NHD && l.Order != HND {
		return fmt.Errorf("order %d is unknown: %w", uint8(l.Order), ErrInvalid)
	}
	if l.DType.Bytes() == 0 {
		return fmt.Errorf("dtype %d is unknown: %w", uint8(l.DType), ErrInvalid)
	}
	for _, f := range [...]struct {
		name       string
		value, max int
	}{
		{"layers", l.Layers, MaxLayers},
		{"pages", l.Pages, MaxPages},
		{"page_size", l.PageSize, MaxPageSize},
		{"heads", l.Heads, MaxHeads},
		{"head_dim", l.HeadDim, MaxHeadDim},
	} {
		if f.value < 1 || f.value > f.max {
			return fmt.Errorf("%s %d is not in 1..%d: %w", f.name, f.value, f.max, ErrInvalid)
		}
	}
	over, bytes := bits.Mul64(uint64(l.LayerBytes()), uint64(l.Layers))
	if over != 0 || bytes > 1<<63-1 {
		return fmt.Errorf("%d layers of %d bytes do not fit 63 bits: %w", l.Layers, l.LayerBytes(), ErrInvalid)
	}
	return nil
}

// LayerPageBytes is the size of one page in one layer, K and V: the largest
// piece of a page that is contiguous.
func (l Layout) LayerPageBytes() int64 {
	return 2 * int64(l.PageSize) * int64(l.Heads) * int64(l.HeadDim) * l.DType.Bytes()
}

// LayerBytes is the size of one layer, all its pages.
func (l Layout) LayerBytes() int64 { return int64(l.Pages) * l.LayerPageBytes() }

// PageBytes is the size of one page over all layers.
func (l Layout) PageBytes() int64 { return int64(l.Layers) * l.LayerPageBytes() }

// TokenBytes is the size of one token over all layers, K and V.
func (l Layout) TokenBytes() int64 {
	return 2 * int64(l.Layers) * int64(l.Heads) * int64(l.HeadDim) * l.DType.Bytes()
}

// Bytes is the size of the arena.
func (l Layout) Bytes() int64 { return int64(l.Layers) * l.LayerBytes() }

// Strides are the distances in bytes between neighbours in each dimension.
type Strides struct {
	Layer   int64 // contains the page count of the arena
	Page    int64
	KV      int64 // from a page's K to its V
	Head    int64
	Slot    int64
	Element int64
}

// Strides depend on the order; no padding lies between any two neighbours.
func (l Layout) Strides() Strides {
	s := Strides{
		Layer:   l.LayerBytes(),
		Page:    l.LayerPageBytes(),
		KV:      l.LayerPageBytes() / 2,
		Element: l.DType.Bytes(),
	}
	vector := int64(l.HeadDim) * s.Element
	if l.Order == HND {
		s.Head, s.Slot = int64(l.PageSize)*vector, vector
	} else {
		s.Head, s.Slot = vector, int64(l.Heads)*vector
	}
	return s
}

// Chunks are the contiguous pieces of a slot range of one layer-page: Count
// pieces of Bytes bytes, Stride bytes from one start to the next.
type Chunks struct {
	First  int64 // offset of the first piece from the start of the arena
	Stride int64
	Bytes  int64
	Count  int
}

// At is the offset of piece i from the start of the arena.
func (c Chunks) At(i int) int64 { return c.First + int64(i)*c.Stride }

// Chunks locates the slots [t0,t1) of a page in a layer: one piece for K and
// one for V in NHD, one a head for each of them in HND, and a single one for
// the whole page. Offsets ascend. Arguments out of range are our bug and panic.
func (l Layout) Chunks(layer int, p Index, t0, t1 int) Chunks {
	if layer < 0 || layer >= l.Layers || int64(p) >= int64(l.Pages) || t0 < 0 || t0 >= t1 || t1 > l.PageSize {
		panic(fmt.Sprintf("page: chunks of layer %d, page %d, slots %d to %d outside of %+v", layer, p, t0, t1, l))
	}
	s := l.Strides()
	c := Chunks{First: int64(layer)*s.Layer + int64(p)*s.Page}
	if t0 == 0 && t1 == l.PageSize {
		c.Stride, c.Bytes, c.Count = s.Page, s.Page, 1
		return c
	}
	c.First += int64(t0) * s.Slot
	c.Bytes = int64(t1-t0) * s.Slot
	if l.Order == HND {
		c.Stride, c.Count = s.Head, 2*l.Heads // V's heads follow K's at the same distance
	} else {
		c.Stride, c.Count = s.KV, 2
	}
	return c
}
