package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"time"

	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/transfer"
)

// planPages is how many scattered pages one plan has.
const planPages = 8192

// benchPlan measures what it costs to turn two page lists into copies.
func benchPlan(ctx context.Context, o Options, r *Report) error {
	for _, layers := range []int{2, 28} {
		row, err := planRow(ctx, o.Rounds, layers)
		if err != nil {
			return err
		}
		fmt.Fprintf(o.Progress, "plan copies of %d layers: %.1f ns a page\n", layers, row.NanosPerPage)
		r.Costs = append(r.Costs, row)
		if layers == 2 { // configs/local.yaml
			r.Figures = append(r.Figures,
				ceiling("copies planning, 2 layers", row.NanosPerPage, "ns a page", 30),
				ceiling("copies planning, allocations", row.AllocsPerPage, "a page", 0),
			)
		}
	}
	return nil
}

func planRow(ctx context.Context, rounds, layers int) (Cost, error) {
	layout := page.Layout{Order: page.NHD, DType: page.BF16, Layers: layers, Pages: planPages + 1, PageSize: 128, Heads: 2, HeadDim: 64}
	side := func(seed uint64) transfer.Side {
		pages := make([]page.Index, planPages)
		for i, p := range rand.New(rand.NewPCG(seed, 1)).Perm(planPages) {
			pages[i] = page.Index(p + 1)
		}
		return transfer.Side{Layout: layout, Pages: pages}
	}
	remote, local := side(1), side(2)
	copies, err := transfer.Copies(nil, benchRank, remote, local, 0, planPages*layout.PageSize)
	if err != nil {
		return Cost{}, err
	}
	var nanos []float64
	allocs := 0.0
	for range rounds {
		if ctx.Err() != nil {
			return Cost{}, context.Cause(ctx)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		start, plans := time.Now(), 0
		for time.Since(start) < 20*time.Millisecond || plans == 0 {
			if copies, err = transfer.Copies(copies[:0], benchRank, remote, local, 0, planPages*layout.PageSize); err != nil {
				return Cost{}, err
			}
			plans++
		}
		pages := float64(plans * planPages)
		nanos = append(nanos, float64(time.Since(start).Nanoseconds())/pages)
		runtime.ReadMemStats(&after)
		allocs = max(allocs, float64(after.Mallocs-before.Mallocs)/pages)
	}
	if allocs < 1e-3 {
		allocs = 0 // others in this process allocate, too: a handful in thousands of pages
	}
	return Cost{
		Name:         fmt.Sprintf("plan copies of %d scattered pages, %d layers", planPages, layers),
		NanosPerPage: spreadOf(nanos).median, AllocsPerPage: allocs, Rounds: rounds,
	}, nil
}
