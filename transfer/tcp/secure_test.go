package tcp

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
	"github.com/kvferry/kvferry/transfer"
)

// newSecurePair is a pair of which both have a certificate of a.
func newSecurePair(t testing.TB, a *identity.Authority, size int64, o, r Options) (owner, reader *node) {
	t.Helper()
	o.Identity, r.Identity = issue(t, a, ownerLife.Node, nil), issue(t, a, readerLife.Node, nil)
	return newPair(t, size, o, r)
}

// tryOpen opens and closes a link.
func tryOpen(t testing.TB, from *node, peer transfer.Peer) error {
	t.Helper()
	l, err := from.t.Open(short(t), peer)
	if err == nil {
		err = l.Close()
	}
	return err
}

// refusedAs wants err to be a refusal in the words of want, and no reason to
// take another transport.
func refusedAs(t testing.TB, err error, want string) {
	t.Helper()
	if !errors.Is(err, identity.ErrRefused) || errors.Is(err, transfer.ErrUnavailable) || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want ErrRefused and the words %q", err, want)
	}
}

// both writes a file that holds the authorities of two identities.
func both(t testing.TB, a, b *identity.Authority) string {
	t.Helper()
	var pem []byte
	for _, x := range []*identity.Authority{a, b} {
		o, err := x.Issue(t.TempDir(), "anybody")
		if err != nil {
			t.Fatal(err)
		}
		one, err := os.ReadFile(o.CA)
		if err != nil {
			t.Fatal(err)
		}
		pem = append(pem, one...)
	}
	path := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(path, pem, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// A reader that cannot prove who it says it is gets no byte and a reason; it is
// counted, and nobody else notices.
func TestReadersAreRefused(t *testing.T) {
	ours, theirs := newAuthority(t), newAuthority(t)
	for name, tt := range map[string]struct {
		reader *identity.Identity
		allow  []string // of the owner
		want   string
	}{
		"another authority": {
			reader: issue(t, theirs, "reader", func(o *identity.Options) { o.CA = both(t, ours, theirs) }),
			want:   "the other side refuses this node, and its log says why",
		},
		"another node's certificate": {reader: issue(t, ours, "other", nil), want: "refused by the owner"},
		"not allowed":                {reader: issue(t, ours, "reader", nil), allow: []string{"decode-*", "read"}, want: "the other side refuses this node, and its log says why"},
		"another node's certificate, which alone is allowed": {reader: issue(t, ours, "decode-1", nil), allow: []string{"decode-*"}, want: "refused by the owner"},
	} {
		t.Run(name, func(t *testing.T) {
			owner := newNode(t, ownerLife, 4096)
			owner.listen(t, Options{Identity: issue(t, ours, "owner", func(o *identity.Options) { o.Peers = tt.allow })})
			reader := newReader(t, Options{Identity: tt.reader})
			refusedAs(t, tryOpen(t, reader, owner.peer()), tt.want)
			eventually(t, "the stranger is not counted", func() bool { return owner.t.Stats().Unproven == 1 })
			eventually(t, "the stranger is still connected", func() bool { return owner.t.Stats().Accepted == 0 })
			if s := owner.t.Stats(); s.Strangers != 1 || s.Garbage != 0 || s.Served != 0 {
				t.Errorf("the owner's stats are %+v", s)
			}
			if n := reader.t.Stats().Dialled; n != 0 {
				t.Errorf("%d connections are left", n)
			}
		})
	}
}

// A read that must connect again fails as Open does.
func TestReadIsRefused(t *testing.T) {
	a := newAuthority(t)
	owner, reader := newSecurePair(t, a, 4096, Options{Bind: netip.MustParseAddrPort(ownPorts)}, Options{})
	seals := []transfer.Seal{owner.hold(1, 1)}
	link := open(t, reader, owner.peer())
	if err := link.Read(short(t), seals, []transfer.Copy{{Bytes: 10}}); err != nil {
		t.Fatal(err)
	}
	address := owner.t.Bound()
	if err := owner.t.Close(); err != nil {
		t.Fatal(err)
	}
	owner.listen(t, Options{Bind: address, Identity: issue(t, a, ownerLife.Node, func(o *identity.Options) { o.Peers = []string{"nobody"} })})
	err := link.Read(short(t), seals, []transfer.Copy{{Bytes: 10}})
	refusedAs(t, err, ownerLife.String())
	if e, ok := errors.AsType[*transfer.Error](err); !ok || e.Done != 0 || e.Total != 10 {
		t.Errorf("Read: %+v", err)
	}
}

// A certificate that has ended is refused, in both directions; a reader whose
// own it is says so.
func TestExpiredCertificate(t *testing.T) {
	t.Parallel()                  // it takes its time, and nothing else
	const valid = 8 * time.Second // and must not be over before they listen
	ours := newAuthority(t)
	brief, err := identity.NewAuthority("tcp test", valid)
	if err != nil {
		t.Fatal(err)
	}
	ca := both(t, ours, brief)
	identify := func(a *identity.Authority, n id.Node) *identity.Identity {
		return issue(t, a, n, func(o *identity.Options) { o.CA = ca })
	}
	lasting, ending := newNode(t, ownerLife, 4096), newNode(t, id.Life{Node: "ending", Incarnation: 4}, 4096)
	lasting.listen(t, Options{Identity: identify(ours, "owner")})
	ending.listen(t, Options{Identity: identify(brief, "ending")})
	eventually(t, "an ended certificate is good to read with", func() bool { err = tryOpen(t, ending, lasting.peer()); return err != nil })
	refusedAs(t, err, "ran out at")
	refusedAs(t, tryOpen(t, lasting, ending.peer()), "expired")
	if s := lasting.t.Stats(); s.Unproven == 0 || s.Unproven != s.Strangers {
		t.Errorf("the owner's stats are %+v", s)
	}
}

// An owner that cannot prove that it is the peer gets no hello.
func TestOwnersAreRefused(t *testing.T) {
	ours, theirs := newAuthority(t), newAuthority(t)
	for name, tt := range map[string]struct {
		owner    *identity.Identity
		allow    []string // of the reader
		identity bool     // transfer.ErrIdentity: another node of the cluster
		want     string
	}{
		"another authority": {
			owner: issue(t, theirs, "owner", func(o *identity.Options) { o.CA = both(t, ours, theirs) }), want: "unknown authority",
		},
		"another node's certificate": {owner: issue(t, ours, "other", nil), identity: true, want: `not of "owner"`},
		"not allowed":                {owner: issue(t, ours, "owner", nil), allow: []string{"prefill-*"}, want: "security.peers allows"},
	} {
		t.Run(name, func(t *testing.T) {
			owner := newNode(t, ownerLife, 4096)
			owner.listen(t, Options{Identity: tt.owner})
			reader := newReader(t, Options{Identity: issue(t, ours, "reader", func(o *identity.Options) { o.Peers = tt.allow })})
			err := tryOpen(t, reader, owner.peer())
			refusedAs(t, err, tt.want)
			if errors.Is(err, transfer.ErrIdentity) != tt.identity {
				t.Errorf("%v, ErrIdentity should be %v", err, tt.identity)
			}
			eventually(t, "a connection is left", func() bool { return owner.t.Stats().Accepted == 0 })
			if s := owner.t.Stats(); s.Strangers != 0 || s.Garbage != 0 {
				t.Errorf("the owner's stats are %+v, it has refused nobody", s)
			}
		})
	}
}

// Where one side has no certificate the descriptors tell, and say what to set,
// before anybody dials.
func TestOnlyOneSideHasTLS(t *testing.T) {
	a := newAuthority(t)
	plain, secure := newNode(t, ownerLife, 4096), newNode(t, readerLife, 4096)
	plain.listen(t, Options{})
	secure.listen(t, Options{Identity: issue(t, a, readerLife.Node, nil)})
	for _, tt := range []struct {
		from, to *node
		want     string
	}{
		{plain, secure, "the peer speaks TLS on its data port and this node has no certificate: set security.certificate, key, and ca on both"},
		{secure, plain, "the peer speaks no TLS on its data port and this node has a certificate: set security.certificate, key, and ca on both"},
	} {
		err := tryOpen(t, tt.from, tt.to.peer())
		if !errors.Is(err, transfer.ErrUnavailable) || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), tt.to.local.Life.String()) {
			t.Errorf("%v, want ErrUnavailable, the peer, and the words %q", err, tt.want)
		}
	}
	if p, s := plain.t.Stats(), secure.t.Stats(); p != (Stats{}) || s != (Stats{}) {
		t.Errorf("somebody has dialled: %+v, %+v", p, s)
	}
}

// A descriptor that lies about TLS leads to an error, and never to a plain word
// from a node that has a certificate.
func TestDescriptorLiesAboutTLS(t *testing.T) {
	a := newAuthority(t)
	plain, secure := newNode(t, ownerLife, 4096), newNode(t, readerLife, 4096)
	plain.listen(t, Options{})
	secure.listen(t, Options{Identity: issue(t, a, readerLife.Node, nil)})
	lie := func(n *node) transfer.Peer {
		p := n.peer()
		p.Descriptor = descriptor(n.t.identity == nil, machine(), n.t.Advertised())
		return p
	}
	if err := tryOpen(t, plain, lie(secure)); err == nil || errors.Is(err, transfer.ErrUnavailable) {
		t.Errorf("Open without TLS of a port that speaks it: %v", err)
	}
	eventually(t, "the plain reader is not counted", func() bool { return secure.t.Stats().Unproven == 1 })
	if err := tryOpen(t, secure, lie(plain)); err == nil || errors.Is(err, transfer.ErrUnavailable) {
		t.Errorf("Open with TLS of a port that speaks none: %v", err)
	}
	eventually(t, "the handshake is not garbage", func() bool { return plain.t.Stats().Garbage == 1 })

	talker := script(t, func(c net.Conn) {
		_, _ = c.Write([]byte("SSH-2.0-OpenSSH_9.9\r\n"))
		_, _ = io.Copy(io.Discard, c)
	})
	if err := tryOpen(t, secure, at(lie(plain), talker)); !errors.Is(err, errGarbage) {
		t.Errorf("Open with TLS of a port that speaks something else: %v, want garbage", err)
	}
}

