package tcp

import (
	"bytes"
	"errors"
	"flag"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden is [transfertest.Golden].
func golden(t *testing.T, name string, b []byte) {
	t.Helper()
	transfertest.Golden(t, name, b, *update)
}

func TestFramesAreGolden(t *testing.T) {
	golden(t, "hello", hello{owner: ownerLife, reader: readerLife}.encode())
	golden(t, "welcome", appendWelcome(nil, welcome{owner: ownerLife, bytes: maxFrameBytes, copies: maxCopies, seals: maxSeals, inFlight: 4}))
	golden(t, "read", appendRequest(nil, ownerLife.Incarnation, request{
		id:     0x0102030405060708,
		seals:  []transfer.Seal{{Index: 7, Value: 0xa1a2a3a4a5a6a7a8}, {Index: memory.Words - 1, Value: 1}},
		copies: []transfer.Copy{{Rank: 3, Remote: 0x0123456789abcdef, Bytes: 0x10203}, {Rank: 63, Remote: 0, Bytes: 1}},
	}))
	golden(t, "data", append(appendHeader(nil, header{kind: kindData, owner: ownerLife.Incarnation, request: 5, length: 3}), "abc"...))
	golden(t, "verdict", appendHeader(nil, header{kind: kindVerdict, owner: ownerLife.Incarnation, request: 5, aux: uint32(verdictStale)}))
	golden(t, "descriptor", descriptor(false, "0123456789abcdef", addrs("192.0.2.1:7902", "[2001:db8::1]:7902")))
	golden(t, "descriptor.tls", descriptor(true, "0123456789abcdef", addrs("192.0.2.1:7902", "[2001:db8::1]:7902")))
}

// TestExchangeIsGolden: these are the bytes that really pass.
func TestExchangeIsGolden(t *testing.T) {
	owner, reader := newPair(t, 4096, Options{}, Options{})
	p := newProxy(t, owner.t.Bound())
	link := open(t, reader, at(owner.peer(), p.address))
	seals := []transfer.Seal{owner.hold(7, 41)}
	if err := link.Read(short(t), seals, []transfer.Copy{{Remote: 100, Local: 7, Bytes: 40}, {Remote: 3, Local: 900, Bytes: 5}}); err != nil {
		t.Fatal(err)
	}
	if err := link.Read(short(t), seals, nil); err != nil {
		t.Fatal(err)
	}
	owner.local.Seals.Store(7, 0)
	if err := link.Read(short(t), seals, []transfer.Copy{{Bytes: 9}}); !errors.Is(err, transfer.ErrStale) {
		t.Fatal(err)
	}
	up, down := p.passed()
	golden(t, "exchange.reader", up)
	golden(t, "exchange.owner", down)
}

func TestParseRefuses(t *testing.T) {
	good := appendRequest(nil, 9, request{id: 1, seals: []transfer.Seal{{Index: 1, Value: 2}}, copies: []transfer.Copy{{Rank: 1, Remote: 2, Bytes: 3}}})
	for name, change := range map[string]func(b []byte) []byte{
		"magic":                func(b []byte) []byte { b[0] = 'x'; return b },
		"version":              func(b []byte) []byte { b[3] = 2; return b },
		"reserved":             func(b []byte) []byte { b[6] = 1; return b },
		"body cut off":         func(b []byte) []byte { return b[:len(b)-1] },
		"body longer":          func(b []byte) []byte { return append(b, 0) },
		"no body":              func(b []byte) []byte { return b[:headerBytes] },
		"no seals":             func(b []byte) []byte { b[headerBytes+3] = 0; return b },
		"seals beyond bound":   func(b []byte) []byte { b[headerBytes] = 0xff; return b },
		"more copies":          func(b []byte) []byte { b[31] = 2; return b },
		"copies beyond bound":  func(b []byte) []byte { b[28] = 0xff; return b },
		"rank beyond bound":    func(b []byte) []byte { b[headerBytes+16+3] = id.MaxRanks; return b },
		"rank of 32 bits":      func(b []byte) []byte { b[headerBytes+16] = 0xff; return b },
		"copy of no bytes":     func(b []byte) []byte { b[headerBytes+23] = 0; return b },
		"copy of 4 GiB":        func(b []byte) []byte { b[headerBytes+20] = 0xff; return b },
		"copy above the bound": func(b []byte) []byte { b[headerBytes+20] = 2; return b },
	} {
		b := change(bytes.Clone(good))
		h, err := parseHeader(b[:headerBytes])
		if err == nil {
			err = new(request).parse(h, b[headerBytes:])
		}
		if !errors.Is(err, errGarbage) {
			t.Errorf("%s: %v, want garbage", name, err)
		}
	}
	for _, n := range []int{0, 1, headerBytes - 1, headerBytes + 1} {
		if _, err := parseHeader(make([]byte, n)); !errors.Is(err, errGarbage) {
			t.Errorf("header of %d bytes: %v, want garbage", n, err)
		}
	}
}

func TestWithinIsExact(t *testing.T) {
	n := newNode(t, ownerLife, 4096)
	for _, tt := range []struct {
		c    transfer.Copy
		want bool
	}{
		{transfer.Copy{Bytes: 4096}, true},
		{transfer.Copy{Remote: 4095, Bytes: 1}, true},
		{transfer.Copy{Remote: 4096, Bytes: 1}, false},
		{transfer.Copy{Remote: 1, Bytes: 4096}, false},
		{transfer.Copy{Remote: -1, Bytes: 1}, false},
		{transfer.Copy{Remote: -1 << 63, Bytes: 1 << 31}, false},
		{transfer.Copy{Remote: 1<<63 - 1, Bytes: 1 << 31}, false},
		{transfer.Copy{Rank: 1, Bytes: 1}, false},
	} {
		r := request{copies: []transfer.Copy{tt.c}}
		if got := r.within(n.local.Arenas); got != tt.want {
			t.Errorf("within(%+v) = %v", tt.c, got)
		}
	}
	r := request{seals: []transfer.Seal{{Index: memory.Words}}}
	if r.within(n.local.Arenas) {
		t.Error("a seal word beyond the table is within")
	}
}

// FuzzRequest: what the server takes from a peer.
func FuzzRequest(f *testing.F) {
	f.Add(appendRequest(nil, 9, request{id: 1, seals: []transfer.Seal{{Index: 1, Value: 2}}, copies: []transfer.Copy{{Rank: 0, Remote: 2, Bytes: 3}}}))
	f.Add(hello{owner: ownerLife, reader: readerLife}.encode())
	f.Add(make([]byte, headerBytes))
	arena := newNode(f, ownerLife, 4096)
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < headerBytes {
			return
		}
		h, err := parseHeader(b[:headerBytes])
		if err != nil {
			return
		}
		if again := appendHeader(nil, h); !bytes.Equal(again, b[:headerBytes]) {
			t.Fatalf("header %x is encoded as %x", b[:headerBytes], again)
		}
		body := b[headerBytes:]
		if hl, err := parseHello(h, body); err == nil && h.kind == kindHello && int(h.length) == len(body) {
			if again := hl.encode(); !bytes.Equal(again, b) {
				t.Fatalf("hello %x is encoded as %x", b, again)
			}
		}
		var r request
		if err := r.parse(h, body); err != nil || h.kind != kindRead {
			return
		}
		if int(h.length) == len(body) {
			if again := appendRequest(nil, h.owner, r); !bytes.Equal(again, b) {
				t.Fatalf("read %x is encoded as %x", b, again)
			}
		}
		if len(r.seals) == 0 || len(r.seals) > maxSeals || len(r.copies) > maxCopies || r.bytes() > maxFrameBytes {
			t.Fatalf("%d seals, %d copies, %d bytes are taken", len(r.seals), len(r.copies), r.bytes())
		}
		if r.within(arena.local.Arenas) {
			for _, c := range r.copies {
				_ = arena.arena()[c.Remote : c.Remote+c.Bytes] // panics if it is not
			}
		}
	})
}

