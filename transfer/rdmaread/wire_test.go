package rdmaread

import (
	"bytes"
	"errors"
	"flag"
	"net/netip"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden is [transfertest.Golden].
func golden(t *testing.T, name string, b []byte) {
	t.Helper()
	transfertest.Golden(t, name, b, *update)
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

// testStagedAnswer is that of an owner of which one arena is staged.
func testStagedAnswer() *answer {
	a := testAnswer()
	a.regions.arenas[7] = region{bytes: 3 << 30}
	a.regions.ring = region{addr: 0x7f2000000000, bytes: 2 << 20, slice: 1 << 30, keys: []uint32{0x55667788}}
	a.regions.buffers = 4
	return a
}

func testGather() []byte {
	return appendGather(nil, 0x0102030405060708, []transfer.Copy{{Rank: 7, Remote: 1 << 33, Bytes: 16384}, {Remote: 5, Bytes: 1}})
}

func TestMessagesAreGolden(t *testing.T) {
	golden(t, "descriptor", testDescriptor().encode())
	golden(t, "hello", testHello().encode())
	golden(t, "answer", testAnswer().encode())
	golden(t, "refusal", encodeRefusal(0x0102030405060708, refusedFull))
	golden(t, "staged", testStagedAnswer().encode())
	golden(t, "gather", testGather())
	golden(t, "gathered", encodeGathered(0x0102030405060708, nil))
	golden(t, "ungathered", encodeGathered(0x0102030405060708, errors.New("the device is dead")))
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
	if a, why, err := parseAnswer(testStagedAnswer().encode()); err != nil || why != 0 || !bytes.Equal(a.encode(), testStagedAnswer().encode()) || !a.regions.arenas[7].staged() {
		t.Errorf("staged answer: %+v, %v, %v", a, why, err)
	}
	if g, err := parseGather(testGather(), nil); err != nil || !bytes.Equal(appendGather(nil, g.number, g.copies), testGather()) {
		t.Errorf("gather: %+v, %v", g, err)
	}
	for text, want := range map[string]string{"": "it does not say why", "a\nb\x00\xff\u202ec": "a b   c", strings.Repeat("ä", 200): strings.Repeat("ä", 127)} {
		if n, why, err := parseGathered(encodeGathered(9, errors.New(text))); err != nil || n != 9 || why != want {
			t.Errorf("gathered: %d, %q, %v, want %q", n, why, err, want)
		}
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
	asked := func(b []byte) error { _, err := parseGather(b, nil); return err }
	gathered := func(b []byte) error { _, _, err := parseGathered(b); return err }
	s, g, done := testStagedAnswer().encode(), testGather(), encodeGathered(1, errors.New("dead"))
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
		"ring of no buffers":                {answer, hurt(s, len(s)-11, 0)},
		"ring of 17 buffers":                {answer, hurt(s, len(s)-11, 17)},
		"ring of buffers that differ":       {answer, hurt(s, len(s)-11, 3)},
		"ring, and nothing staged":          {answer, hurt(s[:len(s)-9], len(s)-10, 0)},
		"staged and registered":             {answer, hurt(s, len(s)-9, 63)},
		"staged rank 64":                    {answer, hurt(s, len(s)-9, 64)},
		"staged without bytes":              {answer, hurt(s, len(s)-8, make([]byte, 8)...)},
		"staged with 2^63 bytes":            {answer, hurt(s, len(s)-8, 0x80)},
		"gather of nothing":                 {asked, hurt(g, headerBytes+8, 0, 0)},
		"gather of more than there are":     {asked, hurt(g, headerBytes+8, 0, 3)},
		"gather of 1025 stretches":          {asked, hurt(g, headerBytes+8, 4, 1)},
		"gather of rank 64":                 {asked, hurt(g, headerBytes+10, 64)},
		"gather before the arena":           {asked, hurt(g, headerBytes+11, 0x80)},
		"gather of no bytes":                {asked, hurt(g, headerBytes+19, 0, 0, 0, 0)},
		"gather of another version":         {asked, hurt(g, 3, 2)},
		"gathered with control":             {gathered, hurt(done, len(done)-1, '\n')},
		"gathered with what is no text":     {gathered, hurt(done, len(done)-1, 0xff)},
		"gathered with a long reason":       {gathered, hurt(done, headerBytes+8, 5)},
	} {
		if err := tt.parse(tt.b); !errors.Is(err, errGarbage) {
			t.Errorf("%s: %v, want garbage", name, err)
		}
	}
	for name, tt := range map[string]struct {
		parse func([]byte) error
		b     []byte
	}{"descriptor": {descriptor, d}, "hello": {hello, h}, "answer": {answer, a}, "refusal": {answer, r}, "gather": {asked, g}, "gathered": {gathered, done}} {
		if err := tt.parse(append(bytes.Clone(tt.b), 0)); !errors.Is(err, errGarbage) {
			t.Errorf("%s that is longer: %v", name, err)
		}
		for n := range tt.b {
			if err := tt.parse(tt.b[:n]); err == nil {
				t.Errorf("%s of %d of %d bytes: no error", name, n, len(tt.b))
			}
		}
	}
	for n := range s { // an answer that ends with the registered arenas is whole
		if err := answer(s[:n]); err == nil && n != len(a) {
			t.Errorf("staged answer of %d of %d bytes: no error", n, len(s))
		}
	}
	if _, err := parseDescriptor(nil); !errors.Is(err, transfer.ErrUnavailable) {
		t.Errorf("no descriptor: %v, want ErrUnavailable", err)
	}
}

func TestRefusalsAreTold(t *testing.T) {
	for why, want := range map[refusal]error{
		refusedLife: transfer.ErrIdentity, refusedPath: transfer.ErrUnavailable, refusedClosed: errOwnerClosed, refusedRing: transfer.ErrUnavailable, 99: errGarbage,
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
	f.Add(testStagedAnswer().encode())
	f.Add(testGather())
	f.Add(encodeGathered(1, nil))
	f.Add(encodeGathered(1, errors.New("the device is dead")))
	f.Add(encodeRefusal(1, refusedVerb))
	f.Add([]byte("kvr"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if d, err := parseDescriptor(b); err == nil && !bytes.Equal(d.encode(), b) {
			t.Fatalf("descriptor %x is encoded as %x", b, d.encode())
		}
		if h, err := parseHello(b); err == nil && !bytes.Equal(h.encode(), b) {
			t.Fatalf("hello %x is encoded as %x", b, h.encode())
		}
		if g, err := parseGather(b, nil); err == nil && !bytes.Equal(appendGather(nil, g.number, g.copies), b) {
			t.Fatalf("gather %x is encoded as %x", b, appendGather(nil, g.number, g.copies))
		}
		if n, text, err := parseGathered(b); err == nil {
			var why error
			if text != "" {
				why = errors.New(text)
			}
			if !bytes.Equal(encodeGathered(n, why), b) {
				t.Fatalf("gathered %x is encoded as %x", b, encodeGathered(n, why))
			}
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
		if a.regions.staged() && (a.regions.buffer() == 0 || a.regions.buffer()*uint64(a.regions.buffers) != a.regions.ring.bytes) {
			t.Fatalf("a ring of %d bytes in %d buffers", a.regions.ring.bytes, a.regions.buffers)
		}
		for _, r := range append([]region{a.regions.seals, a.regions.ring}, a.regions.arenas[:]...) {
			if r.bytes == 0 || r.staged() {
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
