package cudatest

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvferry/kvferry/cuda/internal/driver"
)

//go:embed library
var library embed.FS

const soname = "libcuda.so.1"

// ErrUnavailable is wrapped when this machine cannot build the emulated driver;
// the text says what is missing.
var ErrUnavailable = errors.New("the emulated CUDA driver is not available")

// Build compiles the emulated driver, unless that has been done for this source,
// header, and compiler, and returns the path of its libcuda.so.1. Any number of
// processes may do so at once. A program that opens it without a [World] finds
// one device of 1 GiB and no faults. The error wraps [ErrUnavailable] if this
// machine has no C compiler.
func Build() (path string, err error) { return build(nil) }

// builds are the paths of libraries by what they lack.
//
//nolint:gochecknoglobals // a library is built once a process
var builds struct {
	mu   sync.Mutex
	path map[string]string
}

// build builds the library without the entry points that are hidden.
func build(hide []string) (string, error) {
	for _, name := range hide {
		if !slices.Contains(calls(), name) {
			return "", fmt.Errorf("build the emulated driver: hide %q: the header has no such call", name)
		}
	}
	key := strings.Join(hide, ",")
	builds.mu.Lock()
	defer builds.mu.Unlock()
	if path, ok := builds.path[key]; ok {
		return path, nil
	}
	if runtime.GOOS != "linux" {
		return "", fmt.Errorf("%w: it needs Linux", ErrUnavailable)
	}
	compiler, err := compiler()
	if err != nil {
		return "", err
	}
	dir, err := cacheDir()
	if err != nil {
		return "", fmt.Errorf("build the emulated driver: %w", err)
	}
	path, err := compile(compiler, dir, hide)
	if err != nil {
		return "", err
	}
	if builds.path == nil {
		builds.path = make(map[string]string)
	}
	builds.path[key] = path
	return path, nil
}

func compiler() (string, error) {
	for _, name := range []string{os.Getenv("CC"), "cc", "gcc", "clang"} {
		if path, err := exec.LookPath(name); name != "" && err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%w: no C compiler: cc is not in PATH, and CC names none (on Debian: apt-get install gcc libc6-dev)", ErrUnavailable)
}

func cacheDir() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil { // no home
		dir = filepath.Join(os.TempDir(), fmt.Sprintf("kvferry-%d", os.Getuid()))
	}
	dir = filepath.Join(dir, "kvferry", "cuda-double")
	return dir, os.MkdirAll(dir, 0o700)
}

// flags are of the compiler alone: what the linker gets is in compile.
func flags() []string {
	return []string{"-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC"}
}

// compile makes dir/HASH/libcuda.so.1, where HASH is of all that goes into it:
// the source, what is made from Go, the flags, and the compiler.
func compile(compiler, dir string, hide []string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	work, err := os.MkdirTemp(dir, "build-")
	if err != nil {
		return "", fmt.Errorf("build the emulated driver: %w", err)
	}
	defer os.RemoveAll(work)
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
	files, err := sources(hide)
	if err != nil {
		return "", fmt.Errorf("build the emulated driver: %w", err)
	}
	hash := sha256.New()
	fmt.Fprintf(hash, "%s\n%s\n", version, strings.Join(flags(), " "))
	var units []string
	for _, name := range slices.Sorted(maps.Keys(files)) {
		fmt.Fprintf(hash, "%s %d\n%s", name, len(files[name]), files[name])
		if filepath.Ext(name) == ".c" {
			units = append(units, name)
		}
	}
	final := filepath.Join(dir, hex.EncodeToString(hash.Sum(nil)[:12]))
	path := filepath.Join(final, soname)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := write(work, files); err != nil {
		return "", fmt.Errorf("build the emulated driver: %w", err)
	}
	out := filepath.Join(work, "out")
	if err := os.Mkdir(out, 0o755); err != nil {
		return "", fmt.Errorf("build the emulated driver: %w", err)
	}
	args := append([]string{"-shared", "-I.", "-Wl,-soname," + soname, "-Wl,--version-script=driver.map", "-Wl,-z,defs", "-o", filepath.Join(out, soname)}, flags()...)
	if _, err := run(append(append(args, units...), "-pthread", "-ldl")...); err != nil {
		return "", err
	}
	// Whoever comes second keeps what the first made.
	if err := os.Rename(out, final); err != nil {
		if _, other := os.Stat(path); other != nil {
			return "", fmt.Errorf("build the emulated driver: %w", err)
		}
	}
	return path, nil
}

func write(dir string, files map[string]string) error {
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

var prototype = regexp.MustCompile(`(?m)^CUresult (cu[A-Z]\w*)\(`)

// calls are the entry points of the header, in its order.
//
//nolint:gochecknoglobals // read out of the header once
var calls = sync.OnceValue(func() []string {
	var names []string
	for _, m := range prototype.FindAllStringSubmatch(driver.Header, -1) {
		names = append(names, m[1])
	}
	return names
})

// sources are all files that the library is made of: its own, the header, and
// what is made here: the layout of a world, the names of all calls, a weak
// function for each that says "not supported", and what is exported.
func sources(hide []string) (map[string]string, error) {
	var names, stubs, exports strings.Builder
	stubs.WriteString("int unimplemented(int *call, const char *name);\n")
	exports.WriteString("{\nglobal:\n")
	for _, name := range calls() {
		fmt.Fprintf(&names, "CALL(%s)\n", name)
		fmt.Fprintf(&stubs, "__attribute__((weak)) int %[1]s(void) { static int call; return unimplemented(&call, \"%[1]s\"); }\n", name)
		if !slices.Contains(hide, name) {
			fmt.Fprintf(&exports, "\t%s;\n", name)
		}
	}
	exports.WriteString("local:\n\t*;\n};\n")
	files := map[string]string{
		"cuda.h":     driver.Header,
		"control.h":  header(),
		"calls.h":    names.String(),
		"stubs.c":    stubs.String(),
		"driver.map": exports.String(),
	}
	own, err := library.ReadDir("library")
	if err != nil {
		return nil, err
	}
	for _, f := range own {
		text, err := library.ReadFile("library/" + f.Name())
		if err != nil {
			return nil, err
		}
		files[f.Name()] = string(text)
	}
	return files, nil
}
