package memory

import (
	"errors"
	"os"
)

// ErrNoDMABuf is wrapped by [DMABufExporter.DMABuf] where the memory cannot be
// told to other devices; the text says why.
var ErrNoDMABuf = errors.New("no dma-buf of this memory")

// ErrOutOfReach is wrapped beside [ErrNoDMABuf] where other devices cannot reach
// the memory by its address either.
var ErrOutOfReach = errors.New("out of reach of other devices")

// Arena is the KV memory of one rank, wherever it lies. A [*Region] is host
// memory, which is read and written by its bytes. Memory of a device is a
// [Stager], whose bytes no processor touches; host memory never becomes device
// memory, nor the other way round.
type Arena interface {
	Size() int64 // bytes
	Close() error
}

// DeviceAddr is an address in the memory of a device. It is never followed.
type DeviceAddr uint64

// Segment is one contiguous stretch of a copy: an offset from the start of an
// arena, another from the start of the other side, and bytes.
type Segment struct{ Arena, Other, Bytes int64 }

// Stager is an arena in the memory of a device. Its copies are started in the
// order of the calls, run behind them, and are over when their [Ticket] says so.
// Copies that were started in the other direction, or by others, are in no order
// with them: who needs one waits. It is safe for concurrent use.
//
// Segments and host memory are lent until Wait has returned. A stretch outside
// of the arena or of the host memory is an error of Wait, and then nothing of
// the call was copied.
type Stager interface {
	Arena
	// ReadInto copies from the arena into host memory (Other is its offset there).
	ReadInto(host []byte, segments []Segment) Ticket
	// WriteFrom copies from host memory into the arena.
	WriteFrom(host []byte, segments []Segment) Ticket
	// Move copies within the arena, to Arena from Other. The two sides of all
	// segments together do not overlap.
	Move(segments []Segment) Ticket
	// Pin makes host memory fast to copy from and to: bytes that are mapped, not
	// of Go's heap, and stay mapped until unpin has returned. What is not pinned
	// is copied all the same, slowly.
	Pin(host []byte) (unpin func() error, err error)
}

// Ticket is a copy that has been started.
type Ticket interface {
	// Wait returns when nothing of the copy reads or writes memory any more: nil
	// if all of it was copied. It may be called again, by several goroutines. It
	// ends with the device at the latest, and has no other deadline: memory that
	// a device may still write is nobody else's.
	Wait() error
}

// DMABufExporter is a [Stager] whose memory other devices can reach by
// themselves.
type DMABufExporter interface {
	Stager
	// Address is that of the first byte, as the device knows it.
	Address() DeviceAddr
	// DMABuf tells n bytes from offset on as a dma-buf, which becomes the
	// caller's, in which they begin at byte at. It wraps [ErrNoDMABuf].
	DMABuf(offset, n int64) (f *os.File, at int64, err error)
	// Flush returns when what other devices have written, and have said so, is
	// seen by the device's own copies and kernels.
	Flush() error
}
