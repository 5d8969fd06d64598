package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry/transfer"
)

const manyBytes = 64 << 20

// manyPages measures 64 MiB against what the transport alone takes for the same
// copies, in the same rounds.
func (q *pair) manyPages(ctx context.Context, o Options, r *Report) (err error) {
	what := "publish to ready of " + bytesText(manyBytes)
	pages := int((manyBytes + q.prefill.layout.PageBytes() - 1) / q.prefill.layout.PageBytes())
	why := ""
	switch least := min(q.prefill.layout.Pages, q.decode.layout.Pages); {
	case len(o.Owner) == 0:
		why = "no owner process was named"
	case least <= pages:
		why = fmt.Sprintf("the nodes have arenas of %d pages, it takes %d (kvferry local up --pages %d)", least, pages+1, pages+1)
	case len(q.prefill.session.Ranks()) > 1 || len(q.decode.session.Ranks()) > 1:
		why = "the nodes have several ranks"
	case q.prefill.layout.LayerPageBytes()%8 != 0:
		why = "the nodes have pages that are no multiple of 8 bytes"
	}
	if why != "" {
		r.Missing = append(r.Missing, what+": "+why)
		return nil
	}
	// A node's transports have their defaults.
	p, err := newPuller(ctx, o, setup{ArenaBytes: max(q.prefill.layout.Bytes(), q.decode.layout.Bytes()), Transports: Transports()})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()

	s, err := q.publish(ctx, pages, q.reader()) // to warm up
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	transport := s.transport
	if why, missing := p.refused[transport]; missing || p.links[transport] == nil {
		r.Missing = append(r.Missing, fmt.Sprintf("%s by %s: a read by that alone is not measured: %s", what, transport, why))
		return nil
	}
	var ready, alone, ratios []float64
	for round := range o.Rounds {
		steps := []func() error{
			func() error {
				s, err = q.publish(ctx, pages, q.reader())
				if err == nil && s.transport != transport {
					err = fmt.Errorf("the nodes changed from %s to %s", transport, s.transport)
				}
				ready = append(ready, float64(s.took.Microseconds()))
				return err
			},
			func() error {
				took, err := q.readAlone(ctx, p, s)
				alone = append(alone, float64(took.Microseconds()))
				return err
			},
		}
		if round%2 == 1 {
			slices.Reverse(steps)
		}
		for _, run := range steps {
			if err := run(); err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
		}
		ratios = append(ratios, ready[round]/alone[round])
		fmt.Fprintf(o.Progress, "round %d of %d: %s by %s: %.1f ms, the read alone: %.1f ms\n", round+1, o.Rounds, what, transport, ready[round]/1000, alone[round]/1000)
	}
	bytes := int64(pages) * q.prefill.layout.PageBytes()
	r.Latencies = append(r.Latencies, latencyOf(what, transport, bytes, ready), latencyOf("a read alone of the same", transport, bytes, alone))
	ratio := spreadOf(ratios)
	r.Figures = append(r.Figures, ceiling(what+" by "+transport, ratio.median, "of a read alone, median of rounds", 1.15))
	return nil
}

// readAlone reads between the two processes of a pull what a node has read: copies of
// the same lengths from and to the same places.
func (q *pair) readAlone(ctx context.Context, p *puller, s published) (time.Duration, error) {
	remote := transfer.Side{Layout: q.prefill.layout, Pages: s.remote}
	local := transfer.Side{Layout: q.decode.layout, Pages: s.local}
	copies, err := transfer.Copies(nil, benchRank, remote, local, 0, len(s.remote)*remote.Layout.PageSize)
	if err != nil {
		return 0, err
	}
	if err := p.owner.write(); err != nil { // as the engine has, just before
		return 0, err
	}
	start := time.Now()
	if err := p.links[s.transport].Read(ctx, p.seals, copies); err != nil {
		return 0, err
	}
	took := time.Since(start)
	for _, c := range copies {
		if err := checkContent(p.arena, c); err != nil {
			return 0, err
		}
	}
	return took, nil
}

// latencyOf sorts what was taken, in microseconds.
func latencyOf(name, transport string, bytes int64, took []float64) Latency {
	slices.Sort(took)
	return Latency{
		Name: name, Transport: transport, Bytes: bytes, Samples: int64(len(took)),
		P50: quantile(took, 0.5), P90: quantile(took, 0.9), P99: quantile(took, 0.99),
	}
}
