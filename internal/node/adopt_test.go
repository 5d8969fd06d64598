package node_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/cuda/cudatest"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/internal/node"
)

// byEngine has the engine bring the memory.
var byEngine = [2]string{"arena.memory", "engine"}

// lender is an engine's memory, as it lends it.
type lender struct {
	arenas map[id.Rank]memory.Arena
	seals  *memory.SealTable
}

// newLender makes host memory for the ranks of a configuration.
func newLender(t testing.TB, c *config.Config) *lender {
	t.Helper()
	l := &lender{arenas: make(map[id.Rank]memory.Arena)}
	for _, r := range c.Arena.Ranks {
		a, err := memory.NewPlain("engine", c.Geometry().Layout.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { a.Close() })
		l.arenas[id.Rank(r)] = a
	}
	var err error
	if l.seals, err = memory.NewSealTable(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.seals.Close() })
	return l
}

// start starts a node on the engine's memory.
func (l *lender) start(t testing.TB, c *config.Config) (*member, *client.Adoption) {
	t.Helper()
	var a *client.Adoption
	lent := make(chan error, 1)
	go func() {
		var err error
		a, err = client.Adopt(t.Context(), c.Node.Socket, l.arenas, l.seals)
		lent <- err
	}()
	t.Cleanup(func() {
		if a != nil {
			<-a.Ended() // the node is closed
		}
	})
	m := startWith(t, c, nil)
	if err := <-lent; err != nil {
		t.Fatal(err)
	}
	if a.Life() != m.Life() {
		t.Errorf("lent to %v, %v runs", a.Life(), m.Life())
	}
	return m, a
}

// holding counts the words of a table that hold something.
func holding(seals *memory.SealTable) (words int) {
	for i := range uint32(memory.Words) {
		if v, _ := seals.Load(i); v != 0 && i != node.ProbeWord {
			words++
		}
	}
	return words
}

// TestLentMemoryIsReadByPeers: what an engine has written into memory of its own
// is on the reader byte for byte, chunk by chunk, and final only after the pause.
func TestLentMemoryIsReadByPeers(t *testing.T) {
	for _, by := range []string{"shm", "tcp"} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			set := [][2]string{{"transfer.transports", by}, {"arena.ranks", "0,1"}}
			decode := startNode(t, "decode", nil, set...)
			c := configure(t, "prefill", decode, append(set, byEngine)...)
			l := newLender(t, c)
			for i := range uint32(memory.Words) { // of a life before
				l.seals.Store(i, uint64(i)+1)
			}
			prefill, adoption := l.start(t, c)
			awaitPeers(t, prefill, decode)
			if n := holding(l.seals); n != 0 {
				t.Errorf("%d words of the life before still hold", n)
			}
			p, d := openEngine(t, prefill), openEngine(t, decode)
			carry(t, "r", bring{chunks: []int{13, 20, 7}, target: "decode"}, p, d)
			for r, a := range p.arenas { // it is the same memory
				if own := l.arenas[r].(*memory.Region); string(own.Bytes()) != string(a.Bytes()) {
					t.Errorf("rank %d: the node's arena is another one than the engine's", r)
				}
			}
			p.remove("r")
			d.remove("r")
			awaitAllFree(t, prefill)
			// And the other way: what is retrieved lands in the engine's memory.
			carry(t, "back", bring{chunks: []int{9, 30}, target: "prefill"}, d, p)
			p.publish("back", true)
			if holding(l.seals) == 0 {
				t.Error("nothing is sealed")
			}
			prefill.close()
			<-adoption.Ended()
			if n := holding(l.seals); n != 0 {
				t.Errorf("%d words hold after the life", n)
			}
		})
	}
}

// TestEngineTakesItsMemoryBack: Close returns when the node has let go.
func TestEngineTakesItsMemoryBack(t *testing.T) {
	c := configure(t, "prefill", nil, byEngine)
	m, adoption := newLender(t, c).start(t, c)
	over := make(chan error, 1)
	go func() { over <- adoption.Close() }()
	<-m.Done()
	if err := m.Err(); !errors.Is(err, node.ErrUnlent) {
		t.Errorf("the node ended with %v", err)
	}
	select {
	case err := <-over:
		t.Errorf("Close has returned before the node is closed: %v", err)
	default:
	}
	m.close()
	if err := <-over; err != nil {
		t.Error(err)
	}
	if err := adoption.Close(); err != nil {
		t.Error(err)
	}
}

// TestReaderOfMemoryThatIsGone: who was about to read when the engine took its
// memory back is told, and keeps nothing of it.
func TestReaderOfMemoryThatIsGone(t *testing.T) {
	g := newGate()
	decode := startWith(t, configure(t, "decode", nil), g.wrap)
	c := configure(t, "prefill", decode, byEngine)
	l := newLender(t, c)
	prefill, adoption := l.start(t, c)
	awaitPeers(t, prefill, decode)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("r")
	d.ingest("r")
	p.write("r", 30)
	p.publish("r", true, to("decode"))
	done := d.retrieving("r", "", 0)
	<-g.came // it knows where to read, and has not begun
	over := make(chan error, 1)
	go func() { over <- adoption.Close() }()
	<-prefill.Done()
	prefill.close()
	if err := <-over; err != nil {
		t.Error(err)
	}
	for _, a := range l.arenas { // the memory is the engine's again
		clear(a.(*memory.Region).Bytes())
	}
	close(g.pass)
	got := <-done
	switch code := client.CodeOf(got.err); code {
	case kvferrypb.Failure_OWNER_LOST, kvferrypb.Failure_STALE, kvferrypb.Failure_REVOKED:
	default:
		t.Errorf("%v, %v", got.res, got.err)
	}
	d.remove("r")
	awaitAllFree(t, decode)
}

// say is an engine that speaks the exchange by itself.
type say struct {
	t testing.TB
	*net.UnixConn
}

func dialArena(t testing.TB, c *config.Config) *say {
	t.Helper()
	var conn net.Conn
	await(t, "the node to wait for its memory", func(ctx context.Context) error {
		var d net.Dialer
		var err error
		conn, err = d.DialContext(ctx, "unix", c.Node.Socket+kvferrypb.ArenaSuffix)
		return err
	})
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(deadline)); err != nil {
		t.Fatal(err)
	}
	return &say{t, conn.(*net.UnixConn)}
}

func (s *say) lend(l *kvferrypb.Lend, files ...*os.File) {
	s.t.Helper()
	frame, err := kvferrypb.FrameOf(l)
	if err != nil {
		s.t.Fatal(err)
	}
	_, _ = s.Write(frame) // it may have been refused
	for _, f := range files {
		_ = memory.SendFile(s, []byte{1}, f)
	}
}

// refused is the node's answer.
func (s *say) refused() string {
	s.t.Helper()
	var lent kvferrypb.Lent
	if err := kvferrypb.ReadFrame(s, &lent); err != nil {
		s.t.Fatal(err)
	}
	return lent.GetRefused()
}

