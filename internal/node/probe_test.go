package node_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/node"
	"github.com/kvferry/kvferry/rdma/rdmatest"
	"github.com/kvferry/kvferry/transfer/rdmaread"
	"github.com/kvferry/kvferry/transfer/shm"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// probe has a node read another one.
func (m *member) probe(t testing.TB, peer string) *kvferrypb.ProbeResponse {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	res, err := m.admin.Probe(ctx, &kvferrypb.ProbeRequest{Node: peer})
	if err != nil {
		t.Fatal(err)
	}
	return res
}

// probedBy is what a probe says of one transport.
func probedBy(t testing.TB, res *kvferrypb.ProbeResponse, transport string) *kvferrypb.ProbeResponse_Item {
	t.Helper()
	for _, i := range res.GetItems() {
		if i.GetTransport() == transport {
			return i
		}
	}
	t.Fatalf("nothing is said of %s: %v", transport, res)
	return nil
}

// sink visits the bytes of the sink of a rank, a stretch a layer.
func (e *engine) sink(visit func(layer int, b []byte)) {
	l := e.Geometry().Layout
	for layer := range l.Layers {
		at := int64(layer) * l.LayerBytes()
		e.lend(0, at, l.LayerPageBytes(), func(b []byte) { visit(layer, b) })
	}
}

func checkProbed(t testing.TB, i *kvferrypb.ProbeResponse_Item, bytes int64) {
	t.Helper()
	if i.GetState() != node.StateOK || i.GetReason() != "" || i.GetRemedy() != "" || i.GetBytes() != uint64(bytes) {
		t.Errorf("%v, want %d bytes and no complaint", i, bytes)
	}
	for step, d := range map[string]*durationpb.Duration{"open": i.GetOpen(), "first": i.GetFirst(), "second": i.GetSecond()} {
		if d.AsDuration() <= 0 {
			t.Errorf("%s took %v", step, d)
		}
	}
}

// TestProbe: the bytes of the owner's sink come into the reader's, and nowhere
// else; nothing is left open, and no route knows of it.
func TestProbe(t *testing.T) {
	overAll(t, func(t *testing.T, by [2]string) {
		t.Helper()
		prefill, decode := startPair(t, by)
		probeAndCompare(t, prefill, decode, by[1])
	})
}

func probeAndCompare(t *testing.T, prefill, decode *member, by string) {
	t.Helper()
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.sink(func(layer int, b []byte) {
		for i := range b {
			b[i] = byte(7*i + layer + 1)
		}
	})
	want := d.whole(0)
	l := d.Geometry().Layout
	p.sink(func(layer int, b []byte) { copy(want[int64(layer)*l.LayerBytes():], b) })

	res := decode.probe(t, "prefill")
	if res.GetNode() != "prefill" || res.GetIncarnation() != uint64(prefill.Life().Incarnation) || res.GetAddress() != prefill.Addresses().Peer.String() ||
		res.GetHello().AsDuration() <= 0 || res.GetHelloError() != "" || len(res.GetDifferences()) > 0 || len(res.GetItems()) != 1 {
		t.Errorf("%v", res)
	}
	checkProbed(t, probedBy(t, res, by), l.PageBytes())
	if !bytes.Equal(d.whole(0), want) {
		t.Error("the arena is not what it was, with the owner's sink in it")
	}
	if i := peerOf(t, decode, "prefill"); i.GetTransport() != "" || len(i.GetRefused()) > 0 || probedBy(t, res, by).GetInUse() {
		t.Errorf("the route knows of it: %v", i)
	}
	await(t, "the probe's connections to be closed", func(context.Context) error {
		for _, side := range []string{"us", "peers"} {
			for _, n := range []*member{prefill, decode} {
				if v := metric(t, n, fmt.Sprintf("kvferry_data_connections{by=%q,transport=%q}", side, by)); v != 0 {
					return fmt.Errorf("%s has %v by %s", n.Life(), v, side)
				}
			}
		}
		return nil
	})
	// It goes on while requests run, and does them no harm.
	carry(t, "r1", bring{chunks: chunks()}, p, d)
	if i := probedBy(t, decode.probe(t, "prefill"), by); i.GetState() != node.StateOK || !i.GetInUse() {
		t.Errorf("%v, want that it is in use", i)
	}
	d.verify("r1", "main")
}

