package replay

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

func TestPagesOf(t *testing.T) {
	for _, tt := range []struct{ in, out, labels, want int }{
		{1, 0, 1, 1}, {127, 1, 1, 1}, {128, 1, 1, 2}, {128, 0, 2, 2}, {120633, 900, 1, 950},
	} {
		if n := pagesOf(Request{Input: tt.in, Output: tt.out}, tt.labels, 128); n != tt.want {
			t.Errorf("%+v: %d pages, want %d", tt, n, tt.want)
		}
	}
}

// What is taken never exceeds what there is, on any node, and whoever waits
// gets its pages as soon as they fit.
func TestAdmissionNeverOverbooks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		totals := rapid.SliceOfN(rapid.IntRange(1, 50), 2, 5).Draw(t, "totals")
		a := newAdmission(totals)
		free := append([]int(nil), totals...)
		type held struct{ node, n int }
		var started []held
		t.Repeat(map[string]func(*rapid.T){
			"take": func(t *rapid.T) {
				first := rapid.IntRange(0, len(totals)-1).Draw(t, "first")
				second := (first + rapid.IntRange(1, len(totals)-1).Draw(t, "second")) % len(totals)
				n := rapid.IntRange(1, 60).Draw(t, "n")
				can := free[first] >= n && free[second] >= n
				if got := a.take(first, second, n); got != can {
					t.Fatalf("take %d of %d and %d = %v", n, free[first], free[second], got)
				}
				if can {
					free[first] -= n
					free[second] -= n
					started = append(started, held{first, n}, held{second, n})
				} else if a.fits(first, n) && a.fits(second, n) && len(started) == 0 {
					t.Fatal("an empty node refuses what fits")
				}
			},
			"release": func(t *rapid.T) {
				if len(started) == 0 {
					t.Skip("nothing is held")
				}
				i := rapid.IntRange(0, len(started)-1).Draw(t, "which")
				h := started[i]
				started = append(started[:i], started[i+1:]...)
				a.release(h.node, h.n)
				free[h.node] += h.n
			},
			"": func(t *rapid.T) {
				for i, f := range a.free {
					if f != free[i] || f < 0 || f > totals[i] {
						t.Fatalf("node %d has %d free pages of %d, want %d", i, f, totals[i], free[i])
					}
				}
			},
		})
	})
}

func TestAdmissionWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAdmission([]int{10, 10})
		if err := a.wait(t.Context(), 0, 1, 8); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- a.wait(t.Context(), 0, 1, 5) }()
		synctest.Wait()
		a.release(0, 8)
		synctest.Wait()
		select {
		case <-done:
			t.Fatal("started with pages on one node only")
		default:
		}
		if a.free[0] != 10 {
			t.Fatalf("a waiting request holds %d pages", 10-a.free[0])
		}
		a.release(1, 8)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := a.wait(ctx, 0, 1, 6); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("wait = %v, want the end of its context", err)
		}
	})
}
