//go:build linux && cgo && rdma && (amd64 || arm64)

package rdmatest_test

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/rdma/rdmatest"
)

// buffer is the memory of a device as it is handed to others: a file of so many
// bytes, that is mapped here too.
func buffer(tb testing.TB, size int) (*os.File, []byte) {
	tb.Helper()
	fd, err := unix.MemfdCreate("dma-buf", unix.MFD_CLOEXEC)
	if err != nil {
		tb.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "dma-buf")
	tb.Cleanup(func() { f.Close() })
	if err := f.Truncate(int64(size)); err != nil {
		tb.Fatal(err)
	}
	m, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { unix.Munmap(m) })
	return f, m
}

// mappings of dma-bufs in this process.
func mappings(tb testing.TB) int {
	tb.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		tb.Fatal(err)
	}
	return strings.Count(string(maps), "memfd:dma-buf")
}

// What is read is the file's bytes, by the addresses that it was registered with
// and also when its descriptor has been closed; what is read into one lands in
// the file; and nothing beside it is reached.
func TestDMABuf(t *testing.T) {
	w := rdmatest.Use(t)
	p := newPair(t)
	const skip, page = 3*4096 + 256, 4096
	theirs, memory := buffer(t, size+2*skip)
	paint(memory, 11, 13)
	ours, landed := buffer(t, size+2*skip)
	before := mappings(t)
	const iova = 0x7f00_0000_0000 + skip%page // an address that this process does not have
	from, err := p.owner.pd.RegisterDMABuf(int(theirs.Fd()), skip, size, iova, rdma.RemoteRead)
	if err != nil {
		t.Fatal(err)
	}
	to, err := p.reader.pd.RegisterDMABuf(int(ours.Fd()), skip, size, 1<<40+skip%page, rdma.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	if from.Addr() != iova || to.Len() != size {
		t.Errorf("registered %#x, %d bytes", from.Addr(), to.Len())
	}
	theirs.Close()
	ours.Close()
	op := func(local, remote, n uint64) rdma.Op {
		return rdma.Op{Local: to.Addr() + local, Remote: from.Addr() + remote, Len: uint32(n), LKey: to.Keys()[0].L, RKey: from.Keys()[0].R}
	}
	if _, err := p.read([]rdma.Op{op(0, 1<<20, 1<<20), op(1<<20, 0, 1<<20), op(size-100, size-7, 7)}); err != nil {
		t.Fatal(err)
	}
	want := make([]byte, len(landed))
	copy(want[skip:], memory[skip+1<<20:][:1<<20])
	copy(want[skip+1<<20:], memory[skip:][:1<<20])
	copy(want[skip+size-100:], memory[skip+size-7:][:7])
	if !bytes.Equal(landed, want) {
		t.Error("wrong bytes")
	}
	for name, tt := range map[string]struct {
		op   rdma.Op
		want rdma.Status
	}{
		"beyond the owner's":   {op(0, size-1, 2), rdma.StatusRemAccessErr},
		"before the owner's":   {op(0, ^uint64(0), 1), rdma.StatusRemAccessErr},
		"beyond the reader's":  {op(size-1, 0, 2), rdma.StatusLocProtErr},
		"by the file's offset": {rdma.Op{Local: to.Addr(), Remote: skip, Len: 1, LKey: to.Keys()[0].L, RKey: from.Keys()[0].R}, rdma.StatusRemAccessErr},
	} {
		p.connect(t, nil)
		_, err := p.read([]rdma.Op{tt.op})
		if c, ok := errors.AsType[*rdma.CompletionError](err); !ok || c.Status != tt.want {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	// It is gone with its region, from the process too.
	if n := mappings(t); n != before+2 {
		t.Errorf("%d mappings, want %d", n, before+2)
	}
	closed(t, from)
	p.connect(t, nil)
	_, err = p.read([]rdma.Op{op(0, 0, 1)})
	wantStatus(t, err, rdma.StatusRemAccessErr)
	closed(t, to)
	if n := mappings(t); n != before {
		t.Errorf("%d mappings are left, %d before", n, before)
	}
	if n := w.Counts(); n.Regions != 2 {
		t.Errorf("%+v", n.Tally)
	}
}

// What is no dma-buf, or not all there, is refused; and a device that takes none
// says so.
func TestDMABufIsRefused(t *testing.T) {
	w := rdmatest.Use(t, rdmatest.DeviceSpec{Name: "double0", MaxMRSize: 1 << 20})
	s := open(t, "double0", 4096, rdma.RemoteRead)
	f, _ := buffer(t, 1<<20)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for name, tt := range map[string]struct {
		fd                   int
		offset, length, iova uint64
		access               rdma.Access
		faults               rdmatest.Faults
		want                 error
	}{
		"no dma-buf":        {int(null.Fd()), 0, 4096, 4096, rdma.RemoteRead, rdmatest.Faults{}, syscall.EBADF},
		"no descriptor":     {-1, 0, 4096, 4096, rdma.RemoteRead, rdmatest.Faults{}, syscall.EBADF},
		"beyond its end":    {int(f.Fd()), 1 << 20, 4096, 4096, rdma.RemoteRead, rdmatest.Faults{}, syscall.EINVAL},
		"across its end":    {int(f.Fd()), 1<<20 - 4096, 8192, 4096, rdma.RemoteRead, rdmatest.Faults{}, syscall.EINVAL},
		"overflow":          {int(f.Fd()), ^uint64(0) &^ 4095, 8192, 4096, rdma.RemoteRead, rdmatest.Faults{}, syscall.EINVAL},
		"within a page":     {int(f.Fd()), 256, 4096, 4096, rdma.RemoteRead, rdmatest.Faults{}, syscall.EINVAL},
		"remote write only": {int(f.Fd()), 0, 4096, 4096, rdma.RemoteWrite, rdmatest.Faults{}, syscall.EINVAL},
		"takes none":        {int(f.Fd()), 0, 4096, 4096, rdma.RemoteRead, rdmatest.Faults{NoDMABuf: true}, syscall.EOPNOTSUPP},
		"no room":           {int(f.Fd()), 0, 4096, 4096, rdma.RemoteRead, rdmatest.Faults{RegionENOMEM: 1}, syscall.ENOMEM},
	} {
		before := mappings(t)
		w.Set(tt.faults)
		if _, err := s.pd.RegisterDMABuf(tt.fd, tt.offset, tt.length, tt.iova, tt.access); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
		if n := mappings(t); n != before {
			t.Errorf("%s: %d mappings, %d before", name, n, before)
		}
	}
	w.Clear()
	if n := w.Counts().Regions; n != 1 {
		t.Errorf("%d regions, want 1", n)
	}
}

// A dma-buf of another process is read as its memory is, while that process is
// stopped too.
func TestDMABufBetweenProcesses(t *testing.T) {
	w := rdmatest.Use(t)
	c := start(t, w, "dma-buf")
	p := &pair{reader: open(t, "double1", size, rdma.LocalWrite)}
	c.join(t, p)
	if err := c.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if _, err := p.read(p.pages(128, 64<<10)); err != nil {
		t.Fatal(err)
	}
	wantOwners(t, p.reader.memory)
	c.kill()
	w.Set(rdmatest.Faults{RetryWindow: 1e6})
	_, err := p.read(p.pages(1, 64))
	wantStatus(t, err, rdma.StatusRetryExcErr)
}
