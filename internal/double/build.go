package double

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
)

// exports is the file of a source that says what the library exports.
const exports = "exports.map"

// Source is what a library is made of.
type Source struct {
	Name     string            // names its folder in the cache of this user
	Soname   string            // of the library
	Files    map[string]string // by name: those that end in .c are compiled, exports.map says what the linker exports
	Packages string            // of Debian that it takes, for errors
}

// Add adds the files of a folder, in place of those of the same name.
func (s Source) Add(files embed.FS, folder string) error {
	list, err := files.ReadDir(folder)
	if err != nil {
		return err
	}
	for _, f := range list {
		text, err := files.ReadFile(folder + "/" + f.Name())
		if err != nil {
			return err
		}
		s.Files[f.Name()] = string(text)
	}
	return nil
}

// built are the paths of the libraries that this process has built or found.
//
//nolint:gochecknoglobals // a library is built once a process
var built struct {
	mu   sync.Mutex
	path map[[sha256.Size]byte]string // by the source
}

// Build compiles the library, unless that has been done for this source, the
// headers of the system, and this compiler, and returns its path, which ends in
// Soname. Any number of processes may do so at once. The error wraps
// [ErrUnavailable] if this machine lacks a compiler or a header.
func (s Source) Build() (path string, err error) {
	key := sha256.Sum256(s.text())
	built.mu.Lock()
	defer built.mu.Unlock()
	if path, ok := built.path[key]; ok {
		return path, nil
	}
	if path, err = s.build(); err != nil {
		return "", fmt.Errorf("build %s: %w", s.Name, err)
	}
	if built.path == nil {
		built.path = make(map[[sha256.Size]byte]string)
	}
	built.path[key] = path
	return path, nil
}

// text is all that is in a source.
func (s Source) text() []byte {
	b := fmt.Appendf(nil, "%s %s\n", s.Name, s.Soname)
	for _, name := range slices.Sorted(maps.Keys(s.Files)) {
		b = fmt.Appendf(b, "%s %d\n%s", name, len(s.Files[name]), s.Files[name])
	}
	return b
}

func (s Source) build() (string, error) {
	if runtime.GOOS != "linux" {
		return "", fmt.Errorf("%w: it needs Linux", ErrUnavailable)
	}
	dir, err := s.cache()
	if err != nil {
		return "", err
	}
	work, err := os.MkdirTemp(dir, "build-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	c, err := s.compiler(work)
	if err != nil {
		return "", err
	}
	return c.library(dir)
}

// cache is the folder of the library's builds.
func (s Source) cache() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil { // no home
		dir = filepath.Join(os.TempDir(), fmt.Sprintf("kvferry-%d", os.Getuid()))
	}
	dir = filepath.Join(dir, "kvferry", s.Name)
	return dir, os.MkdirAll(dir, 0o700)
}

// compiler compiles a source whose files are in dir.
type compiler struct {
	s     Source
	path  string
	dir   string
	units []string
}

// compiler writes the files to dir.
func (s Source) compiler(dir string) (*compiler, error) {
	c := &compiler{s: s, dir: dir}
	for _, name := range []string{os.Getenv("CC"), "cc", "gcc", "clang"} {
		if path, err := exec.LookPath(name); name != "" && err == nil {
			c.path = path
			break
		}
	}
	if c.path == "" {
		return nil, fmt.Errorf("%w: no C compiler: cc is not in PATH, and CC names none%s", ErrUnavailable, s.install())
	}
	for _, name := range slices.Sorted(maps.Keys(s.Files)) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(s.Files[name]), 0o644); err != nil {
			return nil, err
		}
		if filepath.Ext(name) == ".c" {
			c.units = append(c.units, name)
		}
	}
	return c, nil
}

// install says what to do where something is missing.
func (s Source) install() string {
	return " (on Debian: apt-get install " + s.Packages + ")"
}

func (c *compiler) run(args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.path, args...)
	cmd.Dir = c.dir
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w%s\n%s", ErrUnavailable, c.path, err, c.s.install(), &stderr)
	}
	return out, nil
}

// flags are of the compiler, links of the linker.
func flags() []string {
	return []string{"-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-I."}
}

func (c *compiler) links() []string {
	return []string{"-shared", "-Wl,-soname," + c.s.Soname, "-Wl,--version-script=" + exports, "-Wl,-z,defs"}
}

// library makes dir/HASH/SONAME, where HASH is of all that goes into it: what the
// preprocessor makes of the source, the exports, the flags, and the compiler.
func (c *compiler) library(dir string) (string, error) {
	version, err := c.run("--version")
	if err != nil {
		return "", err
	}
	text, err := c.run(append([]string{"-E", "-P", "-I."}, c.units...)...)
	if err != nil {
		return "", err
	}
	hash := sha256.New()
	options := strings.Join(append(flags(), c.links()...), " ")
	for _, part := range [][]byte{text, version, []byte(c.s.Files[exports]), []byte(options)} {
		fmt.Fprintf(hash, "%d\n", len(part))
		hash.Write(part)
	}
	final := filepath.Join(dir, hex.EncodeToString(hash.Sum(nil)[:12]))
	path := filepath.Join(final, c.s.Soname)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	out := filepath.Join(c.dir, "out")
	if err := os.Mkdir(out, 0o755); err != nil {
		return "", err
	}
	args := slices.Concat(c.links(), flags(), []string{"-o", filepath.Join(out, c.s.Soname)}, c.units, []string{"-pthread", "-ldl"})
	if _, err := c.run(args...); err != nil {
		return "", err
	}
	// Whoever comes second keeps what the first made.
	if err := os.Rename(out, final); err != nil {
		if _, other := os.Stat(path); other != nil {
			return "", err
		}
	}
	return path, nil
}

// Program compiles the library's source, and main, a file in C, into a program in
// dir, with more flags of the compiler, and returns its path. It is for tests of a
// library: what it includes is in dir too.
func (s Source) Program(dir, main string, more ...string) (string, error) {
	c, err := s.compiler(dir)
	if err != nil {
		return "", err
	}
	if main, err = filepath.Abs(main); err != nil {
		return "", err
	}
	path := filepath.Join(dir, "program")
	args := slices.Concat([]string{"-std=gnu11", "-g", "-Wall", "-Wno-unused-result", "-I.", "-o", path, main}, more, c.units, []string{"-pthread", "-ldl"})
	if _, err := c.run(args...); err != nil {
		return "", err
	}
	return path, nil
}
