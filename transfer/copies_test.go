package transfer_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/transfer"
)

// worked is the small layout whose addresses the documentation works out.
func worked(order page.Order, pages int) page.Layout {
	return page.Layout{Order: order, DType: page.BF16, Layers: 2, Pages: pages, PageSize: 8, Heads: 2, HeadDim: 4}
}

func side(l page.Layout, pages ...page.Index) transfer.Side {
	return transfer.Side{Layout: l, Pages: pages}
}

func TestCopies(t *testing.T) {
	type c = transfer.Copy
	for name, tt := range map[string]struct {
		remote, local transfer.Side
		from, to      int
		want          []transfer.Copy
	}{
		"part of a page in NHD, remote of 8 pages": {
			side(worked(page.NHD, 8), 3), side(worked(page.NHD, 4), 3), 2, 5,
			[]transfer.Copy{
				{Remote: 800, Local: 800, Bytes: 48},
				{Remote: 928, Local: 928, Bytes: 48},
				{Remote: 2848, Local: 1824, Bytes: 48},
				{Remote: 2976, Local: 1952, Bytes: 48},
			},
		},
		"part of a page in HND": {
			side(worked(page.HND, 4), 3), side(worked(page.HND, 4), 3), 2, 5,
			[]transfer.Copy{
				{Remote: 784, Local: 784, Bytes: 24},
				{Remote: 848, Local: 848, Bytes: 24},
				{Remote: 912, Local: 912, Bytes: 24},
				{Remote: 976, Local: 976, Bytes: 24},
				{Remote: 1808, Local: 1808, Bytes: 24},
				{Remote: 1872, Local: 1872, Bytes: 24},
				{Remote: 1936, Local: 1936, Bytes: 24},
				{Remote: 2000, Local: 2000, Bytes: 24},
			},
		},
		"neighbours on both sides": {
			side(worked(page.NHD, 16), 7, 8, 9), side(worked(page.NHD, 8), 3, 4, 5), 0, 24,
			[]transfer.Copy{{Remote: 1792, Local: 768, Bytes: 768}, {Remote: 5888, Local: 2816, Bytes: 768}},
		},
		"neighbours on both sides in HND": {
			side(worked(page.HND, 16), 7, 8, 9), side(worked(page.HND, 8), 3, 4, 5), 0, 24,
			[]transfer.Copy{{Remote: 1792, Local: 768, Bytes: 768}, {Remote: 5888, Local: 2816, Bytes: 768}},
		},
		"neighbours on one side only": {
			side(worked(page.NHD, 16), 7, 9, 8), side(worked(page.NHD, 8), 3, 4, 5), 0, 24,
			[]transfer.Copy{
				{Remote: 1792, Local: 768, Bytes: 256},
				{Remote: 2304, Local: 1024, Bytes: 256},
				{Remote: 2048, Local: 1280, Bytes: 256},
				{Remote: 5888, Local: 2816, Bytes: 256},
				{Remote: 6400, Local: 3072, Bytes: 256},
				{Remote: 6144, Local: 3328, Bytes: 256},
			},
		},
		"descending on both sides": {
			side(worked(page.NHD, 16), 9, 8, 7), side(worked(page.NHD, 8), 5, 4, 3), 0, 24,
			[]transfer.Copy{{Remote: 1792, Local: 768, Bytes: 768}, {Remote: 5888, Local: 2816, Bytes: 768}},
		},
		"cut pages at both ends of a run": { // V of the first, the whole second, and K of the third are one piece
			side(worked(page.NHD, 16), 11, 12, 13), side(worked(page.NHD, 8), 1, 2, 3), 5, 20,
			[]transfer.Copy{
				{Remote: 2896, Local: 336, Bytes: 48},
				{Remote: 3024, Local: 464, Bytes: 368},
				{Remote: 3456, Local: 896, Bytes: 64},
				{Remote: 6992, Local: 2384, Bytes: 48},
				{Remote: 7120, Local: 2512, Bytes: 368},
				{Remote: 7552, Local: 2944, Bytes: 64},
			},
		},
		"nothing":                   {side(worked(page.NHD, 8), 1, 2), side(worked(page.NHD, 8), 3, 4), 16, 16, nil},
		"nothing of no page at all": {side(worked(page.NHD, 8)), side(worked(page.NHD, 8)), 16, 16, nil},
		"starts and bases": {
			transfer.Side{Layout: worked(page.NHD, 8), Base: 1 << 20, Start: 16, Pages: []page.Index{1, 3}},
			transfer.Side{Layout: worked(page.NHD, 8), Base: 4096, Start: 8, Pages: []page.Index{5, 6, 7}},
			24, 32,
			[]transfer.Copy{{Remote: 1<<20 + 768, Local: 4096 + 1792, Bytes: 256}, {Remote: 1<<20 + 2816, Local: 4096 + 3840, Bytes: 256}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := c{Rank: 9, Remote: 1, Local: 2, Bytes: 3}
			got, err := transfer.Copies([]c{before}, 0, tt.remote, tt.local, tt.from, tt.to)
			if err != nil || got[0] != before || !slices.Equal(got[1:], tt.want) {
				t.Errorf("Copies = %v, %v, want %v", got[1:], err, tt.want)
			}
		})
	}
}

