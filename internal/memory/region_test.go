package memory_test

import (
	"bytes"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/memory"
)

func newRegion(t *testing.T, size int64) *memory.Region {
	t.Helper()
	r, err := memory.New("test", size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

// duplicate is another descriptor of the file, as another process would have.
func duplicate(t *testing.T, f *os.File) *os.File {
	t.Helper()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), "duplicate")
}

// sparse is a memfd of size bytes that has no memory yet.
func sparse(t *testing.T, size int64, seals int) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("sparse", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "sparse")
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	return f
}

// checkDescriptors fails the test if it ends with more open files than it had.
func checkDescriptors(t *testing.T) {
	t.Helper()
	before := openFiles(t)
	t.Cleanup(func() {
		if after := openFiles(t); after > before {
			t.Errorf("%d files are open, %d were before", after, before)
		}
	})
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestNew(t *testing.T) {
	checkDescriptors(t)
	page := int64(os.Getpagesize())
	for _, size := range []int64{1, page - 1, page, page + 1, 3<<20 + 5} {
		r := newRegion(t, size)
		if want := (size + page - 1) / page * page; r.Size() < want || r.Size()%page != 0 || r.Size() != int64(len(r.Bytes())) {
			t.Errorf("New(%d) has %d bytes, want %d", size, r.Size(), want)
		}
		if !bytes.Equal(r.Bytes(), make([]byte, r.Size())) {
			t.Errorf("New(%d) isn't filled with zeros", size)
		}
		r.Bytes()[r.Size()-1] = 7
		var last [1]byte
		if _, err := r.File().ReadAt(last[:], r.Size()-1); err != nil || last[0] != 7 {
			t.Errorf("file of New(%d) ends with %v, %v, want 7", size, last, err)
		}
		if info, err := r.File().Stat(); err != nil || info.Size() != r.Size() {
			t.Errorf("file of New(%d) has %v bytes, want %d", size, info.Size(), r.Size())
		}
	}
}

func TestNewRefuses(t *testing.T) {
	checkDescriptors(t)
	for _, size := range []int64{0, -1, math.MinInt64, math.MaxInt64} {
		if r, err := memory.New("test", size); err == nil {
			r.Close()
			t.Errorf("New(%d) makes a region", size)
		}
	}
	for _, name := range []string{"a\x00b", strings.Repeat("x", 201)} {
		if r, err := memory.New(name, 1); err == nil {
			r.Close()
			t.Errorf("New(%q) makes a region", name)
		}
	}
}

// All the memory is there before the first touch, which can't fail then.
func TestNewIsPopulated(t *testing.T) {
	r := newRegion(t, 8<<20)
	var stat unix.Stat_t
	if err := unix.Fstat(int(r.File().Fd()), &stat); err != nil {
		t.Fatal(err)
	}
	if stat.Blocks*512 < r.Size() {
		t.Errorf("file has %d of %d bytes", stat.Blocks*512, r.Size())
	}
	var before, after unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &before); err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(r.Bytes()); i += os.Getpagesize() {
		r.Bytes()[i] = 1
	}
	if err := unix.Getrusage(unix.RUSAGE_SELF, &after); err != nil {
		t.Fatal(err)
	}
	pages := len(r.Bytes()) / os.Getpagesize()
	if faults := after.Minflt - before.Minflt; faults > int64(pages)/4 {
		t.Errorf("%d faults on %d pages, want them populated", faults, pages)
	}
}

func TestNameIsShown(t *testing.T) {
	r, err := memory.New("arena-of-rank-0", 1)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil || !strings.Contains(string(maps), "memfd:arena-of-rank-0") {
		t.Errorf("maps do not show the name: %v", err)
	}
}

func TestSeals(t *testing.T) {
	r := newRegion(t, 1<<20)
	for _, size := range []int64{0, r.Size() - 1, r.Size() + 1} {
		if err := r.File().Truncate(size); !errors.Is(err, unix.EPERM) {
			t.Errorf("Truncate(%d) = %v, want EPERM", size, err)
		}
	}
	if _, err := unix.FcntlInt(r.File().Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); !errors.Is(err, unix.EPERM) {
		t.Errorf("adding a seal = %v, want EPERM", err)
	}
}

func TestCloseTwice(t *testing.T) {
	r := newRegion(t, 1)
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if r.Size() != 0 || r.Bytes() != nil {
		t.Errorf("a closed region has %d bytes", r.Size())
	}
}

// A size that no machine has is refused at once, before a byte is allocated.
func TestLargerThanMemory(t *testing.T) {
	checkDescriptors(t)
	begin := time.Now()
	_, err := memory.New("test", 1<<50)
	if !errors.Is(err, memory.ErrLimit) {
		t.Fatalf("New(1 PiB) = %v, want ErrLimit", err)
	}
	for _, text := range []string{`region "test" of 1024.0 TiB`, "wanted", "available", "make the region smaller"} {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("error %q does not say %q", err, text)
		}
	}
	if took := time.Since(begin); took > 20*time.Second {
		t.Errorf("the refusal took %v", took)
	}
}

