package tcp

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// node is one side of a test.
type node struct {
	local transfer.Local
	t     *Transport
}

func newNode(t testing.TB, life id.Life, size int64) *node {
	t.Helper()
	seals, err := memory.NewSealTable()
	if err != nil {
		t.Fatal(err)
	}
	arena, err := memory.New("tcp test", size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := seals.Close(); err != nil {
			t.Error(err)
		}
		if err := arena.Close(); err != nil {
			t.Error(err)
		}
	})
	return &node{local: transfer.Local{Life: life, Arenas: map[id.Rank]memory.Arena{0: arena}, Seals: seals}}
}

func (n *node) arena() []byte { return host(n.local.Arenas[0]) }

// listen starts the transport; o adds to what a test needs.
func (n *node) listen(t testing.TB, o Options) *Transport {
	t.Helper()
	o.Local = n.local
	if !o.Bind.IsValid() {
		o.Bind = netip.MustParseAddrPort("127.0.0.1:0")
	}
	o.Limits = transfertest.Calm(o.Limits)
	tr, err := Listen(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	})
	n.t = tr
	return tr
}

// hurry gives the reads of n, of which none runs, other limits.
func (n *node) hurry(l transfer.Limits) { n.t.limits = transfertest.Calm(l).WithDefaults() }

func (n *node) peer() transfer.Peer {
	return transfer.Peer{Life: n.local.Life, Descriptor: n.t.Descriptor(), ArenaBytes: map[id.Rank]int64{0: n.local.Arenas[0].Size()}}
}

// hold holds a seal.
func (n *node) hold(index uint32, seq id.Sequence) transfer.Seal {
	v, _ := id.SealValue(n.local.Life.Incarnation, seq)
	n.local.Seals.Store(index, v)
	return transfer.Seal{Index: index, Value: v}
}

func open(t testing.TB, from *node, peer transfer.Peer) transfer.Link {
	t.Helper()
	l, err := from.t.Open(context.Background(), peer)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

var (
	ownerLife  = id.Life{Node: "owner", Incarnation: 0x1122334455667788}
	readerLife = id.Life{Node: "reader", Incarnation: 0x99}
)

// newPair is an owner and a reader, both listening, with arenas that differ.
func newPair(t testing.TB, size int64, ownerOptions, readerOptions Options) (owner, reader *node) {
	t.Helper()
	owner, reader = newNode(t, ownerLife, size), newNode(t, readerLife, size)
	period := make([]byte, 1<<16)
	for i := range period {
		period[i] = byte(i*7 + i>>8)
	}
	fill(owner.arena(), period)
	fill(reader.arena(), []byte{0xcc})
	owner.listen(t, ownerOptions)
	reader.listen(t, readerOptions)
	return owner, reader
}

// fill repeats pattern in b.
func fill(b, pattern []byte) {
	for n := copy(b, pattern); n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// at is a peer like p behind another address.
func at(p transfer.Peer, address net.Addr) transfer.Peer {
	secure := strings.HasPrefix(string(p.Descriptor), "1 "+withTLS+" ")
	p.Descriptor = descriptor(secure, machine(), []netip.AddrPort{netip.MustParseAddrPort(address.String())})
	return p
}

// newAuthority is an authority whose certificates outlive the test.
func newAuthority(t testing.TB) *identity.Authority {
	t.Helper()
	a, err := identity.NewAuthority("tcp test", 24*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// issue is the identity that a gives a node; change may be nil.
func issue(t testing.TB, a *identity.Authority, n id.Node, change func(*identity.Options)) *identity.Identity {
	t.Helper()
	o, err := a.Issue(t.TempDir(), n)
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(&o)
	}
	i, err := identity.Load(o)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// bothWays runs a test without TLS and with it, which is what the options of owner and reader
// have.
func bothWays(t *testing.T, run func(t *testing.T, owner, reader Options)) {
	t.Run("plain", func(t *testing.T) { run(t, Options{}, Options{}) })
	t.Run("tls", func(t *testing.T) {
		a := newAuthority(t)
		run(t, Options{Identity: issue(t, a, ownerLife.Node, nil)}, Options{Identity: issue(t, a, readerLife.Node, nil)})
	})
}

// ownPorts is an address whose ports nobody else is given, so that one that was
// given up can be had again.
const ownPorts = "127.77.0.1:0"

// patience is how long a test waits for what must come, on a busy machine too.
const patience = time.Minute

// short is a context that only a hang meets.
func short(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// eventually polls until done.
func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	end := time.Now().Add(patience)
	for !done() {
		if time.Now().After(end) {
			t.Fatalf("%s: still not after %v", what, patience)
		}
		time.Sleep(time.Millisecond)
	}
}

// script is an owner that does what a test says with each connection.
func script(t testing.TB, serve func(net.Conn)) net.Addr {
	t.Helper()
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	var work sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	work.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
			work.Go(func() {
				defer func() { _ = c.Close() }()
				serve(c)
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		for _, c := range conns {
			_ = c.Close()
		}
		mu.Unlock()
		work.Wait()
	})
	return l.Addr()
}

func dial(to netip.AddrPort) (net.Conn, error) {
	var d net.Dialer
	return d.DialTCP(context.Background(), "tcp", netip.AddrPort{}, to)
}

// receiveFrame reads one frame.
func receiveFrame(c net.Conn) (header, []byte, error) {
	b := make([]byte, headerBytes)
	if _, err := io.ReadFull(c, b); err != nil {
		return header{}, nil, err
	}
	h, err := parseHeader(b)
	if err != nil {
		return h, nil, err
	}
	body := make([]byte, h.length)
	_, err = io.ReadFull(c, body)
	return h, body, err
}

// greet is the owner's half of the handshake.
func greet(c net.Conn) error {
	if _, _, err := receiveFrame(c); err != nil {
		return err
	}
	_, err := c.Write(appendWelcome(nil, welcome{owner: ownerLife, bytes: 1 << 20, copies: 100, seals: 10, inFlight: 4}))
	return err
}

// greeted is the reader's half, with an owner that is real.
func greeted(t testing.TB, owner *node) net.Conn {
	t.Helper()
	return greetedBy(t, owner, nil)
}

// greetedBy is greeted by TLS, if the reader has an identity.
func greetedBy(t testing.TB, owner *node, reader *identity.Identity) net.Conn {
	t.Helper()
	c, err := dial(owner.t.Bound())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if reader != nil {
		c = tls.Client(c, reader.Client(identity.Data, owner.local.Life.Node))
	}
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(hello{owner: owner.local.Life, reader: readerLife}.encode()); err != nil {
		t.Fatal(err)
	}
	h, body, err := receiveFrame(c)
	if err != nil {
		t.Fatal(err)
	}
	if w, err := parseWelcome(h, body); err != nil || w.owner != owner.local.Life {
		t.Fatalf("welcome %+v, %v", w, err)
	}
	return c
}

// host is the memory of an arena of the host.
func host(a memory.Arena) []byte {
	b, _ := transfer.InHost(a)
	return b
}
