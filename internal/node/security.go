package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	grpcpeer "google.golang.org/grpc/peer"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
)

// errStranger: who calls does not prove the name that it gives.
var errStranger = errors.New("caller does not prove who it is")

const (
	// What strangers can make the peer port hold: so many handshakes run at once,
	// and each reads so many bytes. More wait, and a slow one makes room for them.
	maxHandshakes  = 128
	handshakeBytes = 64 << 10
	slowHandshake  = 250 * time.Millisecond

	identityInterval = 10 * time.Second // between looks at our certificate
	expirySoon       = 72 * time.Hour   // and a tenth of its time: a certificate that ends within both is told of
)

// openIdentity reads the certificates, if the configuration names any.
func (n *Node) openIdentity(context.Context) error {
	s := n.config.Security
	if !s.On() {
		return nil
	}
	i, err := identity.Load(identity.Options{
		Node: n.life.Node, Certificate: s.Certificate, Key: s.Key, CA: s.CA, Peers: s.Peers,
	})
	if err != nil {
		return fmt.Errorf("security: %w", err)
	}
	n.identity = i
	return nil
}

// security says who this node is to others, until when, and what is wrong with
// that; "" if nobody has to prove anything.
func (n *Node) security() string {
	if n.identity == nil {
		return ""
	}
	until := n.identity.Expires()
	s := fmt.Sprintf("mTLS as %s, until %s", n.life.Node, until.UTC().Format(time.RFC3339))
	if err := n.certificateTrouble(); err != nil {
		s += ": " + err.Error()
	}
	return s
}

// certificateTrouble is what an operator must mend, or will have to soon. The
// same trouble has the same text.
func (n *Node) certificateTrouble() error {
	if err := n.identity.Err(); err != nil {
		return err
	}
	if time.Until(n.identity.Expires()) < min(expirySoon, n.identity.Lasts()/10) {
		return fmt.Errorf("that is soon: replace %s and %s", n.config.Security.Certificate, n.config.Security.Key)
	}
	return nil
}

// watchIdentity says in the log when our certificate needs somebody: once for
// each trouble, and again when it is over.
func (n *Node) watchIdentity() {
	before := ""
	for {
		now, until := "", n.identity.Expires()
		if err := n.certificateTrouble(); err != nil {
			now = err.Error()
		}
		switch now {
		case before:
		case "":
			n.log.Info("certificate is in order again", "until", until)
		default:
			n.log.Warn("certificate needs attention", "until", until, "err", now)
		}
		before = now
		if !sleep(n.ctx, identityInterval) {
			return
		}
	}
}

// proven checks that who calls has a certificate of the node that it says it is.
func (n *Node) proven(ctx context.Context, node id.Node) error {
	if n.identity == nil {
		return nil
	}
	err := errors.New("no TLS")
	if p, ok := grpcpeer.FromContext(ctx); ok {
		if tls, ok := p.AuthInfo.(credentials.TLSInfo); ok {
			err = n.identity.Check(tls.State, node)
		}
	}
	if err == nil {
		return nil
	}
	n.metrics.authFailures.WithLabelValues("peer").Inc()
	n.log.Warn("caller refused", "node", node, "err", err)
	return fmt.Errorf("%w: %w", errStranger, err)
}

// peerServerCredentials shake hands with who calls the peer port.
func (n *Node) peerServerCredentials() credentials.TransportCredentials {
	if n.identity == nil {
		return insecure.NewCredentials()
	}
	return &serverCredentials{
		TransportCredentials: credentials.NewTLS(n.identity.Server(identity.Peer)), node: n, ended: make(chan struct{}),
	}
}

// serverCredentials count who is refused, and bound the handshakes that run.
type serverCredentials struct {
	credentials.TransportCredentials
	node *Node

	mu      sync.Mutex
	running []*sparingConn // the oldest first
	ended   chan struct{}  // closed when one has ended, then replaced
}

