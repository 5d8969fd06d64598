package rdmaread

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/rdma"
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

func addr(s string) netip.Addr { return netip.AddrFrom16(netip.MustParseAddr(s).As16()) }

var testEnd = end{qpn: 0x010203, psn: 0xa0b0c0, gid: addr("10.77.0.1"), lid: 7, link: rdma.LinkEthernet, mtu: 5, reads: 16}

func testDescriptor() descriptor {
	return descriptor{owner: ownerLife, ports: []remotePort{
		{name: "mlx5_0", link: rdma.LinkEthernet, reads: 16, gids: []netip.Addr{addr("10.77.0.1"), addr("2001:db8::1")}},
		{name: "ib0", link: rdma.LinkInfiniBand, reads: 4, lid: 0x1234, gids: []netip.Addr{addr("fe80::2:c903")}},
	}}
}

func testHello() hello {
	return hello{generation: 0x0102030405060708, owner: ownerLife, reader: readerLife, port: 1, end: testEnd}
}

func testAnswer() *answer {
	a := &answer{generation: 0x0102030405060708, owner: ownerLife, end: testEnd}
	a.regions.seals = region{addr: 0x7f0000001000, bytes: memory.Words * 8, slice: 1 << 31, keys: []uint32{0x11223344}}
	a.regions.arenas[0] = region{addr: 0x7f1000000000, bytes: 5 << 30, slice: 1 << 31, keys: []uint32{1, 2, 3}}
	a.regions.arenas[63] = region{addr: 1 << 20, bytes: 4096, slice: 4096, keys: []uint32{0xffffffff}}
	return a
}

func TestMessagesAreGolden(t *testing.T) {
	golden(t, "descriptor", testDescriptor().encode())
	golden(t, "hello", testHello().encode())
	golden(t, "answer", testAnswer().encode())
	golden(t, "refusal", encodeRefusal(0x0102030405060708, refusedFull))
}

func TestMessagesSayWhatTheyWereGiven(t *testing.T) {
	if d, err := parseDescriptor(testDescriptor().encode()); err != nil || !bytes.Equal(d.encode(), testDescriptor().encode()) {
		t.Errorf("descriptor: %+v, %v", d, err)
	}
	if h, err := parseHello(testHello().encode()); err != nil || h != testHello() {
		t.Errorf("hello: %+v, %v", h, err)
	}
	if a, why, err := parseAnswer(testAnswer().encode()); err != nil || why != 0 || !bytes.Equal(a.encode(), testAnswer().encode()) {
		t.Errorf("answer: %+v, %v, %v", a, why, err)
	}
	if a, why, err := parseAnswer(encodeRefusal(9, refusedPath)); err != nil || why != refusedPath || a.generation != 9 {
		t.Errorf("refusal: %+v, %v, %v", a, why, err)
	}
}

// hurt is a message in which some bytes have been changed.
func hurt(b []byte, at int, to ...byte) []byte {
	b = bytes.Clone(b)
	copy(b[at:], to)
	return b
}

