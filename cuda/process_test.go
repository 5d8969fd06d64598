package cuda_test

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/cuda/cudatest"
	"github.com/kvferry/kvferry/internal/memory"
)

const (
	childEnv   = "KVFERRY_CUDA_TEST_CHILD"
	libraryEnv = "KVFERRY_CUDA_TEST_LIBRARY"
	shared     = 5 << 20 // bytes of an arena that two processes have

	// noPause: a process under the race detector does not wait for a second at its end.
	noPause = "GORACE=atexit_sleep_ms=0"
)

// alone says whether this is the test's own process, where it may break the
// device. If not, it has run the test in one.
func alone(t *testing.T, env ...string) bool {
	t.Helper()
	const name = "KVFERRY_CUDA_TEST_ALONE"
	if os.Getenv(name) == t.Name() {
		return true
	}
	cudatest.Use(t, cudatest.Options{}) // it skips where there is none
	again(t, "^"+t.Name()+"$", append(env, name+"="+t.Name())...)
	return false
}

// again runs tests in a process that has a world of its own.
func again(t *testing.T, tests string, env ...string) {
	t.Helper()
	args := []string{"-test.run=" + tests, "-test.v", "-rapid.checks=8"}
	if end, ok := t.Deadline(); ok { // it says where it hangs while there is somebody to tell
		args = append(args, fmt.Sprintf("-test.timeout=%v", time.Until(end)*9/10))
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "KVFERRY_CUDA_") {
			cmd.Env = append(cmd.Env, e)
		}
	}
	cmd.Env = append(append(cmd.Env, env...), noPause)
	cmd.WaitDelay = 10 * time.Second // what it has started may hold its output
	out, err := cmd.CombinedOutput()
	switch {
	case err != nil:
		t.Errorf("%s: %v\n%s", strings.Join(env, " "), err, out)
	case !bytes.Contains(out, []byte("--- PASS")):
		t.Skipf("%s: nothing was run:\n%s", strings.Join(env, " "), out)
	}
}

// Other drivers do the same: without batches, with the other form of them, with
// two devices, and with one that takes no unpinned memory.
func TestOtherDrivers(t *testing.T) {
	cudatest.Use(t, cudatest.Options{})
	for name, env := range map[string]string{
		"11.8": "KVFERRY_CUDA_VARIANT=11.8", "13.0": "KVFERRY_CUDA_VARIANT=13.0", "strict": "KVFERRY_CUDA_VARIANT=strict",
		"two devices": devicesEnv + "=2", "peers": devicesEnv + "=peers",
	} {
		t.Run(name, func(t *testing.T) {
			again(t, "^(TestArenaIsOfZeros|TestCopiesAreAsOfBytes|TestDeviceMeasuresSmallPieces|TestCopiesRunInOrder|TestReach)$", env)
		})
	}
}

// devicesEnv asks for a world with two devices.
const devicesEnv = "KVFERRY_CUDA_TEST_DEVICES"

// world is the world of this process.
func world(tb testing.TB) *cudatest.World {
	tb.Helper()
	var o cudatest.Options
	if d := os.Getenv(devicesEnv); d != "" {
		o.Devices, o.Peers = 2, d == "peers"
	}
	return cudatest.Use(tb, o)
}

func TestReach(t *testing.T) {
	r, w := open(t, cuda.Options{})
	gpus := r.GPUs()
	first, last := gpus[0].UUID, gpus[len(gpus)-1].UUID
	err := r.Reach(first, last)
	if can := len(gpus) == 1 || w.Options().Peers; can != (err == nil) {
		t.Errorf("%d devices, peers %t: %v", len(gpus), w.Options().Peers, err)
	}
	if again := r.Reach(first, last); fmt.Sprint(again) != fmt.Sprint(err) {
		t.Errorf("%v, and then %v", err, again)
	}
	if err := r.Reach(first, cuda.UUID{}); !errors.Is(err, cuda.ErrUnavailable) {
		t.Errorf("a device that isn't there: %v", err)
	}
	for _, g := range gpus {
		for _, text := range []string{fmt.Sprint(g.Ordinal), g.UUID.String(), strings.ToLower(g.UUID.String())} {
			if got, err := r.Find(text); err != nil || got != g {
				t.Errorf("%s: %+v, %v", text, got, err)
			}
		}
		if g.Name == "" || g.Bus == "" || g.Bytes <= 0 {
			t.Errorf("%+v", g)
		}
	}
	for _, text := range []string{"-1", "9", "", "cuda:0", cuda.UUID{}.String()} {
		if g, err := r.Find(text); err == nil {
			t.Errorf("%q is %+v", text, g)
		}
	}
}

