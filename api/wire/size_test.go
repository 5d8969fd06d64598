package wire

import (
	"math/rand"
	"slices"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// aged returns want pages from the free queue of an allocator of pool pages
// after steps requests of 16 to 16,384 pages. reverse: a request's pages are
// freed last first, as some engines do.
func aged(pool, want, steps int, reverse bool) []page.Index {
	r := rand.New(rand.NewSource(7))
	free := contiguous(0, pool)
	var live [][]page.Index
	release := func() {
		i := r.Intn(len(live))
		l := live[i]
		live = slices.Delete(live, i, i+1)
		if reverse {
			slices.Reverse(l)
		}
		free = append(free, l...)
	}
	take := func(n int) []page.Index {
		for len(free) < n && len(live) > 0 {
			release()
		}
		l := slices.Clone(free[:n])
		free = append(free[:0], free[n:]...)
		return l
	}
	for range steps {
		n := 16 << r.Intn(10)
		n += r.Intn(n)
		for len(live) > 0 && (len(free) < pool/8 || r.Intn(4) == 0) {
			release()
		}
		live = append(live, take(n))
	}
	return take(want)
}

const pool = 1 << 17

// published is one publication of a single label on ranks ranks.
func published(ranks, tokens int, list []page.Index) Batches {
	a := announcement(1204, 1204, []Ref{{Label: id.Main, RankMask: 1<<ranks - 1, Tokens: tokens}}, list)
	return Batches{{Owner: owner, Incarnation: incarnation, Floor: 1200, Announcements: []Announcement{a}}}
}

func TestSizes(t *testing.T) {
	for name, tt := range map[string]struct {
		m      Batches
		digest bool
		most   int
	}{
		"1k tokens, 1 rank, contiguous":           {m: published(1, 1024, contiguous(900, 64)), most: 95},
		"8k tokens, 8 ranks, aged":                {m: published(8, 8192, aged(pool, 512, 1000, false)), most: 140},
		"128k tokens, 8 ranks, freed in reverse":  {m: published(8, 131072, aged(pool, 8192, 3000, true)), most: InlineBytes},
		"128k tokens, 8 ranks, random":            {m: published(8, 131072, shuffled(8192, pool)), most: 17520},
		"128k tokens, 8 ranks, random, by digest": {m: published(8, 131072, shuffled(8192, pool)), digest: true, most: 95},
	} {
		t.Run(name, func(t *testing.T) {
			if tt.digest {
				tt.m[0].Announcements[0].Lists = nil
			}
			b, err := Encode(tt.m)
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%d bytes", len(b))
			if len(b) > tt.most {
				t.Errorf("%d bytes, at most %d", len(b), tt.most)
			}
		})
	}
}

func BenchmarkCodec(b *testing.B) {
	for _, bb := range []struct {
		name string
		m    Batches
	}{
		{"64 pages", published(1, 1024, contiguous(900, 64))},
		{"512 pages", published(8, 8192, aged(pool, 512, 1000, false))},
		{"8192 pages", published(8, 131072, aged(pool, 8192, 3000, true))},
		{"8192 random", published(8, 131072, shuffled(8192, pool))},
	} {
		enc, err := Encode(bb.m)
		if err != nil {
			b.Fatal(err)
		}
		b.Run("encode/"+bb.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Encode(bb.m); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run("decode/"+bb.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Decode(enc, MaxPages); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
