package cuda

import (
	"fmt"
	"iter"

	"github.com/kvferry/kvferry/internal/memory"
)

// within returns the bytes of all segments, or an error if one is not within an
// arena and another side of so many bytes.
func within(segments []memory.Segment, arena, other int64) (int64, error) {
	total := int64(0)
	for i, s := range segments {
		if s.Bytes < 0 || s.Arena < 0 || s.Other < 0 || s.Bytes > arena-s.Arena || s.Bytes > other-s.Other {
			return 0, fmt.Errorf("segment %d: %d bytes at %d of an arena of %d, and at %d of %d", i, s.Bytes, s.Arena, arena, s.Other, other)
		}
		total += s.Bytes
	}
	return total, nil
}

// merged are the segments, neighbours on both sides made one, without those of
// no bytes.
func merged(segments []memory.Segment) iter.Seq[memory.Segment] {
	return func(yield func(memory.Segment) bool) {
		var last memory.Segment
		for _, s := range segments {
			switch {
			case s.Bytes == 0:
			case last.Bytes > 0 && last.Arena+last.Bytes == s.Arena && last.Other+last.Bytes == s.Other:
				last.Bytes += s.Bytes
			default:
				if last.Bytes > 0 && !yield(last) {
					return
				}
				last = s
			}
		}
		if last.Bytes > 0 {
			yield(last)
		}
	}
}
