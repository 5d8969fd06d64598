package node_test

import (
	"bytes"
	"context"
	"fmt"
	"hash/crc32"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/internal/node"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rdmaread"
	"github.com/kvferry/kvferry/transfer/shm"
	"github.com/kvferry/kvferry/transfer/tcp"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// deadline bounds every single wait of these tests: whoever needs so long hangs,
// also on a machine that is busy with something else.
const deadline = time.Minute

// member is a running node of a test's cluster.
type member struct {
	*node.Node
	config *config.Config
	admin  kvferrypb.AdminClient
	device *transfertest.Device // of its arenas, if they are on one and no driver has it
	t      testing.TB
}

// onDevice puts the arenas of a node into the memory of an emulated device of its
// own, unless a driver is named: then on the first of the driver's.
var onDevice = [2]string{"arena.memory", "cuda:0"}

// overTCP keeps nodes from reading each other by shared memory, which they do if
// nothing is said: they are on one host.
var overTCP = [2]string{"transfer.transports", "tcp"}

// hostTransports move host memory.
func hostTransports() []string { return []string{shm.Name, rdmaread.Name, tcp.Name} }

// overAll runs a test over each transport of host memory, with nothing to fall
// back to.
func overAll(t *testing.T, f func(t *testing.T, by [2]string)) {
	t.Helper()
	for _, by := range hostTransports() {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			if by == rdmaread.Name {
				useFabric(t)
			}
			f(t, [2]string{"transfer.transports", by})
		})
	}
}

// yaml is the node section that all tests share: small pages, and no devices,
// whatever the machine has. Nothing runs out by itself: what has to end in a test is
// ended, or has a timer of its own there.
const yaml = `
node: {name: %s, role: both, bind: 127.0.0.1, socket: %s, state_dir: %s}
ports: {gossip: 0, peer: 0, data: 0, http: 0}
arena: {model: test, pages: 64, page_size: 8, layers: 2, heads: 2, head_dim: 8, dtype: bf16, layout: NHD}
transfer: {transports: [shm, tcp], rendezvous: %s, staging: 64MiB}
cluster: {name: %s, preset: fast}
timers: {drain: 10ms, hold: 5m, lease: 2m, stall: 20s}
`

// startNode runs a node in this process until the end of the test. set are
// "section.key=value" pairs.
func startNode(t testing.TB, name string, seed *member, set ...[2]string) *member {
	t.Helper()
	return startWith(t, configure(t, name, seed, set...), nil)
}

// configure is the configuration of a node that joins the seed, if any.
func configure(t testing.TB, name string, seed *member, set ...[2]string) *config.Config {
	t.Helper()
	dir, err := os.MkdirTemp("", "kvf") // a socket's path is at most 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	c, err := config.Parse("test", fmt.Appendf(nil, yaml, name, filepath.Join(dir, "s"), filepath.Join(dir, "state"), rendezvous, "test"))
	if err != nil {
		t.Fatal(err)
	}
	if seed != nil {
		set = append(set, [2]string{"cluster.join", seed.Addresses().Gossip.String()})
	}
	for _, kv := range set {
		if err := c.Set(kv[0], kv[1]); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	return c
}

// startWith starts a node with wrap in front of its transports.
func startWith(t testing.TB, c *config.Config, wrap func(transfer.Transport) transfer.Transport) *member {
	t.Helper()
	return startLogging(t, c, logger(t), wrap)
}

func startLogging(t testing.TB, c *config.Config, log *slog.Logger, wrap func(transfer.Transport) transfer.Transport) *member {
	t.Helper()
	return startOptions(t, node.Options{Config: c, Logger: log}.Wrapped(wrap))
}

// startOptions starts a node, and closes it at the end of the test.
func startOptions(t testing.TB, o node.Options) *member {
	t.Helper()
	m := &member{config: o.Config, t: t}
	if a := o.Config.Arena; len(a.Devices()) > 0 && a.CUDALibrary == "" {
		m.device = transfertest.NewDevice(transfertest.DeviceOptions{})
		o = o.Allocating(m.device.Alloc)
	}
	n, err := node.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	m.Node = n
	t.Cleanup(m.close)
	m.admin = dial(t, m).Admin()
	return m
}

func logger(t testing.TB) *slog.Logger {
	if !testing.Verbose() {
		return nil
	}
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func (m *member) close() { m.closeWithin(deadline) }

// closeWithin gives what runs so much time to end.
func (m *member) closeWithin(drain time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), drain)
	defer cancel()
	if err := m.Close(ctx); err != nil {
		m.t.Errorf("close %s: %v", m.Life(), err)
	}
	if m.device == nil {
		return
	}
	if err := m.device.Close(); err != nil {
		m.t.Errorf("close %s: %v", m.Life(), err)
	}
}

