package replay

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/internal/page"
)

// lies are ways in which a node can be wrong or gone; each field is one.
type lies struct {
	early     bool // ready without final
	flip      bool // one bit of what lands
	stale     bool // the last chunk never lands
	double    bool // a page twice in a stream
	trample   bool // decoding changes the prompt
	short     bool // lengths that were not asked for
	unplanned bool // places outside of the arena
	forget    bool // the end of a publication is not told
	refuse    int  // so many admits are busy
	fail      kvferrypb.Failure_Code
	mute      bool // retrieves never end
}

// fakeCluster is a handful of fake nodes in this process that pull from each other
// by reading each other's memory. It is as simple as it can be: one lock.
type fakeCluster struct {
	lies lies

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at every change
	nodes   map[string]*fakeNode
	offers  map[string]*fakeOffer // publications by request
	muted   func()                // told when a mute one is asked; may be nil
}

type fakeOffer struct {
	owner  *fakeNode
	stream map[string][]page.Index
	tokens int
	final  bool
	over   bool // its reader has it
	limbo  bool // its request was removed before
}

type fakeStream struct {
	pages  []page.Index
	tokens int
}

type fakeNode struct {
	kvferrypb.UnimplementedEngineServer
	cluster  *fakeCluster
	name     string
	geometry page.Geometry
	ranks    []id.Rank
	regions  []*memory.Region
	arenas   []arena
	socket   string
	server   *grpc.Server
	fds      *net.UnixListener
	work     sync.WaitGroup

	free     []page.Index
	requests map[string]map[string]*fakeStream
	steps    map[uint64][]*kvferrypb.Segment
	lastStep uint64
	events   chan *kvferrypb.Event
}

func newFakeCluster(l lies) *fakeCluster {
	return &fakeCluster{lies: l, changed: make(chan struct{}), nodes: make(map[string]*fakeNode), offers: make(map[string]*fakeOffer)}
}

// start starts a node and returns its engine socket.
func (c *fakeCluster) start(t *testing.T, name string, l page.Layout, ranks int) string {
	t.Helper()
	n := &fakeNode{
		cluster: c, name: name, socket: filepath.Join(t.TempDir(), "s"),
		geometry: page.Geometry{Model: "m", WorldSize: ranks, Layout: l},
		requests: make(map[string]map[string]*fakeStream), steps: make(map[uint64][]*kvferrypb.Segment),
		events: make(chan *kvferrypb.Event, 1024),
	}
	for r := range ranks {
		region, err := memory.New(name, l.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { region.Close() })
		a, err := newArena(region.Bytes(), l)
		if err != nil {
			t.Fatal(err)
		}
		n.ranks, n.regions, n.arenas = append(n.ranks, id.Rank(r)), append(n.regions, region), append(n.arenas, a)
	}
	for p := l.Pages - 1; p > 0; p-- {
		n.free = append(n.free, page.Index(p))
	}
	listener, err := net.Listen("unix", n.socket)
	if err != nil {
		t.Fatal(err)
	}
	if n.fds, err = net.ListenUnix("unix", &net.UnixAddr{Name: n.socket + ".fd", Net: "unix"}); err != nil {
		t.Fatal(err)
	}
	n.server = grpc.NewServer()
	kvferrypb.RegisterEngineServer(n.server, n)
	n.work.Go(func() { _ = n.server.Serve(listener) })
	n.work.Go(n.sendFiles)
	t.Cleanup(func() {
		n.server.Stop()
		n.fds.Close()
		n.work.Wait()
	})
	c.nodes[name] = n
	return n.socket
}

// sendFiles gives the arena of the rank that the token's first byte names.
func (n *fakeNode) sendFiles() {
	for {
		conn, err := n.fds.AcceptUnix()
		if err != nil {
			return
		}
		var token [32]byte
		if _, err := io.ReadFull(conn, token[:]); err == nil {
			_ = memory.SendFile(conn, []byte{0}, n.regions[token[0]].File())
		}
		conn.Close()
	}
}

func refusal(code kvferrypb.Failure_Code, text string) error {
	s, err := status.New(codes.Unavailable, text).WithDetails(&kvferrypb.Failure{Code: code, Message: text})
	return errors.Join(s.Err(), err)
}

// lock is the cluster's; the function that it returns unlocks and wakes all.
func (n *fakeNode) lock() func() {
	c := n.cluster
	c.mu.Lock()
	return func() {
		close(c.changed)
		c.changed = make(chan struct{})
		c.mu.Unlock()
	}
}

func (n *fakeNode) Open(context.Context, *kvferrypb.OpenRequest) (*kvferrypb.OpenResponse, error) {
	r := &kvferrypb.OpenResponse{Session: "s", Node: n.name, Incarnation: 1, Geometry: kvferrypb.FromGeometry(n.geometry)}
	for _, rank := range n.ranks {
		r.Ranks = append(r.Ranks, uint32(rank))
	}
	return r, nil
}

