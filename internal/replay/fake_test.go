package replay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
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
	unforked  bool // a fork has the length of its source, and none of its bytes
	spoil     bool // one byte of what comes back from the host
	moved     int  // so many retrieves find that it went to the owner's host
	ragged    bool // index vectors that do not fit the plan
	refuse    int  // so many admits are busy
	fail      kvferrypb.Failure_Code
	mute      bool // retrieves never end
}

// fakeCluster is a handful of fake nodes in this process that pull from each other
// by reading each other's memory. It is as simple as it can be: one lock.
type fakeCluster struct {
	id   int64 // of this process
	lies lies
	hold time.Duration // of a final publication that nobody reads; 0: for ever
	host int           // pages of a node's host tier
	keep bool          // no node moves anything to its host by itself
	// hook sees every call of an engine before the node does, and again after it,
	// when the answer is not on its way yet. What it returns is the answer.
	hook func(context.Context, fakeCall) error

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at every change
	nodes   map[string]*fakeNode
	offers  map[string]*fakeOffer // publications by request
	muted   func()                // told when a mute one is asked; may be nil
	mapped  []string              // lives whose arenas engines had mapped when the next one was opened
}

// fakeCall is one call at one node.
type fakeCall struct {
	node    *fakeNode
	method  string
	request string // the first one that it names
	after   bool
	nth     int // of this method at this life
}

type fakeOffer struct {
	owner  *fakeNode
	stream map[string][]page.Index
	tokens int
	final  bool
	ended  string // how; "": not yet
	limbo  bool   // its request was removed before
}

type fakeStream struct {
	pages  []page.Index
	tokens int
	away   [][]byte // by arena, what is on the host; nil: nothing is
}

// fakeRequest is a request and when something last happened to it.
type fakeRequest struct {
	streams map[string]*fakeStream
	needed  []string
	active  int
}

// fakeStep is an admitted step of one request.
type fakeStep struct {
	request  string
	segments []*kvferrypb.Segment
}

// fakeAdmin is a node as operators see it.
type fakeAdmin struct {
	kvferrypb.UnimplementedAdminServer
	node *fakeNode
}

// fakeNode is one life of a node.
type fakeNode struct {
	kvferrypb.UnimplementedEngineServer
	cluster     *fakeCluster
	name        string
	incarnation uint64
	former      *fakeNode // the life before
	atOpen      [][]byte  // of the former life's arenas, when this one was opened
	geometry    page.Geometry
	ranks       []id.Rank
	regions     []*memory.Region
	arenas      []arena
	socket      string
	server      *grpc.Server
	fds         *net.UnixListener
	work        sync.WaitGroup

	// Under the cluster's lock.
	dead     bool
	calls    map[string]int
	free     []page.Index
	requests map[string]*fakeRequest
	ingested map[string]bool
	steps    map[uint64]fakeStep
	lastStep uint64
	clock    int
	host     int // free pages of it
	offloads int
	events   chan *kvferrypb.Event
}

var fakeClusters atomic.Int64

func newFakeCluster(t *testing.T, l lies) *fakeCluster {
	c := &fakeCluster{
		id: fakeClusters.Add(1), lies: l, hold: 3 * time.Second, changed: make(chan struct{}),
		nodes: make(map[string]*fakeNode), offers: make(map[string]*fakeOffer),
	}
	t.Cleanup(func() {
		for _, n := range c.nodes {
			n.kill()
			n.work.Wait()
			for ; n != nil; n = n.former {
				for _, r := range n.regions {
					r.Close()
				}
			}
		}
	})
	return c
}

// start starts a node and returns its engine socket.
func (c *fakeCluster) start(t *testing.T, name string, l page.Layout, ranks int) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	if err := c.begin(name, socket, 1, page.Geometry{Model: "m", WorldSize: ranks, Layout: l}); err != nil {
		t.Fatal(err)
	}
	return socket
}

// restart kills a node if it lives, and starts its next life on the same socket.
func (c *fakeCluster) restart(name string) error {
	n := c.node(name)
	n.kill()
	n.work.Wait()
	return c.begin(name, n.socket, n.incarnation+1, n.geometry)
}

func (c *fakeCluster) node(name string) *fakeNode {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nodes[name]
}

// regionName tells apart all lives of all nodes of this process.
func (n *fakeNode) regionName() string {
	return fmt.Sprintf("fake-%d-%s-%d.", n.cluster.id, n.name, n.incarnation)
}

