// Package identity is who a node is to others, and who others are to it: a
// certificate whose subject alternative name is the node's name, an authority
// that both sides trust, and the names that are let in. It makes the TLS
// configurations of every port that peers reach, so that one rule holds for
// all of them:
//
//   - TLS 1.3, a certificate on both sides, both of the authority;
//   - a peer is the nodes that its certificate names (DNS names, compared byte
//     by byte: they are node names, and nobody looks them up);
//   - one of them must be allowed; who was dialled by name must have that name.
//
// What a peer then says of itself is checked with [Identity.Check] where it says
// it.
package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/internal/id"
)

// ErrRefused: a certificate is missing, not of the authority, out of date, or
// of a node that is not allowed or not the one that was meant.
var ErrRefused = errors.New("peer's identity is refused")

// Protocols that are negotiated (ALPN), so that a connection to one port can't
// be passed on to another. gRPC has its own.
const (
	Gossip = "kvferry-gossip/1"
	Data   = "kvferry-data/1"
)

// reloadInterval is how often files are looked at for a change.
const reloadInterval = time.Second

// Options are the files of an identity, all in PEM, and whom it lets in.
type Options struct {
	Node        id.Node  // whom the certificate must name
	Certificate string   // path: the node's, then intermediates
	Key         string   // path: of its private key
	CA          string   // path: of the authority's certificates
	Peers       []string // patterns of node names, as of [path.Match]; none: all
}

// Identity makes TLS configurations. Files that have changed are read again at
// the next handshake; what cannot be used then leaves the former ones in place,
// and [Identity.Err] says why. It is safe for concurrent use.
type Identity struct {
	o Options

	mu      sync.Mutex
	looked  time.Time
	stamps  [3]stamp // of the files as last read
	current material
	err     error // of the last reading
}

// material is what the files held.
type material struct {
	certificate tls.Certificate
	authority   *x509.CertPool
}

// stamp tells whether a file has changed.
type stamp struct {
	modified time.Time
	size     int64
}

// Load reads and checks the files. The error says which file, and what to do.
func Load(o Options) (*Identity, error) {
	if err := CheckPatterns(o.Peers); err != nil {
		return nil, err
	}
	i := &Identity{o: o}
	stamps, err := i.stat()
	if err != nil {
		return nil, err
	}
	if i.current, err = i.read(time.Now()); err != nil {
		return nil, err
	}
	i.stamps, i.looked = stamps, time.Now()
	return i, nil
}

// CheckPatterns refuses what [path.Match] does not understand.
func CheckPatterns(patterns []string) error {
	for _, p := range patterns {
		if _, err := path.Match(p, ""); err != nil || p == "" {
			return fmt.Errorf("pattern %.80q of allowed peers: want a node's name, in which * stands for any characters", p)
		}
	}
	return nil
}

func (i *Identity) files() [3]string { return [3]string{i.o.Certificate, i.o.Key, i.o.CA} }

func (i *Identity) stat() (stamps [3]stamp, err error) {
	for n, f := range i.files() {
		s, err := os.Stat(f)
		if err != nil {
			return stamps, fmt.Errorf("read identity: %w", err)
		}
		stamps[n] = stamp{s.ModTime(), s.Size()}
	}
	return stamps, nil
}

// read reads all files and checks that they belong together.
func (i *Identity) read(now time.Time) (material, error) {
	o := i.o
	cert, err := tls.LoadX509KeyPair(o.Certificate, o.Key)
	if err != nil {
		return material{}, fmt.Errorf("read certificate %s and key %s: %w", o.Certificate, o.Key, err)
	}
	pem, err := os.ReadFile(o.CA)
	if err != nil {
		return material{}, fmt.Errorf("read authority: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return material{}, fmt.Errorf("read authority %s: it holds no certificate in PEM", o.CA)
	}
	m := material{certificate: cert, authority: pool}
	chain, err := parseChain(cert.Certificate)
	if err != nil {
		return material{}, fmt.Errorf("read certificate %s: %w", o.Certificate, err)
	}
	for _, usage := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
		if err := m.verify(chain, usage, now); err != nil {
			return material{}, fmt.Errorf("certificate %s is not one that peers would take: %w", o.Certificate, err)
		}
	}
	if !slices.Contains(chain[0].DNSNames, string(o.Node)) {
		return material{}, fmt.Errorf("certificate %s names %q, this node is %s: issue one with the subject alternative name DNS:%s", o.Certificate, chain[0].DNSNames, o.Node, o.Node)
	}
	return m, nil
}

