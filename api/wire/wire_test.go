package wire

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

var update = flag.Bool("update", false, "rewrite the golden files")

const (
	owner       = id.NodeHash(0x8f3a52c19b7d4e60)
	incarnation = id.Incarnation(1764547200000000)
)

// announcement fills in digest and pages.
func announcement(seq, pub id.Sequence, refs []Ref, lists ...[]page.Index) Announcement {
	a := Announcement{
		Sequence: seq, Publication: pub, Request: id.Request("cmpl-42").Hash(), Seal: 77, ContentEpoch: 3,
		TTLMillis: 30000, Final: true, Refs: refs, Lists: lists, Digest: Digest(refs, lists), Pages: uint32(pages(lists)),
	}
	return a
}

func withoutLists(a Announcement) Announcement {
	a.Lists = nil
	return a
}

func contiguous(first page.Index, n int) []page.Index {
	p := make([]page.Index, n)
	for i := range p {
		p[i] = first + page.Index(i)
	}
	return p
}

func descending(first page.Index, n int) []page.Index {
	p := make([]page.Index, n)
	for i := range p {
		p[i] = first - page.Index(i)
	}
	return p
}

func shuffled(n, pool int) []page.Index {
	p := make([]page.Index, n)
	for i, v := range rand.New(rand.NewSource(7)).Perm(pool)[:n] {
		p[i] = page.Index(v)
	}
	return p
}

// messages are one of each, by the name of their golden file.
func messages() map[string]Message {
	one := []Ref{{Label: id.Main, RankMask: 1, Tokens: 1000}}
	tp8 := []Ref{{Label: id.Main, RankMask: 0xff, Tokens: 8192}}
	several := []Ref{
		{Label: "draft", RankMask: 0b01, List: 1, Start: 32, Tokens: 100},
		{Label: "draft", RankMask: 0b10, List: 2, Tokens: 64},
		{Label: id.Main, RankMask: 1 << 63, List: 0, Tokens: 48},
	}
	// Two pages kept in front, three released, and the last one.
	retained := []Ref{{Label: id.Main, RankMask: 3, Prefix: 32, Start: 80, Tokens: 90}}
	away := []Ref{
		{Label: "draft", RankMask: 3, Tokens: 64, State: 1},
		{Label: id.Main, RankMask: 3, Prefix: 16, Start: 4096, Tokens: 5000, State: 2},
	}
	return map[string]Message{
		"batch":    Batches{{Owner: owner, Incarnation: incarnation, Floor: 1200, Announcements: []Announcement{announcement(1204, 1203, one, contiguous(900, 63))}}},
		"packed":   Batches{{Owner: owner, Incarnation: incarnation, Floor: 0, Announcements: []Announcement{announcement(1, 1, tp8, shuffled(512, 1<<17))}}},
		"digest":   Batches{{Owner: owner, Incarnation: incarnation, Floor: 7, Announcements: []Announcement{withoutLists(announcement(9, 8, tp8, shuffled(512, 1<<17)))}}},
		"retained": Batches{{Owner: owner, Incarnation: incarnation, Announcements: []Announcement{announcement(3, 3, retained, []page.Index{7, 8, 12})}}},
		"away":     Batches{{Owner: owner, Incarnation: incarnation, Announcements: []Announcement{announcement(6, 4, away, []page.Index{})}, Releases: []id.Sequence{4}}},
		"several": Batches{
			{Owner: owner, Incarnation: incarnation, Floor: 10, Releases: []id.Sequence{11, 12, 15, 400}, Announcements: []Announcement{
				announcement(500, 16, several, contiguous(1, 3), descending(900, 5), []page.Index{7, 3, 70000, 2, 1}),
				withoutLists(announcement(501, 501, nil)),
			}},
			{Owner: 1, Incarnation: 2, Floor: 1<<63 + 5},
		},
		"check":  &Check{Owner: owner, Incarnation: incarnation, Floor: 1200, Max: 1290, Hash: 0x1122334455667788, Live: 20, Version: 2560},
		"nack":   &Nack{From: 99, Owner: owner, Incarnation: incarnation, Missing: []id.Sequence{1201, 1202, 1203, 1299, 5000}},
		"bye":    &Bye{Owner: owner, Incarnation: incarnation, Max: 1290},
		"beacon": &Beacon{Owner: owner, Incarnation: incarnation, Number: 360, Modulus: 62},
		"echo":   &Echo{From: 99, Owner: owner, Incarnation: incarnation, Number: 360},
	}
}

// golden compares got with the file, 32 bytes a line in hex.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	var text strings.Builder
	for line := range slices.Chunk(got, 32) {
		fmt.Fprintf(&text, "%x\n", line)
	}
	file := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if text.String() != string(want) {
		t.Errorf("%s: format has changed:\ngot\n%swant\n%s", name, text.String(), want)
	}
}

