package kv

import (
	"bytes"
	"errors"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/page"
)

func TestNewCache(t *testing.T) {
	l := worked(page.NHD, 4)
	for name, tt := range map[string]struct {
		change func(*page.Layout)
		bytes  int
		want   error
	}{
		"just enough":  {func(*page.Layout) {}, 2048, nil},
		"more":         {func(*page.Layout) {}, 4096, nil},
		"a byte short": {func(*page.Layout) {}, 2047, ErrInvalid},
		"no layout":    {func(l *page.Layout) { *l = page.Layout{} }, 2048, ErrInvalid},
		"no dtype":     {func(l *page.Layout) { l.DType = 9 }, 2048, ErrInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			l := l
			tt.change(&l)
			c, err := NewCache(l, make([]byte, tt.bytes))
			if !errors.Is(err, tt.want) {
				t.Fatalf("error is %v, want %v", err, tt.want)
			}
			if err == nil && (len(c.Bytes) != 2048 || cap(c.Bytes) != 2048 || c.Layout != l) {
				t.Errorf("%d bytes of %d, %+v", len(c.Bytes), cap(c.Bytes), c.Layout)
			}
		})
	}
	if _, err := NewCache(page.Layout{}, nil); !errors.Is(err, page.ErrInvalid) {
		t.Errorf("error is %v, want it to say that the layout is wrong", err)
	}
}

func TestLayerIsEveryElementInPlace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := layouts().Draw(t, "layout")
		c := noisy(t, l, 1)
		layer := rapid.IntRange(0, l.Layers-1).Draw(t, "layer")
		v, err := c.Layer(layer)
		if err != nil || v.Order != l.Order || v.DType != l.DType || int64(len(v.Bytes)) != l.LayerBytes() || cap(v.Bytes) != len(v.Bytes) {
			t.Fatalf("%d bytes of %v %v, error %v", len(v.Bytes), v.Order, v.DType, err)
		}
		elements := 1
		for _, n := range v.Shape {
			elements *= n
		}
		if int64(elements)*l.DType.Bytes() != l.LayerBytes() {
			t.Fatalf("shape %v is not a layer of %+v", v.Shape, l)
		}
		var i [5]int
		at := int64(0)
		for d, n := range v.Shape {
			i[d] = rapid.IntRange(0, n-1).Draw(t, "index")
			at += int64(i[d]) * v.Strides[d]
		}
		slot, head := i[2], i[3]
		if l.Order == page.HND {
			slot, head = head, slot
		}
		want := address(l, layer, page.Slot{Page: page.Index(i[0]), Slot: int32(slot)}, i[1], head, i[4])
		if &v.Bytes[at] != &c.Bytes[want] {
			t.Fatalf("%v is at %d of layer %d, want %d of the cache", i, at, layer, want)
		}
	})
}

func TestLayerOutside(t *testing.T) {
	c := noisy(t, worked(page.NHD, 4), 1)
	for _, layer := range []int{-1, 2} {
		if v, err := c.Layer(layer); !errors.Is(err, ErrRange) || v.Bytes != nil {
			t.Errorf("Layer(%d) = %v, %v", layer, v, err)
		}
	}
}

// TestSpec has the cases of the manager's specification that are about bytes,
// by their numbers.
func TestSpec(t *testing.T) {
	for _, c := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"088 addresses of a slot range", spec088},
		{"089 whole pages are one move", spec089},
		{"090 bytes of a token range", spec090},
		{"092 write then read", func(t *testing.T) { rapid.Check(t, spec092) }},
		{"093 a page on both lists", spec093},
	} {
		t.Run(c.name, c.run)
	}
}

func spec088(t *testing.T) {
	for _, tt := range []struct {
		order page.Order
		pages int
		want  []int
		bytes int
	}{
		{page.NHD, 4, []int{1824, 1952}, 48},
		{page.HND, 4, []int{1808, 1872, 1936, 2000}, 24},
		{page.NHD, 8, []int{2848, 2976}, 48},
		{page.HND, 8, []int{2832, 2896, 2960, 3024}, 24},
	} {
		l := worked(tt.order, tt.pages)
		c, err := NewCache(l, make([]byte, l.Bytes()))
		if err != nil {
			t.Fatal(err)
		}
		ones := bytes.Repeat([]byte{1}, 48)
		if err := c.Write(1, []page.Slot{{Page: 3, Slot: 2}, {Page: 3, Slot: 3}, {Page: 3, Slot: 4}}, ones, ones, page.BF16); err != nil {
			t.Fatal(err)
		}
		want := make([]byte, l.Bytes())
		for _, at := range tt.want {
			copy(want[at:], ones[:tt.bytes])
		}
		if !bytes.Equal(c.Bytes, want) {
			t.Errorf("%v of %d pages: other bytes than %d at %v were written", tt.order, tt.pages, tt.bytes, tt.want)
		}
	}
}

