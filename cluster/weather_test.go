package cluster

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/kvferry/kvferry/internal/id"
)

var soak = flag.Duration("soak", 0, "how long the random tests run; 0: a few seconds")

// much is how often a test does what it does.
func much(few, many int) int {
	if *soak > 0 {
		return many
	}
	return few
}

// anywhere is where members listen that come and go: no connection of another
// test takes their ports meanwhile.
const anywhere = "127.0.0.62:0"

// label is of a test's own: where a member has died, one of another test may
// listen, and be called.
func label(t testing.TB) string { return fmt.Sprintf("%x", id.Node(t.Name()).Hash()) }

// fresh are options under the test's own label, and circle is a group of such.
func fresh(t testing.TB, node id.Node, incarnation id.Incarnation, bind string, seeds ...string) Options {
	o := options(node, incarnation, bind, seeds...)
	o.Label = label(t)
	return o
}

func circle(t testing.TB, n int, change func(i int, o *Options)) []member {
	t.Helper()
	return group(t, n, func(i int, o *Options) {
		o.Bind, o.Label = mustAddr(anywhere), label(t)
		if change != nil {
			change(i, o)
		}
	})
}

// encrypt gives a member its gossip keys.
func encrypt(o *Options, keys ...[]byte) { o.Ring.Keys = keys }

// weather is the network between the members of a test. It may cut it, and
// sees what is sent, packets as they are on the wire. The zero value is fair.
type weather struct {
	mu   sync.Mutex
	cut  func(from, to netip.AddrPort) bool
	sent func(from, to netip.AddrPort, packet []byte)
	dial func(from, to netip.AddrPort)
}

// over puts a member under this weather.
func (w *weather) over(o *Options) {
	o.tune = func(m *memberlist.Config) {
		from := netip.AddrPortFrom(netip.MustParseAddr(m.AdvertiseAddr), uint16(m.AdvertisePort))
		m.Transport = &outdoors{m.Transport.(memberlist.NodeAwareTransport), from, w}
	}
}

// split cuts what the function says, both ways or one; nil heals all.
func (w *weather) split(cut func(from, to netip.AddrPort) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut = cut
}

// watch shows every packet, one at a time, also those that are cut.
func (w *weather) watch(sent func(from, to netip.AddrPort, packet []byte)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sent = sent
}

// dials shows every attempt to open a stream.
func (w *weather) dials(dial func(from, to netip.AddrPort)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dial = dial
}

func (w *weather) packet(from netip.AddrPort, to string, b []byte) (cut bool) {
	a := netip.MustParseAddrPort(to)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.sent != nil {
		w.sent(from, a, b)
	}
	return w.cut != nil && w.cut(from, a)
}

func (w *weather) stream(from netip.AddrPort, to string) (cut bool) {
	a := netip.MustParseAddrPort(to)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.dial != nil {
		w.dial(from, a)
	}
	return w.cut != nil && w.cut(from, a)
}

// outdoors is a member's transport in the weather.
type outdoors struct {
	memberlist.NodeAwareTransport
	from netip.AddrPort
	w    *weather
}

func (t *outdoors) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	if t.w.packet(t.from, a.Addr, b) {
		return time.Now(), nil
	}
	return t.NodeAwareTransport.WriteToAddress(b, a)
}

// DialAddressTimeout waits for nothing where the way is cut, as a network that
// swallows packets does.
func (t *outdoors) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	if t.w.stream(t.from, a.Addr) {
		<-time.After(timeout)
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.ErrDeadlineExceeded}
	}
	return t.NodeAwareTransport.DialAddressTimeout(a, timeout)
}

// What memberlist's messages begin with.
const (
	wirePing     = 0
	wireIndirect = 1
	wireAck      = 2
	wireSuspect  = 3
	wireDead     = 5
	wireCompound = 7
	wireUser     = 8
	wireSum      = 12
	wireLabel    = 244
)

// unpack takes a packet without encryption apart as a receiver does, but
// tolerates nothing.
func unpack(b []byte) ([][]byte, error) {
	if len(b) > 2 && b[0] == wireLabel {
		b = b[2+int(b[1]):]
	}
	if len(b) > 5 && b[0] == wireSum {
		b = b[5:]
	}
	if len(b) == 0 {
		return nil, errors.New("packet is empty")
	}
	if b[0] != wireCompound {
		return [][]byte{b}, nil
	}
	n := int(b[1])
	if len(b) < 2+2*n {
		return nil, fmt.Errorf("%d messages in %d bytes", n, len(b))
	}
	lengths, rest := b[2:2+2*n], b[2+2*n:]
	var all [][]byte
	for ; len(lengths) > 0; lengths = lengths[2:] {
		size := int(binary.BigEndian.Uint16(lengths))
		if size == 0 || size > len(rest) {
			return nil, fmt.Errorf("message of %d bytes where %d are left", size, len(rest))
		}
		all, rest = append(all, rest[:size]), rest[size:]
	}
	if len(rest) > 0 {
		return nil, fmt.Errorf("%d bytes behind %d messages", len(rest), n)
	}
	return all, nil
}

