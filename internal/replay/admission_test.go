package replay

import (
	"testing"

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
		// With a host tier there is room for more, but for one stream of it.
		widest := rapid.IntRange(0, 9).Draw(t, "widest")
		a := newAdmission(widest)
		var nodes []*budget
		for i, n := range totals {
			host := rapid.IntRange(0, 20).Draw(t, "host")
			nodes = append(nodes, newBudget(n, host))
			totals[i] += max(0, host-widest)
		}
		free := append([]int(nil), totals...)
		type held struct{ node, n int }
		var started []held
		t.Repeat(map[string]func(*rapid.T){
			"take": func(t *rapid.T) {
				first := rapid.IntRange(0, len(totals)-1).Draw(t, "first")
				second := (first + rapid.IntRange(1, len(totals)-1).Draw(t, "second")) % len(totals)
				n := rapid.IntRange(1, 60).Draw(t, "n")
				can := free[first] >= n && free[second] >= n
				if got := a.take(nodes[first], nodes[second], n); got != can {
					t.Fatalf("take %d of %d and %d = %v", n, free[first], free[second], got)
				}
				if can {
					free[first] -= n
					free[second] -= n
					started = append(started, held{first, n}, held{second, n})
				} else if nodes[first].fits(n) && nodes[second].fits(n) && len(started) == 0 {
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
				a.release(nodes[h.node], h.n)
				free[h.node] += h.n
			},
			"": func(t *rapid.T) {
				for i, n := range nodes {
					if left := totals[i] - n.taken; left != free[i] || left < 0 || n.taken < 0 {
						t.Fatalf("node %d has %d of %d pages taken, want %d", i, n.taken, totals[i], totals[i]-free[i])
					}
				}
			},
		})
	})
}

// Whoever waits is woken by every release, also by one that came before it
// waited.
func TestReleaseWakes(t *testing.T) {
	a := newAdmission(0)
	first, second := newBudget(10, 0), newBudget(10, 0)
	if !a.take(first, second, 8) || a.take(first, second, 3) {
		t.Fatal("8 of 10 pages were refused, or 11 given")
	}
	a.release(first, 8)
	<-a.changed
	if a.take(first, second, 5) || first.taken != 0 {
		t.Fatalf("pages of one node alone were given: %d are taken", first.taken)
	}
	a.release(second, 8)
	a.release(second, 0)
	<-a.changed
	if !a.take(first, second, 5) {
		t.Error("pages that are free were refused")
	}
	select {
	case <-a.changed:
		t.Error("woken twice by what one look sees")
	default:
	}
}
