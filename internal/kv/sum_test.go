package kv

import (
	"errors"
	"hash/crc32"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/page"
)

// A sum is that of the bytes of its slots, and of no others.
func TestSum(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := noisy(t, layouts().Draw(t, "layout"), rapid.Uint64().Draw(t, "seed"))
		p := page.Index(rapid.IntRange(0, c.Layout.Pages-1).Draw(t, "page"))
		slots := rapid.IntRange(1, c.Layout.PageSize).Draw(t, "slots")
		got, err := c.Sum(p, slots)
		if err != nil {
			t.Fatal(err)
		}
		// Every element of these slots, in the order of its address.
		table := crc32.MakeTable(crc32.Castagnoli)
		inside := make([]bool, len(c.Bytes))
		for layer := range c.Layout.Layers {
			for kv := range 2 {
				for slot := range slots {
					for head := range c.Layout.Heads {
						for e := range c.Layout.HeadDim {
							at := address(c.Layout, layer, page.Slot{Page: p, Slot: int32(slot)}, kv, head, e)
							for i := range int(c.Layout.DType.Bytes()) {
								inside[at+i] = true
							}
						}
					}
				}
			}
		}
		var want uint32
		for i, in := range inside {
			if in {
				want = crc32.Update(want, table, c.Bytes[i:i+1])
			}
		}
		if got != want {
			t.Fatalf("sum of %d slots of page %d is %08x, want %08x", slots, p, got, want)
		}
		at := rapid.IntRange(0, len(c.Bytes)-1).Draw(t, "at")
		c.Bytes[at] ^= 1
		if again, _ := c.Sum(p, slots); (again != got) != inside[at] {
			t.Fatalf("byte %d is inside: %v, and the sum has changed: %v", at, inside[at], again != got)
		}
	})
}

func TestSumOfNothing(t *testing.T) {
	l := page.Layout{Order: page.NHD, DType: page.BF16, Layers: 1, Pages: 2, PageSize: 4, Heads: 1, HeadDim: 1}
	c, err := NewCache(l, make([]byte, l.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []struct {
		page  page.Index
		slots int
	}{{2, 1}, {0, 0}, {0, 5}, {0, -1}} {
		if _, err := c.Sum(bad.page, bad.slots); !errors.Is(err, ErrRange) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}
