//go:build linux && cgo && cuda && (amd64 || arm64)

package cuda_test

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/cuda/internal/driver"
	"github.com/kvferry/kvferry/cuda/internal/ptx"
	"github.com/kvferry/kvferry/internal/memory"
)

// gpu opens a real driver, as the loader finds it, and its first device. Without
// KVFERRY_CUDA_GPU the test is skipped.
func gpu(tb testing.TB, o cuda.Options) (*cuda.Runtime, cuda.GPU) {
	tb.Helper()
	if os.Getenv("KVFERRY_CUDA_GPU") == "" {
		tb.Skip("for machines with a GPU: KVFERRY_CUDA_GPU=1")
	}
	r, err := cuda.Open(o)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := r.Close(); err != nil {
			tb.Errorf("close: %v", err)
		}
	})
	return r, r.GPUs()[0]
}

// onGPU allocates an arena, which ends with the test.
func onGPU(tb testing.TB, r *cuda.Runtime, g cuda.GPU, bytes int64) *cuda.Arena {
	tb.Helper()
	a, err := r.Alloc(g.UUID, bytes)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { a.Close() })
	return a
}

// row is a line of the table at the end of scripts/gpu-check.sh.
func row(what, found string) { fmt.Printf("| %-44s | %s\n", what, found) }

func answer(err error) string {
	if err == nil {
		return "yes"
	}
	return err.Error()
}

func perSecond(bytes int64, took time.Duration) string {
	return fmt.Sprintf("%.1f GB/s", float64(bytes)/took.Seconds()/1e9)
}

// What the code takes for granted of a device, and what is chosen by it. It says
// what it finds, and fails only if it cannot look.
func TestGPUProbe(t *testing.T) {
	begin := time.Now()
	r, g := gpu(t, cuda.Options{})
	opened := time.Since(begin)
	begin = time.Now()
	a := onGPU(t, r, g, 64<<20)
	row("device", fmt.Sprintf("%s, %s, %d MiB, NUMA node %d", g.Name, g.UUID, g.Bytes>>20, g.NUMANode))
	row("open the driver, then a context and 64 MiB", fmt.Sprintf("%v, %v", opened.Round(time.Millisecond), time.Since(begin).Round(time.Millisecond)))
	c, err := r.Capabilities(g.UUID)
	if err != nil {
		t.Fatal(err)
	}
	row("capabilities", fmt.Sprintf("%+v", c))
	row("attributes: dma-buf, write order, flush by", fmt.Sprintf("%d, %d, %d", driver.Device(g.Ordinal).Attribute(driver.DMABufs),
		driver.Device(g.Ordinal).Attribute(driver.WritesOrdering), driver.Device(g.Ordinal).Attribute(driver.FlushOptions)))

	probeContext(t, g, a)
	probeSecondContext(t, g)
	probeDestroy(t)
	probeDMABuf(t, r, g, a)
	probePin(t, a)
	probeBesidePin(t)
	probeImport(t, r, g)
	probeBatch(t) // which has crashed drivers
}

// What is asked of the driver itself, in the context of the device.
func probeContext(t *testing.T, g cuda.GPU, a *cuda.Arena) {
	ctx, err := driver.Retain(driver.Device(g.Ordinal))
	if err != nil {
		t.Fatal(err)
	}
	defer ctx.Release()
	own := func() error {
		h, err := driver.IPCHandle(uint64(a.Address()))
		if err != nil {
			return err
		}
		p, err := driver.IPCOpen(h)
		if err == nil {
			err = driver.IPCClose(p)
		}
		return err
	}
	row("open our own handle in this process", answer(ctx.Do(own)))
	err = ctx.Do(func() error {
		begin := time.Now()
		k, err := driver.LoadKernel(ptx.CopyList, "kv_copy_list")
		if err != nil {
			return err
		}
		row("the driver compiles our PTX in", time.Since(begin).Round(time.Microsecond).String())
		return k.Unload()
	})
	if err != nil {
		row("the driver compiles our PTX", answer(err))
	}
	err = ctx.Do(func() error {
		s, err := driver.NewStream()
		if err != nil {
			return err
		}
		defer s.Destroy()
		e, err := driver.NewEvent()
		if err != nil {
			return err
		}
		defer e.Destroy()
		if err := e.Record(s); err != nil {
			return err
		}
		if err := e.Synchronize(); err != nil {
			return err
		}
		const n = 10000
		begin := time.Now()
		for range n {
			if passed, err := e.Passed(); err != nil || !passed {
				return fmt.Errorf("an event that was waited for: passed %v, %w", passed, err)
			}
		}
		query := time.Since(begin) / n
		begin = time.Now()
		for range n / 10 {
			if err := e.Record(s); err != nil {
				return err
			}
			if err := e.Synchronize(); err != nil {
				return err
			}
		}
		row("an event: query, record and wait", fmt.Sprintf("%v, %v", query, time.Since(begin)/(n/10)))
		return nil
	})
	if err != nil {
		row("events", answer(err))
	}
}

