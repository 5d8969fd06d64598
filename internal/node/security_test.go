package node_test

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
	"github.com/kvferry/kvferry/internal/node"
)

// newAuthority issues certificates for so long.
func newAuthority(t testing.TB, valid time.Duration) *identity.Authority {
	t.Helper()
	a, err := identity.NewAuthority("test", valid)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

const year = 365 * 24 * time.Hour

// certified gives a configuration a certificate of the authority.
func certified(t testing.TB, a *identity.Authority, c *config.Config, peers ...string) *config.Config {
	t.Helper()
	o, err := a.Issue(filepath.Dir(c.Node.Socket), id.Node(c.Node.Name))
	if err != nil {
		t.Fatal(err)
	}
	c.Security.Certificate, c.Security.Key, c.Security.CA = o.Certificate, o.Key, o.CA
	c.Security.Peers = peers
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	return c
}

// identityOf is a certificate of the authority for whoever.
func identityOf(t testing.TB, a *identity.Authority, n id.Node) *identity.Identity {
	t.Helper()
	o, err := a.Issue(t.TempDir(), n)
	if err != nil {
		t.Fatal(err)
	}
	i, err := identity.Load(o)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// startSecure is startPair with certificates, which let in each other and mallory.
func startSecure(t testing.TB, a *identity.Authority, set ...[2]string) (prefill, decode *member) {
	t.Helper()
	letIn := []string{"prefill", "dec*", "mallory", "impostor"}
	set = append([][2]string{overTCP}, set...) // which has certificates
	prefill = startWith(t, certified(t, a, configure(t, "prefill", nil, set...), letIn...), nil)
	decode = startWith(t, certified(t, a, configure(t, "decode", prefill, set...), letIn...), nil)
	awaitPeers(t, prefill, decode)
	return prefill, decode
}

// dialPeer calls a node's peer port as whoever the credentials say.
func dialPeer(t testing.TB, n *member, creds credentials.TransportCredentials) kvferrypb.PeerClient {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+n.Addresses().Peer.String(), grpc.WithTransportCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return kvferrypb.NewPeerClient(conn)
}

// metric reads one value of /metrics.
func metric(t testing.TB, n *member, name string) float64 {
	t.Helper()
	for line := range strings.Lines(string(exposition(t, n))) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			v, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
	}
	return 0
}

const peerRefusals = `kvferry_auth_failures_total{surface="peer"}`

// TestSecurePair: with certificates on all ports a request comes over as without.
func TestSecurePair(t *testing.T) {
	for name, b := range map[string]bring{
		"pushed":    {target: "decode", reference: true},
		"by gossip": {},
		"polled":    {poll: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			prefill, decode := startSecure(t, newAuthority(t, year), [2]string{"cluster.keyring", testKey})
			p, d := openEngine(t, prefill), openEngine(t, decode)
			b.chunks = chunks()
			carry(t, "r1", b, p, d)

			// A chunk at a time, with a pause before the last: nobody is told to go on.
			p.ingest("r2")
			d.ingest("r2")
			for _, chunk := range chunks()[:2] {
				p.write("r2", chunk)
				p.publish("r2", false, to("decode"))
			}
			waits := d.retrieving("r2", "", 0)
			awaitRetrieval(t, decode, "waiting")
			select {
			case got := <-waits:
				t.Fatalf("before the final publish: %v, %v", got.res, got.err)
			case <-time.After(50 * time.Millisecond):
			}
			p.write("r2", chunks()[2])
			p.publish("r2", true, to("decode"))
			if got := <-waits; got.err != nil || got.res.GetReadiness() != kvferrypb.Readiness_READY {
				t.Errorf("%v, %v", got.res, got.err)
			}
			if got := d.verify("r2", "main"); got != 36 {
				t.Errorf("%d tokens, want 36", got)
			}
			for _, r := range []string{"r1", "r2"} {
				p.remove(r)
				d.remove(r)
			}
			awaitAllFree(t, prefill)
			awaitAllFree(t, decode)
			for _, n := range []*member{prefill, decode} {
				if v := metric(t, n, peerRefusals); v != 0 {
					t.Errorf("%s has refused %v callers", n.Life(), v)
				}
				s, err := n.admin.Status(t.Context(), &kvferrypb.StatusRequest{})
				if err != nil || !strings.HasPrefix(s.GetSecurity(), "mTLS as "+s.GetNode()+", until ") || strings.Contains(s.GetSecurity(), "soon") {
					t.Errorf("%q, %v", s.GetSecurity(), err)
				}
				if left := time.Until(time.Unix(int64(metric(t, n, "kvferry_certificate_expires_seconds")), 0)); left < year-time.Hour || left > year {
					t.Errorf("the certificate ends in %v", left)
				}
			}
		})
	}
}

