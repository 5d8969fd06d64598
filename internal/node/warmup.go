package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
)

// errUnequal: the ranks of one engine differ.
var errUnequal = errors.New("ranks of the engine differ")

// tally is what one node of a group says of its ranks.
type tally struct {
	node        id.Node
	ranks       []id.Rank
	world       int
	free, total int // pages of each
}

// share is one rank of one node.
type share struct {
	rank id.Rank
	*tally
}

// tally is this node's own.
func (n *Node) tally() *tally {
	c := n.manager.Counts()
	return &tally{
		node: n.life.Node, ranks: n.ranks, world: n.geometry.WorldSize,
		free: c.Free + c.Engine, total: n.geometry.Layout.Pages,
	}
}

// Warmup answers the nodes of this node's group.
func (s peerService) Warmup(_ context.Context, req *kvferrypb.WarmupRequest) (*kvferrypb.WarmupResponse, error) {
	if err := s.meant(req.GetIncarnation()); err != nil {
		return nil, err
	}
	if id.Group(req.GetGroup()) != s.node.group {
		return nil, fmt.Errorf("warm-up is of group %.80q, this node is of %q: %w", req.GetGroup(), s.node.group, manager.ErrInvalid)
	}
	t := s.node.tally()
	res := &kvferrypb.WarmupResponse{WorldSize: uint32(t.world), FreePages: uint32(t.free), TotalPages: uint32(t.total)}
	for _, r := range t.ranks {
		res.Ranks = append(res.Ranks, uint32(r))
	}
	return res, nil
}

// warmup asks the peer for its tally, and believes nothing.
func (p *peer) warmup(ctx context.Context) (*tally, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	res, err := p.rpc.Warmup(ctx, &kvferrypb.WarmupRequest{Incarnation: uint64(p.life.Incarnation), Group: string(p.node.group)})
	if err != nil {
		return nil, err
	}
	bad := func(format string, args ...any) (*tally, error) {
		return nil, fmt.Errorf("its answer makes no sense: %s: %w", fmt.Sprintf(format, args...), id.ErrInvalid)
	}
	switch ranks := len(res.GetRanks()); {
	case ranks == 0 || ranks > id.MaxRanks:
		return bad("%d ranks", ranks)
	case res.GetWorldSize() == 0 || res.GetWorldSize() > id.MaxRanks:
		return bad("world size %d", res.GetWorldSize())
	case res.GetFreePages() > res.GetTotalPages():
		return bad("%d of %d pages are free", res.GetFreePages(), res.GetTotalPages())
	}
	t := &tally{node: p.life.Node, world: int(res.GetWorldSize()), free: int(res.GetFreePages()), total: int(res.GetTotalPages())}
	for _, r := range res.GetRanks() {
		if r >= res.GetWorldSize() {
			return bad("rank %d of %d", r, res.GetWorldSize())
		}
		if slices.Contains(t.ranks, id.Rank(r)) {
			return bad("rank %d is there twice", r)
		}
		t.ranks = append(t.ranks, id.Rank(r))
	}
	return t, nil
}

// inGroup are the other nodes of this node's group, by name.
func (ps *peers) inGroup() []*peer {
	group := slices.DeleteFunc(ps.all(), func(p *peer) bool { return p.member.Meta.Group != ps.node.group })
	slices.SortFunc(group, func(a, b *peer) int { return cmp.Compare(a.life.Node, b.life.Node) })
	return group
}

// tallies asks all nodes of the group at once. silent are those that gave no
// answer that makes sense, with the reason.
func (n *Node) tallies(ctx context.Context) (all []*tally, silent []string) {
	group := n.peers.inGroup()
	answers, errs := make([]*tally, len(group)), make([]error, len(group))
	var calls sync.WaitGroup
	for i, p := range group {
		calls.Go(func() { answers[i], errs[i] = p.warmup(ctx) })
	}
	calls.Wait()
	all = []*tally{n.tally()}
	for i, p := range group {
		if errs[i] != nil {
			silent = append(silent, fmt.Sprintf("%s does not answer: %v", p.life.Node, errs[i]))
			continue
		}
		all = append(all, answers[i])
	}
	return all, silent
}

