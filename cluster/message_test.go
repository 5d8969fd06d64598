package cluster

import (
	"bytes"
	"encoding/hex"
	"flag"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
)

var update = flag.Bool("update", false, "write the golden files anew")

type addrPort = netip.AddrPort

func mustAddr(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

var (
	goldLife = id.Life{Node: "prefill-0.rack", Incarnation: 1764547200000000}
	goldMeta = map[string]Meta{
		"meta":       {Role: "prefill", Group: "tp8", Peer: mustAddr("10.1.2.3:7901"), Fingerprint: 0x0123456789abcdef},
		"meta-drain": {Role: "prefill", Group: "tp8", Peer: mustAddr("10.1.2.3:7901"), Fingerprint: 0x0123456789abcdef, Draining: true},
		"meta-ipv6":  {Role: "both", Peer: mustAddr("[fd00::1]:7901")},
		"meta-empty": {},
	}
	goldRing    = Ring{Generation: 3, Keys: [][]byte{bytes.Repeat([]byte{1}, KeyBytes), bytes.Repeat([]byte{2}, KeyBytes)}}
	goldMessage = map[string]struct {
		bytes []byte
		want  message
	}{
		"items": {
			encodeItems([][]byte{[]byte("a"), bytes.Repeat([]byte("b"), 127), bytes.Repeat([]byte("c"), 128)}),
			message{kind: kindItems, items: [][]byte{[]byte("a"), bytes.Repeat([]byte("b"), 127), bytes.Repeat([]byte("c"), 128)}},
		},
		"ask":      {encodeCall(kindAsk, 42, goldLife, mustAddr("10.1.2.3:7900")), message{kind: kindAsk, nonce: 42, life: goldLife, gossip: mustAddr("10.1.2.3:7900")}},
		"answer":   {encodeAnswer(42, goldLife, true, 9), message{kind: kindAnswer, nonce: 42, life: goldLife, listed: true, newest: 9}},
		"ring-ask": {encodeRingAsk(42, goldRing.edition()), message{kind: kindRingAsk, nonce: 42, edition: goldRing.edition()}},
		"ring-same": {
			encodeRingAnswer(42, goldLife, goldRing.edition(), nil, "cannot keep the ring: no space left"),
			message{kind: kindRingAnswer, nonce: 42, life: goldLife, edition: goldRing.edition(), trouble: "cannot keep the ring: no space left"},
		},
		"ring-news": {
			encodeRingAnswer(42, goldLife, goldRing.edition(), goldRing.Keys, ""),
			message{kind: kindRingAnswer, nonce: 42, life: goldLife, edition: goldRing.edition(), keys: goldRing.Keys},
		},
		"bye": {encodeCall(kindBye, 42, goldLife, mustAddr("[fd00::1]:7900")), message{kind: kindBye, nonce: 42, life: goldLife, gossip: mustAddr("[fd00::1]:7900")}},
	}
)

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	text := hex.EncodeToString(got) + "\n"
	if *update {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if text != string(want) {
		t.Errorf("%s is %s, want %s", name, text, want)
	}
}

func TestWireBytes(t *testing.T) {
	for name, m := range goldMeta {
		b := m.encode()
		golden(t, name, b)
		if got, err := decodeMeta(b); err != nil || got != m {
			t.Errorf("%s came back as %+v, %v", name, got, err)
		}
	}
	for name, tt := range goldMessage {
		golden(t, name, tt.bytes)
		if got, err := decodeMessage(tt.bytes); err != nil || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s came back as %+v, %v", name, got, err)
		}
	}
}

func TestMessageRefuses(t *testing.T) {
	for name, b := range map[string][]byte{
		"nothing":          {},
		"version":          {2, kindItems, 1, 'a'},
		"kind":             {1, 9, 1, 'a'},
		"no items":         {1, kindItems},
		"empty item":       {1, kindItems, 0},
		"short item":       {1, kindItems, 2, 'a'},
		"longer spelling":  {1, kindItems, 0x81, 0, 'a'},
		"long item":        append([]byte{1, kindItems, 0x95, 0x0a}, make([]byte, MaxItem+1)...),
		"huge length":      {1, kindItems, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1},
		"long message":     append([]byte{1, kindItems}, bytes.Repeat([]byte{1, 'a'}, maxMessage/2)...),
		"bye and more":     append(encodeCall(kindBye, 1, goldLife, mustAddr("10.0.0.1:1")), 0),
		"bye of nobody":    encodeCall(kindBye, 1, id.Life{Incarnation: 1}, mustAddr("10.0.0.1:1")),
		"bye of no life":   encodeCall(kindBye, 1, id.Life{Node: "a"}, mustAddr("10.0.0.1:1")),
		"answer 2":         append(append(append([]byte{1, kindAnswer}, make([]byte, 8)...), appendLife(nil, goldLife)...), 2, 0, 0, 0, 0, 0, 0, 0, 0),
		"ask from nowhere": encodeCall(kindAsk, 1, goldLife, netip.AddrPort{}),
		"ask from port 0":  encodeCall(kindAsk, 1, goldLife, mustAddr("10.0.0.1:0")),
		"ring? of no keys": encodeRingAsk(1, edition{generation: 1}),
		"ring? of nine":    encodeRingAsk(1, ringOf(1, 1, 2, 3, 4, 5, 6, 7, 8, 9).edition()),
		"ring? twice":      encodeRingAsk(1, ringOf(1, 1, 1).edition()),
		"ring? past all":   encodeRingAsk(1, ringOf(MaxGeneration+1, 1).edition()),
		"ring? and more":   append(encodeRingAsk(1, goldRing.edition()), 0),
		"ring, wrong key":  encodeRingAnswer(1, goldLife, goldRing.edition(), [][]byte{key(1), key(3)}, ""),
		"ring, one key":    encodeRingAnswer(1, goldLife, goldRing.edition(), goldRing.Keys[:1], ""),
		"ring, two lines":  bytes.Replace(encodeRingAnswer(1, goldLife, goldRing.edition(), nil, "a b"), []byte("a b"), []byte("a\nb"), 1),
		"ring of nobody":   encodeRingAnswer(1, id.Life{Incarnation: 1}, goldRing.edition(), nil, ""),
		"ask to a crowd":   encodeCall(kindAsk, 1, goldLife, mustAddr("224.0.0.1:7900")),
	} {
		if m, err := decodeMessage(b); err == nil {
			t.Errorf("%s: decoded as %+v", name, m)
		}
	}
}

