package identity

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

func TestLoadSaysWhichFileAndWhatToDo(t *testing.T) {
	a, other := authority(t), authority(t)
	between := below(t, a)
	// change makes the files of node "n" with a certificate that differs.
	change := func(f func(*x509.Certificate)) func(*testing.T, Options) {
		return func(t *testing.T, o Options) {
			der, key := sign(t, a, "n", f)
			if err := o.write(der, key, a.certificate.Raw); err != nil {
				t.Fatal(err)
			}
		}
	}
	put := func(which func(Options) string, b ...[]byte) func(*testing.T, Options) {
		return func(t *testing.T, o Options) { replace(t, which(o), slices.Concat(b...)) }
	}
	certificate := func(o Options) string { return o.Certificate }
	key := func(o Options) string { return o.Key }
	ca := func(o Options) string { return o.CA }
	caPEM := encode("CERTIFICATE", a.certificate.Raw)
	leaf, leafKey := sign(t, a, "n", nil)
	secret, err := x509.MarshalPKCS8PrivateKey(leafKey)
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		spoil func(*testing.T, Options)
		file  func(Options) string // that the error names
		want  string
	}{
		"no certificate":              {func(t *testing.T, o Options) { _ = os.Remove(o.Certificate) }, certificate, "read security.certificate: open "},
		"no key":                      {func(t *testing.T, o Options) { _ = os.Remove(o.Key) }, key, "read security.key: open "},
		"no authority":                {func(t *testing.T, o Options) { _ = os.Remove(o.CA) }, ca, "read security.ca: open "},
		"a directory":                 {func(t *testing.T, o Options) { _ = errors.Join(os.Remove(o.CA), os.Mkdir(o.CA, 0o700)) }, ca, "is a directory"},
		"empty certificate":           {put(certificate), certificate, "want PEM"},
		"all empty":                   {func(t *testing.T, o Options) { put(certificate)(t, o); put(key)(t, o); put(ca)(t, o) }, certificate, "want PEM"},
		"empty key":                   {put(key), key, "want PEM"},
		"empty authority":             {put(ca), ca, "no certificate in PEM"},
		"certificate in DER":          {put(certificate, leaf), certificate, "want PEM"},
		"authority in DER":            {put(ca, a.certificate.Raw), ca, "no certificate in PEM"},
		"garbage in PEM":              {put(certificate, encode("CERTIFICATE", []byte("garbage"))), certificate, "want PEM"},
		"garbage for an authority":    {put(ca, []byte("garbage\n-----BEGIN CERTIFICATE-----\n???\n-----END CERTIFICATE-----\n")), ca, "no certificate in PEM"},
		"an authority that is broken": {put(ca, caPEM, encode("CERTIFICATE", []byte("garbage"))), ca, "certificate 2 in it"},
		"a node for an authority":     {put(ca, encode("CERTIFICATE", leaf)), ca, `certificate 1 in it, of "n", is no authority's`},
		"a key among the authorities": {put(ca, caPEM, encode("PRIVATE KEY", secret)), ca, `holds a block "PRIVATE KEY"`},
		"key of another certificate":  {put(key, encode("PRIVATE KEY", secret)), key, "private key does not match"},
		"files taken for each other":  {put(key, encode("CERTIFICATE", leaf)), key, "found a certificate rather than a key"},
		"key with a password":         {put(key, encode("ENCRYPTED PRIVATE KEY", []byte{0x30, 0x00})), key, "does not ask a password for"},
		"larger than any":             {put(ca, make([]byte, maxFile+1)), ca, "more than 1048576 bytes"},
		"another authority":           {put(ca, encode("CERTIFICATE", other.certificate.Raw)), ca, "want one that is signed by an authority of"},
		"no intermediate":             {put(ca, encode("CERTIFICATE", other.certificate.Raw), encode("CERTIFICATE", below(t, other).certificate.Raw)), ca, "intermediates after it"},
		"more intermediates than fit": {func(t *testing.T, o Options) {
			replace(t, o.Certificate, slices.Concat(content(t, o.Certificate), slices.Repeat(encode("CERTIFICATE", between.certificate.Raw), maxChain)))
		}, certificate, "holds 9 certificates, and peers take 8"},
		"an intermediate of garbage": {func(t *testing.T, o Options) {
			replace(t, o.Certificate, slices.Concat(content(t, o.Certificate), encode("CERTIFICATE", []byte("x"))))
		}, certificate, "malformed certificate"},
		"expired":                      {change(func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Second) }), certificate, "expired"},
		"not yet valid":                {change(func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Hour) }), certificate, "not yet valid"},
		"for servers only":             {change(func(c *x509.Certificate) { c.ExtKeyUsage = c.ExtKeyUsage[:1] }), certificate, "want extended key usage serverAuth and clientAuth"},
		"for clients only":             {change(func(c *x509.Certificate) { c.ExtKeyUsage = c.ExtKeyUsage[1:] }), certificate, "want extended key usage serverAuth and clientAuth"},
		"of another node":              {change(func(c *x509.Certificate) { c.DNSNames = []string{"m"} }), certificate, `is of ["m"], and this node is n: issue one with the subject alternative name DNS:n`},
		"of another case":              {change(func(c *x509.Certificate) { c.DNSNames = []string{"N"} }), certificate, `is of ["N"]`},
		"of all nodes":                 {change(func(c *x509.Certificate) { c.DNSNames = []string{"*"} }), certificate, "is of no node"},
		"name where nobody looks":      {change(elsewhere), certificate, "is of no node"},
		"no usage at all is any usage": {change(func(c *x509.Certificate) { c.ExtKeyUsage = nil }), nil, ""},
		"any usage":                    {change(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageAny} }), nil, ""},
		"words around PEM":             {put(ca, []byte("Certificate:\n    Data: ...\n"), caPEM, []byte("\nthat was it\n")), nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			o := issue(t, a, "n")
			tt.spoil(t, o)
			_, err := Load(o)
			switch {
			case tt.file == nil && err != nil:
				t.Error(err)
			case tt.file != nil && (err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), tt.file(o))):
				t.Errorf("got %v, want %q and %s", err, tt.want, tt.file(o))
			}
			if strings.Contains(fmt.Sprint(err), "PRIVATE KEY-----") {
				t.Errorf("the error shows the key: %v", err)
			}
		})
	}
}

