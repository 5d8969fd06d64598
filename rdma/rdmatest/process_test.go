//go:build linux && cgo && rdma && (amd64 || arm64)

package rdmatest_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/rdma/rdmatest"
)

const role = "RDMATEST_ROLE" // of a child process

func TestMain(m *testing.M) {
	switch os.Getenv(role) {
	case "owner":
		memory := must(syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANONYMOUS))
		beOwner(memory, func(pd *rdma.PD) (*rdma.Region, error) { return pd.Register(memory, rdma.RemoteRead) })
	case "dma-buf":
		fd := must(unix.MemfdCreate("dma-buf", 0))
		must(0, unix.Ftruncate(fd, size))
		memory := must(syscall.Mmap(fd, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED))
		beOwner(memory, func(pd *rdma.PD) (*rdma.Region, error) { return pd.RegisterDMABuf(fd, 0, size, 1<<40, rdma.RemoteRead) })
	case "heap":
		beHeap()
	default:
		goleak.VerifyTestMain(m)
	}
}

// must ends a child process that cannot do its part.
func must[T any](v T, err error) T {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return v
}

// beOwner serves reads of memory that it fills and registers: for every line "QPN" it makes a queue pair for
// that one of the reader on double1, and answers "QPN ADDRESS KEY".
func beOwner(memory []byte, register func(*rdma.PD) (*rdma.Region, error)) {
	device := must(rdma.Open("double0"))
	pd := must(device.NewPD())
	paint(memory, 13, 11)
	region := must(register(pd))
	s := &side{device: device, pd: pd, region: region, port: must(device.Port(1))}
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		var num uint32
		must(fmt.Sscan(in.Text(), &num))
		qp := must(pd.NewQP(rdma.QPOptions{}))
		must(0, qp.Connect(s.path(num, netip.MustParseAddr("10.77.0.2"), 0)))
		fmt.Println(qp.Num(), region.Addr(), region.Keys()[0].R)
	}
}

// What a heap has.
const heapContexts, heapPairs = 50, 2000

// beHeap leaves much behind when it is killed.
func beHeap() {
	for range heapContexts {
		device := must(rdma.Open("double0"))
		pd := must(device.NewPD())
		memory := must(syscall.Mmap(-1, 0, 4096, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANONYMOUS))
		must(pd.Register(memory, rdma.RemoteRead))
		for range heapPairs / heapContexts {
			must(pd.NewQP(rdma.QPOptions{Depth: 4}))
		}
	}
	fmt.Println("ready")
	io.Copy(io.Discard, os.Stdin)
}

type child struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Scanner
}

func start(tb testing.TB, w *rdmatest.World, as string) *child {
	tb.Helper()
	c := &child{cmd: exec.CommandContext(tb.Context(), os.Args[0])}
	c.cmd.Env = append(append(os.Environ(), w.Env()...), role+"="+as)
	c.cmd.Stderr = os.Stderr
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		tb.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	c.lines = bufio.NewScanner(out)
	if err := c.cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.kill() })
	return c
}

func (c *child) kill() {
	c.cmd.Process.Kill()
	c.cmd.Wait()
}

// line is what it says next. If it takes for ever, it is made to say where it
// hangs, and to end.
func (c *child) line(tb testing.TB) string {
	tb.Helper()
	hangs := time.AfterFunc(2*time.Minute, func() { c.cmd.Process.Signal(syscall.SIGQUIT) })
	defer hangs.Stop()
	if !c.lines.Scan() {
		tb.Fatal("a process has ended")
	}
	return c.lines.Text()
}

// remote is a pair whose owner is another process.
func remote(tb testing.TB, w *rdmatest.World) (*pair, *child) {
	tb.Helper()
	c := start(tb, w, "owner")
	p := &pair{reader: open(tb, "double1", size, rdma.LocalWrite)}
	c.join(tb, p)
	return p, c
}

// join makes a queue pair on both sides, and p's ops those of the child.
func (c *child) join(tb testing.TB, p *pair) {
	tb.Helper()
	p.readerQP = p.reader.qp(tb, rdma.QPOptions{Events: true})
	fmt.Fprintln(c.in, p.readerQP.Num())
	var num, key uint32
	var addr uint64
	if _, err := fmt.Sscan(c.line(tb), &num, &addr, &key); err != nil {
		tb.Fatal(err)
	}
	p.remoteAddr, p.remoteKey = addr, key
	if err := p.readerQP.Connect(p.reader.path(num, netip.MustParseAddr("10.77.0.1"), 0)); err != nil {
		tb.Fatal(err)
	}
}

func wantOwners(tb testing.TB, memory []byte) {
	tb.Helper()
	want := make([]byte, len(memory))
	paint(want, 13, 11)
	if !bytes.Equal(memory, want) {
		tb.Fatal("wrong bytes")
	}
}

func TestReadBetweenProcesses(t *testing.T) {
	w := rdmatest.Use(t)
	p, c := remote(t, w)
	if _, err := p.read(p.pages(128, 64<<10)); err != nil {
		t.Fatal(err)
	}
	wantOwners(t, p.reader.memory)
	n := w.Counts()
	me, owner := n.Processes[os.Getpid()], n.Processes[c.cmd.Process.Pid]
	if me.ReadBytes != size || owner.ServedBytes != size || owner.ReadBytes != 0 || owner.QPs != 1 || owner.Regions != 1 || me.Contexts != 1 || n.QPs != 2 || n.Contexts != 2 {
		t.Errorf("%+v", n)
	}
}

