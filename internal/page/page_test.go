package page_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/page"
)

func TestCount(t *testing.T) {
	for _, tt := range []struct{ tokens, size, want int }{
		{0, 8, 0},
		{1, 8, 1},
		{7, 8, 1},
		{8, 8, 1},
		{9, 8, 2},
		{16, 8, 2},
		{17, 8, 3},
		{5, 1, 5},
		{100, 16, 7},
		{-1, 8, 0},
		{math.MinInt, 8, 0},
		{math.MaxInt, 1, math.MaxInt},
		{math.MaxInt, 2, math.MaxInt/2 + 1},
	} {
		if got := page.Count(tt.tokens, tt.size); got != tt.want {
			t.Errorf("Count(%d, %d) = %d, want %d", tt.tokens, tt.size, got, tt.want)
		}
	}
}

func TestRuns(t *testing.T) {
	const last = page.Index(math.MaxUint32)
	for name, tt := range map[string]struct {
		pages []page.Index
		want  []page.Run
	}{
		"none":              {nil, nil},
		"one":               {[]page.Index{7}, []page.Run{{7, 1}}},
		"neighbours":        {[]page.Index{3, 4, 5}, []page.Run{{3, 3}}},
		"descending":        {[]page.Index{5, 4, 3}, []page.Run{{5, 1}, {4, 1}, {3, 1}}},
		"gap":               {[]page.Index{1, 2, 4, 5, 6, 9}, []page.Run{{1, 2}, {4, 3}, {9, 1}}},
		"repeated":          {[]page.Index{1, 1, 2}, []page.Run{{1, 1}, {1, 2}}},
		"last then first":   {[]page.Index{last - 1, last, 0, 1}, []page.Run{{last - 1, 2}, {0, 2}}},
		"7,9,8 have no run": {[]page.Index{7, 9, 8}, []page.Run{{7, 1}, {9, 1}, {8, 1}}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := page.Runs(tt.pages); !slices.Equal(got, tt.want) {
				t.Errorf("Runs(%v) = %v, want %v", tt.pages, got, tt.want)
			}
			for r := range page.AllRuns(tt.pages) {
				if r != tt.want[0] {
					t.Errorf("first of AllRuns(%v) = %v, want %v", tt.pages, r, tt.want[0])
				}
				break
			}
		})
	}
}

func TestRunsNameThePages(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pages := rapid.SliceOf(rapid.Map(rapid.IntRange(0, 12), func(i int) page.Index { return page.Index(i) })).Draw(t, "pages")
		var back []page.Index
		runs := page.Runs(pages)
		for i, r := range runs {
			if i > 0 && runs[i-1].First+page.Index(runs[i-1].Count) == r.First {
				t.Fatalf("runs %v and %v are one", runs[i-1], r)
			}
			for n := range r.Count {
				back = append(back, r.First+page.Index(n))
			}
		}
		if !slices.Equal(back, pages) {
			t.Fatalf("Runs(%v) = %v", pages, runs)
		}
	})
}

func TestAllRunsAllocatesNothing(t *testing.T) {
	pages := []page.Index{1, 2, 4, 5, 6, 9}
	count := 0
	if n := testing.AllocsPerRun(100, func() {
		for range page.AllRuns(pages) {
			count++
		}
	}); n != 0 {
		t.Errorf("AllRuns allocates %v times", n)
	}
	if count == 0 {
		t.Error("AllRuns yields nothing")
	}
}

func ExampleRuns() {
	fmt.Println(page.Runs([]page.Index{3, 4, 5, 9}))
	// Output: [{3 3} {9 1}]
}
