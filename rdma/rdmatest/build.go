package rdmatest

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

//go:embed library
var library embed.FS

const soname = "libibverbs.so.1"

// ErrUnavailable is wrapped when this machine cannot build the double or
// cannot run it; the text says what is missing.
var ErrUnavailable = errors.New("the verbs double is not available")

// build is done once a process.
//
//nolint:gochecknoglobals // see above
var build = sync.OnceValues(func() (string, error) {
	if runtime.GOOS != "linux" {
		return "", fmt.Errorf("%w: it needs Linux", ErrUnavailable)
	}
	if err := mayRead(); err != nil {
		return "", err
	}
	compiler, err := compiler()
	if err != nil {
		return "", err
	}
	dir, err := cacheDir()
	if err != nil {
		return "", fmt.Errorf("build the verbs double: %w", err)
	}
	return compile(compiler, dir)
})

// Build compiles the double, unless that has been done for this source,
// headers, and compiler, and returns the path of its libibverbs.so.1. Any
// number of processes may do so at once. The error wraps [ErrUnavailable] if
// this machine lacks a C compiler or the header (libibverbs-dev), or does not
// let a process read another's memory.
func Build() (path string, err error) { return build() }

// mayRead tells whether process_vm_readv works here: containers forbid it now
// and then.
func mayRead() error {
	from, to := [1]byte{42}, [1]byte{}
	local := []unix.Iovec{{Base: &to[0], Len: 1}}
	remote := []unix.RemoteIovec{{Base: addressOf(&from[0]), Len: 1}}
	if n, err := unix.ProcessVMReadv(os.Getpid(), local, remote, 0); err != nil || n != 1 || to != from {
		return fmt.Errorf("%w: process_vm_readv: %d bytes of 1 (%w): may this container trace its own processes? (docker run --cap-add SYS_PTRACE)", ErrUnavailable, n, err)
	}
	if scope, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope"); err == nil && strings.TrimSpace(string(scope)) > "1" && os.Geteuid() != 0 {
		return fmt.Errorf("%w: kernel.yama.ptrace_scope is %s: processes may not read each other's memory", ErrUnavailable, strings.TrimSpace(string(scope)))
	}
	return nil
}

func compiler() (string, error) {
	for _, name := range []string{os.Getenv("CC"), "cc", "gcc", "clang"} {
		if path, err := exec.LookPath(name); name != "" && err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%w: no C compiler: cc is not in PATH, and CC names none (on Debian: apt-get install gcc libc6-dev libibverbs-dev)", ErrUnavailable)
}

func cacheDir() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil { // no home
		dir = filepath.Join(os.TempDir(), fmt.Sprintf("kvferry-%d", os.Getuid()))
	}
	dir = filepath.Join(dir, "kvferry", "verbs-double")
	return dir, os.MkdirAll(dir, 0o700)
}

// flags are of the compiler alone: what the linker gets is in compile.
func flags() []string {
	return []string{"-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-deprecated-declarations", "-fPIC"}
}

// compile makes dir/HASH/libibverbs.so.1, where HASH is of all that goes into
// it: what the preprocessor makes of the source, the flags, and the compiler.
func compile(compiler, dir string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	work, err := os.MkdirTemp(dir, "build-")
	if err != nil {
		return "", fmt.Errorf("build the verbs double: %w", err)
	}
	defer os.RemoveAll(work)
	sources, err := writeSources(work)
	if err != nil {
		return "", fmt.Errorf("build the verbs double: %w", err)
	}
	run := func(args ...string) ([]byte, error) {
		cmd := exec.CommandContext(ctx, compiler, args...)
		cmd.Dir = work
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w\n%s", ErrUnavailable, compiler, err, &stderr)
		}
		return out, nil
	}
	version, err := run("--version")
	if err != nil {
		return "", err
	}
	text, err := run(append([]string{"-E", "-P"}, sources...)...)
	if err != nil {
		if strings.Contains(err.Error(), "infiniband/verbs.h") {
			err = fmt.Errorf("%w: the header infiniband/verbs.h is missing (on Debian: apt-get install libibverbs-dev)", ErrUnavailable)
		}
		return "", err
	}
	script, err := library.ReadFile("library/verbs.map")
	if err != nil {
		return "", err
	}
	hash := sha256.New()
	for _, part := range [][]byte{text, version, script, []byte(strings.Join(flags(), " "))} {
		fmt.Fprintf(hash, "%d\n", len(part))
		hash.Write(part)
	}
	final := filepath.Join(dir, hex.EncodeToString(hash.Sum(nil)[:12]))
	path := filepath.Join(final, soname)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	out := filepath.Join(work, "out")
	if err := os.Mkdir(out, 0o755); err != nil {
		return "", err
	}
	args := append([]string{"-shared", "-Wl,-soname," + soname, "-Wl,--version-script=verbs.map", "-Wl,-z,defs", "-o", filepath.Join(out, soname)}, flags()...)
	if _, err := run(append(append(args, sources...), "-pthread")...); err != nil {
		return "", err
	}
	// Whoever comes second keeps what the first made.
	if err := os.Rename(out, final); err != nil {
		if _, other := os.Stat(path); other != nil {
			return "", fmt.Errorf("build the verbs double: %w", err)
		}
	}
	return path, nil
}

// writeSources writes what the library is made of to dir and returns the
// names of the files to compile.
func writeSources(dir string) (sources []string, err error) {
	if err := os.WriteFile(filepath.Join(dir, "control.h"), []byte(header()), 0o644); err != nil {
		return nil, err
	}
	files, err := library.ReadDir("library")
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		text, err := library.ReadFile("library/" + f.Name())
		if err != nil {
			return nil, err
		}
		if err := os.WriteFile(filepath.Join(dir, f.Name()), text, 0o644); err != nil {
			return nil, err
		}
		if filepath.Ext(f.Name()) == ".c" {
			sources = append(sources, f.Name())
		}
	}
	return sources, nil
}
