package shm

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares b with a file of testdata, as hexadecimal, 32 bytes a line.
func golden(t *testing.T, name string, b []byte) {
	t.Helper()
	var text strings.Builder
	for line := range slices.Chunk(b, 32) {
		text.WriteString(hex.EncodeToString(line) + "\n")
	}
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(path, []byte(text.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if text.String() != string(want) {
		t.Errorf("%s is\n%swant\n%s", name, &text, want)
	}
}

func body(frame []byte) []byte { return frame[headerBytes:] }

var testWelcome = welcome{owner: ownerLife, arenas: map[id.Rank]int64{0: 4096, 3: 0x0123456789abcdef, 63: 1}}

func TestFramesAreGolden(t *testing.T) {
	golden(t, "hello", hello{owner: ownerLife, reader: readerLife}.encode())
	golden(t, "welcome", testWelcome.encode())
	golden(t, "file.seals", fileFrame(sealTable))
	golden(t, "file.rank", fileFrame(63))
	golden(t, "refusal", frame(kindRefusal, []byte{byte(refusedUser)}))
	golden(t, "descriptor", descriptor{host: "01234567-89ab-cdef-0123-456789abcdef", socket: servedPrefix + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}.encode())
}

func TestParseRefuses(t *testing.T) {
	set := func(at int, to ...byte) func(b []byte) []byte {
		return func(b []byte) []byte { copy(b[at:], to); return b }
	}
	cut := func(b []byte) []byte { return b[:len(b)-1] }
	longer := func(b []byte) []byte { return append(b, 0) }
	ends := len(appendLife(nil, ownerLife))
	for name, tt := range map[string]struct {
		good   []byte
		change func(b []byte) []byte
		parse  func(b []byte) error
	}{
		"hello cut off":              {hello{ownerLife, readerLife}.encode(), cut, helloError},
		"hello longer":               {hello{ownerLife, readerLife}.encode(), longer, helloError},
		"hello of nobody":            {hello{ownerLife, readerLife}.encode(), set(headerBytes, 0), helloError},
		"hello of a longer name":     {hello{ownerLife, readerLife}.encode(), set(headerBytes, 255), helloError},
		"hello of a bad name":        {hello{ownerLife, readerLife}.encode(), set(headerBytes+1, '/'), helloError},
		"hello without a body":       {hello{ownerLife, readerLife}.encode(), func(b []byte) []byte { return b[:headerBytes] }, helloError},
		"welcome cut off":            {testWelcome.encode(), cut, welcomeError},
		"welcome longer":             {testWelcome.encode(), longer, welcomeError},
		"welcome with more arenas":   {testWelcome.encode(), set(headerBytes+ends, 4), welcomeError},
		"welcome with fewer":         {testWelcome.encode(), set(headerBytes+ends, 2), welcomeError},
		"welcome without a count":    {testWelcome.encode(), func(b []byte) []byte { return b[:headerBytes+ends] }, welcomeError},
		"welcome with a rank twice":  {testWelcome.encode(), set(headerBytes+ends+1+arenaBytes, 0, 0), welcomeError},
		"welcome with rank 64":       {testWelcome.encode(), set(headerBytes+ends+1+2*arenaBytes, 0, 64), welcomeError},
		"welcome with rank 65535":    {testWelcome.encode(), set(headerBytes+ends+1+2*arenaBytes, 255, 255), welcomeError},
		"welcome with an empty rank": {testWelcome.encode(), set(headerBytes+ends+3, make([]byte, 8)...), welcomeError},
		"welcome with 2^63 bytes":    {testWelcome.encode(), set(headerBytes+ends+3, 0x80), welcomeError},
		"file of another rank":       {fileFrame(3), set(headerBytes+1, 4), fileError},
		"file cut off":               {fileFrame(3), cut, fileError},
		"file longer":                {fileFrame(3), longer, fileError},
		"file of another kind":       {fileFrame(3), set(4, byte(kindHello)), fileError},
		"file of another version":    {fileFrame(3), set(3, 2), fileError},
		"file of another length":     {fileFrame(3), set(7, 3), fileError},
		"header with a reserve":      {fileFrame(3), set(5, 1), fileError},
		"header with other magic":    {fileFrame(3), set(0, 'x'), fileError},
	} {
		if err := tt.parse(bytes.Clone(tt.good)); err != nil {
			t.Errorf("%s, before the change: %v", name, err)
		}
		if err := tt.parse(tt.change(bytes.Clone(tt.good))); !errors.Is(err, errGarbage) {
			t.Errorf("%s: %v, want garbage", name, err)
		}
	}
	for _, n := range []int{0, 2} {
		if _, err := parseRefusal(make([]byte, n)); !errors.Is(err, errGarbage) {
			t.Errorf("refusal of %d bytes: %v, want garbage", n, err)
		}
	}
}

func helloError(b []byte) error   { _, err := parseHello(body(b)); return err }
func welcomeError(b []byte) error { _, err := parseWelcome(body(b)); return err }
func fileError(b []byte) error    { return parseFile(b, 3) }

func TestRefusalsAreTold(t *testing.T) {
	for why, want := range map[refusal]error{refusedLife: transfer.ErrIdentity, refusedUser: transfer.ErrUnavailable, 99: errGarbage} {
		if err := why.err(); !errors.Is(err, want) {
			t.Errorf("refusal %d: %v, want %v", why, err, want)
		}
	}
	if err := refusedFull.err(); errors.Is(err, transfer.ErrUnavailable) || errors.Is(err, errGarbage) {
		t.Errorf("an owner that is full: %v", err)
	}
}

// FuzzFrame: what either side takes from the other.
func FuzzFrame(f *testing.F) {
	f.Add(hello{owner: ownerLife, reader: readerLife}.encode())
	f.Add(testWelcome.encode())
	f.Add(fileFrame(7))
	f.Add(frame(kindRefusal, []byte{1}))
	f.Add([]byte("kvs"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := bytes.NewReader(b)
		k, got, err := receive(c, maxAnswerBody)
		if err != nil {
			return
		}
		if used := len(b) - c.Len(); used != headerBytes+len(got) {
			t.Fatalf("%d bytes of the stream were taken for a frame of %d", used, headerBytes+len(got))
		}
		whole := b[:headerBytes+len(got)]
		if !bytes.Equal(frame(k, got), whole) {
			t.Fatalf("%x is encoded as %x", whole, frame(k, got))
		}
		if h, err := parseHello(got); err == nil && k == kindHello && !bytes.Equal(h.encode(), whole) {
			t.Fatalf("hello %x is encoded as %x", whole, h.encode())
		}
		w, err := parseWelcome(got)
		if err == nil && k == kindWelcome && !bytes.Equal(w.encode(), whole) {
			t.Fatalf("welcome %x is encoded as %x", whole, w.encode())
		}
		for rank := range maps.Keys(w.arenas) {
			if rank < 0 || rank >= id.MaxRanks || w.arenas[rank] <= 0 {
				t.Fatalf("welcome with %d bytes of rank %d", w.arenas[rank], rank)
			}
		}
		_ = parseFile(whole, 7)
		_, _ = parseRefusal(got)
	})
}

// FuzzDescriptor: what a peer says in Hello. Whatever it says names a file of
// the rendezvous directory.
func FuzzDescriptor(f *testing.F) {
	f.Add(descriptor{host: "01234567-89ab-cdef-0123-456789abcdef", socket: servedPrefix + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}.encode())
	f.Add([]byte("1 01234567-89ab-cdef-0123-456789abcdef ../../etc/passwd"))
	f.Add([]byte("2 x"))
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := parseDescriptor(b)
		if err != nil {
			return
		}
		if !bytes.Equal(d.encode(), b) || strings.ContainsAny(d.socket, "/\x00 ") {
			t.Fatalf("descriptor %q is %+v", b, d)
		}
	})
}
