package cluster

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/id"
)

// Whatever members send each other, items of all lengths and the news of many
// members at once, with the longest label and encryption, fits.
func TestPacketsFit(t *testing.T) {
	t.Parallel()
	var w weather
	longest := map[string]int{}
	when := "members"
	w.watch(func(_, _ netip.AddrPort, b []byte) { longest[when] = max(longest[when], len(b)) })
	strict := func(o *Options) {
		encrypt(o, bytes.Repeat([]byte{1}, 32))
		o.Label, o.Fast = strings.Repeat("l", MaxLabel), false
		w.over(o)
	}
	all := group(t, 4, func(_ int, o *Options) {
		strict(o)
		o.Again = 3
	})
	// Many with long names come and go, so that the news of them fill packets.
	for i := range 12 {
		o := options(t, id.Node(fmt.Sprintf("%s-%02d", strings.Repeat("x", id.MaxNode-3), i)), 1, anywhere(), all[i%4].Gossip().String())
		o.Meta.Group = id.Group(o.Life.Node)
		strict(&o)
		m := launch(t, o)
		defer m.Close()
	}
	within(t, "all see all", func() bool {
		return !slices.ContainsFunc(all, func(m member) bool { return len(m.Members()) != len(all)+12 })
	})
	w.mu.Lock()
	when = "items"
	w.mu.Unlock()
	for i := range 400 {
		length := MaxItem
		if i > 0 {
			length = 1 + rand.IntN(MaxItem)
		}
		if err := all[i%4].Broadcast(make([]byte, length)); err != nil {
			t.Fatal(err)
		}
	}
	var sent [][]byte
	for range 50 {
		sent = append(sent, make([]byte, 1+rand.IntN(MaxItem)))
	}
	if err := all[0].Send("n1", sent...); err != nil {
		t.Fatal(err)
	}
	within(t, "all is sent", func() bool {
		return !slices.ContainsFunc(all, func(m member) bool { s := m.Stats(); return s.Outbox+s.Ring > 0 })
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	t.Logf("longest packets: %v bytes", longest)
	for what, n := range longest {
		if n > maxPacket {
			t.Errorf("%s: a packet of %d bytes, want at most %d", what, n, maxPacket)
		}
	}
	if longest["items"] < maxPacket*9/10 {
		t.Errorf("the longest packet has %d bytes: the test is too kind", longest["items"])
	}
}

// careless sends packets of any length.
type careless struct{ *transport }

func (t careless) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	_, err := t.udp.WriteToUDPAddrPort(b, mustAddr(a.Addr))
	return time.Now(), err
}

// memberlist counts the messages of a packet in one byte. However many tiny
// items wait and however large a packet may be, pings are understood, nobody is
// suspected, and nothing is lost.
func TestTinyItemsDoNotDrownPings(t *testing.T) {
	t.Parallel()
	const count, again = 1000, 25
	p := feel(t)
	var w weather
	carriers := make([]*carrier, 3)
	all := group(t, len(carriers), func(i int, o *Options) {
		carriers[i] = &carrier{}
		o.Handler = carriers[i].handler()
		w.over(o)
		outdoors := o.tune
		o.tune = func(m *memberlist.Config) {
			m.Transport = careless{m.Transport.(*transport)}
			outdoors(m)
			m.UDPBufferSize = 60_000
			m.GossipInterval = 50 * time.Millisecond // so that the items last for some probes
		}
	})
	var bad error
	loaded, accusations, most := 0, 0, 0
	w.watch(func(from, to netip.AddrPort, b []byte) {
		messages, err := unpack(b)
		if err != nil {
			bad = fmt.Errorf("%s to %s, %d bytes: %w", from, to, len(b), err)
			return
		}
		probe, items := false, 0
		for _, m := range messages {
			switch m[0] {
			case wirePing, wireIndirect, wireAck:
				probe = true
			case wireSuspect, wireDead:
				accusations++
			case wireUser:
				items++
			}
		}
		most = max(most, items)
		if probe && items > 0 {
			loaded++
		}
	})
	for i, m := range all {
		for k := range count {
			m.calls.ring.add([][]byte{numbered(uint32(i*count+k), 4)}, again)
		}
	}
	within(t, "all items are everywhere, and none is left", func() bool {
		for i, c := range carriers {
			c.mu.Lock()
			n := len(c.at)
			c.mu.Unlock()
			if n < (len(carriers)-1)*count || all[i].Stats().Ring > 0 {
				return false
			}
		}
		return true
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	t.Logf("%d probes carried items, at most %d messages of items a packet, %d accusations", loaded, most, accusations)
	if bad != nil {
		t.Errorf("a packet cannot be read: %v", bad)
	}
	if most > 1 {
		t.Errorf("a packet had %d messages of items", most)
	}
	if loaded == 0 {
		t.Error("no probe carried an item: the test is too kind")
	}
	// A busy machine may be late with an answer, so that somebody is accused and
	// says that he lives.
	for _, m := range all {
		lost := losses(m)
		p.claim(t, lost == nil, "%s lost members: %v", m.Life(), lost)
	}
}

// Every item leaves the outbox once, in order, and is then offered as often as
// was said, unless it is reported as dropped. Items of one length that come in
// bursts are what memberlist's own queue loses.
func TestEachItemIsOfferedExactly(t *testing.T) {
	var items, drops int
	run := func(t *rapid.T, count int) {
		length := rapid.IntRange(4, 300).Draw(t, "length")
		again := rapid.IntRange(1, 4).Draw(t, "again")
		burst := rapid.IntRange(1, 400).Draw(t, "burst")
		takes := rapid.IntRange(1, 40).Draw(t, "takes")
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		box := outbox{wake: make(chan struct{}, 1)}
		r := ring{count: &counters{}}
		var pushed uint32
		offered := make([]uint8, count)
		push := func() {
			for items := box.next(); items != nil; items = box.next() {
				for _, item := range items {
					if k := binary.BigEndian.Uint32(item); k != pushed {
						t.Fatalf("item %d left the outbox, want %d", k, pushed)
					}
					pushed++
				}
				r.add(items, again)
			}
		}
		take := func(bytes int) bool {
			b := r.take(bytes)
			if b == nil {
				return false
			}
			m, err := decodeMessage(b)
			if err != nil || len(b) > bytes {
				t.Fatalf("message of %d bytes where %d are free: %v", len(b), bytes, err)
			}
			for _, item := range m.items {
				offered[binary.BigEndian.Uint32(item)]++
			}
			return true
		}
		for k := 0; k < count; {
			for n := min(1+random.IntN(burst), count-k); n > 0; n-- {
				item := numbered(uint32(k), length)
				if !box.add(item) {
					break
				}
				item[0] ^= 0xff // it was copied
				k++
			}
			if random.IntN(4) > 0 {
				push()
			}
			for range random.IntN(takes) {
				take(random.IntN(maxMessage))
			}
		}
		push()
		for take(packBytes) {
		}
		if int(pushed) != count || r.len() != 0 {
			t.Fatalf("%d of %d items left the outbox, %d are in the ring", pushed, count, r.len())
		}
		short := 0
		for k, n := range offered {
			if int(n) > again {
				t.Fatalf("item %d was offered %d times, want %d", k, n, again)
			}
			if int(n) < again {
				short++
			}
		}
		if dropped := int(r.count.ringDropped.Load()); short != dropped {
			t.Fatalf("%d items were offered too seldom, %d are reported", short, dropped)
		}
		items, drops = items+count, drops+short
	}
	rapid.Check(t, func(t *rapid.T) { // in some the ring is too small
		run(t, rapid.SampledFrom([]int{500, 1000, 1000, much(6000, 10_000)}).Draw(t, "count"))
	})
	t.Logf("%d items, %d of them dropped and reported", items, drops)
	if items == drops {
		t.Error("all were dropped: the test is too hard")
	}
}

// On the wire too: an item is pushed to so many different members, and offered
// again so many times, not more nor less.
func TestEachItemIsSentExactly(t *testing.T) {
	t.Parallel()
	const n, fanout, again, count = 5, 3, 2, 2000
	var w weather
	all := group(t, n, func(_ int, o *Options) {
		w.over(o)
		o.Fanout, o.Again = fanout, again
	})
	from := all[0].Gossip()
	copies := make([]int, count)
	targets := make([]map[netip.AddrPort]bool, count)
	w.watch(func(sender, to netip.AddrPort, b []byte) {
		messages, err := unpack(b)
		if err != nil || sender != from {
			return
		}
		for _, m := range messages {
			if m[0] != wireUser {
				continue
			}
			got, err := decodeMessage(m[1:])
			if err != nil || got.kind != kindItems {
				continue
			}
			for _, item := range got.items {
				k := binary.BigEndian.Uint32(item)
				copies[k]++
				if targets[k] == nil {
					targets[k] = map[netip.AddrPort]bool{}
				}
				targets[k][to] = true
			}
		}
	})
	for k := range count {
		if err := all[0].Broadcast(numbered(uint32(k), 120)); err != nil {
			t.Fatal(err)
		}
		if rand.IntN(50) == 0 { // the end of a burst
			within(t, "the outbox is empty", func() bool { return all[0].Stats().Outbox == 0 })
		}
	}
	begin := time.Now()
	within(t, "all is sent, or nothing comes any more", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		sum := 0
		for _, n := range copies {
			sum += n
		}
		s := all[0].Stats()
		return s.Outbox+s.Ring == 0 && sum >= count*(fanout+again) || time.Since(begin) > patience/2
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	if dropped := all[0].Stats().RingDropped; dropped > 0 {
		t.Fatalf("the ring dropped %d items: the test is too hard", dropped)
	}
	for k := range count {
		if copies[k] != fanout+again || len(targets[k]) < fanout {
			t.Fatalf("item %d was sent %d times, to %d members, want %d and at least %d", k, copies[k], len(targets[k]), fanout+again, fanout)
		}
	}
}
