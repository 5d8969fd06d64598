package kv

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/page"
)

// address is the offset in bytes of one element: the row-major index into
// [L,P,2,ps,H,D], or [L,P,2,H,ps,D]. It is written from that definition and
// uses nothing of package page.
func address(l page.Layout, layer int, at page.Slot, kv, head, element int) int {
	size := map[page.DType]int{page.BF16: 2, page.FP16: 2, page.FP32: 4, page.FP8E4M3: 1, page.FP8E5M2: 1}[l.DType]
	if l.Order == page.NHD {
		return (((((layer*l.Pages+int(at.Page))*2+kv)*l.PageSize+int(at.Slot))*l.Heads+head)*l.HeadDim + element) * size
	}
	return (((((layer*l.Pages+int(at.Page))*2+kv)*l.Heads+head)*l.PageSize+int(at.Slot))*l.HeadDim + element) * size
}

// naiveCopy copies token by token, element by element, out of a snapshot.
func naiveCopy(dst Cache, to []page.Index, src Cache, from []page.Index, tokens int) {
	snapshot := bytes.Clone(src.Bytes)
	size := src.Layout.PageSize
	for t := range tokens {
		s, d := page.Slot{Page: from[t/size], Slot: int32(t % size)}, page.Slot{Page: to[t/size], Slot: int32(t % size)}
		for layer := range src.Layout.Layers {
			for kv := range 2 {
				for head := range src.Layout.Heads {
					for e := range src.Layout.HeadDim {
						i, j := address(src.Layout, layer, s, kv, head, e), address(dst.Layout, layer, d, kv, head, e)
						copy(dst.Bytes[j:][:src.Layout.DType.Bytes()], snapshot[i:])
					}
				}
			}
		}
	}
}

// noise is n bytes that do not repeat.
func noise(n int64, seed uint64) []byte {
	r := rand.New(rand.NewPCG(seed, 0))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func noisy(t interface{ Fatal(...any) }, l page.Layout, seed uint64) Cache {
	c, err := NewCache(l, noise(l.Bytes(), seed))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func clone(c Cache) Cache { return Cache{Layout: c.Layout, Bytes: bytes.Clone(c.Bytes)} }

func dtypes() []page.DType {
	return []page.DType{page.BF16, page.FP16, page.FP32, page.FP8E4M3, page.FP8E5M2}
}

func layouts() *rapid.Generator[page.Layout] {
	return rapid.Custom(func(t *rapid.T) page.Layout {
		return page.Layout{
			Order:    rapid.SampledFrom([]page.Order{page.NHD, page.HND}).Draw(t, "order"),
			DType:    rapid.SampledFrom(dtypes()).Draw(t, "dtype"),
			Layers:   rapid.IntRange(1, 3).Draw(t, "layers"),
			Pages:    rapid.IntRange(1, 8).Draw(t, "pages"),
			PageSize: rapid.IntRange(1, 5).Draw(t, "page size"),
			Heads:    rapid.IntRange(1, 3).Draw(t, "heads"),
			HeadDim:  rapid.IntRange(1, 4).Draw(t, "head dim"),
		}
	})
}

// pages draws n pages of an arena; neighbours are likely, and so is a page that
// is drawn twice.
func pages(t *rapid.T, name string, arena, n int) []page.Index {
	first := rapid.IntRange(0, arena-1).Draw(t, name+" first")
	stride := rapid.IntRange(0, 2).Draw(t, name+" stride")
	list := make([]page.Index, n)
	for i := range list {
		list[i] = page.Index((first + i*stride) % arena)
		if rapid.IntRange(0, 4).Draw(t, name+" jumps") == 0 {
			list[i] = page.Index(rapid.IntRange(0, arena-1).Draw(t, name))
		}
	}
	return list
}

// worked is the layout of the numbered cases 88 to 90.
func worked(order page.Order, pages int) page.Layout {
	return page.Layout{Order: order, DType: page.BF16, Layers: 2, Pages: pages, PageSize: 8, Heads: 2, HeadDim: 4}
}

func TestNaiveAddress(t *testing.T) {
	// By hand: layer 1, page 3, V, slot 2, head 1, element 3 of the worked layout.
	for order, want := range map[page.Order]int{page.NHD: 1024 + 768 + 128 + 32 + 8 + 6, page.HND: 1024 + 768 + 128 + 64 + 16 + 6} {
		if got := address(worked(order, 4), 1, page.Slot{Page: 3, Slot: 2}, 1, 1, 3); got != want {
			t.Errorf("%v: %d, want %d", order, got, want)
		}
	}
}