func (e engineService) ValidateWarmup(ctx context.Context, _ *kvferrypb.ValidateWarmupRequest) (*kvferrypb.ValidateWarmupResponse, error) {
	s, leave, err := e.session(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	ctx, stop := s.within(ctx)
	defer stop()
	n := e.node
	all, silent := []*tally{n.tally()}, []string(nil)
	if n.geometry.WorldSize > 1 {
		all, silent = n.tallies(ctx)
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("validate warm-up: %w", context.Cause(ctx))
	}
	var shares []share
	for _, t := range all {
		for _, r := range t.ranks {
			shares = append(shares, share{r, t})
		}
	}
	slices.SortFunc(shares, func(a, b share) int { return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.node, b.node)) })
	if wrong := append(causes(n.geometry.WorldSize, shares), silent...); len(wrong) > 0 {
		return nil, n.unequal(shares, wrong)
	}
	res := &kvferrypb.ValidateWarmupResponse{}
	for _, t := range shares {
		res.Ranks = append(res.Ranks, &kvferrypb.ValidateWarmupResponse_Rank{
			Rank: uint32(t.rank), Node: string(t.node), FreePages: uint32(t.free), TotalPages: uint32(t.total),
		})
	}
	return res, nil
}

// causes are what is wrong with the ranks of a group, which are sorted, and why
// that may be; none if each is there once and all are equal.
func causes(world int, shares []share) (found []string) {
	for r := range id.Rank(world) {
		var nodes []string
		for _, t := range shares {
			if t.rank == r {
				nodes = append(nodes, string(t.node))
			}
		}
		switch {
		case len(nodes) == 0:
			found = append(found, fmt.Sprintf("rank %d is missing: its node is down, has not joined, or has another node.group", r))
		case len(nodes) > 1:
			found = append(found, fmt.Sprintf("rank %d is there %d times, at %s: arena.ranks of all but one is wrong, or node.group", r, len(nodes), strings.Join(nodes, " and ")))
		}
	}
	differ := func(of func(share) int) bool {
		return slices.ContainsFunc(shares, func(t share) bool { return of(t) != of(shares[0]) })
	}
	if differ(func(t share) int { return t.world }) {
		var say []string
		for i, t := range shares {
			if !slices.ContainsFunc(shares[:i], func(o share) bool { return o.tally == t.tally }) {
				say = append(say, fmt.Sprintf("%s says %d", t.node, t.world))
			}
		}
		found = append(found, fmt.Sprintf("world sizes differ, %s: arena.world_size is not the same on all nodes", strings.Join(say, ", ")))
	}
	if differ(func(t share) int { return t.total }) {
		found = append(found, "arenas differ in size: arena.pages is not the same on all nodes")
	} else if differ(func(t share) int { return t.free }) {
		found = append(found, "arenas are equal and free pages are not: a rank still holds requests of the warm-up, or did not see the same calls")
	}
	return found
}

// unequal names every rank with its values, what is wrong, and what this node
// still holds.
func (n *Node) unequal(shares []share, wrong []string) error {
	var values []string
	for _, t := range shares {
		values = append(values, fmt.Sprintf("rank %d at %s: %d of %d pages are free", t.rank, t.node, t.free, t.total))
	}
	return fmt.Errorf("validate warm-up of group %s: %w: %s; %s; here, at %s, are %s",
		n.group, errUnequal, strings.Join(values, ", "), strings.Join(wrong, "; "), n.life.Node, stillHeld(n.manager.Counts()))
}

// stillHeld is what keeps pages from being free.
func stillHeld(c manager.Counts) string {
	return fmt.Sprintf("%d requests, %d steps, %d publications, %d retrievals, %d pages owned, %d in limbo, %d in quarantine",
		c.Requests, c.Steps, c.Publications, c.Retrievals, c.Owned, c.Limbo, c.Quarantine)
}