// carrier is the handler of a member that passes numbered items on at first
// sight, as who publishes does.
type carrier struct {
	self atomic.Pointer[Cluster]
	mu   sync.Mutex
	at   map[uint32]time.Time // when it was first seen here
}

func (c *carrier) handler() *recorder {
	c.at = map[uint32]time.Time{}
	return &recorder{onItems: func(items [][]byte) {
		for _, item := range items {
			k := binary.BigEndian.Uint32(item)
			c.mu.Lock()
			_, seen := c.at[k]
			if !seen {
				c.at[k] = time.Now()
			}
			c.mu.Unlock()
			if self := c.self.Load(); self != nil && !seen {
				_ = self.Broadcast(item) // it may be full or closed: whoever owns the item repairs
			}
		}
	}}
}

func (c *carrier) saw(k uint32) (time.Time, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t, ok := c.at[k]
	return t, ok
}

func numbered(k uint32, bytes int) []byte {
	item := make([]byte, max(bytes, 4))
	binary.BigEndian.PutUint32(item, k)
	return item
}

// quantiles of durations, which are sorted.
func quantiles(d []time.Duration) (p50, p99, most time.Duration) {
	if len(d) == 0 {
		return 0, 0, 0
	}
	slices.Sort(d)
	return d[len(d)/2], d[len(d)*99/100], d[len(d)-1]
}

// pulse tells how long the machine has kept this process waiting since the test
// began. Where that is long, a live member may be taken for a dead one and all
// takes its time: claims about time are then not tested, but logged.
type pulse struct{ worst atomic.Int64 }

const steady = 150 * time.Millisecond

func feel(t *testing.T) *pulse {
	t.Helper()
	p := &pulse{}
	stop, done := make(chan struct{}), make(chan struct{})
	go p.beat(stop, done)
	t.Cleanup(func() { close(stop); <-done })
	return p
}

func (p *pulse) beat(stop, done chan struct{}) {
	defer close(done)
	const rest = 5 * time.Millisecond
	for {
		begin := time.Now()
		select {
		case <-time.After(rest):
			p.worst.Store(max(p.worst.Load(), int64(time.Since(begin)-rest)))
		case <-stop:
			return
		}
	}
}

// claim fails the test, unless the machine was starved.
func (p *pulse) claim(t *testing.T, ok bool, format string, args ...any) {
	t.Helper()
	switch worst := time.Duration(p.worst.Load()); {
	case ok:
	case worst > steady:
		t.Logf("not held against a machine that stood still for %v: "+format, append([]any{worst}, args...)...)
	default:
		t.Errorf(format, args...)
	}
}

// within polls for the longer the more starved the machine is.
func (p *pulse) within(t *testing.T, d time.Duration, what string, ok func() bool) time.Duration {
	t.Helper()
	took := within(t, 4*d, what, ok)
	p.claim(t, took <= d, "not within %v, but %v: %s", d, took, what)
	return took
}

// everybody lists exactly these lives.
func everybody(all []member, want string) bool {
	return !slices.ContainsFunc(all, func(m member) bool { return names(m) != want })
}

// losses are the departures that a member was told of.
func losses(m member) (all []string) {
	m.heard.mu.Lock()
	defer m.heard.mu.Unlock()
	for _, e := range m.heard.events {
		if strings.HasPrefix(e, "left") {
			all = append(all, e)
		}
	}
	return all
}

// talk checks that items flow from each member to every other.
func talk(t testing.TB, all []member, what string) {
	t.Helper()
	for i, m := range all {
		item := fmt.Sprintf("%s: %d", what, i)
		// Nothing promises one push; its owner would repeat it.
		last := time.Time{}
		within(t, 10*time.Second, item+" is everywhere", func() bool {
			if time.Since(last) > 100*time.Millisecond {
				last = time.Now()
				if err := m.Broadcast([]byte(item)); err != nil {
					t.Fatal(err)
				}
			}
			return !slices.ContainsFunc(all, func(o member) bool { return o.Cluster != m.Cluster && !o.has(item) })
		})
	}
}

// count returns how many goroutines and open files the process has.
func count(t testing.TB) (goroutines, files int) {
	t.Helper()
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return runtime.NumGoroutine(), len(open)
}
