package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/cluster"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/manager"
)

const (
	maxDrain      = 24 * time.Hour // that an operator may ask for
	drainProgress = 250 * time.Millisecond

	maxSeeds = 64          // of one Join
	maxJoin  = time.Minute // that it waits
	// answerTime before the caller's deadline Join gives up, so that the reason
	// still reaches it.
	answerTime = 250 * time.Millisecond
	// meetingTime is how long Join waits for the first member that this node has
	// heard of itself: who lists it may not have told of itself yet.
	meetingTime = time.Second
)

// Drain lets the node go, and tells how far that is. Whoever stops to listen
// stops nothing else.
func (a adminService) Drain(req *kvferrypb.DrainRequest, stream grpc.ServerStreamingServer[kvferrypb.DrainResponse]) error {
	n := a.node
	switch d := req.GetTimeout(); {
	case d != nil && (d.CheckValid() != nil || d.AsDuration() < 0 || d.AsDuration() > maxDrain):
		return fmt.Errorf("drain: timeout %v, want at most %v: %w", d.AsDuration(), maxDrain, manager.ErrInvalid)
	case d.AsDuration() > 0:
		n.leaveWithin(d.AsDuration())
	default: // who wants no bound of his own listens to a drain that runs
		n.beginDrain(n.config.Timers.Drain)
	}
	tick := time.NewTicker(drainProgress)
	defer tick.Stop()
	for {
		u := n.unfinished()
		if err := stream.Send(&kvferrypb.DrainResponse{
			Publications: uint32(u.publications), Leases: uint32(u.leases), Retrievals: uint32(u.retrievals),
			Remaining: durationpb.New(n.leaving.remaining()),
		}); err != nil {
			return err
		}
		select {
		case <-n.leaving.left:
			cut := n.leaving.cut
			return stream.Send(&kvferrypb.DrainResponse{Left: true, Cut: &kvferrypb.DrainResponse_Cut{
				Publications: uint32(cut.publications), Leases: uint32(cut.leases), Retrievals: uint32(cut.retrievals),
			}})
		case <-tick.C:
		case <-stream.Context().Done():
			return context.Cause(stream.Context())
		}
	}
}

// Leave lets the node go at once.
func (a adminService) Leave(ctx context.Context, _ *kvferrypb.LeaveRequest) (*kvferrypb.LeaveResponse, error) {
	return &kvferrypb.LeaveResponse{}, a.node.Leave(ctx)
}

var (
	// errSeeds: nobody can be called like this.
	errSeeds = errors.New("join")
	// errNotListed: nobody that was called lists this node.
	errNotListed = errors.New("not joined")
)

// Join calls further seeds.
func (a adminService) Join(ctx context.Context, req *kvferrypb.JoinRequest) (*kvferrypb.JoinResponse, error) {
	n := a.node
	switch seeds := req.GetSeeds(); {
	case n.isDraining():
		return nil, fmt.Errorf("join: %w", errDraining)
	case len(seeds) == 0 || len(seeds) > maxSeeds:
		return nil, fmt.Errorf("%w: %d seeds, want 1 to %d", errSeeds, len(seeds), maxSeeds)
	default:
		for _, seed := range seeds {
			if !config.HostPort(seed) {
				return nil, fmt.Errorf("%w: %.80q is not host:port, such as 192.0.2.7:7900 or [fd00::7]:7900", errSeeds, seed)
			}
		}
	}
	wait := maxJoin
	if end, ok := ctx.Deadline(); ok {
		left := time.Until(end)
		wait = min(wait, max(left-answerTime, left/2))
	}
	ctx, cancel := context.WithTimeoutCause(ctx, wait, fmt.Errorf("%w after %v", errTooLate, wait.Round(100*time.Millisecond)))
	defer cancel()
	if err := n.cluster.JoinSeeds(ctx, req.GetSeeds()); err != nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%w: %w", errNotListed, err)
		}
		return nil, fmt.Errorf("%w: %w", errSeeds, err)
	}
	meeting, end := context.WithTimeout(ctx, meetingTime)
	defer end()
	for len(n.cluster.Members()) < 2 && sleep(meeting, tickInterval) {
		continue // whom it hears of comes soon
	}
	return &kvferrypb.JoinResponse{Members: uint32(len(n.cluster.Members()))}, nil
}

// Keyring shows or changes the gossip keys of all members.
func (a adminService) Keyring(ctx context.Context, req *kvferrypb.KeyringRequest) (*kvferrypb.KeyringResponse, error) {
	if err := a.changeKeys(ctx, req); err != nil {
		return nil, err
	}
	c := a.node.cluster
	ring := c.Ring()
	res := &kvferrypb.KeyringResponse{Generation: ring.Generation}
	for i, id := range ring.IDs() {
		res.Keys = append(res.Keys, &kvferrypb.KeyringResponse_Key{Id: id.String(), Primary: i == 0})
	}
	rings, err := c.Rings(ctx)
	if err != nil {
		return nil, keyringError(err)
	}
	for _, m := range rings {
		if m.Node == a.node.life.Node {
			continue
		}
		i := &kvferrypb.KeyringResponse_Member{Node: string(m.Node), Generation: m.Generation, Same: m.Same}
		if m.Err != nil {
			i.Error = m.Err.Error()
		}
		res.Members = append(res.Members, i)
	}
	return res, nil
}

func (a adminService) changeKeys(ctx context.Context, req *kvferrypb.KeyringRequest) error {
	c := a.node.cluster
	switch op := req.GetOperation(); op {
	case kvferrypb.KeyringRequest_SHOW:
		return nil
	case kvferrypb.KeyringRequest_ADD:
		return keyringError(c.AddKey(ctx, req.GetKey()))
	case kvferrypb.KeyringRequest_USE, kvferrypb.KeyringRequest_REMOVE:
		key, err := cluster.ParseKeyID(req.GetId())
		switch {
		case err != nil:
			return keyringError(err)
		case op == kvferrypb.KeyringRequest_USE:
			return keyringError(c.UseKey(ctx, key, req.GetForce()))
		default:
			return keyringError(c.RemoveKey(ctx, key, req.GetForce()))
		}
	default:
		return fmt.Errorf("keyring: unknown operation %d: %w", op, manager.ErrInvalid)
	}
}

var (
	// errBlocked: members stand in the way of a change of the keys.
	errBlocked = errors.New("keyring: not done everywhere")
	// errKeyring: the keys cannot be changed like this.
	errKeyring = errors.New("keyring")
)

// keyringError gives an error of the cluster its place among the failures.
func keyringError(err error) error {
	if _, ok := errors.AsType[*cluster.RingError](err); ok {
		return fmt.Errorf("%w: %w", errBlocked, err)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("keyring: the time for it was too short, kvferry keyring shows who has the change: %w", err)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errKeyring, err)
	}
	return nil
}

// Configuration is what the node runs with.
func (a adminService) Configuration(context.Context, *kvferrypb.ConfigurationRequest) (*kvferrypb.ConfigurationResponse, error) {
	yaml, err := a.node.config.Redacted()
	return &kvferrypb.ConfigurationResponse{Yaml: string(yaml)}, err
}