// strangers connect to an owner and do what each says; the owner ends them.
func TestStrangersAtTheHandshake(t *testing.T) {
	a := newAuthority(t)
	owner, reader := newSecurePair(t, a, 1<<20, Options{Limits: transfer.Limits{Dial: patience}}, Options{})
	seals := []transfer.Seal{owner.hold(1, 1)}
	link := open(t, reader, owner.peer())
	known := issue(t, a, readerLife.Node, nil).Client(identity.Data, ownerLife.Node)
	shake := func(change func(*tls.Config)) func(c net.Conn) {
		return func(c net.Conn) {
			config := known.Clone()
			change(config)
			s := tls.Client(c, config)
			if s.Handshake() == nil {
				_, _ = s.Write(hello{owner: ownerLife, reader: readerLife}.encode())
				_, _ = io.Copy(io.Discard, s)
			}
		}
	}
	say := func(b []byte) func(c net.Conn) {
		return func(c net.Conn) {
			_, _ = c.Write(b)
			_, _ = io.Copy(io.Discard, c)
		}
	}
	long, err := known.GetClientCertificate(nil)
	if err != nil {
		t.Fatal(err)
	}
	const unproven, garbage = true, false
	for name, tt := range map[string]struct {
		do   func(c net.Conn)
		want bool
	}{
		"no certificate":    {shake(func(c *tls.Config) { c.GetClientCertificate = nil }), unproven},
		"an older TLS":      {shake(func(c *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS12, tls.VersionTLS12 }), unproven},
		"another protocol":  {shake(func(c *tls.Config) { c.NextProtos = []string{identity.Gossip} }), unproven},
		"no protocol":       {shake(func(c *tls.Config) { c.NextProtos, c.VerifyConnection = nil, nil }), unproven},
		"a plain hello":     {say(hello{owner: ownerLife, reader: readerLife}.encode()), unproven},
		"http":              {say([]byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")), garbage},
		"zeros":             {say(make([]byte, 1000)), garbage},
		"a record of zeros": {say(append([]byte{22, 3, 1, 3, 232}, make([]byte, 1000)...)), unproven}, // a message at the wrong time
		"a long record":     {say(append([]byte{22, 3, 1, 255, 255}, make([]byte, 1000)...)), garbage},
		"data first":        {say(append([]byte{23, 3, 3, 0, 100}, make([]byte, 100)...)), garbage},
		"100 KiB of certificates": {shake(func(c *tls.Config) {
			c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
				many := *long
				many.Certificate = append(slices.Clone(long.Certificate), make([]byte, 100<<10))
				return &many, nil
			}
		}), garbage},
	} {
		before := owner.t.Stats()
		c, err := dial(owner.t.Bound())
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(patience))
		tt.do(c)
		_ = c.Close()
		eventually(t, name+" is not counted", func() bool {
			s := owner.t.Stats()
			return s.Unproven+s.Garbage == before.Unproven+before.Garbage+1
		})
		if s := owner.t.Stats(); (s.Unproven == before.Unproven+1) != tt.want || s.Unproven != s.Strangers {
			t.Errorf("%s: stats %+v, were %+v", name, s, before)
		}
		eventually(t, name+" is still connected", func() bool { return owner.t.Stats().Accepted == 1 })
		if err := link.Read(short(t), seals, []transfer.Copy{{Bytes: 100}}); err != nil {
			t.Fatalf("after %s, a good read: %v", name, err)
		}
	}
}

