package replay

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/internal/page"
)

// What a device's memory is written and read through: blocks of pinned host
// memory, as many as may be in use at once.
const (
	blockBytes = 1 << 20
	blocks     = 4
)

// device is the KV of one rank in the memory of a device. Tokens are made, and
// looked at, in a copy in host memory that has just their pages; vectors go
// between the two, and nothing but vectors of the tokens in question.
type device struct {
	memory memory.Stager
	arena  arena // of the layout, without bytes
	free   chan []byte
	region *memory.Region
	unpin  func() error
}

func newDevice(m memory.Stager, l page.Layout) (*device, error) {
	if m.Size() < l.Bytes() {
		return nil, fmt.Errorf("arena has %d bytes, its geometry needs %d", m.Size(), l.Bytes())
	}
	region, err := memory.New("kvferry-replay", blocks*blockBytes)
	if err != nil {
		return nil, err
	}
	d := &device{
		memory: m, arena: arena{layout: l, vector: int64(l.HeadDim) * l.DType.Bytes()},
		free: make(chan []byte, blocks), region: region,
	}
	for b := range slices.Chunk(region.Bytes(), blockBytes) {
		d.free <- b
	}
	if d.unpin, err = m.Pin(region.Bytes()); err != nil { // it is copied all the same, slower
		d.unpin = func() error { return nil }
	}
	return d, nil
}

// Close frees the host memory; nobody writes or checks any more.
func (d *device) Close() error { return errors.Join(d.unpin(), d.region.Close()) }

// part is a copy in host memory of the pages of some places: where each is in it.
func (d *device) part(places []place) (small arena, there []place) {
	at := make(map[page.Index]page.Index)
	for _, p := range places {
		if _, ok := at[p.page]; !ok {
			at[p.page] = page.Index(len(at))
		}
		there = append(there, place{at[p.page], p.slot})
	}
	small = d.arena
	small.layout.Pages = len(at)
	small.bytes = make([]byte, small.layout.Bytes())
	return small, there
}

// spot is where a vector lies on the device and in the copy.
type spot struct{ device, host int64 }

// vectors are those of the places, in the order in which they lie on the device:
// so what lies together is moved together.
func (d *device) vectors(small arena, places, there []place) []spot {
	l := d.arena.layout
	list := make([]spot, 0, l.Layers*2*l.Heads*len(places))
	for layer := range l.Layers {
		for side := range 2 {
			for head := range l.Heads {
				for i, p := range places {
					list = append(list, spot{
						d.arena.at(layer, p.page, side, head, p.slot),
						small.at(layer, there[i].page, side, head, there[i].slot),
					})
				}
			}
		}
	}
	slices.SortFunc(list, func(a, b spot) int { return cmp.Compare(a.device, b.device) })
	return list
}

// move copies vectors between the device and the copy, a block after the other.
func (d *device) move(small arena, list []spot, toDevice bool) error {
	if d.arena.vector > blockBytes {
		return fmt.Errorf("a head of %d bytes", d.arena.vector)
	}
	block := <-d.free // who has one waits for nobody
	defer func() { d.free <- block }()
	for part := range slices.Chunk(list, int(blockBytes/d.arena.vector)) {
		segments := make([]memory.Segment, len(part))
		for i, v := range part {
			segments[i] = memory.Segment{Arena: v.device, Other: int64(i) * d.arena.vector, Bytes: d.arena.vector}
			if toDevice {
				copy(block[segments[i].Other:], small.bytes[v.host:][:d.arena.vector])
			}
		}
		if toDevice {
			if err := d.memory.WriteFrom(block, segments).Wait(); err != nil {
				return err
			}
			continue
		}
		if err := d.memory.ReadInto(block, segments).Wait(); err != nil {
			return err
		}
		for i, v := range part {
			copy(small.bytes[v.host:], block[segments[i].Other:][:d.arena.vector])
		}
	}
	return nil
}

// write is [arena.write]; it returns when the device has the tokens.
func (d *device) write(kv pattern, from int, places []place) (int64, error) {
	small, there := d.part(places)
	n := small.write(kv, from, there)
	return n, d.move(small, d.vectors(small, places, there), true)
}

// check is [arena.check] of what the device has.
func (d *device) check(r id.Request, s stream, rank id.Rank, pages []page.Index, tokens int) (looked, wrong int64, first *mistake, err error) {
	size := d.arena.layout.PageSize
	places := make([]place, tokens)
	for token := range places {
		places[token] = place{pages[token/size], token % size}
	}
	small, there := d.part(places)
	if err := d.move(small, d.vectors(small, places, there), false); err != nil {
		return 0, 0, nil, err
	}
	here := make([]page.Index, page.Count(tokens, size))
	for token, p := range there {
		here[token/size] = p.page
	}
	looked, wrong, first = small.check(r, s, rank, here, tokens)
	if first != nil { // it is told as the device has it
		into := first.offset - small.at(first.layer, first.page, first.side, first.head, first.slot)
		first.page = pages[first.token/size]
		first.offset = d.arena.at(first.layer, first.page, first.side, first.head, first.slot) + into
	}
	return looked, wrong, first, nil
}
