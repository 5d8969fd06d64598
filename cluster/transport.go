package cluster

import (
	"bytes"
	"context"
	"crypto/tls"
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

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
)

const (
	packetQueue = 1024
	udpBuffer   = 4 << 20
	// Inbound streams, at most at one time; more wait in the kernel. memberlist
	// gives each of them its deadline.
	maxStreams = 16
)

var errPacketTooLong = fmt.Errorf("packet is over %d bytes", maxPacket)

// transport carries memberlist's packets and streams over one UDP and one TCP
// port of the same number, streams over TLS if there is an identity. It reads
// packets into one buffer, drops and counts what memberlist is too slow for,
// sorts out the envelopes that are not for it (envelope.go), and knows every
// stream, so that the end of the cluster ends them.
//
// The bounds on streams (stream.go) protect the memory of a cluster with keys
// against strangers. Whoever has a key, and a certificate if they are wanted,
// can still make memberlist allocate about 120 MB a stream by a header that
// announces a million nodes.
type transport struct {
	tcp       *net.TCPListener
	udp       *net.UDPConn
	bound     netip.AddrPort
	advertise netip.AddrPort
	identity  *identity.Identity // nil: streams are plain
	server    *tls.Config
	encrypts  bool // memberlist does, with gossip keys
	count     *counters
	log       *slog.Logger
	strangers hush

	packets chan *memberlist.Packet
	letters chan letter // nil: gossip is plain
	streams chan net.Conn
	reply   func(question []byte) []byte // to who has proved a name and asks about gossip keys; set before there are streams
	slots   chan struct{}
	held    atomic.Int64    // bytes read by plain streams that are open
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

func newTransport(tcp *net.TCPListener, udp *net.UDPConn, o Options, count *counters, log *slog.Logger) *transport {
	t := &transport{
		tcp: tcp, udp: udp, identity: o.Identity, encrypts: len(o.Ring.Keys) > 0, count: count, log: log,
		bound:   unmap(udp.LocalAddr().(*net.UDPAddr).AddrPort()),
		packets: make(chan *memberlist.Packet, packetQueue),
		streams: make(chan net.Conn),
		slots:   make(chan struct{}, maxStreams),
		open:    map[*stream]struct{}{},
	}
	if t.identity != nil {
		t.server = t.identity.Server(identity.Gossip)
	}
	if t.encrypts {
		t.letters = make(chan letter, letterQueue)
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
		t.count.packetsIn.Add(1)
		t.count.bytesIn.Add(uint64(n))
		if bytes.HasPrefix(buf[:n], []byte(envelopeMagic)) {
			t.deliver(buf[:n], unmap(a))
			continue
		}
		if a != last {
			last, from = a, net.UDPAddrFromAddrPort(unmap(a))
		}
		p := &memberlist.Packet{Buf: append([]byte(nil), buf[:n]...), From: from, Timestamp: time.Now()}
		select {
		case t.packets <- p:
		default:
			t.count.queueDrops.Add(1)
		}
	}
}

// deliver copies an envelope to who opens them.
func (t *transport) deliver(b []byte, from netip.AddrPort) {
	if t.letters == nil || len(b) > maxPacket {
		t.count.badMessages.Add(1)
		return
	}
	select {
	case t.letters <- letter{bytes.Clone(b), from}:
	default:
		t.count.queueDrops.Add(1)
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
		s, err := t.track(conn, t.server, true)
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
func (t *transport) again() bool { return t.pause(5 * time.Millisecond) }

// pause waits; false: the transport is closed.
func (t *transport) pause(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
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
	if t.encrypts {
		t.count.keyPackets.Add(1)
	}
	return time.Now(), t.send(b, a)
}

func (t *transport) send(b []byte, to netip.AddrPort) error {
	if len(b) > maxPacket {
		return fmt.Errorf("send %d bytes: %w", len(b), errPacketTooLong)
	}
	if _, err := t.udp.WriteToUDPAddrPort(b, to); err != nil {
		return err
	}
	t.count.packetsOut.Add(1)
	t.count.bytesOut.Add(uint64(len(b)))
	return nil
}

// post sends an envelope, by best effort.
func (t *transport) post(envelope []byte, to netip.AddrPort) {
	if err := t.send(envelope, to); err != nil {
		t.log.Debug("send envelope", "to", to, "err", err)
	}
}

func (t *transport) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	return t.WriteTo(b, a.Addr)
}

func (t *transport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	return t.DialAddressTimeout(memberlist.Address{Addr: addr}, timeout)
}

// DialAddressTimeout dials a member, who must prove its name, or if the address
// has no name whoever is there.
func (t *transport) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(t.done, timeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", a.Addr)
	if err != nil {
		return nil, err
	}
	var config *tls.Config
	if t.identity != nil {
		var node id.Node
		if a.Name != "" {
			l, err := parseListName(a.Name)
			if err != nil {
				conn.Close()
				return nil, err
			}
			node = l.Node
		}
		config = t.identity.Client(identity.Gossip, node)
	}
	s, err := t.track(conn, config, false)
	if err != nil {
		return nil, err
	}
	if s.tls != nil {
		if err := s.shake(ctx); err != nil {
			s.Close()
			return nil, err
		}
	}
	return s, nil
}

func (t *transport) PacketCh() <-chan *memberlist.Packet { return t.packets }

func (t *transport) StreamCh() <-chan net.Conn { return t.streams }

// interrupt ends all streams and lets none begin.
func (t *transport) interrupt() {
	t.stop()
	t.mu.Lock()
	defer t.mu.Unlock()
	for s := range t.open {
		s.raw.Close()
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