// addresses counts those that ownAddress has given.
var addresses atomic.Uint32

// ownAddress is one of this machine that nobody else in this process listens on, or
// is given a port of.
func ownAddress() string {
	return fmt.Sprintf("127.%d.%d.%d", 1+os.Getpid()>>8&0x7f, os.Getpid()&0xff, 1+addresses.Add(1))
}

// startPair runs two nodes that know each other.
func startPair(t testing.TB, set ...[2]string) (prefill, decode *member) {
	t.Helper()
	prefill = startNode(t, "prefill", nil, set...)
	decode = startNode(t, "decode", prefill, set...)
	awaitPeers(t, prefill, decode)
	return prefill, decode
}

// bring says how a request is carried from one engine to another.
type bring struct {
	chunks    []int    // tokens of each publish, the last one final
	labels    []string // default: main
	target    string
	reference bool // the reader is given the reference, not only the request
	poll      bool // it looks, and does not wait
}

// carry takes a request from an owner to its readers, a publish a chunk, and
// checks that every byte has come, and that nobody is told to decode before the
// final publish. It returns the last reference.
func carry(t testing.TB, r string, b bring, owner *engine, readers ...*engine) (reference string) {
	t.Helper()
	labels := b.labels
	if len(labels) == 0 {
		labels = []string{"main"}
	}
	owner.ingest(r, labels...)
	for _, d := range readers {
		d.ingest(r, labels...)
	}
	tokens := 0
	for i, chunk := range b.chunks {
		owner.write(r, chunk, labels...)
		tokens += chunk
		final := i == len(b.chunks)-1
		reference = owner.publish(r, final, to(b.target), func(p *kvferrypb.PublishRequest) { p.Readers = uint32(len(readers)) }).GetReference()
		for _, d := range readers {
			name, least := "", tokens
			if b.reference {
				name = reference
			}
			if final {
				least = 0
			}
			if b.poll {
				d.awaitReady(r, name, least)
			} else if res, err := d.retrieve(r, name, least, deadline); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
				t.Fatalf("chunk %d: %v, %v", i, res, err)
			}
			for _, l := range labels {
				if got := d.verify(r, l); got != tokens {
					t.Fatalf("chunk %d: %d tokens of %s have landed, want %d", i, got, l, tokens)
				}
			}
			if final {
				continue
			}
			if res, err := d.retrieve(r, name, 0, 0); err != nil || res.GetReadiness() == kvferrypb.Readiness_READY {
				t.Fatalf("after chunk %d, which is not final: %v, %v", i, res, err)
			}
		}
	}
	return reference
}

// awaitReady polls.
func (e *engine) awaitReady(r, reference string, minTokens int) {
	e.t.Helper()
	await(e.t, r+" to be ready", func(context.Context) error {
		res, err := e.retrieve(r, reference, minTokens, 0)
		if err != nil {
			e.t.Fatal(err)
		}
		if res.GetReadiness() != kvferrypb.Readiness_READY {
			return fmt.Errorf("%v", res)
		}
		return nil
	})
}

