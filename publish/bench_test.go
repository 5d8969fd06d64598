package publish

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
)

// BenchmarkAnnounceReceive is the way of one publication: announced, received
// once and once more, released, and that received.
func BenchmarkAnnounceReceive(b *testing.B) {
	for _, pages := range []int{64, 512, 8192} {
		b.Run(fmt.Sprintf("%d pages", pages), func(b *testing.B) {
			l, board := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
			const live = 100
			take := func(item []byte) {
				if _, _, err := board.Receive(t0, item); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			i := manager.PublicationID(0)
			for b.Loop() {
				i++
				a := announce(b, l, t0, publication(i, id.Request(fmt.Sprint(i)), 16*pages, true), time.Minute)
				take(a.items[0])
				take(a.items[0])
				if i > live {
					take(release(b, l, t0, i-live)[0])
				}
			}
		})
	}
}

// BenchmarkTick is a board of 1,000 owners with nothing to do.
func BenchmarkTick(b *testing.B) {
	board := NewBoard(BoardOptions{Life: beta})
	for i := range 1000 {
		life := id.Life{Node: id.Node(fmt.Sprintf("n-%d", i)), Incarnation: 1}
		board.Member(t0, life, true)
		l := NewLog(LogOptions{Life: life, Words: 16})
		for p := range manager.PublicationID(10) {
			a := announce(b, l, t0, publication(p+1, "r", 16, true), time.Hour)
			if _, _, err := board.Receive(t0, a.items[0]); err != nil {
				b.Fatal(err)
			}
		}
	}
	now := t0
	b.ReportAllocs()
	for b.Loop() {
		now = now.Add(ms)
		if out := board.Tick(now); out.Send != nil {
			b.Fatal(out)
		}
	}
}