func TestMap(t *testing.T) {
	checkDescriptors(t)
	ours := newRegion(t, 1<<20)
	for _, size := range []int64{1 << 20, 4096, 5000} {
		theirs, err := memory.Map(duplicate(t, ours.File()), size, true)
		if err != nil {
			t.Fatal(err)
		}
		if theirs.Size() != size || cap(theirs.Bytes()) != int(size) {
			t.Errorf("Map(%d) has %d bytes, capacity %d", size, theirs.Size(), cap(theirs.Bytes()))
		}
		theirs.Bytes()[size-1] = byte(size >> 8)
		if got := ours.Bytes()[size-1]; got != byte(size>>8) {
			t.Errorf("a store through the second mapping of %d bytes is not seen: %d", size, got)
		}
		if err := theirs.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestMapForReading(t *testing.T) {
	checkDescriptors(t)
	ours := newRegion(t, 1<<20)
	ours.Bytes()[77] = 7
	f, err := os.Open(filepath.Join("/proc/self/fd", strconv.Itoa(int(ours.File().Fd()))))
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := memory.Map(f, ours.Size(), false)
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	if theirs.Bytes()[77] != 7 {
		t.Error("the mapping for reading shows other bytes")
	}
	if _, err := memory.Map(duplicate(t, f), ours.Size(), true); !errors.Is(err, unix.EACCES) {
		t.Errorf("mapping a read-only descriptor for writing = %v, want EACCES", err)
	}
}

func TestMapRefuses(t *testing.T) {
	checkDescriptors(t)
	const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	plain := func(t *testing.T) *os.File {
		f, err := os.Create(filepath.Join(t.TempDir(), "plain"))
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Truncate(1 << 20); err != nil {
			t.Fatal(err)
		}
		return f
	}
	pipe := func(t *testing.T) *os.File {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		w.Close()
		return r
	}
	for name, tt := range map[string]struct {
		file     func(t *testing.T) *os.File
		size     int64
		writable bool
		text     string
	}{
		"not sealed":         {func(t *testing.T) *os.File { return sparse(t, 1<<20, 0) }, 1 << 20, true, "not sealed against shrinking"},
		"sealed to grow":     {func(t *testing.T) *os.File { return sparse(t, 1<<20, unix.F_SEAL_GROW) }, 1 << 20, true, "not sealed against shrinking"},
		"too short":          {func(t *testing.T) *os.File { return sparse(t, 1<<20, seals) }, 1<<20 + 1, true, "memfd has 1.0 MiB"},
		"empty":              {func(t *testing.T) *os.File { return sparse(t, 0, seals) }, 1, true, "memfd has 0 bytes"},
		"without memory":     {func(t *testing.T) *os.File { return sparse(t, 1<<20, seals) }, 1 << 20, false, "must allocate it"},
		"more than memory":   {func(t *testing.T) *os.File { return sparse(t, 1<<50, seals) }, 1 << 50, true, "limit of this machine"},
		"sealed for writing": {func(t *testing.T) *os.File { return sparse(t, 1<<20, seals|unix.F_SEAL_WRITE) }, 1 << 20, true, "operation not permitted"},
		"size 0":             {func(t *testing.T) *os.File { return sparse(t, 1<<20, seals) }, 0, true, "size"},
		"size below 0":       {func(t *testing.T) *os.File { return sparse(t, 1<<20, seals) }, -1, true, "size"},
		"largest size":       {func(t *testing.T) *os.File { return sparse(t, 1<<20, seals) }, math.MaxInt64, true, "size"},
		"a plain file":       {plain, 1 << 20, true, "memfd"},
		"a pipe":             {pipe, 1 << 20, true, "memfd"},
	} {
		t.Run(name, func(t *testing.T) {
			checkDescriptors(t)
			f := tt.file(t)
			r, err := memory.Map(f, tt.size, tt.writable)
			if err == nil {
				r.Close()
				t.Fatalf("Map(%d) maps it", tt.size)
			}
			if !strings.Contains(err.Error(), tt.text) {
				t.Errorf("Map(%d) = %v, want %q", tt.size, err, tt.text)
			}
			if err := f.Close(); !errors.Is(err, os.ErrClosed) {
				t.Error("the file was not taken over")
			}
		})
	}
	if _, err := memory.Map(nil, 1, true); err == nil {
		t.Error("Map(nil) maps something")
	}
}

// An engine may hand in a memfd that it only has set the size of.
func TestMapAllocates(t *testing.T) {
	f := sparse(t, 1<<20, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
	if _, err := f.WriteAt([]byte{7}, 70_000); err != nil {
		t.Fatal(err)
	}
	r, err := memory.Map(duplicate(t, f), 1<<20, true)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var stat unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &stat); err != nil {
		t.Fatal(err)
	}
	if stat.Blocks*512 < 1<<20 {
		t.Errorf("file has memory of %d bytes, want %d", stat.Blocks*512, 1<<20)
	}
	if r.Bytes()[70_000] != 7 {
		t.Error("allocating has changed the bytes")
	}
}

func BenchmarkNew(b *testing.B) {
	const size = 64 << 20
	b.SetBytes(size)
	for b.Loop() {
		r, err := memory.New("bench", size)
		if err != nil {
			b.Fatal(err)
		}
		r.Close()
	}
}
