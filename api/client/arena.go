package client

import (
	"context"
	"errors"
	"fmt"
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

// handoverTime is how long it takes at most, without a deadline of the caller's.
const handoverTime = 10 * time.Second

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
	f, err := receiveHanded(unix, kvferrypb.HandedFile)
	if err != nil {
		return nil, err
	}
	return memory.Map(f, int64(res.GetBytes()), true)
}

// receiveHanded receives one file, and the byte that is with it.
func receiveHanded(c *net.UnixConn, want byte) (*os.File, error) {
	var kind [1]byte
	_, f, err := memory.ReceiveFile(c, kind[:])
	if err != nil {
		return nil, err
	}
	if err := kvferrypb.CheckHanded(kind[0], want); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// importArena imports what the node says of device memory.
func importArena(c *net.UnixConn, bytes int64, runtime *cuda.Runtime) (memory.Arena, error) {
	text, err := kvferrypb.ReadHandle(c)
	if err != nil {
		return nil, fmt.Errorf("receive handle: %w", err)
	}
	handle, err := cuda.ParseHandle(text)
	if err != nil {
		return nil, err
	}
	var files []*os.File
	for range handle.Chunks {
		f, err := receiveHanded(c, kvferrypb.HandedHandle)
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
