package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/transfer"
)

const (
	submitPages = 10_000 // of one read
	fewPages    = 5_000  // of a smaller one, which takes a transport several requests too
	mallocReads = 20
)

// submitLayout has pages so small, and so few, that their bytes cost next to nothing.
func submitLayout() page.Layout {
	return page.Layout{Order: page.NHD, DType: page.BF16, Layers: 1, Pages: submitPages + 1, PageSize: 1, Heads: 1, HeadDim: 16}
}

// benchSubmit measures what a read costs the reader for each page, whatever it has
// of bytes: CPU, and allocations.
func benchSubmit(ctx context.Context, o Options, r *Report) (err error) {
	if len(o.Owner) == 0 {
		r.Missing = append(r.Missing, "submit: no owner process was named")
		return nil
	}
	p, err := newPuller(ctx, o, setup{ArenaBytes: submitLayout().Bytes(), Transports: o.Transports, Devices: o.Devices, Lanes: o.Lanes, Workers: o.Workers})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	names := p.measured(r, "submit")
	nanos, allocs := make(map[string][]float64), make(map[string][]float64)
	for round := range o.Rounds {
		order := slices.Clone(names)
		if round%2 == 1 { // what runs first may find the machine otherwise
			slices.Reverse(order)
		}
		for _, name := range order {
			s := submitter{p, p.links[name]}
			cpu, err := s.cpuNanos(ctx, o.Duration)
			if err != nil {
				return fmt.Errorf("submit by %s: %w", name, err)
			}
			growth, err := s.mallocs(ctx)
			if err != nil {
				return fmt.Errorf("submit by %s: %w", name, err)
			}
			nanos[name], allocs[name] = append(nanos[name], cpu), append(allocs[name], growth)
		}
	}
	for _, name := range names {
		row := Cost{
			Name: fmt.Sprintf("submit %d scattered pages", submitPages), Transport: name, Rounds: o.Rounds,
			NanosPerPage: spreadOf(nanos[name]).median, AllocsPerPage: spreadOf(allocs[name]).median,
		}
		if row.AllocsPerPage < 1.0/(submitPages-fewPages) {
			row.AllocsPerPage = 0 // not even one more for all of them
		}
		fmt.Fprintf(o.Progress, "submit by %s: %.1f ns and %.3g allocations a page\n", name, row.NanosPerPage, row.AllocsPerPage)
		r.Costs = append(r.Costs, row)
		r.Figures = append(r.Figures,
			ceiling("submit by "+name+", CPU", row.NanosPerPage, "ns a scattered page, median of rounds", 150),
			ceiling("submit by "+name+", allocations", row.AllocsPerPage, "a page", 0),
		)
	}
	return nil
}

// submitter reads pages by one transport.
type submitter struct {
	*puller
	link transfer.Link
}

// sides are page lists in random order.
func (s submitter) sides(pages int) (remote, local transfer.Side) {
	side := func() transfer.Side {
		list := make([]page.Index, pages)
		for i, p := range rand.Perm(submitPages)[:pages] {
			list[i] = page.Index(p + 1)
		}
		return transfer.Side{Layout: submitLayout(), Pages: list}
	}
	return side(), side()
}

// cpuNanos is what planning and reading cost this process a page.
func (s submitter) cpuNanos(ctx context.Context, d time.Duration) (float64, error) {
	remote, local := s.sides(submitPages)
	copies, reads, before := []transfer.Copy(nil), -1, 0.0 // the first one is to warm up
	for start := time.Now(); reads < 1 || time.Since(start) < d; reads++ {
		if reads == 0 {
			before, start = cpuSeconds(), time.Now()
		}
		var err error
		if copies, err = transfer.Copies(copies[:0], benchRank, remote, local, 0, submitPages); err != nil {
			return 0, err
		}
		if err := s.link.Read(ctx, s.seals, copies); err != nil {
			return 0, err
		}
	}
	cpu := cpuSeconds() - before
	for _, c := range copies {
		if err := checkContent(s.arena, c); err != nil {
			return 0, err
		}
	}
	return cpu * 1e9 / float64(reads) / submitPages, nil
}

// mallocs is how many allocations a read makes more for each page more.
func (s submitter) mallocs(ctx context.Context) (float64, error) {
	few, err := s.mallocsOf(ctx, fewPages)
	if err != nil {
		return 0, err
	}
	many, err := s.mallocsOf(ctx, submitPages)
	return (many - few) / (submitPages - fewPages), err
}

func (s submitter) mallocsOf(ctx context.Context, pages int) (float64, error) {
	remote, local := s.sides(pages)
	copies, err := transfer.Copies(nil, benchRank, remote, local, 0, pages)
	if err != nil {
		return 0, err
	}
	var before, after runtime.MemStats
	for i := range mallocReads + 1 {
		if i == 1 { // the first one is to warm up
			runtime.ReadMemStats(&before)
		}
		if err := s.link.Read(ctx, s.seals, copies); err != nil {
			return 0, err
		}
	}
	runtime.ReadMemStats(&after)
	return float64(after.Mallocs-before.Mallocs) / mallocReads, nil
}
