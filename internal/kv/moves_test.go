package kv

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/page"
)

// distinct draws n pages of an arena, none of them twice; neighbours are likely.
func distinct(t *rapid.T, name string, arena, n int) []page.Index {
	list := pages(t, name, arena, 3*n+arena)
	for i := range arena { // in case too few were drawn
		list = append(list, page.Index(i))
	}
	var out []page.Index
	for _, p := range list {
		if !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return out[:n]
}

// Whatever the order in which moves are made, they come to what Copy does; and
// they lie within both caches, and are the fewest of their layer.
func TestMovesAreTheCopy(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		src := noisy(t, layouts().Draw(t, "layout"), rapid.Uint64().Draw(t, "source"))
		l := src.Layout
		l.Pages = rapid.IntRange(1, 8).Draw(t, "pages of the target")
		dst := noisy(t, l, rapid.Uint64().Draw(t, "target"))
		n := rapid.IntRange(0, min(l.Pages, src.Layout.Pages)).Draw(t, "listed")
		from, to := pages(t, "from", src.Layout.Pages, n), distinct(t, "to", l.Pages, n)
		tokens := rapid.IntRange(0, n*l.PageSize).Draw(t, "tokens")

		want := clone(dst)
		if err := Copy(want, to, src, from, tokens); err != nil {
			t.Fatal(err)
		}
		before := []Move{{1, 2, 3}}
		list, err := Moves(before, dst.Layout, to, src.Layout, from, tokens)
		if err != nil || list[0] != before[0] {
			t.Fatalf("%v, %v", list, err)
		}
		list = list[1:]
		for i := 1; i < len(list); i++ {
			a, b := list[i-1], list[i]
			if len(list)/l.Layers > 0 && i%(len(list)/l.Layers) == 0 {
				continue // another layer
			}
			if tokens%l.PageSize == 0 && a.To+a.Bytes == b.To && a.From+a.Bytes == b.From {
				t.Fatalf("%v and %v are one move", a, b)
			}
		}
		rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "order"), 0)).Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		for _, m := range list {
			copy(dst.Bytes[m.To:m.To+m.Bytes], src.Bytes[m.From:m.From+m.Bytes])
		}
		if !bytes.Equal(dst.Bytes, want.Bytes) {
			t.Fatalf("%d tokens from %v to %v: not the copy", tokens, from, to)
		}
	})
}

func TestMovesRefused(t *testing.T) {
	l := worked(page.NHD, 4)
	one, two := []page.Index{1}, []page.Index{1, 2}
	other := l
	other.Heads = 1
	for name, tt := range map[string]struct {
		dst      page.Layout
		to, from []page.Index
		tokens   int
		want     error
	}{
		"more sources":      {l, one, two, 8, ErrInvalid},
		"too many tokens":   {l, two, two, 17, ErrRange},
		"negative":          {l, two, two, -1, ErrRange},
		"source page":       {l, two, []page.Index{1, 4}, 16, ErrRange},
		"target page":       {l, []page.Index{1, 4}, two, 16, ErrRange},
		"largest page":      {l, two, []page.Index{1, ^page.Index(0)}, 16, ErrRange},
		"a target twice":    {l, []page.Index{2, 2}, two, 16, ErrInvalid},
		"an unused one too": {l, []page.Index{2, 2}, two, 8, nil},
		"another layout":    {other, two, two, 8, ErrInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			before := []Move{{1, 2, 3}}
			list, err := Moves(before, tt.dst, tt.to, l, tt.from, tt.tokens)
			if !errors.Is(err, tt.want) {
				t.Errorf("error is %v, want %v", err, tt.want)
			}
			if err != nil && !slices.Equal(list, before) {
				t.Errorf("%v with an error", list)
			}
		})
	}
}

