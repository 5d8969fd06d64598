package memory

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"
)

// Words is how many seal words a table has.
const Words = 16384

const tableBytes = Words * 8

// SealTable is a node's seal words: 64-bit, in a region of their own. The
// words of a new table are 0. It is safe for concurrent use.
type SealTable struct {
	region   *Region
	writable bool
}

// NewSealTable makes a table.
func NewSealTable() (*SealTable, error) {
	if !fences {
		return nil, errNoFences
	}
	r, err := New("kvferry-seals", tableBytes)
	if err != nil {
		return nil, err
	}
	return &SealTable{region: r, writable: true}, nil
}

// MapSealTable maps the table that another process made, and takes f over,
// also with an error; see [Map] for what is refused.
func MapSealTable(f *os.File, writable bool) (*SealTable, error) {
	if !fences {
		return nil, errors.Join(errNoFences, f.Close())
	}
	r, err := Map(f, tableBytes, writable)
	if err != nil {
		return nil, err
	}
	return &SealTable{region: r, writable: writable}, nil
}

// Store sets a word and returns when the store is visible to every reader:
// nothing that this goroutine stores later can be seen before it. An index out
// of range and a table mapped for reading are our bugs and panic.
func (t *SealTable) Store(index uint32, value uint64) {
	word := t.word(index)
	if word == nil || !t.writable {
		panic(fmt.Sprintf("memory: store of seal word %d of %d, writable %v", index, Words, t.writable))
	}
	atomic.SwapUint64(word, value)
	fenceStore()
}

// Load reads a word after a load barrier: every byte that this goroutine, or
// one that it has waited for, read before was read before the word, and the
// non-temporal stores of its copies are visible before what it stores next. It
// reports false for an index out of range.
func (t *SealTable) Load(index uint32) (value uint64, ok bool) {
	word := t.word(index)
	if word == nil {
		return 0, false
	}
	fenceLoad()
	return atomic.LoadUint64(word), true
}

// word is nil out of range, and in a closed table.
func (t *SealTable) word(index uint32) *uint64 {
	bytes := t.region.Bytes()
	if index >= Words || len(bytes) < tableBytes {
		return nil
	}
	return (*uint64)(unsafe.Pointer(&bytes[index*8]))
}

// Region is the memory of the table.
func (t *SealTable) Region() *Region { return t.region }

// Close unmaps the table. It may be called twice.
func (t *SealTable) Close() error { return t.region.Close() }

var errNoFences = errors.New("seal table: the memory barriers of this processor are unknown; amd64 and arm64 are supported")
