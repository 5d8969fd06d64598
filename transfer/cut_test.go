package transfer

import (
	"slices"
	"testing"
)

func TestCutterKeepsEveryByteAndTheBounds(t *testing.T) {
	copies := []Copy{{Rank: 1, Remote: 1000, Local: 5000, Bytes: 250}, {Remote: 7, Local: 70, Bytes: 1}, {Remote: 8, Local: 80, Bytes: 1}, {Remote: 9, Local: 90, Bytes: 100}, {Rank: 2, Bytes: 1 << 33}}
	for _, bounds := range []struct {
		bytes  int64
		copies int
	}{{100, 1}, {100, 2}, {7, 100}, {1 << 20, 1023}, {1 << 40, 3}, {101, 3}} {
		if bounds.bytes < 1000 {
			copies[4].Bytes = 1000 // else it takes for ever
		} else {
			copies[4].Bytes = 1 << 33
		}
		c := Cut(copies, bounds.bytes, bounds.copies)
		var joined []Copy
		for more := true; more; {
			var cut []Copy
			cut, more = c.Next(nil)
			if len(cut) == 0 || len(cut) > bounds.copies || Bytes(cut) > bounds.bytes {
				t.Fatalf("bounds %+v: a piece of %d copies and %d bytes", bounds, len(cut), Bytes(cut))
			}
			for _, p := range cut {
				if n := len(joined); n > 0 && joined[n-1].Rank == p.Rank && joined[n-1].Remote+joined[n-1].Bytes == p.Remote && joined[n-1].Local+joined[n-1].Bytes == p.Local {
					joined[n-1].Bytes += p.Bytes
				} else {
					joined = append(joined, p)
				}
			}
		}
		if !slices.Equal(joined, copies) {
			t.Errorf("bounds %+v: pieces make %+v, want %+v", bounds, joined, copies)
		}
	}
	c := Cut(nil, 1, 1)
	if cut, more := c.Next(nil); len(cut) != 0 || more {
		t.Errorf("no copies are cut into %v, more %v", cut, more)
	}
}
