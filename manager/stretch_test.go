package manager

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// TestTakeLike compares an arena in random use with a naive one, which is a list
// of free pages. Whatever was taken before, in either way, and given back in any
// order:
//
//   - a shortage depends on counts alone, and changes nothing;
//   - every run of what is asked for comes in pieces as long as the best stretches
//     of free pages there are, hence in one piece where one is long enough;
//   - a free page behind the last one is preferred;
//   - what is free is otherwise handed out first freed first.
func TestTakeLike(t *testing.T) {
	seen := map[string]int{}
	rapid.Check(t, func(t *rapid.T) {
		pages := 2 + below(240).Draw(t, "pages") // no stretch is too long to be told from longer ones
		a := newArena(pages, false)
		list := upFrom(1, pages-1)
		var taken []page.Index
		for range 1 + below(60).Draw(t, "operations") {
			switch below(3).Draw(t, "operation") {
			case 0:
				n := below(pages).Draw(t, "n")
				got, ok := a.take(nil, n)
				if want := list[:min(n, len(list))]; ok != (n <= len(list)) || ok && !slices.Equal(got, want) {
					t.Fatalf("took %v, %v of %v, want %v", got, ok, list, want)
				}
				taken, list = append(taken, got...), list[len(got):]
			case 1:
				taken = rapid.Permutation(taken).Draw(t, "taken")
				if below(2).Draw(t, "in order") == 0 {
					slices.Sort(taken)
				}
				n := below(len(taken)+1).Draw(t, "n")
				for _, p := range taken[:n] {
					if err := a.release(p); err != nil {
						t.Fatal(err)
					}
				}
				list, taken = append(slices.Clone(list), taken[:n]...), taken[n:]
			case 2:
				var like []page.Index
				for n := below(pages+2).Draw(t, "n"); len(like) < n; { // scattered, or in runs
					first := page.Index(1 + len(like)*1000)
					like = append(like, upFrom(first, min(n-len(like), 1+below(80).Draw(t, "run")))...)
				}
				next := page.Index(below(pages+1).Draw(t, "next"))
				before := []page.Index{4711}
				got, ok := a.takeLike(before, like, next)
				if !ok {
					if len(like) <= len(list) || len(got) != 1 {
						t.Fatalf("took %v of %d pages for %d", got, len(list), len(like))
					}
					seen["no pages"]++
					break
				}
				if len(got) != 1+len(like) || got[0] != 4711 {
					t.Fatalf("took %v for %v", got, like)
				}
				got = got[1:]
				if len(got) > 0 && slices.Contains(list, next) {
					seen["next"]++
					if got[0] != next {
						t.Fatalf("took %v, and page %d is free", got, next)
					}
				}
				pieces, want := lengths(like, got), naive(list, like, next)
				if !slices.Equal(pieces, want) {
					t.Fatalf("took %v for %v, in pieces of %v; of %v %v are to be had", got, like, pieces, list, want)
				}
				if len(pieces) == len(page.Runs(like)) {
					seen["mirrored"]++
				} else {
					seen["in more pieces"]++
				}
				for _, p := range got {
					i := slices.Index(list, p)
					if i < 0 {
						t.Fatalf("took page %d, which is not free or was taken twice", p)
					}
					list = slices.Concat(list[:i], list[i+1:])
				}
				taken = append(taken, got...)
			}
			if rest := slices.Collect(a.queue.all()); !slices.Equal(rest, list) || a.counts[free] != len(list) || a.counts[owned] != len(taken) || a.queue.n != len(list) {
				t.Fatalf("free are %v, counts %v; want %v", rest, a.counts, list)
			}
			for p := range a.pages {
				if is := slices.Contains(list, page.Index(p)); is != a.free.has(page.Index(p)) || is != (a.pages[p].place == free) {
					t.Fatalf("page %d is %v, its bit %v; want free %v", p, a.pages[p].place, a.free.has(page.Index(p)), is)
				}
			}
		}
	})
	t.Log(seen)
	for _, event := range []string{"no pages", "next", "mirrored", "in more pieces"} {
		if seen[event] < 5 && !t.Failed() {
			t.Errorf("hardly ever happened: %s", event)
		}
	}
}

// naive returns in what pieces the runs of like are to be had: the first one
// from next on, if that is free, and every other from the shortest stretch that has
// as many, or else from the longest.
func naive(list, like []page.Index, next page.Index) (pieces []int) {
	var stretches []int
	ahead := 0 // pages from next on
	for _, r := range page.Runs(slices.Sorted(slices.Values(list))) {
		if r.First <= next && next < r.First+page.Index(r.Count) {
			ahead = int(r.First) + int(r.Count) - int(next)
		}
		stretches = append(stretches, int(r.Count))
		if ahead > 0 && len(pieces) == 0 && len(like) > 0 {
			n := min(ahead, int(page.Runs(like)[0].Count))
			pieces = append(pieces, n)
			stretches[len(stretches)-1] -= ahead
			stretches = append(stretches, ahead-n)
		}
	}
	for i, r := range page.Runs(like) {
		n := int(r.Count)
		if i == 0 && len(pieces) > 0 {
			n -= pieces[0]
		}
		for n > 0 {
			slices.Sort(stretches)
			i, _ := slices.BinarySearch(stretches, n)
			i = min(i, len(stretches)-1)
			got := min(n, stretches[i])
			pieces = append(pieces, got)
			stretches[i] -= got
			n -= got
		}
	}
	return pieces
}

