package node_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/cluster"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/publish"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// impostor is a member that keeps no promise: it joins the cluster like a node,
// has memory and a data port, and says to its peers whatever the test wants.
type impostor struct {
	kvferrypb.UnimplementedPeerServer
	life    id.Life
	log     *publish.Log
	seals   *memory.SealTable
	server  *grpc.Server
	cluster *cluster.Cluster

	hello  func(context.Context, *kvferrypb.HelloResponse) // changes the true one
	lookup func(*kvferrypb.LookupRequest) (*kvferrypb.Announcement, error)
	goesOn bool // it says that what lookup answers goes on for what was asked
	truth  *kvferrypb.HelloResponse
	pushed chan *kvferrypb.PushRequest // nil: it does not listen
	link   func(linkStream) error
}

func (i *impostor) Hello(ctx context.Context, _ *kvferrypb.HelloRequest) (*kvferrypb.HelloResponse, error) {
	res := &kvferrypb.HelloResponse{
		Life: i.truth.GetLife(), Geometry: i.truth.GetGeometry(),
		Arenas:     []*kvferrypb.Arena{{Bytes: i.truth.GetArenas()[0].GetBytes()}},
		Transports: []*kvferrypb.Transport{{Name: "tcp", Address: i.truth.GetTransports()[0].GetAddress()}},
	}
	if i.hello != nil {
		i.hello(ctx, res)
	}
	if ctx.Err() != nil { // what comes at the deadline might still be in time
		return nil, ctx.Err()
	}
	return res, nil
}

func (i *impostor) Lookup(_ context.Context, req *kvferrypb.LookupRequest) (*kvferrypb.LookupResponse, error) {
	a, err := i.lookup(req)
	return &kvferrypb.LookupResponse{Announcement: a, Continues: i.goesOn}, err
}

func (i *impostor) Link(s grpc.BidiStreamingServer[kvferrypb.LinkRequest, kvferrypb.LinkResponse]) error {
	if _, err := s.Recv(); err != nil {
		return err
	}
	return i.link(s)
}

func (i *impostor) Push(s grpc.BidiStreamingServer[kvferrypb.PushRequest, kvferrypb.PushResponse]) error {
	for i.pushed != nil {
		req, err := s.Recv()
		if err != nil {
			return err
		}
		if req.GetWhat() != nil {
			i.pushed <- req
		}
	}
	<-s.Context().Done()
	return nil
}

// deaf is a cluster handler that hears nothing.
type deaf struct{}

func (deaf) Items([][]byte)            {}
func (deaf) Joined(cluster.Member)     {}
func (deaf) Left(cluster.Member, bool) {}
func (deaf) Updated(cluster.Member)    {}
func (deaf) MergeState([]byte)         {}

// disguise is what an impostor has to prove who it is, on each port, nil:
// nothing; and where what is pushed to it goes.
type disguise struct {
	peer, data, gossip *identity.Identity
	pushed             chan *kvferrypb.PushRequest
}

// startImpostor joins the cluster of the node, of whose geometry it claims to be.
func startImpostor(t testing.TB, n *member, hello func(context.Context, *kvferrypb.HelloResponse)) *impostor {
	t.Helper()
	i := startDisguised(t, n, hello, disguise{})
	awaitImpostor(t, n, hello != nil)
	return i
}

// awaitImpostor waits until it is a member, and has answered a hello if it does.
func awaitImpostor(t testing.TB, n *member, silent bool) {
	t.Helper()
	await(t, "the impostor to be a member", func(ctx context.Context) error {
		res, err := n.admin.Peers(ctx, &kvferrypb.PeersRequest{})
		if err != nil {
			return err
		}
		for _, p := range res.GetItems() {
			if p.GetNode() == "impostor" && (p.GetState() != "connecting" || silent) {
				return nil
			}
		}
		return fmt.Errorf("%v", res.GetItems())
	})
}

