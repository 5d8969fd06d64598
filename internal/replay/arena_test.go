package replay

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

func testLayouts() map[string]page.Layout {
	return map[string]page.Layout{
		"NHD bf16":             {Order: page.NHD, DType: page.BF16, Layers: 2, Pages: 6, PageSize: 8, Heads: 2, HeadDim: 18},
		"HND bf16":             {Order: page.HND, DType: page.BF16, Layers: 2, Pages: 6, PageSize: 8, Heads: 2, HeadDim: 16},
		"NHD fp8, odd vectors": {Order: page.NHD, DType: page.FP8E4M3, Layers: 3, Pages: 5, PageSize: 4, Heads: 3, HeadDim: 11},
		"HND fp32":             {Order: page.HND, DType: page.FP32, Layers: 1, Pages: 7, PageSize: 16, Heads: 1, HeadDim: 3},
	}
}

func mustArena(tb testing.TB, l page.Layout) arena {
	tb.Helper()
	a, err := newArena(make([]byte, l.Bytes()), l)
	if err != nil {
		tb.Fatal(err)
	}
	return a
}

// The arithmetic of this package and that of the nodes were written apart;
// they must mean the same bytes.
func TestAddressesAreThoseOfTheLayout(t *testing.T) {
	for name, l := range testLayouts() {
		t.Run(name, func(t *testing.T) {
			a := mustArena(t, l)
			seen := make([]bool, l.Bytes())
			for layer := range l.Layers {
				for p := range l.Pages {
					for slot := range l.PageSize {
						// One slot is one vector a head in K, then the same in V.
						var theirs []int64
						c := l.Chunks(layer, page.Index(p), slot, slot+1)
						for i := range c.Count {
							for at := c.At(i); at < c.At(i)+c.Bytes; at += a.vector {
								theirs = append(theirs, at)
							}
						}
						if len(theirs) != 2*l.Heads {
							t.Fatalf("slot has %d vectors, want %d", len(theirs), 2*l.Heads)
						}
						for side := range 2 {
							for head := range l.Heads {
								at := a.at(layer, page.Index(p), side, head, slot)
								if want := theirs[side*l.Heads+head]; at != want {
									t.Fatalf("layer %d page %d %c head %d slot %d at %d, want %d", layer, p, "KV"[side], head, slot, at, want)
								}
								for i := range a.vector {
									if seen[at+i] {
										t.Fatalf("byte %d belongs to two elements", at+i)
									}
									seen[at+i] = true
								}
							}
						}
					}
				}
			}
			for i, s := range seen {
				if !s {
					t.Fatalf("byte %d belongs to no element", i)
				}
			}
		})
	}
}

// The worked numbers of docs/wire.md: L=2, P=4, page size 8, H=2, D=4, bf16.
func TestAddressesByHand(t *testing.T) {
	l := page.Layout{Order: page.NHD, DType: page.BF16, Layers: 2, Pages: 4, PageSize: 8, Heads: 2, HeadDim: 4}
	nhd := mustArena(t, l)
	l.Order = page.HND
	hnd := mustArena(t, l)
	for _, tt := range []struct {
		a          arena
		side, head int
		want       int64
	}{
		{nhd, 0, 0, 1824},
		{nhd, 1, 0, 1952},
		{hnd, 0, 0, 1808},
		{hnd, 0, 1, 1872},
		{hnd, 1, 0, 1936},
		{hnd, 1, 1, 2000},
	} {
		if at := tt.a.at(1, 3, tt.side, tt.head, 2); at != tt.want {
			t.Errorf("%v layer 1 page 3 %c head %d slot 2 at %d, want %d", tt.a.layout.Order, "KV"[tt.side], tt.head, at, tt.want)
		}
	}
}

// scattered places n tokens on pages in no order.
func scattered(l page.Layout, n int, seed uint64) ([]page.Index, []place) {
	r := rand.New(rand.NewPCG(seed, 1))
	var pages []page.Index
	for _, p := range r.Perm(l.Pages - 1) {
		pages = append(pages, page.Index(p+1))
	}
	var places []place
	for i := range n {
		places = append(places, place{pages[i/l.PageSize], i % l.PageSize})
	}
	return pages[:page.Count(n, l.PageSize)], places
}

