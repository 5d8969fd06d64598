//go:build linux && cgo && rdma && (amd64 || arm64)

package rdma

/*
#cgo CFLAGS: -O2 -Wall -Wextra
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "verbs.h"
*/
import "C"

import (
	"fmt"
	"os"
	"sync"
	"syscall"
	"unsafe"
)

// bound is the library of this process; there is one, as there is one of its
// table of functions in C.
//
//nolint:gochecknoglobals // see above
var bound struct {
	mu   sync.Mutex
	done bool
	path string
}

// Load binds the library at path, or libibverbs.so.1 as the loader finds it
// if path is "". It is done once a process: after it has worked it does
// nothing, and another path is an error. Whatever needs the library calls
// Load("") if nobody has loaded it. The error wraps [ErrUnavailable] if there
// is no library, or one that is too old.
func Load(path string) error {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return fmt.Errorf("%w: %s is no regular file", ErrUnavailable, path) // a pipe would be waited for
	}
	bound.mu.Lock()
	defer bound.mu.Unlock()
	if bound.done {
		if path != "" && path != bound.path {
			return fmt.Errorf("load %s: the verbs library of this process is already %s", path, orDefault(bound.path))
		}
		return nil
	}
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	if why := C.rd_load(name); why != nil {
		defer C.free(unsafe.Pointer(why))
		return fmt.Errorf("%w: %s (on Debian: apt-get install libibverbs1 ibverbs-providers)", ErrUnavailable, C.GoString(why))
	}
	bound.done, bound.path = true, path
	return nil
}

func orDefault(path string) string {
	if path == "" {
		return library
	}
	return path
}

// parent is an object of the library that others are made of. It counts them,
// so that nothing is used after it was closed.
type parent struct {
	mu     sync.Mutex
	users  int
	closed bool
}

// enter keeps the object open until leave.
func (p *parent) enter() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return os.ErrClosed
	}
	p.users++
	return nil
}

func (p *parent) leave() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.users--
}

// close destroys the object if nothing uses it. It may be tried again until
// it has worked.
func (p *parent) close(what, device, users string, destroy func() C.int) error {
	p.mu.Lock()
	if p.closed || p.users > 0 {
		n := p.users
		p.mu.Unlock()
		if n == 0 {
			return nil
		}
		return &OpError{Verb: what, Device: device, Err: syscall.EBUSY, Hint: fmt.Sprintf("%d of its %s are open", n, users)}
	}
	p.closed = true
	p.mu.Unlock()
	err := verbError(what, device, destroy(), "")
	if err != nil {
		p.mu.Lock()
		p.closed = false
		p.mu.Unlock()
	}
	return err
}

// verbError is nil if e is 0.
func verbError(verb, device string, e C.int, hint string) error {
	if e == 0 {
		return nil
	}
	return &OpError{Verb: verb, Device: device, Err: syscall.Errno(e), Hint: hint}
}