func TestGolden(t *testing.T) {
	for name, m := range messages() {
		b, err := Encode(m)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		golden(t, name, b)
		got, err := Decode(b, MaxPages)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if !same(got, m) {
			t.Errorf("%s: decoded %+v, want %+v", name, got, m)
		}
	}
}

func TestGoldenState(t *testing.T) {
	checks := []Check{*messages()["check"].(*Check), {Owner: 5, Incarnation: 6, Floor: 7, Max: 7, Version: 9}}
	b := EncodeChecks(checks)
	golden(t, "state", b)
	got, err := DecodeChecks(b)
	if err != nil || !reflect.DeepEqual(got, checks) {
		t.Fatalf("DecodeChecks = %+v, %v", got, err)
	}
	if _, err := Decode(b, MaxPages); !errors.Is(err, ErrVersion) {
		t.Errorf("a push/pull state was taken for gossip: %v", err)
	}
	if n := len(EncodeChecks(checks[:1])) - headBytes; n > 50 {
		t.Errorf("a checkpoint has %d bytes", n)
	}
	if got, err := DecodeChecks(EncodeChecks(nil)); err != nil || len(got) != 0 {
		t.Errorf("empty state: %v, %v", got, err)
	}
	if got, err := DecodeChecks(EncodeChecks(make([]Check, MaxChecks+5))); err != nil || len(got) != MaxChecks {
		t.Errorf("long state: %d, %v", len(got), err)
	}
}

// same is DeepEqual to which nil and empty slices are one.
func same(a, b Message) bool {
	ea, err := Encode(a)
	if err != nil {
		return false
	}
	eb, err := Encode(b)
	return err == nil && bytes.Equal(ea, eb) && reflect.DeepEqual(plain(a), plain(b))
}

func plain(m Message) Message {
	batches, ok := m.(Batches)
	if !ok {
		return m
	}
	var out Batches
	for _, b := range batches {
		if len(b.Announcements) == 0 {
			b.Announcements = nil
		}
		if len(b.Releases) == 0 {
			b.Releases = nil
		}
		out = append(out, b)
	}
	return out
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := anyMessage().Draw(t, "message")
		b, err := Encode(m)
		if err != nil {
			t.Fatalf("Encode(%+v) = %v", m, err)
		}
		got, err := Decode(b, MaxPages)
		if err != nil {
			t.Fatalf("Decode: %v", err)
		}
		if !same(got, m) {
			t.Fatalf("got %+v, want %+v", got, m)
		}
		for _, junk := range []byte{0, 0xc0, 0x90} {
			if _, err := Decode(append(slices.Clip(b), junk), MaxPages); !errors.Is(err, ErrMessage) {
				t.Fatalf("trailing %#x: %v", junk, err)
			}
		}
		if cut := rapid.IntRange(0, len(b)-1).Draw(t, "cut"); cut < len(b) {
			if m, err := Decode(b[:cut], MaxPages); err == nil {
				t.Fatalf("cut at %d of %d: %+v", cut, len(b), m)
			}
		}
	})
}

func anyMessage() *rapid.Generator[Message] {
	return rapid.Custom(func(t *rapid.T) Message {
		o, i := id.NodeHash(rapid.Uint64().Draw(t, "owner")), id.Incarnation(rapid.Uint64().Draw(t, "incarnation"))
		switch rapid.IntRange(0, 11).Draw(t, "kind") {
		case 0:
			floor := rapid.Uint64Max(1<<62).Draw(t, "floor")
			live := rapid.Uint32().Draw(t, "live")
			return &Check{
				Owner: o, Incarnation: i, Floor: id.Sequence(floor), Max: id.Sequence(floor + uint64(live)),
				Hash: rapid.Uint64().Draw(t, "hash"), Live: live, Version: rapid.Uint64().Draw(t, "version"),
			}
		case 1:
			return &Nack{From: 3, Owner: o, Incarnation: i, Missing: ascending(t, 0, 1, MaxMissing)}
		case 2:
			return &Bye{Owner: o, Incarnation: i, Max: id.Sequence(rapid.Uint64().Draw(t, "max"))}
		case 3:
			return &Beacon{Owner: o, Incarnation: i, Number: rapid.Uint64Min(1).Draw(t, "number"), Modulus: rapid.Uint32Min(1).Draw(t, "modulus")}
		case 4:
			return &Echo{From: 3, Owner: o, Incarnation: i, Number: rapid.Uint64().Draw(t, "number")}
		}
		var batches Batches
		for range rapid.IntRange(0, 3).Draw(t, "batches") {
			b := Batch{Owner: o, Incarnation: i, Floor: id.Sequence(rapid.Uint64Max(1<<62).Draw(t, "floor"))}
			b.Releases = ascending(t, b.Floor, 0, 40)
			for range rapid.IntRange(0, 3).Draw(t, "announcements") {
				b.Announcements = append(b.Announcements, anyAnnouncement(t, b.Floor))
			}
			batches = append(batches, b)
		}
		return batches
	})
}