// TestStrangersAreRefused: who has no certificate of the authority, or is not
// let in, gets no answer from the peer port.
func TestStrangersAreRefused(t *testing.T) {
	a := newAuthority(t, year)
	prefill, _ := startSecure(t, a)
	for name, creds := range map[string]credentials.TransportCredentials{
		"no TLS":            insecure.NewCredentials(),
		"no certificate":    credentials.NewTLS(&tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}),
		"another authority": credentials.NewTLS(identityOf(t, newAuthority(t, year), "decode").Client(identity.Peer, "")),
		"not let in":        credentials.NewTLS(identityOf(t, a, "eve").Client(identity.Peer, "")),
		"another port's":    credentials.NewTLS(identityOf(t, a, "decode").Client(identity.Data, "")),
	} {
		t.Run(name, func(t *testing.T) {
			before := metric(t, prefill, peerRefusals)
			ctx, cancel := context.WithTimeout(t.Context(), deadline)
			defer cancel()
			res, err := dialPeer(t, prefill, creds).Hello(ctx, &kvferrypb.HelloRequest{From: &kvferrypb.Life{Node: "decode", Incarnation: 1}, To: "prefill"})
			if status.Code(err) != codes.Unavailable {
				t.Errorf("%v, %v, want no connection", res, err)
			}
			await(t, "it to be counted", func(context.Context) error {
				if after := metric(t, prefill, peerRefusals); after <= before {
					return fmt.Errorf("%v refusals after %v", after, before)
				}
				return nil
			})
		})
	}
}

// TestNobodySpeaksForAnother: a certificate is of its node, and no other's life
// can be claimed with it, in whichever call.
func TestNobodySpeaksForAnother(t *testing.T) {
	a := newAuthority(t, year)
	prefill, decode := startSecure(t, a)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("r1")
	p.write("r1", 20)
	pub := p.publish("r1", true)
	me, victim := uint64(prefill.Life().Incarnation), &kvferrypb.Life{Node: "decode", Incarnation: uint64(decode.Life().Incarnation)}
	c := dialPeer(t, prefill, credentials.NewTLS(identityOf(t, a, "mallory").Client(identity.Peer, "prefill")))
	for name, call := range map[string]func(as *kvferrypb.Life) error{
		"hello": func(as *kvferrypb.Life) error {
			_, err := c.Hello(d.ctx(), &kvferrypb.HelloRequest{From: as, To: "prefill"})
			return err
		},
		"push": func(as *kvferrypb.Life) error { return push(d.ctx(), c, &kvferrypb.PushRequest{From: as}) },
		"lease": func(as *kvferrypb.Life) error {
			_, err := c.Lease(d.ctx(), &kvferrypb.LeaseRequest{Incarnation: me, Reader: as, Items: []*kvferrypb.LeaseItem{{Sequence: pub.GetPublication(), Attempt: 1}}})
			return err
		},
		"complete": func(as *kvferrypb.Life) error {
			_, err := c.Complete(d.ctx(), &kvferrypb.CompleteRequest{Incarnation: me, Reader: as, Items: []*kvferrypb.CompleteItem{
				{Sequence: pub.GetPublication(), Attempt: 2, Outcome: kvferrypb.CompleteItem_DECLINED},
			}})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := metric(t, prefill, peerRefusals)
			err := call(victim)
			st, _ := status.FromError(err)
			var f *kvferrypb.Failure
			for _, detail := range st.Details() {
				f, _ = detail.(*kvferrypb.Failure)
			}
			if st.Code() != codes.PermissionDenied || f.GetCode() != kvferrypb.Failure_REFUSED || f.GetRemedy() == "" || !strings.Contains(f.GetMessage(), "mallory") || !strings.Contains(f.GetMessage(), "decode") {
				t.Errorf("%v, %v, want PERMISSION_DENIED that says what to do", err, f)
			}
			if after := metric(t, prefill, peerRefusals); after != before+1 {
				t.Errorf("%v refusals after %v", after, before)
			}
			if name == "complete" {
				return // in its own name it may decline what others want
			}
			if err := call(&kvferrypb.Life{Node: "mallory", Incarnation: 1}); err != nil {
				t.Errorf("in its own name: %v", err)
			}
		})
	}
	// Nothing of that was believed.
	if s, err := decode.admin.Peers(t.Context(), &kvferrypb.PeersRequest{}); err != nil || len(s.GetItems()) != 1 || s.GetItems()[0].GetState() != "connected" {
		t.Errorf("%v, %v", s, err)
	}
	d.ingest("r1")
	if res, err := d.retrieve("r1", pub.GetReference(), 0, deadline); err != nil {
		t.Errorf("%v, %v", res, err)
	}
}