// crowd connects n times and does what with each connection, until the test ends
// it.
func crowd(t testing.TB, owner *node, n int, what func(c net.Conn)) (end func()) {
	t.Helper()
	var conns []net.Conn
	var work sync.WaitGroup
	for range n {
		c, err := dial(owner.t.Bound())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
		work.Go(func() { what(c) })
	}
	return func() {
		for _, c := range conns {
			_ = c.Close()
		}
		work.Wait()
	}
}

func openFiles(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// 200 connections that say nothing keep no reader waiting, and when their dial time
// is over they are gone with all that they have cost.
func TestSilentStrangers(t *testing.T) { bothWays(t, silentStrangers) }

func silentStrangers(t *testing.T, o, r Options) {
	o.Limits.Dial = time.Hour
	owner, reader := newPair(t, 1<<20, o, r)
	seals, copies := []transfer.Seal{owner.hold(1, 1)}, []transfer.Copy{{Bytes: 100_000}}
	link := open(t, reader, owner.peer())
	if err := link.Read(short(t), seals, copies); err != nil {
		t.Fatal(err)
	}
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	end := crowd(t, owner, 200, func(net.Conn) {})
	defer end()
	eventually(t, "the crowd is not there", func() bool { return owner.t.Stats().Accepted == 201 })
	for range 10 {
		if err := link.Read(short(t), seals, copies); err != nil {
			t.Errorf("Read in a crowd: %v", err)
		}
		if err := tryOpen(t, reader, owner.peer()); err != nil {
			t.Errorf("Open in a crowd: %v", err)
		}
	}
	eventually(t, "strangers stay", func() bool {
		each(owner.t, func(c *served) {
			if c.stranger {
				_ = c.tcp.SetDeadline(time.Now()) // as at the end of the dial time
			}
		})
		return owner.t.Stats().Accepted == 1
	})
	if err := link.Read(short(t), seals, copies); err != nil {
		t.Errorf("Read after the crowd: %v", err)
	}
	end()
	eventually(t, "goroutines are left", func() bool { return runtime.NumGoroutine() <= goroutines })
	eventually(t, "files are left open", func() bool { return openFiles(t) <= files })
	if s := owner.t.Stats(); s.Evicted+s.Refused+s.Garbage+s.Strangers != 0 {
		t.Errorf("stats %+v", s)
	}

	hasty := newNode(t, ownerLife, 4096)
	o.Limits.Dial = 50 * time.Millisecond
	hasty.listen(t, o)
	c, err := dial(hasty.t.Bound())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	wantEnd(t, c)
}

// each does something with every connection that an owner serves.
func each(of *Transport, do func(c *served)) {
	of.server.mu.Lock()
	defer of.server.mu.Unlock()
	for c := range of.server.conns {
		do(c)
	}
}

// More strangers than there may be make room for each other: idle readers keep
// their connections, and new ones get theirs.
func TestStrangersMakeRoomForStrangers(t *testing.T) { bothWays(t, strangersMakeRoom) }

func strangersMakeRoom(t *testing.T, o, r Options) {
	o.MaxConns, o.Limits.Dial = 16, time.Minute
	owner, reader := newPair(t, 1<<20, o, r)
	seals, copies := []transfer.Seal{owner.hold(1, 1)}, []transfer.Copy{{Bytes: 1000}}
	var links []transfer.Link
	for range 4 {
		links = append(links, open(t, reader, owner.peer()))
	}
	idle := greetedBy(t, owner, r.Identity)
	defer crowd(t, owner, 200, func(net.Conn) {})()
	eventually(t, "the crowd has not come", func() bool { return owner.t.Stats().Evicted == 200-8 })
	for _, l := range append(links, open(t, reader, owner.peer())) {
		if err := l.Read(short(t), seals, copies); err != nil {
			t.Errorf("Read in a crowd: %v", err)
		}
	}
	if n := reader.t.Stats().Dialled; n != 5 {
		t.Errorf("%d connections of 5 links: a reader has made room for strangers", n)
	}
	ask(t, idle, 1, seals[0], copies...)
	wantFrame(t, idle, dataOf(1, 1000))
	if s := owner.t.Stats(); s.Accepted > 16 || s.Refused != 0 {
		t.Errorf("stats %+v", s)
	}
}

// 100 strangers with a handshake that is as large as it may be and never ends,
// then 20 MiB of junk from each, cost little memory and disturb nobody.
func TestStrangersCostLittle(t *testing.T) {
	const strangers = 100
	owner, reader := newSecurePair(t, newAuthority(t), 1<<20, Options{Limits: transfer.Limits{Dial: time.Minute}}, Options{})
	seals, copies := []transfer.Seal{owner.hold(1, 1)}, []transfer.Copy{{Bytes: 1 << 20}}
	link := open(t, reader, owner.peer())
	if err := link.Read(short(t), seals, copies); err != nil {
		t.Fatal(err)
	}
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc + m.StackInuse
	}
	before := heap()

	// A client hello that says it has 60,000 bytes, in four records, of which
	// the last is cut off.
	record := append([]byte{22, 3, 1, 15_000 >> 8, 15_000 & 0xff}, make([]byte, 15_000)...)
	flood := bytes.Repeat(record, 4)
	copy(flood[5:], []byte{1, 0, 60_000 >> 8, 60_000 & 0xff})
	junk := make([]byte, 1<<20)
	var sent sync.WaitGroup
	sent.Add(strangers)
	more := make(chan struct{})
	end := crowd(t, owner, strangers, func(c net.Conn) {
		_, _ = c.Write(flood[:len(flood)-100])
		sent.Done()
		<-more
		for range 20 {
			if _, err := c.Write(junk); err != nil {
				return
			}
		}
	})
	sent.Wait()
	if err := link.Read(short(t), seals, copies); err != nil {
		t.Errorf("Read beside half handshakes: %v", err)
	}
	grown := int64(heap()) - int64(before)
	t.Logf("%d strangers cost %d KiB each", strangers, grown/strangers>>10)
	if grown > 20<<20 {
		t.Errorf("strangers cost %d MiB", grown>>20)
	}
	close(more)
	for range 20 {
		if err := link.Read(short(t), seals, copies); err != nil {
			t.Errorf("Read beside junk: %v", err)
		}
	}
	eventually(t, "junk is not the end", func() bool { return owner.t.Stats().Accepted == 1 })
	if grown := int64(heap()) - int64(before); grown > 20<<20 {
		t.Errorf("strangers have cost %d MiB", grown>>20)
	}
	end()
	if s := owner.t.Stats(); s.Garbage != strangers {
		t.Errorf("stats %+v", s)
	}
}

