// Package identity is who a node is to others, and who others are to it: a
// certificate whose subject alternative name is the node's name, an authority
// that both sides trust, and the names that are let in. It makes the TLS
// configurations of every port that peers reach, so that one rule holds for
// all of them:
//
//   - TLS 1.3, a certificate on both sides, both of the authority;
//   - a peer is the nodes that its certificate names (DNS names, compared byte
//     by byte: they are node names, nobody looks them up, and * is no name);
//   - one of them must be allowed; who was dialled by name must have that name.
//
// What a peer then says of itself is checked with [Identity.Check] where it says
// it.
//
// In TLS 1.3 the side that dials is done first: that its own certificate was
// refused shows in its first read. Nothing here cuts a connection that stands:
// it outlives its certificates, and a change of the authority.
package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvferry/kvferry/internal/id"
)

// ErrRefused: a certificate is not of the authority, out of date, for another
// usage, or of a node that is not allowed or not the one that was meant; or the
// connection is meant for another port.
var ErrRefused = errors.New("peer's identity is refused")

// Protocols that are negotiated (ALPN), so that a connection to one port can't
// be passed on to another.
const (
	Gossip = "kvferry-gossip/1"
	Data   = "kvferry-data/1"
	Peer   = "h2" // gRPC chooses it
)

// reloadInterval is how often files are looked at for a change, at most.
const reloadInterval = time.Second

// maxChain bounds the certificates of a peer: its own, and intermediates.
// crypto/tls reads at most 256 KiB of them, keys of at most 8192 bits; that, and
// what it parses from it, is what a stranger can make us hold.
const maxChain = 8

// Options are the files of an identity, all in PEM, and whom it lets in.
type Options struct {
	Node        id.Node  // whom the certificate must name; always let in
	Certificate string   // path: the node's, then intermediates
	Key         string   // path: of its private key, not encrypted
	CA          string   // path: of the authority's certificates
	Peers       []string // patterns of node names, as of [path.Match]; none: all
}

// Identity makes TLS configurations. Files that have changed are read again at
// a handshake, and used from the next one on; what cannot be used then leaves
// the former ones in place, and [Identity.Err] says why. It is safe for
// concurrent use.
type Identity struct {
	o Options

	mu      sync.Mutex
	looked  time.Time // at the files
	looking bool      // somebody does
	current material
	err     error // of the last look
}

// Load reads and checks the files. The error says which file, and what to do.
func Load(o Options) (*Identity, error) {
	m, err := read(o, material{})
	if err != nil {
		return nil, err
	}
	return &Identity{o: o, looked: time.Now(), current: m}, nil
}

// now returns what the files held when they were last looked at, and looks
// again if that is a while ago. Only who looks waits for the disk.
func (i *Identity) now() material {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.looking || time.Since(i.looked) < reloadInterval {
		return i.current
	}
	i.looking, i.looked = true, time.Now()
	former := i.current
	i.mu.Unlock()
	m, err := read(i.o, former)
	i.mu.Lock()
	i.looking, i.err = false, err
	if err == nil {
		i.current = m
	}
	return i.current
}

// Err is what an operator must mend: why files that have changed are not used,
// or that the certificate in use has run out.
func (i *Identity) Err() error {
	until := i.Expires()
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.err == nil && time.Now().After(until) {
		return fmt.Errorf("certificate %s ran out at %s: replace it", i.o.Certificate, until.UTC().Format(time.RFC3339))
	}
	return i.err
}

// Expires is when the certificate in use ends.
func (i *Identity) Expires() time.Time { return i.now().certificate.Leaf.NotAfter }

// Lasts is how long the certificate in use is valid from beginning to end.
func (i *Identity) Lasts() time.Duration {
	leaf := i.now().certificate.Leaf
	return leaf.NotAfter.Sub(leaf.NotBefore)
}