func (n *fakeNode) OpenArena(_ context.Context, r *kvferrypb.OpenArenaRequest) (*kvferrypb.OpenArenaResponse, error) {
	token := make([]byte, 32)
	token[0] = byte(r.GetRank())
	return &kvferrypb.OpenArenaResponse{Token: token, FdSocket: n.socket + ".fd", Bytes: uint64(n.regions[r.GetRank()].Size())}, nil
}

func (n *fakeNode) Close(context.Context, *kvferrypb.CloseRequest) (*kvferrypb.CloseResponse, error) {
	return &kvferrypb.CloseResponse{}, nil
}

func (n *fakeNode) Events(s grpc.BidiStreamingServer[kvferrypb.EventsRequest, kvferrypb.Event]) error {
	if err := s.Send(&kvferrypb.Event{Kind: kvferrypb.Event_OPENED}); err != nil {
		return err
	}
	for {
		select {
		case e := <-n.events:
			if err := s.Send(e); err != nil {
				return err
			}
		case <-s.Context().Done():
			return nil
		}
	}
}

func (n *fakeNode) Ingest(_ context.Context, r *kvferrypb.IngestRequest) (*kvferrypb.IngestResponse, error) {
	defer n.lock()()
	streams := make(map[string]*fakeStream)
	for _, l := range r.GetNeeded().GetLabels() {
		streams[l] = &fakeStream{}
	}
	n.requests[r.GetRequest()] = streams
	return &kvferrypb.IngestResponse{}, nil
}

func (n *fakeNode) Remove(_ context.Context, r *kvferrypb.RemoveRequest) (*kvferrypb.RemoveResponse, error) {
	defer n.lock()()
	o := n.cluster.offers[r.GetRequest()]
	if o != nil && o.owner == n && !o.over && !r.GetDiscard() {
		o.limbo = true // what is published lives on
	} else {
		for _, s := range n.requests[r.GetRequest()] {
			n.free = append(n.free, s.pages...)
		}
	}
	delete(n.requests, r.GetRequest())
	return &kvferrypb.RemoveResponse{}, nil
}

func (n *fakeNode) Cancel(context.Context, *kvferrypb.CancelRequest) (*kvferrypb.CancelResponse, error) {
	return &kvferrypb.CancelResponse{}, nil
}

// reserve makes a stream long enough, or reports false.
func (n *fakeNode) reserve(s *fakeStream, tokens int) bool {
	need := page.Count(tokens, n.geometry.Layout.PageSize) - len(s.pages)
	if need > len(n.free) {
		return false
	}
	for range need {
		last := len(n.free) - 1
		s.pages = append(s.pages, n.free[last])
		if !n.cluster.lies.double {
			n.free = n.free[:last]
		}
	}
	return true
}

func (n *fakeNode) Admit(_ context.Context, r *kvferrypb.AdmitRequest) (*kvferrypb.AdmitResponse, error) {
	defer n.lock()()
	if n.cluster.lies.refuse > 0 {
		n.cluster.lies.refuse--
		return nil, refusal(kvferrypb.Failure_BUSY, "later")
	}
	n.lastStep++
	n.steps[n.lastStep] = r.GetSegments()
	out := &kvferrypb.AdmitResponse{Step: n.lastStep}
	for _, g := range r.GetSegments() {
		s := n.requests[g.GetRequest()][g.GetLabel()]
		if s == nil {
			return nil, refusal(kvferrypb.Failure_NOT_FOUND, "unknown stream")
		}
		length := s.tokens + int(g.GetSpan())
		if !n.reserve(s, length) {
			return nil, refusal(kvferrypb.Failure_RESOURCE_EXHAUSTED, "no pages")
		}
		p := &kvferrypb.PlanOutput{Label: g.GetLabel(), Views: []*kvferrypb.View{{Request: g.GetRequest(), Length: uint32(length)}}}
		size := n.geometry.Layout.PageSize
		for _, i := range s.pages[:page.Count(length, size)] {
			p.PagedKvIndices = append(p.PagedKvIndices, int32(i))
		}
		for token := s.tokens; token < length; token++ {
			at := uint32(s.pages[token/size])
			if n.cluster.lies.unplanned {
				at = uint32(n.geometry.Layout.Pages)
			}
			p.TokenToPage, p.TokenToSlot = append(p.TokenToPage, at), append(p.TokenToSlot, uint32(token%size))
		}
		out.Plans = append(out.Plans, p)
	}
	return out, nil
}

func (n *fakeNode) Abort(_ context.Context, r *kvferrypb.AbortRequest) (*kvferrypb.AbortResponse, error) {
	defer n.lock()()
	delete(n.steps, r.GetStep())
	return &kvferrypb.AbortResponse{}, nil
}

