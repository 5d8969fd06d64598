package memory

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// streamWay is one way to copy lines.
type streamWay struct {
	name  string
	lines copyLines
}

// everyWay runs a test with each way that this machine has, in builds with the
// race detector too.
func everyWay(t *testing.T, test func(t *testing.T, lines copyLines)) {
	for _, way := range streamWays() {
		t.Run(way.name, func(t *testing.T) { test(t, way.lines) })
	}
}

// streamCase copies n bytes between the offsets, with a naive copier beside, and
// compares all that is around.
func streamCase(lines copyLines, from, to, n, next int) error {
	const guard = 192
	src := pattern(from + n)
	got := bytes.Repeat([]byte{0xa5}, to+n+guard)
	want := slices.Clone(got)
	for i := range n {
		want[to+i] = src[from+i]
	}
	before := slices.Clone(src)
	stream(lines, got[to:to+n+guard/2], src[from:], src[:min(next, len(src))])
	switch {
	case !bytes.Equal(got, want):
		for i := range got {
			if got[i] != want[i] {
				return fmt.Errorf("%d bytes from offset %d to %d: byte %d is %#x, want %#x", n, from, to, i-to, got[i], want[i])
			}
		}
	case !bytes.Equal(src, before):
		return fmt.Errorf("%d bytes from offset %d to %d: the source has changed", n, from, to)
	}
	return nil
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8 + 1)
	}
	return b
}

func TestStreamCopiesAllAndNoMore(t *testing.T) {
	everyWay(t, func(t *testing.T, lines copyLines) {
		for n := range 301 {
			for _, base := range []int{0, streamBytes - 1} { // below and above where lines begin
				if err := streamCase(lines, n%64, (n*5)%64, base+n, 0); err != nil {
					t.Fatal(err)
				}
			}
		}
		rapid.Check(t, func(t *rapid.T) {
			from := rapid.IntRange(0, 130).Draw(t, "from")
			to := rapid.IntRange(0, 130).Draw(t, "to")
			n := rapid.IntRange(0, 20_000).Draw(t, "n")
			next := rapid.IntRange(0, 20_000).Draw(t, "next")
			if err := streamCase(lines, from, to, n, next); err != nil {
				t.Fatal(err)
			}
		})
	})
}

// The pages behind source and hint are in reach of every fetch, and touching
// one of them ends the process.
func TestStreamStaysInItsSource(t *testing.T) {
	page := os.Getpagesize()
	fenced := func() []byte {
		m, err := unix.Mmap(-1, 0, 6*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Munmap(m) })
		for _, end := range []int{0, 5 * page} {
			if err := unix.Mprotect(m[end:end+page], unix.PROT_NONE); err != nil {
				t.Fatal(err)
			}
		}
		return m[page : 5*page : 5*page]
	}
	src, dst, next := fenced(), fenced(), fenced()
	copy(src, pattern(len(src)))
	everyWay(t, func(t *testing.T, lines copyLines) {
		for n := range 300 {
			for _, n := range []int{n, streamBytes + n, len(src) - n} {
				clear(dst)
				stream(lines, dst[len(dst)-n:], src[len(src)-n:], next[len(next)-n:])
				if !bytes.Equal(dst[len(dst)-n:], src[len(src)-n:]) {
					t.Fatalf("%d bytes up to the end: wrong", n)
				}
				stream(lines, dst, src[:n], nil)
				if !bytes.Equal(dst[:n], src[:n]) {
					t.Fatalf("%d bytes from the start: wrong", n)
				}
			}
		}
	})
}

func TestStreamRefusesAShortDestination(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	Stream(make([]byte, 4095, 8192), make([]byte, 4096), nil)
}

func TestStreamAllocatesNothing(t *testing.T) {
	dst, src := make([]byte, 9000), pattern(9000)
	if n := testing.AllocsPerRun(100, func() { Stream(dst, src, src) }); n != 0 {
		t.Errorf("%v allocations a call", n)
	}
}

func BenchmarkStream(b *testing.B) {
	const arena = 512 << 20
	src, err := New("src", arena)
	if err != nil {
		b.Skip(err)
	}
	defer src.Close()
	dst, err := New("dst", arena)
	if err != nil {
		b.Skip(err)
	}
	defer dst.Close()
	for _, size := range []int{4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20} {
		from, to := rand.Perm(arena/size), rand.Perm(arena/size)
		for _, way := range streamWays() {
			b.Run(fmt.Sprintf("%dK/%s", size>>10, way.name), func(b *testing.B) {
				b.SetBytes(int64(size))
				i := 0
				for b.Loop() {
					at, then := from[i%len(from)]*size, from[(i+1)%len(from)]*size
					stream(way.lines, dst.Bytes()[to[i%len(to)]*size:][:size], src.Bytes()[at:][:size], src.Bytes()[then:][:size])
					i++
				}
			})
		}
	}
}
