package faults

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/localcluster"
)

const (
	junkConnections = 100 // to each port at once
	junkBytes       = 20 << 20
	junkTime        = 3 * time.Second        // for all of it, and a look at the node
	junkPause       = 250 * time.Millisecond // before the next connection: requests are to move, too
	junkGrowth      = 20 << 20               // what a node's heap may grow by, garbage included
)

// TestJunkFromStrangers lets strangers send 20 MiB of junk on each of a hundred
// connections to every port of a node at once, and as much by UDP, while requests
// move. A node takes no memory for it, is not in the way of those that it serves,
// and keeps nothing of it.
func TestJunkFromStrangers(t *testing.T) {
	for name, secure := range map[string]bool{"plain": false, "secure": true} {
		t.Run(name, func(t *testing.T) { // one after the other: it takes all of the machine
			// What moves is to come through the junk.
			c := start(t, localcluster.Options{Prefill: 1, Decode: 1, Secure: secure, Set: []string{overTCP}})
			junk(t, c, c.must("prefill-0"))
		})
	}
}

func junk(t *testing.T, c *cluster, victim localcluster.Node) {
	l := startLoad(t, c.engine("prefill-0"), c.engine("decode-0"), 60)
	l.more(10)
	u, err := usageOf(t.Context(), victim.PID, victim.HTTP.String())
	if err != nil {
		t.Fatal(err)
	}
	calm := watchMemory(t, victim)
	l.more(20)
	before := calm.end(t)

	bytes := make([]byte, 64<<10)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range bytes {
		bytes[i] = byte(r.Uint32())
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	foul, done, begin := watchMemory(t, victim), l.count(), time.Now()
	var sent atomic.Int64
	var strangers sync.WaitGroup
	for _, port := range []netip.AddrPort{victim.Gossip, victim.Peer, victim.Data, victim.HTTP} {
		for i := range junkConnections {
			strangers.Go(func() { sent.Add(pour(ctx, port, openings[i%len(openings)], bytes)) })
		}
	}
	strangers.Go(func() {
		n, err := sprinkle(ctx, victim.Gossip, bytes)
		if sent.Add(n); err != nil {
			t.Error(err)
		}
	})
	pause(ctx, junkTime)
	during := foul.end(t)
	cancel()
	strangers.Wait()
	took, meanwhile := time.Since(begin), l.count()-done
	t.Logf("%d MiB of junk were taken in %v, with %d requests; in MiB, without junk and with it: heap %.1f and %.1f, resident %.1f and %.1f",
		sent.Load()>>20, took.Round(time.Millisecond), meanwhile, before.heap/(1<<20), during.heap/(1<<20), before.resident/(1<<20), during.resident/(1<<20))
	if during.heap > before.heap+junkGrowth {
		t.Errorf("the heap has grown from %v to %v bytes", before.heap, during.heap)
	}
	l.more(4)
	l.end()
	awaitUsage(t, victim.Node, victim.PID, victim.HTTP.String(), u, 12)
	for _, n := range c.Nodes() {
		awaitFree(t, n.Node, dial(t, n.Engine), patience)
	}
}

// pour sends junk until all has gone out, again and again on a new connection
// when it is cut, and returns how much was taken.
func pour(ctx context.Context, to netip.AddrPort, opening []byte, junk []byte) (sent int64) {
	for ; ctx.Err() == nil && sent < junkBytes; pause(ctx, junkPause) {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", to.String())
		if err != nil {
			continue
		}
		cut := context.AfterFunc(ctx, func() { _ = conn.Close() })
		n, err := conn.Write(opening)
		for sent += int64(n); err == nil && sent < junkBytes; sent += int64(n) {
			n, err = conn.Write(junk)
		}
		cut()
		_ = conn.Close()
	}
	return sent
}

// sprinkle sends junk in packets.
func sprinkle(ctx context.Context, to netip.AddrPort, junk []byte) (sent int64, err error) {
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	for i := 0; ctx.Err() == nil && sent < junkBytes; i++ {
		if i%64 == 0 {
			pause(ctx, poll)
		}
		from := i * 127 % (len(junk) / 2)
		if n, err := conn.Write(junk[from : from+1+i*31%8192]); err == nil { // else its buffer is full
			sent += int64(n)
		}
	}
	return sent, nil
}

// memoryUse is what a process has taken, in bytes: the heap that is in use, what
// has not been collected yet included, and what of it and all else but the arena
// is in memory. A race detector takes several times the heap.
type memoryUse struct{ heap, resident float64 }

// memoryWatch asks a node for that all the time.
type memoryWatch struct {
	stop  context.CancelFunc
	work  sync.WaitGroup
	looks atomic.Int64
	most  memoryUse
	err   error // of the last look that failed
}

func watchMemory(t *testing.T, n localcluster.Node) *memoryWatch {
	ctx, stop := context.WithCancel(t.Context())
	w := &memoryWatch{stop: stop}
	w.work.Go(func() {
		for ; ctx.Err() == nil; pause(ctx, poll) {
			heap, err := metric(ctx, n.HTTP.String(), heapMetric)
			resident, residentErr := residentOf(n.PID)
			if err = errors.Join(err, residentErr); err != nil {
				w.err = err
				continue
			}
			w.looks.Add(1)
			w.most = memoryUse{max(w.most.heap, heap), max(w.most.resident, resident)}
		}
	})
	t.Cleanup(func() {
		stop()
		w.work.Wait()
	})
	return w
}

// end returns the most that was seen, once that was not too seldom.
func (w *memoryWatch) end(t *testing.T) memoryUse {
	t.Helper()
	looked := waitFor(t.Context(), patience, func(context.Context) error {
		if n := w.looks.Load(); n < 3 {
			return fmt.Errorf("%d times", n)
		}
		return nil
	})
	w.stop()
	w.work.Wait()
	if looked != nil {
		t.Fatalf("a look at the node's memory: %v: %v", looked, w.err)
	}
	return w.most
}

// residentOf is the memory of a process that no file backs.
func residentOf(pid int) (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if kib, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(kib), "kB")), 64)
			return n * 1024, err
		}
	}
	return 0, errors.New("no RssAnon")
}