// TestProbeByRDMA: the devices bring the sink, as they bring everything else, and
// nothing of the probe is left on either side.
func TestProbeByRDMA(t *testing.T) {
	w := rdmatest.Use(t)
	prefill, decode := startPair(t, overRDMA)
	before := w.Counts()
	i := probedBy(t, decode.probe(t, "prefill"), rdmaread.Name)
	checkProbed(t, i, prefill.config.Geometry().Layout.PageBytes())
	if !strings.Contains(i.GetPath(), "double0:1 ") || !strings.Contains(i.GetPath(), " to double0 ") {
		t.Errorf("path %q", i.GetPath())
	}
	if c := w.Counts(); c.ReadBytes-before.ReadBytes < 2*uint64(prefill.config.Geometry().Layout.PageBytes()) {
		t.Errorf("the devices have read %d bytes", c.ReadBytes-before.ReadBytes)
	}
	await(t, "the probe's queue pairs to be gone", func(context.Context) error {
		if c := w.Counts(); c.QPs != before.QPs || c.CQs != before.CQs || c.Regions != before.Regions {
			return fmt.Errorf("%+v, were %+v", c, before)
		}
		return nil
	})
	res, err := decode.admin.Doctor(t.Context(), &kvferrypb.DoctorRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range res.GetItems() {
		if c.GetName() == "transport rdma" && c.GetState() != node.StateOK || c.GetName() == "memory lock" && !strings.Contains(c.GetFound(), "locked when the node started") {
			t.Errorf("%v", c)
		}
	}
}

// TestProbeOfEachTransport: also of those that nothing is read by, and those that
// one of the two does not have.
func TestProbeOfEachTransport(t *testing.T) {
	prefill := startNode(t, "prefill", nil)
	decode := startNode(t, "decode", prefill, [2]string{"transfer.transports", "tcp,shm"})
	alone := startNode(t, "alone", prefill, overTCP)
	awaitPeers(t, prefill, decode, alone)
	page := prefill.config.Geometry().Layout.PageBytes()

	res := decode.probe(t, "prefill")
	checkProbed(t, probedBy(t, res, tcp.Name), page)
	checkProbed(t, probedBy(t, res, shm.Name), page)
	if at := probedBy(t, res, tcp.Name).GetPath(); at != prefill.Addresses().Data.String() {
		t.Errorf("tcp read at %q", at)
	}
	if at := probedBy(t, res, shm.Name).GetPath(); at != rendezvous {
		t.Errorf("shm read at %q", at)
	}
	if res.GetItems()[0].GetTransport() != tcp.Name {
		t.Errorf("%v, want the order of the configuration", res)
	}

	res = decode.probe(t, "alone")
	checkProbed(t, probedBy(t, res, tcp.Name), page)
	if i := probedBy(t, res, shm.Name); i.GetState() != node.StateAbsent || !strings.Contains(i.GetReason(), "the peer does not have it") || i.GetRemedy() == "" || i.GetOpen() != nil {
		t.Errorf("%v", i)
	}

	res = alone.probe(t, "decode")
	if i := probedBy(t, res, shm.Name); i.GetState() != node.StateAbsent || !strings.Contains(i.GetReason(), "not on this node: not in transfer.transports") || i.GetRemedy() == "" {
		t.Errorf("%v", i)
	}
}

// TestProbeOfOtherKV: what two nodes hold may differ, and the way between them be good.
func TestProbeOfOtherKV(t *testing.T) {
	for name, set := range map[string][2]string{
		"larger pages": {"arena.page_size", "16"}, "smaller pages": {"arena.page_size", "4"},
		"more layers": {"arena.layers", "3"}, "fewer layers": {"arena.layers", "1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			prefill := startNode(t, "prefill", nil, set)
			decode := startNode(t, "decode", prefill)
			awaitPeers(t, prefill, decode)
			ours, theirs := decode.config.Geometry().Layout, prefill.config.Geometry().Layout
			bytes := int64(min(ours.Layers, theirs.Layers)) * min(ours.LayerPageBytes(), theirs.LayerPageBytes())
			res := decode.probe(t, "prefill")
			for _, i := range res.GetItems() {
				if slices.Contains([]string{shm.Name, tcp.Name}, i.GetTransport()) {
					checkProbed(t, i, bytes)
				}
			}
			if d := res.GetDifferences(); len(d) != 1 || "arena."+d[0].GetField() != set[0] || d[0].GetTheirs() != set[1] {
				t.Errorf("differences: %v, want %v", d, set)
			}
		})
	}
}

// TestProbeWithoutACommonRank: the seal word shows that the peer can be read.
func TestProbeWithoutACommonRank(t *testing.T) {
	prefill := startNode(t, "prefill", nil, [2]string{"arena.ranks", "1"}, [2]string{"arena.world_size", "2"})
	decode := startNode(t, "decode", prefill, [2]string{"arena.world_size", "2"})
	awaitPeers(t, prefill, decode)
	for _, name := range []string{shm.Name, tcp.Name} {
		if i := probedBy(t, decode.probe(t, "prefill"), name); i.GetState() != node.StateOK || i.GetBytes() != 0 || !strings.Contains(i.GetReason(), "no rank in common") {
			t.Errorf("%v", i)
		}
	}
}

