package kv

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/page"
)

func TestCopyIsTheNaiveCopy(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		src := noisy(t, layouts().Draw(t, "layout"), rapid.Uint64().Draw(t, "source"))
		dst := src
		if rapid.Bool().Draw(t, "between two caches") {
			l := src.Layout
			l.Pages = rapid.IntRange(1, 8).Draw(t, "pages of the target")
			dst = noisy(t, l, rapid.Uint64().Draw(t, "target"))
		}
		n := rapid.IntRange(0, 8).Draw(t, "listed")
		from, to := pages(t, "from", src.Layout.Pages, n), pages(t, "to", dst.Layout.Pages, n)
		tokens := rapid.IntRange(0, n*src.Layout.PageSize).Draw(t, "tokens")

		want, before := clone(dst), clone(src)
		naiveCopy(want, to, src, from, tokens)
		if err := Copy(dst, to, src, from, tokens); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(dst.Bytes, want.Bytes) {
			t.Fatalf("%d tokens from %v to %v of %+v: not the naive copy", tokens, from, to, dst.Layout)
		}
		if &dst.Bytes[0] != &src.Bytes[0] && !bytes.Equal(src.Bytes, before.Bytes) {
			t.Fatal("the source changed")
		}
	})
}

func TestCopyWithinACacheOfRuns(t *testing.T) {
	for name, tt := range map[string]struct {
		to, from []page.Index
		tokens   int
	}{
		"up by one":           {[]page.Index{2, 3, 4}, []page.Index{1, 2, 3}, 24},
		"down by one":         {[]page.Index{1, 2, 3}, []page.Index{2, 3, 4}, 24},
		"up by one, cut":      {[]page.Index{2, 3, 4}, []page.Index{1, 2, 3}, 17},
		"exchange":            {[]page.Index{1, 2}, []page.Index{2, 1}, 16},
		"exchange, cut":       {[]page.Index{1, 2}, []page.Index{2, 1}, 9},
		"exchange of runs":    {[]page.Index{1, 2, 5, 6}, []page.Index{5, 6, 1, 2}, 32},
		"onto itself":         {[]page.Index{1, 3}, []page.Index{1, 3}, 16},
		"twice to one page":   {[]page.Index{2, 2}, []page.Index{1, 3}, 16},
		"twice, the last cut": {[]page.Index{2, 2}, []page.Index{1, 2}, 11},
		"a fork":              {[]page.Index{6, 7}, []page.Index{1, 2}, 12},
		"pages left over":     {[]page.Index{6, 7, 5}, []page.Index{1, 2, 3}, 8},
	} {
		t.Run(name, func(t *testing.T) {
			c := noisy(t, worked(page.HND, 8), 1)
			want := clone(c)
			naiveCopy(want, tt.to, c, tt.from, tt.tokens)
			if err := Copy(c, tt.to, c, tt.from, tt.tokens); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(c.Bytes, want.Bytes) {
				t.Error("not the naive copy")
			}
		})
	}
}

func TestCopyRefused(t *testing.T) {
	l := worked(page.NHD, 4)
	one, two := []page.Index{1}, []page.Index{1, 2}
	for name, tt := range map[string]struct {
		to, from []page.Index
		tokens   int
		want     error
	}{
		"more sources":    {one, two, 8, ErrInvalid},
		"more targets":    {two, one, 8, ErrInvalid},
		"too many tokens": {two, two, 17, ErrRange},
		"tokens of none":  {nil, nil, 1, ErrRange},
		"negative":        {two, two, -1, ErrRange},
		"source page":     {two, []page.Index{1, 8}, 16, ErrRange},
		"target page":     {[]page.Index{1, 4}, two, 16, ErrRange},
		"beyond tokens":   {[]page.Index{1, 4}, two, 8, ErrRange},
		"largest page":    {two, []page.Index{1, ^page.Index(0)}, 16, ErrRange},
	} {
		t.Run(name, func(t *testing.T) {
			larger := l
			larger.Pages = 8
			dst, src := noisy(t, l, 1), noisy(t, larger, 2)
			before := clone(dst)
			if err := Copy(dst, tt.to, src, tt.from, tt.tokens); !errors.Is(err, tt.want) {
				t.Errorf("error is %v, want %v", err, tt.want)
			}
			if !bytes.Equal(dst.Bytes, before.Bytes) {
				t.Error("a refused copy changed the target")
			}
		})
	}
}