// The splits of a range over scattered pages of 8 slots, one layer: bytes of K
// and of V in each page, 16 a token.
func TestCopiesSplit(t *testing.T) {
	for _, tt := range []struct {
		from, to int
		tokens   []int64
	}{
		{5, 20, []int64{3, 8, 4}},
		{2, 5, []int64{3}},
		{2, 8, []int64{6}},
		{8, 16, []int64{8}},
		{7, 9, []int64{1, 1}},
		{0, 17, []int64{8, 8, 1}},
		{16, 16, nil},
	} {
		l := worked(page.NHD, 8)
		l.Layers = 1
		copies, err := transfer.Copies(nil, 3, side(l, 5, 3, 7), side(l, 2, 4, 6), tt.from, tt.to)
		if err != nil {
			t.Fatal(err)
		}
		var got, want []int64
		for _, c := range copies {
			if c.Rank != 3 {
				t.Errorf("[%d,%d): rank %d, want 3", tt.from, tt.to, c.Rank)
			}
			got = append(got, c.Bytes)
		}
		for _, n := range tt.tokens {
			if n == 8 {
				want = append(want, 256)
			} else {
				want = append(want, n*16, n*16)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("[%d,%d): copies of %v bytes, want %v", tt.from, tt.to, got, want)
		}
	}
}

func TestCopiesBytes(t *testing.T) {
	for _, order := range []page.Order{page.NHD, page.HND} {
		copies, err := transfer.Copies(nil, 0, side(worked(order, 8), 5, 3, 7), side(worked(order, 8), 2, 4, 6), 5, 20)
		var sum int64
		for _, c := range copies {
			sum += c.Bytes
		}
		// 15 tokens of 16 bytes, K and V, in 2 layers.
		if want := int64(15 * 16 * 2 * 2); sum != want || err != nil {
			t.Errorf("%v: [5,20) moves %d bytes, %v, want %d", order, sum, err, want)
		}
	}
}

func TestCopiesRefuses(t *testing.T) {
	l := worked(page.NHD, 8)
	ok := side(l, 1, 2)
	with := func(change func(*transfer.Side)) transfer.Side {
		s := side(l, 1, 2)
		change(&s)
		return s
	}
	for name, tt := range map[string]struct {
		rank          id.Rank
		remote, local transfer.Side
		from, to      int
		want          error
		text          string
	}{
		"rank":                      {rank: 64, remote: ok, local: ok, to: 16, want: id.ErrInvalid, text: "rank 64"},
		"backwards":                 {remote: ok, local: ok, from: 9, to: 8, want: transfer.ErrRange, text: "tokens 9 to 8"},
		"negative":                  {remote: ok, local: ok, from: -1, to: 8, want: transfer.ErrRange, text: "remote"},
		"remote has too few":        {remote: ok, local: side(l, 1, 2, 3), to: 17, want: transfer.ErrRange, text: "remote has 2 pages, want 3"},
		"local has too few":         {remote: side(l, 1, 2, 3), local: ok, to: 17, want: transfer.ErrRange, text: "local has 2 pages, want 3"},
		"remote has none":           {remote: side(l), local: ok, to: 1, want: transfer.ErrRange, text: "remote has 0 pages, want 1"},
		"remote starts later":       {remote: with(func(s *transfer.Side) { s.Start = 8 }), local: ok, from: 7, to: 9, want: transfer.ErrRange, text: "remote pages start at token 8"},
		"local starts later":        {remote: ok, local: with(func(s *transfer.Side) { s.Start = 8 }), from: 7, to: 9, want: transfer.ErrRange, text: "local pages start at token 8"},
		"starts inside of a page":   {remote: with(func(s *transfer.Side) { s.Start = 4 }), local: ok, from: 8, to: 9, want: transfer.ErrRange, text: "multiple of 8"},
		"starts before 0":           {remote: ok, local: with(func(s *transfer.Side) { s.Start = -8 }), from: 0, to: 1, want: transfer.ErrRange, text: "-8"},
		"remote page beyond":        {remote: side(l, 1, 8), local: ok, to: 16, want: transfer.ErrRange, text: "remote page 8 of 8"},
		"remote page far beyond":    {remote: side(l, math.MaxUint32, 1), local: ok, to: 16, want: transfer.ErrRange, text: "4294967295"},
		"local page beyond":         {remote: ok, local: side(l, 8, 1), to: 16, want: transfer.ErrRange, text: "local page 8 of 8"},
		"remote sink":               {remote: side(l, 1, 0), local: ok, to: 16, want: transfer.ErrRange, text: "remote page 0"},
		"local sink":                {remote: ok, local: side(l, 0, 1), to: 16, want: transfer.ErrRange, text: "local page 0"},
		"negative base":             {remote: with(func(s *transfer.Side) { s.Base = -1 }), local: ok, to: 1, want: transfer.ErrRange, text: "offset -1"},
		"base beyond 63 bits":       {remote: ok, local: with(func(s *transfer.Side) { s.Base = math.MaxInt64 - 100 }), to: 1, want: transfer.ErrRange, text: "offset"},
		"tokens beyond":             {remote: ok, local: ok, to: math.MaxInt, want: transfer.ErrRange, text: "remote has 2 pages"},
		"remote layout":             {remote: with(func(s *transfer.Side) { s.Layout.Layers = 0 }), local: ok, to: 1, want: page.ErrInvalid, text: "remote layout: layers 0"},
		"local layout":              {remote: ok, local: transfer.Side{Pages: ok.Pages}, to: 1, want: page.ErrInvalid, text: "local layout"},
		"other order":               {remote: side(worked(page.HND, 8), 1), local: ok, to: 1, want: page.ErrInvalid, text: `order: ours "NHD", theirs "HND"`},
		"other heads":               {remote: with(func(s *transfer.Side) { s.Layout.Heads = 4 }), local: ok, to: 1, want: page.ErrInvalid, text: "heads"},
		"other dtype of equal size": {remote: with(func(s *transfer.Side) { s.Layout.DType = page.FP16 }), local: ok, to: 1, want: page.ErrInvalid, text: "dtype"},
	} {
		t.Run(name, func(t *testing.T) {
			before := []transfer.Copy{{Rank: 1}}
			got, err := transfer.Copies(before, tt.rank, tt.remote, tt.local, tt.from, tt.to)
			if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("Copies = %v, want one with %q that wraps %v", err, tt.text, tt.want)
			}
			if !slices.Equal(got, before) {
				t.Errorf("Copies returns %v with an error, want dst as it was", got)
			}
		})
	}
}

