package cluster

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
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
		hasty(m)
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
// began: at once, and its threads together for a processor. Where that is long, a
// live member may be taken for a dead one and all takes its time: claims about
// time are then not tested, but logged.
type pulse struct {
	worst  atomic.Int64
	begin  time.Time
	waited time.Duration // until then
}

const steady = 150 * time.Millisecond

func feel(t *testing.T) *pulse {
	t.Helper()
	p := &pulse{begin: time.Now(), waited: waited()}
	stop, done := make(chan struct{}), make(chan struct{})
	go p.beat(stop, done)
	t.Cleanup(func() { close(stop); <-done })
	return p
}

// waited is what the kernel says of the threads that there are.
func waited() (sum time.Duration) {
	paths, _ := filepath.Glob("/proc/self/task/*/schedstat")
	for _, path := range paths {
		b, _ := os.ReadFile(path) // it may have ended
		if f := strings.Fields(string(b)); len(f) > 1 {
			ns, _ := strconv.ParseInt(f[1], 10, 64)
			sum += time.Duration(ns)
		}
	}
	return sum
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
	worst, waits, took := time.Duration(p.worst.Load()), waited()-p.waited, time.Since(p.begin)
	switch {
	case ok:
	case worst > steady || waits > took/4:
		t.Logf("not held against a machine that stood still for %v, and of %v let us wait %v: "+format, append([]any{worst, took, waits}, args...)...)
	default:
		t.Errorf(format, args...)
	}
}

// within polls as the function does, and claims that it took no longer than d.
func (p *pulse) within(t *testing.T, d time.Duration, what string, ok func() bool) time.Duration {
	t.Helper()
	took := within(t, what, ok)
	p.claim(t, took <= d, "not within %v, but %v: %s", d, took, what)
	return took
}

// told waits until a member's handler has been told the last of what it is to
// be told of a node, and claims that it was told exactly that: on a starved
// machine a live one may have been lost, and found, in between.
func (p *pulse) told(t *testing.T, m member, node id.Node, want ...string) {
	t.Helper()
	var got []string
	within(t, fmt.Sprintf("%s is told of %s", m.Life(), want[len(want)-1]), func() bool {
		got = m.about(node)
		return len(got) >= len(want) && got[len(got)-1] == want[len(want)-1]
	})
	p.claim(t, slices.Equal(got, want), "%s was told %v, want %v", m.Life(), got, want)
}

// leave has a member leave, which on a starved machine takes longer than it waits.
func (p *pulse) leave(t *testing.T, m member) {
	t.Helper()
	err := m.Leave(t.Context())
	p.claim(t, err == nil, "%v", err)
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
		within(t, item+" is everywhere", func() bool {
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
