package wire

import (
	"bytes"
	"errors"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// TestPacker: whatever is put in, the message is what Encode makes of what was
// taken, and never longer than it may be.
func TestPacker(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := Batch{
			Owner: id.NodeHash(rapid.Uint64().Draw(t, "owner")), Incarnation: id.Incarnation(rapid.Uint64().Draw(t, "incarnation")),
			Floor: id.Sequence(rapid.Uint64Max(1<<62).Draw(t, "floor") >> rapid.IntRange(0, 62).Draw(t, "shift")),
		}
		most := rapid.IntRange(60, 2000).Draw(t, "most")
		p := NewPacker(want, most)
		if !p.Empty() {
			t.Fatal("it is not empty")
		}
		check := func(took bool, err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
			slices.Sort(want.Releases)
			want.Releases = slices.Compact(want.Releases)
			b, err := Encode(Batches{want})
			if err != nil {
				t.Fatal(err)
			}
			if got := p.Message(); !bytes.Equal(got, b) || p.Len() != len(b) || len(b) > most || p.Empty() != (len(want.Announcements) == 0 && len(want.Releases) == 0) {
				t.Fatalf("took %v, %d bytes of %d:\n%x\nwant\n%x", took, p.Len(), most, got, b)
			}
		}
		for range rapid.IntRange(0, 20).Draw(t, "steps") {
			some := ascending(t, want.Floor, 1, 30)
			if rapid.Bool().Draw(t, "announce") {
				a := anyAnnouncement(t, want.Floor)
				some = rapid.Permutation(some).Draw(t, "releases")
				took, err := p.Announce(&a, some...)
				if took {
					want.Announcements = append(want.Announcements, a)
					want.Releases = append(want.Releases, some...)
				}
				check(took, err)
				continue
			}
			for _, s := range some {
				took, err := p.Release(s)
				if took {
					want.Releases = append(want.Releases, s)
				}
				check(took, err)
			}
		}
	})
}

// TestPackerFills: what it refuses would not have fitted.
func TestPackerFills(t *testing.T) {
	refs := []Ref{{Label: id.Main, RankMask: 1, Tokens: 1024}}
	b := Batch{Owner: owner, Incarnation: incarnation, Floor: 1 << 40}
	p := NewPacker(b, ItemBytes)
	for {
		s := b.Floor + id.Sequence(len(b.Announcements)+1)
		a := announcement(s, s, refs, contiguous(page.Index(s-b.Floor)*64, 64))
		took, err := p.Announce(&a)
		if err != nil {
			t.Fatal(err)
		}
		b.Announcements = append(b.Announcements, a)
		if !took {
			break
		}
	}
	if enc, err := Encode(Batches{b}); err != nil || len(enc) <= ItemBytes {
		t.Errorf("refused, but %d bytes fit: %v", len(enc), err)
	}
	n := len(b.Announcements) - 1
	t.Logf("%d announcements of 1k tokens in %d bytes, %d each", n, p.Len(), p.Len()/n)
	if n < 18 {
		t.Errorf("only %d announcements fit into an item", n)
	}
}

func TestPackerRefuses(t *testing.T) {
	p := NewPacker(Batch{Floor: 10}, ItemBytes)
	good := announcement(12, 11, []Ref{{Label: id.Main, RankMask: 1}}, contiguous(1, 3))
	under := good
	under.Publication = 10
	for name, err := range map[string]error{
		"announcement under the floor":   second(p.Announce(&under)),
		"release under the floor":        second(p.Release(10)),
		"release beside, under it":       second(p.Announce(&good, 12, 10)),
		"announcement without its ranks": second(p.Announce(&Announcement{Sequence: 11, Publication: 11, Refs: []Ref{{Label: id.Main}}})),
	} {
		if !errors.Is(err, ErrMessage) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if !p.Empty() {
		t.Errorf("something was taken: %x", p.Message())
	}
}

func second[A, B any](_ A, b B) B { return b }

func TestTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := anyAnnouncement(t, 0)
		b, err := EncodeTable(a.Refs, a.Lists)
		if err != nil {
			t.Fatal(err)
		}
		refs, lists, err := DecodeTable(b)
		if err != nil || !reflect.DeepEqual(refs, a.Refs) || !reflect.DeepEqual(lists, a.Lists) {
			t.Fatalf("%+v %v became %+v %v, %v", a.Refs, a.Lists, refs, lists, err)
		}
		if _, _, err := DecodeTable(append(slices.Clip(b), 0)); !errors.Is(err, ErrMessage) {
			t.Fatalf("with a byte more: %v", err)
		}
	})
	if _, err := EncodeTable([]Ref{{Label: id.Main}}, nil); !errors.Is(err, ErrMessage) {
		t.Errorf("a stream without a rank: %v", err)
	}
	if b, err := EncodeTable([]Ref{{Label: id.Main, RankMask: 1, Tokens: 1024}}, [][]page.Index{contiguous(900, 64)}); err != nil || len(b) > 26 {
		t.Errorf("1k tokens of one rank take %d bytes: %v", len(b), err)
	}
}

// TestAsksASample: about one member in modulus answers, another one every time.
func TestAsksASample(t *testing.T) {
	const members, rounds = 1000, 50
	asked := make(map[id.NodeHash]int)
	for number := range uint64(rounds) {
		b := Beacon{Owner: owner, Number: number + 1, Modulus: members / 16}
		n := 0
		for m := range id.NodeHash(members) {
			if b.Asks(m) {
				n++
				asked[m]++
			}
		}
		if n < 3 || n > 40 {
			t.Errorf("beacon %d asks %d members, want about 16", b.Number, n)
		}
		if !(&Beacon{Number: number, Modulus: 1}).Asks(id.NodeHash(number)) {
			t.Error("modulus 1 does not ask everybody")
		}
	}
	if len(asked) < members/3 {
		t.Errorf("in %d rounds only %d members were asked", rounds, len(asked))
	}
}
