package kv

import (
	"fmt"
	"hash/crc32"

	"github.com/kvferry/kvferry/internal/page"
)

// Sum is the CRC-32C of the first slots token slots of a page: layer by layer,
// the bytes of these slots in the order in which they lie.
func (c Cache) Sum(p page.Index, slots int) (uint32, error) {
	if err := c.checkPage(p); err != nil {
		return 0, err
	}
	if slots < 1 || slots > c.Layout.PageSize {
		return 0, fmt.Errorf("%d slots of a page of %d: %w", slots, c.Layout.PageSize, ErrRange)
	}
	table := crc32.MakeTable(crc32.Castagnoli)
	var sum uint32
	for layer := range c.Layout.Layers {
		chunks := c.Layout.Chunks(layer, p, 0, slots)
		for i := range chunks.Count {
			sum = crc32.Update(sum, table, c.Bytes[chunks.At(i):][:chunks.Bytes])
		}
	}
	return sum, nil
}
