package page_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/page"
)

// worked is the small layout whose addresses the documentation works out.
func worked(order page.Order) page.Layout {
	return page.Layout{Order: order, DType: page.BF16, Layers: 2, Pages: 4, PageSize: 8, Heads: 2, HeadDim: 4}
}

func TestLayoutValidate(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*page.Layout)
		ok     bool
	}{
		"worked":         {func(*page.Layout) {}, true},
		"no order":       {func(l *page.Layout) { l.Order = 0 }, false},
		"unknown order":  {func(l *page.Layout) { l.Order = 3 }, false},
		"no dtype":       {func(l *page.Layout) { l.DType = 0 }, false},
		"unknown dtype":  {func(l *page.Layout) { l.DType = 6 }, false},
		"no layers":      {func(l *page.Layout) { l.Layers = 0 }, false},
		"most layers":    {func(l *page.Layout) { l.Layers = 1024 }, true},
		"layers":         {func(l *page.Layout) { l.Layers = 1025 }, false},
		"no pages":       {func(l *page.Layout) { l.Pages = 0 }, false},
		"most pages":     {func(l *page.Layout) { l.Pages = 1 << 24 }, true},
		"pages":          {func(l *page.Layout) { l.Pages = 1<<24 + 1 }, false},
		"odd page size":  {func(l *page.Layout) { l.PageSize = 17 }, true},
		"page size 1":    {func(l *page.Layout) { l.PageSize = 1 }, true},
		"no page size":   {func(l *page.Layout) { l.PageSize = 0 }, false},
		"most page size": {func(l *page.Layout) { l.PageSize = 4096 }, true},
		"page size":      {func(l *page.Layout) { l.PageSize = 4097 }, false},
		"most heads":     {func(l *page.Layout) { l.Heads = 1024 }, true},
		"heads":          {func(l *page.Layout) { l.Heads = 1025 }, false},
		"negative heads": {func(l *page.Layout) { l.Heads = -1 }, false},
		"most head dim":  {func(l *page.Layout) { l.HeadDim = 4096 }, true},
		"head dim":       {func(l *page.Layout) { l.HeadDim = math.MaxInt }, false},
		"everything at its most": {func(l *page.Layout) {
			*l = page.Layout{Order: page.HND, DType: page.FP32, Layers: 1024, Pages: 1 << 24, PageSize: 4096, Heads: 1024, HeadDim: 4096}
		}, false},
		"2^62 bytes": {func(l *page.Layout) { // K and V, 4 bytes, and 2^10 * 2^24 * 2^12 * 2^10 * 2^3
			*l = page.Layout{Order: page.HND, DType: page.FP32, Layers: 1024, Pages: 1 << 24, PageSize: 4096, Heads: 1024, HeadDim: 8}
		}, true},
		"2^63 bytes": {func(l *page.Layout) {
			*l = page.Layout{Order: page.HND, DType: page.FP32, Layers: 1024, Pages: 1 << 24, PageSize: 4096, Heads: 1024, HeadDim: 16}
		}, false},
		"2^64 bytes": {func(l *page.Layout) {
			*l = page.Layout{Order: page.HND, DType: page.FP32, Layers: 1024, Pages: 1 << 24, PageSize: 4096, Heads: 1024, HeadDim: 32}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			l := worked(page.NHD)
			tt.change(&l)
			err := l.Validate()
			if (err == nil) != tt.ok || err != nil && !errors.Is(err, page.ErrInvalid) {
				t.Errorf("Validate() of %+v = %v, want ok %v", l, err, tt.ok)
			}
			if err == nil && l.Bytes() <= 0 {
				t.Errorf("Bytes() = %d of a valid layout", l.Bytes())
			}
		})
	}
}

func TestNames(t *testing.T) {
	for want, d := range map[string]page.DType{
		"bf16": page.BF16, "fp16": page.FP16, "fp32": page.FP32, "fp8_e4m3": page.FP8E4M3, "fp8_e5m2": page.FP8E5M2,
	} {
		if got := d.String(); got != want {
			t.Errorf("String() = %q, want %q", got, want)
		}
		if got, err := page.ParseDType(want); got != d || err != nil {
			t.Errorf("ParseDType(%q) = %v, %v", want, got, err)
		}
	}
	for want, o := range map[string]page.Order{"NHD": page.NHD, "HND": page.HND} {
		if got := o.String(); got != want {
			t.Errorf("String() = %q, want %q", got, want)
		}
		if got, err := page.ParseOrder(want); got != o || err != nil {
			t.Errorf("ParseOrder(%q) = %v, %v", want, got, err)
		}
	}
	for _, name := range []string{"", "BF16", "int8", "dtype(0)", "dtype(6)"} {
		if got, err := page.ParseDType(name); !errors.Is(err, page.ErrInvalid) {
			t.Errorf("ParseDType(%q) = %v, %v, want ErrInvalid", name, got, err)
		}
	}
	for _, name := range []string{"", "nhd", "order(0)", "order(3)"} {
		if got, err := page.ParseOrder(name); !errors.Is(err, page.ErrInvalid) {
			t.Errorf("ParseOrder(%q) = %v, %v, want ErrInvalid", name, got, err)
		}
	}
}

