package memory

import (
	"errors"
	"fmt"
	"math"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Region is host memory in a memfd: sealed against shrinking and growing,
// populated. It is safe for concurrent use; who writes where is the users'
// agreement.
type Region struct {
	bytes  []byte
	mapped []byte // bytes, and the rest of their last page
	file   *os.File
	close  sync.Once
	closed error
}

// New makes a region of size bytes (rounded up to whole pages of the machine),
// filled with zeros and populated, on huge pages when enough of them are free.
// The limits (free memory, cgroup, RLIMIT) are checked first. name shows in
// /proc/PID/maps; it has at most 200 bytes and no NUL.
func New(name string, size int64) (*Region, error) {
	return newRegion(name, size, true)
}

// NewPlain is New without huge pages.
func NewPlain(name string, size int64) (*Region, error) {
	return newRegion(name, size, false)
}

func newRegion(name string, size int64, huge bool) (*Region, error) {
	r, err := create(name, size, huge, thisMachine())
	if err != nil {
		return nil, fmt.Errorf("make region %.80q of %s: %w", name, bytesText(size), err)
	}
	return r, nil
}

func create(name string, size int64, mayBeHuge bool, m machine) (*Region, error) {
	if !possible(size) {
		return nil, errSize
	}
	if len(name) > 200 {
		return nil, fmt.Errorf("the name has %d bytes, want at most 200", len(name))
	}
	if huge, free := m.hugePages(); mayBeHuge && huge > 0 {
		// At most an eighth more, and others may be faster or a cgroup in the way.
		if rounded := roundUp(size, huge); rounded <= free && rounded-size <= size/8 {
			if r, err := m.allocate(name, rounded, huge, unix.MFD_HUGETLB); err == nil {
				return r, nil
			}
		}
	}
	small := int64(os.Getpagesize())
	return m.allocate(name, roundUp(size, small), small, 0)
}

// allocate makes the file of exactly size bytes, gives it all its memory, seals
// it, and maps it.
func (m machine) allocate(name string, size, pageBytes int64, flags int) (*Region, error) {
	if err := m.check(size, flags&unix.MFD_HUGETLB != 0); err != nil {
		return nil, err
	}
	flags |= unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL) // some machines allow no other
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate(name, flags) // before Linux 6.3
	}
	if err != nil {
		return nil, fmt.Errorf("create memfd: %w", limit(err, "ulimit -n, vm.nr_hugepages"))
	}
	file := os.NewFile(uintptr(fd), "memfd:"+name)
	r, err := func() (*Region, error) {
		if err := fill(fd, size, pageBytes); err != nil {
			return nil, err
		}
		const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
			return nil, fmt.Errorf("seal memfd: %w", err)
		}
		return mapFile(file, size, true)
	}()
	if err != nil {
		file.Close()
		return nil, err
	}
	return r, nil
}

// fill allocates the first size bytes of the file. Mapping with MAP_POPULATE
// alone would not do: it fails silently, and the first touch then kills.
func fill(fd int, size, pageBytes int64) error {
	// A signal undoes a whole call; the runtime sends many, so calls are short.
	step := max(pageBytes, 1<<20)
	for at := int64(0); at < size; {
		n := min(step, size-at)
		switch err := unix.Fallocate(fd, 0, at, n); {
		case err == nil:
			at += n
		case errors.Is(err, unix.EINTR):
		default:
			return fmt.Errorf("allocate bytes %d to %d of %d: %w", at, at+n, size, limit(err, "the memory of the machine, vm.overcommit_memory, ulimit -f"))
		}
	}
	return nil
}

// Map maps size bytes of a memfd that another process made, and takes f over,
// also with an error. A file shorter than size or not sealed against shrinking
// is refused, and so is one whose memory is not allocated unless it is mapped
// writable and the memory can be had.
func Map(f *os.File, size int64, writable bool) (*Region, error) {
	if f == nil {
		return nil, errors.New("map region: no file")
	}
	r, err := adopt(f, size, writable)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("map region of %s: %w", bytesText(size), err)
	}
	return r, nil
}