// TestMemoryThatDoesNotFit: the engine is told why, the node waits for another
// one, and keeps no descriptor.
func TestMemoryThatDoesNotFit(t *testing.T) {
	mayOpen(t, 8192)
	c := configure(t, "prefill", nil, byEngine, [2]string{"arena.ranks", "0,1"})
	l := newLender(t, c)
	bytes := uint64(c.Geometry().Layout.Bytes())
	file := func(r id.Rank) *os.File { return l.arenas[r].(*memory.Region).File() }
	fd, err := unix.MemfdCreate("soft", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	soft := os.NewFile(uintptr(fd), "soft")
	defer soft.Close()
	if err := soft.Truncate(int64(bytes)); err != nil {
		t.Fatal(err)
	}
	good := func() *kvferrypb.Lend {
		return &kvferrypb.Lend{Version: kvferrypb.LendVersion, Arenas: []*kvferrypb.Lend_Arena{{Rank: 0, Bytes: bytes, Files: 1}, {Rank: 1, Bytes: bytes, Files: 1}}}
	}
	started := make(chan started, 1)
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	go start(ctx, t, c, started)
	dialArena(t, c).Close()
	before := openFiles(t)
	for name, tt := range map[string]struct {
		change func(*kvferrypb.Lend)
		files  []*os.File
		says   string
	}{
		"another version":  {func(l *kvferrypb.Lend) { l.Version = 2 }, nil, "version 2"},
		"a rank too few":   {func(l *kvferrypb.Lend) { l.Arenas = l.Arenas[:1] }, nil, "lends 1 ranks"},
		"a foreign rank":   {func(l *kvferrypb.Lend) { l.Arenas[1].Rank = 7 }, nil, "rank 7"},
		"no such rank":     {func(l *kvferrypb.Lend) { l.Arenas[1].Rank = 1 << 31 }, nil, "rank 2147483648"},
		"a rank twice":     {func(l *kvferrypb.Lend) { l.Arenas[1].Rank = 0 }, nil, "rank 0 twice"},
		"too small":        {func(l *kvferrypb.Lend) { l.Arenas[1].Bytes = 4096 }, nil, fmt.Sprintf("lends 4096 bytes, the node's arena has %d", bytes)},
		"many descriptors": {func(l *kvferrypb.Lend) { l.Arenas[1].Files = 1 << 30 }, nil, "descriptors"},
		"more descriptors than may be open": {func(l *kvferrypb.Lend) {
			for _, a := range l.Arenas {
				a.Cuda, a.Files = []byte("x"), cuda.MaxChunks
			}
		}, nil, "ulimit -n"},
		"both kinds":      {func(l *kvferrypb.Lend) { l.Arenas[1].Cuda = []byte("x") }, nil, "1 of 2 ranks are in memory of devices"},
		"the same memory": {nil, []*os.File{file(0), file(0)}, "same memory"},
		"it can shrink":   {nil, []*os.File{file(0), soft}, "shrinking"},
		"no handle":       {func(l *kvferrypb.Lend) { l.Arenas[0].Cuda, l.Arenas[1].Cuda = []byte("x"), []byte("y") }, []*os.File{file(0)}, "handle of an arena"},
		"expandable segments": {func(l *kvferrypb.Lend) {
			for _, a := range l.Arenas {
				a.Cuda, a.Files = cuda.Handle{Kind: cuda.Files, Bytes: int64(bytes), Chunks: []int64{int64(bytes)}}.Append(nil), 0
			}
		}, nil, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"},
		"no memfd":           {nil, []*os.File{file(0), os.Stdin}, "memfd"},
		"a short table":      {nil, []*os.File{file(0), file(1), soft}, "seal table"},
		"the arena as table": {nil, []*os.File{file(0), file(1), file(1)}, "same memory"},
	} {
		s := dialArena(t, c)
		lend := good()
		if tt.change != nil {
			tt.change(lend)
		}
		s.lend(lend, tt.files...)
		if got := s.refused(); !strings.Contains(got, tt.says) {
			t.Errorf("%s: refused with %q, want %q", name, got, tt.says)
		}
		s.Close()
	}
	garbage := dialArena(t, c)
	_, _ = garbage.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
	if got := garbage.refused(); !strings.Contains(got, "message of") {
		t.Errorf("garbage: %q", got)
	}
	garbage.Close()
	half := dialArena(t, c)
	half.lend(good(), file(0)) // and then nothing
	half.Close()
	await(t, "the node to let go of what it refused", func(context.Context) error {
		if n := openFiles(t); n > before {
			return fmt.Errorf("%d files are open, %d were before", n, before)
		}
		return nil
	})
	if _, err := client.Adopt(t.Context(), c.Node.Socket, map[id.Rank]memory.Arena{0: l.arenas[0]}, l.seals); !errors.Is(err, client.ErrRefused) || !strings.Contains(err.Error(), "[0 1]") {
		t.Errorf("Adopt of one rank = %v", err)
	}
	// It waits on, until its start is called off.
	why := errors.New("called off")
	cancel(why)
	if got := <-started; !errors.Is(got.err, why) || !errors.Is(got.err, node.ErrUnadopted) || !strings.Contains(got.err.Error(), kvferrypb.ArenaSuffix) {
		t.Errorf("the start ended with %v, %v", got.node, got.err)
	}
	if _, err := os.Stat(c.Node.Socket + kvferrypb.ArenaSuffix); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
}

// TestDeviceMemoryOfTwoRanks: two ranks may lie in one allocation of a device, but
// not in the same bytes of it, whoever finds that out.
func TestDeviceMemoryOfTwoRanks(t *testing.T) {
	for name, chunk := range map[string]int64{"with a handle": 0, "with files": 2 << 20} {
		t.Run(name, func(t *testing.T) {
			w, driver := useGPUs(t)
			c := configure(t, "prefill", nil, byEngine, driver, overTCP, [2]string{"arena.ranks", "0,1"})
			l := newLender(t, c)
			bytes := c.Geometry().Layout.Bytes()
			rt, err := cuda.Open(cuda.Options{Library: w.Library()})
			if err != nil {
				t.Fatal(err)
			}
			defer rt.Close()
			gpu := rt.GPUs()[0].UUID
			alloc := rt.Alloc
			if chunk > 0 {
				alloc = func(u cuda.UUID, bytes int64) (*cuda.Arena, error) { return rt.AllocChunks(u, bytes, chunk) }
			}
			whole, err := alloc(gpu, 2*bytes)
			if err != nil {
				t.Fatal(err)
			}
			defer whole.Close()
			part := func(at int64) *cuda.Arena {
				a, err := rt.Wrap(gpu, whole.Address()+memory.DeviceAddr(at), bytes)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { a.Close() })
				return a
			}
			started := make(chan started, 1)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			go start(ctx, t, c, started)
			parts := map[int64]*cuda.Arena{0: part(0), 1: part(1), bytes - 1: part(bytes - 1), bytes: part(bytes)}
			for _, at := range []int64{0, 1, bytes - 1} {
				for _, two := range [][2]*cuda.Arena{{parts[0], parts[at]}, {parts[at], parts[0]}} {
					// By an engine that looks, and by one that does not.
					arenas := map[id.Rank]memory.Arena{0: two[0], 1: two[1]}
					if _, err := client.Adopt(t.Context(), c.Node.Socket, arenas, l.seals); !errors.Is(err, client.ErrRefused) || !strings.Contains(err.Error(), "same memory") {
						t.Errorf("Adopt of memory that overlaps from %d on = %v", at, err)
					}
					if chunk > 0 {
						continue // the files say nothing
					}
					lend := &kvferrypb.Lend{Version: kvferrypb.LendVersion}
					for r, a := range two {
						handle, _, err := a.Export()
						if err != nil {
							t.Fatal(err)
						}
						lend.Arenas = append(lend.Arenas, &kvferrypb.Lend_Arena{Rank: uint32(r), Bytes: uint64(bytes), Cuda: handle.Append(nil)})
					}
					s := dialArena(t, c)
					s.lend(lend)
					if got := s.refused(); !strings.Contains(got, "rank 1: memory does not fit: it is the same memory") {
						t.Errorf("memory that overlaps from %d on: refused with %q", at, got)
					}
					s.Close()
				}
			}
			adoption, err := client.Adopt(t.Context(), c.Node.Socket, map[id.Rank]memory.Arena{0: parts[bytes], 1: parts[0]}, l.seals)
			if err != nil {
				t.Fatal(err)
			}
			n := (<-started).node
			for r, at := range map[id.Rank]int64{0: bytes, 1: 0} {
				want := []byte(fmt.Sprintf("of rank %d", r))
				segment := []memory.Segment{{Bytes: int64(len(want))}}
				got := make([]byte, len(want))
				err := errors.Join(parts[at].WriteFrom(want, segment).Wait(), n.ArenaOf(r).(memory.Stager).ReadInto(got, segment).Wait())
				if err != nil || string(got) != string(want) {
					t.Errorf("rank %d: %q, %v, want %q", r, got, err, want)
				}
			}
			if err := n.Close(t.Context()); err != nil {
				t.Error(err)
			}
			<-adoption.Ended()
		})
	}
}

// TestWhoLooksIsNoEngine: whoever opens the socket and says nothing, as a probe
// does, is no engine that was refused, and nothing is logged of it.
func TestWhoLooksIsNoEngine(t *testing.T) {
	c := configure(t, "prefill", nil, byEngine)
	l := newLender(t, c)
	var log lines
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	done := make(chan started, 1)
	go func() {
		n, err := node.Start(ctx, node.Options{Config: c, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		done <- started{n, err}
	}()
	silent := dialArena(t, c)
	if err := silent.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, silent); n != 0 || err != nil {
		t.Errorf("it was told %d bytes, %v", n, err)
	}
	half := dialArena(t, c)
	_, _ = half.Write([]byte{0})
	if err := half.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	half.refused()
	adoption, err := client.Adopt(t.Context(), c.Node.Socket, l.arenas, l.seals)
	if err != nil {
		t.Fatal(err)
	}
	if err := (<-done).node.Close(t.Context()); err != nil {
		t.Error(err)
	}
	<-adoption.Ended()
	if got := log.of("level=WARN"); len(got) != 1 {
		t.Errorf("%q, want that of half a message", got)
	}
}

// TestLentTableIsClosedTwice: the second time there is nothing left to do.
func TestLentTableIsClosedTwice(t *testing.T) {
	seals, err := memory.NewSealTable()
	if err != nil {
		t.Fatal(err)
	}
	closing := node.CloserOfLent(seals)
	for range 2 {
		if err := closing(); err != nil {
			t.Error(err)
		}
	}
}

// started is how the start of a node has ended.
type started struct {
	node *node.Node
	err  error
}

// start starts a node that waits for an engine meanwhile.
func start(ctx context.Context, t testing.TB, c *config.Config, done chan<- started) {
	n, err := node.Start(ctx, node.Options{Config: c, Logger: logger(t)})
	done <- started{n, err}
}

// mayOpen lets this process have so many descriptors, until the test ends.
func mayOpen(t *testing.T, files uint64) {
	t.Helper()
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: min(files, was.Max), Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
			t.Error(err)
		}
	})
}