func TestHostileMessagesAreRefused(t *testing.T) {
	life := len(appendLife(nil, ownerLife))
	lives := life + len(appendLife(nil, readerLife))
	descriptor := func(b []byte) error { _, err := parseDescriptor(b); return err }
	hello := func(b []byte) error { _, err := parseHello(b); return err }
	answer := func(b []byte) error { _, _, err := parseAnswer(b); return err }
	d, h, a, r := testDescriptor().encode(), testHello().encode(), testAnswer().encode(), encodeRefusal(1, refusedFull)
	helloEnd := headerBytes + 8 + lives + 1
	region := headerBytes + 8 + life + 4 + 4 + 16 + 2 + 3 // the seal table's
	count := region + 24 + 4
	for name, tt := range map[string]struct {
		parse func([]byte) error
		b     []byte
	}{
		"descriptor of another version":     {descriptor, hurt(d, 3, 2)},
		"descriptor of another kind":        {descriptor, h},
		"descriptor with other magic":       {descriptor, hurt(d, 0, 'x')},
		"descriptor with 17 ports":          {descriptor, hurt(d, headerBytes+life, 17)},
		"descriptor with fewer ports":       {descriptor, hurt(d, headerBytes+life, 1)},
		"descriptor with a long name":       {descriptor, hurt(d, headerBytes+life+1, 33)},
		"descriptor with a name of control": {descriptor, hurt(d, headerBytes+life+2, '\n')},
		"descriptor with another link":      {descriptor, hurt(d, headerBytes+life+8, 3)},
		"descriptor that serves no reads":   {descriptor, hurt(d, headerBytes+life+9, 0)},
		"descriptor that serves 129 reads":  {descriptor, hurt(d, headerBytes+life+9, 129)},
		"descriptor with 5 addresses":       {descriptor, hurt(d, headerBytes+life+12, 5)},
		"descriptor of nowhere":             {descriptor, hurt(d, headerBytes+life+13, make([]byte, 16)...)},
		"descriptor of a group":             {descriptor, hurt(d, headerBytes+life+13, 0xff, 2)},
		"descriptor that is huge":           {descriptor, append(bytes.Clone(d), make([]byte, maxDescriptor)...)},
		"hello of a bad name":               {hello, hurt(h, headerBytes+9, '/')},
		"hello from queue pair 0":           {hello, hurt(h, helloEnd, 0, 0, 0, 0)},
		"hello from queue pair 2^24":        {hello, hurt(h, helloEnd, 1)},
		"hello with a PSN of 2^24":          {hello, hurt(h, helloEnd+4, 1)},
		"hello from nowhere":                {hello, hurt(h, helloEnd+8, make([]byte, 16)...)},
		"hello with link layer 0":           {hello, hurt(h, helloEnd+26, 0)},
		"hello with MTU 0":                  {hello, hurt(h, helloEnd+27, 0)},
		"hello with MTU 6":                  {hello, hurt(h, helloEnd+27, 6)},
		"hello with no reads":               {hello, hurt(h, helloEnd+28, 0)},
		"hello with 255 reads":              {hello, hurt(h, helloEnd+28, 255)},
		"answer with a small seal table":    {answer, hurt(a, region+13, 0, 1)},
		"answer with an empty region":       {answer, hurt(a, region+8, make([]byte, 8)...)},
		"answer with a region of 2^63":      {answer, hurt(a, region+8, 0x80)},
		"answer with an overflow":           {answer, hurt(a, region, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xf8)},
		"answer with slices of 0":           {answer, hurt(a, region+16, make([]byte, 8)...)},
		"answer with tiny slices":           {answer, hurt(a, region+16, 0, 0, 0, 0, 0, 0, 0, 1)},
		"answer with 2^60 keys":             {answer, hurt(a, region+8, 0x7f, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 8)},
		"answer with more arenas":           {answer, hurt(a, count, 3)},
		"answer with fewer arenas":          {answer, hurt(a, count, 1)},
		"answer with rank 64":               {answer, hurt(a, count+1, 64)},
		"answer with ranks that go back":    {answer, hurt(a, count+1, 63)},
		"refusal for no reason":             {answer, hurt(r, len(r)-1, 0)},
		"refusal of another version":        {answer, hurt(r, 3, 9)},
		"answer that is a hello":            {answer, h},
	} {
		if err := tt.parse(tt.b); !errors.Is(err, errGarbage) {
			t.Errorf("%s: %v, want garbage", name, err)
		}
	}
	for name, tt := range map[string]struct {
		parse func([]byte) error
		b     []byte
	}{"descriptor": {descriptor, d}, "hello": {hello, h}, "answer": {answer, a}, "refusal": {answer, r}} {
		if err := tt.parse(append(bytes.Clone(tt.b), 0)); !errors.Is(err, errGarbage) {
			t.Errorf("%s that is longer: %v", name, err)
		}
		for n := range tt.b {
			if err := tt.parse(tt.b[:n]); err == nil {
				t.Errorf("%s of %d of %d bytes: no error", name, n, len(tt.b))
			}
		}
	}
	if _, err := parseDescriptor(nil); !errors.Is(err, transfer.ErrUnavailable) {
		t.Errorf("no descriptor: %v, want ErrUnavailable", err)
	}
}

func TestRefusalsAreTold(t *testing.T) {
	for why, want := range map[refusal]error{
		refusedLife: transfer.ErrIdentity, refusedPath: transfer.ErrUnavailable, refusedClosed: errOwnerClosed, 99: errGarbage,
	} {
		if err := why.err(); !errors.Is(err, want) {
			t.Errorf("refusal %d: %v, want %v", why, err, want)
		}
	}
	for _, why := range []refusal{refusedReader, refusedFull, refusedPort, refusedVerb, refusedStranger, refusedClosed} {
		if err := why.err(); errors.Is(err, transfer.ErrUnavailable) || errors.Is(err, transfer.ErrClosed) || errors.Is(err, errGarbage) {
			t.Errorf("refusal %d, which may pass: %v", why, err)
		}
	}
}

// FuzzMessage: what either side takes from the other. What is taken is what its
// encoding says, and no address in it overflows.
func FuzzMessage(f *testing.F) {
	f.Add(testDescriptor().encode())
	f.Add(testHello().encode())
	f.Add(testAnswer().encode())
	f.Add(encodeRefusal(1, refusedVerb))
	f.Add([]byte("kvr"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if d, err := parseDescriptor(b); err == nil && !bytes.Equal(d.encode(), b) {
			t.Fatalf("descriptor %x is encoded as %x", b, d.encode())
		}
		if h, err := parseHello(b); err == nil && !bytes.Equal(h.encode(), b) {
			t.Fatalf("hello %x is encoded as %x", b, h.encode())
		}
		a, why, err := parseAnswer(b)
		if err != nil {
			return
		}
		if why != 0 {
			if !bytes.Equal(encodeRefusal(a.generation, why), b) {
				t.Fatalf("refusal %x", b)
			}
			return
		}
		if !bytes.Equal(a.encode(), b) {
			t.Fatalf("answer %x is encoded as %x", b, a.encode())
		}
		for _, r := range append([]region{a.regions.seals}, a.regions.arenas[:]...) {
			if r.bytes == 0 {
				continue
			}
			if r.addr+r.bytes < r.addr || uint64(len(r.keys)) != (r.bytes-1)/r.slice+1 {
				t.Fatalf("region %+v", r)
			}
			if key, room := r.at(r.bytes - 1); key != r.keys[len(r.keys)-1] || room == 0 {
				t.Fatalf("the last byte of %+v is in slice %#x, %d bytes before its end", r, key, room)
			}
		}
	})
}

// The bytes of a seal table that an answer names hold every word.
func TestSealTableOfAnAnswerHoldsEveryWord(t *testing.T) {
	a := testAnswer()
	a.regions.seals.bytes--
	b := a.encode()
	if _, _, err := parseAnswer(b); !errors.Is(err, errGarbage) {
		t.Errorf("a seal table that lacks a byte: %v", err)
	}
}