// TestGossipKeyIsNoProof: who only has the gossip key, or a certificate of
// another name, is nobody: nothing of it shows, and nothing of it is read.
func TestGossipKeyIsNoProof(t *testing.T) {
	a := newAuthority(t, year)
	own, other := identityOf(t, a, "impostor"), identityOf(t, a, "mallory")
	for name, tt := range map[string]struct {
		disguise
		says string // the peers command; "": it is no member
	}{
		"the key alone":                  {},
		"another's certificate":          {disguise: disguise{peer: other, gossip: other}},
		"its own, but for the peer port": {disguise{gossip: own}, "speaks no TLS: set security.certificate"},
		"another's on the peer port":     {disguise{peer: other, gossip: own}, "peer's identity is refused"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, decode := startSecure(t, a, [2]string{"cluster.keyring", testKey})
			d := openEngine(t, decode)
			imp := startDisguised(t, decode, nil, tt.disguise)
			imp.lookup = func(*kvferrypb.LookupRequest) (*kvferrypb.Announcement, error) {
				t.Error("it was asked")
				return nil, io.EOF
			}
			imp.announce(t, honest("r1"))
			said := ""
			start := time.Now()
			await(t, "peers to say "+tt.says, func(ctx context.Context) error {
				imp.gossip(t)
				res, err := decode.admin.Publications(ctx, &kvferrypb.PublicationsRequest{Remote: true})
				if err != nil || len(res.GetItems()) != 0 {
					t.Fatalf("it shows: %v, %v", res, err)
				}
				peers, err := decode.admin.Peers(ctx, &kvferrypb.PeersRequest{})
				if err != nil {
					t.Fatal(err)
				}
				for _, p := range peers.GetItems() {
					if p.GetNode() != "impostor" {
						continue
					}
					if said = p.GetLastError(); p.GetState() == "connected" || p.GetGeometry() != nil {
						t.Fatalf("it is believed: %v", p)
					}
				}
				// An honest one would show after a tenth of this.
				if took := time.Since(start); took < 300*time.Millisecond || !strings.Contains(said, tt.says) {
					return fmt.Errorf("%q after %v", said, took)
				}
				return nil
			})
			if tt.says == "" && said != "" {
				t.Errorf("it is a peer: %q", said)
			}
			d.ingest("r1")
			if res, err := d.retrieve("r1", "", 0, 100*time.Millisecond); err == nil {
				t.Errorf("%v was read", res)
			}
		})
	}
}