func (n *fakeNode) Commit(_ context.Context, r *kvferrypb.CommitRequest) (*kvferrypb.CommitResponse, error) {
	defer n.lock()()
	out := &kvferrypb.CommitResponse{}
	for _, g := range n.steps[r.GetStep()] {
		s := n.requests[g.GetRequest()][g.GetLabel()]
		if s == nil { // removed meanwhile
			out.Missing = append(out.Missing, g.GetRequest())
			return out, nil
		}
		s.tokens += int(g.GetSpan())
		if n.cluster.lies.trample && len(r.GetPublish()) == 0 {
			n.arenas[0].bytes[n.arenas[0].at(1, s.pages[0], 0, 0, 0)] ^= 1
		}
	}
	delete(n.steps, r.GetStep())
	for _, p := range r.GetPublish() {
		o := n.cluster.offers[p.GetRequest()]
		if o == nil {
			o = &fakeOffer{owner: n}
			n.cluster.offers[p.GetRequest()] = o
		}
		o.final, o.stream = p.GetFinal(), make(map[string][]page.Index)
		for label, s := range n.requests[p.GetRequest()] {
			o.stream[label], o.tokens = slices.Clone(s.pages), s.tokens
		}
		out.Published = append(out.Published, &kvferrypb.PublishResult{Response: &kvferrypb.PublishResponse{Reference: "ref " + p.GetRequest()}})
	}
	return out, nil
}

func (n *fakeNode) AdmitRetrieve(ctx context.Context, r *kvferrypb.AdmitRetrieveRequest) (*kvferrypb.AdmitRetrieveResponse, error) {
	if ref := r.GetReference(); ref != "" && ref != "ref "+r.GetRequest() {
		return nil, refusal(kvferrypb.Failure_INVALID, "reference of another request")
	}
	c := n.cluster
	for {
		c.mu.Lock()
		changed := c.changed
		answer, err := n.pull(r)
		c.mu.Unlock()
		if err != nil || answer != nil {
			return answer, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
}

// pull takes what is there, and answers when the request is ready.
func (n *fakeNode) pull(r *kvferrypb.AdmitRetrieveRequest) (*kvferrypb.AdmitRetrieveResponse, error) {
	lies := &n.cluster.lies
	if lies.fail != 0 {
		return nil, refusal(lies.fail, "so it goes")
	}
	o := n.cluster.offers[r.GetRequest()]
	if lies.mute && n.cluster.muted != nil {
		n.cluster.muted()
	}
	if o == nil || lies.mute {
		return nil, nil
	}
	tokens := o.tokens
	if lies.stale && o.final {
		tokens = n.requests[r.GetRequest()][string(id.Main)].tokens
	}
	out := &kvferrypb.AdmitRetrieveResponse{Readiness: kvferrypb.Readiness_READY, Owner: o.owner.name, Transport: "memory"}
	size := n.geometry.Layout.PageSize
	for label, s := range n.requests[r.GetRequest()] {
		if !n.reserve(s, o.tokens) {
			return nil, refusal(kvferrypb.Failure_RESOURCE_EXHAUSTED, "no pages")
		}
		for token := s.tokens; token < tokens; token++ {
			for i, a := range n.arenas {
				from, to := place{o.stream[label][token/size], token % size}, place{s.pages[token/size], token % size}
				copyToken(a, to, o.owner.arenas[i], from)
				if lies.flip && token == o.tokens-1 && o.final {
					a.bytes[a.at(0, to.page, 1, 0, to.slot)] ^= 4
				}
			}
		}
		s.tokens = max(s.tokens, o.tokens)
		length := s.tokens
		if lies.short {
			length--
		}
		out.Lengths = append(out.Lengths, &kvferrypb.AdmitRetrieveResponse_Length{Label: label, Tokens: uint32(length)})
		out.Bytes += uint64(s.tokens) * uint64(n.geometry.Layout.TokenBytes()) * uint64(len(n.arenas))
	}
	ready := o.final || lies.early || r.GetMinTokens() > 0 && o.tokens >= int(r.GetMinTokens())
	if !ready {
		return nil, nil
	}
	if o.final && !o.over && !lies.forget {
		o.over = true
		if o.limbo {
			for _, pages := range o.stream {
				o.owner.free = append(o.owner.free, pages...)
			}
		}
		o.owner.events <- &kvferrypb.Event{Sequence: 1, Kind: kvferrypb.Event_RELEASED, Request: r.GetRequest(), Outcome: "acknowledged"}
	}
	return out, nil
}

func copyToken(dst arena, to place, src arena, from place) {
	for layer := range dst.layout.Layers {
		for side := range 2 {
			for head := range dst.layout.Heads {
				at, of := dst.at(layer, to.page, side, head, to.slot), src.at(layer, from.page, side, head, from.slot)
				copy(dst.bytes[at:at+dst.vector], src.bytes[of:of+src.vector])
			}
		}
	}
}