// openFiles counts the descriptors of this process.
func openFiles(t testing.TB) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// A second engine is not let near a node that has its memory.
func TestOneEngineLends(t *testing.T) {
	c := configure(t, "prefill", nil, byEngine)
	l := newLender(t, c)
	l.start(t, c)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := client.Adopt(ctx, c.Node.Socket, newLender(t, c).arenas, l.seals); !errors.Is(err, client.ErrUnreachable) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Adopt = %v", err)
	}
}

// process is a test of this binary that runs as a process of its own, a line of
// output a step; it goes on with the next one when it is told.
type process struct {
	t     testing.TB
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Scanner
}

func startProcess(t testing.TB, test string, env ...string) *process {
	t.Helper()
	dir, err := os.MkdirTemp("", "kvf")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	p := &process{t: t, cmd: exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+test+"$")}
	p.cmd.Env = append(append(os.Environ(), "TMPDIR="+dir), env...)
	p.cmd.Stderr = os.Stderr
	out, err := p.cmd.StdoutPipe()
	if err == nil {
		p.in, err = p.cmd.StdinPipe()
	}
	if err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	p.lines = bufio.NewScanner(out)
	t.Cleanup(p.kill)
	return p
}

// kill ends it as kill -9 does. It may be called twice.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// next lets it go on to its next line.
func (p *process) next() string {
	p.t.Helper()
	for p.lines.Scan() {
		if line, ok := strings.CutPrefix(p.lines.Text(), stepMark); ok {
			return line
		}
	}
	p.t.Fatalf("the process has ended: %v", p.lines.Err())
	return ""
}

