//go:build linux && cgo && rdma && (amd64 || arm64)

package rdma_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/rdma/rdmatest"
)

func TestDevice(t *testing.T) {
	f := newFabric(t)
	names, err := rdma.Devices()
	if err != nil || !strings.Contains(strings.Join(names, " "), f.owner) {
		t.Fatalf("devices %v, %v", names, err)
	}
	d, err := rdma.Open(f.owner)
	if err != nil {
		t.Fatal(err)
	}
	port, err := d.Port(1)
	if err != nil || !port.Active || port.State != "ACTIVE" || port.MaxMsg == 0 || port.ActiveMTU.Bytes() == 0 {
		t.Errorf("port %+v, %v", port, err)
	}
	gids, err := d.GIDs(1)
	if err != nil || len(gids) == 0 {
		t.Errorf("GIDs %v, %v", gids, err)
	}
	l := d.Limits()
	t.Logf("%s: %+v, %+v, GIDs %v, NUMA node %d", d.Name(), port, l, gids, d.NUMANode())
	if l.MaxQPWR < 2 || l.MaxCQE < 2 || l.MaxSGE < 1 || l.MaxMR < 1 || l.MaxReadsServed < 1 || l.MaxReadsInitiated < 1 {
		t.Errorf("limits %+v", l)
	}
	for _, n := range []int{-1, 0, 77, 256} {
		if p, err := d.Port(n); err == nil {
			t.Errorf("port %d: %+v", n, p)
		}
	}
	if _, err := rdma.Open("nothing0"); err == nil || errors.Is(err, rdma.ErrUnavailable) || !strings.Contains(err.Error(), f.owner) {
		t.Errorf("a device that there is not: %v", err)
	}
	if err := rdma.Load("/nowhere/libibverbs.so.1"); err == nil {
		t.Error("another library was loaded")
	}
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := rdma.Load(pipe); !errors.Is(err, rdma.ErrUnavailable) || !strings.Contains(err.Error(), pipe) {
		t.Errorf("a pipe: %v", err)
	}
	for range 2 {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := d.Port(1); !errors.Is(err, os.ErrClosed) {
		t.Errorf("port of a closed device: %v", err)
	}
	if _, err := d.NewPD(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("domain of a closed device: %v", err)
	}
}

// What still has children says so, and stays open.
func TestChildrenFirst(t *testing.T) {
	p := newPair(t, 1<<20)
	q, _ := p.connect(t, rdma.QPOptions{})
	for _, close := range []func() error{p.reader.dev.Close, p.reader.pd.Close, p.owner.dev.Close, p.owner.pd.Close} {
		if err := close(); !errors.Is(err, syscall.EBUSY) || !strings.Contains(err.Error(), "are open") {
			t.Errorf("error %v", err)
		}
	}
	pages := p.scatter(2, 4096, 4096)
	p.wipe()
	if _, err := q.Read(t.Context(), p.ops(pages), patient); err != nil {
		t.Error(err)
	}
	p.verify(t, pages)
}

func TestRegister(t *testing.T) {
	f := newFabric(t)
	n := newNode(t, f.owner, 1<<20, rdma.RemoteRead)
	r := n.region
	if r.Len() != 1<<20 || len(r.Keys()) != int((r.Len()-1)/r.SliceBytes())+1 || r.SliceBytes()%uint64(os.Getpagesize()) != 0 {
		t.Errorf("region of %d bytes, slices of %d, keys %v", r.Len(), r.SliceBytes(), r.Keys())
	}
	if _, err := n.pd.Register(nil, rdma.RemoteRead); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("no memory: %v", err)
	}
	if f.real() { // the double pins nothing
		hole := mapped(t, 1<<20)
		if err := unix.Mprotect(hole[1<<19:], unix.PROT_NONE); err != nil {
			t.Fatal(err)
		}
		if _, err := n.pd.Register(hole, rdma.LocalWrite); err == nil || !strings.Contains(err.Error(), "register 1048576 bytes of memory on "+f.owner) {
			t.Errorf("memory that is not there: %v", err)
		}
	}
	// Addresses of a device, which are none of this process.
	addr, err := n.pd.RegisterRange(1<<45, 1<<20, rdma.LocalWrite|rdma.RemoteRead)
	switch {
	case f.real(): // no module of the kernel knows them
		if err == nil || !strings.Contains(err.Error(), "register 1048576 bytes of device memory on "+f.owner) || !strings.Contains(err.Error(), "module") {
			t.Errorf("addresses that nobody knows: %v", err)
		}
	case err != nil:
		t.Error(err)
	default:
		if addr.Addr() != 1<<45 || addr.Len() != 1<<20 || len(addr.Keys()) == 0 {
			t.Errorf("region of %d bytes at %#x, keys %v", addr.Len(), addr.Addr(), addr.Keys())
		}
		closeAtEnd(t, "range", addr.Close)
	}
	if _, err := n.pd.RegisterRange(^uint64(0)-10, 100, rdma.RemoteRead); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("addresses that overflow: %v", err)
	}
	if _, err := n.pd.RegisterDMABuf(0, 4096, 4096, 4096+8, rdma.RemoteRead); !errors.Is(err, syscall.EINVAL) || !strings.Contains(err.Error(), "within a page") {
		t.Errorf("offset and address differ within a page: %v", err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if _, err := n.pd.RegisterDMABuf(int(null.Fd()), 0, 4096, 4096, rdma.RemoteRead); err == nil || !strings.Contains(err.Error(), "dma-buf") {
		t.Errorf("what is no dma-buf: %v", err)
	} else {
		t.Log(err)
	}
}

// A limit of locked memory is named before it is met, and when it is.
func TestMemlockOfTheKernel(t *testing.T) {
	const role = "KVFERRY_MEMLOCK_TEST"
	switch os.Getenv(role) {
	case "limit":
		// The bounding set goes over to what is executed, and binds root too.
		runtime.LockOSThread()
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_IPC_LOCK, 0, 0, 0); err != nil {
			t.Fatal(err)
		}
		if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: 1 << 20, Max: 1 << 20}); err != nil {
			t.Fatal(err)
		}
		t.Setenv(role, "register")
		t.Fatal(syscall.Exec("/proc/self/exe", os.Args, os.Environ()))
	case "register":
		f := newFabric(t)
		small := newNode(t, f.owner, 256<<10, rdma.RemoteRead)
		large := mapped(t, 8<<20)
		early := rdma.CheckMemlock(uint64(len(large)))
		_, err := small.pd.Register(large, rdma.RemoteRead)
		t.Logf("before: %v\nthen: %v", early, err)
		e, ok := errors.AsType[*rdma.MemlockError](early)
		if !ok || e.Need != 8<<20 || e.Limit != 1<<20 || e.Allowed == 0 || e.Allowed > 1<<20-256<<10 {
			t.Errorf("before: %+v, %v", e, early)
		}
		if !errors.Is(err, syscall.ENOMEM) || !strings.Contains(err.Error(), "LimitMEMLOCK=infinity") {
			t.Errorf("then: %v", err)
		}
		return
	}
	if f := newFabric(t); !f.real() {
		t.Skip("the double pins nothing")
	}
	if os.Getuid() != 0 {
		t.Skip("this takes root, who can drop a capability")
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestMemlockOfTheKernel$", "-test.v")
	cmd.Env = append(os.Environ(), role+"=limit")
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil || !bytes.Contains(out, []byte("--- PASS")) {
		t.Error(err)
	}
}

