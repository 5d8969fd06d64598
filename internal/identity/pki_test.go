package identity

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
)

func authority(t *testing.T) *Authority {
	t.Helper()
	a, err := NewAuthority("test", 24*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// files are where an identity of that node will be, in a directory of its own.
func files(t *testing.T, node id.Node) Options {
	t.Helper()
	return Files(t.TempDir(), node)
}

// issue makes the files of a node.
func issue(t *testing.T, a *Authority, node id.Node) Options {
	t.Helper()
	o, err := a.Issue(t.TempDir(), node)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// sign makes what a node of that name gets, but for a change.
func sign(t *testing.T, a *Authority, node id.Node, change func(*x509.Certificate)) ([]byte, *ecdsa.PrivateKey) {
	t.Helper()
	c, err := template(string(node), a.certificate.NotAfter)
	if err != nil {
		t.Fatal(err)
	}
	c.DNSNames = []string{string(node)}
	c.KeyUsage = x509.KeyUsageDigitalSignature
	c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	if change != nil {
		change(c)
	}
	der, key, err := a.sign(c)
	if err != nil {
		t.Fatal(err)
	}
	return der, key
}

// below makes an authority that another one has signed.
func below(t *testing.T, a *Authority) *Authority {
	t.Helper()
	der, key := sign(t, a, "between", func(c *x509.Certificate) {
		c.IsCA, c.BasicConstraintsValid, c.KeyUsage, c.ExtKeyUsage, c.DNSNames = true, true, x509.KeyUsageCertSign, nil, nil
	})
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &Authority{certificate: cert, key: key}
}

func load(t *testing.T, o Options) *Identity {
	t.Helper()
	i, err := Load(o)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func node(t *testing.T, a *Authority, name id.Node, peers ...string) *Identity {
	t.Helper()
	o := issue(t, a, name)
	o.Peers = peers
	return load(t, o)
}

// raw is a side that checks nothing and shows what it is told to: no node of
// ours.
func raw(protocol string, chain ...tls.Certificate) *tls.Config {
	return &tls.Config{
		InsecureSkipVerify: true, ClientAuth: tls.RequestClientCert, NextProtos: []string{protocol}, Certificates: chain,
	}
}

func shown(der []byte, key *ecdsa.PrivateKey, between ...[]byte) tls.Certificate {
	return tls.Certificate{Certificate: append([][]byte{der}, between...), PrivateKey: key}
}

// meeting is what came of a handshake and a byte after it, on each side.
type meeting struct {
	server, client           error
	serverState, clientState tls.ConnectionState
}

func meet(t *testing.T, server, client *tls.Config) meeting {
	t.Helper()
	a, b := pipe(t)
	var m meeting
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer a.Close()
		s := tls.Server(a, server)
		if m.server = s.Handshake(); m.server == nil {
			m.serverState = s.ConnectionState()
			_, m.server = s.Write([]byte("x"))
		}
	}()
	c := tls.Client(b, client)
	if m.client = c.Handshake(); m.client == nil {
		m.clientState = c.ConnectionState()
		_, m.client = c.Read(make([]byte, 1)) // the server is done after us
	}
	b.Close()
	<-done
	return m
}

// pipe is [net.Pipe] as a network is: who writes does not wait for a reader.
// Else two sides that refuse each other would wait for ever.
func pipe(t *testing.T) (a, b net.Conn) {
	t.Helper()
	ends := [2]net.Conn{}
	ends[0], ends[1] = net.Pipe()
	for n, c := range ends {
		if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		w := &wire{Conn: c, out: make(chan []byte, 64), flushed: make(chan struct{})}
		go w.pump()
		ends[n] = w
	}
	return ends[0], ends[1]
}

type wire struct {
	net.Conn
	out     chan []byte
	flushed chan struct{}
}

func (w *wire) pump() {
	defer close(w.flushed)
	for b := range w.out {
		_, _ = w.Conn.Write(b) // the other side may have gone
	}
}

func (w *wire) Write(b []byte) (int, error) {
	w.out <- bytes.Clone(b)
	return len(b), nil
}

// Close is called once.
func (w *wire) Close() error {
	close(w.out)
	<-w.flushed
	return w.Conn.Close()
}

// lookAgain lets the next handshake look at the files.
func (i *Identity) lookAgain() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.looked = time.Time{}
}

func replace(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := errors.Join(os.WriteFile(path+".next", b, 0o600), os.Rename(path+".next", path)); err != nil {
		t.Fatal(err)
	}
}

func content(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