// startDisguised knows the keys of the cluster, and need not become a member.
func startDisguised(t testing.TB, n *member, hello func(context.Context, *kvferrypb.HelloResponse), d disguise) *impostor {
	t.Helper()
	g := n.config.Geometry()
	i := &impostor{life: id.Life{Node: "impostor", Incarnation: id.Incarnation(time.Now().UnixMicro())}, hello: hello, pushed: d.pushed}
	i.log = publish.NewLog(publish.LogOptions{Life: i.life})
	arena, err := memory.New("impostor", g.Layout.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { arena.Close() })
	if i.seals, err = memory.NewSealTable(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { i.seals.Close() })
	data, err := tcp.Listen(tcp.Options{Local: transfer.Local{Life: i.life, Arenas: map[id.Rank]memory.Arena{0: arena}, Seals: i.seals}, Bind: netip.MustParseAddrPort("127.0.0.1:0"), Identity: d.data})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { data.Close() })
	i.truth = &kvferrypb.HelloResponse{
		Life: &kvferrypb.Life{Node: string(i.life.Node), Incarnation: uint64(i.life.Incarnation)}, Geometry: kvferrypb.FromGeometry(g),
		Arenas:     []*kvferrypb.Arena{{Bytes: uint64(g.Layout.Bytes())}},
		Transports: []*kvferrypb.Transport{{Name: "tcp", Address: data.Descriptor()}},
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	creds := insecure.NewCredentials()
	if d.peer != nil {
		creds = credentials.NewTLS(d.peer.Server(identity.Peer))
	}
	s := grpc.NewServer(grpc.MaxSendMsgSize(64<<20), grpc.Creds(creds))
	i.server = s
	kvferrypb.RegisterPeerServer(s, i)
	var work sync.WaitGroup
	work.Go(func() { s.Serve(l) })
	t.Cleanup(func() { s.Stop(); work.Wait() })
	var ring cluster.Ring
	for _, k := range n.config.Cluster.Keyring {
		ring.Keys = append(ring.Keys, k)
	}
	i.cluster, err = cluster.Start(cluster.Options{
		Life: i.life, Meta: cluster.Meta{Role: "prefill", Group: "impostor", Peer: netip.MustParseAddrPort(l.Addr().String()), Fingerprint: g.Fingerprint()},
		Label: "test", Bind: netip.MustParseAddrPort("127.0.0.1:0"), Join: []string{n.Addresses().Gossip.String()}, Ring: ring, Identity: d.gossip, Fast: true, Handler: deaf{},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		i.cluster.Leave(ctx) // so that nobody waits for it
		i.cluster.Close()
	})
	return i
}

