package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/internal/id"
)

func TestNodesOfOneAuthorityMeet(t *testing.T) {
	a := authority(t)
	p, d := node(t, a, "prefill-0"), node(t, a, "decode_0.x")
	m := meet(t, p.Server(Gossip), d.Client(Gossip, "prefill-0"))
	if m.server != nil || m.client != nil {
		t.Fatalf("server %v, client %v", m.server, m.client)
	}
	if v := m.serverState.Version; v != tls.VersionTLS13 {
		t.Errorf("version %x, want TLS 1.3", v)
	}
	if got := Names(m.serverState); !slices.Equal(got, []id.Node{"decode_0.x"}) {
		t.Errorf("the client is %q", got)
	}
	if err := p.Check(m.serverState, "decode_0.x"); err != nil {
		t.Error(err)
	}
	for _, other := range []id.Node{"prefill-0", "decode_0", "Decode_0.x", "decode_0.x.", ""} {
		if err := p.Check(m.serverState, other); !errors.Is(err, ErrRefused) {
			t.Errorf("speaks for %q: %v, want ErrRefused", other, err)
		}
	}
	if m = meet(t, p.Server(Data), d.Client(Data, "")); m.server != nil || m.client != nil {
		t.Errorf("dialled without a name: server %v, client %v", m.server, m.client)
	}
	if m = meet(t, p.Server(Peer), p.Client(Peer, "prefill-0")); m.server != nil || m.client != nil {
		t.Errorf("dialled itself: server %v, client %v", m.server, m.client)
	}
}

// A peer is refused, whatever it shows and whichever side dials.
func TestPeersAreRefused(t *testing.T) {
	a, other := authority(t), authority(t)
	names := func(names ...string) func(*x509.Certificate) {
		return func(c *x509.Certificate) { c.DNSNames = names }
	}
	usage := func(usages ...x509.ExtKeyUsage) func(*x509.Certificate) {
		return func(c *x509.Certificate) { c.ExtKeyUsage = usages }
	}
	of := func(a *Authority, node id.Node, change func(*x509.Certificate)) tls.Certificate {
		der, key := sign(t, a, node, change)
		return shown(der, key)
	}
	leaf := func() *Authority { // a node that thinks it can sign
		der, key := sign(t, a, "decode-0", nil)
		c, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		return &Authority{certificate: c, key: key}
	}()
	forged, forgedKey := sign(t, leaf, "decode-1", nil)
	theirs, _ := sign(t, a, "decode-0", nil)
	_, mine := sign(t, other, "decode-0", nil)
	between := below(t, a)
	far, farKey := sign(t, between, "decode-0", nil)
	long := make([][]byte, maxChain)
	for n := range long {
		long[n] = between.certificate.Raw
	}
	alien := of(other, "decode-0", nil)
	alien.Certificate = append(alien.Certificate, other.certificate.Raw)

	for name, tt := range map[string]struct {
		cert    tls.Certificate
		why     string
		dialled bool // also if it is the one that is dialled; else the certificate is good for that
		mine    bool // it is crypto/tls that refuses
	}{
		"of another authority":               {cert: of(other, "decode-0", nil), why: "both nodes need one authority in security.ca", dialled: true},
		"brings its authority along":         {cert: alien, why: "unknown authority", dialled: true},
		"signed by a node":                   {cert: shown(forged, forgedKey, theirs), why: "authority", dialled: true},
		"certificate of another, no key":     {cert: shown(theirs, mine), why: "invalid signature", dialled: true, mine: true},
		"expired":                            {cert: of(a, "decode-0", func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }), why: "renew security.certificate", dialled: true},
		"not yet valid":                      {cert: of(a, "decode-0", func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Hour) }), why: "not yet valid", dialled: true},
		"for servers only":                   {cert: of(a, "decode-0", usage(x509.ExtKeyUsageServerAuth)), why: "incompatible key usage"},
		"for mail":                           {cert: of(a, "decode-0", usage(x509.ExtKeyUsageEmailProtection)), why: "incompatible key usage", dialled: true},
		"not one that is let in":             {cert: of(a, "other-0", nil), why: `security.peers allows ["decode-*"]`, dialled: true},
		"of another case":                    {cert: of(a, "Decode-0", nil), why: "security.peers", dialled: true},
		"of a name that begins alike":        {cert: of(a, "x-decode-0", nil), why: "security.peers", dialled: true},
		"of all names":                       {cert: of(a, "x", names("*")), why: "of no node", dialled: true},
		"of a pattern that would be let in":  {cert: of(a, "x", names("decode-*")), why: "of no node", dialled: true},
		"of a domain of names":               {cert: of(a, "x", names("*.decode-0")), why: "of no node", dialled: true},
		"common name alone":                  {cert: of(a, "decode-0", names()), why: "of no node", dialled: true},
		"name with a zero byte":              {cert: of(a, "x", names("decode-0\x00.evil")), why: "of no node", dialled: true},
		"name with a slash":                  {cert: of(a, "x", names("decode-/0")), why: "of no node", dialled: true},
		"empty name":                         {cert: of(a, "x", names("")), why: "of no node", dialled: true},
		"name as an address, a URI, a mail":  {cert: of(a, "x", elsewhere), why: "of no node", dialled: true},
		"a great many names":                 {cert: of(a, "x", names(slices.Repeat([]string{"other-0"}, 1000)...)), why: "and 996 more", dialled: true},
		"more intermediates than are looked": {cert: shown(far, farKey, long...), why: "9 certificates, want at most 8", dialled: true},
	} {
		t.Run(name, func(t *testing.T) {
			i := node(t, a, "prefill-0", "decode-*")
			m := meet(t, i.Server(Data), raw(Data, tt.cert))
			if (m.server == nil) || errors.Is(m.server, ErrRefused) == tt.mine || !strings.Contains(fmt.Sprint(m.server), tt.why) {
				t.Errorf("it dials: %v, want %q", m.server, tt.why)
			}
			if len(fmt.Sprint(m.server)) > 1000 {
				t.Errorf("the error has %d bytes", len(fmt.Sprint(m.server)))
			}
			if got := fmt.Sprint(Explain(m.client)); !strings.Contains(got, "the other side refuses this node") {
				t.Errorf("it dials, and is told %s", got)
			}
			m = meet(t, raw(Data, tt.cert), i.Client(Data, ""))
			switch {
			case tt.dialled && (m.client == nil || errors.Is(m.client, ErrRefused) == tt.mine || !strings.Contains(fmt.Sprint(m.client), tt.why)):
				t.Errorf("it is dialled: %v, want %q", m.client, tt.why)
			case !tt.dialled && m.client != nil:
				t.Errorf("it is dialled: %v", m.client)
			}
		})
	}
	t.Run("for clients only", func(t *testing.T) {
		i := node(t, a, "prefill-0")
		cert := of(a, "decode-0", usage(x509.ExtKeyUsageClientAuth))
		if m := meet(t, i.Server(Data), raw(Data, cert)); m.server != nil || m.client != nil {
			t.Errorf("it dials: server %v, client %v", m.server, m.client)
		}
		if m := meet(t, raw(Data, cert), i.Client(Data, "")); !errors.Is(m.client, ErrRefused) || !strings.Contains(m.client.Error(), "incompatible key usage") {
			t.Errorf("it is dialled: %v", m.client)
		}
	})
}

