package rendezvous

import (
	"bytes"
	"errors"
	"flag"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden is [transfertest.Golden].
func golden(t *testing.T, name string, b []byte) {
	t.Helper()
	transfertest.Golden(t, name, b, *update)
}

func body(frame []byte) []byte { return frame[headerBytes:] }

var testDescriptor = descriptor{host: "01234567-89ab-cdef-0123-456789abcdef", socket: "test-ABCDEFGHIJKLMNOPQRSTUVWXYZ"}

func testHello() []byte { return hello{owner: ownerLife, reader: readerLife}.encode(testProtocol) }

func TestFramesAreGolden(t *testing.T) {
	golden(t, "hello", testHello())
	golden(t, "welcome", testProtocol.Welcome(ownerLife, []byte("says")))
	golden(t, "file", testProtocol.File(63))
	golden(t, "refusal", testProtocol.Frame(kindRefusal, []byte{byte(refusedUser)}))
	golden(t, "descriptor", testDescriptor.encode(testProtocol))
}

func TestParseRefuses(t *testing.T) {
	set := func(at int, to ...byte) func(b []byte) []byte {
		return func(b []byte) []byte { copy(b[at:], to); return b }
	}
	cut := func(b []byte) []byte { return b[:len(b)-1] }
	longer := func(b []byte) []byte { return append(b, 0) }
	helloError := func(b []byte) error { _, err := parseHello(body(b)); return err }
	fileError := func(b []byte) error { return testProtocol.parseFile(b, 3) }
	file := testProtocol.File(3)
	for name, tt := range map[string]struct {
		good   []byte
		change func(b []byte) []byte
		parse  func(b []byte) error
	}{
		"hello cut off":           {testHello(), cut, helloError},
		"hello longer":            {testHello(), longer, helloError},
		"hello of nobody":         {testHello(), set(headerBytes, 0), helloError},
		"hello of a longer name":  {testHello(), set(headerBytes, 255), helloError},
		"hello of a bad name":     {testHello(), set(headerBytes+1, '/'), helloError},
		"hello without a body":    {testHello(), func(b []byte) []byte { return b[:headerBytes] }, helloError},
		"file of another label":   {file, set(headerBytes+1, 4), fileError},
		"file cut off":            {file, cut, fileError},
		"file longer":             {file, longer, fileError},
		"file of another kind":    {file, set(4, byte(kindHello)), fileError},
		"file of another version": {file, set(3, 2), fileError},
		"file of another length":  {file, set(7, 3), fileError},
		"header with a reserve":   {file, set(5, 1), fileError},
		"header with other magic": {file, set(0, 'x'), fileError},
	} {
		if err := tt.parse(bytes.Clone(tt.good)); err != nil {
			t.Errorf("%s, before the change: %v", name, err)
		}
		if err := tt.parse(tt.change(bytes.Clone(tt.good))); !errors.Is(err, ErrGarbage) {
			t.Errorf("%s: %v, want garbage", name, err)
		}
	}
	for _, n := range []int{0, 2} {
		if _, err := parseRefusal(make([]byte, n)); !errors.Is(err, ErrGarbage) {
			t.Errorf("refusal of %d bytes: %v, want garbage", n, err)
		}
	}
}

func TestRefusalsAreTold(t *testing.T) {
	for why, want := range map[refusal]error{refusedLife: transfer.ErrIdentity, refusedUser: transfer.ErrUnavailable, refusedBusy: transfer.ErrUnavailable, 99: ErrGarbage} {
		if err := why.err(); !errors.Is(err, want) {
			t.Errorf("refusal %d: %v, want %v", why, err, want)
		}
	}
	if err := refusedFull.err(); errors.Is(err, transfer.ErrUnavailable) || errors.Is(err, ErrGarbage) {
		t.Errorf("an owner that is full: %v", err)
	}
}

// FuzzFrame: what either side takes from the other.
func FuzzFrame(f *testing.F) {
	p := testProtocol
	f.Add(testHello())
	f.Add(p.Welcome(ownerLife, []byte("says")))
	f.Add(p.File(7))
	f.Add(p.Frame(kindRefusal, []byte{1}))
	f.Add([]byte("tst"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := bytes.NewReader(b)
		k, got, err := p.receive(c, maxHelloBody, nil)
		if err != nil {
			return
		}
		if used := len(b) - c.Len(); used != headerBytes+len(got) || len(got) > maxHelloBody {
			t.Fatalf("%d bytes of the stream were taken for a frame of %d", used, headerBytes+len(got))
		}
		whole := b[:headerBytes+len(got)]
		if !bytes.Equal(p.Frame(k, got), whole) {
			t.Fatalf("%x is encoded as %x", whole, p.Frame(k, got))
		}
		if h, err := parseHello(got); err == nil && k == kindHello && !bytes.Equal(h.encode(p), whole) {
			t.Fatalf("hello %x is encoded as %x", whole, h.encode(p))
		}
		if owner, says, err := cutLife(got); err == nil && k == kindWelcome && !bytes.Equal(p.Welcome(owner, says), whole) {
			t.Fatalf("welcome %x is encoded as %x", whole, p.Welcome(owner, says))
		}
		_ = p.parseFile(whole, 7)
		_, _ = parseRefusal(got)
	})
}

// FuzzDescriptor: what a peer says in Hello. Whatever it says names a file of
// the rendezvous directory.
func FuzzDescriptor(f *testing.F) {
	f.Add(testDescriptor.encode(testProtocol))
	f.Add([]byte("3 01234567-89ab-cdef-0123-456789abcdef ../../etc/passwd"))
	f.Add([]byte("2 x"))
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := parseDescriptor(testProtocol, b)
		if err != nil {
			return
		}
		if !bytes.Equal(d.encode(testProtocol), b) || strings.ContainsAny(d.socket, "/\x00 ") {
			t.Fatalf("descriptor %q is %+v", b, d)
		}
	})
}