// announce publishes as an honest owner would, but for what.
func (i *impostor) announce(t testing.TB, p manager.Publication) (publish.Announced, string) {
	t.Helper()
	_, seal, word, err := i.log.Reserve(p.ID)
	if err != nil {
		t.Fatal(err)
	}
	i.seals.Store(seal, word)
	a, err := i.log.Announce(time.Now(), p, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	ref, err := wire.Keys(nil).Encode(wire.Reference{Publication: a.Name, Request: p.Request, Seal: a.Seal})
	if err != nil {
		t.Fatal(err)
	}
	return a, ref
}

// gossip tells all what was announced.
func (i *impostor) gossip(t testing.TB) {
	t.Helper()
	for _, item := range i.log.Outgoing(time.Now(), 1<<16) {
		if err := i.cluster.Broadcast(item); err != nil {
			t.Fatal(err)
		}
	}
}

// honest is 20 tokens on 3 pages.
func honest(r id.Request) manager.Publication {
	return manager.Publication{ID: 1, Request: r, Final: true, Streams: []manager.Stream{
		{Label: id.Main, Ranks: []id.Rank{0}, Tokens: 20, Pages: []page.Index{5, 6, 9}},
	}}
}

// TestHostilePublication: what a peer says of its publications is not believed.
func TestHostilePublication(t *testing.T) {
	prefill, decode := startPair(t)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	imp := startImpostor(t, decode, nil)
	var last manager.PublicationID
	for name, tt := range map[string]struct {
		change func(*manager.Publication)
		forge  func(*kvferrypb.Announcement)
		want   kvferrypb.Failure_Code
		field  string
	}{
		"none of it":      {want: kvferrypb.Failure_UNSPECIFIED},
		"too few pages":   {change: func(p *manager.Publication) { p.Streams[0].Pages = p.Streams[0].Pages[:2] }, want: kvferrypb.Failure_MALFORMED, field: "pages"},
		"no pages":        {change: func(p *manager.Publication) { p.Streams[0].Pages = nil }, want: kvferrypb.Failure_MALFORMED, field: "pages"},
		"page 0":          {change: func(p *manager.Publication) { p.Streams[0].Pages[1] = 0 }, want: kvferrypb.Failure_MALFORMED, field: "pages"},
		"a page twice":    {change: func(p *manager.Publication) { p.Streams[0].Pages[1] = 5 }, want: kvferrypb.Failure_MALFORMED, field: "pages"},
		"a page beyond":   {change: func(p *manager.Publication) { p.Streams[0].Pages[1] = 64 }, want: kvferrypb.Failure_MALFORMED, field: "pages"},
		"far beyond":      {change: func(p *manager.Publication) { p.Streams[0].Pages[1] = 1<<32 - 1 }, want: kvferrypb.Failure_MALFORMED, field: "pages"},
		"a crooked start": {change: func(p *manager.Publication) { p.Streams[0].Start = 3 }, want: kvferrypb.Failure_MALFORMED, field: "start"},
		"another rank":    {change: func(p *manager.Publication) { p.Streams[0].Ranks = []id.Rank{9} }, want: kvferrypb.Failure_MALFORMED, field: "ranks"},
		"endless":         {change: func(p *manager.Publication) { p.Streams[0].Tokens = 1 << 30 }, want: kvferrypb.Failure_MALFORMED, field: "pages"},
		"garbage":         {forge: func(a *kvferrypb.Announcement) { a.Message = []byte("KVFERRY") }, want: kvferrypb.Failure_MALFORMED},
		"nothing":         {forge: func(a *kvferrypb.Announcement) { a.Message = nil }, want: kvferrypb.Failure_MALFORMED},
		"cut short":       {forge: func(a *kvferrypb.Announcement) { a.Message = a.Message[:len(a.Message)-1] }, want: kvferrypb.Failure_MALFORMED},
		"a wrong digest":  {forge: redigest, want: kvferrypb.Failure_MALFORMED},
		"another request": {forge: func(a *kvferrypb.Announcement) { a.Request = "another" }, want: kvferrypb.Failure_MALFORMED},
		"huge":            {forge: func(a *kvferrypb.Announcement) { a.Message = make([]byte, 20<<20) }, want: kvferrypb.Failure_TRANSPORT},
	} {
		t.Run(name, func(t *testing.T) {
			r := id.Request("of " + name)
			last++
			pub := honest(r)
			pub.ID = last
			if tt.change != nil {
				tt.change(&pub)
			}
			a, ref := imp.announce(t, pub)
			answer := &kvferrypb.Announcement{Message: a.Full, Request: string(r)}
			if tt.forge != nil {
				tt.forge(answer)
			}
			imp.lookup = func(*kvferrypb.LookupRequest) (*kvferrypb.Announcement, error) { return answer, nil }
			d.ingest(string(r))
			start := time.Now()
			res, err := d.retrieve(string(r), ref, 0, deadline)
			if took := time.Since(start); took > deadline/2 {
				t.Errorf("it took %v", took)
			}
			if tt.want == kvferrypb.Failure_UNSPECIFIED {
				if err != nil {
					t.Errorf("an honest publication: %v", err)
				}
			} else if f := failureOf(t, err); f.GetCode() != tt.want || f.GetField() != tt.field || f.GetPeer() != "impostor" {
				t.Errorf("%v, %v, want %v of field %q", res, f, tt.want, tt.field)
			}
			if got := d.verifyLength(string(r)); tt.want != 0 && got != 0 {
				t.Errorf("%d tokens have landed", got)
			}
			d.remove(string(r))
			awaitAllFree(t, decode)
		})
	}
	t.Run("another epoch", func(t *testing.T) {
		// Of one publication, first at one content epoch and then at another.
		first, second := honest("epochs"), honest("epochs")
		first.ID, second.ID, first.Final = 1000, 1000, false
		a, ref := imp.announce(t, first)
		liar := publish.NewLog(publish.LogOptions{Life: imp.life})
		for range a.Name.Sequence { // to the same name
			last++
			second.ID = last + 2000
			if _, _, _, err := liar.Reserve(second.ID); err != nil {
				t.Fatal(err)
			}
		}
		second.ContentEpoch = 7
		second.Streams[0].Tokens = 24
		b, err := liar.Announce(time.Now(), second, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		answer := &kvferrypb.Announcement{Message: a.Full, Request: "epochs"}
		imp.lookup = func(*kvferrypb.LookupRequest) (*kvferrypb.Announcement, error) { return answer, nil }
		d.ingest("epochs")
		if _, err := d.retrieve("epochs", ref, 20, deadline); err != nil {
			t.Fatal(err)
		}
		d.remove("epochs")
		answer.Message = b.Full
		if b.Name != a.Name {
			t.Fatalf("%v is not %v", b.Name, a.Name)
		}
		d.ingest("epochs")
		res, err := d.retrieve("epochs", ref, 0, 100*time.Millisecond)
		if err == nil {
			t.Errorf("%v", res)
		}
		d.remove("epochs")
	})
	t.Run("a seal that does not hold", func(t *testing.T) {
		pub := honest("unsealed")
		pub.ID = 9999
		a, ref := imp.announce(t, pub)
		imp.seals.Store(a.Seal, 0)
		imp.lookup = func(*kvferrypb.LookupRequest) (*kvferrypb.Announcement, error) {
			return &kvferrypb.Announcement{Message: a.Full, Request: "unsealed"}, nil
		}
		d.ingest("unsealed")
		_, err := d.retrieve("unsealed", ref, 0, deadline)
		if f := failureOf(t, err); f.GetCode() != kvferrypb.Failure_STALE {
			t.Errorf("%v, want STALE", f)
		}
		d.remove("unsealed")
	})
	t.Run("many lookups that fail", func(t *testing.T) {
		pub := honest("refused")
		pub.ID = 10000
		_, ref := imp.announce(t, pub)
		imp.lookup = func(*kvferrypb.LookupRequest) (*kvferrypb.Announcement, error) {
			return nil, status.Error(codes.Internal, strings.Repeat("x", 4000))
		}
		d.ingest("refused")
		_, err := d.retrieve("refused", ref, 0, deadline)
		if f := failureOf(t, err); f.GetCode() != kvferrypb.Failure_TRANSPORT {
			t.Errorf("%v, want TRANSPORT", f)
		}
		d.remove("refused")
	})
	carry(t, "after all that", bring{chunks: chunks()}, p, d)
	d.remove("after all that")
	awaitAllFree(t, decode)
}

// redigest changes the digest of an announcement.
func redigest(a *kvferrypb.Announcement) {
	m, err := wire.Decode(a.GetMessage(), 1000)
	if err != nil {
		panic(err)
	}
	m.(wire.Batches)[0].Announcements[0].Digest++
	if a.Message, err = wire.Encode(m); err != nil {
		panic(err)
	}
}

// verifyLength is how many tokens of main have landed.
func (e *engine) verifyLength(r string) int {
	e.t.Helper()
	step, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{Plan: true, Segments: []*kvferrypb.Segment{{Request: r}}})
	if err != nil {
		e.t.Fatal(err)
	}
	if _, err := e.Abort(e.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()}); err != nil {
		e.t.Fatal(err)
	}
	return int(step.GetPlans()[0].GetViews()[0].GetLength())
}