// TestRefusedRead: an owner whose data port shows a certificate of another
// authority is not read from, and the engine is told at once what to look at.
func TestRefusedRead(t *testing.T) {
	a := newAuthority(t, year)
	own, other := identityOf(t, a, "impostor"), identityOf(t, newAuthority(t, year), "impostor")
	_, decode := startSecure(t, a, [2]string{"timers.backoff_max", "2h"}, [2]string{"timers.backoff_min", "1h"}) // there is no other attempt
	d := openEngine(t, decode)
	imp := startDisguised(t, decode, nil, disguise{peer: own, gossip: own, data: other})
	awaitImpostor(t, decode, false)
	pub, ref := imp.announce(t, honest("r1"))
	imp.lookup = func(*kvferrypb.LookupRequest) (*kvferrypb.Announcement, error) {
		return &kvferrypb.Announcement{Message: pub.Full, Request: "r1"}, nil
	}
	d.ingest("r1")
	res, err := d.retrieve("r1", ref, 0, deadline)
	f := failureOf(t, err)
	if f.GetCode() != kvferrypb.Failure_TRANSPORT || status.Code(err) != codes.Unavailable || f.GetPeer() != "impostor" ||
		!strings.Contains(f.GetMessage(), "unknown authority") || !strings.Contains(f.GetRemedy(), "security.certificate") {
		t.Errorf("%v, %v (%v), want TRANSPORT that says what to check", res, f, err)
	}
	d.remove("r1")
	awaitAllFree(t, decode)
}

// TestPlainGossipIsToldOf: who has certificates, and takes gossip for protected
// by them, is told at the start that it is not.
func TestPlainGossipIsToldOf(t *testing.T) {
	for name, tt := range map[string]struct {
		set    [][2]string
		secure bool
		warns  bool
	}{
		"certificates and keys": {[][2]string{{"cluster.keyring", testKey}}, true, false},
		"certificates alone":    {nil, true, true},
		"neither":               {nil, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			c := configure(t, "alone", nil, tt.set...)
			if tt.secure {
				certified(t, newAuthority(t, year), c)
			}
			var log lines
			n, err := node.Start(t.Context(), node.Options{Config: c, Logger: slog.New(slog.NewTextHandler(&log, nil))})
			if err != nil {
				t.Fatal(err)
			}
			if err := n.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			said := log.of("set cluster.keyring")
			if warns := slices.ContainsFunc(said, func(line string) bool { return strings.Contains(line, "level=WARN") }); warns != tt.warns {
				t.Errorf("it warns: %v, want %v: %q", warns, tt.warns, said)
			}
		})
	}
}

// TestOneSideOfTLS: a peer port without TLS where others have it, or with it
// where they have none, shows in words.
func TestOneSideOfTLS(t *testing.T) {
	a := newAuthority(t, year)
	plain := startNode(t, "plain", nil)
	startDisguised(t, plain, nil, disguise{peer: identityOf(t, a, "impostor")})
	await(t, "peers to say it", func(ctx context.Context) error {
		res, err := plain.admin.Peers(ctx, &kvferrypb.PeersRequest{})
		if err != nil || len(res.GetItems()) != 1 || !strings.Contains(res.GetItems()[0].GetLastError(), "set security.certificate, key, and ca on all nodes or on none") {
			return fmt.Errorf("%v, %w", res, err)
		}
		return nil
	})
}

// TestCertificateNeedsSomebody: status and metrics tell before it is too late.
func TestCertificateNeedsSomebody(t *testing.T) {
	n := startWith(t, certified(t, newAuthority(t, 5*time.Minute), configure(t, "alone", nil)), nil)
	says := func(want string) {
		t.Helper()
		await(t, "status to say "+want, func(ctx context.Context) error {
			s, err := n.admin.Status(ctx, &kvferrypb.StatusRequest{})
			if err != nil || !strings.Contains(s.GetSecurity(), want) {
				return fmt.Errorf("%q, %w", s.GetSecurity(), err)
			}
			return nil
		})
	}
	says("that is soon: replace " + n.config.Security.Certificate)
	if left := time.Until(time.Unix(int64(metric(t, n, "kvferry_certificate_expires_seconds")), 0)); left < 4*time.Minute || left > 5*time.Minute {
		t.Errorf("it ends in %v", left)
	}
	if err := os.WriteFile(n.config.Security.Certificate, []byte("garbage"), 0o600); err != nil {
		t.Fatal(err)
	}
	says("read certificate " + n.config.Security.Certificate)
	if _, err := newAuthority(t, year).Issue(filepath.Dir(n.config.Node.Socket), "alone"); err != nil {
		t.Fatal(err)
	}
	says(time.Now().Add(year).UTC().Format("2006-01"))
}

