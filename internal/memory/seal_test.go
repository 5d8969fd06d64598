package memory_test

import (
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/memory"
)

func newTable(t *testing.T) *memory.SealTable {
	t.Helper()
	table, err := memory.NewSealTable()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { table.Close() })
	return table
}

func TestSealTable(t *testing.T) {
	table := newTable(t)
	for i := range uint32(memory.Words) {
		if v, ok := table.Load(i); v != 0 || !ok {
			t.Fatalf("word %d of a new table = %d, %v, want 0", i, v, ok)
		}
	}
	for i := range uint32(memory.Words) {
		table.Store(i, uint64(i)<<32|1)
	}
	for i := range uint32(memory.Words) {
		if v, ok := table.Load(i); v != uint64(i)<<32|1 || !ok {
			t.Fatalf("word %d = %#x, %v", i, v, ok)
		}
	}
	if got := table.Region().Size(); got < memory.Words*8 {
		t.Errorf("region has %d bytes", got)
	}
}

func TestSealTableOutOfRange(t *testing.T) {
	table := newTable(t)
	for _, i := range []uint32{memory.Words, memory.Words + 1, 1 << 29, 1<<32 - 1} {
		if v, ok := table.Load(i); ok {
			t.Errorf("Load(%d) = %d", i, v)
		}
		if !panics(func() { table.Store(i, 1) }) {
			t.Errorf("Store(%d) does not panic", i)
		}
	}
}

func panics(f func()) (did bool) {
	defer func() { did = recover() != nil }()
	f()
	return
}

func TestMapSealTable(t *testing.T) {
	checkDescriptors(t)
	owner := newTable(t)
	reader, err := memory.MapSealTable(duplicate(t, owner.Region().File()), false)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	owner.Store(5, 77)
	if v, ok := reader.Load(5); v != 77 || !ok {
		t.Errorf("the reader sees %d, %v, want 77", v, ok)
	}
	if !panics(func() { reader.Store(5, 1) }) {
		t.Error("a table mapped for reading is stored to")
	}
	next, err := memory.MapSealTable(duplicate(t, owner.Region().File()), true)
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	next.Store(5, 0)
	if v, _ := reader.Load(5); v != 0 {
		t.Errorf("the reader sees %d after the next life's store", v)
	}
	if err := owner.Close(); err != nil {
		t.Error(err)
	}
	if err := owner.Close(); err != nil {
		t.Error(err)
	}
	if _, ok := owner.Load(5); ok {
		t.Error("a closed table still has words")
	}
	if v, ok := reader.Load(5); v != 0 || !ok {
		t.Errorf("the reader's table ended with the owner's: %v, %v", v, ok)
	}
}

func TestMapSealTableRefuses(t *testing.T) {
	checkDescriptors(t)
	short := sparse(t, memory.Words*8-1, unix.F_SEAL_SHRINK)
	for name, f := range map[string]*os.File{"too short": short, "no file": nil} {
		if table, err := memory.MapSealTable(f, true); err == nil {
			table.Close()
			t.Errorf("%s: MapSealTable maps it", name)
		}
	}
}

// The rule of the whole project in small: an owner changes the word before it
// writes the page again, a reader copies the page and then loads the word. A
// copy whose word still held must be of the sealed value throughout. Page and
// copy are plain memory, as in a pull: only the word orders them.
func TestSealGuardsThePage(t *testing.T) {
	table := newTable(t)
	page := words(newRegion(t, 4096).Bytes())
	soon := time.Now().Add(time.Second)
	late := soon.Add(time.Minute)
	var work sync.WaitGroup
	var done atomic.Bool
	var held, stale, wrong atomic.Int64
	work.Go(func() {
		defer done.Store(true)
		for n := uint64(1); held.Load() < 1000 || stale.Load() < 1000; n++ {
			for i := range page {
				page[i] = n
			}
			table.Store(0, n)
			for range n % 64 { // longer than a copy, or shorter
				table.Load(1)
			}
			table.Store(0, 0)
			if n%1024 == 0 {
				if now := time.Now(); now.After(late) || held.Load() > 0 && now.After(soon) {
					break // one slow processor
				}
				runtime.Gosched()
			}
		}
	})
	for range 2 {
		work.Go(func() {
			copied := make([]uint64, len(page))
			for !done.Load() {
				value, _ := table.Load(0)
				if value == 0 {
					runtime.Gosched()
					continue
				}
				copy(copied, page)
				if now, _ := table.Load(0); now != value {
					stale.Add(1)
					continue
				}
				held.Add(1)
				for _, w := range copied {
					if w != value {
						wrong.Add(1)
						break
					}
				}
			}
		})
	}
	work.Wait()
	if wrong.Load() != 0 {
		t.Errorf("%d copies of another value under a seal that held", wrong.Load())
	}
	if held.Load() == 0 {
		t.Errorf("no copy under a seal that held, %d under one that did not", stale.Load())
	}
}

// words shows memory as the words that it consists of.
func words(b []byte) []uint64 {
	return unsafe.Slice((*uint64)(unsafe.Pointer(&b[0])), len(b)/8)
}

func TestSealTableIsSafeForConcurrentUse(t *testing.T) {
	table := newTable(t)
	var work sync.WaitGroup
	for g := range uint32(8) {
		work.Go(func() {
			for n := range uint64(2000) {
				own := g*100 + uint32(n%100)
				table.Store(own, n+1)
				if v, ok := table.Load(own); v != n+1 || !ok {
					t.Errorf("word %d = %d, %v, want %d", own, v, ok, n+1)
					return
				}
				table.Load(uint32(n*7) % memory.Words)
			}
		})
	}
	work.Wait()
}

func BenchmarkSealTable(b *testing.B) {
	table, err := memory.NewSealTable()
	if err != nil {
		b.Fatal(err)
	}
	defer table.Close()
	b.Run("store", func(b *testing.B) {
		for b.Loop() {
			table.Store(1, 2)
		}
	})
	b.Run("load", func(b *testing.B) {
		for b.Loop() {
			table.Load(1)
		}
	})
}