// Whoever gives up in a handshake gets away at once, in each of its phases.
func TestEndOfAHandshake(t *testing.T) {
	a := newAuthority(t)
	server := issue(t, a, ownerLife.Node, nil).Server(identity.Data)
	phases := map[string]func(c net.Conn, reached func()){
		"nothing was answered": func(c net.Conn, reached func()) {
			if _, err := c.Read(make([]byte, 1)); err == nil {
				reached()
			}
			_, _ = io.Copy(io.Discard, c)
		},
		"half an answer": func(c net.Conn, reached func()) {
			s := tls.Server(&halfWriter{Conn: c, reached: reached}, server)
			_ = s.Handshake()
			_, _ = io.Copy(io.Discard, c)
		},
		"no welcome": func(c net.Conn, reached func()) {
			s := tls.Server(c, server)
			if s.Handshake() == nil {
				if _, err := s.Read(make([]byte, 1)); err == nil {
					reached()
				}
			}
			_, _ = io.Copy(io.Discard, s)
		},
	}
	ends := map[string]struct {
		end  func(n *node, cancel func()) error
		want error
	}{
		"cancelled": {func(_ *node, cancel func()) error { cancel(); return nil }, context.Canceled},
		"closed":    {func(n *node, _ func()) error { return n.t.Close() }, transfer.ErrClosed},
	}
	for phase, do := range phases {
		for how, e := range ends {
			t.Run(phase+", "+how, func(t *testing.T) {
				reached := make(chan struct{}, 1)
				address := script(t, func(c net.Conn) { do(c, func() { reached <- struct{}{} }) })
				reader := newReader(t, Options{Identity: issue(t, a, readerLife.Node, nil), Limits: transfer.Limits{Dial: time.Minute}})
				peer := fakePeer(address)
				peer.Descriptor = descriptor(true, machine(), addrs(address.String()))
				ctx, cancel := context.WithCancel(short(t))
				defer cancel()
				done := make(chan error, 1)
				go func() {
					l, err := reader.t.Open(ctx, peer)
					if err == nil {
						_ = l.Close()
					}
					done <- err
				}()
				<-reached
				started := time.Now()
				if err := e.end(reader, cancel); err != nil {
					t.Error(err)
				}
				if err := <-done; !errors.Is(err, e.want) || errors.Is(err, identity.ErrRefused) {
					t.Errorf("Open: %v, want %v", err, e.want)
				}
				if took := time.Since(started); took > 20*time.Second {
					t.Errorf("Open took %v to notice", took)
				}
				if n := reader.t.Stats().Dialled; n != 0 {
					t.Errorf("%d connections are left", n)
				}
			})
		}
	}
}