func (p *process) proceed() {
	p.t.Helper()
	if _, err := io.WriteString(p.in, "\n"); err != nil {
		p.t.Fatal(err)
	}
}

// upTo lets it go on to a line.
func (p *process) upTo(want string) {
	p.t.Helper()
	for got := p.next(); got != want; got = p.next() {
		p.proceed()
	}
}

const stepMark = "STEP "

// pace is the other side of a process.
func pace(in *bufio.Reader, step string) {
	fmt.Println(stepMark + step)
	if _, err := in.ReadString('\n'); err != nil {
		os.Exit(0) // the parent is gone
	}
}

// TestEngineProcess is no test: it is an engine of which the others kill the
// process. It lends its memory, and publishes three chunks.
func TestEngineProcess(t *testing.T) {
	file := os.Getenv("KVFERRY_TEST_ENGINE")
	if file == "" {
		t.Skip("it is run by other tests")
	}
	c, err := config.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(os.Stdin)
	l := newLender(t, c)
	flush := func() {}
	own := l.arenas
	if library := os.Getenv("KVFERRY_TEST_CUDA"); library != "" {
		l.arenas, flush = onDevices(t, library, own)
	}
	write := func(e *engine, tokens uint32) (commit func()) {
		step, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r", "", int(tokens))}, Plan: true})
		if err != nil {
			t.Fatal(err)
		}
		e.fill("r", step.GetPlans())
		flush()
		return func() {
			if _, err := e.Commit(e.ctx(), &kvferrypb.CommitRequest{Step: step.GetStep()}); err != nil {
				t.Fatal(err)
			}
		}
	}
	pace(in, "begun")
	a, err := client.Adopt(t.Context(), c.Node.Socket, l.arenas, l.seals)
	if err != nil {
		t.Fatal(err)
	}
	pace(in, "lent")
	e := openEngineAt(t, c.Node.Socket, own)
	pace(in, "opened")
	e.ingest("r")
	commit := write(e, 9)
	pace(in, "admitted")
	commit()
	pace(in, "committed")
	e.publish("r", false)
	pace(in, "published")
	write(e, 20)()
	e.publish("r", false)
	pace(in, "grown")
	write(e, 3)()
	e.publish("r", true)
	pace(in, "final")
	<-a.Ended()
}