func ascending(t *rapid.T, floor id.Sequence, least, most int) []id.Sequence {
	gaps := rapid.SliceOfN(rapid.Uint64Range(1, 1<<40), least, most).Draw(t, "gaps")
	var all []id.Sequence
	for _, g := range gaps {
		if g > 1<<39 { // most follow each other
			g = 1
		}
		floor += id.Sequence(g)
		all = append(all, floor)
	}
	return all
}

func anyAnnouncement(t *rapid.T, floor id.Sequence) Announcement {
	var lists [][]page.Index
	for range rapid.IntRange(1, 4).Draw(t, "lists") {
		lists = append(lists, anyList(t))
	}
	var refs []Ref
	ranks := map[id.Label]uint64{}
	for range rapid.IntRange(1, 6).Draw(t, "refs") {
		r := Ref{
			Label:    id.Label(rapid.SampledFrom([]string{"main", "draft", "é", strings.Repeat("x", id.MaxLabel)}).Draw(t, "label")),
			RankMask: rapid.Uint64Min(1).Draw(t, "mask"),
			List:     rapid.IntRange(0, len(lists)-1).Draw(t, "list"),
			Tokens:   rapid.IntRange(0, maxTokens).Draw(t, "tokens"),
			State:    uint8(rapid.IntRange(0, lastState).Draw(t, "state")),
		}
		if r.Start = rapid.IntRange(0, r.Tokens).Draw(t, "start"); r.Start > 0 {
			r.Prefix = rapid.IntRange(0, r.Start-1).Draw(t, "prefix")
		}
		if r.State != resident {
			lists[r.List] = []page.Index{}
		}
		if r.RankMask &^= ranks[r.Label]; r.RankMask == 0 {
			continue
		}
		ranks[r.Label] |= r.RankMask
		refs = append(refs, r)
	}
	up := rapid.Uint32Range(1, 1<<32-1).Draw(t, "sequence")
	a := announcement(floor+id.Sequence(up), floor+id.Sequence(rapid.Uint32Range(1, up).Draw(t, "publication")), refs, lists...)
	a.Final = rapid.Bool().Draw(t, "final")
	switch rapid.IntRange(0, 4).Draw(t, "level") {
	case 0:
		a.Lists = nil
	case 1:
		a.Lists, a.Refs = nil, nil
	}
	return a
}

func anyList(t *rapid.T) []page.Index {
	p := []page.Index{}
	for range rapid.IntRange(0, 8).Draw(t, "runs") {
		n := rapid.IntRange(1, 20).Draw(t, "run")
		first := rapid.Uint32Range(20, 1<<32-21).Draw(t, "first")
		switch rapid.IntRange(0, 2).Draw(t, "step") {
		case 0:
			p = append(p, contiguous(page.Index(first), n)...)
		case 1:
			p = append(p, descending(page.Index(first), n)...)
		default:
			p = append(p, page.Index(first))
		}
	}
	return p
}

func TestListCodesBothWays(t *testing.T) {
	for name, tt := range map[string]struct {
		pages []page.Index
		tag   byte
		bytes int // at most
	}{
		"none":          {pages: []page.Index{}, tag: tagRuns, bytes: 2},
		"one":           {pages: []page.Index{5}, tag: tagRuns, bytes: 4},
		"contiguous":    {pages: contiguous(70000, 8192), tag: tagRuns, bytes: 8},
		"descending":    {pages: descending(70000, 8192), tag: tagRuns, bytes: 8},
		"to the last":   {pages: contiguous(1<<32-4, 4), tag: tagRuns, bytes: 9},
		"to the first":  {pages: descending(3, 4), tag: tagRuns, bytes: 6},
		"zigzag":        {pages: []page.Index{1, 2, 1, 2, 1}, tag: tagPacked, bytes: 5},
		"random":        {pages: shuffled(8192, 1<<17), tag: tagPacked, bytes: 17412},
		"random, 32bit": {pages: []page.Index{1<<32 - 1, 0, 1<<32 - 1, 7, 1 << 31, 9}, tag: tagPacked, bytes: 27},
	} {
		t.Run(name, func(t *testing.T) {
			b := appendList([]byte("before"), tt.pages)[len("before"):]
			if b[0] != tt.tag || len(b) > tt.bytes {
				t.Errorf("tag %d, %d bytes, want tag %d and at most %d", b[0], len(b), tt.tag, tt.bytes)
			}
			got, err := decodeList(b, len(tt.pages))
			if err != nil || !reflect.DeepEqual(got, tt.pages) {
				t.Errorf("decoded %v, %v", got, err)
			}
			if len(tt.pages) > 0 {
				if _, err := decodeList(b, len(tt.pages)-1); !errors.Is(err, ErrMessage) {
					t.Errorf("a list over the bound: %v", err)
				}
			}
		})
	}
}

