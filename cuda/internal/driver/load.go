//go:build linux && cgo && cuda && (amd64 || arm64)

package driver

/*
#cgo LDFLAGS: -lcuda -ldl -lpthread
#include <stdlib.h>
#include <cuda.h>
#include "late/late.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"unsafe"

	"gorgonia.org/cu"
)

// Bind loads the driver's library, once a process: another path is an error. ""
// is where the loader, containers, and Linux under Windows have it.
func Bind(path string) error {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return fmt.Errorf("%s is no regular file", path) // a pipe would be waited for
	}
	p := C.CString(path)
	defer C.free(unsafe.Pointer(p))
	var why [1024]C.char
	if C.late_bind(p, &why[0], C.size_t(len(why))) != 0 {
		return errors.New(C.GoString(&why[0]))
	}
	return nil
}

// Init is cuInit.
func Init() error { return check("cuInit", C.CUresult(C.late_init())) }

// Has says whether the driver has an entry point.
func Has(name string) bool {
	n := C.CString(name)
	defer C.free(unsafe.Pointer(n))
	return C.late_has(n) != 0
}

// check is the error of a call by cgo, nil if there is none.
func check(call string, r C.CUresult) error {
	if r == C.CUDA_SUCCESS {
		return nil
	}
	e := &Error{Call: call, Code: int(r), Name: "unknown result", Text: "the driver has no text for it"}
	var s *C.char
	if C.cuGetErrorName(r, &s) == C.CUDA_SUCCESS && s != nil {
		e.Name = C.GoString(s)
	}
	if C.cuGetErrorString(r, &s) == C.CUDA_SUCCESS && s != nil {
		e.Text = C.GoString(s)
	}
	return e
}

// wrap is check for a call of gorgonia.org/cu, whose errors are integers of a
// type that it does not export.
func wrap(call string, err error) error {
	if err == nil {
		return nil
	}
	cause := err
	for next := errors.Unwrap(cause); next != nil; next = errors.Unwrap(cause) {
		cause = next
	}
	if v := reflect.ValueOf(cause); v.Kind() == reflect.Int {
		return check(call, C.CUresult(v.Int()))
	}
	return err
}

// Version is the driver's, such as 12090.
func Version() int { return cu.Version() }