// address is the definition of both orders: the offset in bytes of one
// element in the arena, as the row-major index into the shape.
func address(l page.Layout, layer int, p page.Index, kv, slot, head, element int) int64 {
	shape := []int{l.Layers, l.Pages, 2, l.PageSize, l.Heads, l.HeadDim}
	index := []int{layer, int(p), kv, slot, head, element}
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

// moved is where one byte comes from, and the place of its page in the list.
type moved struct {
	remote int64
	place  int
}

// naive maps each local byte to the remote one that belongs there.
func naive(remote, local transfer.Side, from, to int) map[int64]moved {
	moves := make(map[int64]moved)
	l := local.Layout
	for token := from; token < to; token++ {
		r, place := (token-remote.Start)/l.PageSize, (token-local.Start)/l.PageSize
		for layer := range l.Layers {
			for kv := range 2 {
				for head := range l.Heads {
					for element := range l.HeadDim {
						for b := range l.DType.Bytes() {
							moves[local.Base+b+address(l, layer, local.Pages[place], kv, token%l.PageSize, head, element)] = moved{
								remote: remote.Base + b + address(remote.Layout, layer, remote.Pages[r], kv, token%l.PageSize, head, element),
								place:  place,
							}
						}
					}
				}
			}
		}
	}
	return moves
}

// fewest is how many copies no planner that keeps to the order of the lists
// can go below: a cut between two bytes is needed where one side jumps, or
// where the lists do not have the two pages side by side.
func fewest(moves map[int64]moved) int {
	n := 0
	for at, m := range moves {
		before, ok := moves[at-1]
		if !ok || before.remote != m.remote-1 || max(m.place, before.place)-min(m.place, before.place) > 1 {
			n++
		}
	}
	return n
}

func TestCopiesAreTheNaiveOnes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := page.Layout{
			Order:    rapid.SampledFrom([]page.Order{page.NHD, page.HND}).Draw(t, "order"),
			DType:    rapid.SampledFrom([]page.DType{page.BF16, page.FP8E4M3}).Draw(t, "dtype"),
			Layers:   rapid.IntRange(1, 3).Draw(t, "layers"),
			PageSize: rapid.IntRange(1, 5).Draw(t, "page size"),
			Heads:    rapid.IntRange(1, 3).Draw(t, "heads"),
			HeadDim:  rapid.IntRange(1, 3).Draw(t, "head dim"),
		}
		draw := func(name string) transfer.Side {
			s := transfer.Side{Layout: l}
			s.Layout.Pages = rapid.IntRange(2, 7).Draw(t, name+" pages")
			s.Base = int64(rapid.IntRange(0, 64).Draw(t, name+" base"))
			s.Start = l.PageSize * rapid.IntRange(0, 2).Draw(t, name+" start")
			all := make([]page.Index, s.Layout.Pages-1)
			for i := range all {
				all[i] = page.Index(i + 1)
			}
			switch rapid.IntRange(0, 3).Draw(t, name+" list") {
			case 0:
				s.Pages = all
			case 1:
				slices.Reverse(all)
				s.Pages = all
			default:
				s.Pages = rapid.Permutation(all).Draw(t, name+" list")
			}
			return s
		}
		remote, local := draw("remote"), draw("local")
		start := max(remote.Start, local.Start)
		end := min(remote.Start+len(remote.Pages)*l.PageSize, local.Start+len(local.Pages)*l.PageSize)
		if start > end {
			t.Skip("the sides have no token in common")
		}
		from := rapid.IntRange(start, end).Draw(t, "from")
		to := rapid.IntRange(from, end).Draw(t, "to")

		copies, err := transfer.Copies(nil, 0, remote, local, from, to)
		if err != nil {
			t.Fatal(err)
		}
		source := make([]byte, remote.Base+remote.Layout.Bytes())
		for i := range source {
			source[i] = byte(rand.Uint32())
		}
		got := make([]byte, local.Base+local.Layout.Bytes()+64)
		for i := range got {
			got[i] = byte(rand.Uint32())
		}
		want := bytes.Clone(got)
		moves := naive(remote, local, from, to)
		for at, m := range moves {
			want[at] = source[m.remote]
		}
		var sum int64
		vector := int64(l.HeadDim) * l.DType.Bytes()
		for _, c := range copies {
			copy(got[c.Local:c.Local+c.Bytes], source[c.Remote:c.Remote+c.Bytes])
			sum += c.Bytes
			if c.Bytes < 1 || c.Bytes%vector != 0 || (c.Local-local.Base)%vector != 0 || (c.Remote-remote.Base)%vector != 0 {
				t.Fatalf("%+v is not cut at a token's border", c)
			}
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("copies %+v move wrong bytes", copies)
		}
		if sum != int64(len(moves)) || sum != int64(to-from)*l.TokenBytes() {
			t.Fatalf("copies move %d bytes, want %d", sum, len(moves))
		}
		if n := fewest(moves); len(copies) != n {
			t.Fatalf("%d copies, %d do: %+v", len(copies), n, copies)
		}
	})
}