// another is another process.
type another struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Reader
	files *net.UnixConn // what it sends
}

func start(t *testing.T, w *cudatest.World, kind string, files []*os.File) *another {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs, ours := os.NewFile(uintptr(pair[0]), "theirs"), os.NewFile(uintptr(pair[1]), "ours")
	defer theirs.Close()
	defer ours.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	p := &another{cmd: exec.CommandContext(t.Context(), os.Args[0]), files: conn.(*net.UnixConn)}
	p.cmd.Env = append(append(os.Environ(), w.Env()...), childEnv+"="+kind, libraryEnv+"="+w.Library(), noPause)
	p.cmd.ExtraFiles = append([]*os.File{theirs}, files...)
	p.cmd.Stderr = os.Stderr
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReader(out)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.kill()
		p.files.Close()
	})
	return p
}

func (p *another) say(line string) { fmt.Fprintln(p.in, line) }

func (p *another) hear(t *testing.T) string {
	t.Helper()
	defer p.patience()()
	line, err := p.out.ReadString('\n')
	if err != nil {
		t.Fatalf("the other process said %q: %v", line, err)
	}
	return strings.TrimSpace(line)
}

// patience has it say where it hangs, and end, if it takes for ever.
func (p *another) patience() (enough func()) {
	hangs := time.AfterFunc(2*time.Minute, func() { p.cmd.Process.Signal(unix.SIGQUIT) })
	return func() { hangs.Stop() }
}

// ends is its end by itself.
func (p *another) ends() error {
	defer p.patience()()
	return p.cmd.Wait()
}

func (p *another) kill() {
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

// child is the main of another process.
func child(kind string) {
	err := func() error {
		r, err := cuda.Open(cuda.Options{Library: os.Getenv(libraryEnv), Scatter: -1})
		if err != nil {
			return err
		}
		in := bufio.NewScanner(os.Stdin)
		in.Buffer(nil, 1<<20)
		if kind == "import" {
			return importer(r, in)
		}
		return exporter(r, in, kind == "export chunks")
	}()
	if err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
}

func importer(r *cuda.Runtime, in *bufio.Scanner) error {
	in.Scan()
	wire, err := hex.DecodeString(in.Text())
	if err != nil {
		return err
	}
	h, err := cuda.ParseHandle(wire)
	if err != nil {
		return err
	}
	var files []*os.File
	for i := range h.Chunks {
		files = append(files, os.NewFile(uintptr(4+i), "chunk"))
	}
	a, err := r.Import(h, files)
	if err != nil {
		return err
	}
	want, got := make([]byte, h.Bytes), make([]byte, h.Bytes)
	fill(want, 1)
	if err := a.ReadInto(got, whole(len(got))).Wait(); err != nil {
		return err
	}
	if !bytes.Equal(got, want) || r.Stats().Imported != 1 {
		return errors.New("other bytes")
	}
	fill(want, 2)
	if err := a.WriteFrom(want, whole(len(want))).Wait(); err != nil {
		return err
	}
	fmt.Println("written")
	in.Scan()
	return errors.Join(a.Close(), r.Close())
}

func exporter(r *cuda.Runtime, in *bufio.Scanner, chunks bool) error {
	u := r.GPUs()[0].UUID
	alloc := r.Alloc
	if chunks {
		alloc = func(u cuda.UUID, n int64) (*cuda.Arena, error) { return r.AllocChunks(u, n, 2<<20) }
	}
	a, err := alloc(u, shared)
	if err != nil {
		return err
	}
	b := make([]byte, shared)
	fill(b, 1)
	if err := a.WriteFrom(b, whole(len(b))).Wait(); err != nil {
		return err
	}
	h, files, err := a.Export()
	if err != nil {
		return err
	}
	fmt.Println(hex.EncodeToString(h.Append(nil)))
	conn, err := net.FileConn(os.NewFile(3, "socket"))
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := memory.SendFile(conn.(*net.UnixConn), []byte{1}, f); err != nil {
			return err
		}
		f.Close()
	}
	in.Scan()
	return errors.Join(a.Close(), r.Close())
}

