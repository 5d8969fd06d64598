package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// With transfer.verify: page an owner makes checksums of what it publishes,
// before it tells anybody, and a reader compares what has landed with them. That
// finds faults of memory and wires; that pages were not used again is the seal's
// matter, with or without them.

// errChecksum: bytes that arrived are not those that were published.
var errChecksum = errors.New("bytes that arrived are not those that were published")

const (
	maxSums  = 1 << 16     // of one call
	sumsWait = time.Second // for an owner that is still at it
	noSum    = -1
)

// spot is the first slots of a page of one rank.
type spot struct {
	rank  id.Rank
	page  page.Index
	slots int
}

// sums are the checksums of this node's live publications.
type sums struct {
	mu  sync.Mutex
	all map[id.Sequence]*pageSums
}

// pageSums are those of one publication.
type pageSums struct {
	upTo    id.Sequence // announcement up to which they are made
	changed chan struct{}
	bySpot  map[spot]uint32
}

func newSums() *sums { return &sums{all: make(map[id.Sequence]*pageSums)} }

// of returns those of a publication, which are made if there are none. s.mu is held.
func (s *sums) of(name id.Sequence) *pageSums {
	p := s.all[name]
	if p == nil {
		p = &pageSums{changed: make(chan struct{}), bySpot: make(map[spot]uint32)}
		s.all[name] = p
	}
	return p
}

// drop forgets a publication that has ended.
func (s *sums) drop(name id.Sequence) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.all[name]; p != nil {
		close(p.changed)
		delete(s.all, name)
	}
}

// spots are what a publication names, on the ranks given.
func spots(v manager.Publication, ranks []id.Rank, size int) []spot {
	var list []spot
	for _, t := range v.Streams {
		held := t.Tokens - t.Start + t.Prefix
		for i, x := range t.Pages {
			slots := min(size, held-i*size)
			if slots <= 0 {
				break // beyond what is offered
			}
			for _, r := range ranks {
				list = append(list, spot{r, x, slots})
			}
		}
	}
	return list
}

// sum makes the checksums of what a publication names, but for those that there
// are. Nobody writes it: it lies below a published length.
func (n *Node) sum(p published) {
	if n.config.Transfer.Verify != "page" {
		return
	}
	s := n.owner.sums
	named := spots(p.value, n.ranks, n.geometry.Layout.PageSize)
	s.mu.Lock()
	have := s.of(p.name.Sequence).bySpot
	lacking := slices.DeleteFunc(named, func(at spot) bool { _, ok := have[at]; return ok })
	s.mu.Unlock()
	made := make(map[spot]uint32, len(lacking))
	all, err := n.sums(n.ctx, lacking)
	if err != nil {
		n.log.Error("checksums are not made", "publication", p.name.String(), "pages", len(lacking), "err", err)
	} else {
		for i, at := range lacking {
			made[at] = all[i]
		}
	}
	s.mu.Lock()
	own := s.of(p.name.Sequence)
	maps.Copy(own.bySpot, made)
	own.upTo = max(own.upTo, p.sequence)
	close(own.changed)
	own.changed = make(chan struct{})
	s.mu.Unlock()
	if now, err := n.owner.own(p.name.Sequence, nil); err != nil || now.name != p.name {
		s.drop(p.name.Sequence) // it has ended meanwhile
	}
}

// Checksums answers a reader.
func (s peerService) Checksums(ctx context.Context, req *kvferrypb.ChecksumsRequest) (*kvferrypb.ChecksumsResponse, error) {
	if err := s.meant(req.GetIncarnation()); err != nil {
		return nil, err
	}
	if a, b := len(req.GetPages()), len(req.GetSlots()); a != b || a > maxSums {
		return nil, fmt.Errorf("checksums of %d pages and %d counts of slots, at most %d: %w", a, b, maxSums, manager.ErrInvalid)
	}
	n := s.node
	name := id.Sequence(req.GetSequence())
	p, err := n.owner.own(name, nil)
	if err != nil {
		return nil, fmt.Errorf("publication %d: %w", name, err)
	}
	res := &kvferrypb.ChecksumsResponse{Sums: slices.Repeat([]int64{noSum}, len(req.GetPages()))}
	if n.config.Transfer.Verify != "page" {
		return res, nil
	}
	ctx, cancel := context.WithTimeout(ctx, sumsWait)
	defer cancel()
	for {
		n.owner.sums.mu.Lock()
		own := n.owner.sums.all[name]
		if own == nil || own.upTo >= p.sequence {
			if own != nil {
				for i := range res.GetSums() {
					if v, ok := own.bySpot[spot{id.Rank(req.GetRank()), page.Index(req.GetPages()[i]), int(req.GetSlots()[i])}]; ok {
						res.Sums[i] = int64(v)
					}
				}
			}
			n.owner.sums.mu.Unlock()
			return res, nil
		}
		changed := own.changed
		n.owner.sums.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return res, nil
		}
	}
}

