package memory_test

import (
	"errors"
	"runtime/debug"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/memory"
)

// first reads the first byte of b, which the caller may have lost.
func first(b []byte, theirs func(uintptr) bool) (err error) {
	defer memory.Survive(debug.SetPanicOnFault(true), theirs, &err)
	if b[0] != 0 {
		return errors.New("not a zero")
	}
	return nil
}

// What another process gave may break; a fault elsewhere is our own bug.
func TestSurviveTakesTheirFaultsAlone(t *testing.T) {
	given, err := memory.NewPlain("given", 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer given.Close()
	b := given.Bytes()
	if err := first(b, given.Holds); err != nil {
		t.Errorf("sound memory: %v", err)
	}
	if err := unix.Mprotect(b, unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	if err := first(b, given.Holds); err == nil || !strings.Contains(err.Error(), "memory errors") {
		t.Errorf("lost memory: %v", err)
	}
	for name, touch := range map[string]func(){
		"memory of nobody": func() { _ = first(b, func(uintptr) bool { return false }) },
		"no fault at all":  func() { _ = first(nil, given.Holds) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			touch()
		}()
	}
	if debug.SetPanicOnFault(false) {
		t.Error("faults are still panics")
	}
}

func TestHolds(t *testing.T) {
	r, err := memory.NewPlain("holds", 8192)
	if err != nil {
		t.Fatal(err)
	}
	at := uintptr(unsafe.Pointer(&r.Bytes()[0]))
	for offset, want := range map[int]bool{-1: false, 0: true, 8191: true, 8192: false} {
		if got := r.Holds(at + uintptr(offset)); got != want {
			t.Errorf("byte %d: %v", offset, got)
		}
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if r.Holds(at) {
		t.Error("a closed region holds its first byte")
	}
}
