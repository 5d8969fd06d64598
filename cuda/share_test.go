package cuda_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/cuda/cudatest"
	"github.com/kvferry/kvferry/internal/memory"
)

// Two runtimes of one process share an arena, as two nodes of a test do. The
// memory lives as long as one of them has it.
func TestOwnExportIsTheSameMemory(t *testing.T) {
	both(t, func(t *testing.T, chunks bool) {
		r, w := open(t, cuda.Options{})
		other, _ := open(t, cuda.Options{})
		a := sharedArena(t, r, chunks)
		h, files := exported(t, a)
		b, err := other.Import(h, files)
		if err != nil {
			t.Fatal(err)
		}
		if b.Size() != a.Size() || other.Stats().Imported != 1 || r.Stats().Arenas != 1 {
			t.Errorf("%d bytes, %+v, %+v", b.Size(), other.Stats(), r.Stats())
		}
		want := make([]byte, shared)
		fill(want, 9)
		wait(t, a.WriteFrom(want, whole(len(want))))
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if !bytes.Equal(content(t, b), want) {
			t.Error("it is other memory")
		}
		nothingTaken(t, w, b)
	})
}

// An engine packs many tensors into one allocation, or spreads one over many
// chunks; an arena is a part of that.
func TestPartOfAnAllocation(t *testing.T) {
	both(t, func(t *testing.T, chunks bool) {
		r, _ := open(t, cuda.Options{})
		engine := sharedArena(t, r, chunks)
		const offset, bytesOf = 2<<20 - 4096, 2<<20 + 8192
		part, err := r.Wrap(engine.GPU().UUID, engine.Address()+offset, bytesOf)
		if err != nil {
			t.Fatal(err)
		}
		defer part.Close()
		h, files := exported(t, part)
		if h.Bytes != bytesOf || (!chunks && h.Offset != offset) || (chunks && len(h.Chunks) != 3) {
			t.Errorf("%+v", h)
		}
		got, err := r.Import(h, files)
		if err != nil {
			t.Fatal(err)
		}
		defer got.Close()
		want := content(t, engine)[offset:][:bytesOf]
		if !bytes.Equal(content(t, part), want) || !bytes.Equal(content(t, got), want) {
			t.Error("other bytes")
		}
		if _, err := r.Wrap(engine.GPU().UUID, engine.Address()+offset, 64<<20); err == nil {
			t.Error("more than the allocation has was taken for an arena")
		}
	})
}

func TestImportRefuses(t *testing.T) {
	r, _ := open(t, cuda.Options{})
	legacy, _ := exported(t, sharedArena(t, r, false))
	chunks := sharedArena(t, r, true)
	for name, tt := range map[string]struct {
		change func(*cuda.Handle)
		files  func([]*os.File) []*os.File
		chunks bool
		is     error
	}{
		"more than there is": {change: func(h *cuda.Handle) { h.Bytes = 6<<20 + 1 }},
		"behind the end":     {change: func(h *cuda.Handle) { h.Offset = 1 << 40 }},
		"before it":          {change: func(h *cuda.Handle) { h.Offset = -1 }},
		"no bytes":           {change: func(h *cuda.Handle) { h.Bytes = 0 }},
		"another device":     {change: func(h *cuda.Handle) { h.UUID[0]++ }, is: cuda.ErrUnavailable},
		"garbage":            {change: func(h *cuda.Handle) { h.IPC = [64]byte{1, 2, 3} }},
		"of no kind":         {change: func(h *cuda.Handle) { h.Kind = 7 }},
		"no chunk":           {chunks: true, change: func(h *cuda.Handle) { h.Chunks = nil }},
		"larger chunks":      {chunks: true, change: func(h *cuda.Handle) { h.Chunks[0] *= 2 }},
		"a file too few":     {chunks: true, files: func(f []*os.File) []*os.File { f[0].Close(); return f[1:] }},
		"a file of another kind": {chunks: true, files: func(f []*os.File) []*os.File {
			f[1].Close()
			null, err := os.Open(os.DevNull)
			if err != nil {
				t.Fatal(err)
			}
			f[1] = null
			return f
		}},
	} {
		t.Run(name, func(t *testing.T) {
			h, files := legacy, []*os.File(nil)
			if tt.chunks {
				h, files = exported(t, chunks)
			}
			if tt.change != nil {
				tt.change(&h)
			}
			if tt.files != nil {
				files = tt.files(files)
			}
			before := r.Stats()
			a, err := r.Import(h, files)
			if err == nil {
				a.Close()
				t.Fatal("it was imported")
			}
			if tt.is != nil && !errors.Is(err, tt.is) {
				t.Errorf("%v", err)
			}
			if now := r.Stats(); now != before {
				t.Errorf("%+v", now)
			}
			for _, f := range files {
				if err := f.Close(); !errors.Is(err, os.ErrClosed) {
					t.Error("a file was left open")
				}
			}
		})
	}
}

func TestDMABufBeginsWhereItSays(t *testing.T) {
	defaultDriver(t)
	both(t, func(t *testing.T, chunks bool) {
		r, _ := open(t, cuda.Options{})
		a := sharedArena(t, r, chunks)
		const n = 4096
		f, at, err := a.DMABuf(0, n)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		b, err := unix.Mmap(int(f.Fd()), 0, 1<<20, unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Munmap(b)
		if !bytes.Equal(b[at:][:n], content(t, a)[:n]) {
			t.Error("other bytes")
		}
		if !chunks {
			g, at, err := a.DMABuf(12345, n)
			if err != nil || at != 12345 {
				t.Fatal(at, err)
			}
			g.Close()
		}
		for _, bad := range [][2]int64{{-1, 1}, {0, 0}, {shared, 1}, {0, shared + 1}, {1 << 62, 1 << 62}} {
			if _, _, err := a.DMABuf(bad[0], bad[1]); !errors.Is(err, memory.ErrNoDMABuf) {
				t.Errorf("%v: %v", bad, err)
			}
		}
		if err := a.Flush(); err != nil {
			t.Error(err)
		}
	})
}

// Chunks that another process lent are not given to cards, and the error says how
// an engine lends none; our own are as any memory of ours.
func TestLentChunksAreOutOfReach(t *testing.T) {
	both(t, func(t *testing.T, chunks bool) {
		r, _ := open(t, cuda.Options{})
		a := sharedArena(t, r, chunks)
		in, err := r.Import(exported(t, a))
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		can, err := r.Look(a.GPU().UUID)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range []*cuda.Arena{a, in} {
			f, _, err := x.DMABuf(0, 65536)
			if err == nil {
				f.Close()
			}
			lent := chunks && x == in
			none := lent || !can.DMABuf
			if lent != errors.Is(err, memory.ErrOutOfReach) || none != errors.Is(err, memory.ErrNoDMABuf) || none != (err != nil) {
				t.Errorf("lent chunks %t: %v", lent, err)
			}
			if lent && !strings.Contains(fmt.Sprint(err), "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False") {
				t.Errorf("%v does not say what to set", err)
			}
		}
	})
}

// No room for what is imported is no fault of who exports it.
func TestImportWithoutMemory(t *testing.T) {
	r, w := open(t, cuda.Options{})
	h, files := exported(t, sharedArena(t, r, true))
	w.Set(cudatest.Faults{Fail: []cudatest.Fail{{Call: "cuMemMap", Code: cudatest.OutOfMemory}}})
	if _, err := r.Import(h, files); !errors.Is(err, cuda.ErrNoMemory) {
		t.Errorf("%v", err)
	}
}
