package bench

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
)

// memcpySource is a program in C: cgo would not do, what it costs a call is not
// the machine's limit.
//
//go:embed memcpy/memcpy.c
var memcpySource []byte

// errNoCompiler: the machine cannot make a program from C.
var errNoCompiler = errors.New("no C compiler that works, so no ratio to memcpy can be given (apt-get install gcc libc6-dev)")

const (
	compileTimeout = 60 * time.Second
	memcpyTimeout  = 60 * time.Second // over the time that it copies
	handfulBytes   = 1 << 20          // what a thread takes at once, about
)

// memcpy copies between two arenas by the C library, in a process of its own.
type memcpy struct {
	child          *child
	source, target *memory.Region
}

// startMemcpy compiles the program and starts it. The error wraps errNoCompiler if
// that cannot be. ctx ends the process.
func startMemcpy(ctx context.Context, arenaBytes int64) (_ *memcpy, err error) {
	m := &memcpy{}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("start memcpy: %w", err), m.close())
		}
	}()
	if m.source, err = memory.New("bench-memcpy-source", arenaBytes); err != nil {
		return nil, err
	}
	if m.target, err = memory.New("bench-memcpy-target", arenaBytes); err != nil {
		return nil, err
	}
	files := []*os.File{m.source.File(), m.target.File()}
	if m.child, err = startProgram(ctx, files, fmt.Sprint(arenaBytes)); err != nil {
		return nil, err
	}
	fillContent(m.source.Bytes())
	ready, err := m.child.ask(nil, memcpyTimeout)
	if err == nil && string(ready) != "ready" {
		err = fmt.Errorf("it says %q", ready)
	}
	return m, err
}

// startProgram compiles the program, starts it with the files and the argument, and
// removes it: what runs needs no file.
func startProgram(ctx context.Context, files []*os.File, arg string) (c *child, err error) {
	s, err := newScratch()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	program, err := compile(ctx, s.path)
	if err != nil {
		return nil, err
	}
	return startChild(ctx, files, program, arg)
}

// compile leaves files in dir alone.
func compile(ctx context.Context, dir string) (program string, err error) {
	ctx, cancel := context.WithTimeout(ctx, compileTimeout)
	defer cancel()
	compiler, err := exec.LookPath("cc")
	if err != nil {
		return "", fmt.Errorf("%w: %w", errNoCompiler, err)
	}
	source, program := filepath.Join(dir, "memcpy.c"), filepath.Join(dir, "memcpy")
	if err := os.WriteFile(source, memcpySource, 0o600); err != nil {
		return "", err
	}
	cc := command(ctx, compiler, "-O2", "-pthread", "-o", program, source)
	cc.Env = append(os.Environ(), "TMPDIR="+dir)
	cc.WaitDelay = time.Second
	if out, err := cc.CombinedOutput(); err != nil {
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		return "", fmt.Errorf("%w: %w: %.300s", errNoCompiler, err, out)
	}
	return program, nil
}

// copy makes the copies, each at least once, and again until the duration is over,
// and checks what has arrived, outside of the time.
func (m *memcpy) copy(copies []transfer.Copy, threads int, d time.Duration) (bytesPerSecond float64, err error) {
	// As memcpy.c declares them.
	handful := max(1, handfulBytes*int64(len(copies))/transfer.Bytes(copies))
	order := make([]byte, 0, 32+24*len(copies))
	for _, n := range []int64{int64(len(copies)), min(handful, int64(len(copies))), int64(threads), d.Nanoseconds()} {
		order = binary.NativeEndian.AppendUint64(order, uint64(n))
	}
	for _, c := range copies {
		order = binary.NativeEndian.AppendUint64(order, uint64(c.Remote))
		order = binary.NativeEndian.AppendUint64(order, uint64(c.Local))
		order = binary.NativeEndian.AppendUint64(order, uint64(c.Bytes))
	}
	answer, err := m.child.ask(order, d+memcpyTimeout)
	if err == nil {
		bytesPerSecond, err = parseMemcpy(answer, transfer.Bytes(copies))
	}
	for _, c := range copies {
		if err != nil {
			break
		}
		err = checkContent(m.target, c)
	}
	if err != nil {
		return 0, fmt.Errorf("memcpy of %d copies by %d threads: %w", len(copies), threads, err)
	}
	return bytesPerSecond, nil
}

// parseMemcpy takes an answer; least is how many bytes were ordered.
func parseMemcpy(answer []byte, least int64) (bytesPerSecond float64, err error) {
	var done, nanos int64
	if _, err := fmt.Sscanf(string(answer), "ok %d %d", &done, &nanos); err != nil {
		if why, ok := bytes.CutPrefix(answer, []byte("error ")); ok {
			return 0, errors.New(strings.ToValidUTF8(string(why), "?"))
		}
		return 0, fmt.Errorf("it answers %.80q", answer)
	}
	if done < least || nanos <= 0 {
		return 0, fmt.Errorf("it copied %d of %d bytes in %d ns", done, least, nanos)
	}
	return float64(done) / (float64(nanos) / 1e9), nil
}

// close ends the process and gives the memory back.
func (m *memcpy) close() error {
	var errs []error
	if m.child != nil {
		_ = m.child.close() // measured already; its errors are on stderr
	}
	for _, r := range []*memory.Region{m.source, m.target} {
		if r != nil {
			errs = append(errs, r.Close())
		}
	}
	return errors.Join(errs...)
}
