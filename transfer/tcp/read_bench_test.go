package tcp

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
)

// BenchmarkRead has both ends in one process, so that it compares versions of
// this package, and TLS with none, and says nothing about a machine.
func BenchmarkRead(b *testing.B) {
	b.Run("plain", func(b *testing.B) { benchmarkRead(b, Options{}, Options{}) })
	b.Run("tls", func(b *testing.B) {
		a := newAuthority(b)
		benchmarkRead(b, Options{Identity: issue(b, a, "owner", nil)}, Options{Identity: issue(b, a, "reader", nil)})
	})
}

func benchmarkRead(b *testing.B, o, r Options) {
	const size = 64 << 20
	owner, reader := newNode(b, id.Life{Node: "owner", Incarnation: 1}, size), newNode(b, id.Life{Node: "reader", Incarnation: 2}, size)
	owner.listen(b, o)
	reader.listen(b, r)
	link := open(b, reader, owner.peer())
	seals := []transfer.Seal{owner.hold(1, 1)}
	for _, tt := range []struct{ chunk, chunks int64 }{{16 << 10, 1}, {4 << 10, 4096}, {16 << 10, 1024}, {64 << 10, 512}, {256 << 10, 128}} {
		b.Run(fmt.Sprintf("%dKiBx%d", tt.chunk>>10, tt.chunks), func(b *testing.B) {
			remote, local := rand.Perm(int(size/tt.chunk)), rand.Perm(int(size/tt.chunk))
			copies := make([]transfer.Copy, tt.chunks)
			for i := range copies {
				copies[i] = transfer.Copy{Remote: int64(remote[i]) * tt.chunk, Local: int64(local[i]) * tt.chunk, Bytes: tt.chunk}
			}
			b.SetBytes(tt.chunk * tt.chunks)
			b.ReportAllocs()
			for b.Loop() {
				if err := link.Read(context.Background(), seals, copies); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkOpen is a dial, with all that is proved before the first read.
func BenchmarkOpen(b *testing.B) {
	for _, way := range []string{"plain", "tls"} {
		b.Run(way, func(b *testing.B) {
			var o, r Options
			if way == "tls" {
				a := newAuthority(b)
				o.Identity, r.Identity = issue(b, a, ownerLife.Node, nil), issue(b, a, readerLife.Node, nil)
			}
			owner, reader := newPair(b, 4096, o, r)
			b.ReportAllocs()
			for b.Loop() {
				if err := tryOpen(b, reader, owner.peer()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkSubmit is what the reader's side does for every copy but the system
// calls: it checks it, asks for it, and makes a vector of it.
func BenchmarkSubmit(b *testing.B) {
	const size, pages = 64 << 20, 4096
	owner, reader := newPair(b, size, Options{}, Options{})
	seals := []transfer.Seal{owner.hold(1, 1)}
	l := open(b, reader, owner.peer()).(*link)
	copies := make([]transfer.Copy, pages)
	for i, p := range rand.Perm(size / 4096)[:pages] {
		copies[i] = transfer.Copy{Remote: int64(p) * 4096, Local: int64(i) * 4096, Bytes: 4096}
	}
	var s scratch
	var v vector
	var list []transfer.Copy
	b.ReportAllocs()
	for b.Loop() {
		total, err := l.check(seals, copies)
		if err != nil {
			b.Fatal(err)
		}
		x := exchange{bounds: bounds{bytes: frameBytes, copies: frameCopies}, todo: newTodo(copies, total, 1)}
		for ok := true; ok; {
			if list, ok = x.next(&s, list); ok {
				s.out = appendRequest(s.out[:0], 1, request{seals: seals, copies: list})
				v.reset()
				destinations(&v, list, reader.local.Arenas)
			}
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/pages, "ns/page")
}