func (c *fakeCluster) begin(name, socket string, incarnation uint64, g page.Geometry) error {
	n := &fakeNode{
		cluster: c, name: name, incarnation: incarnation, socket: socket, geometry: g,
		former: c.node(name), calls: make(map[string]int), ingested: make(map[string]bool),
		requests: make(map[string]*fakeRequest), steps: make(map[uint64]fakeStep),
		events: make(chan *kvferrypb.Event, 1024), host: c.host,
	}
	for r := range g.WorldSize {
		region, err := memory.New(n.regionName(), g.Layout.Bytes())
		if err != nil {
			return err
		}
		a, err := newArena(region.Bytes(), g.Layout)
		if err != nil {
			return err
		}
		n.ranks, n.regions, n.arenas = append(n.ranks, id.Rank(r)), append(n.regions, region), append(n.arenas, a)
	}
	for p := g.Layout.Pages - 1; p > 0; p-- {
		n.free = append(n.free, page.Index(p))
	}
	for _, path := range []string{socket, socket + ".fd"} {
		_ = os.Remove(path) // a killed process leaves them
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return err
	}
	listener.SetUnlinkOnClose(false)
	if n.fds, err = net.ListenUnix("unix", &net.UnixAddr{Name: socket + ".fd", Net: "unix"}); err != nil {
		return err
	}
	n.server = grpc.NewServer(grpc.UnaryInterceptor(n.intercept))
	kvferrypb.RegisterEngineServer(n.server, n)
	kvferrypb.RegisterAdminServer(n.server, fakeAdmin{node: n})
	n.work.Go(func() { _ = n.server.Serve(listener) })
	n.work.Go(n.sendFiles)
	c.mu.Lock()
	c.nodes[name] = n
	c.mu.Unlock()
	return nil
}

// kill ends a life as SIGKILL does: no call is answered any more.
func (n *fakeNode) kill() {
	n.server.Stop()
	n.fds.Close()
	defer n.lock()()
	n.dead = true
}

// session is the token of this life's only session.
func (n *fakeNode) session() string { return fmt.Sprint("session ", n.incarnation) }

func (n *fakeNode) authorize(ctx context.Context) error {
	md, _ := metadata.FromIncomingContext(ctx)
	if token := md.Get(kvferrypb.SessionKey); len(token) != 1 || token[0] != n.session() {
		return refusal(kvferrypb.Failure_NO_SESSION, "no such session")
	}
	return nil
}

func (n *fakeNode) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	call := fakeCall{node: n, method: path.Base(info.FullMethod)}
	if strings.Contains(info.FullMethod, ".Engine/") && call.method != "Open" {
		if err := n.authorize(ctx); err != nil {
			return nil, err
		}
	}
	switch r := req.(type) {
	case *kvferrypb.AdmitRequest:
		call.request = r.GetSegments()[0].GetRequest()
	case *kvferrypb.CommitRequest:
		if len(r.GetPublish()) > 0 {
			call.request = r.GetPublish()[0].GetRequest()
		}
	case interface{ GetRequest() string }:
		call.request = r.GetRequest()
	}
	n.cluster.mu.Lock()
	call.nth = n.calls[call.method]
	n.calls[call.method]++
	hook := n.cluster.hook
	n.cluster.mu.Unlock()
	if hook == nil {
		return handle(ctx, req)
	}
	if err := hook(ctx, call); err != nil {
		return nil, err
	}
	answer, err := handle(ctx, req)
	call.after = true
	if hooked := hook(ctx, call); hooked != nil {
		return nil, hooked
	}
	return answer, err
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
			_ = memory.SendFile(conn, []byte{kvferrypb.HandedFile}, n.regions[token[0]].File())
		}
		conn.Close()
	}
}