func TestCopyNamesTheFieldThatDiffers(t *testing.T) {
	for field, change := range map[string]func(*page.Layout){
		"order":     func(l *page.Layout) { l.Order = page.HND },
		"dtype":     func(l *page.Layout) { l.DType = page.FP16 },
		"layers":    func(l *page.Layout) { l.Layers = 1 },
		"page_size": func(l *page.Layout) { l.PageSize = 4 },
		"heads":     func(l *page.Layout) { l.Heads = 1 },
		"head_dim":  func(l *page.Layout) { l.HeadDim = 8 },
	} {
		t.Run(field, func(t *testing.T) {
			l := worked(page.NHD, 4)
			src := noisy(t, l, 1)
			change(&l)
			dst := noisy(t, l, 2)
			before := clone(dst)
			err := Copy(dst, []page.Index{1}, src, []page.Index{1}, 1)
			if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), field) {
				t.Errorf("error is %v", err)
			}
			if !bytes.Equal(dst.Bytes, before.Bytes) {
				t.Error("a refused copy changed the target")
			}
		})
	}
}

func TestCopyBetweenCachesThatShareMemory(t *testing.T) {
	l := worked(page.NHD, 4)
	memory := noise(3*l.Bytes(), 1)
	at := func(offset int64, pages int) Cache {
		l := l
		l.Pages = pages
		c, err := NewCache(l, memory[offset:])
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	for name, tt := range map[string]struct {
		dst, src Cache
		want     error
	}{
		"the same":           {at(0, 4), at(0, 4), nil},
		"side by side":       {at(0, 4), at(l.Bytes(), 4), nil},
		"one byte of it":     {at(0, 4), at(l.Bytes()-1, 4), ErrInvalid},
		"shifted by a page":  {at(256, 4), at(0, 4), ErrInvalid},
		"another page count": {at(0, 4), at(0, 8), ErrInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			before := bytes.Clone(memory)
			err := Copy(tt.dst, []page.Index{1}, tt.src, []page.Index{2}, 8)
			if !errors.Is(err, tt.want) {
				t.Errorf("error is %v, want %v", err, tt.want)
			}
			if err != nil && !bytes.Equal(memory, before) {
				t.Error("a refused copy changed the memory")
			}
		})
	}
}

// BenchmarkCopy moves 16 MB between two caches; plain is what copy() needs for
// as many bytes in one piece.
func BenchmarkCopy(b *testing.B) {
	l := page.Layout{Order: page.NHD, DType: page.BF16, Layers: 8, Pages: 65, PageSize: 16, Heads: 8, HeadDim: 128}
	dst, src := noisy(b, l, 1), noisy(b, l, 2)
	neighbours, scattered := make([]page.Index, 32), make([]page.Index, 32)
	for i := range neighbours {
		neighbours[i] = page.Index(1 + i)
		scattered[i] = page.Index(1 + i*7%64)
	}
	total := 32 * l.PageBytes()
	b.Run("plain", func(b *testing.B) {
		b.SetBytes(total)
		for b.Loop() {
			copy(dst.Bytes[:total], src.Bytes)
		}
	})
	for _, tt := range []struct {
		name string
		dst  Cache
		to   []page.Index
		cut  int
	}{
		{"neighbours", dst, neighbours, 0},
		{"scattered", dst, scattered, 0},
		{"cut", dst, neighbours, 1},
		{"within a cache", src, func() []page.Index {
			list := make([]page.Index, 32)
			for i := range list {
				list[i] = page.Index(33 + i)
			}
			return list
		}(), 0},
		{"onto its sources", src, scattered, 0},
	} {
		b.Run(tt.name, func(b *testing.B) {
			b.SetBytes(total)
			for b.Loop() {
				if err := Copy(tt.dst, tt.to, src, neighbours, 32*l.PageSize-tt.cut); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