// TestProbeWithCertificates: it proves names as every read does.
func TestProbeWithCertificates(t *testing.T) {
	_, decode := startSecure(t, newAuthority(t, year), [2]string{"cluster.keyring", testKey}, [2]string{"transfer.transports", "shm,tcp"})
	res := decode.probe(t, "prefill")
	for _, i := range res.GetItems() {
		checkProbed(t, i, decode.config.Geometry().Layout.PageBytes())
	}
}

// TestProbeOfNobody: the error names who is there.
func TestProbeOfNobody(t *testing.T) {
	prefill, decode := startPair(t)
	for name, want := range map[string]struct {
		code kvferrypb.Failure_Code
		text string
	}{
		"nobody": {kvferrypb.Failure_NOT_FOUND, `"nobody": no such node in the cluster; the others are: prefill`},
		"":       {kvferrypb.Failure_NOT_FOUND, "the others are: prefill"},
		"decode": {kvferrypb.Failure_INVALID, "decode is this node itself"},
	} {
		_, err := decode.admin.Probe(t.Context(), &kvferrypb.ProbeRequest{Node: name})
		if f := failureOf(t, err); f.GetCode() != want.code || !strings.Contains(f.GetMessage(), want.text) {
			t.Errorf("%q: %v, want %v", name, f, want)
		}
	}
	prefill.close()
	await(t, "prefill to be gone", func(ctx context.Context) error {
		_, err := decode.admin.Probe(ctx, &kvferrypb.ProbeRequest{Node: "prefill"})
		if err == nil || !strings.Contains(err.Error(), "the others are: none") {
			return fmt.Errorf("%w", err)
		}
		return nil
	})
}

// silentPort takes connections and says nothing.
func silentPort(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l.Addr().String() // the kernel accepts for it
}

// TestProbeIsBounded: a peer that is stopped, one that is dead, and one that lies
// each get their own verdict, in time.
func TestProbeIsBounded(t *testing.T) {
	port := silentPort(t)
	const gone = "127.0.0.1:1"
	// at is the descriptor of tcp with another address.
	at := func(res *kvferrypb.HelloResponse, address string) {
		words := strings.Fields(string(res.GetTransports()[0].GetAddress()))
		words[len(words)-1] = address
		res.Transports[0].Address = []byte(strings.Join(words, " "))
	}
	for name, tt := range map[string]struct {
		change       func(context.Context, *kvferrypb.HelloResponse)
		stops        bool // saying hello, after the first
		never        bool // says hello
		hello        string
		reason, todo string
	}{
		"dead":    {change: func(_ context.Context, r *kvferrypb.HelloResponse) { at(r, gone) }, reason: "connection refused", todo: "process alive"},
		"stopped": {change: func(_ context.Context, r *kvferrypb.HelloResponse) { at(r, port) }, stops: true, hello: "context deadline exceeded", reason: "no progress", todo: "not stopped"},
		"mute":    {never: true, hello: "context deadline exceeded", reason: "never answered a hello", todo: "kvferry peers"},
		// Of an older version, or of an owner that holds nothing.
		"without the word": {reason: "publication ended", todo: "one version of kvferry"},
		"another life": {
			change: func(_ context.Context, r *kvferrypb.HelloResponse) { r.Life.Incarnation++ },
			hello:  "peer is another life", reason: "never answered a hello", todo: "kvferry peers",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			set := [][2]string{overTCP}
			if tt.stops {
				set = append(set, [2]string{"transfer.limits.dial", "300ms"}, [2]string{"timers.stall", "300ms"})
			}
			n := startNode(t, "decode", nil, set...)
			var said atomic.Int64
			imp := startImpostor(t, n, func(ctx context.Context, r *kvferrypb.HelloResponse) {
				first := said.Add(1) == 1
				if tt.never || tt.stops && !first {
					<-ctx.Done()
				}
				if tt.change != nil {
					r.Life = &kvferrypb.Life{Node: r.GetLife().GetNode(), Incarnation: r.GetLife().GetIncarnation()}
					tt.change(ctx, r)
				}
			})
			if !tt.never && name != "another life" {
				await(t, "the impostor to be known", func(context.Context) error {
					if p := peerOf(t, n, "impostor"); p.GetGeometry() == nil {
						return fmt.Errorf("%v", p)
					}
					return nil
				})
			}
			start := time.Now()
			res := n.probe(t, "impostor")
			if took := time.Since(start); took > deadline/2 {
				t.Errorf("it took %v", took)
			}
			// Of a deadline that both sides know, the other's end may be heard first.
			text := strings.ReplaceAll(res.GetHelloError(), "stream terminated by RST_STREAM with error code: CANCEL", "context deadline exceeded")
			if res.GetIncarnation() != uint64(imp.life.Incarnation) || !strings.Contains(text, tt.hello) || (tt.hello == "") != (res.GetHelloError() == "") {
				t.Errorf("%v, want the error %q of hello", res, tt.hello)
			}
			i := probedBy(t, res, tcp.Name)
			if i.GetState() != node.StateFail || !strings.Contains(i.GetReason(), tt.reason) || !strings.Contains(i.GetRemedy(), tt.todo) || i.GetBytes() != 0 || i.GetFirst() != nil {
				t.Errorf("%v, want %q and %q", i, tt.reason, tt.todo)
			}
		})
	}
}