// elsewhere puts a name that is let in wherever a node's name does not stand.
func elsewhere(c *x509.Certificate) {
	c.DNSNames = nil
	c.EmailAddresses = []string{"decode-0"}
	c.URIs = []*url.URL{{Scheme: "spiffe", Host: "decode-0"}}
	c.IPAddresses = []net.IP{netip.IPv6Loopback().AsSlice()}
	c.Subject.CommonName = "decode-0"
}

func TestStrangersAreRefused(t *testing.T) {
	a := authority(t)
	i := node(t, a, "prefill-0")
	der, key := sign(t, a, "decode-0", nil)
	good := shown(der, key)
	old := raw(Data, good)
	old.MaxVersion = tls.VersionTLS12
	for name, tt := range map[string]struct {
		client *tls.Config
		why    string
	}{
		"no certificate":     {raw(Data), "didn't provide a certificate"},
		"TLS 1.2":            {old, "unsupported versions"},
		"for another port":   {raw(Gossip, good), "requested unsupported application protocols"},
		"for no port at all": {&tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{good}}, `protocol "", want "kvferry-data/1"`},
	} {
		t.Run(name, func(t *testing.T) {
			m := meet(t, i.Server(Data), tt.client)
			if m.server == nil || !strings.Contains(m.server.Error(), tt.why) {
				t.Errorf("server: %v, want %q", m.server, tt.why)
			}
			if got := fmt.Sprint(Explain(m.client)); !strings.Contains(got, "refuses this node") && name != "TLS 1.2" {
				t.Errorf("client is told %s", got)
			}
		})
	}
	// The same from the other side.
	for name, server := range map[string]*tls.Config{
		"server of another port": raw(Gossip, good), "server of no protocol": {Certificates: []tls.Certificate{good}, ClientAuth: tls.RequestClientCert}, "server of TLS 1.2": old,
	} {
		if m := meet(t, server, i.Client(Data, "decode-0")); m.client == nil {
			t.Errorf("%s is taken", name)
		}
	}
	if m := meet(t, raw(Data, good), i.Client(Data, "decode-0")); m.client != nil || m.server != nil {
		t.Errorf("what all cases differ from: server %v, client %v", m.server, m.client)
	}
}

