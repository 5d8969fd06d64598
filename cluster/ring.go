package cluster

import "sync"

// ringItems bounds the ring; the oldest item goes first.
const ringItems = 4096

// ring holds the items that are to be offered again by memberlist's gossip, in
// order of age. It stands in for memberlist's own broadcast queue, which loses
// messages of equal length.
type ring struct {
	count *counters
	most  int // the longest message that memberlist ever has room for; 0: any

	mu    sync.Mutex
	slots []offer // a circle of ringItems, made when first used
	head  int
	n     int
}

type offer struct {
	item  []byte
	again int // times left
}

// add keeps the items to be offered so many times.
func (r *ring) add(items [][]byte, again int) {
	if again <= 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, item := range items {
		if r.most > 0 && 2+packed(item) > r.most { // it would wait for ever, and all behind it
			r.count.ringDropped.Add(1)
			continue
		}
		r.put(offer{item, again})
	}
}

func (r *ring) put(o offer) {
	if r.slots == nil {
		r.slots = make([]offer, ringItems)
	}
	if r.n == ringItems {
		r.pop()
		r.count.ringDropped.Add(1)
	}
	r.slots[(r.head+r.n)%ringItems] = o
	r.n++
}

func (r *ring) pop() offer {
	o := r.slots[r.head]
	r.slots[r.head] = offer{}
	r.head = (r.head + 1) % ringItems
	r.n--
	return o
}

// take returns one message of at most so many bytes, nil if there is nothing
// that fits. An item that did not fit beside memberlist's own messages waits
// for a packet with more room.
func (r *ring) take(bytes int) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	var items [][]byte
	room := min(bytes, packBytes) - 2
	for left := r.n; left > 0 && packed(r.slots[r.head].item) <= room; left-- {
		o := r.pop()
		room -= packed(o.item)
		items = append(items, o.item)
		if o.again--; o.again > 0 {
			r.put(o)
		}
	}
	if items == nil {
		return nil
	}
	return encodeItems(items)
}

func (r *ring) len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.n
}
