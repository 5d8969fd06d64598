package kv

import (
	"fmt"
	"hash/crc32"

	"github.com/kvferry/kvferry/internal/page"
)

// Sum is the CRC-32C of the first slots token slots of a page: layer by layer,
// the bytes of these slots in the order in which they lie.
func (c Cache) Sum(p page.Index, slots int) (uint32, error) {
	if err := checkSpot(c.Layout, p, slots); err != nil {
		return 0, err
	}
	var sum uint32
	for layer := range c.Layout.Layers {
		chunks := c.Layout.Chunks(layer, p, 0, slots)
		for i := range chunks.Count {
			sum = AddSum(sum, c.Bytes[chunks.At(i):][:chunks.Bytes])
		}
	}
	return sum, nil
}

// Summed appends to list where the bytes of one layer lie that [Cache.Sum] sums:
// From in the cache, To behind one another from at on. The sum of a page is that
// of its layers, by [AddSum], from 0.
func Summed(list []Move, l page.Layout, layer int, p page.Index, slots int, at int64) ([]Move, error) {
	err := checkLayer(l, layer)
	if err == nil {
		err = checkSpot(l, p, slots)
	}
	if err != nil {
		return list, err
	}
	chunks := l.Chunks(layer, p, 0, slots)
	for i := range chunks.Count {
		list = append(list, Move{To: at, From: chunks.At(i), Bytes: chunks.Bytes})
		at += chunks.Bytes
	}
	return list, nil
}

// AddSum is the sum of what sum is of, and b behind it.
func AddSum(sum uint32, b []byte) uint32 {
	return crc32.Update(sum, crc32.MakeTable(crc32.Castagnoli), b)
}

// checkSpot refuses what is not the beginning of a page.
func checkSpot(l page.Layout, p page.Index, slots int) error {
	if err := checkPage(l, p); err != nil {
		return err
	}
	if slots < 1 || slots > l.PageSize {
		return fmt.Errorf("%d slots of a page of %d: %w", slots, l.PageSize, ErrRange)
	}
	return nil
}