func TestTheNodeThatWasDialledMustAnswer(t *testing.T) {
	a := authority(t)
	p, d := node(t, a, "prefill-0"), node(t, a, "decode-0")
	m := meet(t, p.Server(Data), d.Client(Data, "prefill-1"))
	if !errors.Is(m.client, ErrRefused) || !strings.Contains(m.client.Error(), `of ["prefill-0"], not of "prefill-1"`) {
		t.Errorf("client: %v", m.client)
	}
	if m.server == nil {
		t.Error("the server thinks that it was taken")
	}
}

func TestOneCertificateOfSeveralNodes(t *testing.T) {
	a := authority(t)
	der, key := sign(t, a, "a", func(c *x509.Certificate) { c.DNSNames = []string{"a.example", "*", "b", "c"} })
	o := files(t, "b")
	if err := o.write(der, key, a.certificate.Raw); err != nil {
		t.Fatal(err)
	}
	b := load(t, o)
	i := node(t, a, "x", "c", "a.*")
	m := meet(t, i.Server(Peer), b.Client(Peer, "x"))
	if m.server != nil || m.client != nil {
		t.Fatalf("server %v, client %v", m.server, m.client)
	}
	if got := Names(m.serverState); !slices.Equal(got, []id.Node{"a.example", "b", "c"}) {
		t.Errorf("names %q", got)
	}
	for node, ok := range map[id.Node]bool{"a.example": true, "c": true, "b": false, "*": false, "a.": false, "d": false} {
		if err := i.Check(m.serverState, node); (err == nil) != ok || err != nil && !errors.Is(err, ErrRefused) {
			t.Errorf("speaks for %s: %v", node, err)
		}
	}
	for node, ok := range map[id.Node]bool{"a.example": true, "c": true, "b": false} {
		if m := meet(t, b.Server(Peer), i.Client(Peer, node)); (m.client == nil) != ok {
			t.Errorf("dialled as %s: %v", node, m.client)
		}
	}
}

func TestPatternsOfPeers(t *testing.T) {
	for _, tt := range []struct {
		patterns string
		node     id.Node
		ok       bool
	}{
		{"", "anyone", true},
		{"self", "anyone", false},
		{"other", "self", true}, // it is always let in
		{"a", "a", true},
		{"a", "A", false},
		{"a", "ab", false},
		{"a*", "a", true},
		{"a*", "a.b-c_d", true},
		{"*", "x", true},
		{"n[0-3]", "n2", true},
		{"n[0-3]", "n4", false},
		{"n?", "n", false},
		{"x n*", "n7", true},
		{"[", "[", false}, // no pattern lets in nobody
		{"[", "a", false},
	} {
		i := &Identity{o: Options{Node: "self", Peers: strings.Fields(tt.patterns)}}
		if got := i.allows(tt.node); got != tt.ok {
			t.Errorf("%q lets in %s: %v", tt.patterns, tt.node, got)
		}
	}
}

func TestIntermediates(t *testing.T) {
	a := authority(t)
	between := below(t, a)
	der, key := sign(t, between, "decode-0", nil)
	o := files(t, "decode-0")
	if err := o.write(der, key, a.certificate.Raw); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(o); err == nil || !strings.Contains(err.Error(), "intermediates after it") {
		t.Errorf("without the intermediate: %v", err)
	}
	replace(t, o.Certificate, slices.Concat(content(t, o.Certificate), encode("CERTIFICATE", between.certificate.Raw)))
	d := load(t, o)
	p := node(t, a, "prefill-0")
	if m := meet(t, p.Server(Data), d.Client(Data, "prefill-0")); m.server != nil || m.client != nil {
		t.Errorf("it dials: server %v, client %v", m.server, m.client)
	}
	if m := meet(t, d.Server(Data), p.Client(Data, "decode-0")); m.server != nil || m.client != nil {
		t.Errorf("it is dialled: server %v, client %v", m.server, m.client)
	}
}

// Every connection is checked anew, whatever the client would rather do.
func TestNothingIsResumed(t *testing.T) {
	a := authority(t)
	i := node(t, a, "prefill-0")
	der, key := sign(t, a, "decode-0", nil)
	cache := &tickets{LRU: tls.NewLRUClientSessionCache(8)}
	c := raw(Data, shown(der, key))
	c.ServerName, c.ClientSessionCache = "prefill-0", cache
	for range 2 {
		m := meet(t, i.Server(Data), c)
		if m.server != nil || m.client != nil || m.serverState.DidResume {
			t.Errorf("server %v, client %v, resumed %v", m.server, m.client, m.serverState.DidResume)
		}
	}
	if cache.put > 0 {
		t.Errorf("the server gave out %d tickets", cache.put)
	}
	if i.Client(Data, "").ClientSessionCache != nil {
		t.Error("a client keeps sessions")
	}
}

