package rdmaread

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/rdma/rdmatest"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// patience is how long a test waits for what must come.
const patience = time.Minute

var (
	ownerLife  = id.Life{Node: "owner", Incarnation: 0x1122334455667788}
	readerLife = id.Life{Node: "reader", Incarnation: 0x99}
)

// meeting joins transports of this process: their calls find each other by the
// descriptor, as nodes do by an address.
type meeting struct {
	o Options // of all that listen

	mu    sync.Mutex
	nodes map[string]*Transport
	// between, if it is set, stands between a reader and the owners.
	between func(ctx context.Context, hello []byte, call func(hello []byte) ([]byte, Call, error)) ([]byte, Call, error)
}

// newMeeting is one on the hardware that there is to be used, or on the double,
// with these devices.
func newMeeting(t testing.TB, o Options, devices ...rdmatest.DeviceSpec) (*meeting, *rdmatest.World) {
	t.Helper()
	m := &meeting{o: o, nodes: map[string]*Transport{}}
	if len(rdmatest.Hardware()) > 0 && len(devices) == 0 {
		// Emulated processors answer late.
		m.o.Timeout = 17
		return m, nil
	}
	w := rdmatest.Use(t, devices...)
	t.Cleanup(func() { nothingLeft(t, w) }) // after what the test closes
	return m, w
}

// nothingLeft fails if a test leaves anything behind in its world.
func nothingLeft(t testing.TB, w *rdmatest.World) {
	t.Helper()
	if n := w.Counts(); n.Contexts+n.PDs+n.Regions+n.CQs+n.QPs+n.Channels != 0 {
		t.Errorf("this is left: %+v", n.Tally)
	}
}

// listen starts a transport that the others of the meeting find.
func (m *meeting) listen(o Options) (*Transport, error) {
	o.Call = m.call(o.Local.Life)
	if hw := rdmatest.Hardware(); len(hw) > 0 && o.Devices == nil {
		o.Devices = hw[:1] // the owner's
		if strings.HasPrefix(string(o.Local.Life.Node), "reader") {
			o.Devices = hw[len(hw)-1:]
		}
	}
	t, err := Listen(o)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	m.nodes[string(t.Descriptor())] = t
	m.mu.Unlock()
	return t, nil
}

// talk is a Call.
type talk struct {
	asked, answers chan []byte
	hangUp         context.CancelFunc
	ended          chan struct{}
}

func (c *talk) Send(ctx context.Context, question []byte) error {
	select {
	case c.asked <- bytes.Clone(question):
		return nil
	case <-c.ended:
		return errors.New("it has ended")
	case <-ctx.Done():
		c.hangUp()
		return context.Cause(ctx)
	}
}

func (c *talk) Answers() <-chan []byte { return c.answers }
func (c *talk) Ended() <-chan struct{} { return c.ended }
func (c *talk) Close() error           { c.hangUp(); return nil }

func (m *meeting) call(reader id.Life) func(context.Context, transfer.Peer, []byte) ([]byte, Call, error) {
	return func(ctx context.Context, peer transfer.Peer, hello []byte) ([]byte, Call, error) {
		m.mu.Lock()
		owner, between := m.nodes[string(peer.Descriptor)], m.between
		m.mu.Unlock()
		if owner == nil {
			return nil, nil, errors.New("nobody is there")
		}
		call := func(hello []byte) ([]byte, Call, error) { return talkTo(ctx, owner, reader, hello) }
		if between != nil {
			return between(ctx, hello, call)
		}
		return call(hello)
	}
}

// talkTo calls a transport of this process.
func talkTo(ctx context.Context, owner *Transport, reader id.Life, hello []byte) ([]byte, Call, error) {
	life, hangUp := context.WithCancel(context.Background())
	c := &talk{hangUp: hangUp, ended: make(chan struct{}), asked: make(chan []byte), answers: make(chan []byte, 16)}
	served := make(chan error, 1)
	go func() {
		defer close(c.ended)
		served <- owner.Serve(life, reader, hello, c.asked, func(b []byte) error {
			select {
			case c.answers <- b:
				return nil
			case <-life.Done():
				return errors.New("nobody listens")
			}
		})
		hangUp()
	}()
	select {
	case b := <-c.answers:
		return b, c, nil
	case <-c.ended:
		select {
		case b := <-c.answers:
			return b, c, nil
		default:
		}
		hangUp()
		return nil, nil, <-served
	case <-ctx.Done():
		hangUp()
		return nil, nil, context.Cause(ctx)
	}
}

// node is one side of a test.
type node struct {
	local transfer.Local
	t     *Transport
}

func newNode(t testing.TB, life id.Life, size int64) *node {
	t.Helper()
	seals, err := memory.NewSealTable()
	if err != nil {
		t.Fatal(err)
	}
	arena, err := memory.New("rdma test", size)
	if err != nil {
		t.Fatal(err)
	}
	n := &node{local: transfer.Local{Life: life, Arenas: map[id.Rank]memory.Arena{0: arena}, Seals: seals}}
	t.Cleanup(func() { n.drop(t) })
	return n
}

// drop gives the memory up; it may be called twice.
func (n *node) drop(t testing.TB) {
	if err := n.local.Seals.Close(); err != nil {
		t.Error(err)
	}
	for _, a := range n.local.Arenas {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
}

func (n *node) arena() []byte { return host(n.local.Arenas[0]) }

// listen starts the node's transport; what o says comes before what the meeting
// says.
func (n *node) listen(t testing.TB, m *meeting, o Options) *Transport {
	t.Helper()
	if o.Timeout == 0 {
		o.Timeout = m.o.Timeout
	}
	o.Local, o.Limits = n.local, transfertest.Calm(o.Limits)
	tr, err := m.listen(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	})
	n.t = tr
	return tr
}

// stall gives the reads of n, of which none runs, another stall time.
func (n *node) stall(d time.Duration) { n.t.o.Limits.Stall = d }

func (n *node) peer() transfer.Peer {
	return transfer.Peer{Life: n.local.Life, Descriptor: n.t.Descriptor(), ArenaBytes: map[id.Rank]int64{0: n.local.Arenas[0].Size()}}
}

// hold holds a seal.
func (n *node) hold(index uint32, seq id.Sequence) transfer.Seal {
	v, _ := id.SealValue(n.local.Life.Incarnation, seq)
	n.local.Seals.Store(index, v)
	return transfer.Seal{Index: index, Value: v}
}

func open(t testing.TB, from *node, peer transfer.Peer) *link {
	t.Helper()
	l, err := from.t.Open(short(t), peer)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l.(*link)
}

// short is a context that only a hang meets.
func short(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// newPair is an owner and a reader, both listening, with arenas that differ.
func newPair(t testing.TB, m *meeting, size int64, o Options) (owner, reader *node) {
	t.Helper()
	owner, reader = newNode(t, ownerLife, size), newNode(t, readerLife, size)
	pattern(owner.arena(), 1)
	pattern(reader.arena(), 2)
	owner.listen(t, m, o)
	reader.listen(t, m, o)
	return owner, reader
}

// pattern fills b with bytes that tell the seed and their place.
func pattern(b []byte, seed int) {
	n := min(len(b), 1<<16)
	for i := range n {
		b[i] = byte(i*7 + i>>8 + seed*31)
	}
	for ; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// eventually polls until done, and fails with what after patience.
func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !done(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: still not after %v", what, patience)
		}
	}
}

// host is the memory of an arena of the host.
func host(a memory.Arena) []byte {
	b, _ := transfer.InHost(a)
	return b
}
