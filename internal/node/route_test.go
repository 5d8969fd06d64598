package node_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/node"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/shm"
	"github.com/kvferry/kvferry/transfer/tcp"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// elsewhere is the rendezvous directory of a node that meets nobody there.
func elsewhere(t testing.TB) [2]string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "rendezvous")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return [2]string{"transfer.rendezvous", dir}
}

// peerOf is what a node shows of another one.
func peerOf(t testing.TB, n *member, name string) *kvferrypb.PeerItem {
	t.Helper()
	res, err := n.admin.Peers(t.Context(), &kvferrypb.PeersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range res.GetItems() {
		if p.GetNode() == name {
			return p
		}
	}
	t.Fatalf("%s does not know %s", n.Life(), name)
	return nil
}

// refusal is why a peer is not read by a transport; nil: nothing is said of it.
func refusal(p *kvferrypb.PeerItem, transport string) *kvferrypb.PeerItem_Refusal {
	for _, r := range p.GetRefused() {
		if r.GetTransport() == transport {
			return r
		}
	}
	return nil
}

func fallbacks(t testing.TB, n *member, from, to, reason string) float64 {
	t.Helper()
	return metric(t, n, fmt.Sprintf("kvferry_transport_fallbacks_total{from=%q,reason=%q,to=%q}", from, reason, to))
}

// over carries a request and says by which transport it came.
func over(t testing.TB, r string, p, d *engine) string {
	t.Helper()
	carry(t, r, bring{chunks: chunks(), target: "decode"}, p, d)
	res, err := d.retrieve(r, "", 0, 0)
	if err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
		t.Fatalf("%v, %v", res, err)
	}
	p.remove(r)
	d.remove(r)
	return res.GetTransport()
}

// TestOneHostMeets: nodes of one host read each other's memory, with nothing said,
// and with certificates too.
func TestOneHostMeets(t *testing.T) {
	for name, start := range map[string]func(testing.TB) (prefill, decode *member){
		"plain": func(t testing.TB) (prefill, decode *member) { return startPair(t) },
		"with certificates": func(t testing.TB) (prefill, decode *member) {
			return startSecure(t, newAuthority(t, year), [2]string{"cluster.keyring", testKey}, [2]string{"transfer.transports", "shm,tcp"})
		},
		"with checksums": func(t testing.TB) (prefill, decode *member) { return startPair(t, verifying) },
		"without tcp": func(t testing.TB) (prefill, decode *member) {
			return startPair(t, [2]string{"transfer.transports", "shm"})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			prefill, decode := start(t)
			if by := over(t, "r1", openEngine(t, prefill), openEngine(t, decode)); by != shm.Name {
				t.Errorf("it came by %s", by)
			}
			if p := peerOf(t, decode, "prefill"); p.GetTransport() != shm.Name || len(p.GetRefused()) > 0 {
				t.Errorf("%v", p)
			}
			if v := metric(t, prefill, `kvferry_served_links_total{transport="shm"}`); v != 1 {
				t.Errorf("%v links were opened, want one for all reads", v)
			}
			if v := metric(t, prefill, `kvferry_served_bytes_total{transport="tcp"}`); v != 0 {
				t.Errorf("%v bytes went by tcp", v)
			}
			awaitAllFree(t, prefill)
			awaitAllFree(t, decode)
		})
	}
}