// mappings counts the mappings of an arena in this process.
func mappings(n *fakeNode) int {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		panic(err)
	}
	return bytes.Count(maps, []byte(n.regionName()))
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
	defer n.lock()()
	if f := n.former; f != nil && n.atOpen == nil {
		if mappings(f) > len(f.ranks) { // beside the node's own
			n.cluster.mapped = append(n.cluster.mapped, f.regionName())
		}
		for _, r := range f.regions {
			n.atOpen = append(n.atOpen, bytes.Clone(r.Bytes()))
		}
	}
	r := &kvferrypb.OpenResponse{Session: n.session(), Node: n.name, Incarnation: n.incarnation, Geometry: kvferrypb.FromGeometry(n.geometry)}
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
	if err := n.authorize(s.Context()); err != nil {
		return err
	}
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
	if n.ingested[r.GetRequest()] {
		return nil, refusal(kvferrypb.Failure_INTERNAL, "request was here before")
	}
	n.ingested[r.GetRequest()] = true
	n.requests[r.GetRequest()] = &fakeRequest{streams: map[string]*fakeStream{string(id.Main): {}}, needed: r.GetNeeded().GetLabels()}
	return &kvferrypb.IngestResponse{}, nil
}

func (n *fakeNode) Remove(_ context.Context, r *kvferrypb.RemoveRequest) (*kvferrypb.RemoveResponse, error) {
	defer n.lock()()
	request, ok := n.requests[r.GetRequest()]
	if !ok {
		return &kvferrypb.RemoveResponse{}, nil
	}
	for _, s := range request.streams {
		n.host += len(s.pages) * min(1, len(s.away))
		if s.away != nil {
			s.pages, s.away = nil, nil
		}
	}
	delete(n.requests, r.GetRequest())
	o := n.cluster.offers[r.GetRequest()]
	if o != nil && o.owner == n && o.ended == "" {
		if o.limbo = true; o.final && !r.GetDiscard() {
			return &kvferrypb.RemoveResponse{}, nil // what is published lives on
		}
		// All of it, also what was admitted since.
		o.stream = make(map[string][]page.Index)
		for label, s := range request.streams {
			o.stream[label] = s.pages
		}
		o.end(r.GetRequest(), "revoked")
		return &kvferrypb.RemoveResponse{}, nil
	}
	for _, s := range request.streams {
		n.free = append(n.free, s.pages...)
	}
	return &kvferrypb.RemoveResponse{}, nil
}

// expire ends a publication when its hold is over, and no sooner than it has no
// reader: who has the request has a lease.
func (n *fakeNode) expire(request string, o *fakeOffer, hold time.Duration) {
	defer n.lock()()
	for _, m := range n.cluster.nodes {
		if m != o.owner && !m.dead && m.requests[request] != nil && o.ended == "" {
			time.AfterFunc(hold, func() { n.expire(request, o, hold) })
			return
		}
	}
	o.end(request, "expired")
}

// end ends a publication; the lock is held.
func (o *fakeOffer) end(request, how string) {
	if o.ended != "" {
		return
	}
	o.ended = how
	if o.limbo {
		for _, pages := range o.stream {
			o.owner.free = append(o.owner.free, pages...)
		}
	}
	o.owner.events <- &kvferrypb.Event{Sequence: 1, Kind: kvferrypb.Event_RELEASED, Request: request, Outcome: how}
}

func (n *fakeNode) Cancel(context.Context, *kvferrypb.CancelRequest) (*kvferrypb.CancelResponse, error) {
	return &kvferrypb.CancelResponse{}, nil
}