func TestListRefuses(t *testing.T) {
	for name, b := range map[string][]byte{
		"nothing":             {},
		"no length":           {tagRuns},
		"unknown tag":         {3, 1, 0, 0},
		"run cut":             {tagRuns, 2, 0},
		"run over the end":    {tagRuns, 2, 0, 2 << 1},
		"bytes after":         {tagRuns, 1, 0, 0, 0},
		"below page 0":        {tagRuns, 2, 0, 1<<1 | 1},
		"above the last page": {tagRuns, 1, 0x80, 0x80, 0x80, 0x80, 0x20, 0},
		"overflow":            {tagRuns, 1, 0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01, 0},
		"no width":            {tagPacked, 0},
		"width 0":             {tagPacked, 1, 0},
		"width 33":            {tagPacked, 1, 33, 0, 0, 0, 0, 0},
		"packed cut":          {tagPacked, 9, 8, 0},
		"endless uvarint":     bytes.Repeat([]byte{0xff}, 30),
	} {
		t.Run(name, func(t *testing.T) {
			if p, err := decodeList(b, 1<<17); !errors.Is(err, ErrMessage) {
				t.Errorf("decoded %v, %v", p, err)
			}
		})
	}
}

// mutate is the message after change has had its way with it.
func mutate(change func(a *Announcement)) Message {
	refs := []Ref{{Label: id.Main, RankMask: 3, Tokens: 40}}
	a := announcement(12, 11, refs, contiguous(5, 3))
	change(&a)
	return Batches{{Owner: owner, Incarnation: incarnation, Floor: 10, Announcements: []Announcement{a}}}
}

func TestEncodeRefuses(t *testing.T) {
	many := make([]Ref, id.MaxLabels+1)
	for i := range many {
		many[i] = Ref{Label: id.Label(fmt.Sprint(i)), RankMask: 1}
	}
	for name, m := range map[string]Message{
		"sequence under the floor":     mutate(func(a *Announcement) { a.Sequence, a.Publication = 10, 10 }),
		"publication under the floor":  mutate(func(a *Announcement) { a.Publication = 10 }),
		"publication after itself":     mutate(func(a *Announcement) { a.Publication = 13 }),
		"sequence far above the floor": mutate(func(a *Announcement) { a.Sequence = 1 << 33 }),
		"too many labels":              mutate(func(a *Announcement) { a.Refs = many }),
		"too many lists":               mutate(func(a *Announcement) { a.Lists = make([][]page.Index, 257) }),
		"no rank":                      mutate(func(a *Announcement) { a.Refs[0].RankMask = 0 }),
		"rank twice":                   mutate(func(a *Announcement) { a.Refs = append(a.Refs, a.Refs[0]) }),
		"list out of range":            mutate(func(a *Announcement) { a.Refs[0].List = 1 }),
		"list below 0":                 mutate(func(a *Announcement) { a.Refs[0].List = -1 }),
		"starts after its end":         mutate(func(a *Announcement) { a.Refs[0].Start = 41 }),
		"prefix below 0":               mutate(func(a *Announcement) { a.Refs[0].Prefix = -1 }),
		"prefix and nothing released":  mutate(func(a *Announcement) { a.Refs[0].Prefix = 16 }),
		"prefix up to the start":       mutate(func(a *Announcement) { a.Refs[0].Prefix, a.Refs[0].Start = 16, 16 }),
		"prefix beyond the start":      mutate(func(a *Announcement) { a.Refs[0].Prefix, a.Refs[0].Start = 32, 16 }),
		"too long":                     mutate(func(a *Announcement) { a.Refs[0].Tokens = 1 << 31 }),
		"unknown state":                mutate(func(a *Announcement) { a.Refs[0].State = 3 }),
		"pages while offloading":       mutate(func(a *Announcement) { a.Refs[0].State = 1 }),
		"pages on the host":            mutate(func(a *Announcement) { a.Refs[0].State = 2 }),
		"no label":                     mutate(func(a *Announcement) { a.Refs[0].Label = "" }),
		"lists without streams":        mutate(func(a *Announcement) { a.Refs = nil }),
		"releases not ascending":       Batches{{Floor: 3, Releases: []id.Sequence{4, 4}}},
		"release under the floor":      Batches{{Floor: 3, Releases: []id.Sequence{3}}},
		"empty nack":                   &Nack{},
		"long nack":                    &Nack{Missing: make([]id.Sequence, MaxMissing+1)},
		"nack not ascending":           &Nack{Missing: []id.Sequence{2, 1}},
		"nack of sequence 0":           &Nack{Missing: []id.Sequence{0}},
		"beacon 0":                     &Beacon{Modulus: 1},
		"beacon of modulus 0":          &Beacon{Number: 1},
	} {
		t.Run(name, func(t *testing.T) {
			if b, err := Encode(m); !errors.Is(err, ErrMessage) {
				t.Errorf("encoded %x, %v", b, err)
			}
		})
	}
}

