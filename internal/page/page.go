// Package page knows how the KV of one rank lies in memory: pages, their
// layouts, and the arithmetic of chunks. It holds values only; no memory, no
// clock, no I/O.
//
// A page is PageSize token slots of all layers, K and V. Token t of a stream
// lies in the stream's page t/PageSize at slot t%PageSize. One page is not
// contiguous: it has one piece a layer, the layer-page.
//
// A [Layout] gives the address of every byte of an arena. Two layouts that
// differ in Pages alone hold the same tokens at different addresses, so an
// address is always computed from the layout of the side that it is on. A
// [Geometry] is what two nodes must agree on before one may read the other.
package page

import (
	"errors"
	"iter"
)

// ErrInvalid is wrapped by the errors of Validate and Parse.
var ErrInvalid = errors.New("invalid geometry")

// Index numbers the pages of one rank's arena, from 0. Page 0 is [Sink].
type Index uint32

// Sink is the page that takes the padding of captured steps. No stream holds it.
const Sink Index = 0

// Slot is where one token lies.
type Slot struct {
	Page Index
	Slot int32 // in the page, from 0
}

// Count is how many pages of size token slots hold so many tokens.
func Count(tokens, size int) int {
	if tokens <= 0 {
		return 0
	}
	return (tokens-1)/size + 1
}

// Run is Count neighbouring pages, ascending from First.
type Run struct {
	First Index
	Count uint32
}

// Runs joins the neighbours in a list of pages: it gives the fewest runs that
// name the same pages in the same order.
func Runs(pages []Index) []Run {
	var runs []Run
	for r := range AllRuns(pages) {
		runs = append(runs, r)
	}
	return runs
}

// AllRuns yields what [Runs] returns, and allocates nothing.
func AllRuns(pages []Index) iter.Seq[Run] {
	return func(yield func(Run) bool) {
		for i := 0; i < len(pages); {
			end := i + 1
			for end < len(pages) && pages[end-1] != ^Index(0) && pages[end] == pages[end-1]+1 {
				end++
			}
			if !yield(Run{First: pages[i], Count: uint32(end - i)}) {
				return
			}
			i = end
		}
	}
}
