package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/hashicorp/memberlist"
	"pgregory.net/rapid"
)

// key is the gossip key of a number.
func key(n byte) []byte { return bytes.Repeat([]byte{n}, KeyBytes) }

func ringOf(generation uint64, numbers ...byte) Ring {
	r := Ring{Generation: generation}
	for _, n := range numbers {
		r.Keys = append(r.Keys, key(n))
	}
	return r
}

func TestKeyID(t *testing.T) {
	// What an operator finds by himself: (printf 'kvferry gossip key'; head -c 32 /dev/zero) | sha256sum
	const want = "ba773285f758e374"
	k := IDOf(make([]byte, KeyBytes))
	if k.String() != want {
		t.Errorf("the id is %s, want %s", k, want)
	}
	if got, err := ParseKeyID(k.String()); err != nil || got != k {
		t.Errorf("%s came back as %s, %v", k, got, err)
	}
	for _, bad := range []string{"", want[1:], want + "00", "x" + want[1:]} {
		if k, err := ParseKeyID(bad); err == nil {
			t.Errorf("%q was read as %s", bad, k)
		}
	}
}

func TestRingNeverPrintsKeys(t *testing.T) {
	r := ringOf(3, 'k', 'l')
	var log bytes.Buffer
	for _, h := range []slog.Handler{slog.NewTextHandler(&log, nil), slog.NewJSONHandler(&log, nil)} {
		slog.New(h).Info("ring", "ring", r)
	}
	for _, text := range []string{fmt.Sprintf("%v %+v %#v %s", r, r, r, r), log.String()} {
		if strings.Contains(text, "kkkk") || strings.Contains(text, "107") || strings.Contains(text, "a2tra") || !strings.Contains(text, IDOf(r.Keys[0]).String()) {
			t.Errorf("a ring is shown as %s", text)
		}
	}
}

func TestRingCheck(t *testing.T) {
	for name, r := range map[string]Ring{
		"short key":        {Keys: [][]byte{make([]byte, 16)}},
		"twice":            ringOf(0, 1, 2, 1),
		"nine":             ringOf(0, 1, 2, 3, 4, 5, 6, 7, 8, 9),
		"none, later":      ringOf(1),
		"past the last":    ringOf(MaxGeneration+1, 1),
		"longer than that": {Keys: [][]byte{make([]byte, 33)}},
	} {
		if r.check() == nil {
			t.Errorf("%s: taken", name)
		}
	}
	for _, r := range []Ring{{}, ringOf(0, 1), ringOf(MaxGeneration, 1, 2, 3, 4, 5, 6, 7, 8)} {
		if err := r.check(); err != nil {
			t.Errorf("%s: %v", r, err)
		}
	}
}

// Whatever rings members have, all of them agree which is the newest; two from
// configurations stay as they are.
func TestEditionsAreOrdered(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string) edition {
			numbers := rapid.SliceOfNDistinct(rapid.ByteRange(1, 5), 1, 4, rapid.ID).Draw(t, name)
			return ringOf(rapid.Uint64Range(0, 3).Draw(t, name), numbers...).edition()
		}
		a, b, c := draw("a"), draw("b"), draw("c")
		if a.newer(a) {
			t.Fatalf("%s is newer than itself", a)
		}
		if a.newer(b) && b.newer(a) {
			t.Fatalf("%s and %s are newer than each other", a, b)
		}
		if a.newer(b) && b.newer(c) && !a.newer(c) {
			t.Fatalf("%s, %s, %s", a, b, c)
		}
		if a.generation+b.generation > 0 && !a.same(b) && !a.newer(b) && !b.newer(a) {
			t.Fatalf("neither of %s and %s is newer", a, b)
		}
		if a.generation+b.generation == 0 && a.newer(b) {
			t.Fatalf("%s takes the place of %s", a, b)
		}
	})
}

// memberlist decrypts while its keyring is changed: it never has the wrong
// first key, and keys that stay are missing for a moment at most.
func TestInstall(t *testing.T) {
	list, err := memberlist.NewKeyring(nil, key(1))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				for _, k := range list.GetKeys() {
					if len(k) != KeyBytes {
						t.Error("a key of another length")
					}
				}
			}
		})
	}
	rapid.Check(t, func(t *rapid.T) {
		r := ringOf(1, rapid.SliceOfNDistinct(rapid.ByteRange(1, 12), 1, MaxKeys, rapid.ID).Draw(t, "keys")...)
		install(list, r)
		has := list.GetKeys()
		if !bytes.Equal(has[0], r.Keys[0]) {
			t.Fatalf("%x encrypts, want %x", has[0][:1], r.Keys[0][:1])
		}
		by := func(a, b []byte) int { return bytes.Compare(a, b) }
		if got, want := slices.SortedFunc(slices.Values(has), by), slices.SortedFunc(slices.Values(r.Keys), by); !slices.EqualFunc(got, want, bytes.Equal) {
			t.Fatalf("the ring is %x, want %x", got, want)
		}
	})
	close(done)
	readers.Wait()
}

func TestReplace(t *testing.T) {
	var saved []Ring
	refusal := errors.New("no space left")
	var fail error
	var k *keyring
	save := func(r Ring) error {
		if _, own := k.now(); r.edition().same(own) {
			t.Error("a ring was saved when it was in use")
		}
		if fail == nil {
			saved = append(saved, r)
		}
		return fail
	}
	count := &counters{}
	k = newKeyring(Options{Ring: ringOf(0, 1), SaveRing: save}, count)
	replace := func(r Ring, base *edition) (bool, error) {
		t.Helper()
		return k.replace(t.Context(), r, base)
	}
	count.keyPackets.Store(7)
	if ok, err := replace(ringOf(1, 1, 2), nil); !ok || err != nil {
		t.Errorf("a newer ring: %v, %v", ok, err)
	}
	if n := count.keyPackets.Load(); n != 7 {
		t.Errorf("%d packets under the same key", n)
	}
	for name, r := range map[string]Ring{"older": ringOf(0, 3), "the same": ringOf(1, 1, 2)} {
		if ok, err := replace(r, nil); ok || err != nil {
			t.Errorf("%s: %v, %v", name, ok, err)
		}
	}
	other := ringOf(1, 1).edition()
	if ok, err := replace(ringOf(2, 2, 1), &other); ok || !errors.Is(err, ErrOvertaken) {
		t.Errorf("in place of another: %v, %v", ok, err)
	}
	fail = refusal
	if ok, err := replace(ringOf(2, 2, 1), nil); ok || !errors.Is(err, refusal) {
		t.Errorf("not saved: %v, %v", ok, err)
	}
	if r, _ := k.now(); r.Generation != 1 || !strings.Contains(k.trouble, "no space left") {
		t.Errorf("after that the ring is %s, trouble %q", r, k.trouble)
	}
	fail = nil
	if ok, err := replace(ringOf(2, 2, 1), nil); !ok || err != nil || k.trouble != "" {
		t.Errorf("saved at last: %v, %v, trouble %q", ok, err, k.trouble)
	}
	if n := count.keyPackets.Load(); n != 0 {
		t.Errorf("%d packets under a new key", n)
	}
	if len(saved) != 2 || !saved[1].edition().same(ringOf(2, 2, 1).edition()) || count.keySaves.Load() != 1 {
		t.Errorf("saved %v, %d refused", saved, count.keySaves.Load())
	}
	// While somebody saves, nobody else waits for ever.
	k.turn <- struct{}{}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(refusal)
	if _, err := k.replace(ctx, ringOf(3, 1), nil); !errors.Is(err, refusal) {
		t.Errorf("not our turn: %v", err)
	}
}