// Server is the configuration of a port of the protocol: any allowed peer.
func (i *Identity) Server(protocol string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{protocol},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return i.now().certificate, nil
		},
		// What the standard check does is done below, with the authority of the moment.
		ClientAuth:             tls.RequireAnyClientCert,
		SessionTicketsDisabled: true, // a session that is resumed shows the authority of its beginning
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
			return i.now().certificate, nil
		},
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection does it, with names that are not host names
		VerifyConnection: func(s tls.ConnectionState) error {
			return i.verify(s, protocol, x509.ExtKeyUsageServerAuth, node)
		},
	}
}

// verify is the rule of this package. That the peer has the key of its
// certificate is checked by crypto/tls, on the server after this.
func (i *Identity) verify(s tls.ConnectionState, protocol string, usage x509.ExtKeyUsage, node id.Node) error {
	switch {
	case len(s.PeerCertificates) == 0:
		return fmt.Errorf("no certificate: %w", ErrRefused)
	case len(s.PeerCertificates) > maxChain:
		return fmt.Errorf("%d certificates, want at most %d: %w", len(s.PeerCertificates), maxChain, ErrRefused)
	case s.NegotiatedProtocol != protocol:
		return fmt.Errorf("protocol %q, want %q: %w", s.NegotiatedProtocol, protocol, ErrRefused)
	}
	if err := i.now().verify(s.PeerCertificates, usage); err != nil {
		return fmt.Errorf("%w: %w%s", ErrRefused, err, remedy(err))
	}
	if node != "" {
		return i.Check(s, node)
	}
	if names := Names(s); !slices.ContainsFunc(names, i.allows) {
		return fmt.Errorf("its certificate is of %s, and security.peers allows %q: %w", list(names), i.o.Peers, ErrRefused)
	}
	return nil
}

// allows lets in the node itself, too: it may come by its own address.
func (i *Identity) allows(node id.Node) bool {
	if len(i.o.Peers) == 0 || node == i.o.Node {
		return true
	}
	return slices.ContainsFunc(i.o.Peers, func(pattern string) bool {
		ok, err := path.Match(pattern, string(node))
		return ok && err == nil
	})
}

// Names are the nodes that the peer's certificate names.
func Names(s tls.ConnectionState) []id.Node {
	if len(s.PeerCertificates) == 0 {
		return nil
	}
	return names(s.PeerCertificates[0])
}

// names leaves out what is no node's name: wildcards, for one.
func names(c *x509.Certificate) []id.Node {
	var names []id.Node
	for _, n := range c.DNSNames {
		if node := id.Node(n); node.Validate() == nil {
			names = append(names, node)
		}
	}
	return names
}

// list shows names in an error, and only the first of a great many.
func list(names []id.Node) string {
	const most = 4
	switch {
	case len(names) == 0:
		return "no node"
	case len(names) > most:
		return fmt.Sprintf("%q and %d more", names[:most], len(names)-most)
	}
	return fmt.Sprintf("%q", names)
}

// Check refuses a peer that speaks for a node which its certificate does not
// name, or which is not allowed. The error wraps [ErrRefused].
func (i *Identity) Check(s tls.ConnectionState, node id.Node) error {
	names := Names(s)
	switch {
	case !slices.Contains(names, node):
		return fmt.Errorf("its certificate is of %s, not of %.80q: %w", list(names), node, ErrRefused)
	case !i.allows(node):
		return fmt.Errorf("%s is none of security.peers %q: %w", node, i.o.Peers, ErrRefused)
	}
	return nil
}

// Explain adds to the error of a handshake, or of the first read after one,
// what is behind it if the other side has no TLS or refuses this one: all that
// crypto/tls can tell of either is how its bytes looked. Other errors it returns
// as they are.
func Explain(err error) error {
	_, plain := errors.AsType[tls.RecordHeaderError](err)
	switch {
	case err == nil || errors.Is(err, ErrRefused):
		return err
	case plain:
		return fmt.Errorf("the other side speaks no TLS: set security.certificate, key, and ca on all nodes or on none: %w", err)
	// An alert has no type of its own that could be asked for.
	case strings.Contains(err.Error(), "remote error: tls: "):
		return fmt.Errorf("the other side refuses this node, and its log says why: %w", err)
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return fmt.Errorf("the other side hangs up on TLS: is security.certificate set there, too: %w", err)
	}
	return err
}