func TestCheckFindsOneBitAnywhere(t *testing.T) {
	for name, l := range testLayouts() {
		t.Run(name, func(t *testing.T) {
			a := mustArena(t, l)
			tokens := 3*l.PageSize - 1
			pages, places := scattered(l, tokens, 7)
			if n := a.write(newPattern("r", "main", 0), 0, places); n != int64(tokens)*l.TokenBytes() {
				t.Fatalf("write = %d bytes, want %d", n, int64(tokens)*l.TokenBytes())
			}
			written := bytes.Clone(a.bytes)
			if looked, wrong, first := a.check("r", stream{label: id.Main}, 0, pages, tokens); wrong != 0 || first != nil || looked != int64(tokens)*l.TokenBytes() {
				t.Fatalf("check of what was written = %d bytes, %d wrong, %v", looked, wrong, first)
			}
			mine := make([]bool, len(a.bytes))
			for layer := range l.Layers {
				for _, p := range places {
					for side := range 2 {
						for head := range l.Heads {
							at := a.at(layer, p.page, side, head, p.slot)
							for i := range a.vector {
								mine[at+i] = true
							}
						}
					}
				}
			}
			// By and by every byte of a vector: none is a multiple of 7 long.
			for i := 0; i < len(a.bytes); i += 7 {
				bit := byte(1) << (i % 8)
				a.bytes[i] ^= bit
				_, wrong, first := a.check("r", stream{label: id.Main}, 0, pages, tokens)
				a.bytes[i] ^= bit
				switch {
				case mine[i] && (wrong != 1 || first == nil || first.offset != int64(i) || first.have != first.want^bit):
					t.Fatalf("flipped bit in byte %d: %d wrong, %v", i, wrong, first)
				case !mine[i] && wrong != 0:
					t.Fatalf("byte %d is not the stream's, yet: %v", i, first)
				}
			}
			if !bytes.Equal(a.bytes, written) {
				t.Error("check changed the arena")
			}
		})
	}
}

func TestEveryByteDependsOnEverything(t *testing.T) {
	l := page.Layout{Order: page.NHD, DType: page.BF16, Layers: 2, Pages: 4, PageSize: 8, Heads: 2, HeadDim: 64}
	base := func(r id.Request, label id.Label, rank id.Rank, layer, side, head, token int) []byte {
		dst := make([]byte, 128)
		newPattern(r, label, rank).plane(layer, side, head, l.Heads).fill(dst, token)
		return dst
	}
	first := base("r", "main", 0, 0, 0, 0, 5)
	for name, other := range map[string][]byte{
		"request":         base("s", "main", 0, 0, 0, 0, 5),
		"label":           base("r", "cfg", 0, 0, 0, 0, 5),
		"name borders":    base("rm", "ain", 0, 0, 0, 0, 5),
		"rank":            base("r", "main", 1, 0, 0, 0, 5),
		"layer":           base("r", "main", 0, 1, 0, 0, 5),
		"K or V":          base("r", "main", 0, 0, 1, 0, 5),
		"head":            base("r", "main", 0, 0, 0, 1, 5),
		"token":           base("r", "main", 0, 0, 0, 0, 6),
		"token far away":  base("r", "main", 0, 0, 0, 0, 5+1<<20),
		"element (moved)": append(first[2:len(first):len(first)], 0, 0),
	} {
		equal := 0
		for i := range first {
			if first[i] == other[i] {
				equal++
			}
		}
		// By chance one byte in 256 is equal; 8 of 128 would be a miracle.
		if equal >= 8 {
			t.Errorf("%d of %d bytes do not depend on the %s", equal, len(first), name)
		}
	}
	seen := map[[2]byte]int{}
	for i := 0; i < len(first); i += 2 {
		seen[[2]byte(first[i:])]++
	}
	if len(seen) < 60 {
		t.Errorf("64 elements have %d values", len(seen))
	}
}

func TestUnusablePlaces(t *testing.T) {
	a := mustArena(t, testLayouts()["NHD bf16"])
	for _, p := range []place{{0, 0}, {6, 0}, {^page.Index(0), 0}, {1, -1}, {1, 8}} {
		if a.usable(p) == nil {
			t.Errorf("%+v is usable", p)
		}
	}
	if err := a.usable(place{5, 7}); err != nil {
		t.Error(err)
	}
	if _, err := newArena(make([]byte, a.layout.Bytes()-1), a.layout); err == nil {
		t.Error("an arena that is too short was taken")
	}
}

// localLayout is that of configs/local.yaml.
func localLayout(pages int) page.Layout {
	return page.Layout{Order: page.NHD, DType: page.BF16, Layers: 2, Pages: pages, PageSize: 128, Heads: 2, HeadDim: 64}
}

func BenchmarkWrite(b *testing.B) {
	l := localLayout(1024)
	a := mustArena(b, l)
	_, places := scattered(l, 512*128, 1)
	b.SetBytes(int64(len(places)) * l.TokenBytes())
	for b.Loop() {
		for i := 0; i < len(places); i += 512 {
			a.write(newPattern("r", "main", 0), i, places[i:i+512])
		}
	}
}

func BenchmarkCheck(b *testing.B) {
	l := localLayout(1024)
	a := mustArena(b, l)
	pages, places := scattered(l, 512*128, 1)
	a.write(newPattern("r", "main", 0), 0, places)
	b.SetBytes(int64(len(places)) * l.TokenBytes())
	for b.Loop() {
		if _, wrong, _ := a.check("r", stream{label: id.Main}, 0, pages, len(places)); wrong != 0 {
			b.Fatal(wrong)
		}
	}
}