// scattered is a list of n pages of which no two are neighbours in the list.
func scattered(n int) []page.Index {
	pages := make([]page.Index, n)
	for i, p := range rand.New(rand.NewPCG(1, 2)).Perm(n) {
		pages[i] = page.Index(2*p + 1)
	}
	return pages
}

func ascending(n int) []page.Index {
	pages := make([]page.Index, n)
	for i := range pages {
		pages[i] = page.Index(i + 1)
	}
	return pages
}

func TestCopiesAllocatesNothing(t *testing.T) {
	for _, order := range []page.Order{page.NHD, page.HND} {
		l := worked(order, 4096)
		remote, local := side(l, scattered(512)...), side(l, scattered(512)...)
		dst, err := transfer.Copies(nil, 0, remote, local, 3, 512*8-3)
		if err != nil {
			t.Fatal(err)
		}
		if n := testing.AllocsPerRun(20, func() {
			dst, err = transfer.Copies(dst[:0], 0, remote, local, 3, 512*8-3)
		}); n != 0 || err != nil {
			t.Errorf("%v: %v allocations, %v", order, n, err)
		}
	}
}

// BenchmarkCopies gives two figures: ns/page counts a page once with all its
// layers, ns/chunk counts each layer-page of it.
func BenchmarkCopies(b *testing.B) {
	for _, bb := range []struct {
		name   string
		order  page.Order
		layers int
		pages  []page.Index
		cut    int // tokens left out at both ends
	}{
		{"2 layers, 8192 scattered pages", page.NHD, 2, scattered(8192), 0},
		{"2 layers, 8192 scattered pages, cut, HND", page.HND, 2, scattered(8192), 3},
		{"2 layers, 8192 neighbours", page.NHD, 2, ascending(8192), 0},
		{"2 layers, 64 scattered pages", page.NHD, 2, scattered(64), 0},
		{"28 layers, 64 scattered pages", page.NHD, 28, scattered(64), 0},
		{"80 layers, 1024 scattered pages", page.NHD, 80, scattered(1024), 0},
	} {
		b.Run(strings.ReplaceAll(bb.name, " ", "_"), func(b *testing.B) {
			l := page.Layout{Order: bb.order, DType: page.BF16, Layers: bb.layers, Pages: 1 << 15, PageSize: 128, Heads: 2, HeadDim: 64}
			remote, local := side(l, bb.pages...), side(l, bb.pages...)
			n := len(bb.pages)
			dst, err := transfer.Copies(nil, 0, remote, local, bb.cut, n*128-bb.cut)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				if dst, err = transfer.Copies(dst[:0], 0, remote, local, bb.cut, n*128-bb.cut); err != nil {
					b.Fatal(err)
				}
			}
			ns := float64(b.Elapsed().Nanoseconds()) / float64(b.N) / float64(n)
			b.ReportMetric(ns, "ns/page")
			b.ReportMetric(ns/float64(bb.layers), "ns/chunk")
			b.ReportMetric(float64(len(dst)), "copies")
		})
	}
}

func ExampleCopies() {
	l := page.Layout{Order: page.NHD, DType: page.BF16, Layers: 2, Pages: 16, PageSize: 8, Heads: 2, HeadDim: 4}
	remote := transfer.Side{Layout: l, Pages: []page.Index{7, 8, 9}}
	local := transfer.Side{Layout: l, Pages: []page.Index{3, 4, 5}}
	copies, err := transfer.Copies(nil, 0, remote, local, 0, 24)
	for _, c := range copies {
		fmt.Println(c.Remote, c.Local, c.Bytes)
	}
	fmt.Println(err)
	// Output:
	// 1792 768 768
	// 5888 4864 768
	// <nil>
}
