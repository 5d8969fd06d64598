package faults

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/Shopify/toxiproxy/v2"
	"github.com/rs/zerolog"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
)

// front stands between a node and its peers: the node listens on one loopback
// address and advertises another, on which the proxies listen.
type front struct {
	gossip, peer, data *toxiproxy.Proxy

	back, face netip.Addr
	ports      config.Ports
	deaf       atomic.Bool // no packet passes
}

// newFront makes the proxies; set up the node with [front.apply].
func newFront(t *testing.T) *front {
	t.Helper()
	back := netip.MustParseAddr(loopback())
	f := &front{back: back, face: back.Next()}
	f.ports = config.Ports{Gossip: freePort(t, f.back), Peer: freePort(t, f.back), Data: freePort(t, f.back)}
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	pass := func(name string, port int) *toxiproxy.Proxy {
		p := toxiproxy.NewProxy(server, name, f.at(f.face, port).String(), f.at(f.back, port).String())
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Stop)
		return p
	}
	f.gossip, f.peer, f.data = pass("gossip", f.ports.Gossip), pass("peer", f.ports.Peer), pass("data", f.ports.Data)
	f.relay(t)
	return f
}

func (f *front) at(a netip.Addr, port int) netip.AddrPort {
	return netip.AddrPortFrom(a, uint16(port))
}

// apply puts a node behind the front.
func (f *front) apply(c *config.Config) {
	c.Node.Bind, c.Node.Advertise, c.Telemetry.Bind = f.back, f.face, f.back
	c.Ports = f.ports
}

// freePort finds a port that is free for tcp and udp.
func freePort(t *testing.T, a netip.Addr) int {
	t.Helper()
	for range 100 {
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(a, 0)))
		if err != nil {
			t.Fatal(err)
		}
		at := netip.MustParseAddrPort(l.Addr().String())
		u, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		_ = l.Close()
		if err == nil {
			_ = u.Close()
			return int(at.Port())
		}
	}
	t.Fatalf("no port of %s is free", a)
	return 0
}

// relay passes packets on. Answers need none: they go straight to whom the
// packet names.
func (f *front) relay(t *testing.T) {
	t.Helper()
	in, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(f.at(f.face, f.ports.Gossip)))
	if err != nil {
		t.Fatal(err)
	}
	to := f.at(f.back, f.ports.Gossip)
	var work sync.WaitGroup
	work.Go(func() {
		packet := make([]byte, 64<<10)
		for {
			n, err := in.Read(packet)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil && !f.deaf.Load() { // an error: nobody listens there
				_, _ = in.WriteToUDPAddrPort(packet[:n], to)
			}
		}
	})
	t.Cleanup(func() {
		_ = in.Close()
		work.Wait()
	})
}

// cut lets nothing reach the node any more, though its own words still reach
// the others. No connection is closed.
func (f *front) cut(t *testing.T) (heal func()) {
	t.Helper()
	f.deaf.Store(true)
	var heals []func()
	for _, p := range []*toxiproxy.Proxy{f.gossip, f.peer, f.data} {
		heals = append(heals, toxic(t, p, "timeout", `{"timeout": 0}`))
	}
	return func() {
		f.deaf.Store(false)
		for _, h := range heals {
			h()
		}
	}
}

// toxic poisons what a proxy passes, in both directions; heal ends that and may
// be called twice.
func toxic(t *testing.T, p *toxiproxy.Proxy, kind, attributes string) (heal func()) {
	t.Helper()
	var names []string
	for _, direction := range []string{"upstream", "downstream"} {
		w, err := p.Toxics.AddToxicJson(strings.NewReader(fmt.Sprintf(`{"type": %q, "stream": %q, "attributes": %s}`, kind, direction, attributes)))
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, w.Name)
	}
	return sync.OnceFunc(func() {
		for _, n := range names {
			if err := p.Toxics.RemoveToxic(context.Background(), n); err != nil {
				t.Error(err)
			}
		}
	})
}

// overTCP is the key of nodes whose data port a test is about: nodes of one host
// that have shared memory too do not use it.
const overTCP = "transfer.transports=tcp"

// thick are the keys of nodes between which a transfer takes its time, if the
// network is slow, which is all that they have: 16 KiB a token. An owner that
// crawls sees nothing taken for seconds: its kernel says so only when a good part
// of a buffer is free again.
func thick() []string {
	return []string{overTCP, "arena.layers=4", "arena.heads=8", "arena.head_dim=128", "timers.hold=5m", "timers.stall=10s"}
}

// behind starts an agent behind a front, and waits until the nodes of a cluster
// have met it.
func behind(t *testing.T, c *cluster, name string, change func(*config.Config)) (*front, *agent) {
	t.Helper()
	f := newFront(t)
	conf := another(t, c.must("prefill-0"), name)
	f.apply(conf)
	if change != nil {
		change(conf)
	}
	a := startAgent(t, conf)
	for _, n := range c.Nodes() {
		awaitPeer(t, n.Node, dial(t, n.Engine), name)
	}
	return f, a
}

// awaitPeer waits until a node is connected with another one.
func awaitPeer(t *testing.T, node string, a kvferrypb.AdminClient, other string) {
	t.Helper()
	await(t, node+" to meet "+other, patience, func(ctx context.Context) error {
		res, err := a.Peers(ctx, &kvferrypb.PeersRequest{})
		for _, p := range res.GetItems() {
			if p.GetNode() == other && p.GetState() == "connected" {
				return nil
			}
		}
		return errors.Join(err, fmt.Errorf("peers %v", res.GetItems()))
	})
}
