package kvferrypb_test

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

var update = flag.Bool("update", false, "write the golden files anew")

// frames are one of each kind, by the name of their golden file.
func frames() map[string]proto.Message {
	return map[string]proto.Message{
		"lend_host": &kvferrypb.Lend{Version: kvferrypb.LendVersion, Arenas: []*kvferrypb.Lend_Arena{
			{Rank: 0, Bytes: 1 << 30, Files: 1}, {Rank: 1, Bytes: 1 << 30, Files: 1},
		}},
		"lend_cuda":    &kvferrypb.Lend{Version: kvferrypb.LendVersion, Arenas: []*kvferrypb.Lend_Arena{{Rank: 3, Bytes: 1 << 40, Cuda: []byte("a handle"), Files: 2}}},
		"lent":         &kvferrypb.Lent{Node: "prefill-0", Incarnation: 1764547200000000},
		"lent_refused": &kvferrypb.Lent{Refused: "rank 0: 4096 bytes, the node's arena has 8192"},
	}
}

func TestGoldenFrames(t *testing.T) {
	for name, m := range frames() {
		got, err := kvferrypb.FrameOf(m)
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
		back := m.ProtoReflect().New().Interface()
		if err := kvferrypb.ReadFrame(r, back); err != nil || !proto.Equal(back, m) || r.Len() != len("rest") {
			t.Errorf("%s: %v, %v, %d bytes are left", name, back, err, r.Len())
		}
		for n := range len(want) {
			wantErr := io.ErrUnexpectedEOF
			if n == 0 {
				wantErr = io.EOF
			}
			if err := kvferrypb.ReadFrame(bytes.NewReader(want[:n]), back); !errors.Is(err, wantErr) {
				t.Fatalf("%s: %d of %d bytes: %v, want %v", name, n, len(want), err, wantErr)
			}
		}
	}
}

func TestFramesAreBounded(t *testing.T) {
	long := &kvferrypb.Lent{Refused: string(make([]byte, kvferrypb.MaxLend))}
	if _, err := kvferrypb.FrameOf(long); err == nil {
		t.Error("a message over the bound has a frame")
	}
	if err := kvferrypb.ReadFrame(bytes.NewReader([]byte{0xff, 0, 0, 0}), new(kvferrypb.Lend)); err == nil || errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a length over the bound: %v", err)
	}
}

func FuzzReadFrame(f *testing.F) {
	for _, m := range frames() {
		b, err := kvferrypb.FrameOf(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		f.Add(b[:len(b)-1])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, m := range []proto.Message{new(kvferrypb.Lend), new(kvferrypb.Lent)} {
			if kvferrypb.ReadFrame(bytes.NewReader(b), m) != nil {
				continue
			}
			again, err := kvferrypb.FrameOf(m)
			if err != nil {
				continue // unknown fields may have grown over the bound
			}
			back := m.ProtoReflect().New().Interface()
			if err := kvferrypb.ReadFrame(bytes.NewReader(again), back); err != nil || !proto.Equal(m, back) {
				t.Errorf("%v became %v, %v", m, back, err)
			}
		}
	})
}
