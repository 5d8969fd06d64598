package identity

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"
)

// maxFile bounds a file: a bundle of hundreds of certificates is less.
const maxFile = 1 << 20

// material is what the files held: parsed, and as it was.
type material struct {
	certificate *tls.Certificate
	authority   *x509.CertPool
	raw         [3][]byte // of certificate, key, CA
}

// read reads the files and checks that they belong together, unless they hold
// what they held before. Times of files tell too little: one may be replaced by
// an older one, or twice in a tick.
func read(o Options, former material) (material, error) {
	var m material
	for n, file := range []struct{ key, path string }{{"certificate", o.Certificate}, {"key", o.Key}, {"ca", o.CA}} {
		b, err := readFile(file.path)
		if err != nil {
			return m, fmt.Errorf("read security.%s: %w", file.key, err)
		}
		m.raw[n] = b
	}
	if former.certificate != nil && slices.EqualFunc(m.raw[:], former.raw[:], bytes.Equal) {
		return former, nil
	}
	cert, err := tls.X509KeyPair(m.raw[0], m.raw[1])
	if err != nil {
		return m, fmt.Errorf("read certificate %s and key %s: %w (want PEM; a key that openssl does not ask a password for)", o.Certificate, o.Key, err)
	}
	m.certificate = &cert
	if m.authority, err = parseAuthority(m.raw[2]); err != nil {
		return m, fmt.Errorf("read authority %s: %w", o.CA, err)
	}
	chain, err := parseChain(cert)
	if err != nil {
		return m, fmt.Errorf("read certificate %s: %w", o.Certificate, err)
	}
	// Every node dials, and is dialled.
	for _, usage := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
		if err := m.verify(chain, usage); err != nil {
			return m, fmt.Errorf("no peer would take certificate %s: %w%s", o.Certificate, err, advice(err, o))
		}
	}
	if !slices.Contains(names(chain[0]), o.Node) {
		return m, fmt.Errorf("certificate %s is of %s, and this node is %s: issue one with the subject alternative name DNS:%s, or set node.name", o.Certificate, list(names(chain[0])), o.Node, o.Node)
	}
	return m, nil
}

// readFile reads at most maxFile bytes.
func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(b) > maxFile {
		err = fmt.Errorf("%s has more than %d bytes", path, maxFile)
	}
	return b, err
}

// parseAuthority takes certificates and nothing else: one that is left out
// shuts out nodes, and one that is a private key lies in the wrong file.
func parseAuthority(rest []byte) (*x509.CertPool, error) {
	pool, n := x509.NewCertPool(), 0
	for {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("it holds a block %.40q; want certificates alone", block.Type)
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("certificate %d in it: %w", n+1, err)
		}
		if !c.IsCA {
			return nil, fmt.Errorf("certificate %d in it, of %.80q, is no authority's (CA:TRUE)", n+1, c.Subject.CommonName)
		}
		pool.AddCert(c)
		n++
	}
	if n == 0 {
		return nil, errors.New("it holds no certificate in PEM")
	}
	return pool, nil
}

// parseChain returns what peers will see.
func parseChain(cert tls.Certificate) ([]*x509.Certificate, error) {
	if n := len(cert.Certificate); n > maxChain {
		return nil, fmt.Errorf("it holds %d certificates, and peers take %d: want this node's, then intermediates", n, maxChain)
	}
	chain := []*x509.Certificate{cert.Leaf}
	for _, der := range cert.Certificate[1:] {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, err
		}
		chain = append(chain, c)
	}
	return chain, nil
}

// verify checks a chain for one usage.
func (m material) verify(chain []*x509.Certificate, usage x509.ExtKeyUsage) error {
	between := x509.NewCertPool()
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	_, err := chain[0].Verify(x509.VerifyOptions{
		Roots: m.authority, Intermediates: between, CurrentTime: time.Now(), KeyUsages: []x509.ExtKeyUsage{usage},
	})
	return err
}

// advice is what to do about a certificate of our own that does not verify.
func advice(err error, o Options) string {
	if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		return fmt.Sprintf(" (want one that is signed by an authority of %s, intermediates after it)", o.CA)
	}
	return remedy(err)
}

// remedy is what to do about a certificate of either side that does not verify.
func remedy(err error) string {
	if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		return " (both nodes need one authority in security.ca, and certificates of it in security.certificate)"
	}
	invalid, _ := errors.AsType[x509.CertificateInvalidError](err)
	switch {
	case invalid.Cert == nil:
		return ""
	case invalid.Reason == x509.Expired:
		return " (renew security.certificate of that node, or set the clocks)"
	case invalid.Reason == x509.IncompatibleUsage:
		return " (want extended key usage serverAuth and clientAuth: every node dials and is dialled)"
	}
	return ""
}
