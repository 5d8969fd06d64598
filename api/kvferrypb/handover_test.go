package kvferrypb_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

// handles are of any kind: what is in one is nothing to the frame.
func handles() map[string][]byte {
	return map[string][]byte{"handle": []byte("a handle"), "handle_empty": {}}
}

func TestGoldenHandles(t *testing.T) {
	for name, h := range handles() {
		got, err := kvferrypb.HandleFrame(h)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join("testdata", name+".golden")
		if *update {
			if err := os.WriteFile(path, got, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %x, want %x (%v)", name, got, want, err)
		}
		r := bytes.NewReader(append(want, "rest"...))
		if back, err := kvferrypb.ReadHandle(r); err != nil || !bytes.Equal(back, h) || r.Len() != len("rest") {
			t.Errorf("%s: %q, %v, %d bytes are left", name, back, err, r.Len())
		}
		for n := range len(want) {
			wantErr := io.ErrUnexpectedEOF
			if n == 0 {
				wantErr = io.EOF
			}
			if back, err := kvferrypb.ReadHandle(bytes.NewReader(want[:n])); !errors.Is(err, wantErr) || back != nil {
				t.Fatalf("%s: %d of %d bytes: %q, %v, want %v", name, n, len(want), back, err, wantErr)
			}
		}
	}
}

func TestHandlesAreBounded(t *testing.T) {
	if _, err := kvferrypb.HandleFrame(make([]byte, kvferrypb.MaxHandle+1)); err == nil {
		t.Error("a handle over the bound has a frame")
	}
	for name, b := range map[string][]byte{
		"a length over the bound": {kvferrypb.HandedHandle, 1, 0, 2, 0},
		"host memory":             {kvferrypb.HandedFile},
		"something else":          {7, 0, 0, 0, 0},
	} {
		if h, err := kvferrypb.ReadHandle(bytes.NewReader(b)); err == nil || errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%s: %q, %v", name, h, err)
		}
	}
	frame, err := kvferrypb.HandleFrame(make([]byte, kvferrypb.MaxHandle))
	if err != nil {
		t.Fatal(err)
	}
	if h, err := kvferrypb.ReadHandle(bytes.NewReader(frame)); err != nil || len(h) != kvferrypb.MaxHandle {
		t.Errorf("the longest handle: %d bytes, %v", len(h), err)
	}
}

func TestCheckHanded(t *testing.T) {
	both := []byte{kvferrypb.HandedFile, kvferrypb.HandedHandle}
	for got := range 256 {
		for _, want := range both {
			if err := kvferrypb.CheckHanded(byte(got), want); (err == nil) != (byte(got) == want) {
				t.Errorf("%d for %d: %v", got, want, err)
			}
		}
	}
}

func FuzzReadHandle(f *testing.F) {
	for _, h := range handles() {
		b, err := kvferrypb.HandleFrame(h)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		f.Add(b[:len(b)-1])
	}
	f.Add([]byte{kvferrypb.HandedFile, 0, 0, 0, 0})
	f.Add([]byte{kvferrypb.HandedHandle, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := kvferrypb.ReadHandle(bytes.NewReader(b))
		if err != nil {
			return
		}
		again, err := kvferrypb.HandleFrame(h)
		if err != nil || !bytes.HasPrefix(b, again) {
			t.Errorf("%x was read as %x, which is %x (%v)", b, h, again, err)
		}
	})
}
