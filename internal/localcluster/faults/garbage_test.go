package faults

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/localcluster"
)

// openings are how conversations begin on our ports, so that some of the
// garbage comes further than the first byte.
var openings = [][]byte{
	nil,
	[]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
	[]byte("GET /metrics HTTP/1.1\r\nHost: x\r\n"),
	[]byte("POST /kvferry.v1.Engine/Open HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n"),
	{244, 5, 'l', 'o', 'c', 'a', 'l', 8, 0x4b, 1, 1}, // gossip of this cluster: label, user message, batch
	{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f},
	{22, 3, 1, 64, 0, 1, 0, 63, 252, 3, 3}, // TLS: a long greeting
	[]byte("kvf\x01\x01"),
}

// What a node's heap may grow by, garbage of its own included.
const (
	heapMetric = "go_memstats_heap_alloc_bytes"
	maxGrowth  = 64 << 20
)

// garbage is random bytes, some of them behind an opening.
func garbage(r *rand.Rand, most int) []byte {
	b := append([]byte(nil), openings[r.IntN(len(openings))]...)
	for range r.IntN(most) {
		b = append(b, byte(r.Uint32()>>(r.IntN(4)*8)))
	}
	return b
}

// throw sends garbage to one address until ctx ends, and not less than some, and
// returns how often. A connection that is refused or ended is what is wanted.
func throw(ctx context.Context, network, address string, seed uint64) (sent int) {
	r := rand.New(rand.NewPCG(seed, 1))
	d := net.Dialer{Timeout: hangLimit}
	for end := time.Now().Add(patience); ctx.Err() == nil || sent < 100 && time.Now().Before(end); {
		c, err := d.Dial(network, address)
		if err != nil {
			continue
		}
		_ = c.SetDeadline(time.Now().Add(100 * time.Millisecond))
		for range 1 + r.IntN(4) {
			if _, err := c.Write(garbage(r, 1200)); err != nil {
				break
			}
			sent++
		}
		if r.IntN(2) == 0 { // sometimes hear what is said to it
			_, _ = c.Read(make([]byte, 4096))
		}
		_ = c.Close()
	}
	return sent
}

func TestGarbageOnEveryPort(t *testing.T) {
	t.Parallel()
	c := up(t, 1, 1, overTCP) // what moves is to come through the garbage
	from, to := c.engine("prefill-0"), c.engine("decode-0")
	l := startLoad(t, from, to, 60)
	l.more(4)
	before, heap := make(map[string]usage), make(map[string]float64)
	for _, n := range c.Nodes() {
		u, err := usageOf(c.ctx, n.PID, n.HTTP.String())
		if err != nil {
			t.Fatal(err)
		}
		before[n.Node] = u
		if heap[n.Node], err = metric(c.ctx, n.HTTP.String(), heapMetric); err != nil {
			t.Fatal(err)
		}
	}

	ctx, cancel := context.WithTimeout(c.ctx, 2*time.Second)
	defer cancel()
	var throwers sync.WaitGroup
	for i, n := range c.Nodes() {
		for j, to := range []struct{ network, address string }{
			{"udp", n.Gossip.String()},
			{"tcp", n.Gossip.String()},
			{"tcp", n.Peer.String()},
			{"tcp", n.Data.String()},
			{"tcp", n.HTTP.String()},
			{"unix", n.Engine},
			{"unix", n.Engine + ".fd"},
		} {
			seed := uint64(i*100 + j)
			throwers.Go(func() {
				if n := throw(ctx, to.network, to.address, seed); n < 100 {
					t.Errorf("%s %s took garbage %d times", to.network, to.address, n)
				}
			})
		}
	}
	throwers.Wait()

	l.more(4) // it goes on
	l.end()
	for _, n := range c.Nodes() {
		if !n.Alive() {
			t.Fatalf("%s has ended", n.Node)
		}
		await(t, n.Node+" to count garbage of gossip and at its data port", patience, func(ctx context.Context) error {
			gossip, err := metric(ctx, n.HTTP.String(), "kvferry_gossip_bad_messages_total")
			data, dataErr := metric(ctx, n.HTTP.String(), "kvferry_served_refused_total", `why="garbage"`)
			if err = errors.Join(err, dataErr); err == nil && (gossip == 0 || data == 0) {
				err = fmt.Errorf("%v and %v", gossip, data)
			}
			return err
		})
		if now, err := metric(c.ctx, n.HTTP.String(), heapMetric); err != nil || now > heap[n.Node]+maxGrowth {
			t.Errorf("%s has %v MiB of heap, before %v: %v", n.Node, now/(1<<20), heap[n.Node]/(1<<20), err)
		}
		awaitUsage(t, n.Node, n.PID, n.HTTP.String(), before[n.Node], 12)
		awaitFree(t, n.Node, dial(t, n.Engine), patience)
	}
	for _, s := range c.Status(c.ctx) {
		if s.State() != localcluster.StateReady {
			t.Errorf("%s is %s: %v", s.Node.Node, s.State(), errors.Join(s.Err, fmt.Errorf("%v", s.Status.GetNotReady())))
		}
	}
}
