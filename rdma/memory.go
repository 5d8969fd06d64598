//go:build linux && cgo && rdma && (amd64 || arm64)

package rdma

// #include "verbs.h"
import "C"

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"unsafe"
)

// PD is a protection domain: its queue pairs may use its regions only. It is
// safe for concurrent use.
type PD struct {
	dev    *Device
	c      *C.struct_ibv_pd
	parent // of regions and queue pairs
}

// NewPD makes a protection domain.
func (d *Device) NewPD() (*PD, error) {
	const verb = "allocate protection domain"
	if err := d.enter(); err != nil {
		return nil, &OpError{Verb: verb, Device: d.name, Err: err}
	}
	var e C.int
	c := C.rd_alloc_pd(d.c, &e)
	if c == nil {
		d.leave()
		return nil, verbError(verb, d.name, e, "")
	}
	return &PD{dev: d, c: c}, nil
}

// Close frees the domain. Its regions and queue pairs must have been closed.
// It may be called again.
func (p *PD) Close() error {
	return p.close("free protection domain", p.dev.name, "regions and queue pairs", func() C.int {
		e := C.rd_dealloc_pd(p.c)
		if e == 0 {
			p.dev.leave()
		}
		return e
	})
}

// Region is registered memory. A device knows it by slices of equal length,
// but for the last, each with keys of its own; no op may cross from one into
// the next. Until it is closed its memory is pinned and must stay mapped.
type Region struct {
	pd          *PD
	addr, bytes uint64
	slice       uint64
	keys        []Key

	mu     sync.Mutex // above slices
	slices []*C.struct_ibv_mr
}

// Register pins mem and lets the device use it. mem must be mapped, not on
// Go's heap. Either all of it is registered or none.
func (p *PD) Register(mem []byte, a Access) (*Region, error) {
	addr := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem))))
	return p.registerRange("memory", addr, uint64(len(mem)), a, func(e syscall.Errno) string { return memoryHint(e, uint64(len(mem))) })
}

// RegisterRange registers length bytes of device memory at an address that is
// the device's own, and is never followed here. It takes a module of the kernel
// that knows the device's addresses, such as nvidia_peermem.
func (p *PD) RegisterRange(addr, length uint64, a Access) (*Region, error) {
	return p.registerRange("device memory", addr, length, a, rangeHint)
}

func (p *PD) registerRange(what string, addr, length uint64, a Access, hint func(syscall.Errno) string) (*Region, error) {
	r := &Region{pd: p, addr: addr, bytes: length, slice: sliceBytes(p.dev.limits.MaxMRSize, uint64(os.Getpagesize()))}
	return r.register(what, func(offset, n uint64, e *C.int) *C.struct_ibv_mr {
		return C.rd_reg_mr(p.c, C.uint64_t(addr+offset), C.size_t(n), C.uint(a), e)
	}, hint)
}

// RegisterDMABuf registers length bytes of device memory at offset of the
// dma-buf fd; peers and ops name its bytes by addresses from iova on. offset
// and iova must lie equally within a page. fd may be closed afterwards.
func (p *PD) RegisterDMABuf(fd int, offset, length, iova uint64, a Access) (*Region, error) {
	page := uint64(os.Getpagesize())
	if (offset^iova)%page != 0 {
		return nil, &OpError{
			Verb: fmt.Sprintf("register dma-buf at offset %#x as address %#x", offset, iova), Device: p.dev.name,
			Err: syscall.EINVAL, Hint: "the two must lie equally within a page",
		}
	}
	r := &Region{pd: p, addr: iova, bytes: length, slice: sliceBytes(p.dev.limits.MaxMRSize, page)}
	return r.register("dma-buf", func(at, n uint64, e *C.int) *C.struct_ibv_mr {
		return C.rd_reg_dmabuf(p.c, C.int(fd), C.uint64_t(offset+at), C.size_t(n), C.uint64_t(iova+at), C.uint(a), e)
	}, dmaBufHint)
}