// both are the ways in which memory is told.
func both(t *testing.T, f func(t *testing.T, chunks bool)) {
	t.Run("handle", func(t *testing.T) { f(t, false) })
	t.Run("files", func(t *testing.T) { f(t, true) })
}

func sharedArena(t *testing.T, r *cuda.Runtime, chunks bool) *cuda.Arena {
	t.Helper()
	u := r.GPUs()[0].UUID
	a, err := r.Alloc(u, shared)
	if chunks {
		a.Close()
		a, err = r.AllocChunks(u, shared, 2<<20)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	b := make([]byte, shared)
	fill(b, 1)
	wait(t, a.WriteFrom(b, whole(len(b))))
	return a
}

func exported(t *testing.T, a *cuda.Arena) (cuda.Handle, []*os.File) {
	t.Helper()
	h, files, err := a.Export()
	if err != nil {
		t.Fatal(err)
	}
	return h, files
}

// tells is the handle that a process that exports says first.
func (p *another) tells(t *testing.T) cuda.Handle {
	t.Helper()
	wire, err := hex.DecodeString(p.hear(t))
	if err != nil {
		t.Fatal(err)
	}
	h, err := cuda.ParseHandle(wire)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// importing has another process that has imported an arena, and has written to it.
func importing(t *testing.T, w *cudatest.World, a *cuda.Arena) *another {
	t.Helper()
	h, files := exported(t, a)
	p := start(t, w, "import", files)
	for _, f := range files {
		f.Close()
	}
	p.say(hex.EncodeToString(h.Append(nil)))
	if line := p.hear(t); line != "written" {
		t.Fatal(line)
	}
	return p
}

func TestAnotherProcessImports(t *testing.T) {
	both(t, func(t *testing.T, chunks bool) {
		r, w := open(t, cuda.Options{})
		a := sharedArena(t, r, chunks)
		p := importing(t, w, a)
		want := make([]byte, shared)
		fill(want, 2)
		if !bytes.Equal(content(t, a), want) {
			t.Error("what the other process has written is not here")
		}
		p.say("close")
		if err := p.ends(); err != nil {
			t.Error(err)
		}
		if n := w.Counts().Processes[p.cmd.Process.Pid].Live(); n != 0 {
			t.Errorf("it has left %d objects", n)
		}
		nothingTaken(t, w, a)
	})
}

// nothingTaken closes an arena, after which no memory of the device is taken.
func nothingTaken(t *testing.T, w *cudatest.World, a *cuda.Arena) {
	t.Helper()
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if n := w.Counts().DeviceBytes; n != 0 {
		t.Errorf("%d bytes of the device are taken", n)
	}
}

func TestImporterIsKilled(t *testing.T) {
	both(t, func(t *testing.T, chunks bool) {
		r, w := open(t, cuda.Options{})
		a := sharedArena(t, r, chunks)
		importing(t, w, a).kill()
		want := make([]byte, shared)
		fill(want, 2)
		if !bytes.Equal(content(t, a), want) {
			t.Error("other bytes")
		}
		nothingTaken(t, w, a)
	})
}

func TestExporterIsKilled(t *testing.T) {
	both(t, func(t *testing.T, chunks bool) {
		r, w := open(t, cuda.Options{})
		kind := "export"
		if chunks {
			kind = "export chunks"
		}
		p := start(t, w, kind, nil)
		wire, err := hex.DecodeString(p.hear(t))
		if err != nil {
			t.Fatal(err)
		}
		h, err := cuda.ParseHandle(wire)
		if err != nil {
			t.Fatal(err)
		}
		var files []*os.File
		for range h.Chunks {
			_, f, err := memory.ReceiveFile(p.files, make([]byte, 1))
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, f)
		}
		a, err := r.Import(h, files)
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		// The same once more, and by what the first tells.
		h2, files2 := exported(t, a)
		twice, err := r.Import(h2, files2)
		if err != nil {
			t.Fatal(err)
		}
		defer twice.Close()
		if s := r.Stats(); s.Imported != 2 || s.Arenas != 0 {
			t.Errorf("%+v", s)
		}
		p.kill()
		want := make([]byte, shared)
		fill(want, 1)
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		if !bytes.Equal(content(t, twice), want) {
			t.Error("what was imported is gone with its maker")
		}
		if !chunks {
			if _, err := r.Import(h, nil); err != nil {
				t.Errorf("import again what is open: %v", err)
			} else if s := r.Stats(); s.Imported != 2 {
				t.Errorf("%+v", s)
			}
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if n := w.Counts().DeviceBytes; n != 0 {
			t.Errorf("%d bytes of the device are taken", n)
		}
	})
}

func TestDeadMakersHandleOpensNothing(t *testing.T) {
	r, w := open(t, cuda.Options{})
	p := start(t, w, "export", nil)
	h := p.tells(t)
	p.kill()
	_, err := r.Import(h, nil)
	if e, ok := errors.AsType[*cuda.Error](err); !ok || e.Call != "cuIpcOpenMemHandle" {
		t.Errorf("import: %v", err)
	}
}

// Memory of several pieces can be an arena if files tell them, and the error says
// how an engine comes by such.
func TestPiecesWithoutFiles(t *testing.T) {
	r, w := open(t, cuda.Options{})
	h := start(t, w, "export", nil).tells(t)
	in, err := r.Import(h, nil) // files tell of it as little
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	part, err := r.Wrap(h.UUID, in.Address(), h.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	if err := part.Close(); err != nil {
		t.Error(err)
	}
	if _, err := r.Wrap(h.UUID, in.Address(), 64<<20); !errors.Is(err, cuda.ErrNotShareable) || !strings.Contains(err.Error(), "expandable_segments:False") {
		t.Errorf("%v", err)
	}
}

// A driver may give the 64 bytes of memory that was freed again. Who still has that
// imported is told so, and is not given the old memory for the new.
func TestHandleThatIsGivenAgain(t *testing.T) {
	r, w := open(t, cuda.Options{})
	h := start(t, w, "export", nil).tells(t)
	in, err := r.Import(h, nil)
	if err != nil {
		t.Fatal(err)
	}
	again, err := r.Import(h, nil)
	if err != nil {
		t.Fatal(err)
	}
	other := h
	other.Word++
	if _, err := r.Import(other, nil); err == nil || !strings.Contains(err.Error(), "still imported") {
		t.Errorf("%v", err)
	}
	for _, a := range []*cuda.Arena{in, again} {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
	in, err = r.Import(other, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := in.Close(); err != nil {
		t.Error(err)
	}
}

// All that is told of one allocation has one word, and no two allocations have the
// same, wherever they are; our own is found by it alone.
func TestWordOfAnAllocation(t *testing.T) {
	r, w := open(t, cuda.Options{})
	seen := map[uint64]bool{start(t, w, "export", nil).tells(t).Word: true}
	for range 3 {
		a := sharedArena(t, r, false)
		h, _ := exported(t, a)
		if seen[h.Word] {
			t.Errorf("%#x again", h.Word)
		}
		seen[h.Word] = true
		part, err := r.Wrap(h.UUID, a.Address()+4096, 4096)
		if err != nil {
			t.Fatal(err)
		}
		if got, _ := exported(t, part); got.Word != h.Word || got.IPC != h.IPC {
			t.Errorf("%+v of %+v", got, h)
		}
		if err := part.Close(); err != nil {
			t.Error(err)
		}
		other := h
		other.Word++
		if _, err := r.Import(other, nil); err == nil {
			t.Error("memory of before was imported as that of now")
		}
		in, err := r.Import(h, nil) // as it was told twice, and one is closed
		if err != nil {
			t.Fatal(err)
		}
		if err := in.Close(); err != nil {
			t.Error(err)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
}