// TestHostileHello: a peer that lies about itself, or says nothing, costs its
// readers their wait and nobody anything else.
func TestHostileHello(t *testing.T) {
	const silent = "mute"
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	for name, tt := range map[string]struct {
		lie  func(ctx context.Context, n *member, res *kvferrypb.HelloResponse)
		want []kvferrypb.Failure_Code
	}{
		silent: {
			func(ctx context.Context, _ *member, _ *kvferrypb.HelloResponse) { <-ctx.Done() },
			[]kvferrypb.Failure_Code{kvferrypb.Failure_DEADLINE, kvferrypb.Failure_TRANSPORT},
		},
		"another node": {
			func(_ context.Context, _ *member, r *kvferrypb.HelloResponse) {
				r.Life = &kvferrypb.Life{Node: "other", Incarnation: 1}
			},
			[]kvferrypb.Failure_Code{kvferrypb.Failure_OWNER_LOST},
		},
		"another life": {func(_ context.Context, _ *member, r *kvferrypb.HelloResponse) {
			r.Life = &kvferrypb.Life{Node: "impostor", Incarnation: r.GetLife().GetIncarnation() + 1}
		}, []kvferrypb.Failure_Code{kvferrypb.Failure_OWNER_LOST}},
		"no geometry": {
			func(_ context.Context, _ *member, r *kvferrypb.HelloResponse) { r.Geometry = nil },
			[]kvferrypb.Failure_Code{kvferrypb.Failure_INVALID},
		},
		"other geometry": {func(_ context.Context, _ *member, r *kvferrypb.HelloResponse) {
			g := page.Geometry{Model: "test", WorldSize: 1, Layout: page.Layout{Order: page.NHD, DType: page.BF16, Layers: 5, Pages: 64, PageSize: 8, Heads: 2, HeadDim: 8}}
			r.Geometry, r.Arenas = kvferrypb.FromGeometry(g), []*kvferrypb.Arena{{Bytes: uint64(g.Layout.Bytes())}}
		}, []kvferrypb.Failure_Code{kvferrypb.Failure_INCOMPATIBLE}},
		"a larger arena": {
			func(_ context.Context, _ *member, r *kvferrypb.HelloResponse) { r.Arenas[0].Bytes = 1 << 62 },
			[]kvferrypb.Failure_Code{kvferrypb.Failure_INVALID},
		},
		"no arena": {
			func(_ context.Context, _ *member, r *kvferrypb.HelloResponse) { r.Arenas = nil },
			[]kvferrypb.Failure_Code{kvferrypb.Failure_MALFORMED},
		},
		"many arenas": {
			func(_ context.Context, _ *member, r *kvferrypb.HelloResponse) {
				r.Arenas = make([]*kvferrypb.Arena, 1000)
			},
			[]kvferrypb.Failure_Code{kvferrypb.Failure_INVALID},
		},
		"no transport": {
			func(_ context.Context, _ *member, r *kvferrypb.HelloResponse) { r.Transports = nil },
			[]kvferrypb.Failure_Code{kvferrypb.Failure_TRANSPORT},
		},
		"a garbage descriptor": {
			func(_ context.Context, _ *member, r *kvferrypb.HelloResponse) {
				r.Transports[0].Address = []byte{0, 1, 2}
			},
			[]kvferrypb.Failure_Code{kvferrypb.Failure_TRANSPORT},
		},
		"a long descriptor": {
			func(_ context.Context, _ *member, r *kvferrypb.HelloResponse) {
				r.Transports[0].Address = make([]byte, 1<<20)
			},
			[]kvferrypb.Failure_Code{kvferrypb.Failure_INVALID},
		},
		"a mute data port": {func(_ context.Context, _ *member, r *kvferrypb.HelloResponse) {
			r.Transports[0].Address = readdress(r.GetTransports()[0].GetAddress(), mute.Addr().String())
		}, []kvferrypb.Failure_Code{kvferrypb.Failure_TRANSPORT}},
		"a closed data port": {func(_ context.Context, _ *member, r *kvferrypb.HelloResponse) {
			r.Transports[0].Address = readdress(r.GetTransports()[0].GetAddress(), "127.0.0.1:1")
		}, []kvferrypb.Failure_Code{kvferrypb.Failure_TRANSPORT}},
		"another's data port": {func(_ context.Context, n *member, r *kvferrypb.HelloResponse) {
			r.Transports[0].Address = readdress(r.GetTransports()[0].GetAddress(), n.Addresses().Data.String())
		}, []kvferrypb.Failure_Code{kvferrypb.Failure_OWNER_LOST}},
		"another's shared memory": {func(_ context.Context, n *member, r *kvferrypb.HelloResponse) {
			theirs, err := callPeer(n.t, n).Hello(n.t.Context(), &kvferrypb.HelloRequest{From: r.GetLife(), To: "prefill"})
			if err != nil {
				n.t.Error(err)
				return
			}
			r.Transports = theirs.GetTransports()[:1]
		}, []kvferrypb.Failure_Code{kvferrypb.Failure_OWNER_LOST}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			prefill, decode := startPair(t, [2]string{"transfer.limits.dial", "1s"}, [2]string{"timers.backoff_min", "1ms"}, [2]string{"timers.attempts", "3"})
			p, d := openEngine(t, prefill), openEngine(t, decode)
			imp := startDisguised(t, decode, func(ctx context.Context, r *kvferrypb.HelloResponse) { tt.lie(ctx, prefill, r) }, disguise{})
			awaitImpostor(t, decode, name == silent)
			wait := deadline // what it has said is told at once
			if peerOf(t, decode, "impostor").GetState() != "connected" {
				wait = time.Second // it might yet say something better
			}
			a, ref := imp.announce(t, honest("r1"))
			imp.lookup = func(*kvferrypb.LookupRequest) (*kvferrypb.Announcement, error) {
				return &kvferrypb.Announcement{Message: a.Full, Request: "r1"}, nil
			}
			d.ingest("r1")
			done := make(chan error, 1)
			go func() {
				_, err := d.retrieve("r1", ref, 0, wait)
				done <- err
			}()
			carry(t, "meanwhile", bring{chunks: chunks(), target: "decode"}, p, d)
			select {
			case err := <-done:
				f := failureOf(t, err)
				if f.GetPeer() != "impostor" || f.GetPeerIncarnation() != uint64(imp.life.Incarnation) {
					t.Errorf("%v does not name its peer", f)
				}
				found := false
				for _, c := range tt.want {
					found = found || f.GetCode() == c
				}
				if !found {
					t.Errorf("%v, want %v", f, tt.want)
				}
			case <-time.After(deadline / 2):
				t.Error("it waits for longer than it said")
			}
			d.remove("r1")
			d.remove("meanwhile")
			awaitAllFree(t, decode)
		})
	}
}