// meets fails the test unless both can dial the other.
func meets(t *testing.T, when string, p, d *Identity) {
	t.Helper()
	for range 2 {
		if m := meet(t, p.Server(Data), d.Client(Data, p.o.Node)); m.server != nil || m.client != nil {
			t.Errorf("%s: %s dials %s: %v; %v", when, d.o.Node, p.o.Node, m.client, m.server)
		}
		p, d = d, p
	}
}

// serial names a certificate in use.
func serial(i *Identity) string { return i.now().certificate.Leaf.SerialNumber.String() }

func TestCertificateIsRotated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := authority(t)
		o := issue(t, a, "prefill-0")
		p, d := load(t, o), node(t, a, "decode-0")
		meets(t, "before", p, d)
		first, good := serial(p), content(t, o.Certificate)

		fresh := issue(t, a, "prefill-0")
		replace(t, o.Certificate, content(t, fresh.Certificate))
		if serial(p) != first || p.Err() != nil {
			t.Errorf("files are looked at more often than once a second: %v", p.Err())
		}
		time.Sleep(reloadInterval)
		if serial(p) != first {
			t.Error("a certificate is used without its key")
		}
		if err := p.Err(); err == nil || !strings.Contains(err.Error(), "private key does not match") || !strings.Contains(err.Error(), o.Key) {
			t.Errorf("half of it is there: %v", err)
		}
		meets(t, "while half of it is there", p, d)

		replace(t, o.Key, content(t, fresh.Key))
		time.Sleep(reloadInterval)
		if serial(p) == first || p.Err() != nil {
			t.Errorf("not rotated: %v", p.Err())
		}
		meets(t, "after", p, d)
		second := serial(p)

		for name, broken := range map[string][]byte{"nothing": nil, "garbage": []byte("garbage"), "its first half": content(t, o.Certificate)[:100], "the former": good} {
			replace(t, o.Certificate, broken)
			time.Sleep(reloadInterval)
			if serial(p) != second || p.Err() == nil {
				t.Errorf("%s: %v, want what was there before", name, p.Err())
			}
			meets(t, name, p, d)
		}
		if err := os.Remove(o.Certificate); err != nil {
			t.Fatal(err)
		}
		time.Sleep(reloadInterval)
		if serial(p) != second || !errors.Is(p.Err(), fs.ErrNotExist) {
			t.Errorf("no file: %v, want what was there before", p.Err())
		}
		replace(t, o.Certificate, content(t, fresh.Certificate))
		time.Sleep(reloadInterval)
		if serial(p) != second || p.Err() != nil {
			t.Errorf("mended: %v", p.Err())
		}
	})
}