// halfWriter writes half of what it is given first, and then nothing.
type halfWriter struct {
	net.Conn
	reached func()
	done    bool
}

func (h *halfWriter) Write(b []byte) (int, error) {
	if !h.done {
		h.done = true
		_, _ = h.Conn.Write(b[:len(b)/2])
		h.reached()
	}
	return len(b), nil
}

// An owner that closes does not wait for handshakes.
func TestOwnerClosesInAHandshake(t *testing.T) {
	a := newAuthority(t)
	owner := newNode(t, ownerLife, 4096)
	owner.listen(t, Options{Identity: issue(t, a, ownerLife.Node, nil), Limits: transfer.Limits{Dial: time.Minute}})
	silent, err := dial(owner.t.Bound())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	half, err := dial(owner.t.Bound())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = half.Close() }()
	if _, err := half.Write([]byte{22, 3, 1, 1, 0, 1}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "nobody is connected", func() bool { return owner.t.Stats().Accepted == 2 })
	started := time.Now()
	if err := owner.t.Close(); err != nil {
		t.Error(err)
	}
	if took := time.Since(started); took > 20*time.Second {
		t.Errorf("Close took %v", took)
	}
}

// A certificate that is issued anew is what the next handshake shows, and an
// authority that is no longer trusted ends no link that is open.
func TestRotationWhileLinksAreOpen(t *testing.T) {
	first, second := newAuthority(t), newAuthority(t)
	dir := t.TempDir()
	o, err := first.Issue(dir, ownerLife.Node)
	if err != nil {
		t.Fatal(err)
	}
	i, err := identity.Load(o)
	if err != nil {
		t.Fatal(err)
	}
	ca := both(t, first, second)
	trusting := func(a *identity.Authority) *identity.Identity {
		return issue(t, a, readerLife.Node, func(o *identity.Options) { o.CA = ca })
	}
	owner, reader := newPair(t, 1<<20, Options{Identity: i}, Options{Identity: trusting(first)})
	seals, copies := []transfer.Seal{owner.hold(1, 1)}, []transfer.Copy{{Bytes: 100_000}}
	link := open(t, reader, owner.peer())
	if err := link.Read(short(t), seals, copies); err != nil {
		t.Fatal(err)
	}
	shown := func() string {
		c := greetedBy(t, owner, trusting(first))
		defer func() { _ = c.Close() }()
		return c.(*tls.Conn).ConnectionState().PeerCertificates[0].SerialNumber.String()
	}
	before := shown()
	if _, err := first.Issue(dir, ownerLife.Node); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the new certificate is not shown", func() bool { return shown() != before })

	if _, err := second.Issue(dir, ownerLife.Node); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the former authority is good for new links", func() bool { err = tryOpen(t, reader, owner.peer()); return err != nil })
	refusedAs(t, err, "the other side refuses this node, and its log says why")
	if err := link.Read(short(t), seals, copies); err != nil {
		t.Errorf("Read over a link that was open before: %v", err)
	}
	if s := reader.t.Stats(); s.Dialled != 1 || s.Errors != 0 {
		t.Errorf("the reader's stats are %+v: it has dialled again", s)
	}
	fresh := newReader(t, Options{Identity: trusting(second)})
	if err := tryOpen(t, fresh, owner.peer()); err != nil {
		t.Errorf("Open with a certificate of the new authority: %v", err)
	}
}

