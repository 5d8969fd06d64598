package kv

import (
	"bytes"
	"errors"
	"testing"

	"github.com/kvferry/kvferry/internal/page"
)

func TestTokensRefused(t *testing.T) {
	const row = 16 // bytes of a bf16 token
	for name, tt := range map[string]struct {
		layer int
		at    []page.Slot
		k, v  int
		dtype page.DType
		write error
		read  error
	}{
		"negative layer":  {-1, []page.Slot{{Page: 1}}, row, row, page.BF16, ErrRange, ErrRange},
		"layer":           {2, []page.Slot{{Page: 1}}, row, row, page.BF16, ErrRange, ErrRange},
		"layer, no token": {2, nil, 0, 0, page.BF16, ErrRange, ErrRange},
		"page":            {0, []page.Slot{{Page: 1}, {Page: 4}}, 2 * row, 2 * row, page.BF16, ErrRange, ErrRange},
		"largest page":    {0, []page.Slot{{Page: 1}, {Page: ^page.Index(0)}}, 2 * row, 2 * row, page.BF16, ErrRange, ErrRange},
		"slot":            {0, []page.Slot{{Page: 1}, {Page: 1, Slot: 8}}, 2 * row, 2 * row, page.BF16, ErrRange, ErrRange},
		"negative slot":   {0, []page.Slot{{Page: 1}, {Page: 1, Slot: -1}}, 2 * row, 2 * row, page.BF16, ErrRange, ErrRange},
		"no type":         {0, []page.Slot{{Page: 1}}, row, row, 0, ErrInvalid, ErrInvalid},
		"unknown type":    {0, []page.Slot{{Page: 1}}, row, row, 6, ErrInvalid, ErrInvalid},
		"k too short":     {0, []page.Slot{{Page: 1}}, row - 1, row, page.BF16, ErrInvalid, nil},
		"v too short":     {0, []page.Slot{{Page: 1}}, row, row - 1, page.BF16, ErrInvalid, nil},
		"short of fp32":   {0, []page.Slot{{Page: 1}}, row, row, page.FP32, ErrInvalid, nil},
		"just enough":     {0, []page.Slot{{Page: 1}}, row, row, page.BF16, nil, nil},
		"nothing":         {0, nil, 0, 0, page.BF16, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			c := noisy(t, worked(page.HND, 4), 1)
			before := clone(c)
			if err := c.Write(tt.layer, tt.at, make([]byte, tt.k), make([]byte, tt.v), tt.dtype); !errors.Is(err, tt.write) {
				t.Errorf("Write: %v, want %v", err, tt.write)
			}
			if tt.write != nil && !bytes.Equal(c.Bytes, before.Bytes) {
				t.Error("a refused write changed the cache")
			}
			k, v, err := c.Append([]byte("k"), []byte("v"), tt.layer, tt.at, tt.dtype)
			if !errors.Is(err, tt.read) {
				t.Errorf("Append: %v, want %v", err, tt.read)
			}
			if err != nil && (string(k) != "k" || string(v) != "v") {
				t.Errorf("a refused read returns %q and %q", k, v)
			}
		})
	}
}

func TestOfASlotNamedTwiceTheLaterTokenStays(t *testing.T) {
	c := noisy(t, worked(page.NHD, 4), 1)
	k, v := noise(48, 2), noise(48, 3)
	sink := page.Slot{Page: page.Sink, Slot: 3}
	if err := c.Write(1, []page.Slot{sink, {Page: 1}, sink}, k, v, page.BF16); err != nil {
		t.Fatal(err)
	}
	gotK, gotV, err := c.Read(1, []page.Slot{sink}, page.BF16)
	if err != nil || !bytes.Equal(gotK, k[32:]) || !bytes.Equal(gotV, v[32:]) {
		t.Errorf("not the last token, error %v", err)
	}
}

func TestAppendUsesTheRoomThereIs(t *testing.T) {
	c := noisy(t, worked(page.NHD, 4), 1)
	at := []page.Slot{{Page: 2, Slot: 1}, {Page: 1, Slot: 7}}
	wantK, wantV, err := c.Read(0, at, page.FP32)
	if err != nil {
		t.Fatal(err)
	}
	k, v := append(make([]byte, 0, 1+64), 'k'), []byte("v")
	gotK, gotV, err := c.Append(k, v, 0, at, page.FP32)
	if err != nil {
		t.Fatal(err)
	}
	if &gotK[0] != &k[0] {
		t.Error("k had room and was replaced")
	}
	if !bytes.Equal(gotK, append([]byte("k"), wantK...)) || !bytes.Equal(gotV, append([]byte("v"), wantV...)) {
		t.Error("not what Read returns behind what was there")
	}
	if n := testing.AllocsPerRun(10, func() { k, v, err = c.Append(gotK[:0], gotV[:0], 0, at, page.FP32) }); n > 0 {
		t.Errorf("%v allocations with room for all", n)
	}
}

func BenchmarkTokens(b *testing.B) {
	for _, order := range []page.Order{page.NHD, page.HND} {
		for _, from := range []page.DType{page.BF16, page.FP32} {
			l := page.Layout{Order: order, DType: page.BF16, Layers: 1, Pages: 65, PageSize: 16, Heads: 8, HeadDim: 128}
			c := noisy(b, l, 1)
			at := make([]page.Slot, 1024)
			for i := range at {
				at[i] = page.Slot{Page: page.Index(1 + i/16), Slot: int32(i % 16)}
			}
			k, v, err := c.Read(0, at, from)
			if err != nil {
				b.Fatal(err)
			}
			name := order.String() + "/" + from.String()
			b.Run("write/"+name, func(b *testing.B) {
				b.SetBytes(int64(len(k) + len(v)))
				for b.Loop() {
					if err := c.Write(0, at, k, v, from); err != nil {
						b.Fatal(err)
					}
				}
			})
			b.Run("read/"+name, func(b *testing.B) {
				b.SetBytes(int64(len(k) + len(v)))
				for b.Loop() {
					if k, v, err = c.Append(k[:0], v[:0], 0, at, from); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
