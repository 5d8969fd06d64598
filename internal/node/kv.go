package node

import (
	"context"
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// maxKV bounds K and V of one WriteKV or ReadKV: with the rest of the message
// they are what gRPC takes where nobody has set it to more.
const maxKV = 4<<20 - 1024 // bytes

// cells are the slots that one plan label writes, in one layer of one rank.
type cells struct {
	cache cache
	layer int
	slots []page.Slot // without padding; lent
	dtype page.DType  // of the caller's tokens
	row   int         // bytes of K, or of V, of one token in that type
}

// cellsRequest is what WriteKV and ReadKV say alike.
type cellsRequest interface {
	GetStep() uint64
	GetLabel() string
	GetLayer() uint32
	GetRank() uint32
	GetDtype() string
}

// withCells finds what a call is about and lends it to use. The step cannot end
// meanwhile; as with a mapped arena, the engine promises not to remove or reset
// its requests.
func (e engineService) withCells(ctx context.Context, req cellsRequest, use func(cells) error) error {
	_, a, leave, err := e.running(ctx, req.GetStep())
	if err != nil {
		return err
	}
	defer leave()
	n := e.node
	l := n.geometry.Layout
	if req.GetRank() >= id.MaxRanks {
		return fmt.Errorf("rank %d: %w", req.GetRank(), id.ErrInvalid)
	}
	c := cells{layer: int(req.GetLayer()), dtype: l.DType}
	if c.cache, err = n.cacheOf(id.Rank(req.GetRank())); err != nil {
		return err
	}
	if req.GetDtype() != "" {
		if c.dtype, err = page.ParseDType(req.GetDtype()); err != nil {
			return err
		}
	}
	c.row = l.Heads * l.HeadDim * int(c.dtype.Bytes())
	label := labelOf(req.GetLabel())
	return n.plan(a.token, func(p *manager.Plans) error {
		i := slices.IndexFunc(p.Plans, func(p manager.Plan) bool { return p.Label == label })
		if i < 0 {
			return fmt.Errorf("step %d has no plan %.80q: %w", a.token, label, manager.ErrUnknownLabel)
		}
		c.slots = p.Plans[i].Slots[:p.Plans[i].Total]
		if bytes := 2 * len(c.slots) * c.row; bytes > maxKV {
			return fmt.Errorf("step %d: K and V of %d tokens as %v have %d bytes, and a message at most 4 MiB, so write fewer tokens in a step, or map the arena: %w",
				a.token, len(c.slots), c.dtype, bytes, manager.ErrInvalid)
		}
		return use(c)
	})
}

func (e engineService) WriteKV(ctx context.Context, req *kvferrypb.WriteKVRequest) (*kvferrypb.WriteKVResponse, error) {
	return &kvferrypb.WriteKVResponse{}, e.withCells(ctx, req, func(c cells) error {
		if k, v := len(req.GetK()), len(req.GetV()); k != v || k%c.row != 0 {
			return fmt.Errorf("write: k has %d bytes and v %d, want as many of each, and %d a token: %w", k, v, c.row, manager.ErrInvalid)
		}
		return c.cache.write(ctx, c.layer, c.slots, req.GetK(), req.GetV(), c.dtype)
	})
}

func (e engineService) ReadKV(ctx context.Context, req *kvferrypb.ReadKVRequest) (*kvferrypb.ReadKVResponse, error) {
	res := &kvferrypb.ReadKVResponse{}
	return res, e.withCells(ctx, req, func(c cells) (err error) {
		res.K, res.V, err = c.cache.read(ctx, c.layer, c.slots, c.dtype)
		return err
	})
}
