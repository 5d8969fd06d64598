package replay

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

func onDevice(t *testing.T, l page.Layout, o transfertest.DeviceOptions) (*device, memory.Arena, *transfertest.Device) {
	t.Helper()
	emulated := transfertest.NewDevice(o)
	a, err := emulated.Alloc(l.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	stager, ok := a.(memory.Stager)
	if !ok {
		t.Fatalf("%T", a)
	}
	d, err := newDevice(stager, l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(d.Close(), a.Close(), emulated.Close()); err != nil {
			t.Error(err)
		}
	})
	return d, a, emulated
}

// contents are all bytes of an arena.
func contents(t *testing.T, a memory.Arena) []byte {
	t.Helper()
	b := make([]byte, a.Size())
	transfertest.Peek(a, 0, b)
	return b
}

// On a device tokens are written and looked at as in host memory: the same bytes
// in the same places, nothing beside them touched, the same mistakes found.
func TestDeviceIsAsTheHost(t *testing.T) {
	for name, l := range testLayouts() {
		t.Run(name, func(t *testing.T) {
			a := mustArena(t, l)
			d, there, emulated := onDevice(t, l, transfertest.DeviceOptions{})
			for i := range a.bytes {
				a.bytes[i] = byte(i * 7)
			}
			transfertest.Poke(there, 0, a.bytes)
			tokens := 2*l.PageSize + 1
			pages, places := scattered(l, tokens, 3)
			kv := newPattern("r", "main", 0)
			for from := 0; from < tokens; from += l.PageSize / 2 {
				to := min(tokens, from+l.PageSize/2)
				want := a.write(kv, from, places[from:to])
				if n, err := d.write(kv, from, places[from:to]); err != nil || n != want {
					t.Fatalf("wrote %d bytes, want %d: %v", n, want, err)
				}
			}
			if !bytes.Equal(contents(t, there), a.bytes) {
				t.Fatal("the device has other bytes than the host")
			}
			s := stream{label: "main", forked: tokens}
			for _, at := range []int{-1, 0, tokens - 1} {
				if at >= 0 {
					v := a.at(l.Layers-1, places[at].page, 1, l.Heads-1, places[at].slot)
					a.bytes[v+a.vector-1] ^= 4
					transfertest.Poke(there, v+a.vector-1, a.bytes[v+a.vector-1:][:1])
				}
				looked, wrong, first := a.check("r", s, 0, pages, tokens)
				gotLooked, gotWrong, gotFirst, err := d.check("r", s, 0, pages, tokens)
				if err != nil || gotLooked != looked || gotWrong != wrong {
					t.Fatalf("%d of %d bytes are wrong, want %d of %d: %v", gotWrong, gotLooked, wrong, looked, err)
				}
				if (first == nil) != (gotFirst == nil) || first != nil && *first != *gotFirst {
					t.Fatalf("first mistake %v, want %v", gotFirst, first)
				}
			}
			if calls := emulated.Counts().Calls; calls[transfertest.FromHost] > 20 || calls[transfertest.ToHost] > 20 {
				t.Errorf("%v calls of the device for %d tokens", calls, tokens)
			}
		})
	}
}

// A device that dies ends what is written and what is looked at.
func TestDeadDevice(t *testing.T) {
	l := testLayouts()["NHD bf16"]
	d, _, emulated := onDevice(t, l, transfertest.DeviceOptions{})
	broken := errors.New("it has fallen off the bus")
	emulated.Kill(broken)
	pages, places := scattered(l, 3, 1)
	if _, err := d.write(newPattern("r", "main", 0), 0, places); !errors.Is(err, broken) {
		t.Errorf("write: %v", err)
	}
	if _, _, _, err := d.check("r", stream{label: "main", forked: 3}, 0, slices.Clone(pages), 3); !errors.Is(err, broken) {
		t.Errorf("check: %v", err)
	}
}

// A device that pins no memory is slow, and takes and gives the same bytes.
func TestDeviceThatPinsNothing(t *testing.T) {
	l := testLayouts()["NHD bf16"]
	d, _, emulated := onDevice(t, l, transfertest.DeviceOptions{Pin: errors.New("no more of it")})
	pages, places := scattered(l, 3, 1)
	if _, err := d.write(newPattern("r", "main", 0), 0, places); err != nil {
		t.Fatal(err)
	}
	if looked, wrong, first, err := d.check("r", stream{label: "main", forked: 3}, 0, pages, 3); err != nil || looked == 0 || wrong != 0 {
		t.Errorf("%d of %d bytes are wrong: %v, %v", wrong, looked, first, err)
	}
	if c := emulated.Counts(); c.Slow == 0 {
		t.Errorf("nothing was slow: %+v", c)
	}
}