// TestFallsBackToTCP: where nodes cannot meet, the next transport is taken, and
// everybody can see why.
func TestFallsBackToTCP(t *testing.T) {
	t.Run("another rendezvous", func(t *testing.T) {
		t.Parallel()
		prefill := startNode(t, "prefill", nil)
		decode := startNode(t, "decode", prefill, elsewhere(t))
		awaitPeers(t, prefill, decode)
		if by := over(t, "r1", openEngine(t, prefill), openEngine(t, decode)); by != tcp.Name {
			t.Errorf("it came by %s", by)
		}
		p := peerOf(t, decode, "prefill")
		r := refusal(p, shm.Name)
		if p.GetTransport() != tcp.Name || r == nil || !strings.Contains(r.GetReason(), "rendezvous") {
			t.Errorf("%v", p)
		}
		if got := fallbacks(t, decode, shm.Name, tcp.Name, "unavailable"); got != 1 {
			t.Errorf("%v fallbacks, want 1", got)
		}
	})
	t.Run("not configured at the peer", func(t *testing.T) {
		t.Parallel()
		prefill := startNode(t, "prefill", nil, overTCP)
		decode := startNode(t, "decode", prefill)
		awaitPeers(t, prefill, decode)
		if by := over(t, "r1", openEngine(t, prefill), openEngine(t, decode)); by != tcp.Name {
			t.Errorf("it came by %s", by)
		}
		r := refusal(peerOf(t, decode, "prefill"), shm.Name)
		if r == nil || !strings.Contains(r.GetReason(), "does not have it") || r.GetRetryIn() != nil {
			t.Errorf("%v, want that the peer does not have it, for good", r)
		}
	})
	t.Run("refused by this machine", func(t *testing.T) {
		t.Parallel()
		open := elsewhere(t)
		if err := os.Chmod(open[1], 0o777); err != nil {
			t.Fatal(err)
		}
		prefill := startNode(t, "prefill", nil)
		decode := startNode(t, "decode", prefill, open)
		awaitPeers(t, prefill, decode)
		if by := over(t, "r1", openEngine(t, prefill), openEngine(t, decode)); by != tcp.Name {
			t.Errorf("it came by %s", by)
		}
		res, err := decode.admin.Status(t.Context(), &kvferrypb.StatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range res.GetTransports() {
			if s.GetName() == shm.Name && (s.GetAvailable() || !strings.Contains(s.GetReason(), open[1])) {
				t.Errorf("%v, want that it is not available, and why", s)
			}
		}
	})
}

// TestComesBackToSHM: what is better is used again once it can be.
func TestComesBackToSHM(t *testing.T) {
	there, here := elsewhere(t), elsewhere(t)
	prefill := startNode(t, "prefill", nil, there)
	decode := startNode(t, "decode", prefill, here)
	awaitPeers(t, prefill, decode)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	if by := over(t, "r1", p, d); by != tcp.Name {
		t.Errorf("it came by %s", by)
	}
	if r := refusal(peerOf(t, decode, "prefill"), shm.Name); r.GetRetryIn().AsDuration() > 6*time.Second {
		t.Errorf("%v", r)
	}
	// Now the owner's socket can be reached.
	sockets, err := os.ReadDir(there[1])
	if err != nil || len(sockets) != 1 {
		t.Fatalf("%v, %v", sockets, err)
	}
	name := sockets[0].Name()
	if err := os.Link(filepath.Join(there[1], name), filepath.Join(here[1], name)); err != nil {
		t.Fatal(err)
	}
	await(t, "decode to come back to shm", func(context.Context) error {
		if p := peerOf(t, decode, "prefill"); p.GetTransport() != shm.Name || len(p.GetRefused()) > 0 {
			return fmt.Errorf("%v", p)
		}
		return nil
	})
	if by := over(t, "r2", p, d); by != shm.Name {
		t.Errorf("it came by %s", by)
	}
	if got := fallbacks(t, decode, tcp.Name, shm.Name, "recovered"); got != 1 {
		t.Errorf("came back %v times, want once", got)
	}
}

// TestRequireSHM: with it there is no other transport, and the error says why.
func TestRequireSHM(t *testing.T) {
	prefill := startNode(t, "prefill", nil)
	require := [2]string{"transfer.require", shm.Name}
	decode := startNode(t, "decode", prefill, require, elsewhere(t), [2]string{"timers.attempts", "2"}, [2]string{"timers.backoff_min", "1ms"})
	awaitPeers(t, prefill, decode)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("r1")
	d.ingest("r1")
	p.write("r1", 20)
	p.publish("r1", true, to("decode"))
	_, err := d.retrieve("r1", "", 0, deadline)
	if f := failureOf(t, err); f.GetCode() != kvferrypb.Failure_TRANSPORT || !strings.Contains(f.GetMessage(), "rendezvous") || f.GetPeer() != "prefill" {
		t.Errorf("%v, want TRANSPORT that says why", f)
	}
	if v := metric(t, prefill, `kvferry_served_bytes_total{transport="tcp"}`); v != 0 {
		t.Errorf("%v bytes went by tcp", v)
	}
	d.remove("r1")
	awaitAllFree(t, decode)

	open := elsewhere(t)
	if err := os.Chmod(open[1], 0o777); err != nil {
		t.Fatal(err)
	}
	c := configure(t, "lacks", nil, require, open)
	n, err := node.Start(t.Context(), node.Options{Config: c, Logger: logger(t)})
	if err == nil {
		n.Close(t.Context())
		t.Fatal("it starts without the only transport")
	}
	if !errors.Is(err, transfer.ErrUnavailable) || !strings.Contains(err.Error(), open[1]) {
		t.Errorf("%v, want ErrUnavailable and the directory", err)
	}
}

// only wraps one transport and lets the others be.
func only(name string, wrap func(transfer.Transport) transfer.Transport) func(transfer.Transport) transfer.Transport {
	return func(t transfer.Transport) transfer.Transport {
		if t.Name() != name {
			return t
		}
		return wrap(t)
	}
}

// TestSecondFailureTakesTheNextTransport: a transport that breaks once is tried
// again, one that breaks twice in a row is not used until it has been mended.
func TestSecondFailureTakesTheNextTransport(t *testing.T) {
	for name, tt := range map[string]struct {
		once bool
		by   string
	}{
		"once":          {true, shm.Name},
		"again, always": {false, tcp.Name},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var mended atomic.Bool
			prefill, decode := startGated(t, only(shm.Name, faulty(func(read int) transfertest.Fault {
				if mended.Load() || tt.once && read > 0 {
					return transfertest.Fault{}
				}
				return transfertest.Fault{Err: errors.New("a module was pulled")}
			})), [2]string{"timers.backoff_min", "1ms"}, [2]string{"timers.attempts", "9"})
			p, d := openEngine(t, prefill), openEngine(t, decode)
			p.ingest("r1")
			d.ingest("r1")
			p.write("r1", 20)
			p.publish("r1", true, to("decode"))
			res, err := d.retrieve("r1", "", 0, deadline)
			if err != nil || res.GetTransport() != tt.by {
				t.Errorf("%v, %v, want it by %s", res, err, tt.by)
			}
			if got := d.verify("r1", "main"); got != 20 {
				t.Errorf("%d tokens, want 20", got)
			}
			if got := fallbacks(t, decode, shm.Name, tcp.Name, "failed"); (got > 0) == tt.once {
				t.Errorf("%v fallbacks", got)
			}
			if got := fallbacks(t, decode, shm.Name, tcp.Name, "unavailable"); got > 0 {
				t.Errorf("%v fallbacks for another reason", got)
			}
			mended.Store(true)
			await(t, "shm to be used again", func(context.Context) error {
				if p := peerOf(t, decode, "prefill"); p.GetTransport() != shm.Name {
					if r := refusal(p, shm.Name); r == nil || !strings.Contains(r.GetReason(), "a module was pulled") {
						t.Errorf("%v does not say why", p)
					}
					return fmt.Errorf("%v", p)
				}
				return nil
			})
		})
	}
}

