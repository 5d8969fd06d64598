package rdmatest

import (
	"embed"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/double"
)

//go:embed library
var library embed.FS

// Build compiles the double as [double.Source.Build] does, and returns the path of
// its libibverbs.so.1. The error wraps [double.ErrUnavailable] if this machine lacks
// a C compiler or the header (libibverbs-dev), or does not let a process read
// another's memory.
func Build() (path string, err error) {
	if err := mayRead(); err != nil {
		return "", err
	}
	s, err := source()
	if err != nil {
		return "", err
	}
	return s.Build()
}

// source is all that the library is made of.
func source() (double.Source, error) {
	s := double.Source{
		Name: "verbs-double", Soname: "libibverbs.so.1", Packages: "gcc libc6-dev libibverbs-dev",
		Files: map[string]string{"control.h": header()},
	}
	return s, s.Add(library, "library")
}

// mayRead tells whether process_vm_readv works here: containers forbid it now
// and then.
func mayRead() error {
	from, to := [1]byte{42}, [1]byte{}
	local := []unix.Iovec{{Base: &to[0], Len: 1}}
	remote := []unix.RemoteIovec{{Base: addressOf(&from[0]), Len: 1}}
	if n, err := unix.ProcessVMReadv(os.Getpid(), local, remote, 0); err != nil || n != 1 || to != from {
		return fmt.Errorf("%w: process_vm_readv: %d bytes of 1 (%w): may this container trace its own processes? (docker run --cap-add SYS_PTRACE)", double.ErrUnavailable, n, err)
	}
	if scope, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope"); err == nil && strings.TrimSpace(string(scope)) > "1" && os.Geteuid() != 0 {
		return fmt.Errorf("%w: kernel.yama.ptrace_scope is %s: processes may not read each other's memory", double.ErrUnavailable, strings.TrimSpace(string(scope)))
	}
	return nil
}