func (c *serverCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	sparing := &sparingConn{Conn: raw, left: handshakeBytes}
	if err := c.await(sparing); err != nil {
		return nil, nil, err
	}
	conn, info, err := c.TransportCredentials.ServerHandshake(sparing)
	c.end(sparing)
	sparing.left = math.MaxInt64
	if err != nil && !errors.Is(err, io.EOF) { // a probe of the port, which said nothing
		c.node.metrics.authFailures.WithLabelValues("peer").Inc()
		if errors.Is(err, identity.ErrRefused) {
			c.node.log.Warn("caller refused", "address", raw.RemoteAddr().String(), "err", err)
		} else {
			c.node.log.Debug("handshake failed", "address", raw.RemoteAddr().String(), "err", err)
		}
	}
	return conn, info, err
}

// await returns when the handshake may begin.
func (c *serverCredentials) await(conn *sparingConn) error {
	for until := time.Now().Add(connectTime); time.Now().Before(until); {
		wait, ended := c.begin(conn, time.Now())
		if wait <= 0 {
			return nil
		}
		turn := time.NewTimer(wait)
		select {
		case <-turn.C:
		case <-ended:
			turn.Stop()
		}
	}
	return fmt.Errorf("%d handshakes run: %w", maxHandshakes, errTooMany)
}

// begin returns 0, or how long to wait until one of those that run is slow.
func (c *serverCredentials) begin(conn *sparingConn, now time.Time) (wait time.Duration, ended <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.running) >= maxHandshakes {
		oldest := c.running[0]
		if wait := slowHandshake - now.Sub(oldest.began); wait > 0 {
			return wait, c.ended
		}
		c.running = c.running[1:]
		_ = oldest.Close() // whoever says nothing keeps nobody out
	}
	conn.began = now
	c.running = append(c.running, conn)
	return 0, nil
}

func (c *serverCredentials) end(conn *sparingConn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := slices.Index(c.running, conn); i >= 0 { // else it was slow
		c.running = slices.Delete(c.running, i, i+1)
	}
	close(c.ended)
	c.ended = make(chan struct{})
}

func (c *serverCredentials) Clone() credentials.TransportCredentials { return c }

// sparingConn is a connection of which only so many bytes are read. One goroutine
// reads from it at a time.
type sparingConn struct {
	net.Conn
	began time.Time // the handshake
	left  int64
}

func (c *sparingConn) Read(b []byte) (int, error) {
	if c.left <= 0 {
		return 0, fmt.Errorf("a handshake of more than %d bytes: %w", handshakeBytes, errTooMany)
	}
	n, err := c.Conn.Read(b[:min(int64(len(b)), c.left)])
	c.left -= int64(n)
	return n, err
}

// peerDialCredentials shake hands with the node, and with nobody else.
func (n *Node) peerDialCredentials(node id.Node) credentials.TransportCredentials {
	if n.identity == nil {
		return dialCredentials{insecure.NewCredentials(), explainPlain}
	}
	return dialCredentials{credentials.NewTLS(n.identity.Client(identity.Peer, node)), identity.Explain}
}

// dialCredentials put into words why nobody could be talked to: gRPC keeps the
// text of an error, and nothing else. In TLS 1.3 who dials hears of a refusal
// when it reads for the first time.
type dialCredentials struct {
	credentials.TransportCredentials
	explain func(error) error
}

func (c dialCredentials) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if err != nil {
		return nil, nil, c.explain(err)
	}
	return &firstRead{Conn: conn, explain: c.explain}, info, nil
}

func (c dialCredentials) Clone() credentials.TransportCredentials {
	return dialCredentials{c.TransportCredentials.Clone(), c.explain}
}

// explainPlain is for who dials without TLS.
func explainPlain(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) {
		return fmt.Errorf("the other side hangs up on a plain call: set security.certificate, key, and ca on all nodes or on none: %w", err)
	}
	return err
}

// firstRead is a connection whose first read explains its error. gRPC reads from
// one goroutine at a time.
type firstRead struct {
	net.Conn
	explain func(error) error
	read    bool
}

func (c *firstRead) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if !c.read && err != nil {
		err = c.explain(err)
	}
	c.read = c.read || n > 0
	return n, err
}