// What trickles in is progress: the stall time counts from the last bytes, and
// not from the last whole stretch.
func TestTrickleIsProgress(t *testing.T) { bothWays(t, trickleIsProgress) }

func trickleIsProgress(t *testing.T, o, r Options) {
	t.Parallel() // it takes its time, and nothing else
	const size = 128 << 10
	r.Limits.Stall = 3 * time.Second // a busy machine does not stand still for so long
	owner, reader := newPair(t, size, o, r)
	p := newProxy(t, owner.t.Bound())
	p.set(cut{up: -1, down: -1, pace: 220 * time.Millisecond})
	link := open(t, reader, at(owner.peer(), p.address))
	started := time.Now()
	if err := link.Read(short(t), []transfer.Seal{owner.hold(1, 1)}, []transfer.Copy{{Bytes: size}}); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(started); took < r.Limits.Stall {
		t.Errorf("Read took %v, which proves nothing", took)
	}
	if !bytes.Equal(reader.arena(), owner.arena()) {
		t.Error("other bytes")
	}
}

// A read that breaks says how much had landed, and nothing else was touched.
func TestBrokenInTheMiddleOfTLS(t *testing.T) {
	const size = 1 << 20
	owner, reader := newSecurePair(t, newAuthority(t), size, Options{}, Options{})
	seals := []transfer.Seal{owner.hold(1, 1)}
	copies := []transfer.Copy{{Remote: 5, Local: 7, Bytes: 100}, {Remote: 4096, Local: 8192, Bytes: 700_000}}
	p := newProxy(t, owner.t.Bound())
	for _, after := range []int{10_000, 100_000, 500_000} {
		p.set(cut{up: -1, down: after})
		link := open(t, reader, at(owner.peer(), p.address))
		err := link.Read(short(t), seals, copies)
		e, ok := errors.AsType[*transfer.Error](err)
		if !ok || !errors.Is(err, io.ErrUnexpectedEOF) || e.Total != 700_100 {
			t.Fatalf("Read that is cut after %d bytes: %v", after, err)
		}
		if e.Done > int64(after) || e.Done < int64(after)-3*recordBytes {
			t.Errorf("cut after %d bytes, handshake included, %d have landed", after, e.Done)
		}
		if done := e.Done - 100; done > 0 && !bytes.Equal(reader.arena()[8192:8192+done], owner.arena()[4096:4096+done]) {
			t.Errorf("cut after %d bytes: not what landed", after)
		}
		untouched(t, reader, copies[0], transfer.Copy{Local: 8192, Bytes: max(0, e.Done-100)})
		fill(reader.arena(), []byte{0xcc})
	}
}

// A page costs no allocation, and with TLS less than one a record.
func TestAllocations(t *testing.T) { bothWays(t, allocations) }

func allocations(t *testing.T, o, r Options) {
	const pages, few, size = 512, 8, 4096
	owner, reader := newPair(t, pages*size, o, r)
	seals := []transfer.Seal{owner.hold(1, 1)}
	link := open(t, reader, owner.peer())
	read := func(n int) float64 {
		copies := make([]transfer.Copy, n)
		for i := range copies {
			copies[i] = transfer.Copy{Remote: int64(i) * size, Local: int64(n-1-i) * size, Bytes: size}
		}
		return testing.AllocsPerRun(20, func() {
			if err := link.Read(context.Background(), seals, copies); err != nil {
				t.Fatal(err)
			}
		})
	}
	read(pages) // what grows once
	least, most := read(few), read(pages)
	t.Logf("%v allocations for %d pages, %v for %d", least, few, most, pages)
	limit := 5.0
	if o.Identity != nil {
		limit += 2 * pages * size / recordBytes // those of crypto/tls
	}
	if most-least > limit {
		t.Errorf("%v allocations for %d pages, %v for %d", least, few, most, pages)
	}
}