// checksums asks the owner.
func (p *peer) checksums(ctx context.Context, s id.Sequence, r id.Rank, at []spot) ([]int64, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	req := &kvferrypb.ChecksumsRequest{Incarnation: uint64(p.life.Incarnation), Sequence: uint64(s), Rank: uint32(r)}
	for _, x := range at {
		req.Pages, req.Slots = append(req.Pages, uint32(x.page)), append(req.Slots, uint32(x.slots))
	}
	res, err := p.rpc.Checksums(ctx, req)
	if err != nil {
		return nil, err
	}
	if len(res.GetSums()) != len(at) {
		return nil, fmt.Errorf("%d checksums of %d pages: %w", len(res.GetSums()), len(at), manager.ErrMalformed)
	}
	return res.GetSums(), nil
}

// verify compares what has landed with the owners' checksums. The error wraps
// errChecksum if bytes are others. What an owner has no checksum of counts as
// unknown: it does not make them, or has let go by now.
func (n *Node) verify(ctx context.Context, parts []part, r manager.Retrieval) error {
	if n.config.Transfer.Verify != "page" {
		return nil
	}
	var work errgroup.Group
	for owner, p := range parts {
		for _, rank := range n.ranks {
			work.Go(func() error { return n.verifyRank(ctx, p.source.Name, owner, rank, r) })
		}
	}
	return work.Wait()
}

func (n *Node) verifyRank(ctx context.Context, name id.Publication, owner int, rank id.Rank, r manager.Retrieval) error {
	size := n.geometry.Layout.PageSize
	var theirs, ours []spot
	var first []int // token in each
	unknown := 0
	for _, m := range r.Moves {
		if m.Owner != owner || !slices.Contains(m.Ranks, rank) {
			continue
		}
		for i, x := range m.Local {
			token := m.LocalStart + i*size
			if token < m.From && !m.Same {
				unknown++ // in front of what was read are bytes of our own
				continue
			}
			slots := min(size, m.To-token)
			theirs = append(theirs, spot{rank, m.Remote[i], slots})
			ours = append(ours, spot{rank, x, slots})
			first = append(first, token)
		}
	}
	p := n.peers.byLife(name.Owner)
	if p == nil {
		return fmt.Errorf("%s: %w", name.Owner, errOwnerLost)
	}
	good := 0
	for from := 0; from < len(theirs); from += maxSums {
		end := min(len(theirs), from+maxSums)
		sums, err := p.checksums(ctx, name.Sequence, rank, theirs[from:end])
		if _, ended := refusalOf(err); ended {
			unknown += end - from // it has held until all had landed
			continue
		}
		if err != nil {
			return fmt.Errorf("checksums of %s: %w", name, p.unreachable(err))
		}
		var known []int // of theirs and ours
		var at []spot
		for i, want := range sums {
			if want == noSum {
				unknown++
				continue
			}
			known, at = append(known, from+i), append(at, ours[from+i])
		}
		have, err := n.sums(ctx, at)
		if err != nil {
			return err
		}
		for i, got := range have {
			x, want := known[i], sums[known[i]-from]
			if int64(got) != want {
				n.metrics.verified.WithLabelValues("bad").Inc()
				return fmt.Errorf("page %d of rank %d at its owner, tokens %d to %d, was published with checksum %08x and arrived with %08x: %w",
					theirs[x].page, rank, first[x], first[x]+ours[x].slots, want, got, errChecksum)
			}
			good++
		}
	}
	n.metrics.verified.WithLabelValues("good").Add(float64(good))
	n.metrics.verified.WithLabelValues("unknown").Add(float64(unknown))
	return nil
}
