package replay

import (
	"fmt"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// arena is the mapped KV of one rank, with addresses computed here, one vector
// at a time, from nothing but the definition of the layout: the nodes'
// arithmetic must not check itself.
type arena struct {
	bytes  []byte
	layout page.Layout
	vector int64 // bytes of one head of one token
}

func newArena(bytes []byte, l page.Layout) (arena, error) {
	if int64(len(bytes)) < l.Bytes() {
		return arena{}, fmt.Errorf("arena has %d bytes, its geometry needs %d", len(bytes), l.Bytes())
	}
	return arena{bytes: bytes, layout: l, vector: int64(l.HeadDim) * l.DType.Bytes()}, nil
}

// at is the offset of a vector.
//
//	NHD: [layer, page, K or V, slot, head, element]
//	HND: [layer, page, K or V, head, slot, element]
func (a arena) at(layer int, p page.Index, kv, head, slot int) int64 {
	l := a.layout
	block := (int64(layer)*int64(l.Pages)+int64(p))*2 + int64(kv)
	if l.Order == page.HND {
		return ((block*int64(l.Heads)+int64(head))*int64(l.PageSize) + int64(slot)) * a.vector
	}
	return ((block*int64(l.PageSize)+int64(slot))*int64(l.Heads) + int64(head)) * a.vector
}

// place is where a token lies.
type place struct {
	page page.Index
	slot int
}

// usable refuses a place where no token may lie.
func (a arena) usable(p place) error {
	if p.page == page.Sink || int64(p.page) >= int64(a.layout.Pages) {
		return fmt.Errorf("page %d is not in 1..%d", p.page, a.layout.Pages-1)
	}
	if p.slot < 0 || p.slot >= a.layout.PageSize {
		return fmt.Errorf("slot %d is not in 0..%d", p.slot, a.layout.PageSize-1)
	}
	return nil
}

// write puts tokens from..from+len(places)-1 of a label where the places say
// and returns the bytes written. The places are usable.
func (a arena) write(kv pattern, from int, places []place) int64 {
	l := a.layout
	for layer := range l.Layers {
		for side := range 2 {
			for head := range l.Heads {
				vectors := kv.plane(layer, side, head, l.Heads)
				for i, p := range places {
					at := a.at(layer, p.page, side, head, p.slot)
					vectors.fill(a.bytes[at:at+a.vector], from+i)
				}
			}
		}
	}
	return int64(len(places)) * l.TokenBytes()
}

// mistake is the first wrong byte of a check.
type mistake struct {
	request         id.Request
	label           id.Label
	rank            id.Rank
	token           int
	layer, side     int
	head, element   int
	page            page.Index
	slot            int
	offset          int64
	have, want      byte
	wrong, lookedAt int64 // bytes of the whole check
}

func (m *mistake) Error() string {
	return fmt.Sprintf("request %s label %s rank %d: %d of %d bytes are wrong, the first at token %d layer %d %c head %d element %d (page %d slot %d, offset %d of the arena): 0x%02x instead of 0x%02x",
		m.request, m.label, m.rank, m.wrong, m.lookedAt, m.token, m.layer, "KV"[m.side], m.head, m.element, m.page, m.slot, m.offset, m.have, m.want)
}

// check compares the first tokens of a stream with what they have to be.
// pages[i] holds token i*PageSize on. It returns the wrong bytes of those
// looked at, and the first one.
func (a arena) check(r id.Request, s stream, rank id.Rank, pages []page.Index, tokens int) (looked, wrong int64, first *mistake) {
	l := a.layout
	main, own := newPattern(r, id.Main, rank), newPattern(r, s.label, rank)
	for layer := range l.Layers {
		for side := range 2 {
			for head := range l.Heads {
				vectors := main.plane(layer, side, head, l.Heads)
				for token := range tokens {
					if token == s.forked {
						vectors = own.plane(layer, side, head, l.Heads)
					}
					p, slot := pages[token/l.PageSize], token%l.PageSize
					at := a.at(layer, p, side, head, slot)
					n := vectors.wrong(a.bytes[at:at+a.vector], token)
					if n == 0 {
						continue
					}
					if wrong += n; first == nil {
						vector := a.bytes[at : at+a.vector]
						_, i, want := vectors.differences(vector, token)
						first = &mistake{
							request: r, label: s.label, rank: rank, token: token, layer: layer, side: side, head: head,
							element: i / int(l.DType.Bytes()), page: p, slot: slot, offset: at + int64(i), have: vector[i], want: want,
						}
					}
				}
			}
		}
	}
	looked = int64(tokens) * l.TokenBytes()
	if first != nil {
		first.wrong, first.lookedAt = wrong, looked
	}
	return looked, wrong, first
}
