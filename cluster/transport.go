package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/memberlist"
)

const (
	packetQueue = 1024
	udpBuffer   = 4 << 20
	// Inbound streams, at most at one time; more wait in the kernel. memberlist
	// gives each of them its deadline.
	maxStreams = 16
	// What memberlist may read from one stream, and from all together: it
	// collects the whole ciphertext before it can tell friend from stranger.
	streamBytes  = 4 << 20
	streamsBytes = 6 << 20
)

var errStreamTooLong = errors.New("stream is too long")

// transport carries memberlist's packets and streams over one UDP and one TCP
// port of the same number. It reads packets into one buffer, drops and counts
// what memberlist is too slow for, and knows every stream, so that the end of
// the cluster ends them.
//
// The bound on streams protects the memory of a cluster with keys against
// strangers. Whoever has a key, or anyone if there are none, can still make
// memberlist allocate about 120 MB a stream by a header that announces a
// million nodes.
type transport struct {
	tcp       *net.TCPListener
	udp       *net.UDPConn
	bound     netip.AddrPort
	advertise netip.AddrPort
	count     *counters
	log       *slog.Logger

	packets chan *memberlist.Packet
	streams chan net.Conn
	slots   chan struct{}
	held    atomic.Int64    // bytes read by streams that are open
	done    context.Context //nolint:containedctx // for DialTimeout, which memberlist gives none
	stop    context.CancelFunc
	work    sync.WaitGroup // our two loops
	inbound sync.WaitGroup // streams that memberlist serves

	mu   sync.Mutex
	open map[*stream]struct{}
}

var _ memberlist.NodeAwareTransport = (*transport)(nil)

// listen binds tcp first, then udp with the same number. Port 0 is tried until
// a number is free for both.
func listen(bind netip.AddrPort) (*net.TCPListener, *net.UDPConn, error) {
	family := "" // of [::] both
	if bind.Addr().Is4() {
		family = "4"
	}
	for try := 0; ; try++ {
		tcp, err := net.ListenTCP("tcp"+family, net.TCPAddrFromAddrPort(bind))
		if err != nil {
			return nil, nil, listenError("tcp", bind, err)
		}
		same := netip.AddrPortFrom(bind.Addr(), tcp.Addr().(*net.TCPAddr).AddrPort().Port())
		udp, err := net.ListenUDP("udp"+family, net.UDPAddrFromAddrPort(same))
		if err == nil {
			return tcp, udp, nil
		}
		tcp.Close()
		if bind.Port() != 0 || !errors.Is(err, syscall.EADDRINUSE) || try == 100 {
			return nil, nil, listenError("udp", same, err)
		}
	}
}

func listenError(network string, a netip.AddrPort, err error) error {
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("listen on %s port %d of %s: %w", network, a.Port(), a.Addr(), ErrPort)
	}
	return fmt.Errorf("listen on %s: %w", network, err)
}

func newTransport(tcp *net.TCPListener, udp *net.UDPConn, count *counters, log *slog.Logger) *transport {
	t := &transport{
		tcp: tcp, udp: udp, count: count, log: log,
		bound:   unmap(udp.LocalAddr().(*net.UDPAddr).AddrPort()),
		packets: make(chan *memberlist.Packet, packetQueue),
		streams: make(chan net.Conn),
		slots:   make(chan struct{}, maxStreams),
		open:    map[*stream]struct{}{},
	}
	t.done, t.stop = context.WithCancel(context.Background())
	_ = udp.SetReadBuffer(udpBuffer) // what came of it is looked at below
	if limit, ok := receiveLimit(); ok && limit < udpBuffer {
		log.Warn("gossip may lose packets: raise net.core.rmem_max", "bytes", limit, "want", udpBuffer)
	}
	t.work.Go(t.receive)
	t.work.Go(t.accept)
	return t
}