func TestDTypeBytes(t *testing.T) {
	want := map[page.DType]int64{0: 0, page.BF16: 2, page.FP16: 2, page.FP32: 4, page.FP8E4M3: 1, page.FP8E5M2: 1, 6: 0}
	for d, n := range want {
		if got := d.Bytes(); got != n {
			t.Errorf("%v.Bytes() = %d, want %d", d, got, n)
		}
	}
}

func TestSizes(t *testing.T) {
	l := worked(page.NHD)
	if got := []int64{l.LayerPageBytes(), l.PageBytes(), l.LayerBytes(), l.Bytes(), l.TokenBytes()}; !slices.Equal(got, []int64{256, 512, 1024, 2048, 64}) {
		t.Errorf("layer-page, page, layer, arena, token = %v", got)
	}
	// 15 tokens of one layer, as in [5,20): 960 bytes.
	if got := 15 * l.TokenBytes() / int64(l.Layers); got != 480 {
		t.Errorf("[5,20) of one layer = %d bytes, want 480", got)
	}
	if got := 15 * l.TokenBytes(); got != 960 {
		t.Errorf("[5,20) = %d bytes, want 960", got)
	}
	big := page.Layout{Order: page.NHD, DType: page.BF16, Layers: 28, Pages: 2048, PageSize: 128, Heads: 8, HeadDim: 128}
	if got := big.LayerPageBytes(); got != 524_288 {
		t.Errorf("layer-page = %d bytes, want 524288", got)
	}
	if got := big.PageBytes(); got != 14_680_064 {
		t.Errorf("page = %d bytes, want 14680064", got)
	}
}

func TestStrides(t *testing.T) {
	for order, want := range map[page.Order]page.Strides{
		page.NHD: {Layer: 1024, Page: 256, KV: 128, Slot: 16, Head: 8, Element: 2},
		page.HND: {Layer: 1024, Page: 256, KV: 128, Head: 64, Slot: 8, Element: 2},
	} {
		if got := worked(order).Strides(); got != want {
			t.Errorf("%v: Strides() = %+v, want %+v", order, got, want)
		}
	}
}

func offsets(c page.Chunks) []int64 {
	var list []int64
	for i := range c.Count {
		list = append(list, c.At(i))
	}
	return list
}

func TestChunks(t *testing.T) {
	for name, tt := range map[string]struct {
		order  page.Order
		pages  int
		layer  int
		page   page.Index
		t0, t1 int
		want   []int64
		bytes  int64
	}{
		"NHD":                {page.NHD, 4, 1, 3, 2, 5, []int64{1824, 1952}, 48},
		"HND":                {page.HND, 4, 1, 3, 2, 5, []int64{1808, 1872, 1936, 2000}, 24},
		"NHD in 8 pages":     {page.NHD, 8, 1, 3, 2, 5, []int64{2848, 2976}, 48},
		"HND in 8 pages":     {page.HND, 8, 1, 3, 2, 5, []int64{2832, 2896, 2960, 3024}, 24},
		"whole page in NHD":  {page.NHD, 4, 0, 0, 0, 8, []int64{0}, 256},
		"whole page in HND":  {page.HND, 4, 0, 0, 0, 8, []int64{0}, 256},
		"last page in NHD":   {page.NHD, 4, 1, 3, 0, 8, []int64{1792}, 256},
		"first slot in NHD":  {page.NHD, 4, 0, 0, 0, 1, []int64{0, 128}, 16},
		"last slot in HND":   {page.HND, 4, 0, 0, 7, 8, []int64{56, 120, 184, 248}, 8},
		"all but one in HND": {page.HND, 4, 0, 1, 1, 8, []int64{264, 328, 392, 456}, 56},
	} {
		t.Run(name, func(t *testing.T) {
			l := worked(tt.order)
			l.Pages = tt.pages
			c := l.Chunks(tt.layer, tt.page, tt.t0, tt.t1)
			if got := offsets(c); !slices.Equal(got, tt.want) || c.Bytes != tt.bytes {
				t.Errorf("Chunks(%d, %d, %d, %d) = %v of %d bytes, want %v of %d", tt.layer, tt.page, tt.t0, tt.t1, got, c.Bytes, tt.want, tt.bytes)
			}
		})
	}
}