func parseChain(der [][]byte) ([]*x509.Certificate, error) {
	chain := make([]*x509.Certificate, 0, len(der))
	for _, d := range der {
		c, err := x509.ParseCertificate(d)
		if err != nil {
			return nil, err
		}
		chain = append(chain, c)
	}
	if len(chain) == 0 {
		return nil, errors.New("it is empty")
	}
	return chain, nil
}

// verify checks a chain for one usage.
func (m material) verify(chain []*x509.Certificate, usage x509.ExtKeyUsage, now time.Time) error {
	between := x509.NewCertPool()
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	_, err := chain[0].Verify(x509.VerifyOptions{
		Roots: m.authority, Intermediates: between, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{usage},
	})
	return err
}

// now returns what the files hold, read again if they have changed.
func (i *Identity) now() material {
	i.mu.Lock()
	defer i.mu.Unlock()
	now := time.Now()
	if now.Sub(i.looked) < reloadInterval {
		return i.current
	}
	i.looked = now
	stamps, err := i.stat()
	if err == nil && stamps == i.stamps {
		return i.current
	}
	var m material
	if err == nil {
		m, err = i.read(now)
	}
	if i.err = err; err == nil {
		i.current, i.stamps = m, stamps
	}
	return i.current
}

// Err is why files that have changed are not used; nil if those in use are the
// ones that are there.
func (i *Identity) Err() error {
	i.now()
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.err
}

// Expires is when the certificate in use ends.
func (i *Identity) Expires() time.Time {
	leaf := i.now().certificate.Leaf
	if leaf == nil {
		return time.Time{}
	}
	return leaf.NotAfter
}

// Server is the configuration of a port of the protocol: any allowed peer.
func (i *Identity) Server(protocol string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{protocol},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			c := i.now().certificate
			return &c, nil
		},
		// What the standard check does is done below, with the authority of the moment.
		ClientAuth:             tls.RequireAnyClientCert,
		SessionTicketsDisabled: true, // a resumed session would not be checked again
		VerifyConnection: func(s tls.ConnectionState) error {
			return i.verify(s, protocol, x509.ExtKeyUsageClientAuth, "")
		},
	}
}

// Client is the configuration for dialling a node, or any allowed peer with "".
func (i *Identity) Client(protocol string, node id.Node) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{protocol},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			c := i.now().certificate
			return &c, nil
		},
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection does it, with names that are not host names
		VerifyConnection: func(s tls.ConnectionState) error {
			return i.verify(s, protocol, x509.ExtKeyUsageServerAuth, node)
		},
	}
}

// verify is the rule of this package.
func (i *Identity) verify(s tls.ConnectionState, protocol string, usage x509.ExtKeyUsage, node id.Node) error {
	switch {
	case len(s.PeerCertificates) == 0:
		return fmt.Errorf("no certificate: %w", ErrRefused)
	case s.NegotiatedProtocol != protocol:
		return fmt.Errorf("protocol %q, want %q: %w", s.NegotiatedProtocol, protocol, ErrRefused)
	}
	if err := i.now().verify(s.PeerCertificates, usage, time.Now()); err != nil {
		return fmt.Errorf("%w: %w", ErrRefused, err)
	}
	names := Names(s)
	if !slices.ContainsFunc(names, i.allows) {
		return fmt.Errorf("its certificate names %q, and security.peers allows %q: %w", names, i.o.Peers, ErrRefused)
	}
	if node != "" {
		return i.Check(s, node)
	}
	return nil
}

func (i *Identity) allows(node id.Node) bool {
	if len(i.o.Peers) == 0 {
		return true
	}
	return slices.ContainsFunc(i.o.Peers, func(pattern string) bool {
		ok, _ := path.Match(pattern, string(node)) // Load has checked the pattern
		return ok
	})
}

// Names are the nodes that the peer's certificate names.
func Names(s tls.ConnectionState) []id.Node {
	if len(s.PeerCertificates) == 0 {
		return nil
	}
	var names []id.Node
	for _, n := range s.PeerCertificates[0].DNSNames {
		if node := id.Node(n); node.Validate() == nil {
			names = append(names, node)
		}
	}
	return names
}

// Check refuses a peer that speaks for a node which its certificate does not
// name, or which is not allowed. The error wraps [ErrRefused].
func (i *Identity) Check(s tls.ConnectionState, node id.Node) error {
	names := Names(s)
	switch {
	case !slices.Contains(names, node):
		return fmt.Errorf("its certificate is of %q, not of %.80q: %w", names, node, ErrRefused)
	case !i.allows(node):
		return fmt.Errorf("%s is none of security.peers %q: %w", node, i.o.Peers, ErrRefused)
	}
	return nil
}