// receiveLimit is what Linux silently cuts a receive buffer to.
func receiveLimit() (int, bool) {
	b, err := os.ReadFile("/proc/sys/net/core/rmem_max")
	if err != nil {
		return 0, false
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	return n, err == nil
}

func unmap(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

func (t *transport) receive() {
	buf := make([]byte, 64<<10)
	var last netip.AddrPort
	var from *net.UDPAddr
	for {
		n, a, err := t.udp.ReadFromUDPAddrPort(buf)
		if err != nil {
			if !t.again() {
				return
			}
			continue
		}
		if n == 0 {
			continue
		}
		if a != last {
			last, from = a, net.UDPAddrFromAddrPort(unmap(a))
		}
		t.count.packetsIn.Add(1)
		t.count.bytesIn.Add(uint64(n))
		p := &memberlist.Packet{Buf: append([]byte(nil), buf[:n]...), From: from, Timestamp: time.Now()}
		select {
		case t.packets <- p:
		default:
			t.count.queueDrops.Add(1)
		}
	}
}

func (t *transport) accept() {
	for {
		select {
		case t.slots <- struct{}{}:
		case <-t.done.Done():
			return
		}
		conn, err := t.tcp.Accept()
		if err != nil {
			<-t.slots
			if !t.again() {
				return
			}
			continue
		}
		s, err := t.track(conn, true)
		if err != nil {
			return
		}
		select {
		case t.streams <- s:
		case <-t.done.Done():
			s.Close()
		}
	}
}

// again waits a moment after an error; false: the transport is closed.
func (t *transport) again() bool {
	pause := time.NewTimer(5 * time.Millisecond)
	defer pause.Stop()
	select {
	case <-pause.C:
		return true
	case <-t.done.Done():
		return false
	}
}

func (t *transport) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	return net.IP(t.advertise.Addr().AsSlice()), int(t.advertise.Port()), nil
}

func (t *transport) WriteTo(b []byte, addr string) (time.Time, error) {
	a, err := netip.ParseAddrPort(addr)
	if err != nil {
		return time.Time{}, err
	}
	if _, err := t.udp.WriteToUDPAddrPort(b, a); err != nil {
		return time.Time{}, err
	}
	t.count.packetsOut.Add(1)
	t.count.bytesOut.Add(uint64(len(b)))
	return time.Now(), nil
}

func (t *transport) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	return t.WriteTo(b, a.Addr)
}

func (t *transport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	d := net.Dialer{Timeout: timeout}
	conn, err := d.DialContext(t.done, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return t.track(conn, false)
}

func (t *transport) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	return t.DialTimeout(a.Addr, timeout)
}

func (t *transport) PacketCh() <-chan *memberlist.Packet { return t.packets }

func (t *transport) StreamCh() <-chan net.Conn { return t.streams }

// interrupt ends all streams and lets none begin.
func (t *transport) interrupt() {
	t.stop()
	t.mu.Lock()
	defer t.mu.Unlock()
	for s := range t.open {
		s.Conn.Close()
	}
}

// Shutdown returns when nothing is received any more and memberlist has let go
// of every inbound stream.
func (t *transport) Shutdown() error {
	t.interrupt()
	err := errors.Join(t.tcp.Close(), t.udp.Close())
	t.work.Wait()
	t.inbound.Wait()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// stream is a connection that is counted.
type stream struct {
	net.Conn
	t       *transport
	inbound bool
	read    atomic.Int64
	closed  atomic.Bool
}

func (t *transport) track(conn net.Conn, inbound bool) (*stream, error) {
	s := &stream{Conn: conn, t: t, inbound: inbound}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.done.Err() != nil {
		conn.Close()
		return nil, net.ErrClosed
	}
	t.open[s] = struct{}{}
	if inbound {
		t.inbound.Add(1)
	}
	return s, nil
}

func (s *stream) Read(b []byte) (int, error) {
	n, err := s.Conn.Read(b)
	s.t.count.bytesIn.Add(uint64(n))
	one, all := s.read.Add(int64(n)), s.t.held.Add(int64(n))
	if one > streamBytes || all > streamsBytes {
		s.t.count.streams.Add(1)
		return 0, errStreamTooLong
	}
	return n, err
}

func (s *stream) Write(b []byte) (int, error) {
	n, err := s.Conn.Write(b)
	s.t.count.bytesOut.Add(uint64(n))
	return n, err
}

func (s *stream) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	err := s.Conn.Close()
	s.t.mu.Lock()
	delete(s.t.open, s)
	s.t.mu.Unlock()
	s.t.held.Add(-s.read.Load())
	if s.inbound {
		<-s.t.slots
		s.t.inbound.Done()
	}
	return err
}
