package cuda_test

import (
	"bytes"
	"encoding/hex"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/cuda"
)

var update = flag.Bool("update", false, "write the golden files")

func handles() map[string]cuda.Handle {
	h := cuda.Handle{Kind: cuda.Legacy, Offset: 0x0102030405, Bytes: 0x060708}
	for i := range h.UUID {
		h.UUID[i] = byte(0xa0 + i)
	}
	for i := range h.IPC {
		h.IPC[i] = byte(i + 1)
	}
	h.Word = 0xf1f2f3f4f5f6f7f8
	f := h
	f.Kind, f.IPC, f.Offset, f.Chunks = cuda.Files, [64]byte{}, 4096, []int64{2 << 20, 20 << 20, 4 << 20}
	f.Word = 0
	return map[string]cuda.Handle{"legacy": h, "files": f}
}

func TestHandleOnTheWire(t *testing.T) {
	for name, h := range handles() {
		wire := h.Append([]byte("x"))[1:]
		path := filepath.Join("testdata", name+".golden")
		text := []byte(hex.EncodeToString(wire) + "\n")
		if *update {
			if err := os.WriteFile(path, text, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		golden, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(golden, text) {
			t.Errorf("%s is %s, was %s", name, text, golden)
		}
		if got, err := cuda.ParseHandle(wire); err != nil || !reflect.DeepEqual(got, h) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		for n := range wire {
			if _, err := cuda.ParseHandle(wire[:n]); err == nil {
				t.Errorf("%s: the first %d of %d bytes are a handle", name, n, len(wire))
			}
		}
		if _, err := cuda.ParseHandle(append(wire, 0)); err == nil {
			t.Errorf("%s: a byte more is a handle", name)
		}
	}
}

func FuzzParseHandle(f *testing.F) {
	for _, h := range handles() {
		f.Add(h.Append(nil))
	}
	f.Add(bytes.Repeat([]byte{0xff}, 106))
	f.Add([]byte{1, 2})
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := cuda.ParseHandle(b)
		if err != nil {
			return
		}
		if !bytes.Equal(h.Append(nil), b) {
			t.Errorf("%+v is not what was read", h)
		}
		total := int64(0)
		for _, n := range h.Chunks {
			if total += n; n <= 0 || total < 0 {
				t.Errorf("chunks of %v", h.Chunks)
			}
		}
		if h.Offset < 0 || h.Bytes <= 0 || h.Offset+h.Bytes < 0 || (h.Kind == cuda.Files && h.Offset+h.Bytes > total) {
			t.Errorf("%+v makes no sense", h)
		}
	})
}

func TestUUIDReadsItself(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var u cuda.UUID
		copy(u[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "bytes"))
		if got, err := cuda.ParseUUID(u.String()); err != nil || got != u {
			t.Fatalf("%s: %s, %v", u, got, err)
		}
		text := rapid.String().Draw(t, "text")
		if got, err := cuda.ParseUUID(text); err == nil && got.String() != text {
			t.Fatalf("%q is %s", text, got)
		}
	})
	for _, bad := range []string{"", "GPU-", "0", "GPU-00000000-0000-0000-0000-00000000000", "GPU-00000000-0000-0000-0000-00000000000g", "GPU-000000000-000-0000-0000-000000000000", "MIG-00000000-0000-0000-0000-000000000000"} {
		if _, err := cuda.ParseUUID(bad); err == nil {
			t.Errorf("%q is a UUID", bad)
		}
	}
}