// awaitPeers waits until each node is connected to all others.
func awaitPeers(t testing.TB, nodes ...*member) {
	t.Helper()
	for _, n := range nodes {
		admin := n.admin
		await(t, fmt.Sprintf("%s to be connected to all others", n.Life()), func(ctx context.Context) error {
			res, err := admin.Peers(ctx, &kvferrypb.PeersRequest{})
			if err != nil {
				return err
			}
			connected := 0
			for _, p := range res.GetItems() {
				if p.GetState() == "connected" {
					connected++
				}
			}
			if connected < len(nodes)-1 {
				return fmt.Errorf("%d of %d are connected: %v", connected, len(nodes)-1, res.GetItems())
			}
			return nil
		})
	}
}

// await polls until f succeeds or the deadline has passed.
func await(t testing.TB, what string, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		err := f(ctx)
		if err == nil {
			return
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			t.Fatalf("waited %v for %s: %v", deadline, what, err)
		}
	}
}

func dial(t testing.TB, n *member) *client.Client {
	t.Helper()
	c, err := client.Dial(n.Addresses().Engine)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// engine drives one node as an inference engine would.
type engine struct {
	*client.Session
	client *client.Client
	t      testing.TB
	arenas map[id.Rank]*memory.Region
	// devices are the arenas that are in device memory: arenas has none then.
	devices map[id.Rank]memory.Arena
	shadow  map[id.Rank]*shadow // while many stretches are lent, of arenas of a driver
	events  chan *kvferrypb.Event
}

// shadow is a copy of an arena of a driver, and what was changed in it.
type shadow struct {
	bytes   []byte
	changed []memory.Segment
}

func openEngine(t testing.TB, n *member) *engine {
	t.Helper()
	e := &engine{
		t: t, client: dial(t, n), events: make(chan *kvferrypb.Event, 1024),
		arenas: make(map[id.Rank]*memory.Region), devices: make(map[id.Rank]memory.Arena),
	}
	s, err := e.client.Open(t.Context(), client.OpenOptions{Engine: t.Name(), OnEvent: e.onEvent})
	if err != nil {
		t.Fatal(err)
	}
	e.Session = s
	t.Cleanup(func() { s.Close() })
	for _, r := range s.Ranks() {
		if a := n.ArenaOf(r); !isRegion(a) {
			e.devices[r] = importedBy(t, s, r, n)
			continue
		}
		a, err := s.Arena(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		e.arenas[r] = a
		t.Cleanup(func() { a.Close() })
	}
	return e
}

func (e *engine) onEvent(ev *kvferrypb.Event) {
	select {
	case e.events <- ev:
	default: // the test does not look at them
	}
}

// ctx bounds one call.
func (e *engine) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	context.AfterFunc(e.t.Context(), cancel)
	return ctx
}

func (e *engine) ingest(r string, labels ...string) {
	e.t.Helper()
	req := &kvferrypb.IngestRequest{Request: r}
	if len(labels) > 0 {
		req.Needed = &kvferrypb.Labels{Labels: labels}
	}
	if _, err := e.Ingest(e.ctx(), req); err != nil {
		e.t.Fatal(err)
	}
}

// write appends tokens to streams of a request, one step for all labels.
func (e *engine) write(r string, tokens int, labels ...string) {
	e.t.Helper()
	if err := e.tryWrite(r, tokens, labels...); err != nil {
		e.t.Fatal(err)
	}
}

func (e *engine) tryWrite(r string, tokens int, labels ...string) error {
	if len(labels) == 0 {
		labels = []string{"main"}
	}
	req := &kvferrypb.AdmitRequest{Plan: true}
	for _, l := range labels {
		req.Segments = append(req.Segments, &kvferrypb.Segment{Request: r, Label: l, Span: uint32(tokens)})
	}
	step, err := e.Admit(e.ctx(), req)
	if err != nil {
		return err
	}
	e.fill(r, step.GetPlans())
	_, err = e.Commit(e.ctx(), &kvferrypb.CommitRequest{Step: step.GetStep()})
	return err
}

// fill writes the pattern into the slots of plans, which are all of one request.
func (e *engine) fill(r string, plans []*kvferrypb.PlanOutput) {
	defer e.lendAll()()
	for _, p := range plans {
		for i, v := range p.GetViews() {
			for j := p.GetQoIndptr()[i]; j < p.GetQoIndptr()[i+1]; j++ {
				token := int(v.GetLength()-v.GetCompute()) + int(j-p.GetQoIndptr()[i])
				e.slot(int(p.GetTokenToPage()[j]), int(p.GetTokenToSlot()[j]), func(rank id.Rank, layer, kv, head int, b []byte) {
					copy(b, pattern(r, v.GetLabel(), token, rank, layer, kv, head, len(b)))
				})
			}
		}
	}
}

// verify compares every byte of a stream with the pattern and returns its
// length. It finds the pages with a step that only reads.
func (e *engine) verify(r, label string) (tokens int) {
	e.t.Helper()
	step, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{Plan: true, Segments: []*kvferrypb.Segment{{Request: r, Label: label}}})
	if err != nil {
		e.t.Fatal(err)
	}
	tokens = e.compare(r, label, step.GetPlans()[0])
	if _, err := e.Abort(e.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()}); err != nil {
		e.t.Fatal(err)
	}
	return tokens
}