// readdress is a tcp descriptor with another address.
func readdress(descriptor []byte, address string) []byte {
	words := strings.Fields(string(descriptor))
	return []byte(strings.Join(append(words[:2], address), " "))
}

// TestHostileCaller: what a stranger calls on the peer port is answered with a
// reason, and holds nothing.
func TestHostileCaller(t *testing.T) {
	prefill, decode := startPair(t, [2]string{"timers.lease", "1s"}, [2]string{"timers.lease_renew", "200ms"})
	p, d := openEngine(t, prefill), openEngine(t, decode)
	c := callPeer(t, prefill)
	me, now := uint64(prefill.Life().Incarnation), &kvferrypb.Life{Node: "stranger", Incarnation: 3}
	p.ingest("r1")
	p.write("r1", 20)
	pub := p.publish("r1", true)
	flood := make([]*kvferrypb.LeaseItem, 5000)
	for i := range flood {
		flood[i] = &kvferrypb.LeaseItem{Sequence: pub.GetPublication(), Attempt: uint32(i)}
	}
	ctx := p.ctx()
	for name, call := range map[string]func() error{
		"hello to another node": func() error { _, err := c.Hello(ctx, &kvferrypb.HelloRequest{From: now, To: "other"}); return err },
		"hello to another life": func() error {
			_, err := c.Hello(ctx, &kvferrypb.HelloRequest{From: now, To: "prefill", ToIncarnation: 1})
			return err
		},
		"hello from nobody": func() error { _, err := c.Hello(ctx, &kvferrypb.HelloRequest{To: "prefill"}); return err },
		"hello from a bad name": func() error {
			_, err := c.Hello(ctx, &kvferrypb.HelloRequest{From: &kvferrypb.Life{Node: "a b"}, To: "prefill"})
			return err
		},
		"lookup in another life": func() error {
			_, err := c.Lookup(ctx, &kvferrypb.LookupRequest{Incarnation: 1, Request: "r1"})
			return err
		},
		"lookup of the unknown": func() error {
			_, err := c.Lookup(ctx, &kvferrypb.LookupRequest{Incarnation: me, Sequence: 99})
			return err
		},
		"lookup of nothing": func() error { _, err := c.Lookup(ctx, &kvferrypb.LookupRequest{Incarnation: me}); return err },
		"lookup of another request": func() error {
			_, err := c.Lookup(ctx, &kvferrypb.LookupRequest{Incarnation: me, Sequence: pub.GetPublication(), Request: "r2"})
			return err
		},
		"lease in another life": func() error { _, err := c.Lease(ctx, &kvferrypb.LeaseRequest{Incarnation: 1, Reader: now}); return err },
		"lease for nobody":      func() error { _, err := c.Lease(ctx, &kvferrypb.LeaseRequest{Incarnation: me}); return err },
		"too many leases": func() error {
			_, err := c.Lease(ctx, &kvferrypb.LeaseRequest{Incarnation: me, Reader: now, Items: flood})
			return err
		},
		"too many words": func() error {
			_, err := c.Complete(ctx, &kvferrypb.CompleteRequest{Incarnation: me, Reader: now, Items: make([]*kvferrypb.CompleteItem, 5000)})
			return err
		},
		"snapshot of another life": func() error {
			s, err := c.Snapshot(ctx, &kvferrypb.SnapshotRequest{Incarnation: 1})
			if err == nil {
				_, err = s.Recv()
			}
			return err
		},
		"a message too long": func() error {
			_, err := c.Lookup(ctx, &kvferrypb.LookupRequest{Incarnation: me, Request: strings.Repeat("x", 20<<20)})
			return err
		},
		"a push by nobody": func() error { return push(ctx, c, &kvferrypb.PushRequest{}) },
		"a push that speaks for another": func() error {
			return push(ctx, c, &kvferrypb.PushRequest{From: now}, &kvferrypb.PushRequest{From: &kvferrypb.Life{Node: "decode", Incarnation: uint64(decode.Life().Incarnation)}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			start := time.Now()
			if err := call(); err == nil || errors.Is(err, io.EOF) {
				t.Errorf("%v, want a refusal", err)
			} else if status.Code(err) == codes.Unknown || status.Code(err) == codes.Internal {
				t.Errorf("%v has no type", err)
			}
			if took := time.Since(start); took > deadline/2 {
				t.Errorf("it took %v", took)
			}
		})
	}
	// A flood of leases finds its bound, and ends with its lease; words on
	// publications that are not there change nothing.
	res, err := c.Lease(ctx, &kvferrypb.LeaseRequest{Incarnation: me, Reader: now, Items: flood[:4000]})
	if err != nil {
		t.Fatal(err)
	}
	granted := 0
	for _, r := range res.GetResults() {
		switch r.GetRefused() {
		case "":
			granted++
		case "full":
		default:
			t.Fatalf("%v", r)
		}
	}
	if granted != 256 {
		t.Errorf("%d leases for one publication", granted)
	}
	ends := make([]*kvferrypb.CompleteItem, 4000)
	for i := range ends {
		ends[i] = &kvferrypb.CompleteItem{Sequence: pub.GetPublication() + uint64(i%2), Attempt: uint32(i), Outcome: kvferrypb.CompleteItem_FAILED}
	}
	for range 3 {
		if _, err := c.Complete(ctx, &kvferrypb.CompleteRequest{Incarnation: me, Reader: now, Items: ends}); err != nil {
			t.Fatal(err)
		}
	}
	// Pushed announcements of a stranger, and garbage, harm nobody.
	if err := push(ctx, c, &kvferrypb.PushRequest{From: now}, &kvferrypb.PushRequest{From: now, What: &kvferrypb.PushRequest_Announcement{
		Announcement: &kvferrypb.Announcement{Message: []byte("garbage"), Request: strings.Repeat("r", 10000)},
	}}, &kvferrypb.PushRequest{From: now, What: &kvferrypb.PushRequest_Ended{Ended: &kvferrypb.Ended{Sequence: pub.GetPublication(), Cause: "revoked"}}}); err != nil && !errors.Is(err, io.EOF) {
		t.Errorf("%v", err)
	}
	d.ingest("r1")
	if _, err := d.retrieve("r1", pub.GetReference(), 0, deadline); err != nil {
		t.Error(err)
	}
	carry(t, "r2", bring{chunks: chunks()}, p, d)
	p.remove("r1")
	p.remove("r2")
	awaitAllFree(t, prefill)
}

// push sends items and returns how the stream ends; nil: all were taken.
func push(ctx context.Context, c kvferrypb.PeerClient, items ...*kvferrypb.PushRequest) error {
	s, err := c.Push(ctx)
	if err != nil {
		return err
	}
	for i, item := range items {
		if err := s.Send(item); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if _, err := s.Recv(); err != nil {
			return err
		}
		if i == len(items)-1 {
			return s.CloseSend()
		}
	}
	return nil
}

// TestRandomBytes: garbage on every port and socket while a request is carried.
func TestRandomBytes(t *testing.T) {
	prefill, decode := startPair(t)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	ctx, stop := context.WithTimeout(t.Context(), time.Second)
	defer stop()
	var work sync.WaitGroup
	for _, n := range []*member{prefill, decode} {
		a := n.Addresses()
		for _, to := range [][2]string{
			{"udp", a.Gossip.String()},
			{"tcp", a.Gossip.String()},
			{"tcp", a.Peer.String()},
			{"tcp", a.Data.String()},
			{"tcp", a.HTTP.String()},
			{"unix", a.Engine},
			{"unix", a.Engine + ".fd"},
		} {
			work.Go(func() { pelt(ctx, to[0], to[1]) })
		}
	}
	for i := 0; ctx.Err() == nil || i == 0; i++ {
		r := fmt.Sprintf("r%d", i)
		carry(t, r, bring{chunks: chunks(), target: "decode", reference: true}, p, d)
		p.remove(r)
		d.remove(r)
	}
	work.Wait()
	awaitAllFree(t, prefill)
	awaitAllFree(t, decode)
}

// pelt throws bytes at an address until ctx ends. Every second time it begins
// as whoever belongs there would.
func pelt(ctx context.Context, network, address string) {
	var d net.Dialer
	for i := 0; ctx.Err() == nil; i++ {
		c, err := d.DialContext(ctx, network, address)
		if err != nil {
			continue
		}
		c.SetDeadline(time.Now().Add(50 * time.Millisecond))
		b := make([]byte, 1+i*37%1300)
		rand.Read(b)
		if i%2 == 1 {
			b = append([]byte([]string{"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "kvf\x01\x01\x00\x00\x00", "GET /metrics HTTP/1.1\r\n", "K\x01\x01"}[i/2%4]), b...)
		}
		c.Write(b)
		io.CopyN(io.Discard, c, 100)
		c.Close()
	}
}

// TestAnotherLifeAnswers: that the process at an owner's address is another life
// proves that the owner is gone, long before gossip says so.
func TestAnotherLifeAnswers(t *testing.T) {
	decode := startNode(t, "decode", nil)
	d := openEngine(t, decode)
	imp := startImpostor(t, decode, nil)
	_, ref := imp.announce(t, honest("r1"))
	refused, err := status.New(codes.Aborted, "message is for another incarnation").WithDetails(&kvferrypb.Failure{Code: kvferrypb.Failure_OWNER_LOST})
	if err != nil {
		t.Fatal(err)
	}
	imp.lookup = func(*kvferrypb.LookupRequest) (*kvferrypb.Announcement, error) { return nil, refused.Err() }
	d.ingest("r1")
	for _, wait := range []time.Duration{0, deadline} {
		if _, err := d.retrieve("r1", ref, 0, wait); client.CodeOf(err) != kvferrypb.Failure_OWNER_LOST {
			t.Errorf("retrieve, waiting %v: %v, want OWNER_LOST", wait, err)
		}
	}
	if _, err := d.Release(d.ctx(), &kvferrypb.ReleaseRequest{Reference: ref}); client.CodeOf(err) != kvferrypb.Failure_OWNER_LOST {
		t.Errorf("release: %v, want OWNER_LOST", err)
	}
}

// TestUntrueReferenceIsAsked: an owner's answer is compared with the reference
// as well as what gossip has brought.
func TestUntrueReferenceIsAsked(t *testing.T) {
	decode := startNode(t, "decode", nil)
	d := openEngine(t, decode)
	imp := startImpostor(t, decode, nil)
	a, ref := imp.announce(t, honest("r1"))
	truth, err := wire.Peek(ref)
	if err != nil {
		t.Fatal(err)
	}
	imp.lookup = func(*kvferrypb.LookupRequest) (*kvferrypb.Announcement, error) { // whatever was asked for
		return &kvferrypb.Announcement{Message: a.Full, Request: "r1"}, nil
	}
	for name, change := range map[string]func(*wire.Reference){
		"request":   func(r *wire.Reference) { r.Request = "r2" },
		"seal word": func(r *wire.Reference) { r.Seal++ },
	} {
		bad := truth
		change(&bad)
		text, err := wire.Keys(nil).Encode(bad)
		if err != nil {
			t.Fatal(err)
		}
		d.ingest(string(bad.Request))
		if res, err := d.retrieve(string(bad.Request), text, 0, deadline); client.CodeOf(err) != kvferrypb.Failure_INVALID {
			t.Errorf("another %s: %v, %v, want INVALID", name, res, err)
		}
	}
}

// TestOwnerThatGoesOnAndOn: a reader believes an owner that another publication
// goes on for the one that was asked for, but not for another request, not an
// older one, and not for ever.
func TestOwnerThatGoesOnAndOn(t *testing.T) {
	decode := startNode(t, "decode", nil, [2]string{"timers.attempts", "3"})
	d := openEngine(t, decode)
	imp := startImpostor(t, decode, nil)
	imp.goesOn = true
	other, _ := imp.announce(t, honest("r2"))
	_, ref := imp.announce(t, manager.Publication{ID: 2, Request: "r1", Final: true, Streams: honest("r1").Streams})
	d.ingest("r1")
	imp.lookup = func(*kvferrypb.LookupRequest) (*kvferrypb.Announcement, error) { // an older one
		return &kvferrypb.Announcement{Message: other.Full, Request: "r2"}, nil
	}
	_, err := d.retrieve("r1", ref, 0, deadline)
	code(t, "an older one", err, kvferrypb.Failure_MALFORMED)

	_, otherRef := imp.announce(t, manager.Publication{ID: 3, Request: "r4", Final: true, Streams: honest("r4").Streams})
	next := manager.PublicationID(3)
	var one sync.Mutex
	ends := func(r id.Request) *kvferrypb.Announcement { // what it announces has always ended
		one.Lock()
		defer one.Unlock()
		next++
		a, _ := imp.announce(t, manager.Publication{ID: next, Request: r, Final: true, Streams: honest(r).Streams})
		imp.seals.Store(a.Seal, 0)
		return &kvferrypb.Announcement{Message: a.Full, Request: string(r)}
	}
	imp.lookup = func(*kvferrypb.LookupRequest) (*kvferrypb.Announcement, error) { return ends("r3"), nil }
	d.ingest("r4")
	_, err = d.retrieve("r4", otherRef, 0, deadline)
	code(t, "another request's", err, kvferrypb.Failure_INVALID)

	var asked atomic.Int32
	imp.lookup = func(*kvferrypb.LookupRequest) (*kvferrypb.Announcement, error) {
		asked.Add(1)
		return ends("r1"), nil
	}
	_, err = d.retrieve("r1", ref, 0, deadline)
	code(t, "for ever", err, kvferrypb.Failure_STALE)
	if n := asked.Load(); n > 20 {
		t.Errorf("it was asked %d times", n)
	}
}

// TestFence: a broken push stream hides its sender at once, long before gossip
// would; who is gone loses its readers, who lives is back after a probe.
func TestFence(t *testing.T) {
	for name, dies := range map[string]bool{"dies": true, "lives": false} {
		t.Run(name, func(t *testing.T) {
			decode := startNode(t, "decode", nil)
			d := openEngine(t, decode)
			imp := startImpostor(t, decode, nil)
			pub := honest("r1")
			pub.Final = false
			a, ref := imp.announce(t, pub)
			imp.lookup = func(*kvferrypb.LookupRequest) (*kvferrypb.Announcement, error) {
				return &kvferrypb.Announcement{Message: a.Full, Request: "r1"}, nil
			}
			ctx, hangUp := context.WithCancel(d.ctx())
			stream, err := callPeer(t, decode).Push(ctx)
			if err == nil {
				err = stream.Send(&kvferrypb.PushRequest{From: imp.truth.GetLife()})
			}
			if err == nil {
				_, err = stream.Recv()
			}
			if err != nil {
				t.Fatal(err)
			}
			d.ingest("r1")
			if _, err := d.retrieve("r1", ref, 20, deadline); err != nil {
				t.Fatal(err)
			}
			waits := d.retrieving("r1", ref, 0)
			if dies {
				imp.server.Stop()
			}
			hangUp()
			if dies { // and is a member all the time: its gossip goes on
				got := <-waits
				f := failureOf(t, got.err)
				if f.GetCode() != kvferrypb.Failure_OWNER_LOST || f.GetPeer() != "impostor" || f.GetPeerIncarnation() != uint64(imp.life.Incarnation) {
					t.Errorf("%v, want OWNER_LOST of %s", f, imp.life)
				}
				if m, err := decode.admin.Members(t.Context(), &kvferrypb.MembersRequest{}); err != nil || len(m.GetItems()) != 2 {
					t.Errorf("%v, %v, want that gossip still lists it", m, err)
				}
				// Which does not make it readable.
				for _, wait := range []time.Duration{0, deadline} {
					if _, err := d.retrieve("r1", ref, 0, wait); client.CodeOf(err) != kvferrypb.Failure_OWNER_LOST {
						t.Errorf("its reference, waiting %v: %v, want OWNER_LOST", wait, err)
					}
				}
				return
			}
			await(t, "the probe to succeed", func(ctx context.Context) error {
				res, err := decode.admin.Peers(ctx, &kvferrypb.PeersRequest{})
				if err != nil || len(res.GetItems()) != 1 || res.GetItems()[0].GetState() != "connected" {
					return fmt.Errorf("%v, %w", res, err)
				}
				return nil
			})
			pub.Final = true
			pub.Streams[0].Tokens = 24
			b, err := imp.log.Announce(time.Now(), pub, time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			if err := push(d.ctx(), callPeer(t, decode), &kvferrypb.PushRequest{From: imp.truth.GetLife(), What: &kvferrypb.PushRequest_Announcement{
				Announcement: &kvferrypb.Announcement{Message: b.Full, Request: "r1"},
			}}); err != nil {
				t.Fatal(err)
			}
			if got := <-waits; got.err != nil || got.res.GetReadiness() != kvferrypb.Readiness_READY {
				t.Errorf("%v, %v", got.res, got.err)
			}
		})
	}
}
