package identity

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"time"

	"github.com/kvferry/kvferry/internal/id"
)

// Authority issues certificates for local clusters and tests. A cluster that
// matters has an authority of its own.
type Authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

// NewAuthority makes one that ends after that long, and all that it issues with
// it.
func NewAuthority(name string, valid time.Duration) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make authority: %w", err)
	}
	template, err := template(name, time.Now().Add(valid))
	if err != nil {
		return nil, fmt.Errorf("make authority: %w", err)
	}
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage = x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make authority: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("make authority: %w", err)
	}
	return &Authority{certificate: cert, key: key}, nil
}

func template(name string, end time.Time) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	return &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: end, // an hour back, for clocks that differ
	}, nil
}

// Files are the options of what [Authority.Issue] writes into a directory.
func Files(dir string, node id.Node) Options {
	return Options{
		Node:        node,
		Certificate: filepath.Join(dir, "node.pem"), Key: filepath.Join(dir, "node.key"), CA: filepath.Join(dir, "ca.pem"),
	}
}

// Issue writes the node's certificate, its key, and the authority's
// certificate into a directory, which it makes if there is none, and returns
// the options that read them.
func (a *Authority) Issue(dir string, node id.Node) (Options, error) {
	o := Files(dir, node)
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		err = a.issue(o)
	}
	if err != nil {
		return Options{}, fmt.Errorf("issue a certificate for %s: %w", node, err)
	}
	return o, nil
}

func (a *Authority) issue(o Options) error {
	t, err := template(string(o.Node), a.certificate.NotAfter)
	if err != nil {
		return err
	}
	t.DNSNames = []string{string(o.Node)}
	t.KeyUsage = x509.KeyUsageDigitalSignature
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	der, key, err := a.sign(t)
	if err != nil {
		return err
	}
	return o.write(der, key, a.certificate.Raw)
}

// sign returns a certificate in DER and its new key.
func (a *Authority) sign(t *x509.Certificate) ([]byte, *ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, t, a.certificate, key.Public(), a.key)
	return der, key, err
}

// write writes the files of an identity.
func (o Options) write(certificate []byte, key *ecdsa.PrivateKey, authority []byte) error {
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	for _, f := range []struct {
		path, kind string
		der        []byte
		mode       os.FileMode
	}{
		{o.Certificate, "CERTIFICATE", certificate, 0o644},
		{o.Key, "PRIVATE KEY", secret, 0o600},
		{o.CA, "CERTIFICATE", authority, 0o644},
	} {
		if err := os.WriteFile(f.path, pem.EncodeToMemory(&pem.Block{Type: f.kind, Bytes: f.der}), f.mode); err != nil {
			return err
		}
	}
	return nil
}
