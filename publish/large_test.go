package publish

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
)

// TestALargeCluster has ten thousand live publications of 1k tokens, and in a
// soak a hundred thousand.
func TestALargeCluster(t *testing.T) {
	const owners = 7
	publications := 1400
	if *soak > 0 {
		publications = 14000
	}
	var logs []*Log
	var items [][]byte
	for o := range owners {
		l := NewLog(LogOptions{Life: id.Life{Node: id.Node(fmt.Sprintf("n-%d", o)), Incarnation: id.Incarnation(t0.UnixMicro())}})
		for i := range manager.PublicationID(publications) {
			p := publication(i+1, id.Request(fmt.Sprintf("%d-%d", o, i)), 1024, true)
			p.Streams[0].Ranks = p.Streams[0].Ranks[:1]
			if begin(t, l, t0, p); i%100 == 99 {
				items = append(items, outgoingOf(l, t0)...)
			}
		}
		logs = append(logs, l)
	}
	member := func(life id.Life) *Board {
		b := NewBoard(BoardOptions{Life: life})
		for _, l := range logs {
			b.Member(t0, l.life, true)
		}
		return b
	}
	t.Run("costs little memory", func(t *testing.T) {
		b := member(beta)
		used := heapOf(func() {
			for _, item := range items {
				packet := make([]byte, 1<<16) // as it comes: a part of a buffer that is much longer
				if _, _, err := b.Receive(t0, packet[:copy(packet, item)]); err != nil {
					t.Fatal(err)
				}
			}
		})
		s := b.Stats()
		if s.Entries != owners*publications || s.NoTable != 0 || s.TableBytes != int64(owners*publications*64*pageBytes) {
			t.Fatalf("%+v", s)
		}
		one := used / int64(owners*publications)
		t.Logf("%d bytes an entry", one)
		if one > 400 { // with their packets it would be 3,000
			t.Errorf("%d bytes an entry, at most 400", one)
		}
		runtime.KeepAlive(b)
	})
	runtime.KeepAlive(items)

	// What push/pull carries does not grow with them, and whoever joins has them
	// all by snapshots.
	t.Run("is joined at once", func(t *testing.T) {
		carrier := member(beta)
		for _, l := range logs {
			if _, _, err := carrier.Receive(t0, l.Tick(t0).Broadcast[0]); err != nil {
				t.Fatal(err)
			}
		}
		state := carrier.State(NewLog(LogOptions{Life: beta}).Check())
		if len(state) > 100<<10 || len(state) > 60*(owners+1) {
			t.Errorf("push/pull carries %d bytes", len(state))
		}
		start := cpuTime(t)
		joiner := member(gamma)
		if _, err := joiner.Merge(t0, state); err != nil {
			t.Fatal(err)
		}
		joiner.Tick(t0.Add(50 * ms))
		wished := joiner.Tick(t0.Add(100 * ms)).Resync
		for _, life := range wished {
			i := slices.IndexFunc(logs, func(l *Log) bool { return l.life == life })
			if err := joiner.Sync(t0.Add(100*ms), life, logs[i].Live(t0.Add(100*ms))); err != nil {
				t.Fatal(err)
			}
		}
		took := cpuTime(t) - start
		s := joiner.Stats()
		t.Logf("%d bytes of state, %d entries after %v of CPU", len(state), s.Entries, took)
		if s.Entries != owners*publications || len(wished) != owners {
			t.Errorf("%d snapshots, %+v", len(wished), s)
		}
		most := time.Duration(owners*publications) * 50 * time.Microsecond
		if isRace() {
			most *= 10
		}
		if took > most {
			t.Errorf("it took %v", took)
		}
		if out := joiner.Tick(t0.Add(time.Hour)); out.Send != nil || out.Resync != nil {
			t.Errorf("something is missing: %d nacks, %d snapshots", len(out.Send), len(out.Resync))
		}
	})
}

// TestStateOfManyOwners: a checkpoint each, and no more.
func TestStateOfManyOwners(t *testing.T) {
	b := NewBoard(BoardOptions{Life: beta})
	for i := range 1000 {
		life := id.Life{Node: id.Node(fmt.Sprintf("n-%d", i)), Incarnation: id.Incarnation(t0.UnixMicro())}
		b.Member(t0, life, true)
		l := NewLog(LogOptions{Life: life, Words: 20})
		announce(t, l, t0, publication(1, "r", 16, true), time.Hour)
		if _, _, err := b.Receive(t0, l.Tick(t0).Broadcast[0]); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(b.State(wire.Check{Owner: b.hash, Incarnation: beta.Incarnation, Version: 1})); n > 48<<10 {
		t.Errorf("%d bytes for 1,000 owners", n)
	}
}

// heapOf is how much the heap has grown by what f keeps.
func heapOf(f func()) int64 {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	f()
	runtime.GC()
	runtime.ReadMemStats(&after)
	return int64(after.HeapAlloc) - int64(before.HeapAlloc)
}

// isRace says that the race detector watches, under which everything takes
// several times as long.
func isRace() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// cpuTime is what this process has used.
func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
