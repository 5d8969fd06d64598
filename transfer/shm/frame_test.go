package shm

import (
	"bytes"
	"errors"
	"flag"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rendezvous"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden is [transfertest.Golden].
func golden(t *testing.T, name string, b []byte) {
	t.Helper()
	transfertest.Golden(t, name, b, *update)
}

var (
	testArenas  = map[id.Rank]int64{0: 4096, 3: 0x0123456789abcdef, 63: 1}
	hostWelcome = welcome{arenas: testArenas}
	ringWelcome = welcome{buffers: 4, bytes: 1 << 20, arenas: testArenas}
	testAsk     = []transfer.Copy{{Rank: 0, Remote: 4095, Bytes: 1}, {Rank: 3, Remote: 0x0023456789abcdef, Bytes: 0xfedc}}
)

func TestFramesAreGolden(t *testing.T) {
	golden(t, "welcome.host", protocol().Welcome(ownerLife, hostWelcome.encode()))
	golden(t, "welcome.ring", protocol().Welcome(ownerLife, ringWelcome.encode()))
	golden(t, "file.seals", protocol().File(sealLabel))
	golden(t, "file.ring", protocol().File(ringLabel))
	golden(t, "file.rank", protocol().File(63))
	golden(t, "ask", protocol().Frame(kindAsk, appendAsk(nil, 3, testAsk)))
	golden(t, "filled", protocol().Frame(kindFilled, filledBody(3, nil)))
	golden(t, "filled.not", protocol().Frame(kindFilled, filledBody(3, errors.New("device is dead"))))
}

func TestParseRefuses(t *testing.T) {
	set := func(at int, to ...byte) func(b []byte) []byte {
		return func(b []byte) []byte { copy(b[at:], to); return b }
	}
	cut := func(b []byte) []byte { return b[:len(b)-1] }
	longer := func(b []byte) []byte { return append(b, 0) }
	welcomeError := func(b []byte) error { _, err := parseWelcome(b); return err }
	askError := func(b []byte) error { _, _, err := parseAsk(nil, b, &ringWelcome); return err }
	filledError := func(b []byte) error { _, _, err := parseFilled(b, 4); return err }
	host, ring, ask := hostWelcome.encode(), ringWelcome.encode(), appendAsk(nil, 3, testAsk)
	first, filled := welcomeBytes, filledBody(3, errors.New("no"))
	for name, tt := range map[string]struct {
		good   []byte
		change func(b []byte) []byte
		parse  func(b []byte) error
	}{
		"welcome cut off":                   {host, cut, welcomeError},
		"welcome longer":                    {host, longer, welcomeError},
		"welcome with more arenas":          {host, set(5, 4), welcomeError},
		"welcome with fewer":                {host, set(5, 2), welcomeError},
		"welcome without a count":           {host, func(b []byte) []byte { return b[:5] }, welcomeError},
		"welcome with a rank twice":         {host, set(first+arenaBytes, 0, 0), welcomeError},
		"welcome with rank 64":              {host, set(first+2*arenaBytes, 0, 64), welcomeError},
		"welcome with rank 65535":           {host, set(first+2*arenaBytes, 255, 255), welcomeError},
		"welcome with an empty rank":        {host, set(first+2, make([]byte, 8)...), welcomeError},
		"welcome with 2^63 bytes":           {host, set(first+2, 0x80), welcomeError},
		"ring of empty buffers":             {ring, set(1, 0, 0, 0, 0), welcomeError},
		"ring of no buffers with bytes":     {ring, set(0, 0), welcomeError},
		"ring of too many buffers":          {ring, set(0, maxBuffers+1), welcomeError},
		"ring of too large buffers":         {ring, set(1, 0xff), welcomeError},
		"ask without a copy":                {ask, func(b []byte) []byte { return b[:1] }, askError},
		"ask without anything":              {ask, func([]byte) []byte { return nil }, askError},
		"ask cut off":                       {ask, cut, askError},
		"ask longer":                        {ask, longer, askError},
		"ask for a buffer that is not":      {ask, set(0, 4), askError},
		"ask for a rank that is not":        {ask, set(1, 0, 1), askError},
		"ask for rank 65535":                {ask, set(1, 255, 255), askError},
		"ask behind the arena":              {ask, set(9, 0x10, 0x00), askError},
		"ask beyond its end":                {ask, set(14, 2), askError},
		"ask at 2^63":                       {ask, set(3, 0x80), askError},
		"ask for nothing":                   {ask, set(14, 0), askError},
		"ask for more than a buffer":        {ask, set(1+copyBytes+10, 0, 0x10, 0, 0), askError},
		"ask for 4 GiB":                     {ask, set(1+copyBytes+10, 0xff, 0xff, 0xff, 0xff), askError},
		"ask for more copies than there be": {ask, func(b []byte) []byte { return append(b, bytes.Repeat(b[1:1+copyBytes], maxCopies)...) }, askError},
		"answer without a buffer":           {filled, func([]byte) []byte { return nil }, filledError},
		"answer for a buffer that is not":   {filled, set(0, 4), filledError},
		"answer with a long reason":         {filled, func(b []byte) []byte { return append(b, make([]byte, maxReason)...) }, filledError},
	} {
		if err := tt.parse(bytes.Clone(tt.good)); err != nil {
			t.Errorf("%s, before the change: %v", name, err)
		}
		if err := tt.parse(tt.change(bytes.Clone(tt.good))); !errors.Is(err, rendezvous.ErrGarbage) {
			t.Errorf("%s: %v, want garbage", name, err)
		}
	}
}

// What an owner says of its device is told, and is told to be its word.
func TestReasonIsTold(t *testing.T) {
	for _, reason := range []string{"device is dead", "", "two\nlines \xff", strings.Repeat("long ", 1000)} {
		b := filledBody(7, errors.New(reason))
		i, why, err := parseFilled(b, 8)
		if i != 7 || why == nil || err != nil || len(b) > maxFilledBody || strings.Contains(why.Error(), "\n") {
			t.Errorf("%.20q is told as %d, %v, %v", reason, i, why, err)
		}
		if !strings.Contains(why.Error(), strings.ToValidUTF8(reason[:min(len(reason), 3)], "")) {
			t.Errorf("%.20q is told as %v", reason, why)
		}
	}
	if i, why, err := parseFilled(filledBody(7, nil), 8); i != 7 || why != nil || err != nil {
		t.Errorf("a buffer that is filled: %d, %v, %v", i, why, err)
	}
}

// FuzzWelcome: what a reader takes from an owner.
func FuzzWelcome(f *testing.F) {
	f.Add(hostWelcome.encode())
	f.Add(ringWelcome.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		w, err := parseWelcome(b)
		if err != nil {
			return
		}
		if !bytes.Equal(w.encode(), b) {
			t.Fatalf("welcome %x is encoded as %x", b, w.encode())
		}
		for rank, size := range w.arenas {
			if rank < 0 || rank >= id.MaxRanks || size <= 0 {
				t.Fatalf("welcome with %d bytes of rank %d", size, rank)
			}
		}
		if w.buffers < 0 || w.buffers > maxBuffers || w.bytes < 0 || w.bytes > maxBufferBytes {
			t.Fatalf("a ring of %d buffers of %d bytes", w.buffers, w.bytes)
		}
	})
}