// Nothing is left of what comes and goes.
func TestNothingIsLeft(t *testing.T) {
	p := newPair(t, 1<<20)
	pages := p.scatter(4, 4096, 4096)
	round := func() {
		q, err := p.reader.pd.NewQP(rdma.QPOptions{Events: true})
		if err != nil {
			t.Fatal(err)
		}
		o, err := p.owner.pd.NewQP(rdma.QPOptions{Depth: 1, Events: true})
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(o.Connect(p.owner.path(p.reader, q.Num())), q.Connect(p.reader.path(p.owner, o.Num()))); err != nil {
			t.Fatal(err)
		}
		if _, err := q.Read(t.Context(), p.ops(pages), patient); err != nil {
			t.Error(err)
		}
		r, err := p.reader.pd.Register(p.reader.mem, rdma.LocalWrite)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(q.Fail(), q.Close(), o.Close(), r.Close()); err != nil {
			t.Error(err)
		}
	}
	round()
	files, routines := openFiles(t), runtime.NumGoroutine()
	for range 200 {
		round()
	}
	eventually(t, "as many goroutines as before", func() bool { return runtime.NumGoroutine() <= routines })
	if n := openFiles(t); n > files {
		t.Errorf("%d descriptors, %d before", n, files)
	}
}

func openFiles(tb testing.TB) int {
	tb.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		tb.Fatal(err)
	}
	return len(list)
}

// Watch hears of what happens to the device, keeps it open, and ends with its
// context.
func TestWatch(t *testing.T) {
	f := newFabric(t)
	d, err := rdma.Open(f.owner)
	if err != nil {
		t.Fatal(err)
	}
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	events, ended := make(chan rdma.Event, 1), make(chan error, 1)
	go func() { ended <- d.Watch(ctx, func(e rdma.Event) { events <- e }) }()

	for range 3 {
		f.changeGIDs(t)
		for end := time.After(10 * time.Second); ; {
			select {
			case e := <-events:
				if e.Kind != rdma.GIDChange {
					continue
				}
				if e.Element != 1 || e.Text == "" {
					t.Errorf("event %+v", e)
				}
			case <-end:
				t.Fatal("no event of the GIDs")
			}
			break
		}
	}
	if err := d.Close(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("closed a device that is watched: %v", err)
	}
	cancel(cause)
	if err := <-ended; !errors.Is(err, cause) {
		t.Errorf("ended with %v", err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if err := d.Watch(t.Context(), func(rdma.Event) {}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("watched a closed device: %v", err)
	}
}

// changeGIDs makes the owner's device tell that its address table has changed.
func (f fabric) changeGIDs(tb testing.TB) {
	tb.Helper()
	if !f.real() {
		if err := f.world.Event(f.owner, rdmatest.GIDChange); err != nil {
			tb.Fatal(err)
		}
		return
	}
	dev, err := os.ReadFile("/sys/class/infiniband/" + f.owner + "/ports/1/gid_attrs/ndevs/0")
	if err != nil {
		tb.Skipf("no network device of %s: %v", f.owner, err)
	}
	for _, do := range []string{"add", "del"} {
		if out, err := exec.Command("ip", "address", do, "10.99.77.1/32", "dev", string(bytes.TrimSpace(dev))).CombinedOutput(); err != nil {
			tb.Skipf("no address added to the network device of %s: %v, %s", f.owner, err, out)
		}
	}
}
