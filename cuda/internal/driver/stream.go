//go:build linux && cgo && cuda && (amd64 || arm64)

package driver

import (
	"errors"

	"gorgonia.org/cu"
)

// Stream is a queue of a device, in no order with the default stream.
type Stream struct{ s cu.Stream }

// NewStream makes one in the current context.
func NewStream() (Stream, error) {
	s, err := cu.MakeStream(cu.NonBlocking)
	return Stream{s}, wrap("cuStreamCreate", err)
}

// Synchronize waits for all that is in it.
func (s Stream) Synchronize() error { return wrap("cuStreamSynchronize", s.s.Synchronize()) }

// Destroy ends it.
func (s Stream) Destroy() error { return wrap("cuStreamDestroy", s.s.Destroy()) }

// Event is a mark in a stream. Who waits for it sleeps.
type Event struct{ e cu.Event }

// NewEvent makes one in the current context.
func NewEvent() (Event, error) {
	e, err := cu.MakeEvent(cu.BlockingSyncEvent | cu.DisableTiming)
	return Event{e}, wrap("cuEventCreate", err)
}

// Record puts it behind all that is in a stream.
func (e Event) Record(s Stream) error { return wrap("cuEventRecord", e.e.Record(s.s)) }

// Passed says whether the stream has come by it.
func (e Event) Passed() (bool, error) {
	err := e.e.Query()
	if errors.Is(err, cu.NotReady) {
		return false, nil
	}
	return err == nil, wrap("cuEventQuery", err)
}

// Synchronize sleeps until it has.
func (e Event) Synchronize() error { return wrap("cuEventSynchronize", e.e.Synchronize()) }

// Destroy ends it.
func (e Event) Destroy() error { return wrap("cuEventDestroy", cu.DestroyEvent(&e.e)) }
