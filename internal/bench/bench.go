// Package bench measures what kvferry reaches on this machine, beside what the
// machine reaches without it:
//
//   - pull.go: a transport's throughput between two processes (owner.go,
//     puller.go, call.go), every byte checked, against iperf3 (iperf.go) with as
//     many connections, ib_read_bw (readbw.go) with as many queue pairs, or the C
//     library's memcpy (memcpy.go) with as many threads;
//   - ready.go: from publish to ready on a warm pair of nodes, for one page and,
//     against a read alone, for many (many.go);
//   - plan.go: the cost of planning copies;
//   - submit.go: what a read costs for each page, whatever its bytes;
//   - gossip.go: how far, how fast, and at what cost announcements travel in
//     clusters (mesh.go) under a load (load.go).
//
// Machines are noisy, so what is compared runs in interleaved rounds: a ratio
// is that of a run and the limit of the same round, and what is reported is the
// median of all rounds with its range. Rounds are never chosen.
package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"time"

	"github.com/kvferry/kvferry/transfer/tcp"
)

// Options set up a Run. A zero field means its default.
type Options struct {
	// Parts to measure, of [Parts]; default all.
	Parts []string
	// Owner is the argv of a process that calls [ServeOwner] with its standard
	// input and output, such as this program with a hidden subcommand. Empty:
	// neither pull nor submit is measured.
	Owner []string
	// Prefill and Decode are engine sockets of two running nodes of one
	// cluster. Empty: publish to ready is not measured.
	Prefill, Decode string
	// Transports to measure, of [Transports]; default all.
	Transports []string
	// Devices of rdma, such as "mlx5_0" or "mlx5_0:1": the reader's, and the owner's,
	// or one for both; default all of either.
	Devices []string
	// ChunkBytes are the sizes of the chunks pulled; default 4 KiB to 4 MiB.
	ChunkBytes []int64
	// Contiguity is the share of the chunks that follow their neighbour on both
	// sides, 0 to 1, of every size; default 0, and of 64 KiB 0.5 and 1 too.
	Contiguity []float64
	// Concurrency is how many reads run at once on the link; default 1, at most
	// [MaxConcurrency].
	Concurrency int
	// Lanes are the connections of a read by tcp; default the transport's. So many
	// for each read at once has iperf3.
	Lanes int
	// Workers are the threads that copy for shm, and those of memcpy; default 1, at
	// most [MaxWorkers].
	Workers int
	// Rounds are interleaved: every one runs everything once; default 9.
	Rounds int
	// ArenaBytes of either side; default 512 MiB.
	ArenaBytes int64
	// Duration of one pull of one round, at least; default 400 ms.
	Duration time.Duration
	// Samples of publish to ready, after Warmup ones that do not count;
	// default 400 and 50, Warmup negative: none.
	Samples, Warmup int
	// Progress gets a line a step; nil: nothing.
	Progress io.Writer
	// Logger; nil: silent.
	Logger *slog.Logger
}

// Bounds of the options.
const (
	MaxConcurrency = 64
	MaxLanes       = 64  // as a node's configuration
	MaxConnections = 128 // of all reads at once; iperf3 has no more
	MaxWorkers     = 256
	MinChunkBytes  = 8
	MaxChunkBytes  = 64 << 20
	MaxArenaBytes  = 64 << 30
	MaxRounds      = 1000
	MaxSamples     = 1_000_000
	MaxDuration    = time.Hour
)

// DefaultLanes are those of a node.
const DefaultLanes = tcp.DefaultLanes

// part of a Run.
type part struct {
	name string
	run  func(context.Context, Options, *Report) error
}

// parts are all there are, in the order in which they run.
func parts() []part {
	return []part{{"plan", benchPlan}, {"submit", benchSubmit}, {"ready", benchReady}, {"pull", benchPull}, {"gossip", benchGossip}}
}

// Parts are the names of what can be measured.
func Parts() []string {
	var names []string
	for _, p := range parts() {
		names = append(names, p.name)
	}
	return names
}

// ChunkSizes are those that are measured by default.
func ChunkSizes() []int64 {
	return []int64{4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20}
}

// LeastArena is how many bytes ArenaBytes has to be for the chunks.
func (o Options) LeastArena() int64 {
	return 2 * slices.Max(o.ChunkBytes) * int64(o.Concurrency)
}