// batchOf packs records that Encode would refuse.
func batchOf(t testing.TB, change func(a *announcementRecord)) []byte {
	t.Helper()
	refs := []Ref{{Label: id.Main, RankMask: 3, Tokens: 40}}
	a := announcement(12, 11, refs, contiguous(5, 3))
	r, err := a.record(10)
	if err != nil {
		t.Fatal(err)
	}
	change(&r)
	b, err := appendBody(nil, kindBatch, []batchRecord{{Owner: 1, Incarnation: 2, Floor: 10, Announcements: []announcementRecord{r}, Releases: []byte{}}})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func packed(t testing.TB, kind byte, body any) []byte {
	t.Helper()
	b, err := appendBody(nil, kind, body)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestDecodeRefuses(t *testing.T) {
	if _, err := Decode(batchOf(t, func(*announcementRecord) {}), MaxPages); err != nil {
		t.Fatalf("the sound one: %v", err)
	}
	announcementCases := map[string]func(a *announcementRecord){
		"sequence 0":                func(a *announcementRecord) { a.Sequence = 0 },
		"publication 0":             func(a *announcementRecord) { a.Publication = 0 },
		"publication after itself":  func(a *announcementRecord) { a.Publication = 3 },
		"short request":             func(a *announcementRecord) { a.Request = make([]byte, 15) },
		"long request":              func(a *announcementRecord) { a.Request = make([]byte, 17) },
		"label twice":               func(a *announcementRecord) { a.Labels = []string{"main", "main"} },
		"labels not ascending":      func(a *announcementRecord) { a.Labels = []string{"z", "main"} },
		"empty label":               func(a *announcementRecord) { a.Labels = []string{""} },
		"long label":                func(a *announcementRecord) { a.Labels = []string{strings.Repeat("x", 65)} },
		"label is no text":          func(a *announcementRecord) { a.Labels = []string{"\xff"} },
		"label out of range":        func(a *announcementRecord) { a.Refs[0].Label = 1 },
		"too many labels":           func(a *announcementRecord) { a.Labels = make([]string, 256) },
		"too many lists":            func(a *announcementRecord) { a.Lists = make([][]byte, 257) },
		"list out of range":         func(a *announcementRecord) { a.Refs[0].List = 1 },
		"no rank":                   func(a *announcementRecord) { a.Refs[0].RankMask = 0 },
		"rank twice":                func(a *announcementRecord) { a.Refs = append(a.Refs, a.Refs[0]) },
		"starts after its end":      func(a *announcementRecord) { a.Refs[0].Start = 41 },
		"prefix, nothing released":  func(a *announcementRecord) { a.Refs[0].Prefix = 16 },
		"prefix up to the start":    func(a *announcementRecord) { a.Refs[0].Prefix, a.Refs[0].Start = 16, 16 },
		"prefix beyond the start":   func(a *announcementRecord) { a.Refs[0].Prefix, a.Refs[0].Start = 32, 16 },
		"prefix too long":           func(a *announcementRecord) { a.Refs[0].Prefix = 1 << 31 },
		"too long":                  func(a *announcementRecord) { a.Refs[0].Tokens = 1 << 31 },
		"unknown state":             func(a *announcementRecord) { a.Refs[0].State = 3 },
		"pages while offloading":    func(a *announcementRecord) { a.Refs[0].State = 1 },
		"pages on the host":         func(a *announcementRecord) { a.Refs[0].State = 2 },
		"lists without streams":     func(a *announcementRecord) { a.Refs = []refRecord{} },
		"pages do not add up":       func(a *announcementRecord) { a.Pages++ },
		"digest of something else":  func(a *announcementRecord) { a.Digest++ },
		"other pages":               func(a *announcementRecord) { a.Lists[0] = appendList(nil, contiguous(6, 3)) },
		"more tokens than digested": func(a *announcementRecord) { a.Refs[0].Tokens++ },
		"page list cut":             func(a *announcementRecord) { a.Lists[0] = a.Lists[0][:2] },
		"page list over the bound":  func(a *announcementRecord) { a.Lists[0] = []byte{tagRuns, 0x81, 0x80, 0x40, 0, 0} },
	}
	cases := map[string][]byte{
		"nothing":                    {},
		"two bytes":                  {magic, version},
		"no body":                    {magic, version, kindCheck},
		"other magic":                {0, version, kindCheck, 0x90},
		"nil for a batch":            {magic, version, kindBatch, 0xc0},
		"map for a record":           {magic, version, kindBatch, 0x91, 0x85, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		"reserved byte":              {magic, version, kindBatch, 0x91, 0xc1},
		"too few fields":             {magic, version, kindBye, 0x92, 0, 0},
		"signed number":              {magic, version, kindBye, 0x93, 0xd0, 1, 0, 0},
		"negative number":            {magic, version, kindBye, 0x93, 0xff, 0, 0},
		"float":                      {magic, version, kindBye, 0x93, 0xca, 0, 0, 0, 0, 0, 0},
		"number cut":                 {magic, version, kindBye, 0x93, 0xcf, 0, 0},
		"array of 4G":                {magic, version, kindBatch, 0xdd, 0xff, 0xff, 0xff, 0xff},
		"array of 4G, one element":   {magic, version, kindBatch, 0xdd, 0xff, 0xff, 0xff, 0xff, 0x95, 0, 0, 0, 0x90, 0xc4, 0},
		"text of 4G":                 {magic, version, kindBye, 0x94, 0, 0, 0, 0xdb, 0xff, 0xff, 0xff, 0xff},
		"map of 4G in a new field":   {magic, version, kindBye, 0x94, 0, 0, 0, 0xdf, 0xff, 0xff, 0xff, 0xff},
		"array of 4G in a new field": {magic, version, kindBye, 0x94, 0, 0, 0, 0xdd, 0xff, 0xff, 0xff, 0xff},
		"new field missing":          {magic, version, kindBye, 0x94, 0, 0, 0},
		"deep nesting":               append([]byte{magic, version, kindBye, 0x94, 0, 0, 0}, bytes.Repeat([]byte{0x91}, 1<<16)...),
		"deep nesting, closed":       append(append([]byte{magic, version, kindBye, 0x94, 0, 0, 0}, bytes.Repeat([]byte{0x91}, 1<<16)...), 0x90),
		"release gap 0":              packed(t, kindBatch, []batchRecord{{Announcements: []announcementRecord{}, Releases: []byte{0}}}),
		"release overflow":           packed(t, kindBatch, []batchRecord{{Floor: 1<<64 - 1, Announcements: []announcementRecord{}, Releases: []byte{1}}}),
		"release cut":                packed(t, kindBatch, []batchRecord{{Announcements: []announcementRecord{}, Releases: []byte{0x80}}}),
		"floor above max":            packed(t, kindCheck, &checkRecord{Floor: 2, Max: 1}),
		"more live than possible":    packed(t, kindCheck, &checkRecord{Floor: 2, Max: 4, Live: 3}),
		"nack of nothing":            packed(t, kindNack, &nackRecord{Missing: []byte{}}),
		"nack of 301":                packed(t, kindNack, &nackRecord{Missing: []byte{1, 0xac, 0x02}}),
		"nack of many":               packed(t, kindNack, &nackRecord{Missing: []byte{1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1}}),
		"nack gap 0":                 packed(t, kindNack, &nackRecord{Missing: []byte{0, 0}}),
		"nack cut":                   packed(t, kindNack, &nackRecord{Missing: []byte{1}}),
		"beacon 0":                   packed(t, kindBeacon, &beaconRecord{Modulus: 1}),
		"beacon of modulus 0":        packed(t, kindBeacon, &beaconRecord{Number: 1}),
		"beacon of modulus 2^32":     {magic, version, kindBeacon, 0x94, 1, 2, 3, 0xcf, 0, 0, 0, 1, 0, 0, 0, 0},
		"beacon cut":                 {magic, version, kindBeacon, 0x93, 1, 2, 3},
		"echo cut":                   {magic, version, kindEcho, 0x93, 1, 2, 3},
		"nack overflow":              packed(t, kindNack, &nackRecord{Missing: []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 1}}),
	}
	for name, change := range announcementCases {
		cases[name] = batchOf(t, change)
	}
	for name, b := range cases {
		t.Run(name, func(t *testing.T) {
			if m, err := Decode(b, MaxPages); !errors.Is(err, ErrMessage) || errors.Is(err, ErrVersion) {
				t.Errorf("Decode(%.60x) = %+v, %v", b, m, err)
			}
		})
	}
}

// TestDigestTellsApart: a table that differs in anything has another digest.
func TestDigestTellsApart(t *testing.T) {
	digest := func(change func(r *Ref, list []page.Index)) uint64 {
		refs := []Ref{{Label: id.Main, RankMask: 3, Prefix: 16, Start: 48, Tokens: 80}}
		list := contiguous(5, 3)
		change(&refs[0], list)
		return Digest(refs, [][]page.Index{list})
	}
	seen := map[uint64]string{}
	for name, change := range map[string]func(r *Ref, list []page.Index){
		"nothing": func(*Ref, []page.Index) {},
		"label":   func(r *Ref, _ []page.Index) { r.Label = "draft" },
		"ranks":   func(r *Ref, _ []page.Index) { r.RankMask = 1 },
		"list":    func(r *Ref, _ []page.Index) { r.List = 1 },
		"prefix":  func(r *Ref, _ []page.Index) { r.Prefix = 32 },
		"start":   func(r *Ref, _ []page.Index) { r.Start = 32 },
		"tokens":  func(r *Ref, _ []page.Index) { r.Tokens = 81 },
		"state":   func(r *Ref, _ []page.Index) { r.State = 2 },
		"pages":   func(_ *Ref, list []page.Index) { list[2] = 9 },
	} {
		d := digest(change)
		if other, ok := seen[d]; ok {
			t.Errorf("another %s has the digest of another %s", name, other)
		}
		seen[d] = name
	}
}

func TestPagesAreBoundedOverTheWholeMessage(t *testing.T) {
	refs := []Ref{{Label: id.Main, RankMask: 1}}
	b := Batch{Owner: 1, Incarnation: 2}
	for s := range id.Sequence(4) {
		b.Announcements = append(b.Announcements, announcement(s+1, s+1, refs, contiguous(1, 100)))
	}
	enc, err := Encode(Batches{b, b})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Decode(enc, 800); err != nil {
		t.Errorf("as many as allowed: %v", err)
	}
	if _, err := Decode(enc, 799); !errors.Is(err, ErrMessage) {
		t.Errorf("one page too many: %v", err)
	}
}

func TestUnknownVersionOrKind(t *testing.T) {
	for _, b := range [][]byte{{magic, 2, kindCheck, 0x90}, {magic, 0, kindBatch}, {magic, version, 9, 0x90}, {magic, version, 0}} {
		if m, err := Decode(b, MaxPages); !errors.Is(err, ErrVersion) || errors.Is(err, ErrMessage) {
			t.Errorf("Decode(%x) = %+v, %v", b, m, err)
		}
		if _, err := DecodeChecks(b); !errors.Is(err, ErrVersion) {
			t.Errorf("DecodeChecks(%x) = %v", b, err)
		}
	}
}

// TestNewFieldsAreSkipped: every record of a later minor version may end in
// more fields, of whatever kind.
func TestNewFieldsAreSkipped(t *testing.T) {
	// announcement with 12 fields and 4 more, its ref with 7 and 1 more
	announcement := []byte{
		0xdc, 0, 16, 2, 1, 0xc4, 16, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 77, 0, 100, 1, 9, 3,
		0x91, 0xa4, 'm', 'a', 'i', 'n', 0x91, 0x98, 0, 1, 0, 0, 0, 40, 0, 0xc0, 0xc0,
		0x82, 0xa1, 'a', 0x92, 1, 2, 0xa1, 'b', 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0xc7, 2, 5, 0, 0, 0xd6, 1, 0, 0, 0, 0, 0xd2, 0, 0, 0, 1,
	}
	b := append([]byte{magic, version, kindBatch, 0x91, 0x97, 1, 2, 10, 0x91}, announcement...)
	b = append(b, 0xc4, 1, 5, 0xc3, 0xd9, 1, 'x')
	m, err := Decode(b, MaxPages)
	if err != nil {
		t.Fatal(err)
	}
	got := m.(Batches)[0]
	if a := got.Announcements[0]; a.Sequence != 12 || a.Publication != 11 || a.Pages != 3 || a.Refs[0].Tokens != 40 || a.Lists != nil || got.Releases[0] != 15 {
		t.Errorf("decoded %+v", got)
	}
	for name, b := range map[string][]byte{
		"check":  {magic, version, kindCheck, 0x98, 1, 2, 3, 4, 5, 1, 7, 0xc2},
		"nack":   {magic, version, kindNack, 0x95, 1, 2, 3, 0xc4, 2, 1, 0, 0xe0},
		"bye":    {magic, version, kindBye, 0x95, 1, 2, 3, 0xde, 0, 1, 4, 0x80, 0xc4, 1, 0},
		"beacon": {magic, version, kindBeacon, 0x95, 1, 2, 3, 4, 0xc0},
		"echo":   {magic, version, kindEcho, 0x95, 1, 2, 3, 4, 0x91, 5},
	} {
		if _, err := Decode(b, MaxPages); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestAllocationIsBounded: whatever arrives costs at most 64 times its size
// and the pages that it may unfold to.
func TestAllocationIsBounded(t *testing.T) {
	const maxPages = 1 << 12
	inputs := map[string][]byte{}
	for name, m := range messages() {
		b, err := Encode(m)
		if err != nil {
			t.Fatal(err)
		}
		inputs[name] = b
	}
	list := func(n int, of ...byte) []byte {
		return append([]byte{0xdc, byte(n >> 8), byte(n)}, bytes.Repeat(of, n)...)
	}
	group := func(announcements []byte) []byte {
		return append([]byte{magic, version, kindBatch, 0x91, 0x95, 1, 2, 3}, announcements...)
	}
	one := []byte{0x9c, 1, 1, 0xc4, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x90, 0x90, 0xc0}
	inputs["many groups"] = append([]byte{magic, version, kindBatch}, list(5000, 0x95, 0, 0, 0, 0x90, 0xc4, 0)...)
	inputs["many announcements"] = append(group(list(2000, one...)), 0xc4, 0)
	inputs["many nils"] = append(group(list(1000, 0xc0)), 0xc4, 0)
	inputs["many empty records"] = append(group(list(1000, 0x90)), 0xc4, 0)
	inputs["many releases"] = append(group([]byte{0x90}), append([]byte{0xc5, 0x0f, 0xff}, bytes.Repeat([]byte{1}, 0x0fff)...)...)
	inputs["many lists"] = batchOf(t, func(a *announcementRecord) {
		a.Lists = make([][]byte, maxLists)
		for i := range a.Lists {
			a.Lists[i] = []byte{}
		}
	})
	inputs["many bombs"] = batchOf(t, func(a *announcementRecord) {
		a.Lists = make([][]byte, maxLists)
		for i := range a.Lists {
			a.Lists[i] = []byte{tagRuns, 0xff, 0x1f, 0, 0xfc, 0x3f} // 4095 pages in 6 bytes
		}
	})
	inputs["many refs"] = batchOf(t, func(a *announcementRecord) {
		a.Refs, a.Lists = nil, nil
		for range maxRefs {
			a.Refs = append(a.Refs, refRecord{RankMask: 1})
		}
	})
	inputs["many checkpoints"] = EncodeChecks(make([]Check, MaxChecks))
	inputs["header of 4G checkpoints"] = []byte{magic, version, kindState, 0xdd, 0xff, 0xff, 0xff, 0xff}
	inputs["short and empty"] = []byte{magic, version, kindBatch, 0x90}
	r := rand.New(rand.NewSource(1))
	for name, b := range inputs {
		for range 50 {
			const slack = 8 << 10 // decoder, error text; what the runtime does beside
			if got, most := allocated(func() { _, _ = Decode(b, maxPages); _, _ = DecodeChecks(b) }), 64*len(b)+4*maxPages+slack; got > most {
				t.Errorf("%s: %d bytes allocated for %d received, at most %d", name, got, len(b), most)
				break
			}
			b = bytes.Clone(b)
			b[headBytes+r.Intn(len(b)-headBytes)] = byte(r.Intn(256))
		}
	}
}

func allocated(f func()) int {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return int(after.TotalAlloc - before.TotalAlloc)
}

func FuzzDecode(f *testing.F) {
	for _, m := range messages() {
		b, err := Encode(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add(EncodeChecks([]Check{{Owner: 1, Max: 3, Live: 2}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if checks, err := DecodeChecks(b); err == nil {
			if again, err := DecodeChecks(EncodeChecks(checks)); err != nil || !reflect.DeepEqual(again, checks) {
				t.Fatalf("checkpoints %+v became %+v, %v", checks, again, err)
			}
		}
		const maxPages = 1 << 16
		m, err := Decode(b, maxPages)
		if err != nil {
			if !errors.Is(err, ErrMessage) && !errors.Is(err, ErrVersion) {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		enc, err := Encode(m)
		if err != nil {
			t.Fatalf("decoded %+v, but cannot encode it: %v", m, err)
		}
		again, err := Decode(enc, maxPages)
		if err != nil || !same(again, m) {
			t.Fatalf("%+v became %+v, %v", m, again, err)
		}
	})
}

func FuzzPageList(f *testing.F) {
	for _, p := range [][]page.Index{{}, {7}, contiguous(1, 100), descending(200, 100), shuffled(100, 1<<17), {1<<32 - 1, 0}} {
		f.Add(appendList(nil, p))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		const most = 1 << 16
		p, err := decodeList(b, most)
		if err != nil {
			if !errors.Is(err, ErrMessage) {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		if len(p) > most {
			t.Fatalf("%d pages", len(p))
		}
		enc := appendList(nil, p)
		again, err := decodeList(enc, most)
		if err != nil || !reflect.DeepEqual(again, p) {
			t.Fatalf("%v became %v, %v", p, again, err)
		}
		if len(enc) > len(b)+8 { // ours is the shortest of both codes, but for the greedy cut of runs
			t.Logf("%d bytes became %d", len(b), len(enc))
		}
	})
}