// The owner runs no instruction for a read.
func TestStoppedOwnerIsRead(t *testing.T) {
	w := rdmatest.Use(t)
	p, c := remote(t, w)
	if err := c.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if _, err := p.read(p.pages(64, 64<<10)); err != nil {
		t.Fatal(err)
	}
	wantOwners(t, p.reader.memory[:4<<20])
}

func TestKilledOwnerEndsReads(t *testing.T) {
	w := rdmatest.Use(t)
	const window = 100 * time.Millisecond
	w.Set(rdmatest.Faults{RetryWindow: window, Delay: 40 * time.Millisecond}) // 10 s in all
	p, c := remote(t, w)
	done := make(chan error, 1)
	var st rdma.Stats
	go func() {
		var err error
		st, err = p.read(p.pages(4096, 1024))
		done <- err
	}()
	waitFor(t, "bytes", func() bool { return w.Counts().ReadBytes > 100<<10 })
	killed := time.Now()
	c.kill()
	wantStatus(t, <-done, rdma.StatusRetryExcErr)
	if took := time.Since(killed); took < window || took > 10*time.Second {
		t.Errorf("the read ended %v after the owner", took)
	}
	if st.Done < 100 || st.Done > 4000 {
		t.Errorf("%+v", st)
	}
	wantOwners(t, p.reader.memory[:st.Done*1024])
	if n := w.Counts(); n.QPs != 1 || n.Processes[c.cmd.Process.Pid].QPs != 0 {
		t.Errorf("%+v", n)
	}
	// And another life of the owner is read at once.
	w.Clear()
	again := start(t, w, "owner")
	again.join(t, p)
	if _, err := p.read(p.pages(64, 64<<10)); err != nil {
		t.Fatal(err)
	}
}

// What processes that were killed have left takes nobody's place.
func TestLeftoversAreReclaimed(t *testing.T) {
	w := rdmatest.Use(t)
	const processes = 4 // which have nearly all that there is room for
	heaps := make([]*child, processes)
	for i := range heaps {
		heaps[i] = start(t, w, "heap")
	}
	for _, c := range heaps {
		c.line(t)
	}
	if n := w.Counts(); n.QPs != processes*heapPairs || n.Contexts != processes*heapContexts {
		t.Fatalf("%+v", n.Tally)
	}
	for _, c := range heaps {
		c.kill()
	}
	if n := w.Counts(); n.QPs != 0 || n.Contexts != 0 || n.Regions != 0 {
		t.Fatalf("%+v", n.Tally)
	}
	s := open(t, "double0", 4096, rdma.LocalWrite)
	for i := range 1000 {
		q, err := s.pd.NewQP(rdma.QPOptions{Depth: 1})
		if err != nil {
			t.Fatal(i, err)
		}
		t.Cleanup(func() { closed(t, q) })
	}
}

// waitFor polls until ok, for at most 20 s.
func waitFor(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(200 * time.Microsecond) {
		if time.Now().After(end) {
			tb.Fatalf("no %s", what)
		}
	}
}

// A closed device leaves no thread and no descriptor.
func TestNothingIsLeft(t *testing.T) {
	count := func() (fds, engines int) {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		tasks, err := filepath.Glob("/proc/self/task/*/comm")
		if err != nil {
			t.Fatal(err)
		}
		for _, task := range tasks {
			if name, err := os.ReadFile(task); err == nil && strings.HasPrefix(string(name), "verbs-engine") {
				engines++
			}
		}
		return len(list), engines
	}
	w := rdmatest.Use(t)
	fds, engines := count()
	t.Run("use", func(t *testing.T) {
		p, _ := remote(t, w)
		if _, err := p.read(p.pages(16, 4096)); err != nil {
			t.Fatal(err)
		}
		if _, n := count(); n != engines+1 {
			t.Errorf("%d engines, want one", n)
		}
	})
	if f, e := count(); f > fds || e != engines || e != 0 {
		t.Errorf("%d descriptors and %d engines, before %d and %d", f, e, fds, engines)
	}
	if n := w.Counts(); n.Contexts+n.PDs+n.Regions+n.CQs+n.QPs+n.Channels != 0 {
		t.Errorf("%+v", n)
	}
}

// Where the environment names no world, the library has no device.
func TestNoWorldNoDevice(t *testing.T) {
	w := rdmatest.Use(t)
	if names, err := rdma.Devices(); err != nil || len(names) != 2 {
		t.Errorf("%v, %v", names, err)
	}
	t.Setenv("KVFERRY_VERBS_DOUBLE", "")
	if names, _ := rdma.Devices(); len(names) != 0 {
		t.Errorf("devices %v", names)
	}
	t.Setenv("KVFERRY_VERBS_DOUBLE", w.Dir()+"/none")
	if names, err := rdma.Devices(); err == nil || errors.Is(err, os.ErrExist) {
		t.Errorf("devices %v of a world that is not there", names)
	}
}
