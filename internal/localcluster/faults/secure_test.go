package faults

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
	"github.com/kvferry/kvferry/internal/localcluster"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// authority issues certificates that are valid for so long.
func authority(t *testing.T, valid time.Duration) *identity.Authority {
	t.Helper()
	a, err := identity.NewAuthority("of the test", valid)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// issue writes a certificate for a node into a new directory.
func issue(t *testing.T, a *identity.Authority, node string) identity.Options {
	t.Helper()
	dir, err := os.MkdirTemp(built.dir, "i")
	if err != nil {
		t.Fatal(err)
	}
	o, err := a.Issue(dir, id.Node(node))
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// use gives a configuration the files of an identity.
func use(c *config.Config, o identity.Options) {
	c.Security.Certificate, c.Security.Key, c.Security.CA = o.Certificate, o.Key, o.CA
}

// asWhoever is the identity of files, for a client of ours.
func asWhoever(t *testing.T, o identity.Options) *identity.Identity {
	t.Helper()
	i, err := identity.Load(o)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// foreign is a certificate of an authority that nobody knows, with trust in the
// nodes of a cluster all the same.
func foreign(t *testing.T, node string, trusted localcluster.Node) *identity.Identity {
	t.Helper()
	o := issue(t, authority(t, time.Hour), node)
	replace(t, o.CA, o.CA, filepath.Join(trusted.Dir, "ca.pem"))
	return asWhoever(t, o)
}

// replace puts the content of files into another's place, as an operator does.
func replace(t *testing.T, to string, from ...string) {
	t.Helper()
	var all []byte
	for _, path := range from {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, b...)
	}
	if err := os.WriteFile(to+".next", all, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(to+".next", to); err != nil {
		t.Fatal(err)
	}
}

// callPeer opens a connection to a node's peer port for the test's time, whoever
// is there; nil: without TLS.
func callPeer(t *testing.T, n localcluster.Node, who *identity.Identity) kvferrypb.PeerClient {
	t.Helper()
	creds := insecure.NewCredentials()
	if who != nil {
		careless := who.Client(identity.Peer, "")
		careless.VerifyConnection = nil
		creds = credentials.NewTLS(careless)
	}
	conn, err := grpc.NewClient("passthrough:///"+n.Peer.String(), grpc.WithTransportCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return kvferrypb.NewPeerClient(conn)
}

// greets says hello to a node in somebody's name.
func greets(t *testing.T, n localcluster.Node, who *identity.Identity, as string) (*kvferrypb.HelloResponse, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), callLimit)
	defer cancel()
	return callPeer(t, n, who).Hello(ctx, &kvferrypb.HelloRequest{From: &kvferrypb.Life{Node: as, Incarnation: 1}, To: n.Node})
}

// guests are the nodes of the tests that a secure cluster lets in.
const letIn = "security.peers=prefill-*,decode-*,guest*"

// TestSecureCluster is a cluster with certificates and a gossip key: at work, when
// its authority is changed under load, with strangers of every kind at its ports,
// and with two nodes of one name.
func TestSecureCluster(t *testing.T) {
	t.Parallel()
	c := start(t, localcluster.Options{Prefill: 2, Decode: 2, Secure: true, Set: []string{letIn, "timers.hold=5m"}})
	names := []string{"prefill-0", "prefill-1", "decode-0", "decode-1"}
	l := startLoad(t, c.engine("prefill-0"), c.engine("decode-0"), 60)
	l.more(2)
	t.Run("at work", func(t *testing.T) { secureWork(t, c, names) })

	former := identity.Files(t.TempDir(), "decode-1")
	for from, to := range map[string]string{"node.pem": former.Certificate, "node.key": former.Key, "ca.pem": former.CA} {
		replace(t, to, filepath.Join(c.must("decode-1").Dir, from))
	}
	a := authority(t, 48*time.Hour)
	t.Run("the authority is changed", func(t *testing.T) { changeAuthority(t, c, l, a, former) })
	if t.Failed() {
		t.FailNow() // the rest has certificates of the new one
	}
	t.Run("strangers", func(t *testing.T) { strangers(t, c, l, a) })
	t.Run("raw callers", func(t *testing.T) { rawCallers(t, c, a) })
	t.Run("one name twice", func(t *testing.T) { oneNameTwice(t, c, a) })

	l.more(2)
	l.end()
	for _, n := range c.Nodes() {
		awaitSeen(t, c, n.Node, names)
	}
}

// awaitSeen waits until a node sees these members in their present lives, and
// nobody else.
func awaitSeen(t *testing.T, c *cluster, node string, names []string) {
	t.Helper()
	admin := dial(t, c.must(node).Engine)
	await(t, node+" to see all", patience, func(ctx context.Context) error {
		seen, err := lives(ctx, admin)
		for _, name := range names {
			if err == nil && seen[name] != c.must(name).Incarnation {
				err = fmt.Errorf("it sees %s in life %d, want %d", name, seen[name], c.must(name).Incarnation)
			}
		}
		if err == nil && len(seen) != len(names) {
			err = fmt.Errorf("it sees %v", seen)
		}
		return err
	})
}

// secureWork moves requests in every way, and looks at what nodes say of it.
func secureWork(t *testing.T, c *cluster, names []string) {
	for i, way := range []struct {
		target      string
		byReference bool
	}{{"decode-1", true}, {"decode-1", false}, {"", true}, {"", false}} {
		r := newRequest(fmt.Sprint("secure ", i), 60+i)
		r.target = way.target
		if err := move(t.Context(), r, c.engine("prefill-1"), c.engine("decode-1"), way.byReference, patience); err != nil {
			t.Errorf("%+v: %v", way, err)
		}
	}
	for _, n := range c.Nodes() {
		awaitSeen(t, c, n.Node, names)
		admin := dial(t, n.Engine)
		s, err := admin.Status(t.Context(), &kvferrypb.StatusRequest{})
		if err != nil || !s.GetReady() || !strings.HasPrefix(s.GetSecurity(), "mTLS as "+n.Node+", until ") {
			t.Errorf("%s: ready %v %v, security %q: %v", n.Node, s.GetReady(), s.GetNotReady(), s.GetSecurity(), err)
		}
		await(t, n.Node+" to be connected with all", patience, func(ctx context.Context) error {
			peers, err := admin.Peers(ctx, &kvferrypb.PeersRequest{})
			for _, p := range peers.GetItems() {
				if p.GetState() != "connected" {
					err = errors.Join(err, fmt.Errorf("%v", p))
				}
			}
			if err == nil && len(peers.GetItems()) != len(names)-1 {
				err = fmt.Errorf("peers %v", peers.GetItems())
			}
			return err
		})
		// A caller whom a machine that stands still makes give up its handshake
		// counts as well, but nobody's identity is refused.
		if log, err := os.ReadFile(n.Log()); err != nil || bytes.Contains(log, []byte(identity.ErrRefused.Error())) {
			t.Errorf("%s has refused %v callers, and there were none to refuse: %v\n%s", n.Node, authFailures(t, n, ""), err, log)
		}
	}
}

// authFailures is how many callers a node has refused, at one surface or at all.
func authFailures(t *testing.T, n localcluster.Node, surface string) float64 {
	t.Helper()
	var labels []string
	if surface != "" {
		labels = append(labels, fmt.Sprintf("surface=%q", surface))
	}
	v, err := metric(t.Context(), n.HTTP.String(), "kvferry_auth_failures_total", labels...)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// awaitRefusals checks that a node has counted more of them, or none.
func awaitRefusals(t *testing.T, n localcluster.Node, surface string, before float64, more bool) {
	t.Helper()
	await(t, "refusals at "+surface, hangLimit, func(context.Context) error {
		if after := authFailures(t, n, surface); (after > before) != more {
			return fmt.Errorf("%s has counted %v after %v", n.Node, after, before)
		}
		return nil
	})
}

// changeAuthority does it in the three steps of the manual while requests move.
// Nobody is disturbed, and from the last step on only the new certificates are
// good.
func changeAuthority(t *testing.T, c *cluster, l *load, a *identity.Authority, former identity.Options) {
	guest := issue(t, a, "guest")
	only, both := guest.CA, guest.CA+".both"
	replace(t, both, former.CA, only)
	guest.CA = both
	newcomer, leaver := asWhoever(t, guest), asWhoever(t, former)
	// Each node has looked at its files again when it lets somebody in, or does not.
	awaitStep := func(what string, who *identity.Identity, as string, good bool) {
		t.Helper()
		for _, n := range c.Nodes() {
			await(t, n.Node+": "+what, patience, func(context.Context) error {
				_, err := greets(t, n, who, as)
				if !good && err == nil {
					return errors.New("it was answered")
				} else if !good {
					return nil
				}
				return err
			})
		}
		l.more(2)
	}
	if _, err := greets(t, c.must("prefill-0"), newcomer, "guest"); status.Code(err) != codes.Unavailable {
		t.Fatalf("before anything has changed a certificate of the new authority ends with %v", err)
	}
	for _, n := range c.Nodes() {
		replace(t, filepath.Join(n.Dir, "ca.pem"), both)
	}
	awaitStep("both authorities are good", newcomer, "guest", true)
	for _, n := range c.Nodes() {
		own := issue(t, a, n.Node)
		replace(t, filepath.Join(n.Dir, "node.key"), own.Key)
		replace(t, filepath.Join(n.Dir, "node.pem"), own.Certificate)
	}
	for _, n := range c.Nodes() {
		want, err := tls.LoadX509KeyPair(filepath.Join(n.Dir, "node.pem"), filepath.Join(n.Dir, "node.key"))
		if err != nil {
			t.Fatal(err)
		}
		for name, port := range map[string]struct{ protocol, address string }{
			"gossip": {identity.Gossip, n.Gossip.String()}, "peer": {identity.Peer, n.Peer.String()}, "data": {identity.Data, n.Data.String()},
		} {
			await(t, n.Node+" to show its new certificate on the port of "+name, patience, func(ctx context.Context) error {
				conn, err := (&tls.Dialer{Config: newcomer.Client(port.protocol, id.Node(n.Node))}).DialContext(ctx, "tcp", port.address)
				if err != nil {
					return err
				}
				defer conn.Close()
				if c, ok := conn.(*tls.Conn); !ok || !bytes.Equal(c.ConnectionState().PeerCertificates[0].Raw, want.Certificate[0]) {
					return errors.New("it shows another")
				}
				return nil
			})
		}
	}
	l.more(2)
	for _, n := range c.Nodes() {
		replace(t, filepath.Join(n.Dir, "ca.pem"), only)
	}
	awaitStep("the old authority is good no more", leaver, "decode-1", false)

	// Those that stand go on; who starts now makes all of its connections anew.
	for _, name := range []string{"prefill-1", "decode-1"} {
		if err := c.Restart(c.ctx, name, true); err != nil {
			t.Fatal(err)
		}
	}
	for _, from := range []string{"prefill-0", "prefill-1"} {
		for _, to := range []string{"decode-0", "decode-1"} {
			if err := move(t.Context(), newRequest("new certificates "+from+to, 60), c.engine(from), c.engine(to), true, patience); err != nil {
				t.Error(err)
			}
		}
	}
	for _, n := range c.Nodes() {
		s, err := dial(t, n.Engine).Status(t.Context(), &kvferrypb.StatusRequest{})
		if err != nil || !s.GetReady() || !strings.HasPrefix(s.GetSecurity(), "mTLS as "+n.Node+", until ") || strings.Count(s.GetSecurity(), ":") > 2 {
			t.Errorf("%s: ready %v %v, security %q: %v", n.Node, s.GetReady(), s.GetNotReady(), s.GetSecurity(), err)
		}
		ends, err := metric(t.Context(), n.HTTP.String(), "kvferry_certificate_expires_seconds")
		if left := time.Until(time.Unix(int64(ends), 0)); err != nil || left < 47*time.Hour || left > 48*time.Hour {
			t.Errorf("%s: the certificate ends in %v: %v", n.Node, left, err)
		}
	}
}

// strangers starts agents that should not come in, each wrong in one thing. None
// of them is seen, nothing of it can be read, it can read nothing, and it says
// what to do.
func strangers(t *testing.T, c *cluster, l *load, a *identity.Authority) {
	kept := newRequest("kept from strangers", 60)
	if err := c.engine("prefill-1").publish(t.Context(), kept); err != nil {
		t.Fatal(err)
	}
	before := make(map[string]uint64)
	for _, n := range c.Nodes() {
		before[n.Node] = n.Incarnation
	}
	var all []*stranger
	var configs []*config.Config
	for name, k := range map[string]struct {
		change func(c *config.Config)
		counts bool     // its calls are counted at the gossip port; else it does not come so far
		says   []string // the reason in its readiness
	}{
		"no certificate": {
			func(c *config.Config) { c.Security = config.Security{} },
			true,
			[]string{"speaks TLS", "set security.certificate, key, and ca on all nodes or on none"},
		},
		"another authority": {
			func(c *config.Config) { use(c, issue(t, authority(t, time.Hour), c.Node.Name)) },
			true,
			[]string{"certificate signed by unknown authority"},
		},
		"not let in": {
			func(c *config.Config) {
				c.Node.Name, c.Security.Peers = "uninvited", nil
				use(c, issue(t, a, c.Node.Name))
			},
			true,
			[]string{"refuses this node, and its log says why"},
		},
		"another gossip key": {
			func(c *config.Config) {
				use(c, issue(t, a, c.Node.Name))
				c.Cluster.Keyring = []config.Key{make(config.Key, config.KeyBytes)}
			},
			false,
			[]string{"cluster.keyring"},
		},
		"another cluster": {
			func(c *config.Config) {
				use(c, issue(t, a, c.Node.Name))
				c.Cluster.Name = "another"
			},
			false,
			[]string{"is cluster.name the same there"},
		},
	} {
		conf := another(t, c.must("prefill-0"), "guest-"+strings.ReplaceAll(name, " ", "-"))
		k.change(conf)
		configs = append(configs, conf)
		all = append(all, &stranger{says: k.says, counts: k.counts, own: newRequest("of "+conf.Node.Name, 60)})
	}
	for i, a := range startAgents(t, configs...) {
		s := all[i]
		s.agent, s.engine = a, attach(t, a.Engine)
		if err := s.engine.publish(t.Context(), s.own); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range all {
		t.Run(s.Node, func(t *testing.T) { s.check(t, c, kept) })
	}
	t.Run("another's certificate", func(t *testing.T) {
		conf := another(t, c.must("prefill-0"), "guest-impostor")
		use(conf, issue(t, a, "decode-1"))
		refused(t, conf, "is of [\"decode-1\"], and this node is guest-impostor", "DNS:guest-impostor")
	})
	l.more(2)
	for _, n := range c.Nodes() {
		seen, err := lives(t.Context(), dial(t, n.Engine))
		if err != nil || len(seen) != len(before) {
			t.Errorf("%s sees %v: %v", n.Node, seen, err)
		}
		for name, life := range before {
			if seen[name] != life {
				t.Errorf("%s sees %s in life %d, before the strangers in %d", n.Node, name, seen[name], life)
			}
		}
	}
	if err := c.engine("decode-1").retrieve(t.Context(), kept, kept.reference, patience); err != nil {
		t.Errorf("what was kept from strangers: %v", err)
	}
}

// stranger is an agent that should not come in, and what it has published.
type stranger struct {
	*agent
	engine *engine
	own    *request
	says   []string
	counts bool
}

func (s *stranger) check(t *testing.T, c *cluster, kept *request) {
	seed := c.must("prefill-0")
	refusals := authFailures(t, seed, "gossip")
	await(t, "its reason not to be ready", patience, func(ctx context.Context) error {
		why, err := notReady(ctx, s.HTTP.String())
		for _, w := range s.says {
			if err == nil && !strings.Contains(why, w) {
				err = fmt.Errorf("it does not say %q: %q", w, why)
			}
		}
		return err
	})
	await(t, "the same in its log", patience, func(context.Context) error {
		for _, w := range append([]string{"not joined yet"}, s.says...) {
			if log := strings.ReplaceAll(s.log(t), `\"`, `"`); !strings.Contains(log, w) {
				return fmt.Errorf("it does not say %q", w)
			}
		}
		return nil
	})
	for _, n := range c.Nodes() {
		admin := dial(t, n.Engine)
		seen, err := lives(t.Context(), admin)
		items, knownErr := known(t.Context(), admin, s.Node)
		if err = errors.Join(err, knownErr); err != nil || seen[s.Node] != 0 || len(items) > 0 {
			t.Errorf("%s sees it: %v, and shows %v of it: %v", n.Node, seen, items, err)
		}
	}
	own := dial(t, s.Engine)
	if seen, err := lives(t.Context(), own); err != nil || len(seen) != 1 {
		t.Errorf("it sees %v: %v", seen, err)
	}
	if all, err := own.Publications(t.Context(), &kvferrypb.PublicationsRequest{Remote: true}); err != nil || len(all.GetItems()) > 0 {
		t.Errorf("it shows %v: %v", all.GetItems(), err)
	}
	for what, read := range map[string]func() error{
		"it reads": func() error { return s.engine.retrieve(t.Context(), kept, kept.reference, 300*time.Millisecond) },
		"it finds": func() error { return s.engine.retrieve(t.Context(), kept, "", 300*time.Millisecond) },
		"it is read": func() error {
			return attach(t, c.must("decode-1").Engine).retrieve(t.Context(), s.own, s.own.reference, 300*time.Millisecond)
		},
	} {
		if err := read(); !slices.Contains([]kvferrypb.Failure_Code{kvferrypb.Failure_NOT_FOUND, kvferrypb.Failure_OWNER_LOST, kvferrypb.Failure_INVALID, kvferrypb.Failure_DEADLINE}, client.CodeOf(err)) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if s.counts {
		awaitRefusals(t, seed, "gossip", refusals, true)
	}
}

// notReady is what a node says instead of being ready.
func notReady(ctx context.Context, http string) (why string, err error) {
	code, why, err := ask(ctx, "http://"+http+"/readyz")
	if err == nil && code != 503 {
		err = fmt.Errorf("readiness %d: %q", code, why)
	}
	return why, err
}

// rawCallers call ports with other programs than ours.
func rawCallers(t *testing.T, c *cluster, a *identity.Authority) {
	owner := c.must("prefill-1")
	from := c.engine("prefill-1")
	r := newRequest("for raw callers", 60)
	if err := from.publish(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	own, err := dial(t, owner.Engine).Publications(t.Context(), &kvferrypb.PublicationsRequest{})
	at := slices.IndexFunc(own.GetItems(), func(i *kvferrypb.PublicationItem) bool { return i.GetRequest() == r.name })
	if err != nil || at < 0 {
		t.Fatalf("publications %v: %v", own.GetItems(), err)
	}
	sequence := own.GetItems()[at].GetPublication()
	guest := asWhoever(t, issue(t, a, "guest"))
	hello, err := greets(t, owner, guest, "guest")
	if err != nil || hello.GetLife().GetIncarnation() != owner.Incarnation {
		t.Fatalf("who may come in is told %v: %v", hello, err)
	}
	calls := map[string]func(ctx context.Context, p kvferrypb.PeerClient, as string) error{
		"hello": func(ctx context.Context, p kvferrypb.PeerClient, as string) error {
			_, err := p.Hello(ctx, &kvferrypb.HelloRequest{From: &kvferrypb.Life{Node: as, Incarnation: 1}, To: owner.Node})
			return err
		},
		"lease": func(ctx context.Context, p kvferrypb.PeerClient, as string) error {
			_, err := p.Lease(ctx, &kvferrypb.LeaseRequest{
				Incarnation: owner.Incarnation, Reader: &kvferrypb.Life{Node: as, Incarnation: 1}, Items: []*kvferrypb.LeaseItem{{Sequence: sequence, Attempt: 1}},
			})
			return err
		},
		"complete": func(ctx context.Context, p kvferrypb.PeerClient, as string) error {
			_, err := p.Complete(ctx, &kvferrypb.CompleteRequest{
				Incarnation: owner.Incarnation, Reader: &kvferrypb.Life{Node: as, Incarnation: 1},
				Items: []*kvferrypb.CompleteItem{{Sequence: sequence, Attempt: 1, Outcome: kvferrypb.CompleteItem_FAILED}},
			})
			return err
		},
		"lookup": func(ctx context.Context, p kvferrypb.PeerClient, _ string) error {
			_, err := p.Lookup(ctx, &kvferrypb.LookupRequest{Incarnation: owner.Incarnation, Sequence: sequence})
			return err
		},
	}
	for name, tt := range map[string]struct {
		who  *identity.Identity
		as   string
		want codes.Code
	}{
		"in its own name":         {guest, "guest", codes.OK},
		"no certificate":          {nil, "decode-0", codes.Unavailable},
		"another authority":       {foreign(t, "decode-0", owner), "decode-0", codes.Unavailable},
		"a name that is kept out": {asWhoever(t, issue(t, a, "uninvited")), "uninvited", codes.Unavailable},
		"in another's name":       {guest, "decode-0", codes.PermissionDenied},
	} {
		t.Run(name, func(t *testing.T) {
			p := callPeer(t, owner, tt.who)
			before := authFailures(t, owner, "peer")
			for what, call := range calls {
				want := tt.want
				if what == "lookup" && want == codes.PermissionDenied {
					want = codes.OK // it names nobody, and who calls is let in
				}
				ctx, cancel := context.WithTimeout(t.Context(), callLimit)
				if err := call(ctx, p, tt.as); status.Code(err) != want {
					t.Errorf("%s ends with %v, want %v", what, err, want)
				}
				cancel()
			}
			awaitRefusals(t, owner, "peer", before, tt.want != codes.OK)
		})
	}

	t.Run("data port", func(t *testing.T) {
		var descriptor []byte
		for _, offer := range hello.GetTransports() {
			if offer.GetName() == tcp.Name {
				descriptor = offer.GetAddress()
			}
		}
		plain := bytes.Replace(descriptor, []byte(" tls "), []byte(" "), 1)
		if bytes.Equal(plain, descriptor) {
			t.Fatalf("descriptor %q has no word of TLS", descriptor)
		}
		for name, tt := range map[string]struct {
			who        *identity.Identity
			as         string
			descriptor []byte
			good       bool
		}{
			"in its own name":         {guest, "guest", descriptor, true},
			"no certificate":          {nil, "guest", plain, false},
			"another authority":       {foreign(t, "guest", owner), "guest", descriptor, false},
			"a name that is kept out": {asWhoever(t, issue(t, a, "uninvited")), "uninvited", descriptor, false},
			"in another's name":       {guest, "decode-0", descriptor, false},
		} {
			t.Run(name, func(t *testing.T) {
				before := authFailures(t, owner, "data")
				landed, err := rawRead(t, owner, hello, tt.who, tt.as, tt.descriptor)
				if tt.good != errors.Is(err, transfer.ErrStale) || !tt.good && landed {
					t.Errorf("a read ends with %v; bytes have landed: %v", err, landed)
				}
				awaitRefusals(t, owner, "data", before, !tt.good)
			})
		}
	})
	if err := c.engine("decode-1").retrieve(t.Context(), r, r.reference, patience); err != nil {
		t.Errorf("what raw callers wanted: %v", err)
	}
}

// rawRead reads the first page of a node under a seal that does not hold, so that
// the best answer is that it is stale.
func rawRead(t *testing.T, owner localcluster.Node, hello *kvferrypb.HelloResponse, who *identity.Identity, as string, descriptor []byte) (landed bool, err error) {
	t.Helper()
	seals, err := memory.NewSealTable()
	if err != nil {
		t.Fatal(err)
	}
	defer seals.Close()
	arena, err := memory.NewPlain("raw", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer arena.Close()
	reader, err := tcp.Listen(tcp.Options{
		Local:    transfer.Local{Life: id.Life{Node: id.Node(as), Incarnation: 1}, Arenas: map[id.Rank]memory.Arena{0: arena}, Seals: seals},
		Bind:     netip.AddrPortFrom(owner.Data.Addr(), 0),
		Identity: who,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	ctx, cancel := context.WithTimeout(t.Context(), callLimit)
	defer cancel()
	link, err := reader.Open(ctx, transfer.Peer{
		Life:       id.Life{Node: id.Node(owner.Node), Incarnation: id.Incarnation(owner.Incarnation)},
		Descriptor: descriptor, ArenaBytes: map[id.Rank]int64{0: int64(hello.GetArenas()[0].GetBytes())},
	})
	if err != nil {
		return false, err
	}
	defer link.Close()
	err = link.Read(ctx, []transfer.Seal{{Index: 0, Value: 1}}, []transfer.Copy{{Bytes: 1 << 10}})
	return slices.ContainsFunc(arena.Bytes(), func(b byte) bool { return b != 0 }), err
}

// oneNameTwice: with certificates, too, the elder of two agents of one name gives
// itself up.
func oneNameTwice(t *testing.T, c *cluster, a *identity.Authority) {
	var agents []*agent
	for _, seed := range []string{"decode-0", "prefill-0"} {
		conf := another(t, c.must(seed), "guest-twin")
		use(conf, issue(t, a, "guest-twin"))
		agents = append(agents, startAgent(t, conf))
	}
	elder, younger := agents[0], agents[1]
	if younger.Incarnation <= elder.Incarnation {
		t.Errorf("incarnations %d, then %d", elder.Incarnation, younger.Incarnation)
	}
	if code, log := elder.awaitExit(t); code != 1 || !strings.Contains(log, "kvferry: guest-twin") || !strings.Contains(log, "a newer life of this node is at work") {
		t.Errorf("the elder ended with exit code %d, want 1 for a newer life:\n%s", code, log)
	}
	if err := move(t.Context(), newRequest("of the younger", 60), attach(t, younger.Engine), c.engine("decode-1"), true, patience); err != nil {
		t.Error(err)
	}
	younger.leave(t)
}