// FuzzAnswers: what a link takes from a peer. A pair of sockets stands for the
// connection, since the receiver makes the system calls itself.
func FuzzAnswers(f *testing.F) {
	copies := []transfer.Copy{{Local: 100, Bytes: 50}, {Local: 300, Bytes: 3}, {Local: 400, Bytes: 60}}
	x := exchange{owner: 9, bounds: bounds{bytes: 53, copies: 2, inFlight: 4}, seals: []transfer.Seal{{Value: 1}}, first: 1}
	cutter := func() transfer.Cutter { return transfer.Cut(copies, x.bounds.bytes, x.bounds.copies) }
	answers := func(x exchange, v verdict) (b []byte) {
		cut := cutter()
		for i, more := uint64(0), true; more; i++ {
			var part []transfer.Copy
			part, more = cut.Next(nil)
			b = appendHeader(b, header{kind: kindData, owner: x.owner, request: x.first + i, length: uint32(transfer.Bytes(part))})
			b = append(b, bytes.Repeat([]byte{0xdd}, int(transfer.Bytes(part)))...)
			b = appendHeader(b, header{kind: kindVerdict, owner: x.owner, request: x.first + i, aux: uint32(v)})
		}
		return b
	}
	f.Add(answers(x, verdictHeld))
	f.Add(answers(x, verdictStale))
	f.Add(appendHeader(nil, header{kind: kindVerdict, owner: 9, request: 1, aux: uint32(verdictStale)}))
	f.Add(appendWelcome(nil, welcome{owner: ownerLife, bytes: 1, copies: 1, seals: 1, inFlight: 1}))
	arenas := newNode(f, ownerLife, 4096)
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 16<<10 {
			return // must fit into the socket
		}
		if len(b) >= headerBytes {
			if h, err := parseHeader(b[:headerBytes]); err == nil {
				if w, err := parseWelcome(h, b[headerBytes:]); err == nil && (w.bytes == 0 || w.copies == 0 || w.inFlight == 0) {
					t.Fatalf("welcome %+v is taken", w)
				}
			}
		}
		arena := arenas.arena()
		for i := range arena {
			arena[i] = 0xcc
		}
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Close(fds[0]) }()
		if _, err := unix.Write(fds[1], b); err != nil && len(b) > 0 {
			t.Fatal(err)
		}
		_ = unix.Close(fds[1])
		in := &half{by: newDirection(unix.SYS_READV, func(try func(uintptr) bool) error { try(uintptr(fds[0])); return nil })}
		x := x
		var s scratch
		cut := cutter()
		for i, more := uint64(0), true; more && err == nil; i++ {
			var part []transfer.Copy
			part, more = cut.Next(nil)
			_, err = x.receive(in, &s, i, part, more, arenas.local.Arenas)
		}
		if want := answers(x, verdictHeld); err == nil && !sameButData(b, want) {
			t.Fatalf("%x is taken for %x", b, want)
		}
		if x.landed < 0 || x.landed > transfer.Bytes(copies) {
			t.Fatalf("%d of %d bytes have landed", x.landed, transfer.Bytes(copies))
		}
		for _, c := range copies {
			for i := range c.Bytes {
				arena[c.Local+i] = 0xcc
			}
		}
		if i := slices.IndexFunc(arena, func(b byte) bool { return b != 0xcc }); i >= 0 {
			t.Fatalf("byte %d, which is no destination, was written", i)
		}
	})
}

// sameButData reports whether got begins with the frames of want, whose data is
// 0xdd, whatever its own data is.
func sameButData(got, want []byte) bool {
	if len(got) < len(want) {
		return false
	}
	for i := range want {
		if want[i] != 0xdd && got[i] != want[i] {
			return false
		}
	}
	return true
}