// The steps of docs/operating.md: no step keeps nodes apart that are a step
// from each other, and after the last one the old authority counts for nothing.
func TestAuthorityIsRotated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		before, after := authority(t), authority(t)
		op, od := issue(t, before, "prefill-0"), issue(t, before, "decode-0")
		p, d, late := load(t, op), load(t, od), node(t, before, "late-0")
		steps := []func(Options){
			func(o Options) { // trust both
				replace(t, o.CA, slices.Concat(encode("CERTIFICATE", before.certificate.Raw), encode("CERTIFICATE", after.certificate.Raw)))
			},
			func(o Options) { // be of the new one
				fresh := issue(t, after, o.Node)
				replace(t, o.Certificate, content(t, fresh.Certificate))
				replace(t, o.Key, content(t, fresh.Key))
			},
			// trust the new one alone
			func(o Options) { replace(t, o.CA, encode("CERTIFICATE", after.certificate.Raw)) },
		}
		for n, step := range steps {
			for _, o := range []Options{op, od} { // one node after the other
				step(o)
				time.Sleep(reloadInterval)
				if err := errors.Join(p.Err(), d.Err()); err != nil {
					t.Errorf("step %d: %v", n+1, err)
				}
				meets(t, fmt.Sprintf("step %d, %s", n+1, o.Node), p, d)
			}
		}
		if m := meet(t, p.Server(Data), late.Client(Data, "")); m.server == nil || m.client == nil {
			t.Errorf("the old authority still counts: server %v, client %v", m.server, m.client)
		}
	})
}

// A disk that hangs stops one handshake, and no other.
func TestOthersDoNotWaitForTheDisk(t *testing.T) {
	a := authority(t)
	o := issue(t, a, "prefill-0")
	p, d := load(t, o), node(t, a, "decode-0")
	good := content(t, o.CA)
	if err := errors.Join(os.Remove(o.CA), syscall.Mkfifo(o.CA, 0o600)); err != nil {
		t.Fatal(err)
	}
	p.lookAgain()
	looked := make(chan material)
	go func() { looked <- p.now() }()
	pipe, err := os.OpenFile(o.CA, os.O_WRONLY, 0) // returns when somebody reads
	if err != nil {
		t.Fatal(err)
	}
	p.lookAgain() // it is high time, but somebody does
	meets(t, "while the authority is being read", p, d)
	select {
	case <-looked:
		t.Error("it did not wait")
	default:
	}
	if _, err := pipe.Write(good); err != nil {
		t.Error(err)
	}
	if err := pipe.Close(); err != nil {
		t.Error(err)
	}
	<-looked
}

// Handshakes of all sides run while files change.
func TestRotationWhileNodesMeet(t *testing.T) {
	a := authority(t)
	op := issue(t, a, "prefill-0")
	p, d := load(t, op), node(t, a, "decode-0")
	stop := make(chan struct{})
	var running sync.WaitGroup
	for range 4 {
		running.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if m := meet(t, p.Server(Data), d.Client(Data, "prefill-0")); m.server != nil || m.client != nil {
					t.Errorf("server %v, client %v", m.server, m.client)
					return
				}
				_, _ = p.Err(), p.Expires()
			}
		})
	}
	seen := map[string]bool{}
	for range 8 {
		fresh := issue(t, a, "prefill-0")
		replace(t, op.Certificate, content(t, fresh.Certificate))
		p.lookAgain()
		_ = serial(p)
		replace(t, op.Key, content(t, fresh.Key))
		p.lookAgain()
		_ = serial(p)
		meets(t, "here", p, d)
		seen[serial(p)] = true
	}
	close(stop)
	running.Wait()
	if len(seen) < 2 {
		t.Error("nothing was rotated")
	}
}

func TestIssueKeepsTheKeyToItself(t *testing.T) {
	a := authority(t)
	dir := t.TempDir()
	o, err := a.Issue(dir, "n")
	if err != nil {
		t.Fatal(err)
	}
	for path, mode := range map[string]os.FileMode{o.Key: 0o600, o.Certificate: 0o644, o.CA: 0o644} {
		if i, err := os.Stat(path); err != nil || i.Mode().Perm() != mode {
			t.Errorf("%s: %v %v, want mode %v", path, i.Mode(), err, mode)
		}
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 3 {
		t.Errorf("left %v, %v", left, err)
	}
	if o, err = a.Issue(dir+"/fresh", "n"); err != nil {
		t.Fatal(err)
	}
	if i, err := os.Stat(dir + "/fresh"); err != nil || i.Mode().Perm() != 0o700 {
		t.Errorf("directory: %v %v, want mode 0700", i.Mode(), err)
	}
	_ = load(t, o)
	if _, err := a.Issue(o.Key, "n"); !errors.Is(err, syscall.ENOTDIR) {
		t.Errorf("into a file: %v", err)
	}
}