// compare compares the bytes of the first view of a plan with the pattern, and
// returns how many tokens it has.
func (e *engine) compare(r, label string, p *kvferrypb.PlanOutput) (tokens int) {
	defer e.lendAll()()
	size := e.Geometry().Layout.PageSize
	tokens = int(p.GetViews()[0].GetLength())
	for t := range tokens {
		e.slot(int(p.GetPagedKvIndices()[t/size]), t%size, func(rank id.Rank, layer, kv, head int, b []byte) {
			if want := pattern(r, label, t, rank, layer, kv, head, len(b)); !bytes.Equal(b, want) {
				e.t.Errorf("request %s label %s token %d rank %d layer %d kv %d head %d: wrong bytes", r, label, t, rank, layer, kv, head)
			}
		})
	}
	return tokens
}

// slot visits the head vectors of one token slot. The addresses are computed
// here from the definition of the layouts, not by the code under test.
func (e *engine) slot(pageIndex, slot int, visit func(rank id.Rank, layer, kv, head int, b []byte)) {
	l := e.Geometry().Layout
	vector := l.HeadDim * int(l.DType.Bytes())
	for _, rank := range e.Ranks() {
		for layer := range l.Layers {
			for kv := range 2 {
				for head := range l.Heads {
					at := ((layer*l.Pages+pageIndex)*2 + kv) * l.PageSize * l.Heads
					if l.Order.String() == "NHD" {
						at += slot*l.Heads + head
					} else {
						at += head*l.PageSize + slot
					}
					e.lend(rank, int64(at*vector), int64(vector), func(b []byte) { visit(rank, layer, kv, head, b) })
				}
			}
		}
	}
}

// lend shows n bytes of an arena, which may be written.
func (e *engine) lend(rank id.Rank, at, n int64, visit func(b []byte)) {
	if a := e.arenas[rank]; a != nil {
		visit(a.Bytes()[at : at+n])
		return
	}
	if s := e.shadow[rank]; s != nil {
		b := s.bytes[at : at+n]
		before := bytes.Clone(b)
		if visit(b); !bytes.Equal(before, b) {
			s.changed = append(s.changed, memory.Segment{Arena: at, Other: at, Bytes: n})
		}
		return
	}
	b := make([]byte, n)
	transfertest.Peek(e.devices[rank], at, b)
	before := bytes.Clone(b)
	if visit(b); !bytes.Equal(before, b) {
		transfertest.Poke(e.devices[rank], at, b)
	}
}