// lengths returns how many pages each copy takes if neighbours in both lists are
// moved as one.
func lengths(remote, local []page.Index) (pieces []int) {
	for i := range remote {
		if i > 0 && remote[i] == remote[i-1]+1 && local[i] == local[i-1]+1 {
			pieces[len(pieces)-1]++
		} else {
			pieces = append(pieces, 1)
		}
	}
	return pieces
}

// In an arena of a million pages, of which every other one is free, it looks no
// further than its bound, and takes the first freed when that is used up.
func TestWornArena(t *testing.T) {
	a := wornArena(t)
	first := a.queue.first()
	like := scattered(8192, 128)
	got, ok := a.takeLike(nil, like, page.Sink)
	if n, most := len(a.found.list), looks+len(like); !ok || len(got) != len(like) || n > most || n < most/2 {
		t.Errorf("%d pages, %v; looked at %d stretches, at most %d", len(got), ok, n, most)
	}
	if a.counts[free] != wornPages/2-len(like) || a.queue.n != a.counts[free] {
		t.Errorf("%d pages are free, %d in the queue", a.counts[free], a.queue.n)
	}
	if !slices.Contains(got, first) {
		t.Errorf("page %d was freed first, and is not among them", first)
	}
}

// Neighbours in an arena that is larger than what the stretches are told apart by.
func TestLongRuns(t *testing.T) {
	a := newArena(20000, false)
	taken, _ := a.take(nil, 19999)
	for _, p := range taken {
		if p%5000 != 0 && (p < 7000 || p > 7300) { // 4999 pages, thrice less, and 1999 and 2699
			if err := a.release(p); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, n := range []int{300, 4000, 1, 255, 256, 1998} {
		got, ok := a.takeLike(nil, upFrom(7, n), page.Sink)
		if !ok || len(page.Runs(got)) != 1 {
			t.Errorf("%d pages come in runs %v", n, page.Runs(got))
		}
	}
}

// A run does not break up a stretch that a longer one needs.
func TestShortestStretch(t *testing.T) {
	a := newArena(400, false)
	taken, _ := a.take(nil, 399)
	for _, p := range taken {
		if p <= 200 || p > 300 && p <= 370 || p > 380 && p <= 385 {
			if err := a.release(p); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, n := range []int{20, 4, 200, 50} {
		got, ok := a.takeLike(nil, upFrom(7, n), page.Sink)
		if !ok || len(page.Runs(got)) != 1 {
			t.Errorf("%d pages come in runs %v", n, page.Runs(got))
		}
	}
	if a.counts[free] != 1 {
		t.Errorf("%d pages are free", a.counts[free])
	}
}

const wornPages = 1 << 20

// wornArena has every other page free, in an order that says nothing.
func wornArena(t testing.TB) arena {
	a := newArena(wornPages+1, false)
	pages, ok := a.take(nil, wornPages)
	for i := range pages {
		if p := pages[(i*7919+wornPages/3)%wornPages]; p%2 == 0 {
			if err := a.release(p); err != nil || !ok {
				t.Fatal(err)
			}
		}
	}
	return a
}

// scattered lists pages in runs.
func scattered(pages, run int) (list []page.Index) {
	for len(list) < pages {
		list = append(list, upFrom(page.Index(1+2*len(list)), min(run, pages-len(list)))...)
	}
	return list
}

// What is retrieved lies as its source does.
func TestMirror(t *testing.T) {
	// Thirty requests have a page each, and page 31 is free; those in gone are
	// removed in that order, so that their pages are free in it.
	start := func(t *testing.T, gone ...int) bed {
		b := newBed(t, 32, 8)
		b.ingest("r")
		for i := 1; i < 31; i++ {
			r := id.Request(fmt.Sprint(i))
			b.ingest(r)
			b.grow(r, "main", 8)
		}
		for _, i := range gone {
			b.remove(id.Request(fmt.Sprint(i)), false)
		}
		return b
	}
	local := func(r *Retrieval) (list []page.Index) {
		for _, m := range r.Moves {
			list = append(list, m.Local...)
		}
		return list
	}
	source := func(final bool, pages ...page.Index) *Source {
		return peer(final, Stream{Label: "main", Tokens: 8 * len(pages), Pages: pages})
	}
	t.Run("runs", func(t *testing.T) {
		b := start(t, 17, 5, 12, 11, 6, 13, 23)
		got := b.retrieve("r", source(true, 41, 42, 100, 51, 52, 53), 0, Reading)
		b.same("local", local(got), []page.Index{5, 6, 31, 11, 12, 13})
		b.freeList(17, 23)
		b.ok(b.Failed(got.ID))
		b.freeList(17, 23, 5, 6, 31, 11, 12, 13)
	})
	t.Run("goes on behind what is there", func(t *testing.T) {
		b := start(t, 9, 4, 3, 11, 10, 20, 21, 22)
		b.ok(b.Landed(b.retrieve("r", source(false, 41, 42), 0, Reading).ID))
		b.pages("r", "main", 3, 4)
		b.remove("6", false)
		b.remove("5", false)
		got := b.retrieve("r", source(true, 41, 42, 43, 44, 45), 0, Reading)
		b.same("local", local(got), []page.Index{5, 6, 31})
		b.freeList(9, 11, 10, 20, 21, 22)
	})
	t.Run("goes on in the middle of a page", func(t *testing.T) {
		b := start(t, 9, 4, 3, 11, 10, 20, 21, 22)
		part := source(false, 41, 42)
		part.Publication.Streams[0].Tokens = 13
		b.ok(b.Landed(b.retrieve("r", part, 0, Reading).ID))
		b.remove("6", false)
		b.remove("5", false)
		got := b.retrieve("r", source(true, 41, 42, 43, 44), 0, Reading)
		b.same("local", local(got), []page.Index{4, 5, 6})
	})
	t.Run("does not where the source does not", func(t *testing.T) {
		b := start(t, 3, 4, 10, 11)
		b.ok(b.Landed(b.retrieve("r", source(false, 41, 42), 0, Reading).ID))
		b.remove("5", false)
		b.remove("6", false)
		b.remove("7", false)
		got := b.retrieve("r", source(true, 41, 42, 61, 62), 0, Reading)
		b.same("local", local(got), []page.Index{10, 11})
	})
	t.Run("behind a reserve", func(t *testing.T) {
		b := start(t, 9, 4, 3, 10, 20, 21)
		b.ok(b.Landed(b.retrieve("r", source(false, 41, 42), 0, Reading).ID))
		first := peer(true, Stream{Label: "main", Tokens: 32, Pages: []page.Index{71, 72, 73, 74}})
		first.Name.Sequence++ // another one: it starts over, with the pages that it has
		b.remove("5", false)
		got := b.retrieve("r", first, 0, Reading)
		b.same("local", local(got), []page.Index{3, 4, 5, 31})
	})
	t.Run("around what was released", func(t *testing.T) {
		b := start(t, 9, 4, 3, 10, 20, 21, 22)
		src := source(true, 41, 43, 44, 45)
		src.Publication.Streams[0].Tokens, src.Publication.Streams[0].Start, src.Publication.Streams[0].Prefix = 40, 16, 8
		got := b.retrieve("r", src, 0, Reading)
		b.same("moves", got.Moves, []Move{
			{"main", 0, 8, 0, []page.Index{41}, 0, []page.Index{31}, []id.Rank{0}, 0, true},
			{"main", 16, 40, 16, []page.Index{43, 44, 45}, 16, []page.Index{20, 21, 22}, []id.Rank{0}, 0, true},
		})
	})
	t.Run("goes on behind what was released", func(t *testing.T) {
		b := start(t, 10, 11, 12, 13, 14, 20, 21, 22)
		b.grow("1", "main", 8) // 31
		src := source(true, 41, 42, 43, 44)
		src.Publication.Streams[0].Tokens, src.Publication.Streams[0].Start, src.Publication.Streams[0].Prefix = 40, 16, 8
		b.same("local", local(b.retrieve("r", src, 0, Reading)), []page.Index{10, 11, 12, 13})
	})
	t.Run("of the first owner", func(t *testing.T) {
		b := newBed(t, 32, 8, func(o *Options) { o.Geometry.WorldSize, o.Ranks = 2, []id.Rank{0, 1} })
		b.ingest("r", "x", "y", "z")
		b.grow("x", "main", 16)
		b.grow("y", "main", 8)
		b.grow("z", "main", 27*8)
		b.remove("x", false)
		src := source(true, 41, 51, 52)
		src.Geometry.WorldSize = 2
		other := Stream{Label: "main", Ranks: []id.Rank{1}, Tokens: 24, Pages: []page.Index{61, 62, 63}}
		src.Publication.Streams = append(src.Publication.Streams, other)
		got := b.retrieve("r", src, 0, Reading)
		b.same("local", got.Moves[0].Local, []page.Index{31, 1, 2})
		b.same("local", got.Moves[1].Local, []page.Index{31, 1, 2})
	})
}

// A request of 8,192 pages in 64 runs into an arena of a million pages, of which
// every other one is free: the worst there is.
func BenchmarkTakeLikeWorn(b *testing.B) {
	a := wornArena(b)
	for _, n := range []int{1, 64, 8192, -8192} {
		name := fmt.Sprintf("pages=%d", n)
		if n < 0 {
			name = "first freed"
		}
		b.Run(name, func(b *testing.B) {
			like := scattered(max(n, -n), 128)
			var got []page.Index
			for b.Loop() {
				if n > 0 {
					got, _ = a.takeLike(got[:0], like, page.Sink)
				} else {
					got, _ = a.take(got[:0], len(like))
				}
				b.StopTimer()
				for _, p := range got {
					if err := a.release(p); err != nil {
						b.Fatal(err)
					}
				}
				b.StartTimer()
			}
		})
	}
}