// opening is a transport that opens links as open says.
type opening struct {
	transfer.Transport
	open func(context.Context, transfer.Peer) (transfer.Link, error)
}

func (o opening) Open(ctx context.Context, p transfer.Peer) (transfer.Link, error) {
	return o.open(ctx, p)
}

// TestBrokenBeforeTheFirstReadIsTold: that a better transport should work and does
// not is a warning, also if no read of that life ever came by it; that it cannot is
// none.
func TestBrokenBeforeTheFirstReadIsTold(t *testing.T) {
	for name, tt := range map[string]struct {
		err    error
		reason string
		level  string
	}{
		"broken": {errors.New("the owner's memory is not sealed"), "failed", "WARN"},
		"cannot": {fmt.Errorf("another host: %w", transfer.ErrUnavailable), "unavailable", "DEBUG"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var log lines
			prefill := startNode(t, "prefill", nil)
			c := configure(t, "decode", prefill, [2]string{"timers.backoff_min", "1ms"})
			decode := startLogging(t, c, slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})), only(shm.Name, func(inner transfer.Transport) transfer.Transport {
				return opening{inner, func(context.Context, transfer.Peer) (transfer.Link, error) { return nil, tt.err }}
			}))
			awaitPeers(t, prefill, decode)
			if by := over(t, "r1", openEngine(t, prefill), openEngine(t, decode)); by != tcp.Name {
				t.Errorf("it came by %s", by)
			}
			for _, reason := range []string{"failed", "unavailable"} {
				if got := fallbacks(t, decode, shm.Name, tcp.Name, reason); (got == 1) != (reason == tt.reason) {
					t.Errorf("%v fallbacks are %s", got, reason)
				}
			}
			if got := log.of("better transport is not used"); len(got) != 1 || !strings.Contains(got[0], "level="+tt.level) || !strings.Contains(got[0], tt.err.Error()) {
				t.Errorf("the log says %q", got)
			}
		})
	}
}