func probeDMABuf(t *testing.T, r *cuda.Runtime, g cuda.GPU, a *cuda.Arena) {
	try := func(a *cuda.Arena, offset, n int64) string {
		f, at, err := a.DMABuf(offset, n)
		if err != nil {
			return err.Error()
		}
		defer f.Close()
		return fmt.Sprintf("yes, at byte %d", at)
	}
	row("dma-buf of an allocation", try(a, 0, a.Size()))
	row("dma-buf of its middle", try(a, 1<<20, 2<<20))
	chunks, err := r.AllocChunks(g.UUID, 8<<20, 2<<20)
	if err != nil {
		row("memory by descriptors", answer(err))
		return
	}
	defer chunks.Close()
	row("dma-buf of one chunk", try(chunks, 0, 2<<20))
	row("dma-buf over several chunks", try(chunks, 0, 8<<20))
	h, files, err := chunks.Export()
	for _, f := range files {
		f.Close()
	}
	row("export of chunks", fmt.Sprintf("kind %d, %d files, %s", h.Kind, len(files), answer(err)))
	if t.Failed() {
		t.Log("see above")
	}
}

func probePin(t *testing.T, a *cuda.Arena) {
	for _, kind := range []struct {
		name string
		make func() (b []byte, free func() error, err error)
	}{
		{"pin 256 MiB of the plain pages", func() ([]byte, func() error, error) { return regionOf(memory.NewPlain("pin", pinBytes)) }},
		{"pin 256 MiB of an arena's pages", func() ([]byte, func() error, error) { return regionOf(memory.New("pin", pinBytes)) }},
		{"pin 256 MiB that a peer's file lets us read", readable},
		{"pin 256 MiB of no file, plain pages", func() ([]byte, func() error, error) { return anonymous(unix.MADV_NOHUGEPAGE) }},
		{"pin 256 MiB of no file, huge pages", func() ([]byte, func() error, error) { return anonymous(unix.MADV_HUGEPAGE) }},
	} {
		b, free, err := kind.make()
		if err != nil {
			row(kind.name, answer(err))
			continue
		}
		begin := time.Now()
		unpin, err := a.Pin(b)
		took := time.Since(begin)
		if err != nil {
			row(kind.name, answer(err))
		} else {
			row(kind.name, perSecond(pinBytes, took))
			if err := unpin(); err != nil {
				t.Errorf("unpin: %v", err)
			}
		}
		if err := free(); err != nil {
			t.Error(err)
		}
	}
}

const pinBytes = 256 << 20

// Host memory that is there, of all kinds that may be pinned.

func regionOf(r *memory.Region, err error) ([]byte, func() error, error) {
	if err != nil {
		return nil, nil, err
	}
	clear(r.Bytes())
	return r.Bytes(), r.Close, nil
}

