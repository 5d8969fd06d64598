package wire

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
)

func reference() Reference {
	return Reference{
		Publication: id.Publication{Owner: id.Life{Node: "prefill-1", Incarnation: incarnation}, Sequence: 1203},
		Request:     "cmpl-42", Seal: 77,
	}
}

var (
	oldKey = []byte("0123456789abcdef0123456789abcdef")
	newKey = []byte("fedcba9876543210fedcba9876543210")
)

func TestReferenceGolden(t *testing.T) {
	for name, keys := range map[string]Keys{"reference": nil, "reference-signed": {oldKey}} {
		s, err := keys.Encode(reference())
		if err != nil {
			t.Fatal(err)
		}
		golden(t, name, []byte(s))
		got, err := keys.Decode(s)
		if err != nil || got != reference() {
			t.Errorf("%s: Decode = %+v, %v", name, got, err)
		}
	}
}

func TestReferenceWithTheLongestNamesFits(t *testing.T) {
	r := Reference{
		Publication: id.Publication{
			Owner:    id.Life{Node: id.Node(strings.Repeat("n", id.MaxNode)), Incarnation: math.MaxUint64},
			Sequence: math.MaxUint64,
		},
		Request: id.Request(strings.Repeat("r", id.MaxRequest)), Seal: math.MaxUint32,
	}
	s, err := Keys{oldKey}.Encode(r)
	if err != nil {
		t.Fatal(err)
	}
	if len(s) != 495 || len(s) > MaxReference {
		t.Errorf("%d bytes, the doc comment says 495", len(s))
	}
	if got, err := (Keys{oldKey}).Decode(s); err != nil || got != r {
		t.Errorf("Decode = %+v, %v", got, err)
	}
}

func TestReferenceRing(t *testing.T) {
	encode := func(k Keys) string {
		t.Helper()
		s, err := k.Encode(reference())
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	for name, tt := range map[string]struct {
		by, at Keys
		ok     bool
	}{
		"same key":               {by: Keys{oldKey}, at: Keys{oldKey}, ok: true},
		"reader has rotated":     {by: Keys{oldKey}, at: Keys{newKey, oldKey}, ok: true},
		"owner has rotated":      {by: Keys{newKey, oldKey}, at: Keys{oldKey, newKey}, ok: true},
		"the first key signs":    {by: Keys{newKey, oldKey}, at: Keys{oldKey}},
		"another ring":           {by: Keys{newKey}, at: Keys{oldKey}},
		"unsigned to a ring":     {at: Keys{oldKey}},
		"signed, nobody has key": {by: Keys{oldKey}},
		"no ring anywhere":       {ok: true},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := tt.at.Decode(encode(tt.by))
			if tt.ok && (err != nil || r != reference()) {
				t.Errorf("Decode = %+v, %v", r, err)
			}
			if !tt.ok && !errors.Is(err, ErrReference) {
				t.Errorf("Decode = %+v, %v, want %v", r, err, ErrReference)
			}
		})
	}
}

func TestReferenceEncodeRefuses(t *testing.T) {
	for name, change := range map[string]func(r *Reference){
		"no node":        func(r *Reference) { r.Publication.Owner.Node = "" },
		"long node":      func(r *Reference) { r.Publication.Owner.Node = id.Node(strings.Repeat("n", id.MaxNode+1)) },
		"no incarnation": func(r *Reference) { r.Publication.Owner.Incarnation = 0 },
		"no sequence":    func(r *Reference) { r.Publication.Sequence = 0 },
		"no request":     func(r *Reference) { r.Request = "" },
		"long request":   func(r *Reference) { r.Request = id.Request(strings.Repeat("r", id.MaxRequest+1)) },
		"not UTF-8":      func(r *Reference) { r.Request = "\xff" },
	} {
		t.Run(name, func(t *testing.T) {
			r := reference()
			change(&r)
			if s, err := (Keys{oldKey}).Encode(r); !errors.Is(err, ErrReference) {
				t.Errorf("Encode = %q, %v", s, err)
			}
		})
	}
}

// TestReferenceForged changes every character of a signed reference.
func TestReferenceForged(t *testing.T) {
	keys := Keys{oldKey}
	s, err := keys.Encode(reference())
	if err != nil {
		t.Fatal(err)
	}
	for i := range len(s) {
		for _, c := range []byte("A_9") {
			if s[i] == c {
				continue
			}
			if r, err := keys.Decode(s[:i] + string(c) + s[i+1:]); !errors.Is(err, ErrReference) {
				t.Fatalf("character %d changed to %q: %+v, %v", i, c, r, err)
			}
		}
	}
	for name, f := range map[string]string{
		"nothing":         "",
		"prefix only":     "kvf1.",
		"other version":   "kvf2." + s[5:],
		"padded":          s + "=",
		"followed by one": s + "A",
		"cut":             s[:len(s)-4],
		"newline within":  s[:40] + "\n" + s[40:],
		"too long":        s + strings.Repeat("A", MaxReference),
	} {
		if r, err := keys.Decode(f); !errors.Is(err, ErrReference) {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
	}
}

func FuzzReference(f *testing.F) {
	for _, k := range []Keys{nil, {oldKey}} {
		s, err := k.Encode(reference())
		if err != nil {
			f.Fatal(err)
		}
		f.Add(s)
	}
	f.Add("kvf1.")
	f.Fuzz(func(t *testing.T, s string) {
		if _, err := (Keys{newKey}).Decode(s); err == nil {
			t.Fatalf("forged %q", s)
		}
		r, err := Keys(nil).Decode(s)
		if err != nil {
			if !errors.Is(err, ErrReference) {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		if again, err := Keys(nil).Encode(r); err != nil || again != s {
			t.Fatalf("%q became %q, %v", s, again, err)
		}
	})
}