// TestProbesTakeTurns: two never write the sink at once, and who waits in vain is
// told what for, before he stops listening.
func TestProbesTakeTurns(t *testing.T) {
	g := newGate()
	_, decode := startGated(t, g.wrap, overTCP)
	done := make(chan *kvferrypb.ProbeResponse, 1)
	go func() {
		res, err := decode.admin.Probe(t.Context(), &kvferrypb.ProbeRequest{Node: "prefill"})
		if err != nil {
			t.Error(err)
		}
		done <- res
	}()
	<-g.came
	err := inTime(t, func(ctx context.Context) error {
		_, err := decode.admin.Probe(ctx, &kvferrypb.ProbeRequest{Node: "prefill"})
		return err
	})
	if f := failureOf(t, err); f.GetCode() != kvferrypb.Failure_DEADLINE || !strings.Contains(f.GetMessage(), "another probe runs") {
		t.Errorf("%v", err)
	}
	close(g.pass)
	res := <-done
	if i := probedBy(t, res, tcp.Name); i.GetState() != node.StateOK {
		t.Errorf("%v", i)
	}
	if i := probedBy(t, decode.probe(t, "prefill"), tcp.Name); i.GetState() != node.StateOK {
		t.Errorf("%v", i)
	}
}

// TestProbeEndsInTime: what there was no time for is said, and what was read
// before is not lost.
func TestProbeEndsInTime(t *testing.T) {
	g := newGate()
	_, decode := startGated(t, g.wrap, overTCP)
	var res *kvferrypb.ProbeResponse
	if err := inTime(t, func(ctx context.Context) (err error) {
		res, err = decode.admin.Probe(ctx, &kvferrypb.ProbeRequest{Node: "prefill"})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if i := probedBy(t, res, tcp.Name); i.GetState() != node.StateFail || !strings.Contains(i.GetReason(), "no time left") {
		t.Errorf("%v", i)
	}
}

// TestNoPublicationHasTheProbesWord: of all words that there are, each is given
// once, and that one never; and it is held from the start.
func TestNoPublicationHasTheProbesWord(t *testing.T) {
	n := startNode(t, "alone", nil)
	given := n.ReserveSeals()
	if len(given) != node.ProbeWord || given[node.ProbeWord] != 0 || given[node.ProbeWord-1] != 1 || given[0] != 1 {
		t.Errorf("%d words, the probe's %d times", len(given), given[node.ProbeWord])
	}
	for s := range id.Sequence(1000) {
		a, _ := id.SealValue(n.Life().Incarnation, 0)
		if b, _ := id.SealValue(n.Life().Incarnation, s+1); a == b {
			t.Errorf("sequence %d has the probe's value", s+1)
		}
	}
}

// TestDoctor: a node says what its process finds, and what it has opened.
func TestDoctor(t *testing.T) {
	n := startNode(t, "alone", nil)
	res, err := n.admin.Doctor(t.Context(), &kvferrypb.DoctorRequest{})
	if err != nil || res.GetNode() != "alone" {
		t.Fatalf("%v, %v", res, err)
	}
	checks := make(map[string]*kvferrypb.DoctorResponse_Check)
	for _, c := range res.GetItems() {
		checks[c.GetName()] = c
		if c.GetState() == node.StateFail || c.GetFound() == "" {
			t.Errorf("%v", c)
		}
	}
	for name, want := range map[string]string{
		"transport shm": "open", "transport tcp": "open", "rendezvous": "can be used",
		"port peer": n.Addresses().Peer.String() + " is the node's", "port data": n.Addresses().Data.String() + " is the node's",
	} {
		if c := checks[name]; c.GetState() != node.StateOK || !strings.Contains(c.GetFound(), want) {
			t.Errorf("%s: %v, want %q", name, c, want)
		}
	}
	without := startNode(t, "without", nil, [2]string{"transfer.transports", "shm"})
	res, err = without.admin.Doctor(t.Context(), &kvferrypb.DoctorRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range res.GetItems() {
		if c.GetName() == "port data" && c.GetState() != node.StateAbsent || c.GetName() == "transport tcp" {
			t.Errorf("%v", c)
		}
	}
}
