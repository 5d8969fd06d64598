package cluster

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"
)

// memberlist's own queue loses messages of equal length that come in bursts.
func TestRingOffersEachItem(t *testing.T) {
	const again, count = 3, 50_000
	r := ring{count: &counters{}}
	offered := make([]byte, count)
	take := func(bytes int) int {
		b := r.take(bytes)
		if len(b) > bytes {
			t.Fatalf("message of %d bytes, want at most %d", len(b), bytes)
		}
		if b == nil {
			return 0
		}
		m, err := decodeMessage(b)
		if err != nil {
			t.Fatal(err)
		}
		for _, item := range m.items {
			offered[binary.BigEndian.Uint32(item)]++
		}
		return len(m.items)
	}
	for k := 0; k < count; {
		for range min(1+rand.IntN(10), count-k) {
			item := make([]byte, 150)
			binary.BigEndian.PutUint32(item, uint32(k))
			r.add([][]byte{item}, again)
			k++
		}
		for range rand.IntN(8) {
			take(rand.IntN(1400))
		}
		if r.len() > ringItems {
			t.Fatalf("the ring holds %d", r.len())
		}
	}
	for take(1335) > 0 {
	}
	short := uint64(0)
	for k, n := range offered {
		if n > again {
			t.Fatalf("item %d was offered %d times", k, n)
		}
		if n < again {
			short++
		}
	}
	if dropped := r.count.ringDropped.Load(); short != dropped {
		t.Errorf("%d items were offered too seldom, %d reported", short, dropped)
	}
	t.Logf("%d of %d items were dropped and reported", short, count)
	r.add([][]byte{{1}}, 0)
	if r.len() != 0 {
		t.Error("an item that is not to be offered again is in the ring")
	}
}

func TestRingDropsTheOldest(t *testing.T) {
	r := ring{count: &counters{}}
	item := func(k int) []byte { return binary.BigEndian.AppendUint32(nil, uint32(k)) }
	for k := range ringItems + 10 {
		r.add([][]byte{item(k)}, 1)
	}
	if r.len() != ringItems || r.count.ringDropped.Load() != 10 {
		t.Errorf("the ring holds %d, %d were dropped", r.len(), r.count.ringDropped.Load())
	}
	m, err := decodeMessage(r.take(2 + 5))
	if err != nil || binary.BigEndian.Uint32(m.items[0]) != 10 {
		t.Errorf("first is %v, %v, want item 10", m.items, err)
	}
	if r.take(2+4) != nil {
		t.Error("an item came that does not fit")
	}
}

func TestOutboxIsBounded(t *testing.T) {
	o := outbox{wake: make(chan struct{}, 1)}
	small := 0
	for o.add([]byte{1}) {
		small++
	}
	if small != outboxItems {
		t.Errorf("%d small items, want %d", small, outboxItems)
	}
	sent := 0
	for items := o.next(); items != nil; items = o.next() {
		sent += len(items)
	}
	if sent != small || o.bytes != 0 {
		t.Errorf("%d came out of %d, %d bytes are left", sent, small, o.bytes)
	}
	large := 0
	for o.add(make([]byte, MaxItem)) {
		large++
	}
	if large != outboxBytes/MaxItem {
		t.Errorf("%d large items, want %d", large, outboxBytes/MaxItem)
	}
}

// The room shrinks with bytes and with items, and says what is taken.
func TestRoom(t *testing.T) {
	o := outbox{wake: make(chan struct{}, 1)}
	if o.room() != MaxRoom {
		t.Errorf("empty, there is room for %d", o.room())
	}
	now := time.Now()
	for i := range outboxItems / 2 {
		o.add([]byte{byte(i)})
	}
	if o.room() != MaxRoom/2 {
		t.Errorf("with half of the items there is room for %d", o.room())
	}
	if n, age := o.state(now.Add(time.Minute)); n != outboxItems/2 || age > time.Minute || age < 50*time.Second {
		t.Errorf("%d items wait, for %v", n, age)
	}
	for o.room() > MaxItem {
		if !o.add(make([]byte, MaxItem)) {
			t.Fatalf("an item was refused with room for %d", o.room())
		}
	}
	for o.add(make([]byte, MaxItem)) {
	}
	if o.room() >= MaxItem {
		t.Errorf("full, there is room for %d", o.room())
	}
	for o.next() != nil {
	}
	if n, age := o.state(now); o.room() != MaxRoom || n != 0 || age != 0 {
		t.Errorf("empty again, there is room for %d, and %d wait for %v", o.room(), n, age)
	}
}

func TestBucket(t *testing.T) {
	now := time.Unix(1e9, 0)
	b := bucket{rate: 1000, burst: 100}
	if d := b.take(100, now); d != 0 {
		t.Errorf("the burst waits %v", d)
	}
	if d := b.take(50, now); d != 50*time.Millisecond {
		t.Errorf("50 bytes over wait %v", d)
	}
	total := 150
	for range 1000 { // whoever waits as told sends at the rate
		total += 30
		now = now.Add(b.take(30, now))
	}
	took := now.Sub(time.Unix(1e9, 0)).Seconds()
	if rate := float64(total-100) / took; rate > 1010 || rate < 900 {
		t.Errorf("%.0f bytes a second, want 1000", rate)
	}
	if d := b.take(100, now.Add(time.Hour)); d != 0 {
		t.Errorf("after a rest the burst waits %v", d)
	}
	if d := b.take(100, now.Add(time.Hour)); d == 0 {
		t.Error("a rest saved more than a burst")
	}
	b = bucket{rate: 10, burst: 5}
	allowed := 0
	for range 1000 { // who is refused owes nothing
		if b.allow(now) {
			allowed++
		}
	}
	if allowed != 5 || !b.allow(now.Add(101*time.Millisecond)) || b.allow(now.Add(102*time.Millisecond)) {
		t.Errorf("%d were allowed at once", allowed)
	}
}