func spec089(t *testing.T) {
	for _, order := range []page.Order{page.NHD, page.HND} {
		l := worked(order, 16)
		for _, tt := range []struct {
			to, from []page.Index
			want     []Move
		}{
			{[]page.Index{0}, []page.Index{0}, []Move{{0, 0, 256}}},
			{[]page.Index{3, 4, 5}, []page.Index{7, 8, 9}, []Move{{768, 1792, 768}}},
			{[]page.Index{3, 4, 5}, []page.Index{7, 9, 8}, []Move{{768, 1792, 256}, {1024, 2304, 256}, {1280, 2048, 256}}},
		} {
			got := appendMoves(nil, l, tt.to, tt.from, 8*len(tt.to))
			if len(got) != len(tt.want) {
				t.Errorf("%v: moves %v, want %v", order, got, tt.want)
				continue
			}
			for i := range got {
				if got[i] != tt.want[i] {
					t.Errorf("%v: moves %v, want %v", order, got, tt.want)
				}
			}
		}
	}
}

func spec090(t *testing.T) {
	c := noisy(t, worked(page.HND, 4), 1)
	var at []page.Slot
	for token := 5; token < 20; token++ {
		at = append(at, page.Slot{Page: page.Index(token/8 + 1), Slot: int32(token % 8)})
	}
	total := 0
	for layer := range 2 {
		k, v, err := c.Read(layer, at, page.BF16)
		if err != nil {
			t.Fatal(err)
		}
		total += len(k) + len(v)
	}
	if total != 960 {
		t.Errorf("%d bytes, want 960", total)
	}
}

// spec092: write_kv scatters as a naive map of (layer, page, slot) has it, and
// read_kv returns what it wrote, in either order and any two types.
func spec092(t *rapid.T) {
	l := layouts().Draw(t, "layout")
	c := noisy(t, l, rapid.Uint64().Draw(t, "memory"))
	want := clone(c)
	layer := rapid.IntRange(0, l.Layers-1).Draw(t, "layer")
	var at []page.Slot
	for _, i := range rapid.SliceOfDistinct(rapid.IntRange(0, l.Pages*l.PageSize-1), rapid.ID[int]).Draw(t, "slots") {
		at = append(at, page.Slot{Page: page.Index(i / l.PageSize), Slot: int32(i % l.PageSize)})
	}
	from := rapid.SampledFrom(dtypes()).Draw(t, "from")
	row := l.Heads * l.HeadDim * int(from.Bytes())
	extra := rapid.IntRange(0, 2*row).Draw(t, "bytes beyond the last token")
	given := [2][]byte{noise(int64(len(at)*row+extra), 2), noise(int64(len(at)*row+extra), 3)}
	if err := c.Write(layer, at, given[0], given[1], from); err != nil {
		t.Fatal(err)
	}

	as := rapid.SampledFrom(dtypes()).Draw(t, "as")
	var read [2][]byte // what Read must return
	for kv := range 2 {
		for token, slot := range at {
			for head := range l.Heads {
				for e := range l.HeadDim {
					source := ((token*l.Heads+head)*l.HeadDim + e) * int(from.Bytes())
					cell := want.Bytes[address(l, layer, slot, kv, head, e):][:l.DType.Bytes()]
					if err := Convert(cell, l.DType, given[kv][source:][:from.Bytes()], from); err != nil {
						t.Fatal(err)
					}
					element := make([]byte, as.Bytes())
					if err := Convert(element, as, cell, l.DType); err != nil {
						t.Fatal(err)
					}
					read[kv] = append(read[kv], element...)
				}
			}
		}
	}
	if !bytes.Equal(c.Bytes, want.Bytes) {
		t.Fatalf("%v written into %+v: the cache differs from the naive one", from, l)
	}
	k, v, err := c.Read(layer, at, as)
	if err != nil || !bytes.Equal(k, read[0]) || !bytes.Equal(v, read[1]) {
		t.Fatalf("read as %v from %+v: other bytes than the naive ones, error %v", as, l, err)
	}
	if from == l.DType {
		k, v, err := c.Read(layer, at, from)
		if err != nil || !bytes.Equal(k, given[0][:len(k)]) || !bytes.Equal(v, given[1][:len(v)]) || len(k) != len(at)*row {
			t.Fatalf("read other bytes than were written, error %v", err)
		}
	}
	if !bytes.Equal(c.Bytes, want.Bytes) {
		t.Fatal("reading changed the cache")
	}
}

func spec093(t *testing.T) {
	for _, order := range []page.Order{page.NHD, page.HND} {
		l := worked(order, 4)
		for _, tokens := range []int{16, 13} {
			c := noisy(t, l, 1)
			want := clone(c)
			naiveCopy(want, []page.Index{2, 3}, c, []page.Index{1, 2}, tokens)
			if err := Copy(c, []page.Index{2, 3}, c, []page.Index{1, 2}, tokens); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(c.Bytes, want.Bytes) {
				t.Errorf("%v, %d tokens: not as if both pages had been read first", order, tokens)
			}
		}
	}
}