func (o Options) withDefaults() (Options, error) {
	if len(o.Parts) == 0 {
		o.Parts = Parts()
	}
	if len(o.ChunkBytes) == 0 {
		o.ChunkBytes = ChunkSizes()
	}
	if len(o.Transports) == 0 {
		o.Transports = Transports()
	}
	o.Concurrency = cmp.Or(o.Concurrency, 1)
	o.Lanes = cmp.Or(o.Lanes, DefaultLanes)
	o.Workers = cmp.Or(o.Workers, 1)
	o.Rounds = cmp.Or(o.Rounds, 9)
	o.ArenaBytes = cmp.Or(o.ArenaBytes, 512<<20)
	o.Duration = cmp.Or(o.Duration, 400*time.Millisecond)
	o.Samples = cmp.Or(o.Samples, 400)
	o.Warmup = max(0, cmp.Or(o.Warmup, 50))
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	switch {
	case (o.Prefill == "") != (o.Decode == ""):
		return o, errors.New("one of the two nodes is named, want both or none")
	case o.Prefill != "" && o.Prefill == o.Decode:
		return o, fmt.Errorf("node at %s is named twice, nothing is pulled from oneself", o.Prefill)
	case o.Concurrency < 1 || o.Concurrency > MaxConcurrency:
		return o, fmt.Errorf("concurrency %d is not in 1..%d", o.Concurrency, MaxConcurrency)
	case o.Lanes < 1 || o.Lanes > MaxLanes:
		return o, fmt.Errorf("%d lanes are not in 1..%d", o.Lanes, MaxLanes)
	case o.Lanes*o.Concurrency > MaxConnections:
		return o, fmt.Errorf("%d lanes of %d reads at once are not in 1..%d connections", o.Lanes, o.Concurrency, MaxConnections)
	case o.Workers < 1 || o.Workers > MaxWorkers:
		return o, fmt.Errorf("%d workers are not in 1..%d", o.Workers, MaxWorkers)
	case o.Rounds < 1 || o.Rounds > MaxRounds:
		return o, fmt.Errorf("%d rounds are not in 1..%d", o.Rounds, MaxRounds)
	case o.Duration < 0 || o.Duration > MaxDuration:
		return o, fmt.Errorf("duration %v is not in 0s..%v", o.Duration, MaxDuration)
	case o.Samples < 0 || o.Samples > MaxSamples || o.Warmup > MaxSamples:
		return o, fmt.Errorf("%d samples or %d to warm up are not in 0..%d", o.Samples, o.Warmup, MaxSamples)
	}
	for _, name := range o.Parts {
		if !slices.Contains(Parts(), name) {
			return o, fmt.Errorf("part %q is none of %v", name, Parts())
		}
	}
	for _, name := range o.Transports {
		if !slices.Contains(Transports(), name) {
			return o, fmt.Errorf("transport %q is none of %v", name, Transports())
		}
	}
	if len(o.Devices) > 2 {
		return o, fmt.Errorf("%d RDMA devices are more than two", len(o.Devices))
	}
	for _, c := range o.Contiguity {
		if !(c >= 0 && c <= 1) {
			return o, fmt.Errorf("contiguity %v is not in 0..1", c)
		}
	}
	for _, n := range o.ChunkBytes {
		if n < MinChunkBytes || n > MaxChunkBytes || n%8 != 0 {
			return o, fmt.Errorf("chunk of %d bytes is not in %d..%d or no multiple of 8", n, MinChunkBytes, MaxChunkBytes)
		}
	}
	// What is named twice is measured once.
	o.ChunkBytes = slices.Compact(slices.Sorted(slices.Values(o.ChunkBytes)))
	o.Contiguity = slices.Compact(slices.Sorted(slices.Values(o.Contiguity)))
	if least := o.LeastArena(); o.ArenaBytes < least || o.ArenaBytes > MaxArenaBytes {
		return o, fmt.Errorf("arena of %d bytes is not in %d..%d", o.ArenaBytes, least, int64(MaxArenaBytes))
	}
	return o, nil
}

// Run measures and returns what it found. A part that could not be measured
// (no iperf3, no cluster) is in Report.Missing with the reason; an error means
// that a part that ran went wrong, a wrong byte included, or that it was interrupted:
// then it wraps the cause of ctx.
func Run(ctx context.Context, o Options) (*Report, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	r := &Report{Machine: thisMachine(), Rows: []Row{}, Latencies: []Latency{}, Costs: []Cost{}, Figures: []Figure{}, Missing: []string{}}
	r.Rounds, r.ArenaBytes, r.PullSeconds = o.Rounds, o.ArenaBytes, o.Duration.Seconds()
	for _, p := range parts() {
		if !slices.Contains(o.Parts, p.name) {
			continue
		}
		err := p.run(ctx, o, r)
		if err != nil && ctx.Err() != nil && !errors.Is(err, errWrongByte) {
			// What ctx has ended fails in ways that say nothing.
			err = fmt.Errorf("interrupted in %s: %w", p.name, context.Cause(ctx))
		}
		if err != nil {
			return nil, fmt.Errorf("bench: %w", err)
		}
	}
	return r, nil
}

// errWrongByte: what has arrived is not what was sent.
var errWrongByte = errors.New("wrong byte")

// spread is a median and its range.
type spread struct{ median, min, max float64 }

// spreadOf takes at least one value.
func spreadOf(values []float64) spread {
	s := slices.Sorted(slices.Values(values))
	middle := s[len(s)/2]
	if len(s)%2 == 0 {
		middle = (middle + s[len(s)/2-1]) / 2
	}
	return spread{middle, s[0], s[len(s)-1]}
}
