package client

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
)

// ErrDeviceMemory is wrapped where an arena lies in the memory of a device, and
// was asked for as if it did not.
var ErrDeviceMemory = errors.New("the arena is in device memory")

// hostMemory is what OpenArena says of an arena that can be mapped.
const hostMemory = "host"

const (
	handedHandle = 2 // first byte of what the socket says of device memory
	maxHandle    = 1 << 17
	handoverTime = 10 * time.Second // without a deadline of the caller's
)

// Arena maps the arena of a local rank, writable. The caller closes it; it stays
// valid after the session. It wraps [ErrDeviceMemory] if there is nothing to map.
func (s *Session) Arena(ctx context.Context, rank id.Rank) (*memory.Region, error) {
	a, err := s.AnyArena(ctx, rank, nil)
	if err != nil {
		return nil, err
	}
	region, ok := a.(*memory.Region)
	if !ok {
		return nil, errors.Join(fmt.Errorf("open arena of rank %d: %w", rank, ErrDeviceMemory), a.Close())
	}
	return region, nil
}

// AnyArena opens the arena of a local rank wherever it lies: host memory is mapped,
// writable, as a [*memory.Region]; memory of a device is imported by the runtime,
// which stays the caller's, as a [*cuda.Arena]. The caller closes it, before the
// runtime; it stays valid after the session. Without a runtime it wraps
// [ErrDeviceMemory] if one is needed.
func (s *Session) AnyArena(ctx context.Context, rank id.Rank, runtime *cuda.Runtime) (memory.Arena, error) {
	res, err := s.OpenArena(ctx, &kvferrypb.OpenArenaRequest{Rank: uint32(rank)})
	if err != nil {
		return nil, err
	}
	a, err := s.open(ctx, res, runtime)
	if err != nil {
		return nil, fmt.Errorf("open arena of rank %d: %w", rank, err)
	}
	return a, nil
}

func (s *Session) open(ctx context.Context, res *kvferrypb.OpenArenaResponse, runtime *cuda.Runtime) (memory.Arena, error) {
	onHost := res.GetMemory() == "" || res.GetMemory() == hostMemory
	if !onHost && runtime == nil {
		return nil, fmt.Errorf("%w: on %.80s: it is imported by a CUDA runtime, and none was given", ErrDeviceMemory, res.GetMemory())
	}
	conn, err := dialUnix(ctx, res.GetFdSocket())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(handoverTime)
	}
	if err := conn.SetDeadline(deadline); err != nil {
		return nil, err
	}
	if _, err := conn.Write(res.GetToken()); err != nil {
		return nil, fmt.Errorf("send token: %w", err)
	}
	unix, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, fmt.Errorf("%s is not a unix socket", res.GetFdSocket())
	}
	if !onHost {
		return importArena(unix, int64(res.GetBytes()), runtime)
	}
	var payload [1]byte
	_, f, err := memory.ReceiveFile(unix, payload[:])
	if err != nil {
		return nil, err
	}
	return memory.Map(f, int64(res.GetBytes()), true)
}

// importArena reads what the node says of device memory, and imports it: a byte,
// the length of a handle (4, little endian), the handle, and then each of its
// files with a byte of its own.
func importArena(c *net.UnixConn, bytes int64, runtime *cuda.Runtime) (memory.Arena, error) {
	var head [5]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return nil, fmt.Errorf("receive handle: %w", err)
	}
	length := binary.LittleEndian.Uint32(head[1:])
	if head[0] != handedHandle || length > maxHandle {
		return nil, fmt.Errorf("receive handle: %d bytes of kind %d are none", length, head[0])
	}
	text := make([]byte, length)
	if _, err := io.ReadFull(c, text); err != nil {
		return nil, fmt.Errorf("receive handle: %w", err)
	}
	handle, err := cuda.ParseHandle(text)
	if err != nil {
		return nil, err
	}
	var files []*os.File
	for range handle.Chunks {
		var payload [1]byte
		_, f, err := memory.ReceiveFile(c, payload[:])
		if err != nil {
			for _, f := range files {
				err = errors.Join(err, f.Close())
			}
			return nil, err
		}
		files = append(files, f)
	}
	a, err := runtime.Import(handle, files) // takes the files over
	if err != nil {
		return nil, err
	}
	if a.Size() < bytes {
		return nil, errors.Join(fmt.Errorf("it has %d bytes, want %d", a.Size(), bytes), a.Close())
	}
	return a, nil
}
