package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/cluster"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/publish"
)

// meetTimeout is how long the members of a mesh have to meet.
const meetTimeout = 60 * time.Second

// mesh is a cluster in this process: members that gossip over real sockets of
// loopback, under a key, by the timings of real ones.
type mesh struct {
	members []*member
	strange atomic.Int64  // pairs of which one does not know the other
	met     chan struct{} // closed when there is none for the first time
	meeting sync.Once
	lost    atomic.Int64 // members that one of the others took for gone

	stop context.CancelFunc
	work sync.WaitGroup
}

// startMesh returns when every member has met every other. fast shortens the
// timings, for tests.
func startMesh(ctx context.Context, nodes int, fast bool) (_ *mesh, err error) {
	m := &mesh{met: make(chan struct{})}
	run, stop := context.WithCancel(ctx)
	m.stop = stop
	defer func() {
		if err != nil {
			err = fmt.Errorf("start %d members: %w", nodes, errors.Join(err, m.close()))
		}
	}()
	key := make([]byte, cluster.KeyBytes)
	if _, err := rand.Read(key); err != nil {
		return nil, err
	}
	m.strange.Store(int64(nodes) * int64(nodes-1))
	o := cluster.Options{
		Label: "bench", Bind: loopback(), Ring: cluster.Ring{Keys: [][]byte{key}}, Fast: fast,
		// As long as that of a node.
		Meta: cluster.Meta{Role: "prefill", Peer: netip.MustParseAddrPort("127.0.0.1:1"), Fingerprint: 1},
	}
	now := id.Incarnation(time.Now().UnixMicro())
	for i := range nodes {
		o.Life = id.Life{Node: id.Node(fmt.Sprintf("bench-%d", i)), Incarnation: now}
		n, err := startMember(m, o)
		if err != nil {
			return nil, err
		}
		m.members = append(m.members, n)
		o.Join = []string{m.members[0].cluster.Gossip().String()}
	}
	for _, n := range m.members {
		m.work.Go(func() { n.tick(run) })
	}
	late := time.NewTimer(meetTimeout)
	defer late.Stop()
	select {
	case <-m.met:
		return m, nil
	case <-late.C:
		return nil, fmt.Errorf("%d pairs have not met in %v", m.strange.Load(), meetTimeout)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// close ends all members at once, without a goodbye.
func (m *mesh) close() error {
	m.stop()
	m.work.Wait()
	var errs []error
	for _, n := range m.members {
		errs = append(errs, n.cluster.Close())
	}
	return errors.Join(errs...)
}

// member is what a node has for gossip: a cluster, a log, and a board, joined
// to each other as a node joins them.
type member struct {
	mesh    *mesh
	life    id.Life
	log     *publish.Log
	board   *publish.Board
	cluster *cluster.Cluster
	started chan struct{} // closed when there is the cluster, whose first calls come before

	flushing sync.Mutex
}

func startMember(m *mesh, o cluster.Options) (*member, error) {
	n := &member{
		mesh: m, life: o.Life, started: make(chan struct{}),
		log:   publish.NewLog(publish.LogOptions{Life: o.Life, Fast: o.Fast}),
		board: publish.NewBoard(publish.BoardOptions{Life: o.Life, Fast: o.Fast}),
	}
	defer close(n.started)
	o.Handler = n
	var err error
	n.cluster, err = cluster.Start(o)
	return n, err
}

const (
	tickInterval = 10 * time.Millisecond
	// spareRoom is what flush leaves for checkpoints.
	spareRoom = 16 << 10
)

// tick does what happens because time passes.
func (n *member) tick(ctx context.Context) {
	tick, state := time.NewTicker(tickInterval), time.NewTicker(time.Second)
	defer tick.Stop()
	defer state.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			n.flush()
			n.send(n.log.Tick(now))
			n.send(n.log.Beacon(now, n.board.Members))
			n.send(n.board.Tick(now))
		case <-state.C:
			_ = n.cluster.SetState(n.board.State(n.log.Check())) // far below its bound
		}
	}
}

// flush hands over what the log has to say.
func (n *member) flush() {
	n.flushing.Lock()
	defer n.flushing.Unlock()
	for _, item := range n.log.Outgoing(time.Now(), n.cluster.Room()-spareRoom) {
		_ = n.cluster.Broadcast(item) // there is room for it
	}
}

// send drops what there is no room for, as a node does: it is repaired. What a
// node reads from the owner's peer service is handed over in memory here.
func (n *member) send(out publish.Output) {
	for _, item := range out.Broadcast {
		_ = n.cluster.Broadcast(item)
	}
	for _, d := range out.Send {
		_ = n.cluster.Send(d.To, d.Item)
	}
	for _, life := range out.Resync {
		for _, owner := range n.mesh.members {
			if owner.life == life {
				now := time.Now()
				_ = n.board.Sync(now, life, owner.log.Live(now)) // it is wished for again
			}
		}
	}
}

// Items implements [cluster.Handler].
func (n *member) Items(items [][]byte) {
	<-n.started
	now := time.Now()
	for _, item := range items {
		out, forLog, err := n.board.Receive(now, item)
		if err != nil {
			continue // the board counts it
		}
		if n.cluster.Room() < cluster.MaxRoom/2 {
			out.Broadcast = nil
		}
		n.send(out)
		switch m := forLog.(type) {
		case *wire.Nack:
			n.send(n.log.Nack(now, m))
		case *wire.Echo:
			n.log.Echo(now, m)
		}
	}
}

// Joined implements [cluster.Handler].
func (n *member) Joined(m cluster.Member) {
	<-n.started
	n.send(n.board.Member(time.Now(), m.Life, true))
	if n.mesh.strange.Add(-1) == 0 {
		n.mesh.meeting.Do(func() { close(n.mesh.met) })
	}
}

// Left implements [cluster.Handler].
func (n *member) Left(m cluster.Member, _ bool) {
	<-n.started
	n.send(n.board.Member(time.Now(), m.Life, false))
	n.mesh.strange.Add(1)
	n.mesh.lost.Add(1)
}

// Updated implements [cluster.Handler].
func (n *member) Updated(cluster.Member) {}

// MergeState implements [cluster.Handler].
func (n *member) MergeState(state []byte) {
	<-n.started
	if out, err := n.board.Merge(time.Now(), state); err == nil {
		n.send(out)
	}
}