// register makes the slices of r, or none.
func (r *Region) register(what string, one func(offset, n uint64, e *C.int) *C.struct_ibv_mr, hint func(syscall.Errno) string) (*Region, error) {
	dev := r.pd.dev
	verb := fmt.Sprintf("register %d bytes of %s", r.bytes, what)
	if r.bytes == 0 || r.addr+r.bytes < r.addr {
		return nil, &OpError{Verb: verb, Device: dev.name, Err: syscall.EINVAL, Hint: "no memory, or beyond the end of all addresses"}
	}
	count := (r.bytes-1)/r.slice + 1
	if limit := dev.limits.MaxMR; limit > 0 && count > uint64(limit) {
		return nil, &OpError{Verb: verb, Device: dev.name, Err: syscall.ENOSPC, Hint: fmt.Sprintf("it takes %d regions of %d bytes, the device has %d", count, r.slice, limit)}
	}
	if err := r.pd.enter(); err != nil {
		return nil, &OpError{Verb: verb, Device: dev.name, Err: err}
	}
	for offset := uint64(0); offset < r.bytes; offset += r.slice {
		var e C.int
		mr := one(offset, min(r.slice, r.bytes-offset), &e)
		if mr == nil {
			errno := syscall.Errno(e)
			text := hint(errno) // before memory is given back, which would change the answer
			if count > 1 {
				verb += fmt.Sprintf(", slice %d of %d", offset/r.slice+1, count)
			}
			err := &OpError{Verb: verb, Device: dev.name, Err: errno, Hint: text}
			if len(r.slices) == 0 {
				r.pd.leave()
				return nil, err
			}
			return nil, errors.Join(err, r.Close())
		}
		r.slices = append(r.slices, mr)
		r.keys = append(r.keys, Key{L: uint32(mr.lkey), R: uint32(mr.rkey)})
	}
	return r, nil
}

// Addr is the address of the first byte, as ops name it.
func (r *Region) Addr() uint64 { return r.addr }

// Len is the length in bytes.
func (r *Region) Len() uint64 { return r.bytes }

// SliceBytes is how many bytes each of the keys stands for; it may be more
// than Len.
func (r *Region) SliceBytes() uint64 { return r.slice }

// Keys are those of the slices, in order. They must not be changed.
func (r *Region) Keys() []Key { return r.keys }

// Close deregisters the memory: when it has returned nil, no device touches it
// any more, and reads of peers fail. After an error it may be tried again.
func (r *Region) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.slices) == 0 {
		return nil
	}
	for n, mr := range slices.Backward(r.slices) {
		if e := C.rd_dereg_mr(mr); e != 0 {
			return verbError(fmt.Sprintf("deregister slice %d of %d", n+1, len(r.keys)), r.pd.dev.name, e, "")
		}
		r.slices = r.slices[:n]
	}
	r.pd.leave()
	return nil
}

// memoryHint explains the usual reasons for which n bytes are not registered.
func memoryHint(e syscall.Errno, n uint64) string {
	switch e {
	case syscall.ENOMEM, syscall.EPERM, syscall.EAGAIN:
		if err := CheckMemlock(n); err != nil {
			return err.Error()
		}
		return "the machine, or the device, lacks memory, or regions"
	case syscall.EFAULT:
		return "the range is not mapped, or is memory that the driver cannot pin"
	case syscall.EINVAL:
		return "the device does not take this range, or this kind of access"
	default:
		return ""
	}
}

func rangeHint(e syscall.Errno) string {
	switch e {
	case syscall.EFAULT, syscall.ENOMEM, syscall.EINVAL:
		return "no module of the kernel knows these addresses, or the device and this card cannot reach each other"
	default:
		return ""
	}
}

func dmaBufHint(e syscall.Errno) string {
	switch e {
	case syscall.EOPNOTSUPP, syscall.ENOSYS, syscall.EPROTONOSUPPORT:
		return "this needs rdma-core 34, Linux 5.12, and a driver that takes dma-bufs"
	case syscall.EBADF:
		return "the descriptor is no dma-buf"
	default:
		return ""
	}
}
