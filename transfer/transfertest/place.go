package transfertest

import (
	"fmt"

	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
)

// Place makes arenas of size bytes, filled with zeros, where a side's memory is
// to lie. Arenas of one place are all of one kind.
type Place func(size int64) (memory.Arena, error)

// Host is the place of host memory.
func Host(size int64) (memory.Arena, error) { return memory.New("transfertest", size) }

// Peek copies len(b) bytes from offset at of an arena on into b, wherever the
// arena lies; an emulated device may be held, or dead. It panics where that is
// not possible, since nothing that is tested is to blame.
func Peek(a memory.Arena, at int64, b []byte) {
	if mem, ok := addressable(a); ok {
		copy(b, mem[at:at+int64(len(b))])
		return
	}
	naive(a, memory.Stager.ReadInto, at, b)
}

// Poke copies b to offset at of an arena, as [Peek] does the other way.
func Poke(a memory.Arena, at int64, b []byte) {
	if mem, ok := addressable(a); ok {
		copy(mem[at:at+int64(len(b))], b)
		return
	}
	naive(a, memory.Stager.WriteFrom, at, b)
}

// view is n bytes of an arena from offset at on, to be looked at: in place if they
// can be, since copies are what a test spends its time on, else a copy.
func view(a memory.Arena, at, n int64) []byte {
	if mem, ok := addressable(a); ok {
		return mem[at : at+n]
	}
	b := make([]byte, n)
	Peek(a, at, b)
	return b
}

// edit lets write fill n bytes of an arena from offset at on, in place if it can be.
func edit(a memory.Arena, at, n int64, write func([]byte)) {
	if mem, ok := addressable(a); ok {
		write(mem[at : at+n])
		return
	}
	b := make([]byte, n)
	write(b)
	Poke(a, at, b)
}

// addressable is the memory of an arena of the host or of a [Device].
func addressable(a memory.Arena) ([]byte, bool) {
	switch a := a.(type) {
	case *deviceArena:
		return a.memory, true
	case sharedArena:
		return a.memory, true
	}
	return transfer.InHost(a)
}

// naive copies one stretch and waits for it.
func naive(a memory.Arena, by func(memory.Stager, []byte, []memory.Segment) memory.Ticket, at int64, b []byte) {
	s, ok := a.(memory.Stager)
	if !ok {
		panic(fmt.Sprintf("transfertest: no way into an arena of kind %T", a))
	}
	if err := by(s, b, []memory.Segment{{Arena: at, Bytes: int64(len(b))}}).Wait(); err != nil {
		panic(fmt.Sprintf("transfertest: copy %d bytes at %d of a device: %v", len(b), at, err))
	}
}