// onDevices makes arenas on a device. flush copies what is in host memory to them.
func onDevices(t testing.TB, library string, host map[id.Rank]memory.Arena) (arenas map[id.Rank]memory.Arena, flush func()) {
	t.Helper()
	r, err := cuda.Open(cuda.Options{Library: library})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	arenas = make(map[id.Rank]memory.Arena)
	for rank, h := range host {
		a, err := r.Alloc(r.GPUs()[0].UUID, h.Size())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { a.Close() })
		arenas[rank] = a
	}
	return arenas, func() {
		for rank, h := range host {
			b := h.(*memory.Region).Bytes()
			if err := arenas[rank].(memory.Stager).WriteFrom(b, []memory.Segment{{Bytes: int64(len(b))}}).Wait(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// openEngineAt opens a session at a socket, on host memory that the engine has.
func openEngineAt(t testing.TB, socket string, own map[id.Rank]memory.Arena) *engine {
	t.Helper()
	c, err := client.Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	e := &engine{t: t, client: c, events: make(chan *kvferrypb.Event, 1024), arenas: make(map[id.Rank]*memory.Region)}
	if e.Session, err = c.Open(t.Context(), client.OpenOptions{Engine: t.Name(), OnEvent: e.onEvent}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	for r, a := range own {
		e.arenas[r] = a.(*memory.Region)
	}
	return e
}

// TestEngineKilled: whenever the process of the engine ends, the node ends with an
// error that says so, its readers are told, and nothing is left.
func TestEngineKilled(t *testing.T) {
	for _, at := range []string{"lent", "opened", "admitted", "committed", "published", "grown", "final"} {
		t.Run(at, func(t *testing.T) {
			t.Parallel()
			decode := startNode(t, "decode", nil)
			c := configure(t, "prefill", decode, byEngine)
			engine := startProcess(t, "TestEngineProcess", "KVFERRY_TEST_ENGINE="+writeConfig(t, c))
			if got := engine.next(); got != "begun" {
				t.Fatal(got)
			}
			engine.proceed()
			prefill := startWith(t, c, nil)
			awaitPeers(t, prefill, decode)
			d := openEngine(t, decode)
			d.ingest("r")
			engine.upTo(at)
			published := slices.Index([]string{"published", "grown", "final"}, at)
			want := []int{9, 29, 32}
			if published >= 0 {
				if res, err := d.retrieve("r", "", want[published], deadline); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
					t.Fatalf("%v, %v", res, err)
				}
				if got := d.verify("r", "main"); got != want[published] {
					t.Errorf("%d tokens have landed, want %d", got, want[published])
				}
			}
			waits := d.retrieving("r", "", 1000)
			engine.kill()
			<-prefill.Done()
			if err := prefill.Err(); !errors.Is(err, node.ErrUnlent) {
				t.Errorf("the node ended with %v", err)
			}
			prefill.close()
			if published < 0 {
				d.remove("r") // it would wait for another one to publish it
			}
			if got := <-waits; got.err == nil && at != "final" {
				t.Errorf("the reader got %v", got.res)
			}
			if _, err := os.Stat(c.Node.Socket); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the socket is left: %v", err)
			}
		})
	}
	t.Run("before it has lent anything", func(t *testing.T) {
		c := configure(t, "prefill", nil, byEngine)
		engine := startProcess(t, "TestEngineProcess", "KVFERRY_TEST_ENGINE="+writeConfig(t, c))
		engine.next()
		engine.kill()
		newLender(t, c).start(t, c) // it waits for the next
	})
}

// TestEngineOnADevice: an engine lends memory of a device, the node imports it, and
// a peer has every byte. When the engine is killed nothing of the import is left.
func TestEngineOnADevice(t *testing.T) {
	w := cudatest.Use(t, gpuWorld())
	decode := startNode(t, "decode", nil, overTCP)
	c := configure(t, "prefill", decode, byEngine, overTCP, [2]string{"arena.cuda_library", w.Library()}, [2]string{"arena.ranks", "0"})
	env := append(w.Env(), "KVFERRY_TEST_ENGINE="+writeConfig(t, c), "KVFERRY_TEST_CUDA="+w.Library())
	engine := startProcess(t, "TestEngineProcess", env...)
	if got := engine.next(); got != "begun" {
		t.Fatal(got)
	}
	engine.proceed()
	prefill := startWith(t, c, nil)
	awaitPeers(t, prefill, decode)
	d := openEngine(t, decode)
	d.ingest("r")
	for i, at := range []string{"published", "grown", "final"} {
		engine.upTo(at)
		want, least := []int{9, 29, 32}[i], []int{9, 29, 0}[i]
		if res, err := d.retrieve("r", "", least, deadline); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
			t.Fatalf("%s: %v, %v", at, res, err)
		}
		if got := d.verify("r", "main"); got != want {
			t.Errorf("%s: %d tokens have landed, want %d", at, got, want)
		}
		if at != "final" {
			engine.proceed()
		}
	}
	if n := w.Counts().Processes[os.Getpid()].Imports; n != 1 {
		t.Errorf("%d imports, want that of the engine's memory", n)
	}
	engine.kill()
	<-prefill.Done()
	if err := prefill.Err(); !errors.Is(err, node.ErrUnlent) {
		t.Errorf("the node ended with %v", err)
	}
	prefill.close()
	if n := w.Counts().Processes[os.Getpid()].Imports; n != 0 {
		t.Errorf("%d imports are left", n)
	}
}

// TestDaemonProcess is no test: it is a node of which the others kill the process.
func TestDaemonProcess(t *testing.T) {
	file := os.Getenv("KVFERRY_TEST_DAEMON")
	if file == "" {
		t.Skip("it is run by other tests")
	}
	c, err := config.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	startWith(t, c, nil)
	pace(bufio.NewReader(os.Stdin), "serves")
}

// TestDaemonKilled: the engine sees that nobody guards its pages any more, and
// ends every publication itself; a reader that still maps the table sees it. The
// next life takes the same memory.
func TestDaemonKilled(t *testing.T) {
	c := configure(t, "prefill", nil, byEngine, overTCP) // no socket of shm is left
	file := writeConfig(t, c)
	l := newLender(t, c)
	theirs, err := memory.MapSealTable(duplicate(t, l.seals.Region().File()), false)
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	var last id.Incarnation
	for range 2 {
		daemon := startProcess(t, "TestDaemonProcess", "KVFERRY_TEST_DAEMON="+file)
		a, err := client.Adopt(t.Context(), c.Node.Socket, l.arenas, l.seals)
		if err != nil {
			t.Fatal(err)
		}
		if daemon.next() != "serves" || a.Life().Incarnation <= last {
			t.Fatalf("life %v follows %d", a.Life(), last)
		}
		last = a.Life().Incarnation
		if n := holding(theirs); n != 0 {
			t.Errorf("%d words hold at the begin of a life", n)
		}
		e := openEngineAt(t, c.Node.Socket, l.arenas)
		e.ingest("r")
		e.write("r", 20)
		e.publish("r", true)
		if n := holding(theirs); n != 1 {
			t.Errorf("%d words hold, want that of the publication", n)
		}
		daemon.kill()
		<-a.Ended()
		for i := range uint32(memory.Words) {
			if v, _ := theirs.Load(i); v != 0 {
				t.Fatalf("a reader still sees word %d hold", i)
			}
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
}

func duplicate(t testing.TB, f *os.File) *os.File {
	t.Helper()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), f.Name())
}

// writeConfig puts a configuration into a file for another process.
func writeConfig(t testing.TB, c *config.Config) string {
	t.Helper()
	b, err := c.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "node.yaml")
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}