type tickets struct {
	LRU tls.ClientSessionCache
	put int
}

func (c *tickets) Get(key string) (*tls.ClientSessionState, bool) { return c.LRU.Get(key) }

func (c *tickets) Put(key string, s *tls.ClientSessionState) {
	if s != nil {
		c.put++
	}
	c.LRU.Put(key, s)
}

// A stranger sends no more than crypto/tls reads of a certificate message.
func TestHugeChainsAreCutOff(t *testing.T) {
	a := authority(t)
	der, key := sign(t, a, "decode-0", func(c *x509.Certificate) { c.DNSNames = slices.Repeat([]string{strings.Repeat("x", 200)}, 1500) })
	if len(der) < 256<<10 {
		t.Fatalf("only %d bytes", len(der))
	}
	i := node(t, a, "prefill-0")
	m := meet(t, i.Server(Data), raw(Data, shown(der, key)))
	if m.server == nil || !strings.Contains(m.server.Error(), "exceeds maximum of 262144 bytes") {
		t.Errorf("server: %v", m.server)
	}
	if m = meet(t, raw(Data, shown(der, key)), i.Client(Data, "")); m.client == nil || !strings.Contains(m.client.Error(), "exceeds maximum of 262144 bytes") {
		t.Errorf("client: %v", m.client)
	}
}

func TestCertificatesRunOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := authority(t)
		p, d := node(t, a, "prefill-0"), node(t, a, "decode-0")
		end := time.Now().Add(24 * time.Hour)
		if got := p.Expires(); got.After(end) || got.Before(end.Add(-time.Minute)) {
			t.Errorf("expires %v, want %v", got, end)
		}
		time.Sleep(24*time.Hour - time.Minute)
		if m := meet(t, p.Server(Data), d.Client(Data, "")); m.server != nil || m.client != nil || p.Err() != nil {
			t.Errorf("a minute before: server %v, client %v, %v", m.server, m.client, p.Err())
		}
		time.Sleep(2 * time.Minute)
		if m := meet(t, p.Server(Data), d.Client(Data, "")); !errors.Is(m.client, ErrRefused) || !strings.Contains(m.client.Error(), "expired") {
			t.Errorf("a minute after: client %v", m.client)
		}
		if err := p.Err(); err == nil || !strings.Contains(err.Error(), "ran out at 2000-01-02T") {
			t.Errorf("Err: %v", err)
		}
	})
}

// One side has TLS and the other does not: both must learn what to do.
func TestExplain(t *testing.T) {
	i := node(t, authority(t), "prefill-0")
	const mend = "security.certificate"
	plain := func(t *testing.T, other func(net.Conn), handshake func(net.Conn) error) error {
		t.Helper()
		a, b := pipe(t)
		done := make(chan struct{})
		go func() {
			defer close(done)
			defer a.Close()
			other(a)
		}()
		err := handshake(b)
		b.Close()
		<-done
		return err
	}
	server := func(c net.Conn) error { return tls.Server(c, i.Server(Data)).Handshake() }
	client := func(c net.Conn) error { return tls.Client(c, i.Client(Data, "")).Handshake() }
	for name, err := range map[string]error{
		"plain client": plain(t, func(c net.Conn) {
			_, _ = c.Write([]byte("KVF1 and so on: no TLS"))
			_, _ = io.Copy(io.Discard, c) // the alert
		}, server),
		"plain server that answers": plain(t, func(c net.Conn) {
			_, _ = c.Read(make([]byte, 4096))
			_, _ = c.Write([]byte("KVF1 and so on: no TLS"))
			_, _ = io.Copy(io.Discard, c)
		}, client),
		"plain server that hangs up": plain(t, func(c net.Conn) {
			_, _ = c.Read(make([]byte, 4096))
		}, client),
	} {
		got := Explain(err)
		if err == nil || !errors.Is(got, err) || !strings.Contains(got.Error(), mend) {
			t.Errorf("%s: %v, want what to do", name, got)
		}
	}
	refused := fmt.Errorf("because: %w", ErrRefused)
	for _, err := range []error{nil, refused, io.ErrShortWrite} {
		if got := Explain(err); !errors.Is(got, err) || got != nil && got.Error() != err.Error() {
			t.Errorf("Explain(%v) = %v", err, got)
		}
	}
	if !strings.Contains(Explain(io.EOF).Error(), mend) {
		t.Error("the end of a connection is not explained")
	}
}