func adopt(f *os.File, size int64, writable bool) (*Region, error) {
	if !possible(size) {
		return nil, errSize
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	var failed error
	if err := conn.Control(func(fd uintptr) { failed = inspect(int(fd), size, writable) }); err != nil {
		return nil, err
	}
	if failed != nil {
		return nil, failed
	}
	return mapFile(f, size, writable)
}

// inspect refuses a file that could end a reader with SIGBUS.
func inspect(fd int, size int64, writable bool) error {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return fmt.Errorf("not a memfd: read seals: %w", err)
	}
	if seals&unix.F_SEAL_SHRINK == 0 {
		return fmt.Errorf("memfd is not sealed against shrinking (seals %#x); make it with MFD_ALLOW_SEALING and add F_SEAL_SHRINK", seals)
	}
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return fmt.Errorf("stat memfd: %w", err)
	}
	if stat.Size < size {
		return fmt.Errorf("memfd has %s, want %s", bytesText(stat.Size), bytesText(size))
	}
	missing := min(size, stat.Size-stat.Blocks*512)
	if missing <= 0 {
		return nil
	}
	if !writable {
		return fmt.Errorf("memfd lacks the memory of %s; its maker must allocate it (fallocate) first", bytesText(missing))
	}
	pageBytes, err := pageOf(fd)
	if err != nil {
		return err
	}
	if err := thisMachine().check(missing, pageBytes > int64(os.Getpagesize())); err != nil {
		return err
	}
	return fill(fd, size, pageBytes)
}

// pageOf is the size of the pages that a file consists of. The block size that
// stat tells won't do: it is a preference.
func pageOf(fd int) (int64, error) {
	var stat unix.Statfs_t
	if err := unix.Fstatfs(fd, &stat); err != nil {
		return 0, fmt.Errorf("stat memfd: %w", err)
	}
	if uint32(stat.Type) == unix.HUGETLBFS_MAGIC {
		return stat.Bsize, nil
	}
	return int64(os.Getpagesize()), nil
}

// mapFile maps a file that has all its memory, and takes it over on success.
func mapFile(f *os.File, size int64, writable bool) (*Region, error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	var mapped []byte
	var failed error
	if err := conn.Control(func(fd uintptr) { mapped, failed = mapPopulated(int(fd), size, writable) }); err != nil {
		return nil, err
	}
	if failed != nil {
		return nil, failed
	}
	return &Region{bytes: mapped[:size:size], mapped: mapped, file: f}, nil
}

func mapPopulated(fd int, size int64, writable bool) ([]byte, error) {
	pageBytes, err := pageOf(fd)
	if err != nil {
		return nil, err
	}
	prot, populate := unix.PROT_READ, unix.MADV_POPULATE_READ
	if writable {
		prot, populate = unix.PROT_READ|unix.PROT_WRITE, unix.MADV_POPULATE_WRITE
	}
	// Huge pages are unmapped whole, so that the length is rounded up to theirs.
	mapped, err := unix.Mmap(fd, 0, int(roundUp(size, pageBytes)), prot, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", bytesText(size), limit(err, "ulimit -v, vm.max_map_count"))
	}
	// MAP_POPULATE keeps its failures to itself, madvise tells. A kernel that
	// is too old for it (before 5.14) maps on first touch at worst.
	if err := unix.Madvise(mapped, populate); err != nil && !errors.Is(err, unix.EINVAL) {
		_ = unix.Munmap(mapped) // the first error tells
		return nil, fmt.Errorf("populate %s: %w", bytesText(size), limit(err, "the memory of the machine"))
	}
	return mapped, nil
}

// Bytes is the whole region. It is invalid after Close.
func (r *Region) Bytes() []byte { return r.bytes }

// Size is len(Bytes()).
func (r *Region) Size() int64 { return int64(len(r.bytes)) }

// File is the region's descriptor; it stays the region's.
func (r *Region) File() *os.File { return r.file }

// Close unmaps the region and closes the descriptor. It may be called twice.
// Whoever still reads or writes Bytes then crashes the process.
func (r *Region) Close() error {
	r.close.Do(func() {
		mapped := r.mapped
		r.bytes, r.mapped = nil, nil
		r.closed = errors.Join(unix.Munmap(mapped), r.file.Close())
	})
	return r.closed
}

var errSize = errors.New("no possible size of a region")

// possible bounds a size so that no sum of this package overflows.
func possible(size int64) bool { return 1 <= size && size <= min(1<<56, math.MaxInt/2) }

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }
