package node_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/node"
	"github.com/kvferry/kvferry/transfer"
)

// failureOf is what a call answered, never nil.
func failureOf(t testing.TB, err error) *kvferrypb.Failure {
	t.Helper()
	e, ok := errors.AsType[*client.Error](err)
	if !ok {
		t.Errorf("%v is no failure of a call", err)
		return &kvferrypb.Failure{}
	}
	return e.Failure
}

func TestBadInput(t *testing.T) {
	prefill, decode := startPair(t)
	p, d, foreign := openEngine(t, prefill), openEngine(t, decode), openEngine(t, decode)
	p.ingest("r1")
	d.ingest("r1")
	foreign.ingest("theirs")
	p.write("r1", 20)
	good := p.publish("r1", true).GetReference()
	d.ingest("done")
	d.write("done", 8)
	d.publish("done", true)
	d.ingest("empty")
	ref := func(change func(*wire.Reference)) string {
		r, err := wire.Peek(good)
		if err != nil {
			t.Fatal(err)
		}
		change(&r)
		s, err := wire.Keys(nil).Encode(r)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	long := strings.Repeat("x", 300)
	type call = func() error
	retrieve := func(r, reference string) call {
		wait := deadline
		if r == "empty" && reference == "" { // nothing else ends that
			wait = 50 * time.Millisecond
		}
		return func() error { _, err := d.retrieve(r, reference, 0, wait); return err }
	}
	admit := func(segments ...*kvferrypb.Segment) call {
		return func() error {
			_, err := d.Admit(d.ctx(), &kvferrypb.AdmitRequest{Plan: true, Segments: segments})
			return err
		}
	}
	publish := func(req *kvferrypb.PublishRequest) call {
		return func() error { _, err := d.Publish(d.ctx(), req); return err }
	}
	ingest := func(req *kvferrypb.IngestRequest) call {
		return func() error { _, err := d.Ingest(d.ctx(), req); return err }
	}
	many := make([]*kvferrypb.Segment, 10_000)
	for i := range many {
		many[i] = &kvferrypb.Segment{Request: "empty", Label: fmt.Sprintf("l%d", i)}
	}
	for name, tt := range map[string]struct {
		call call
		want kvferrypb.Failure_Code
		text string
	}{
		"retrieve an unknown request":        {retrieve("nobody", ""), kvferrypb.Failure_NOT_FOUND, "nobody"},
		"retrieve what nobody published":     {retrieve("empty", ""), kvferrypb.Failure_NOT_FOUND, "nobody has published"},
		"retrieve a foreign request":         {retrieve("theirs", ""), kvferrypb.Failure_ALREADY_EXISTS, "another session"},
		"retrieve with an empty request":     {retrieve("", ""), kvferrypb.Failure_INVALID, "request id"},
		"retrieve by garbage":                {retrieve("r1", "kvf1.!!!"), kvferrypb.Failure_INVALID, "reference"},
		"retrieve by another's reference":    {retrieve("empty", good), kvferrypb.Failure_INVALID, `"r1"`},
		"retrieve from an unknown node":      {retrieve("r1", ref(func(r *wire.Reference) { r.Publication.Owner.Node = "nowhere" })), kvferrypb.Failure_NOT_FOUND, "nowhere"},
		"retrieve from a former life":        {retrieve("r1", ref(func(r *wire.Reference) { r.Publication.Owner.Incarnation-- })), kvferrypb.Failure_OWNER_LOST, "lives now"},
		"retrieve from a life to come":       {retrieve("r1", ref(func(r *wire.Reference) { r.Publication.Owner.Incarnation++ })), kvferrypb.Failure_NOT_FOUND, "no such node"},
		"retrieve a sequence to come":        {retrieve("r1", ref(func(r *wire.Reference) { r.Publication.Sequence = 999 })), kvferrypb.Failure_NOT_FOUND, "unknown publication"},
		"retrieve from our own former life":  {retrieve("r1", ref(func(r *wire.Reference) { r.Publication.Owner = id.Life{Node: "decode", Incarnation: 5} })), kvferrypb.Failure_OWNER_LOST, "earlier life of this node"},
		"retrieve our own unknown":           {retrieve("r1", ref(func(r *wire.Reference) { r.Publication.Owner = decode.Life(); r.Publication.Sequence = 999 })), kvferrypb.Failure_NOT_FOUND, "unknown publication"},
		"publish an unknown request":         {publish(&kvferrypb.PublishRequest{Request: "nobody"}), kvferrypb.Failure_NOT_FOUND, "nobody"},
		"publish nothing":                    {publish(&kvferrypb.PublishRequest{Request: "empty"}), kvferrypb.Failure_INVALID, "nothing is stored"},
		"publish after final":                {publish(&kvferrypb.PublishRequest{Request: "done"}), kvferrypb.Failure_ALREADY_EXISTS, "final"},
		"publish a foreign request":          {publish(&kvferrypb.PublishRequest{Request: "theirs"}), kvferrypb.Failure_ALREADY_EXISTS, "another session"},
		"publish for too many":               {publish(&kvferrypb.PublishRequest{Request: "done", Readers: 257}), kvferrypb.Failure_INVALID, "257 readers"},
		"publish with a hold below 0":        {publish(&kvferrypb.PublishRequest{Request: "done", Hold: durationpb.New(-1)}), kvferrypb.Failure_INVALID, "hold"},
		"ingest a foreign request":           {ingest(&kvferrypb.IngestRequest{Request: "theirs"}), kvferrypb.Failure_ALREADY_EXISTS, "session"},
		"ingest a long name":                 {ingest(&kvferrypb.IngestRequest{Request: long}), kvferrypb.Failure_INVALID, "300 bytes"},
		"ingest a long label":                {ingest(&kvferrypb.IngestRequest{Request: "n", Needed: &kvferrypb.Labels{Labels: []string{long}}}), kvferrypb.Failure_INVALID, "label"},
		"ingest too many labels":             {ingest(&kvferrypb.IngestRequest{Request: "n", Needed: &kvferrypb.Labels{Labels: make([]string, 300)}}), kvferrypb.Failure_RESOURCE_EXHAUSTED, "labels"},
		"admit an unknown request":           {admit(&kvferrypb.Segment{Request: "nobody", Span: 1}), kvferrypb.Failure_NOT_FOUND, "nobody"},
		"admit a long label":                 {admit(&kvferrypb.Segment{Request: "empty", Label: long, Span: 1}), kvferrypb.Failure_INVALID, "label"},
		"admit twice in one step":            {admit(&kvferrypb.Segment{Request: "empty", Span: 1}, &kvferrypb.Segment{Request: "empty", Span: 1}), kvferrypb.Failure_INVALID, "two segments"},
		"admit a huge span":                  {admit(&kvferrypb.Segment{Request: "empty", Span: 1<<32 - 1}), kvferrypb.Failure_INVALID, "tokens"},
		"admit huge spans together":          {admit(&kvferrypb.Segment{Request: "empty", Span: 1 << 20}, &kvferrypb.Segment{Request: "done", Span: 1}), kvferrypb.Failure_INVALID, "tokens"},
		"admit more than there is":           {admit(&kvferrypb.Segment{Request: "empty", Span: 64 * 8}), kvferrypb.Failure_RESOURCE_EXHAUSTED, "pages short"},
		"admit ten thousand labels":          {admit(many...), kvferrypb.Failure_RESOURCE_EXHAUSTED, "labels"},
		"plan another's step":                {func() error { _, err := d.Plan(d.ctx(), &kvferrypb.PlanRequest{Step: 1}); return err }, kvferrypb.Failure_NOT_FOUND, "step"},
		"commit a step twice":                {func() error { _, err := d.Commit(d.ctx(), &kvferrypb.CommitRequest{Step: 1}); return err }, kvferrypb.Failure_NOT_FOUND, "step"},
		"abort nothing":                      {func() error { _, err := d.Abort(d.ctx(), &kvferrypb.AbortRequest{Step: 99}); return err }, kvferrypb.Failure_NOT_FOUND, "step"},
		"open the arena of a rank elsewhere": {func() error { _, err := d.OpenArena(d.ctx(), &kvferrypb.OpenArenaRequest{Rank: 1}); return err }, kvferrypb.Failure_INVALID, "rank 1"},
		"open the arena of a huge rank":      {func() error { _, err := d.OpenArena(d.ctx(), &kvferrypb.OpenArenaRequest{Rank: 1<<32 - 1}); return err }, kvferrypb.Failure_INVALID, "rank"},
		"release garbage":                    {func() error { _, err := d.Release(d.ctx(), &kvferrypb.ReleaseRequest{Reference: "?"}); return err }, kvferrypb.Failure_INVALID, "reference"},
		"release of an unknown node": {func() error {
			_, err := d.Release(d.ctx(), &kvferrypb.ReleaseRequest{Reference: ref(func(r *wire.Reference) { r.Publication.Owner.Node = "nowhere" })})
			return err
		}, kvferrypb.Failure_NOT_FOUND, "nowhere"},
		"revoke nothing": {func() error {
			_, err := d.client.Admin().Revoke(d.ctx(), &kvferrypb.RevokeRequest{Publication: 999})
			return err
		}, kvferrypb.Failure_NOT_FOUND, "publication 999"},
		"ingest a name with an escape": {ingest(&kvferrypb.IngestRequest{Request: "a\x1b[2Jb"}), kvferrypb.Failure_INVALID, "control character"},
		"admit a label with a newline": {admit(&kvferrypb.Segment{Request: "empty", Label: "a\nb", Span: 1}), kvferrypb.Failure_INVALID, "control character"},
	} {
		t.Run(name, func(t *testing.T) {
			f := failureOf(t, tt.call())
			if f.GetCode() != tt.want || !strings.Contains(f.GetMessage(), tt.text) {
				t.Errorf("%v %q, want %v with %q", f.GetCode(), f.GetMessage(), tt.want, tt.text)
			}
			if tt.want == kvferrypb.Failure_RESOURCE_EXHAUSTED && strings.Contains(tt.text, "short") && (f.GetPagesShort() == 0 || f.GetRequest() == "") {
				t.Errorf("it does not say what is short: %v", f)
			}
		})
	}
	// After all that nothing is held that should not be.
	if c := counts(t, decode); c.GetOwned() != 1 || c.GetFree() != 62 {
		t.Errorf("%v", c)
	}
}

func TestForeignSession(t *testing.T) {
	n := startNode(t, "alone", nil)
	e := openEngine(t, n)
	conn, err := grpc.NewClient("unix:"+n.Addresses().Engine, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for name, md := range map[string]metadata.MD{
		"none": nil, "empty": metadata.Pairs(kvferrypb.SessionKey, ""), "unknown": metadata.Pairs(kvferrypb.SessionKey, "abc"),
		"two": metadata.Pairs(kvferrypb.SessionKey, "abc", kvferrypb.SessionKey, "abc"),
	} {
		ctx := metadata.NewOutgoingContext(e.ctx(), md)
		_, err := kvferrypb.NewEngineClient(conn).Ingest(ctx, &kvferrypb.IngestRequest{Request: "r"})
		if err == nil || !strings.Contains(err.Error(), "no such session") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestGeometry: nodes that hold other KV exchange none, and say in what they
// differ.
func TestGeometry(t *testing.T) {
	prefill := startNode(t, "prefill", nil)
	p := openEngine(t, prefill)
	p.ingest("r1")
	for i, chunk := range chunks() {
		p.write("r1", chunk)
		p.publish("r1", i == 2)
	}
	for field, set := range map[string][2]string{
		"model": {"arena.model", "other"}, "revision": {"arena.revision", "2"}, "world_size": {"arena.world_size", "2"},
		"order": {"arena.layout", "HND"}, "dtype": {"arena.dtype", "fp16"}, "layers": {"arena.layers", "3"},
		"page_size": {"arena.page_size", "16"}, "heads": {"arena.heads", "4"}, "head_dim": {"arena.head_dim", "16"},
	} {
		t.Run(field, func(t *testing.T) {
			t.Parallel()
			decode := startNode(t, "decode-"+strings.ReplaceAll(field, "_", "-"), prefill, set)
			awaitPeers(t, decode)
			d := openEngine(t, decode)
			d.ingest("r1")
			_, err := d.retrieve("r1", "", 0, deadline)
			f := failureOf(t, err)
			if f.GetCode() != kvferrypb.Failure_INCOMPATIBLE || len(f.GetDifferences()) != 1 {
				t.Fatalf("%v", f)
			}
			if got := f.GetDifferences()[0]; got.GetField() != field || got.GetOurs() == got.GetTheirs() || got.GetOurs() == "" {
				t.Errorf("%v, want %s", got, field)
			}
			if c := counts(t, decode); c.GetFree() != c.GetTotal()-1 {
				t.Errorf("pages were taken before the geometry was compared: %v", c)
			}
			g := p.Geometry() // of an engine that was built for the other node
			_, err = d.client.Open(t.Context(), client.OpenOptions{Geometry: &g})
			if f := failureOf(t, err); f.GetCode() != kvferrypb.Failure_INCOMPATIBLE || len(f.GetDifferences()) != 1 {
				t.Errorf("Open: %v", f)
			}
		})
	}
}

// TestForgedReference: with a keyring, only who has a key makes references.
func TestForgedReference(t *testing.T) {
	prefill, decode := startPair(t, [2]string{"cluster.keyring", testKey})
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("r1")
	d.ingest("r1")
	p.write("r1", 20)
	good, err := wire.Peek(p.publish("r1", true).GetReference())
	if err != nil {
		t.Fatal(err)
	}
	for name, keys := range map[string]wire.Keys{"no key": nil, "another key": {[]byte(strings.Repeat("k", 32))}} {
		forged, err := keys.Encode(good)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := d.retrieve("r1", forged, 0, deadline); client.CodeOf(err) != kvferrypb.Failure_INVALID {
			t.Errorf("%s: %v, want INVALID", name, err)
		}
	}
}

// TestUntrueReference: without a keyring anybody can write a reference. One that
// says of a publication what its owner does not is refused by whoever it comes
// to, takes nothing, and counts for nothing.
func TestUntrueReference(t *testing.T) {
	prefill, decode := startPair(t)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("r1")
	p.write("r1", 20)
	good := p.publish("r1", true, to("decode")).GetReference()
	await(t, "decode to know of it", func(ctx context.Context) error {
		res, err := decode.admin.Publications(ctx, &kvferrypb.PublicationsRequest{Remote: true})
		if err != nil || len(res.GetItems()) != 1 {
			return fmt.Errorf("%v, %w", res, err)
		}
		return nil
	})
	truth, err := wire.Peek(good)
	if err != nil {
		t.Fatal(err)
	}
	otherRequest, otherSeal := truth, truth
	otherRequest.Request = "r2"
	otherSeal.Seal++
	for _, e := range []*engine{p, d} {
		e.ingest("r1")
		e.ingest("r2")
	}
	untrue := func(when string) {
		t.Helper()
		for name, r := range map[string]wire.Reference{"request": otherRequest, "seal word": otherSeal} {
			ref, err := wire.Keys(nil).Encode(r)
			if err != nil {
				t.Fatal(err)
			}
			for where, e := range map[string]*engine{"the reader": d, "the owner": p} {
				for _, wait := range []time.Duration{0, deadline} {
					if res, err := e.retrieve(string(r.Request), ref, 0, wait); client.CodeOf(err) != kvferrypb.Failure_INVALID {
						t.Errorf("%s, another %s at %s: %v, %v, want INVALID", when, name, where, res, err)
					}
				}
				if _, err := e.Release(e.ctx(), &kvferrypb.ReleaseRequest{Reference: ref}); client.CodeOf(err) != kvferrypb.Failure_INVALID && client.CodeOf(err) != kvferrypb.Failure_BUSY {
					t.Errorf("%s, release with another %s at %s: %v, want INVALID", when, name, where, err)
				}
			}
		}
	}
	untrue("before")
	// An owner that is asked does not know it under that name either.
	_, err = callPeer(t, prefill).Lookup(d.ctx(), &kvferrypb.LookupRequest{
		Incarnation: uint64(prefill.Life().Incarnation), Sequence: uint64(truth.Publication.Sequence), Request: "r2",
	})
	if st, _ := status.FromError(err); st.Code() != codes.InvalidArgument {
		t.Errorf("lookup for another request: %v, want INVALID", err)
	}
	if _, err := p.Release(p.ctx(), &kvferrypb.ReleaseRequest{Reference: good}); client.CodeOf(err) != kvferrypb.Failure_INVALID || !strings.Contains(err.Error(), "published by this node") {
		t.Errorf("release by the owner: %v, want INVALID that says why", err)
	}
	res, err := prefill.admin.Publications(t.Context(), &kvferrypb.PublicationsRequest{})
	if err != nil || len(res.GetItems()) != 1 || res.GetItems()[0].GetAcknowledged() != 0 || res.GetItems()[0].GetLeases() != 0 {
		t.Errorf("something was counted: %v, %v", res, err)
	}
	if res, err := d.retrieve("r1", good, 0, deadline); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
		t.Fatalf("%v, %v", res, err)
	}
	if got := d.verify("r1", "main"); got != 20 {
		t.Errorf("%d tokens, want 20", got)
	}
	// Nor when it has landed, and the follow of it is still there.
	bad, err := wire.Keys(nil).Encode(otherSeal)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.retrieve("r1", bad, 0, 0); client.CodeOf(err) != kvferrypb.Failure_INVALID {
		t.Errorf("after it has landed: %v, want INVALID", err)
	}
}

// TestNotJoined: readyz says why.
func TestNotJoined(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	seed := l.Addr().String()
	l.Close() // nobody is there
	n := startNode(t, "alone", nil, [2]string{"cluster.join", seed})
	await(t, "readyz to say why", func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+n.Addresses().HTTP.String()+"/readyz", nil)
		if err != nil {
			return err
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		if want := "not joined: no seed lists this node yet: "; !strings.HasPrefix(string(body), want) || !strings.Contains(string(body), seed) || strings.Count(string(body), "\n") != 1 {
			return fmt.Errorf("%d %q, want %q and %s; %w", res.StatusCode, body, want, seed, err)
		}
		return nil
	})
}

// TestStartLeavesNothing: whichever port or socket is taken, the error names
// it, and all others are free again.
func TestStartLeavesNothing(t *testing.T) {
	own := ownAddress() // nobody else takes a port when it is free again
	busy := func() (string, func()) {
		l, err := net.Listen("tcp", own+":0")
		if err != nil {
			t.Fatal(err)
		}
		_, port, err := net.SplitHostPort(l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		return port, func() { l.Close() }
	}
	for _, what := range []string{"gossip", "peer", "data", "http", "engine", "fd", "transport"} {
		t.Run(what, func(t *testing.T) {
			c := configure(t, "alone", nil, [2]string{"node.bind", own})
			var taken string
			release := func() {}
			switch what {
			case "engine", "fd":
				taken = c.Node.Socket + map[string]string{"engine": "", "fd": ".fd"}[what]
				l, err := net.Listen("unix", taken)
				if err != nil {
					t.Fatal(err)
				}
				release = func() { l.Close() }
			case "transport":
				taken = elsewhere(t)[1]
				if err := os.Chmod(taken, 0o777); err != nil { // nobody shares memory there
					t.Fatal(err)
				}
				c.Transfer.Transports, c.Transfer.Require, c.Transfer.Rendezvous = []string{"tcp", "shm"}, "shm", taken
			default:
				taken, release = busy()
				if err := c.Set("ports."+what, taken); err != nil {
					t.Fatal(err)
				}
			}
			n, err := node.Start(t.Context(), node.Options{Config: c, Logger: logger(t)})
			if err == nil {
				n.Close(t.Context())
				t.Fatal("it starts")
			}
			if !strings.Contains(err.Error(), taken) {
				t.Errorf("%v does not name %s", err, taken)
			}
			switch what {
			case "engine", "fd":
			case "transport":
				if !errors.Is(err, transfer.ErrUnavailable) {
					t.Errorf("%v, want ErrUnavailable", err)
				}
				c.Transfer.Require = "tcp"
			default:
				if !errors.Is(err, syscall.EADDRINUSE) && what != "gossip" || !strings.Contains(err.Error(), "ports."+what) {
					t.Errorf("%v, want a taken port and ports.%s", err, what)
				}
			}
			release()
			if what == "engine" || what == "fd" {
				os.Remove(taken)
			}
			for _, path := range []string{c.Node.Socket, c.Node.Socket + ".fd"} {
				if _, err := os.Stat(path); err == nil {
					t.Errorf("%s was left", path)
				}
			}
			m := startWith(t, c, nil) // on the same ports
			m.close()
		})
	}
}

// TestStatusNamesWhatIsMissing: every transport that could be there is listed,
// with the reason why it is not.
func TestStatusNamesWhatIsMissing(t *testing.T) {
	c := configure(t, "alone", nil)
	c.Transfer.Transports = []string{"rdma", "tcp"}
	n := startWith(t, c, nil)
	res, err := n.admin.Status(t.Context(), &kvferrypb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, tr := range res.GetTransports() {
		got[tr.GetName()] = tr.GetAvailable()
		if tr.GetAvailable() != (tr.GetReason() == "") {
			t.Errorf("%v", tr)
		}
	}
	if len(got) != 4 || !got["tcp"] {
		t.Errorf("%v, want tcp and three that are not there", res.GetTransports())
	}
}

func TestHealth(t *testing.T) {
	g := newGate()
	prefill, decode := startGated(t, g.wrap, long)
	conn, err := grpc.NewClient("passthrough:///"+decode.Addresses().Peer.String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	health := grpc_health_v1.NewHealthClient(conn)
	d, p := openEngine(t, decode), openEngine(t, prefill)
	if _, err := health.Check(d.ctx(), &grpc_health_v1.HealthCheckRequest{Service: "other"}); err == nil {
		t.Error("a service that is not there is healthy")
	}
	ready := func() int {
		res, err := http.Get("http://" + decode.Addresses().HTTP.String() + "/readyz")
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		return res.StatusCode
	}
	watch, err := health.Watch(d.ctx(), &grpc_health_v1.HealthCheckRequest{Service: "kvferry.v1.Engine"})
	if err != nil {
		t.Fatal(err)
	}
	for {
		res, err := watch.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if res.GetStatus() == grpc_health_v1.HealthCheckResponse_SERVING {
			break
		}
	}
	if code := ready(); code != http.StatusOK {
		t.Errorf("readyz says %d", code)
	}
	// A read that runs keeps it draining.
	p.ingest("r1")
	d.ingest("r1")
	p.write("r1", 20)
	p.publish("r1", true)
	reads := d.retrieving("r1", "", 0)
	<-g.came
	closed := make(chan struct{})
	go func() { decode.close(); close(closed) }()
	if res, err := watch.Recv(); err != nil || res.GetStatus() != grpc_health_v1.HealthCheckResponse_NOT_SERVING {
		t.Errorf("%v, %v, want NOT_SERVING", res, err)
	}
	if res, err := health.Check(d.ctx(), &grpc_health_v1.HealthCheckRequest{}); err != nil || res.GetStatus() != grpc_health_v1.HealthCheckResponse_NOT_SERVING {
		t.Errorf("%v, %v, want NOT_SERVING", res, err)
	}
	if code := ready(); code != http.StatusServiceUnavailable {
		t.Errorf("readyz says %d", code)
	}
	close(g.pass)
	if got := <-reads; got.err != nil {
		t.Error(got.err)
	}
	<-closed
}

// TestEventsAreResumed: every event comes once, whenever the stream breaks.
func TestEventsAreResumed(t *testing.T) {
	n := startNode(t, "alone", nil)
	conn, err := grpc.NewClient("unix:"+n.Addresses().Engine, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	e := kvferrypb.NewEngineClient(conn)
	base := openEngine(t, n).ctx()
	opened, err := e.Open(base, &kvferrypb.OpenRequest{Engine: "raw"})
	if err != nil {
		t.Fatal(err)
	}
	ctx := metadata.AppendToOutgoingContext(base, kvferrypb.SessionKey, opened.GetSession())
	stream := func(after uint64) (grpc.BidiStreamingClient[kvferrypb.EventsRequest, kvferrypb.Event], func()) {
		ctx, cancel := context.WithCancel(ctx)
		s, err := e.Events(ctx)
		if err == nil {
			err = s.Send(&kvferrypb.EventsRequest{After: after})
		}
		if err != nil {
			t.Fatal(err)
		}
		if ev, err := s.Recv(); err != nil || ev.GetKind() != kvferrypb.Event_OPENED || ev.GetSequence() != 0 {
			t.Fatalf("%v, %v, want OPENED", ev, err)
		}
		return s, cancel
	}
	expire := func(i int) {
		r := fmt.Sprintf("r%d", i)
		if _, err := e.Ingest(ctx, &kvferrypb.IngestRequest{Request: r}); err != nil {
			t.Fatal(err)
		}
		step, err := e.Admit(ctx, &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{{Request: r, Span: 1}}})
		if err == nil {
			_, err = e.Commit(ctx, &kvferrypb.CommitRequest{Step: step.GetStep(), Publish: []*kvferrypb.PublishRequest{{Request: r, Final: true, Hold: durationpb.New(time.Millisecond)}}})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	seen := map[string]int{}
	var after uint64
	read := func(s grpc.BidiStreamingClient[kvferrypb.EventsRequest, kvferrypb.Event]) {
		ev, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if ev.GetSequence() != after+1 {
			t.Fatalf("event %d after %d", ev.GetSequence(), after)
		}
		after = ev.GetSequence()
		seen[ev.GetRequest()]++
	}
	s, hangUp := stream(0)
	for i := range 5 {
		expire(i)
	}
	read(s)
	read(s)
	hangUp()
	expire(5) // while nobody listens
	s, hangUp = stream(after)
	for range 4 {
		read(s)
	}
	// A second stream takes the session over from the first one, which has not
	// been seen to break.
	other, hangUpOther := stream(after)
	if ev, err := s.Recv(); err == nil || !strings.Contains(err.Error(), "took the session over") {
		t.Errorf("the stream before: %v, %v", ev, err)
	}
	hangUp()
	expire(6)
	read(other)
	for i := range 7 {
		if r := fmt.Sprintf("r%d", i); seen[r] != 1 {
			t.Errorf("%s ended %d times", r, seen[r])
		}
	}
	hangUpOther()
}