func TestMeta(t *testing.T) {
	longest := Meta{
		Role: strings.Repeat("r", maxRole), Group: id.Group(strings.Repeat("g", maxGroup)),
		Peer: mustAddr("[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535"),
	}
	longest.Peer = mustAddr("[fd00:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535")
	if b := longest.encode(); len(b) > 120 {
		t.Errorf("the longest has %d bytes", len(b))
	} else if got, err := decodeMeta(b); err != nil || got != longest {
		t.Errorf("the longest came back as %+v, %v", got, err)
	}
	later := append(goldMeta["meta"].encode(), 1, 2, 3)
	if _, err := decodeMeta(later); err == nil {
		t.Error("trailing bytes were taken")
	}
	later[0] = metaVersion + 1
	if got, err := decodeMeta(later); err != nil || got != goldMeta["meta"] {
		t.Errorf("a later version was read as %+v, %v", got, err)
	}
	for name, m := range map[string]Meta{
		"role":  {Role: "a\x00b"},
		"group": {Group: "a b"},
		"peer":  {Peer: mustAddr("0.0.0.0:1")},
		"port":  {Peer: mustAddr("10.0.0.1:0")},
	} {
		if _, err := decodeMeta(m.encode()); err == nil {
			t.Errorf("bad %s was taken", name)
		}
	}
}

func TestTroubleIsPrintable(t *testing.T) {
	for _, s := range []string{"", "no space left", strings.Repeat("x", 1000), strings.Repeat("é", 101), "two\nlines\x00\xff"} {
		got := printable(s)
		if len(got) > maxTrouble || printable(got) != got || strings.ContainsAny(got, "\n\x00") {
			t.Errorf("%q becomes %q", s, got)
		}
	}
}

func TestListName(t *testing.T) {
	for want, l := range map[string]id.Life{
		"a.1":                          {Node: "a", Incarnation: 1},
		"rack.1.fvvvvvvvvvvvv":         {Node: "rack.1", Incarnation: 1<<64 - 1},
		"10.0.0.1.1i4n8bmsvg0":         {Node: "10.0.0.1", Incarnation: 1764547200000512},
		strings.Repeat("x", 64) + ".v": {Node: id.Node(strings.Repeat("x", 64)), Incarnation: 31},
	} {
		got := listName(l)
		if l.Node != "10.0.0.1" && got != want {
			t.Errorf("name of %v is %q, want %q", l, got, want)
		}
		if back, err := parseListName(got); err != nil || back != l {
			t.Errorf("%q came back as %v, %v", got, back, err)
		}
	}
}

func TestPack(t *testing.T) {
	var items [][]byte
	for i := range 5000 {
		items = append(items, bytes.Repeat([]byte{byte(i)}, 1+rand.IntN(MaxItem)))
	}
	var got [][]byte
	for rest := items; len(rest) > 0; {
		var b []byte
		b, rest = pack(rest)
		if len(b) > packBytes {
			t.Fatalf("message of %d bytes", len(b))
		}
		m, err := decodeMessage(b)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, m.items...)
	}
	if !reflect.DeepEqual(got, items) {
		t.Error("items were changed")
	}
}

func FuzzMessage(f *testing.F) {
	for _, tt := range goldMessage {
		f.Add(tt.bytes)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeMessage(b)
		if err != nil {
			return
		}
		var again []byte
		switch m.kind {
		case kindItems:
			again = encodeItems(m.items)
		case kindAsk, kindBye:
			again = encodeCall(m.kind, m.nonce, m.life, m.gossip)
		case kindAnswer:
			again = encodeAnswer(m.nonce, m.life, m.listed, m.newest)
		case kindRingAsk:
			again = encodeRingAsk(m.nonce, m.edition)
		case kindRingAnswer:
			again = encodeRingAnswer(m.nonce, m.life, m.edition, m.keys, m.trouble)
		}
		if !bytes.Equal(again, b) {
			t.Errorf("%x was read as %+v, which is %x", b, m, again)
		}
	})
}

func FuzzMeta(f *testing.F) {
	for _, m := range goldMeta {
		f.Add(m.encode())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeMeta(b)
		if err != nil {
			return
		}
		if again := m.encode(); b[0] == metaVersion && !bytes.Equal(again, b) {
			t.Errorf("%x was read as %+v, which is %x", b, m, again)
		}
	})
}

func FuzzListName(f *testing.F) {
	f.Add("a.1")
	f.Add("127.0.0.1")
	f.Fuzz(func(t *testing.T, name string) {
		if l, err := parseListName(name); err == nil && (listName(l) != name || l.Node.Validate() != nil) {
			t.Errorf("%q was read as %v", name, l)
		}
	})
}
