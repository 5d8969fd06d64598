package kvferrypb

import (
	"encoding/binary"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"
)

const (
	// ArenaSuffix is added to the path of the engine socket: there [Lend] and
	// [Lent] are said.
	ArenaSuffix = ".arena"
	// LendVersion is that of their exchange.
	LendVersion = 1
	// MaxLend is the longest of either in bytes, without its length.
	MaxLend = 8 << 20
	// ShareRemedy says what lets memory of a device be lent that cannot be.
	ShareRemedy = "it is virtual memory of a device without handles for other processes: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False for the engine"
)

const lengthBytes = 4

// FrameOf is a Lend or a Lent with its length in front.
func FrameOf(m proto.Message) ([]byte, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(make([]byte, lengthBytes), m)
	if err != nil {
		return nil, err
	}
	n := len(b) - lengthBytes
	if n > MaxLend {
		return nil, fmt.Errorf("message of %d bytes, at most %d", n, MaxLend)
	}
	binary.BigEndian.PutUint32(b, uint32(n))
	return b, nil
}

// ReadFrame reads what FrameOf has made, and nothing behind it. At the end of r
// it is [io.EOF], within a message [io.ErrUnexpectedEOF].
func ReadFrame(r io.Reader, m proto.Message) error {
	var length [lengthBytes]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(length[:])
	if n > MaxLend {
		return fmt.Errorf("message of %d bytes, at most %d", n, MaxLend)
	}
	b := make([]byte, n)
	if err := readFull(r, b); err != nil {
		return err
	}
	return proto.Unmarshal(b, m)
}

// readFull reads what must follow.
func readFull(r io.Reader, b []byte) error {
	_, err := io.ReadFull(r, b)
	if err == io.EOF && len(b) > 0 {
		err = io.ErrUnexpectedEOF
	}
	return err
}