func TestChunksOutside(t *testing.T) {
	for _, a := range [][4]int{{-1, 0, 0, 8}, {2, 0, 0, 8}, {0, 4, 0, 8}, {0, 0, -1, 8}, {0, 0, 0, 9}, {0, 0, 3, 3}, {0, 0, 5, 3}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("Chunks(%v) does not panic", a)
				}
			}()
			worked(page.NHD).Chunks(a[0], page.Index(a[1]), a[2], a[3])
		}()
	}
}

// address is the definition of both orders: the offset in bytes of one
// element, as the row-major index into the shape.
func address(l page.Layout, layer, p, kv, slot, head, element int) int64 {
	shape := []int{l.Layers, l.Pages, 2, l.PageSize, l.Heads, l.HeadDim}
	index := []int{layer, p, kv, slot, head, element}
	if l.Order == page.HND {
		shape[3], shape[4] = shape[4], shape[3]
		index[3], index[4] = index[4], index[3]
	}
	var at int64
	for d := range shape {
		at = at*int64(shape[d]) + int64(index[d])
	}
	return at * l.DType.Bytes()
}

func layouts() *rapid.Generator[page.Layout] {
	return rapid.Custom(func(t *rapid.T) page.Layout {
		return page.Layout{
			Order:    rapid.SampledFrom([]page.Order{page.NHD, page.HND}).Draw(t, "order"),
			DType:    rapid.SampledFrom([]page.DType{page.BF16, page.FP16, page.FP32, page.FP8E4M3, page.FP8E5M2}).Draw(t, "dtype"),
			Layers:   rapid.IntRange(1, 4).Draw(t, "layers"),
			Pages:    rapid.IntRange(1, 6).Draw(t, "pages"),
			PageSize: rapid.IntRange(1, 9).Draw(t, "page size"),
			Heads:    rapid.IntRange(1, 4).Draw(t, "heads"),
			HeadDim:  rapid.IntRange(1, 5).Draw(t, "head dim"),
		}
	})
}

func TestChunksAreTheElements(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := layouts().Draw(t, "layout")
		layer := rapid.IntRange(0, l.Layers-1).Draw(t, "layer")
		p := rapid.IntRange(0, l.Pages-1).Draw(t, "page")
		t0 := rapid.IntRange(0, l.PageSize-1).Draw(t, "t0")
		t1 := rapid.IntRange(t0+1, l.PageSize).Draw(t, "t1")

		want := make(map[int64]bool)
		for kv := range 2 {
			for slot := t0; slot < t1; slot++ {
				for head := range l.Heads {
					for element := range l.HeadDim {
						for b := range l.DType.Bytes() {
							want[address(l, layer, p, kv, slot, head, element)+b] = true
						}
					}
				}
			}
		}
		c := l.Chunks(layer, page.Index(p), t0, t1)
		end := int64(-1)
		for _, at := range offsets(c) {
			if at < end {
				t.Fatalf("chunk at %d begins before %d, the end of the one before", at, end)
			}
			end = at + c.Bytes
			for b := at; b < end; b++ {
				if !want[b] {
					t.Fatalf("byte %d is not asked for, or twice in %+v", b, c)
				}
				delete(want, b)
			}
		}
		if len(want) > 0 {
			t.Fatalf("%d bytes are missing in %+v", len(want), c)
		}
		if end > l.Bytes() {
			t.Fatalf("chunk ends at %d of %d", end, l.Bytes())
		}
	})
}

func TestStridesAreTheElements(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := layouts().Draw(t, "layout")
		if err := l.Validate(); err != nil {
			t.Fatal(err)
		}
		draw := func(name string, n int) int { return rapid.IntRange(0, n-1).Draw(t, name) }
		layer, p, kv := draw("layer", l.Layers), draw("page", l.Pages), draw("kv", 2)
		slot, head, element := draw("slot", l.PageSize), draw("head", l.Heads), draw("element", l.HeadDim)
		s := l.Strides()
		got := int64(layer)*s.Layer + int64(p)*s.Page + int64(kv)*s.KV + int64(slot)*s.Slot + int64(head)*s.Head + int64(element)*s.Element
		if want := address(l, layer, p, kv, slot, head, element); got != want {
			t.Fatalf("strides give %d, want %d", got, want)
		}
		if want := address(l, l.Layers-1, l.Pages-1, 1, l.PageSize-1, l.Heads-1, l.HeadDim-1) + l.DType.Bytes(); l.Bytes() != want {
			t.Fatalf("Bytes() = %d, want %d", l.Bytes(), want)
		}
	})
}

func ExampleLayout_Chunks() {
	l := page.Layout{Order: page.NHD, DType: page.BF16, Layers: 2, Pages: 4, PageSize: 8, Heads: 2, HeadDim: 4}
	c := l.Chunks(1, 3, 2, 5)
	for i := range c.Count {
		fmt.Println(c.At(i), c.Bytes)
	}
	// Output:
	// 1824 48
	// 1952 48
}
