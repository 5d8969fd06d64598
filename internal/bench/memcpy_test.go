package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/transfer"
)

// newMemcpy is a memcpy, or skips with the reason.
func newMemcpy(t *testing.T, arenaBytes int64) *memcpy {
	t.Helper()
	m, err := startMemcpy(t.Context(), arenaBytes)
	if errors.Is(err, errNoCompiler) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func TestMemcpyMovesEveryCopy(t *testing.T) {
	const arena = 4 << 20
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	m := newMemcpy(t, arena)
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("left behind while it runs: %v, %v", left, err)
	}
	for _, threads := range []int{1, 3} {
		for _, load := range []pullLoad{{64, 0}, {4 << 10, 0.5}, {64 << 10, 1}, {2 << 20, 0}} {
			clear(m.target.Bytes())
			copies := scatter(arena, load, rand.New(rand.NewPCG(1, 2)))
			rate, err := m.copy(copies, threads, time.Millisecond)
			if err != nil || rate <= 0 {
				t.Fatalf("%v by %d threads: %v bytes/s, %v", load, threads, rate, err)
			}
		}
	}
}

func TestMemcpyChecksBytes(t *testing.T) {
	const arena = 1 << 20
	m := newMemcpy(t, arena)
	m.source.Bytes()[arena-1] ^= 1
	_, err := m.copy(scatter(arena, pullLoad{4 << 10, 0}, rand.New(rand.NewPCG(1, 2))), 1, 0)
	if err == nil || !strings.Contains(err.Error(), "wrong byte") {
		t.Errorf("a flipped bit was copied: %v", err)
	}
}

func TestMemcpyRefuses(t *testing.T) {
	const arena = 1 << 20
	order := func(header []uint64, copies ...uint64) (b []byte) {
		for _, n := range append(header, copies...) {
			b = binary.NativeEndian.AppendUint64(b, n)
		}
		return b
	}
	for name, bad := range map[string][]byte{
		"no copy":            order([]uint64{0, 1, 1, 0}),
		"too many":           order([]uint64{1 << 60, 1, 1, 0}),
		"nothing in hand":    order([]uint64{1, 0, 1, 0}, 0, 0, 8),
		"no thread":          order([]uint64{1, 1, 0, 0}, 0, 0, 8),
		"too many threads":   order([]uint64{1, 1, 1 << 40, 0}, 0, 0, 8),
		"from behind":        order([]uint64{1, 1, 1, 0}, arena-7, 0, 8),
		"to behind":          order([]uint64{1, 1, 1, 0}, 0, 1<<63, 8),
		"more than there is": order([]uint64{1, 1, 1, 0}, 0, 0, arena+1),
	} {
		t.Run(name, func(t *testing.T) {
			m := newMemcpy(t, arena)
			answer, err := m.child.ask(bad, memcpyTimeout)
			if err != nil || !strings.HasPrefix(string(answer), "error ") {
				t.Errorf("answers %q, %v", answer, err)
			}
			if _, err := m.copy([]transfer.Copy{{Bytes: 8}}, 1, 0); err == nil {
				t.Error("it goes on")
			}
		})
	}
}

func TestNoCompiler(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	if _, err := startMemcpy(t.Context(), 1<<20); !errors.Is(err, errNoCompiler) {
		t.Errorf("without cc: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "cc"), []byte("#!/bin/sh\necho no stdio.h >&2\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := startMemcpy(t.Context(), 1<<20); !errors.Is(err, errNoCompiler) || !strings.Contains(err.Error(), "no stdio.h") {
		t.Errorf("with one that fails: %v", err)
	}
}

// TestCompilerInterrupted: neither the compiler, what it has started, nor its files
// are left.
func TestCompilerInterrupted(t *testing.T) {
	dir, tmp := t.TempDir(), t.TempDir()
	begun := filepath.Join(dir, "begun")
	if err := unix.Mkfifo(begun, 0o600); err != nil {
		t.Fatal(err)
	}
	script := "#!/bin/sh\n: >\"$TMPDIR/cc1.s\"\nexec 3>" + begun + "\n(sleep 600; : >\"$TMPDIR/late\") &\necho begun >&3\nwait\n"
	if err := os.WriteFile(filepath.Join(dir, "cc"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	t.Setenv("TMPDIR", tmp)
	ctx, cancel := context.WithCancelCause(t.Context())
	interrupted := errors.New("interrupted")
	done := make(chan error, 1)
	go func() {
		m, err := startMemcpy(ctx, 1<<20)
		if err == nil {
			err = errors.Join(errors.New("started"), m.close())
		}
		done <- err
	}()
	held, err := os.Open(begun) // waits for who writes; all that it has started hold it open
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if _, err := held.Read(make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	cancel(interrupted)
	if err := <-done; !errors.Is(err, interrupted) {
		t.Errorf("ended: %v", err)
	}
	if err := held.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := held.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("what the compiler started goes on: %v", err)
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestCompilerNotBegun(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	interrupted := errors.New("interrupted")
	cancel(interrupted)
	if _, err := startMemcpy(ctx, 1<<20); !errors.Is(err, interrupted) {
		t.Errorf("interrupted: %v", err)
	}
}

func TestParseMemcpy(t *testing.T) {
	if rate, err := parseMemcpy([]byte("ok 4000 2000"), 4000); err != nil || rate != 2e9 {
		t.Errorf("rate = %v, %v", rate, err)
	}
	for _, bad := range []string{"", "ok", "ok 1", "ok 3999 2000", "ok 4000 0", "ok -1 -1", "error no memory", "ok 99999999999999999999 1"} {
		if _, err := parseMemcpy([]byte(bad), 4000); err == nil {
			t.Errorf("parsed %q", bad)
		}
	}
}

func TestChild(t *testing.T) {
	for name, script := range map[string]string{
		"says nothing":     "exec sleep 600",
		"ends":             "exit 0",
		"says no end":      "exec tr '\\0' x </dev/zero",
		"hears nothing":    "exec 0<&-; exec sleep 600",
		"says half a line": "printf half; exec sleep 600",
	} {
		t.Run(name, func(t *testing.T) {
			c, err := startChild(t.Context(), nil, "/bin/sh", "-c", script)
			if err != nil {
				t.Fatal(err)
			}
			line, err := c.ask(make([]byte, 1<<20), 300*time.Millisecond)
			if err == nil {
				t.Errorf("answers %.80q", line)
			}
			_ = c.process.Process.Kill()
			if err := c.close(); err == nil && name != "ends" {
				t.Error("it ended well")
			}
		})
	}
}

func TestOwnerRefuses(t *testing.T) {
	for name, order := range map[string]string{
		"nothing":           "",
		"garbage":           "kvferry",
		"no arena":          `{"arena_bytes":0}`,
		"huge arena":        `{"arena_bytes":1152921504606846976}`,
		"unknown transport": `{"arena_bytes":4096,"transports":["pigeon"]}`,
		"bad question":      `{"arena_bytes":4096,"transports":["tcp"]} 7`,
	} {
		var out strings.Builder
		if err := ServeOwner(t.Context(), strings.NewReader(order), &out); err == nil {
			t.Errorf("%s: served, %s", name, out.String())
		}
	}
}