// reserve makes a stream of a request long enough, or reports false.
func (n *fakeNode) reserve(request string, s *fakeStream, tokens int) bool {
	need := page.Count(tokens, n.geometry.Layout.PageSize) - len(s.pages)
	for need > len(n.free) {
		if n.cluster.keep || !n.evict(request) {
			return false
		}
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

// evict offloads the request that was least recently active, of those that are
// idle, offered to nobody, and not this one.
func (n *fakeNode) evict(but string) bool {
	victim := ""
	for name, r := range n.requests {
		if o := n.cluster.offers[name]; o != nil && o.owner == n && o.ended == "" {
			continue
		}
		if name != but && n.offload(name, false) > 0 && (victim == "" || r.active < n.requests[victim].active) {
			victim = name
		}
	}
	return victim != "" && n.offload(victim, true) > 0
}

// offload moves what fits of an idle request to the host, or only counts it.
func (n *fakeNode) offload(name string, really bool) (freed int) {
	for _, s := range n.steps {
		if s.request == name {
			return 0
		}
	}
	room := n.host
	for _, s := range n.requests[name].streams {
		if s.away != nil || len(s.pages) == 0 || len(s.pages) > room {
			continue
		}
		room -= len(s.pages)
		freed += len(s.pages)
		if !really {
			continue
		}
		for _, a := range n.arenas {
			s.away = append(s.away, a.takeAway(s.pages))
		}
		n.free = append(n.free, s.pages...)
	}
	if really {
		n.host, n.offloads = room, n.offloads+1
	}
	return freed
}

// takeAway reads pages, and leaves rubbish.
func (a arena) takeAway(pages []page.Index) (bytes []byte) {
	a.each(pages, func(vector []byte) {
		bytes = append(bytes, vector...)
		for i := range vector {
			vector[i] ^= 0x55
		}
	})
	return bytes
}

func (a arena) bringBack(pages []page.Index, bytes []byte) {
	a.each(pages, func(vector []byte) { bytes = bytes[copy(vector, bytes):] })
}

// each calls f with every vector of the pages.
func (a arena) each(pages []page.Index, f func(vector []byte)) {
	l := a.layout
	for _, p := range pages {
		for layer := range l.Layers {
			for side := range 2 {
				for head := range l.Heads {
					for slot := range l.PageSize {
						at := a.at(layer, p, side, head, slot)
						f(a.bytes[at : at+a.vector])
					}
				}
			}
		}
	}
}

// reload brings a request back, all or none.
func (n *fakeNode) reload(name string) (pages int, err error) {
	r := n.requests[name]
	if r == nil {
		return 0, refusal(kvferrypb.Failure_NOT_FOUND, "unknown request")
	}
	n.touch(r)
	for _, s := range r.streams {
		if s.away != nil {
			pages += len(s.pages)
		}
	}
	for pages > len(n.free) {
		if n.cluster.keep || !n.evict(name) {
			return 0, refusal(kvferrypb.Failure_RESOURCE_EXHAUSTED, "no pages to reload")
		}
	}
	for _, s := range r.streams {
		if s.away == nil {
			continue
		}
		n.host += len(s.pages)
		s.pages = slices.Clone(n.free[len(n.free)-len(s.pages):])
		n.free = n.free[:len(n.free)-len(s.pages)]
		for i, a := range n.arenas {
			a.bringBack(s.pages, s.away[i])
		}
		s.away = nil
		if n.cluster.lies.spoil {
			n.arenas[0].bytes[n.arenas[0].at(0, s.pages[0], 0, 0, 0)] += 1
		}
	}
	return pages, nil
}

func (n *fakeNode) touch(r *fakeRequest) {
	n.clock++
	r.active = n.clock
}

func (n *fakeNode) Reload(_ context.Context, r *kvferrypb.ReloadRequest) (*kvferrypb.ReloadResponse, error) {
	defer n.lock()()
	pages, err := n.reload(r.GetRequest())
	return &kvferrypb.ReloadResponse{Pages: uint32(pages)}, err
}

// away reports whether something of the request is on the host.
func (r *fakeRequest) isAway() bool {
	for _, s := range r.streams {
		if s.away != nil {
			return true
		}
	}
	return false
}

func (n *fakeNode) Admit(_ context.Context, r *kvferrypb.AdmitRequest) (*kvferrypb.AdmitResponse, error) {
	defer n.lock()()
	if n.cluster.lies.refuse > 0 {
		n.cluster.lies.refuse--
		return nil, refusal(kvferrypb.Failure_BUSY, "later")
	}
	name := r.GetSegments()[0].GetRequest()
	request := n.requests[name]
	if request == nil {
		return nil, refusal(kvferrypb.Failure_NOT_FOUND, "unknown request")
	}
	if request.isAway() {
		return nil, refusal(kvferrypb.Failure_OFFLOADING, "on the host")
	}
	n.touch(request)
	// Forks stay if the step is refused: then it is made again.
	for _, f := range r.GetPreForks() {
		if err := n.fork(name, request.streams, f); err != nil {
			return nil, err
		}
	}
	plans := make(map[string]*kvferrypb.PlanOutput)
	for _, g := range r.GetSegments() {
		p, err := n.plan(name, g)
		if err != nil {
			return nil, err
		}
		plans[g.GetLabel()] = p
	}
	n.lastStep++
	n.steps[n.lastStep] = fakeStep{name, r.GetSegments()}
	out := &kvferrypb.AdmitResponse{Step: n.lastStep}
	for _, c := range r.GetCombined() {
		all := &kvferrypb.PlanOutput{Label: c.GetLabel(), QoIndptr: []int32{0}, PagedKvIndptr: []int32{0}}
		for _, l := range c.GetSources() {
			p := plans[l]
			delete(plans, l)
			all.Views = append(all.Views, p.GetViews()...)
			all.TokenToPage, all.TokenToSlot = append(all.TokenToPage, p.GetTokenToPage()...), append(all.TokenToSlot, p.GetTokenToSlot()...)
			all.PagedKvIndices = append(all.PagedKvIndices, p.GetPagedKvIndices()...)
			all.QoIndptr = append(all.QoIndptr, int32(len(all.GetTokenToPage())))
			all.PagedKvIndptr = append(all.PagedKvIndptr, int32(len(all.GetPagedKvIndices())))
		}
		out.Plans = append(out.Plans, all)
	}
	for _, p := range plans {
		out.Plans = append(out.Plans, p)
	}
	if n.cluster.lies.ragged {
		out.Plans[0].QoIndptr[0]--
	}
	return out, nil
}

// fork copies a stream.
func (n *fakeNode) fork(name string, streams map[string]*fakeStream, f *kvferrypb.Fork) error {
	if streams[f.GetTo()] == nil {
		streams[f.GetTo()] = &fakeStream{}
	}
	from, to := streams[f.GetFrom()], streams[f.GetTo()]
	if !n.reserve(name, to, from.tokens) {
		return refusal(kvferrypb.Failure_RESOURCE_EXHAUSTED, "no pages")
	}
	to.tokens = from.tokens
	if n.cluster.lies.unforked {
		return nil
	}
	size := n.geometry.Layout.PageSize
	for token := range from.tokens {
		for _, a := range n.arenas {
			copyToken(a, place{to.pages[token/size], token % size}, a, place{from.pages[token/size], token % size})
		}
	}
	return nil
}

// plan reserves a segment.
func (n *fakeNode) plan(name string, g *kvferrypb.Segment) (*kvferrypb.PlanOutput, error) {
	streams := n.requests[name].streams
	if streams[g.GetLabel()] == nil {
		streams[g.GetLabel()] = &fakeStream{}
	}
	s := streams[g.GetLabel()]
	length := s.tokens + int(g.GetSpan())
	if !n.reserve(name, s, length) {
		return nil, refusal(kvferrypb.Failure_RESOURCE_EXHAUSTED, "no pages")
	}
	p := &kvferrypb.PlanOutput{Label: g.GetLabel(), Views: []*kvferrypb.View{{Request: name, Label: g.GetLabel(), Length: uint32(length)}}}
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
	p.QoIndptr, p.PagedKvIndptr = []int32{0, int32(g.GetSpan())}, []int32{0, int32(len(p.GetPagedKvIndices()))}
	return p, nil
}

func (n *fakeNode) Abort(_ context.Context, r *kvferrypb.AbortRequest) (*kvferrypb.AbortResponse, error) {
	defer n.lock()()
	delete(n.steps, r.GetStep())
	return &kvferrypb.AbortResponse{}, nil
}

func (n *fakeNode) Commit(_ context.Context, r *kvferrypb.CommitRequest) (*kvferrypb.CommitResponse, error) {
	defer n.lock()()
	out := &kvferrypb.CommitResponse{}
	step := n.steps[r.GetStep()]
	delete(n.steps, r.GetStep())
	request := n.requests[step.request]
	if request == nil { // removed meanwhile
		out.Missing = append(out.Missing, step.request)
		return out, nil
	}
	n.touch(request)
	for _, g := range step.segments {
		s := request.streams[g.GetLabel()]
		s.tokens += int(g.GetSpan())
		if n.cluster.lies.trample && len(r.GetPublish()) == 0 {
			n.arenas[0].bytes[n.arenas[0].at(1, s.pages[0], 0, 0, 0)] ^= 1
		}
	}
	for _, p := range r.GetPublish() {
		o := n.cluster.offers[p.GetRequest()]
		if o == nil {
			o = &fakeOffer{owner: n}
			n.cluster.offers[p.GetRequest()] = o
		}
		if hold := n.cluster.hold; p.GetFinal() && hold > 0 {
			time.AfterFunc(hold, func() { n.expire(p.GetRequest(), o, hold) })
		}
		o.final, o.stream = p.GetFinal(), make(map[string][]page.Index)
		response := &kvferrypb.PublishResponse{Reference: "ref " + p.GetRequest()}
		for label, s := range request.streams {
			o.stream[label], o.tokens = slices.Clone(s.pages), s.tokens
			response.Lengths = append(response.Lengths, &kvferrypb.PublishResponse_Length{Label: label, Tokens: uint32(s.tokens), Pages: uint32(len(s.pages))})
		}
		out.Published = append(out.Published, &kvferrypb.PublishResult{Response: response})
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
		if n.dead {
			answer, err = nil, status.FromContextError(context.Canceled).Err()
		}
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
	if lies.moved > 0 {
		lies.moved--
		return nil, refusal(kvferrypb.Failure_STALE, "its pages went to the host")
	}
	if lies.fail != 0 {
		return nil, refusal(lies.fail, "so it goes")
	}
	o := n.cluster.offers[r.GetRequest()]
	if o != nil {
		switch {
		case o.owner.dead && o.ended != "acknowledged":
			return nil, refusal(kvferrypb.Failure_OWNER_LOST, "its owner is dead")
		case o.ended == "revoked":
			return nil, refusal(kvferrypb.Failure_REVOKED, "taken back")
		case o.ended == "expired":
			return nil, refusal(kvferrypb.Failure_EXPIRED, "too late")
		}
	}
	if lies.mute && n.cluster.muted != nil {
		n.cluster.muted()
	}
	if o == nil || lies.mute {
		return nil, nil
	}
	request := n.requests[r.GetRequest()]
	if request == nil {
		return nil, refusal(kvferrypb.Failure_NOT_FOUND, "unknown request")
	}
	if _, err := n.reload(r.GetRequest()); err != nil {
		return nil, err
	}
	for _, label := range request.needed {
		if o.stream[label] == nil {
			return nil, nil
		}
		if request.streams[label] == nil {
			request.streams[label] = &fakeStream{}
		}
	}
	tokens := o.tokens
	if lies.stale && o.final {
		tokens = request.streams[string(id.Main)].tokens
	}
	out := &kvferrypb.AdmitRetrieveResponse{Readiness: kvferrypb.Readiness_READY, Owner: o.owner.name, OwnerIncarnation: o.owner.incarnation, Transport: "memory"}
	size := n.geometry.Layout.PageSize
	for label, s := range request.streams {
		if !n.reserve(r.GetRequest(), s, o.tokens) {
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
	if o.final && !lies.forget {
		o.end(r.GetRequest(), "acknowledged")
	}
	return out, nil
}

func (n *fakeNode) counts() *kvferrypb.PageCounts {
	pages, free := n.geometry.Layout.Pages, len(n.free)
	return &kvferrypb.PageCounts{
		Total: uint32(pages), Free: uint32(free), Owned: uint32(max(0, pages-1-free)), Sink: 1,
		HostTotal: uint32(n.cluster.host), HostFree: uint32(n.host),
	}
}

func (a fakeAdmin) Arena(context.Context, *kvferrypb.ArenaRequest) (*kvferrypb.ArenaResponse, error) {
	n := a.node
	defer n.lock()()
	out := &kvferrypb.ArenaResponse{Pages: n.counts()}
	for request, r := range n.requests {
		for label, s := range r.streams {
			out.Items = append(out.Items, &kvferrypb.ArenaResponse_Stream{Request: request, Label: label, Pages: uint32(len(s.pages)), State: "idle"})
		}
	}
	return out, nil
}

func (a fakeAdmin) Publications(context.Context, *kvferrypb.PublicationsRequest) (*kvferrypb.PublicationsResponse, error) {
	n := a.node
	defer n.lock()()
	out := &kvferrypb.PublicationsResponse{}
	for request, o := range n.cluster.offers {
		if o.owner == n && o.ended == "" {
			out.Items = append(out.Items, &kvferrypb.PublicationItem{Request: request, Final: o.final, State: "open"})
		}
	}
	return out, nil
}

func (fakeAdmin) Retrievals(context.Context, *kvferrypb.RetrievalsRequest) (*kvferrypb.RetrievalsResponse, error) {
	return &kvferrypb.RetrievalsResponse{}, nil
}

func (a fakeAdmin) Status(context.Context, *kvferrypb.StatusRequest) (*kvferrypb.StatusResponse, error) {
	n := a.node
	defer n.lock()()
	out := &kvferrypb.StatusResponse{Pages: n.counts(), Requests: uint32(len(n.requests))}
	for _, o := range n.cluster.offers {
		if o.owner == n && o.ended == "" {
			out.Publications++
		}
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