// lendAll lets lend work on copies of what lies with a driver, whose every call
// takes its time; what it returns writes back what has changed.
func (e *engine) lendAll() (back func()) {
	if len(e.devices) == 0 {
		return func() {}
	}
	e.shadow = make(map[id.Rank]*shadow)
	for rank, a := range e.devices {
		if _, ok := a.(*cuda.Arena); ok {
			s := &shadow{bytes: make([]byte, e.Geometry().Layout.Bytes())}
			transfertest.Peek(a, 0, s.bytes)
			e.shadow[rank] = s
		}
	}
	return func() {
		for rank, s := range e.shadow {
			if err := e.devices[rank].(memory.Stager).WriteFrom(s.bytes, s.changed).Wait(); err != nil {
				e.t.Error(err)
			}
		}
		e.shadow = nil
	}
}

// whole is a copy of an arena.
func (e *engine) whole(rank id.Rank) (b []byte) {
	e.lend(rank, 0, e.Geometry().Layout.Bytes(), func(all []byte) { b = bytes.Clone(all) })
	return b
}

func isRegion(a memory.Arena) bool {
	_, ok := a.(*memory.Region)
	return ok
}

// pattern is what a head vector of a token must hold, in every process.
func pattern(r, label string, token int, rank id.Rank, layer, kv, head, n int) []byte {
	b := make([]byte, n)
	mark := uint64(crc32.ChecksumIEEE([]byte(r)))<<32 | uint64(crc32.ChecksumIEEE([]byte(label)))
	stamp(b, mix(mark, token, int(rank), layer, kv, head), token, rank, layer, kv, head)
	return b
}

func (e *engine) publish(r string, final bool, change ...func(*kvferrypb.PublishRequest)) *kvferrypb.PublishResponse {
	e.t.Helper()
	req := &kvferrypb.PublishRequest{Request: r, Final: final}
	for _, c := range change {
		c(req)
	}
	res, err := e.Publish(e.ctx(), req)
	if err != nil {
		e.t.Fatal(err)
	}
	return res
}

func to(target string) func(*kvferrypb.PublishRequest) {
	return func(r *kvferrypb.PublishRequest) { r.Target = target }
}

// retrieve waits for a request or reference.
func (e *engine) retrieve(r, reference string, minTokens int, wait time.Duration) (*kvferrypb.AdmitRetrieveResponse, error) {
	return e.AdmitRetrieve(e.ctx(), &kvferrypb.AdmitRetrieveRequest{
		Request: r, Reference: reference, MinTokens: uint32(minTokens), Wait: durationpb.New(wait),
	})
}

func (e *engine) remove(r string) {
	e.t.Helper()
	if _, err := e.Remove(e.ctx(), &kvferrypb.RemoveRequest{Request: r}); err != nil {
		e.t.Fatal(err)
	}
}

// counts are the pages of a node by state.
func counts(t testing.TB, n *member) *kvferrypb.PageCounts {
	t.Helper()
	res, err := n.admin.Status(t.Context(), &kvferrypb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	c := res.GetPages()
	if sum := c.GetFree() + c.GetOwned() + c.GetLimbo() + c.GetQuarantine() + c.GetSink() + c.GetEngine(); sum != c.GetTotal() {
		t.Errorf("%s has %d pages, its arena %d: %v", n.Life(), sum, c.GetTotal(), c)
	}
	return c
}

// awaitAllFree waits until a node holds no page but the sink.
func awaitAllFree(t testing.TB, n *member) {
	t.Helper()
	await(t, fmt.Sprintf("the pages of %s to be free", n.Life()), func(context.Context) error {
		if c := counts(t, n); c.GetFree() != c.GetTotal()-1 {
			return fmt.Errorf("%v", c)
		}
		return nil
	})
}
