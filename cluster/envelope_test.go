package cluster

import (
	"bytes"
	"encoding/hex"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestEnvelope(t *testing.T) {
	ring := ringOf(3, 1, 2, 3)
	for name, tt := range map[string]struct {
		message []byte
		copies  int
	}{
		"question": {encodeRingAsk(42, ring.edition()), 3},
		"answer":   {encodeRingAnswer(42, goldLife, ring.edition(), ring.Keys, ""), 1},
	} {
		want, err := decodeMessage(tt.message)
		if err != nil {
			t.Fatal(err)
		}
		b := seal("one", tt.message, locks(ring)[:tt.copies]...)
		for _, key := range ring.Keys[:tt.copies] {
			if got, at := unseal("one", b, locks(Ring{Keys: [][]byte{make([]byte, KeyBytes), key}})); at != 1 || !reflect.DeepEqual(got, want) {
				t.Errorf("%s with a key in common: %+v, %d", name, got, at)
			}
		}
		if bytes.Contains(b, ring.Keys[0][:8]) {
			t.Errorf("%s shows a key", name)
		}
		if _, at := unseal("one", b, locks(ringOf(3, 4, 5))); at >= 0 {
			t.Errorf("%s was opened by another key", name)
		}
		if _, at := unseal("two", b, locks(ring)); at >= 0 {
			t.Errorf("%s was opened in another cluster", name)
		}
		for i := range b {
			forged := bytes.Clone(b)
			forged[i] ^= 1
			// One copy of several may be damaged, the others are as good.
			if got, at := unseal("one", forged, locks(ring)); at >= 0 && !reflect.DeepEqual(got, want) {
				t.Errorf("%s with byte %d changed: %+v", name, i, got)
			}
			if _, at := unseal("one", b[:i], locks(ring)); at >= 0 && tt.copies == 1 {
				t.Errorf("%s was opened without its end from byte %d", name, i)
			}
		}
	}
	// Nothing else is taken from an envelope.
	for name, message := range map[string][]byte{
		"items": encodeItems([][]byte{[]byte("x")}),
		"bye":   encodeCall(kindBye, 1, goldLife, mustAddr("10.0.0.1:1")),
		"junk":  {1, kindRingAsk, 0},
	} {
		if _, at := unseal("one", seal("one", message, locks(ring)...), locks(ring)); at >= 0 {
			t.Errorf("%s was taken", name)
		}
	}
}

// What another version has sealed is opened as it was.
func TestEnvelopeBytes(t *testing.T) {
	message := encodeRingAsk(42, goldRing.edition())
	path := filepath.Join("testdata", "envelope.golden")
	if *update {
		text := hex.EncodeToString(seal("kvferry", message, locks(goldRing)...)) + "\n"
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b, err := hex.DecodeString(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range goldRing.Keys {
		m, at := unseal("kvferry", b, locks(Ring{Keys: [][]byte{key}}))
		if at != 0 || !bytes.Equal(encodeRingAsk(m.nonce, m.edition), message) {
			t.Errorf("opened as %+v, %d", m, at)
		}
	}
}

func TestEnvelopesFitAPacket(t *testing.T) {
	ring, label := ringOf(MaxGeneration, 1, 2, 3, 4, 5, 6, 7, 8), strings.Repeat("l", MaxLabel)
	longest := goldLife
	longest.Node = "n"
	for len(longest.Node) < 64 {
		longest.Node += "n"
	}
	question := seal(label, encodeRingAsk(1, ring.edition()), locks(ring)...)
	answer := seal(label, encodeRingAnswer(1, longest, ring.edition(), ring.Keys, strings.Repeat("t", 1000)), locks(ring)[0])
	if len(question) > maxPacket || len(answer) > maxPacket {
		t.Errorf("the longest question has %d bytes, the longest answer %d", len(question), len(answer))
	}
	if _, at := unseal(label, answer, locks(ring)); at != 0 {
		t.Error("the longest answer is not opened")
	}
}

func FuzzEnvelope(f *testing.F) {
	ring := ringOf(3, 1, 2)
	f.Add(seal("kvferry", encodeRingAsk(42, ring.edition()), locks(ring)...))
	f.Add(seal("kvferry", encodeRingAnswer(42, goldLife, ring.edition(), ring.Keys, ""), locks(ring)[0]))
	f.Add([]byte("KVFR\x01\x05\x01\x07kvferry"))
	f.Add([]byte("KVFR\x01\x05\x00\x07kvferry123"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if m, at := unseal("kvferry", b, locks(ring)); at >= 0 && m.kind != kindRingAsk && m.kind != kindRingAnswer {
			t.Errorf("%x was opened as %+v", b, m)
		}
	})
}