// A buffer of K and V that is brought where Cells says is what Write writes, and
// back is what Read reads.
func TestCellsAreTheTokens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := noisy(t, layouts().Draw(t, "layout"), rapid.Uint64().Draw(t, "seed"))
		l := c.Layout
		layer := rapid.IntRange(0, l.Layers-1).Draw(t, "layer")
		var at []page.Slot
		for _, i := range rapid.SliceOfNDistinct(rapid.IntRange(0, l.Pages*l.PageSize-1), 0, l.Pages*l.PageSize, rapid.ID).Draw(t, "slots") {
			at = append(at, page.Slot{Page: page.Index(i / l.PageSize), Slot: int32(i % l.PageSize)})
		}
		n := len(at) * row(l, l.DType)
		dense := noise(int64(2*n), rapid.Uint64().Draw(t, "tokens"))
		want := clone(c)
		if err := want.Write(layer, at, dense[:n], dense[n:], l.DType); err != nil {
			t.Fatal(err)
		}
		list, err := Cells(nil, l, layer, at)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range list {
			copy(c.Bytes[m.To:m.To+m.Bytes], dense[m.From:m.From+m.Bytes])
		}
		if !bytes.Equal(c.Bytes, want.Bytes) {
			t.Fatalf("%v of layer %d: not what Write writes", at, layer)
		}
		k, v, err := c.Read(layer, at, l.DType)
		if err != nil {
			t.Fatal(err)
		}
		back, end := make([]byte, 2*n), int64(0)
		for _, m := range list {
			if m.From != end {
				t.Fatalf("%v is not behind the one before", m)
			}
			end += m.Bytes
			copy(back[m.From:], c.Bytes[m.To:][:m.Bytes])
		}
		if !bytes.Equal(back, append(k, v...)) {
			t.Fatalf("%v of layer %d: not what Read reads", at, layer)
		}
	})
}

func TestCellsRefused(t *testing.T) {
	l := worked(page.HND, 4)
	for name, tt := range map[string]struct {
		layer int
		at    []page.Slot
	}{
		"layer": {2, nil}, "negative layer": {-1, nil},
		"page": {0, []page.Slot{{Page: 4}}}, "slot": {0, []page.Slot{{Page: 1, Slot: 8}}}, "negative slot": {0, []page.Slot{{Page: 1, Slot: -1}}},
	} {
		if list, err := Cells(nil, l, tt.layer, tt.at); !errors.Is(err, ErrRange) || list != nil {
			t.Errorf("%s: %v, %v", name, list, err)
		}
	}
}

// The sum of what Summed lists is the page's.
func TestSummedIsWhatIsSummed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := noisy(t, layouts().Draw(t, "layout"), rapid.Uint64().Draw(t, "seed"))
		p := page.Index(rapid.IntRange(0, c.Layout.Pages-1).Draw(t, "page"))
		slots := rapid.IntRange(1, c.Layout.PageSize).Draw(t, "slots")
		want, err := c.Sum(p, slots)
		if err != nil {
			t.Fatal(err)
		}
		var sum uint32
		at := int64(5)
		for layer := range c.Layout.Layers {
			list, err := Summed(nil, c.Layout, layer, p, slots, at)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range list {
				if m.To != at {
					t.Fatalf("%v begins not at %d", m, at)
				}
				at += m.Bytes
				sum = AddSum(sum, c.Bytes[m.From:][:m.Bytes])
			}
		}
		if sum != want || at-5 != int64(slots)*c.Layout.TokenBytes() {
			t.Fatalf("sum of %d bytes is %08x, want %08x", at-5, sum, want)
		}
	})
	l := worked(page.HND, 4)
	for _, bad := range []struct {
		layer int
		page  page.Index
		slots int
	}{{2, 0, 1}, {-1, 0, 1}, {0, 4, 1}, {0, 0, 0}, {0, 0, 9}} {
		if list, err := Summed(nil, l, bad.layer, bad.page, bad.slots, 0); !errors.Is(err, ErrRange) || list != nil {
			t.Errorf("%+v: %v, %v", bad, list, err)
		}
	}
}