// TestBadCertificate: a node whose certificate nobody would take does not start.
func TestBadCertificate(t *testing.T) {
	c := certified(t, newAuthority(t, year), configure(t, "alone", nil))
	c.Node.Name = "renamed"
	n, err := node.Start(t.Context(), node.Options{Config: c})
	if err == nil {
		n.Close(t.Context())
	}
	if err == nil || !strings.Contains(err.Error(), "DNS:renamed") || !strings.Contains(err.Error(), "security") {
		t.Errorf("%v, want what to issue", err)
	}
}

// TestJunkOnThePeerPort: what strangers throw at the port costs next to nothing,
// with certificates and without.
func TestJunkOnThePeerPort(t *testing.T) {
	const conns, each = 100, 20 << 20
	stranger := credentials.NewTLS(&tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13})
	junk := make([]byte, 1<<16)
	rand.Read(junk)
	hello := append([]byte{22, 3, 1, 0xff, 0xff, 1, 0, 0xff, 0xfc, 3, 3}, junk[:1<<14]...)
	for name, tt := range map[string]struct {
		secure bool
		begin  []byte
		shake  bool
	}{
		"junk where there is TLS":      {secure: true},
		"the begin of a handshake":     {secure: true, begin: hello},
		"a handshake without a name":   {secure: true, shake: true},
		"junk where there is none":     {},
		"the begin of a plain call":    {begin: []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")},
		"a call with endless metadata": {begin: append([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"), 0, 0x40, 0, 1, 0, 0, 0, 0, 1)},
	} {
		t.Run(name, func(t *testing.T) {
			c := configure(t, "alone", nil)
			if tt.secure {
				certified(t, newAuthority(t, year), c)
			}
			n := startWith(t, c, nil)
			before := heap()
			var work sync.WaitGroup
			var most uint64
			done := make(chan struct{})
			for range conns {
				work.Go(func() {
					conn, err := net.Dial("tcp", n.Addresses().Peer.String())
					if err != nil {
						t.Error(err)
						return
					}
					defer conn.Close()
					if tt.shake {
						if shaken, _, err := stranger.ClientHandshake(t.Context(), "", conn); err == nil {
							conn = shaken
						}
					}
					conn.SetDeadline(time.Now().Add(deadline))
					if _, err := conn.Write(tt.begin); err != nil {
						return
					}
					for range each / len(junk) {
						if _, err := conn.Write(junk); err != nil {
							return
						}
					}
				})
			}
			go func() { work.Wait(); close(done) }()
			for tick := time.Tick(100 * time.Millisecond); ; {
				most = max(most, heap())
				select {
				case <-tick:
					continue
				case <-done:
				}
				break
			}
			if grown := int64(most) - int64(before); grown > each {
				t.Errorf("the heap has grown by %d MiB", grown>>20)
			}
		})
	}
}

// TestSilentStrangers: who says nothing keeps no peer out, and the node from
// nothing.
func TestSilentStrangers(t *testing.T) {
	a := newAuthority(t, year)
	for name, secure := range map[string]bool{"with certificates": true, "without": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, creds := configure(t, "alone", nil), insecure.NewCredentials()
			if secure {
				certified(t, a, c)
				creds = credentials.NewTLS(identityOf(t, a, "decode").Client(identity.Peer, "alone"))
			}
			// After connectTime they are sent away in any case. Once it is seen that
			// nobody waits for that, also on a machine that may sleep over it.
			await(t, "them to be in nobody's way", func(context.Context) error {
				n := startWith(t, c, nil)
				for range 300 { // more than shake hands at once
					conn, err := net.Dial("tcp", n.Addresses().Peer.String())
					if err != nil {
						t.Fatal(err)
					}
					defer conn.Close()
				}
				ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
				defer cancel()
				_, err := dialPeer(t, n, creds).Hello(ctx, &kvferrypb.HelloRequest{From: &kvferrypb.Life{Node: "decode", Incarnation: 1}, To: "alone"}, grpc.WaitForReady(true))
				start := time.Now()
				n.close()
				if took := time.Since(start); took > 4*time.Second {
					err = errors.Join(err, fmt.Errorf("they kept the node for %v", took))
				}
				return err
			})
		})
	}
}

// heap is what is live on it.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
