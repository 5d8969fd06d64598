package transfer

// Cutter cuts a list of copies into pieces, in their order: requests of a
// protocol, slices of a long read, work for several hands. A copy that does not
// fit into what is left of a piece is cut. Two cutters of one list and the same
// bounds cut alike.
type Cutter struct {
	copies    []Copy
	done      int64 // bytes of copies[0] that earlier pieces have
	maxBytes  int64
	maxCopies int
}

// Cut returns a cutter of copies, which are not changed and must not be while it
// is used. A piece has at most maxBytes bytes and maxCopies copies, both at least 1.
func Cut(copies []Copy, maxBytes int64, maxCopies int) Cutter {
	return Cutter{copies: copies, maxBytes: maxBytes, maxCopies: maxCopies}
}

// Next appends the copies of the next piece to dst. A list without copies is one
// piece without any; so more is false only after the first call.
func (c *Cutter) Next(dst []Copy) (piece []Copy, more bool) {
	first := len(dst)
	piece = dst
	room := c.maxBytes
	for len(c.copies) > 0 && room > 0 && len(piece)-first < c.maxCopies {
		one := c.copies[0]
		one.Remote += c.done
		one.Local += c.done
		one.Bytes -= c.done
		if one.Bytes > room {
			one.Bytes = room
			c.done += room
		} else {
			c.copies, c.done = c.copies[1:], 0
		}
		room -= one.Bytes
		piece = append(piece, one)
	}
	return piece, len(c.copies) > 0
}

// Bytes is the sum of the copies.
func Bytes(copies []Copy) (total int64) {
	for _, c := range copies {
		total += c.Bytes
	}
	return total
}
