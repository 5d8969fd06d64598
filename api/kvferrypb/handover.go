package kvferrypb

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// An arena is handed over, to who sends the token of an [OpenArenaResponse], by
// one byte, [HandedFile], with its memfd; or, of device memory, by the frame of a
// handle, which begins with a byte [HandedHandle], and then by each of the handle's
// files with such a byte of its own.
const (
	HandedFile   byte = 1
	HandedHandle byte = 2
)

// MaxHandle is the longest handle in bytes.
const MaxHandle = 1 << 17

// HandleFrame is the byte, the length of a handle in four bytes, little-endian, and
// the handle.
func HandleFrame(handle []byte) ([]byte, error) {
	if len(handle) > MaxHandle {
		return nil, fmt.Errorf("handle of %d bytes, at most %d", len(handle), MaxHandle)
	}
	b := binary.LittleEndian.AppendUint32([]byte{HandedHandle}, uint32(len(handle)))
	return append(b, handle...), nil
}

// ReadHandle reads what HandleFrame has made, and nothing behind it. At the end of
// r it is [io.EOF], within a frame [io.ErrUnexpectedEOF].
func ReadHandle(r io.Reader) ([]byte, error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:1]); err != nil {
		return nil, err
	}
	if err := CheckHanded(head[0], HandedHandle); err != nil {
		return nil, err
	}
	if err := readFull(r, head[1:]); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint32(head[1:])
	if n > MaxHandle {
		return nil, fmt.Errorf("handle of %d bytes, at most %d", n, MaxHandle)
	}
	handle := make([]byte, n)
	if err := readFull(r, handle); err != nil {
		return nil, err
	}
	return handle, nil
}

// CheckHanded says what is wrong if the byte that came is another one.
func CheckHanded(got, want byte) error {
	switch got {
	case want:
		return nil
	case HandedFile:
		return errors.New("a file of host memory was handed over, want memory of a device")
	case HandedHandle:
		return errors.New("memory of a device was handed over, want a file of host memory")
	}
	return fmt.Errorf("what was handed over is of kind %d, want %d: update the older side", got, want)
}