func readable() ([]byte, func() error, error) {
	r, err := memory.NewPlain("pin", pinBytes)
	if err != nil {
		return nil, nil, err
	}
	defer r.Close()
	fd, err := unix.FcntlInt(r.File().Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	read, err := memory.Map(os.NewFile(uintptr(fd), "pin"), pinBytes, false)
	if err != nil {
		return nil, nil, err
	}
	return read.Bytes(), read.Close, nil
}

func anonymous(advice int) ([]byte, func() error, error) {
	b, err := unix.Mmap(-1, 0, pinBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, nil, err
	}
	if err := unix.Madvise(b, advice); err != nil {
		return nil, nil, errors.Join(err, unix.Munmap(b))
	}
	clear(b)
	return b, func() error { return unix.Munmap(b) }, nil
}

// What runs on a device may wait for a driver that pins.
func probeBesidePin(t *testing.T) {
	r, g := gpu(t, cuda.Options{Scatter: 128 << 10})
	a := onGPU(t, r, g, 4<<20)
	w := newWrites(t, a, 8<<10, 128)
	times := func(on func() bool) string {
		var list []time.Duration
		for on() {
			begin := time.Now()
			w.once(t)
			list = append(list, time.Since(begin))
		}
		slices.Sort(list)
		return fmt.Sprintf("%v, %v, %v", list[len(list)/2].Round(time.Microsecond), list[len(list)*99/100].Round(time.Microsecond), list[len(list)-1].Round(time.Microsecond))
	}
	end := time.Now().Add(300 * time.Millisecond)
	row("1 MiB by the kernel: median, 99 %, worst", times(func() bool { return time.Now().Before(end) }))
	b, free, err := regionOf(memory.NewPlain("pin", pinBytes))
	if err != nil {
		row("the same while memory is pinned", answer(err))
		return
	}
	pinned := make(chan error, 1)
	go func() {
		var err error
		for end := time.Now().Add(300 * time.Millisecond); err == nil && time.Now().Before(end); {
			var unpin func() error
			if unpin, err = a.Pin(b); err == nil {
				err = unpin()
			}
		}
		pinned <- err
	}()
	row("the same while memory is pinned", times(func() bool { return len(pinned) == 0 }))
	if err := errors.Join(<-pinned, free()); err != nil {
		t.Error(err)
	}
}

// probeImport has another process import 1 GiB, or what the device has, and reads
// there what was freed here.
func probeImport(t *testing.T, r *cuda.Runtime, g cuda.GPU) {
	bytes := min(int64(1<<30), g.Bytes/4)
	a := onGPU(t, r, g, bytes)
	text := []byte("written before the export")
	wait(t, a.WriteFrom(text, whole(len(text))))
	h, files, err := a.Export()
	if err != nil || len(files) > 0 {
		row("import in another process", fmt.Sprintf("%v, %d files", err, len(files)))
		return
	}
	o := spawn(t, "adopt", ourselves(t, "TestGPUAdopt", "KVFERRY_CUDA_ADOPT="+hex.EncodeToString(h.Append(nil))))
	said, _ := o.next()
	row("import in another process", said)
	if err := a.Close(); err != nil {
		row("free while it is imported", answer(err))
	}
	o.tell("again")
	said, _ = o.next()
	row("what was freed, read by its importer", said)
	row("the importer", answer(o.end()))
}

// TestGPUAdopt is the other process: it imports the arena whose handle it was
// given, says what it reads of it, and reads it again for every line that it is
// told. scripts/gpu/torch_ipc.py has a tensor of PyTorch adopted by it.
func TestGPUAdopt(t *testing.T) {
	text := os.Getenv("KVFERRY_CUDA_ADOPT")
	if text == "" {
		t.Skip("the other process of TestGPUProbe and of scripts/gpu/torch_ipc.py")
	}
	r, _ := gpu(t, cuda.Options{})
	h, err := adopted(text)
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	a, err := r.Import(h, nil)
	took := time.Since(begin)
	if err != nil {
		fmt.Println("adopt:", err)
		return
	}
	defer a.Close()
	read := func() string {
		b := make([]byte, 25)
		if err := a.ReadInto(b, whole(len(b))).Wait(); err != nil {
			return err.Error()
		}
		if i := bytes.IndexByte(b, 0); i >= 0 {
			b = b[:i]
		}
		return fmt.Sprintf("%q", b)
	}
	f, _, err := a.DMABuf(0, a.Size())
	if err == nil {
		f.Close()
	}
	fmt.Printf("adopt: %d MiB in %v, %s; dma-buf of it: %s\n", a.Size()>>20, took.Round(time.Microsecond), read(), answer(err))
	for in := bufio.NewReader(os.Stdin); ; {
		line, err := in.ReadString('\n')
		if err == io.EOF {
			return
		}
		if b, ok := strings.CutPrefix(strings.TrimSpace(line), "write "); ok {
			if err := a.WriteFrom([]byte(b), whole(len(b))).Wait(); err != nil {
				t.Error(err)
			}
		}
		fmt.Println("adopt:", read())
	}
}

// adopted reads a handle: our wire form, or "UUID IPC OFFSET BYTES" as somebody
// else's program has it from the driver.
func adopted(text string) (cuda.Handle, error) {
	var id, ipc string
	h := cuda.Handle{Kind: cuda.Legacy}
	if n, err := fmt.Sscan(text, &id, &ipc, &h.Offset, &h.Bytes); n == 4 && err == nil {
		b, err := hex.DecodeString(ipc)
		if err != nil || copy(h.IPC[:], b) != len(h.IPC) {
			return h, fmt.Errorf("%d bytes of a handle: %w", len(b), err)
		}
		h.UUID, err = cuda.ParseUUID(id)
		return h, err
	}
	b, err := hex.DecodeString(text)
	if err != nil {
		return h, err
	}
	return cuda.ParseHandle(b)
}