// lines is a log in memory.
type lines struct {
	mu    sync.Mutex
	lines []string
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, string(b))
	return len(b), nil
}

// of are the lines that say what.
func (l *lines) of(what string) (found []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.lines {
		if strings.Contains(line, what) {
			found = append(found, line)
		}
	}
	return found
}

// TestDeadLinkCostsOneAttempt: a link that has ended is opened again by the same
// transport, while that works.
func TestDeadLinkCostsOneAttempt(t *testing.T) {
	links := make(chan transfer.Link, 9)
	prefill, decode := startGated(t, only(shm.Name, func(inner transfer.Transport) transfer.Transport {
		return opening{inner, func(ctx context.Context, p transfer.Peer) (transfer.Link, error) {
			link, err := inner.Open(ctx, p)
			if err == nil {
				links <- link
			}
			return link, err
		}}
	}), [2]string{"timers.backoff_min", "1ms"})
	p, d := openEngine(t, prefill), openEngine(t, decode)
	for _, r := range []string{"r1", "r2", "r3"} {
		if by := over(t, r, p, d); by != shm.Name {
			t.Errorf("%s came by %s", r, by)
		}
		if err := (<-links).Close(); err != nil {
			t.Error(err)
		}
	}
	if v := metric(t, prefill, `kvferry_served_links_total{transport="shm"}`); v != 3 {
		t.Errorf("%v links were opened, want one for each that ended", v)
	}
}

