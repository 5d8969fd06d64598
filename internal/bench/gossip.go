package bench

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// gossipPlan is what is measured of gossip.
type gossipPlan struct {
	rounds int
	// Sizes of the cluster, which are compared at one rate, in announcements a
	// second. At the first one the rate is sought that it holds: the goal and, if
	// it holds that, the greater ones; else its half, and so on.
	nodes      []int
	rate, goal float64
	greater    []float64

	rest, idle           time.Duration // after they have met, and measured
	life, window, settle time.Duration // see load
	fast                 bool          // the timings of tests
}

func benchGossip(ctx context.Context, o Options, r *Report) error {
	return gossipPlan{
		rounds: 3, nodes: []int{8, 16, 32}, rate: 500, goal: 5000, greater: []float64{7500, 10000},
		rest: time.Second, idle: 2 * time.Second, life: 2 * time.Second, window: 5 * time.Second, settle: 3 * time.Second,
	}.run(ctx, o, r)
}

// gossiped is one run: a load on a cluster of its own.
type gossiped struct {
	nodes int
	rate  float64 // that was asked for
	idle  traffic // just before; 0: not measured
	loaded
}

func (p gossipPlan) run(ctx context.Context, o Options, r *Report) error {
	var runs []gossiped
	try := func(nodes int, rate float64) (bool, error) {
		g, err := p.one(ctx, nodes, rate)
		if err != nil {
			return false, fmt.Errorf("gossip among %d nodes, %.0f announcements a second: %w", nodes, rate, err)
		}
		fmt.Fprintf(o.Progress, "gossip among %d nodes, %.0f announcements a second: %.2f %% known by all, on all after %.1f ms (p50)\n",
			nodes, g.made, 100*g.complete, g.all.p50/1000)
		runs = append(runs, g)
		return g.holds(rate), nil
	}
	var highest []float64
	for range p.rounds {
		for _, nodes := range p.nodes {
			if _, err := try(nodes, p.rate); err != nil {
				return err
			}
		}
		held, err := p.seek(func(rate float64) (bool, error) { return try(p.nodes[0], rate) })
		if err != nil {
			return err
		}
		highest = append(highest, held)
	}
	r.Gossip = &Gossip{Rounds: p.rounds, IdleSeconds: p.idle.Seconds(), LifeSeconds: p.life.Seconds(), WindowSeconds: p.window.Seconds(), SettleSeconds: p.settle.Seconds()}
	r.Gossip.add(runs)
	p.figures(r, runs, highest)
	return nil
}

// one starts a cluster, loads it, and ends it.
func (p gossipPlan) one(ctx context.Context, nodes int, rate float64) (g gossiped, err error) {
	m, err := startMesh(ctx, nodes, p.fast)
	if err != nil {
		return g, err
	}
	defer func() { err = errors.Join(err, m.close()) }()
	g.nodes, g.rate = nodes, rate
	if rate == p.rate { // whose traffic is compared
		if err := pause(ctx, p.rest); err != nil {
			return g, err
		}
		if g.idle, err = m.idle(ctx, p.idle); err != nil {
			return g, err
		}
	}
	g.loaded, err = load{rate, p.life, p.window, p.settle}.run(ctx, m)
	return g, err
}

// seek returns the highest rate of which try says that it is held, 0 if there
// is none.
func (p gossipPlan) seek(try func(rate float64) (bool, error)) (highest float64, err error) {
	held, err := try(p.goal)
	if err != nil {
		return 0, err
	}
	if !held {
		for rate := p.goal / 2; !held && rate >= p.rate; rate /= 2 {
			if held, err = try(rate); err != nil {
				return 0, err
			} else if held {
				return rate, nil
			}
		}
		return 0, nil
	}
	highest = p.goal
	for _, rate := range p.greater {
		if held, err = try(rate); err != nil {
			return 0, err
		} else if !held {
			break
		}
		highest = rate
	}
	return highest, nil
}

// Bounds of the figures.
const (
	seenWithin = 50 // ms, on any one of the first size
	// Every node sends an announcement to as many others whatever the size of the
	// cluster. What grows with it are the checkpoints of so many owners, one a
	// second each, which is a hundredth or two at 32; the rest is for how well
	// packets happen to be filled.
	growth = 1.1
)

func (p gossipPlan) figures(r *Report, runs []gossiped, highest []float64) {
	first, last := p.nodes[0], p.nodes[len(p.nodes)-1]
	var one, bytes, packets []float64 // a round
	var small gossiped
	for _, g := range runs {
		switch {
		case g.rate != p.rate:
		case g.nodes == first:
			small = g
			one = append(one, g.one.p99/1000)
		case g.nodes == last && g.holds(p.rate) && small.holds(p.rate):
			of, by := g.announcing(), small.announcing()
			bytes = append(bytes, of.bytes/by.bytes)
			packets = append(packets, of.packets/by.packets)
		}
	}
	r.Figures = append(r.Figures,
		floor(fmt.Sprintf("announcements that all of %d nodes know", first), spreadOf(highest).median, "a second, median of rounds", p.goal),
		ceiling(fmt.Sprintf("publish to visible on any of %d nodes, %.0f announcements a second, p99", first, p.rate),
			spreadOf(one).median, "ms, median of rounds", seenWithin),
	)
	if len(bytes) == 0 { // who falls behind fills packets better and gives up what it should pass on
		r.Missing = append(r.Missing, fmt.Sprintf("gossip of %d nodes beside that of %d: in no round both held %.0f announcements a second", last, first, p.rate))
		return
	}
	by := fmt.Sprintf("of those of %d nodes, median of rounds", first)
	r.Figures = append(r.Figures,
		ceiling(fmt.Sprintf("gossiped bytes a node, %d nodes, %.0f announcements a second", last, p.rate), spreadOf(bytes).median, by, growth),
		ceiling(fmt.Sprintf("gossiped packets a node, %d nodes, %.0f announcements a second", last, p.rate), spreadOf(packets).median, by, growth),
	)
}

// announcing is the traffic that an idle cluster has not.
func (g gossiped) announcing() traffic {
	return traffic{g.traffic.bytes - g.idle.bytes, g.traffic.packets - g.idle.packets}
}
