package cudaipc

import (
	"bytes"
	"errors"
	"flag"
	"testing"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer/rendezvous"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden is [transfertest.Golden].
func golden(t *testing.T, name string, b []byte) {
	t.Helper()
	transfertest.Golden(t, name, b, *update)
}

func testUUID() (u cuda.UUID) {
	for i := range u {
		u[i] = byte(0xa0 + i)
	}
	return u
}

// testArenas are one of each kind.
func testArenas() (legacy, files arena) {
	legacy = arena{rank: 3, handle: cuda.Handle{Kind: cuda.Legacy, UUID: testUUID(), Offset: 512, Bytes: 0x0123456789ab}}
	for i := range legacy.handle.IPC {
		legacy.handle.IPC[i] = byte(i)
	}
	files = arena{rank: 63, handle: cuda.Handle{Kind: cuda.Files, UUID: testUUID(), Bytes: 5 << 20, Chunks: []int64{2 << 20, 4 << 20}}}
	return legacy, files
}

func encoded(t testing.TB, a arena) []byte {
	t.Helper()
	b, err := a.encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestFramesAreGolden(t *testing.T) {
	legacy, files := testArenas()
	golden(t, "welcome", protocol().Welcome(ownerLife, welcome{pidns: 4026531836, arenas: 2}.encode()))
	golden(t, "arena.legacy", protocol().Frame(kindArena, encoded(t, legacy)))
	golden(t, "arena.files", protocol().Frame(kindArena, encoded(t, files)))
	golden(t, "file.seals", protocol().File(sealTable))
}

func TestWhatWasWrittenIsRead(t *testing.T) {
	legacy, files := testArenas()
	for _, a := range []arena{legacy, files} {
		b := encoded(t, a)
		got, err := parseArena(b)
		if err != nil || got.rank != a.rank || !bytes.Equal(encoded(t, got), b) {
			t.Errorf("%+v is read as %+v, %v", a, got, err)
		}
	}
	w := welcome{pidns: 1<<64 - 1, arenas: id.MaxRanks}
	if got, err := parseWelcome(w.encode()); err != nil || got != w {
		t.Errorf("%+v is read as %+v, %v", w, got, err)
	}
}

func TestParseRefuses(t *testing.T) {
	legacy, files := testArenas()
	set := func(at int, to ...byte) func(b []byte) []byte {
		return func(b []byte) []byte { copy(b[at:], to); return b }
	}
	cut := func(b []byte) []byte { return b[:len(b)-1] }
	longer := func(b []byte) []byte { return append(b, 0) }
	goodWelcome := welcome{pidns: 1, arenas: 2}.encode()
	for name, tt := range map[string]struct {
		good   []byte
		change func(b []byte) []byte
		parse  func(b []byte) error
	}{
		"welcome cut off":         {goodWelcome, cut, welcomeError},
		"welcome longer":          {goodWelcome, longer, welcomeError},
		"welcome with 65 arenas":  {goodWelcome, set(8, id.MaxRanks+1), welcomeError},
		"welcome without a word":  {goodWelcome, func([]byte) []byte { return nil }, welcomeError},
		"arena without a rank":    {encoded(t, legacy), func(b []byte) []byte { return b[:1] }, arenaError},
		"arena without a handle":  {encoded(t, legacy), func(b []byte) []byte { return b[:rankBytes] }, arenaError},
		"arena of rank 64":        {encoded(t, legacy), set(0, 0, id.MaxRanks), arenaError},
		"arena of rank 65535":     {encoded(t, legacy), set(0, 0xff, 0xff), arenaError},
		"legacy handle cut off":   {encoded(t, legacy), cut, arenaError},
		"legacy handle longer":    {encoded(t, legacy), longer, arenaError},
		"handle of an odd kind":   {encoded(t, legacy), set(rankBytes, 9), arenaError},
		"handle of files cut off": {encoded(t, files), cut, arenaError},
		"handle of files longer":  {encoded(t, files), longer, arenaError},
	} {
		if err := tt.parse(bytes.Clone(tt.good)); err != nil {
			t.Errorf("%s, before the change: %v", name, err)
		}
		if err := tt.parse(tt.change(bytes.Clone(tt.good))); !errors.Is(err, rendezvous.ErrGarbage) {
			t.Errorf("%s: %v, want garbage", name, err)
		}
	}
}

func welcomeError(b []byte) error { _, err := parseWelcome(b); return err }
func arenaError(b []byte) error   { _, err := parseArena(b); return err }

// An arena of more pieces than a frame has room for cannot be handed over.
func TestTooManyPieces(t *testing.T) {
	const most = (rendezvous.MaxBody - 40) / 8
	a := arena{handle: cuda.Handle{Kind: cuda.Files, UUID: testUUID(), Bytes: 1 << 20}}
	for range most {
		a.handle.Chunks = append(a.handle.Chunks, 2<<20)
	}
	if err := arenaError(encoded(t, a)); err != nil {
		t.Errorf("%d pieces: %v", most, err)
	}
	a.handle.Chunks = append(a.handle.Chunks, 2<<20)
	if _, err := a.encode(); !errors.Is(err, cuda.ErrNotShareable) {
		t.Errorf("%d pieces: %v, want ErrNotShareable", most+1, err)
	}
}

// FuzzArena: what a reader takes from an owner.
func FuzzArena(f *testing.F) {
	legacy, files := testArenas()
	f.Add(encoded(f, legacy))
	f.Add(encoded(f, files))
	f.Add([]byte{0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := parseArena(b)
		if err != nil {
			if !errors.Is(err, rendezvous.ErrGarbage) {
				t.Fatalf("%x: %v, want garbage", b, err)
			}
			return
		}
		h := a.handle
		if a.rank.Validate() != nil || h.Bytes <= 0 || h.Offset < 0 || h.Offset+h.Bytes < 0 || len(h.Chunks) > cuda.MaxChunks || (h.Kind == cuda.Legacy) != (len(h.Chunks) == 0) {
			t.Fatalf("%x is read as %+v", b, a)
		}
		again, err := a.encode()
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%x is written as %x, %v", b, again, err)
		}
	})
}

// FuzzWelcome: the first that it takes.
func FuzzWelcome(f *testing.F) {
	f.Add(welcome{pidns: 4026531836, arenas: 8}.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		w, err := parseWelcome(b)
		if err == nil && (!bytes.Equal(w.encode(), b) || w.arenas > id.MaxRanks) {
			t.Fatalf("%x is read as %+v", b, w)
		}
	})
}
