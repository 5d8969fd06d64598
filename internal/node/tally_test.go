package node

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
)

// answering is a peer that gives one answer.
type answering struct {
	kvferrypb.PeerClient
	res *kvferrypb.WarmupResponse
	err error
}

func (a answering) Warmup(context.Context, *kvferrypb.WarmupRequest, ...grpc.CallOption) (*kvferrypb.WarmupResponse, error) {
	return a.res, a.err
}

// TestTallyBelievesNothing: what another node says of its ranks is checked
// before it is counted.
func TestTallyBelievesNothing(t *testing.T) {
	gone := errors.New("gone")
	for name, tt := range map[string]struct {
		res  *kvferrypb.WarmupResponse
		err  error
		want string // "": it is taken
	}{
		"honest":             {res: &kvferrypb.WarmupResponse{Ranks: []uint32{3, 1}, WorldSize: 4, FreePages: 7, TotalPages: 8}},
		"no answer":          {err: gone, want: "gone"},
		"empty":              {res: &kvferrypb.WarmupResponse{}, want: "0 ranks"},
		"no world":           {res: &kvferrypb.WarmupResponse{Ranks: []uint32{0}}, want: "world size 0"},
		"a huge world":       {res: &kvferrypb.WarmupResponse{Ranks: []uint32{0}, WorldSize: 1 << 31}, want: "world size"},
		"a rank beyond":      {res: &kvferrypb.WarmupResponse{Ranks: []uint32{4}, WorldSize: 4}, want: "rank 4 of 4"},
		"a huge rank":        {res: &kvferrypb.WarmupResponse{Ranks: []uint32{1<<32 - 1}, WorldSize: 4}, want: "rank 4294967295"},
		"a rank twice":       {res: &kvferrypb.WarmupResponse{Ranks: []uint32{1, 2, 1}, WorldSize: 4}, want: "rank 1 is there twice"},
		"too many ranks":     {res: &kvferrypb.WarmupResponse{Ranks: make([]uint32, id.MaxRanks+1), WorldSize: 4}, want: "65 ranks"},
		"more free than all": {res: &kvferrypb.WarmupResponse{Ranks: []uint32{0}, WorldSize: 4, FreePages: 9, TotalPages: 8}, want: "9 of 8 pages"},
	} {
		t.Run(name, func(t *testing.T) {
			p := &peer{node: &Node{}, life: id.Life{Node: "b", Incarnation: 1}, rpc: answering{res: tt.res, err: tt.err}}
			got, err := p.warmup(t.Context())
			switch {
			case tt.want != "":
				if err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("%+v, %v, want %q", got, err, tt.want)
				}
			case err != nil || got.node != "b" || got.free != 7 || got.total != 8 || !slices.Equal(got.ranks, []id.Rank{3, 1}):
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
}