// TestTooLateSaysWhatItReads: whoever has waited in vain for a read hears what that
// is at, by what, and why it has failed before.
func TestTooLateSaysWhatItReads(t *testing.T) {
	mute := func(inner transfer.Transport) transfer.Transport {
		return opening{inner, func(ctx context.Context, _ transfer.Peer) (transfer.Link, error) {
			<-ctx.Done()
			return nil, context.Cause(ctx)
		}}
	}
	for name, tt := range map[string]struct {
		wrap    func(transfer.Transport) transfer.Transport
		backOff string
		state   string
		says    []string
		by      string
	}{
		"opening a link": {mute, "1ms", "reading", []string{"reading from prefill.", "no link is open by shm"}, ""},
		"reading": {
			faulty(func(int) transfertest.Fault { return transfertest.Fault{Lose: true} }), "1ms", "reading",
			[]string{"reading from prefill.", " by shm"},
			shm.Name,
		},
		"after a failure": {
			faulty(func(int) transfertest.Fault { return transfertest.Fault{Err: errors.New("a module was pulled")} }), "1h", "backoff",
			[]string{"(backoff; the attempt before failed", "a module was pulled"},
			shm.Name,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			prefill, decode := startGated(t, only(shm.Name, tt.wrap), [2]string{"timers.backoff_min", tt.backOff}, [2]string{"timers.backoff_max", "2h"})
			p, d := openEngine(t, prefill), openEngine(t, decode)
			p.ingest("r1")
			d.ingest("r1")
			p.write("r1", 20)
			p.publish("r1", true, to("decode"))
			d.begin("r1", false, 0)
			await(t, "it to be there", func(ctx context.Context) error {
				res, err := decode.admin.Retrievals(ctx, &kvferrypb.RetrievalsRequest{})
				if err != nil || len(res.GetItems()) != 1 || res.GetItems()[0].GetState() != tt.state || res.GetItems()[0].GetTransport() != tt.by {
					return fmt.Errorf("%v, %w", res, err)
				}
				return nil
			})
			_, err := d.retrieve("r1", "", 0, 50*time.Millisecond)
			f := failureOf(t, err)
			if f.GetCode() != kvferrypb.Failure_DEADLINE || f.GetTransport() != tt.by {
				t.Errorf("%v, want DEADLINE by %s", f, tt.by)
			}
			for _, text := range tt.says {
				if !strings.Contains(f.GetMessage(), text) {
					t.Errorf("%q does not say %q", f.GetMessage(), text)
				}
			}
			d.remove("r1")
		})
	}
}

// TestGarbageDescriptor: a peer that talks nonsense of its shared memory is read
// another way, and it shows.
func TestGarbageDescriptor(t *testing.T) {
	decode := startNode(t, "decode", nil, [2]string{"timers.backoff_min", "1ms"})
	d := openEngine(t, decode)
	imp := startImpostor(t, decode, func(_ context.Context, r *kvferrypb.HelloResponse) {
		r.Transports = append(r.Transports, &kvferrypb.Transport{Name: shm.Name, Address: []byte("2 ../../etc shm-")})
	})
	a, ref := imp.announce(t, honest("r1"))
	imp.lookup = func(*kvferrypb.LookupRequest) (*kvferrypb.Announcement, error) {
		return &kvferrypb.Announcement{Message: a.Full, Request: "r1"}, nil
	}
	d.ingest("r1")
	res, err := d.retrieve("r1", ref, 0, deadline)
	if err != nil || res.GetTransport() != tcp.Name {
		t.Errorf("%v, %v, want it by tcp", res, err)
	}
	if r := refusal(peerOf(t, decode, "impostor"), shm.Name); r == nil || !strings.Contains(r.GetReason(), "malformed") {
		t.Errorf("%v does not say why", r)
	}
}

// TestOwnerRestartsOnOneHost: the mapping of a former life is dropped, and the new
// one is read.
func TestOwnerRestartsOnOneHost(t *testing.T) {
	c := configure(t, "prefill", nil)
	prefill := startWith(t, c, nil)
	decode := startNode(t, "decode", prefill)
	if err := c.Set("cluster.join", decode.Addresses().Gossip.String()); err != nil {
		t.Fatal(err)
	}
	awaitPeers(t, prefill, decode)
	d := openEngine(t, decode)
	for life := range 3 {
		r := fmt.Sprintf("r%d", life)
		if by := over(t, r, openEngine(t, prefill), d); by != shm.Name {
			t.Errorf("life %d came by %s", life, by)
		}
		await(t, "one link to be open", func(context.Context) error {
			if v := metric(t, decode, `kvferry_data_connections{by="us",transport="shm"}`); v != 1 {
				return fmt.Errorf("%v links", v)
			}
			return nil
		})
		prefill.close()
		prefill = startWith(t, c, nil)
		awaitPeers(t, prefill, decode)
	}
	await(t, "no life that has gone to be mapped", func(context.Context) error {
		if v := metric(t, decode, `kvferry_data_connections{by="us",transport="shm"}`); v != 0 {
			return fmt.Errorf("%v links", v)
		}
		return nil
	})
}