// FuzzAsk: what an owner takes from a reader lies in its arenas, and in a buffer.
func FuzzAsk(f *testing.F) {
	f.Add(appendAsk(nil, 3, testAsk))
	f.Add([]byte{0})
	f.Fuzz(func(t *testing.T, b []byte) {
		i, copies, err := parseAsk(nil, b, &ringWelcome)
		if err != nil {
			return
		}
		if again := appendAsk(nil, i, copies); !bytes.Equal(again, b) {
			t.Fatalf("ask %x is encoded as %x", b, again)
		}
		if n := transfer.Bytes(copies); i >= ringWelcome.buffers || n <= 0 || n > int64(ringWelcome.bytes) || len(copies) > maxCopies {
			t.Fatalf("%d bytes in %d copies for buffer %d", n, len(copies), i)
		}
		for _, c := range copies {
			if !transfer.Inside(c.Remote, c.Bytes, testArenas[c.Rank]) {
				t.Fatalf("%+v lies outside", c)
			}
		}
	})
}

// FuzzFilled: what a reader takes as an answer.
func FuzzFilled(f *testing.F) {
	f.Add(filledBody(3, nil))
	f.Add(filledBody(3, errors.New("device is dead")))
	f.Fuzz(func(t *testing.T, b []byte) {
		i, why, err := parseFilled(b, 4)
		if err == nil && (i < 0 || i >= 4 || (why == nil) != (len(b) == 1)) {
			t.Fatalf("%x is %d, %v", b, i, why)
		}
	})
}
