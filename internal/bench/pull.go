package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rdmaread"
	"github.com/kvferry/kvferry/transfer/shm"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// readBytes is how much one Read moves: a prompt of some thousand tokens.
const readBytes = 32 << 20

// pullLoad is what is pulled.
type pullLoad struct {
	chunkBytes int64
	contiguity float64 // share of the chunks that follow their neighbour on both sides
}

// pullLoads are what is asked for, or by default scattered chunks of each size,
// and those of one size beside each other too.
func (o Options) pullLoads() []pullLoad {
	var loads []pullLoad
	for _, size := range o.ChunkBytes {
		of := o.Contiguity
		switch {
		case len(of) > 0:
		case size == 64<<10:
			of = []float64{0, 0.5, 1}
		default:
			of = []float64{0}
		}
		for _, c := range of {
			loads = append(loads, pullLoad{size, c})
		}
	}
	return loads
}

// pulls are the rounds of one row.
type pulls struct {
	transport string
	pullLoad
	lanes  int
	runs   []pulled
	limit  string    // what they are compared with
	limits []float64 // bytes a second, of the same rounds; empty: there is none
	likes  []float64 // those of ib_read_bw with messages of the chunks' size
}

// benchPull measures throughput by transport, size, and contiguity of chunks,
// against what the machine does without kvferry.
func benchPull(ctx context.Context, o Options, r *Report) (err error) {
	if len(o.Owner) == 0 {
		r.Missing = append(r.Missing, "pull: no owner process was named")
		return nil
	}
	p, err := newPuller(ctx, o, setup{
		ArenaBytes: o.ArenaBytes, Transports: o.Transports, Devices: o.Devices,
		LinkConns: o.Concurrency * o.Lanes, Lanes: o.Lanes, Workers: o.Workers,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	b := &pullBench{Options: o, puller: p}
	names := p.measured(r, "pull")
	lanes := map[string]int{shm.Name: o.Workers, tcp.Name: o.Lanes}
	if slices.Contains(names, rdmaread.Name) {
		if lanes[rdmaread.Name], err = p.rdmaLanes(ctx); err != nil {
			return err
		}
		if b.readBW, err = findReadBW(p.rdmaPort(), p.owner.offer.RDMA, lanes[rdmaread.Name]); err != nil {
			r.Missing = append(r.Missing, "limit of the pull by rdma: "+err.Error())
		}
	}
	for _, load := range o.pullLoads() {
		for _, name := range names {
			b.rows = append(b.rows, &pulls{transport: name, pullLoad: load, lanes: lanes[name]})
		}
	}
	if slices.Contains(names, tcp.Name) {
		if b.iperf, err = findIperf(); err != nil {
			r.Missing = append(r.Missing, "limit of the pull by tcp: "+err.Error())
		}
	}
	if slices.Contains(names, shm.Name) {
		m, failed := startMemcpy(ctx, o.ArenaBytes)
		switch {
		case failed == nil:
			defer func() { err = errors.Join(err, m.close()) }()
			b.memcpy = m
		case errors.Is(failed, errNoCompiler):
			r.Missing = append(r.Missing, "limit of the pull by shm: "+failed.Error())
		default:
			return failed
		}
	}
	for round := range o.Rounds {
		steps := b.steps(ctx, round)
		if round%2 == 1 {
			slices.Reverse(steps)
		}
		for _, s := range steps {
			rate, err := s.run()
			if err != nil {
				return fmt.Errorf("pull, %s: %w", s.what, err)
			}
			fmt.Fprintf(o.Progress, "round %d of %d: %s: %.2f GB/s\n", round+1, o.Rounds, s.what, rate/1e9)
		}
	}
	if b.readBW != nil {
		b.limitRDMA()
	}
	r.addPulls(b.rows, o.Concurrency)
	return nil
}

// limitRDMA compares with the messages that are fastest by their median, and with
// those of the chunks' own size. The fastest run of each round would be better than
// any size.
func (b *pullBench) limitRDMA() {
	fastest := 0
	for i, rates := range b.readBWs {
		if spreadOf(rates).median > spreadOf(b.readBWs[fastest]).median {
			fastest = i
		}
	}
	for _, row := range b.rows {
		if row.transport == rdmaread.Name {
			row.limit, row.limits = fmt.Sprintf("%v -s %d", b.readBW, readBWBytes()[fastest]), b.readBWs[fastest]
			if same := slices.Index(readBWBytes(), row.chunkBytes); same >= 0 {
				row.likes = b.readBWs[same]
			}
		}
	}
}

// pullBench is what a round needs.
type pullBench struct {
	Options
	*puller
	iperf  string  // the program; "": there is none
	readBW *readBW // nil: there is none
	memcpy *memcpy // nil: there is none
	// readBWs are its rates of all rounds, for each of [readBWBytes].
	readBWs [][]float64
	rows    []*pulls
}

// step is one thing that a round does. What runs first may find the machine
// otherwise than what runs last, so every other round goes backwards.
type step struct {
	what string
	run  func() (bytesPerSecond float64, err error)
}

// steps are those of a round, limits beside what they are of.
func (b *pullBench) steps(ctx context.Context, round int) []step {
	var steps []step
	if b.iperf != "" {
		connections := b.Concurrency * b.Lanes
		what := fmt.Sprintf("iperf3 -P %d", connections)
		steps = append(steps, step{what, func() (float64, error) {
			rate, err := runIperf(ctx, b.iperf, connections)
			for _, row := range b.rows {
				if row.transport == tcp.Name {
					row.limit, row.limits = what, append(row.limits, rate)
				}
			}
			return rate, err
		}})
	}
	if b.readBW != nil {
		if b.readBWs == nil {
			b.readBWs = make([][]float64, len(readBWBytes()))
		}
		for i, n := range readBWBytes() {
			steps = append(steps, step{fmt.Sprintf("%v, messages of %s", b.readBW, bytesText(n)), func() (float64, error) {
				rate, err := b.readBW.run(ctx, n)
				b.readBWs[i] = append(b.readBWs[i], rate)
				return rate, err
			}})
		}
	}
	for _, row := range b.rows {
		load := row.pullLoad
		copies := scatter(b.ArenaBytes, load, rand.New(rand.NewPCG(uint64(round), uint64(load.chunkBytes))))
		batches := batch(copies, load.chunkBytes, b.ArenaBytes, b.Concurrency)
		if row.transport == shm.Name && b.memcpy != nil {
			steps = append(steps, step{fmt.Sprintf("memcpy, %v", load), func() (float64, error) {
				rate, err := b.memcpy.copy(slices.Concat(batches...), b.Workers, b.Duration)
				row.limit, row.limits = "C memcpy, "+threads(b.Workers), append(row.limits, rate)
				return rate, err
			}})
		}
		steps = append(steps, step{fmt.Sprintf("%s, %v", row.transport, load), func() (float64, error) {
			run, err := b.pull(ctx, row.transport, batches, b.Concurrency, b.Duration)
			row.runs = append(row.runs, run)
			return run.bytesPerSecond, err
		}})
	}
	return steps
}

func (l pullLoad) String() string {
	return fmt.Sprintf("%s chunks, %.0f %% contiguous", bytesText(l.chunkBytes), 100*l.contiguity)
}

func threads(n int) string {
	if n == 1 {
		return "1 thread"
	}
	return fmt.Sprintf("%d threads", n)
}

// pullFloors are of the limit, by transport and size of scattered chunks.
func pullFloors(transport string, l pullLoad) (least float64, ok bool) {
	floors := map[string]map[int64]float64{
		shm.Name:      {4 << 10: 1.0, 16 << 10: 1.2, 64 << 10: 1.2, 1 << 20: 1.0},
		rdmaread.Name: {16 << 10: 0.90, 64 << 10: 0.95},
		tcp.Name:      {4 << 10: 0.65, 16 << 10: 0.90, 64 << 10: 0.95},
	}
	least, ok = floors[transport][l.chunkBytes]
	return least, ok && l.contiguity == 0
}

// addPulls makes a row of the rounds of each.
func (r *Report) addPulls(rows []*pulls, concurrency int) {
	slices.SortStableFunc(rows, func(a, b *pulls) int {
		return slices.Index(Transports(), a.transport) - slices.Index(Transports(), b.transport)
	})
	for _, p := range rows {
		var rates, cpu, crossings, ratios, likes, took []float64
		for i, run := range p.runs {
			rates = append(rates, run.bytesPerSecond)
			cpu = append(cpu, run.cpuSecondsPerGiB)
			crossings = append(crossings, run.crossings*float64(p.chunkBytes))
			for _, d := range run.reads {
				took = append(took, float64(d.Nanoseconds())/1000)
			}
			if len(p.limits) > 0 {
				ratios = append(ratios, run.bytesPerSecond/p.limits[i])
			}
			if len(p.likes) > 0 {
				likes = append(likes, run.bytesPerSecond/p.likes[i])
			}
		}
		slices.Sort(took)
		row := Row{
			Transport: p.transport, ChunkBytes: p.chunkBytes, Contiguity: p.contiguity, Concurrency: concurrency, Lanes: p.lanes,
			BytesPerSecond: spreadOf(rates).median, Rounds: len(p.runs), CPUSecondsPerGiB: spreadOf(cpu).median,
			CrossingsPerChunk: spreadOf(crossings).max, P50: quantile(took, 0.5), P99: quantile(took, 0.99),
		}
		if p.transport == rdmaread.Name && p.contiguity == 0 && p.chunkBytes >= 16<<10 {
			name := fmt.Sprintf("crossings into C of an rdma pull of scattered %s chunks", bytesText(p.chunkBytes))
			r.Figures = append(r.Figures, ceiling(name, row.CrossingsPerChunk, "a chunk, most of rounds", 1.0/16))
		}
		if len(ratios) > 0 {
			ratio := spreadOf(ratios)
			row.Limit, row.LimitBytesPerSecond = p.limit, spreadOf(p.limits).median
			row.Ratio, row.RatioMin, row.RatioMax = ratio.median, ratio.min, ratio.max
			if least, ok := pullFloors(p.transport, p.pullLoad); ok {
				name := fmt.Sprintf("%s pull of scattered %s chunks by %s", p.transport, bytesText(p.chunkBytes), p.limit)
				r.Figures = append(r.Figures, floor(name, ratio.median, "of the limit, median of rounds", least))
				if len(likes) > 0 {
					name := fmt.Sprintf("%s pull of scattered %s chunks by ib_read_bw of such messages", p.transport, bytesText(p.chunkBytes))
					r.Figures = append(r.Figures, floor(name, spreadOf(likes).median, "of it, median of rounds", least))
				}
			}
		}
		r.Rows = append(r.Rows, row)
	}
}

// quantile of what is sorted and not empty.
func quantile(sorted []float64, q float64) float64 {
	return sorted[int(math.Ceil(q*float64(len(sorted))))-1]
}

// scatter pairs every chunk of one arena with one of another. Chunks that follow
// each other on both sides are one copy, as transfer.Copies makes them, and such
// runs lie in no order in either arena.
func scatter(arenaBytes int64, l pullLoad, r *rand.Rand) []transfer.Copy {
	chunks := int(arenaBytes / l.chunkBytes)
	// The borders between the chunks at which a new run begins.
	borders := r.Perm(chunks - 1)
	borders = borders[:len(borders)-int(math.Round(l.contiguity*float64(len(borders))))]
	slices.Sort(borders)
	copies := make([]transfer.Copy, 0, len(borders)+1)
	last := 0
	for _, b := range append(borders, chunks-1) {
		copies = append(copies, transfer.Copy{Rank: benchRank, Bytes: int64(b+1-last) * l.chunkBytes})
		last = b + 1
	}
	for at, n := range laid(copies, r) {
		copies[n].Remote = at
	}
	for at, n := range laid(copies, r) {
		copies[n].Local = at
	}
	return copies
}

// laid lays the copies into an arena, one behind the other, in random order.
func laid(copies []transfer.Copy, r *rand.Rand) iter.Seq2[int64, int] {
	return func(yield func(int64, int) bool) {
		at := int64(0)
		for _, n := range r.Perm(len(copies)) {
			if !yield(at, n) {
				return
			}
			at += copies[n].Bytes
		}
	}
}

// batch cuts the copies into reads of readBytes, or less if all reads at once would
// not have one.
func batch(copies []transfer.Copy, chunkBytes, arenaBytes int64, concurrency int) [][]transfer.Copy {
	chunks := arenaBytes / chunkBytes
	bytes := max(1, min(readBytes/chunkBytes, chunks/int64(concurrency))) * chunkBytes
	cut := transfer.Cut(copies, bytes, math.MaxInt)
	var batches [][]transfer.Copy
	for more := true; more; {
		var piece []transfer.Copy
		piece, more = cut.Next(nil)
		batches = append(batches, piece)
	}
	return batches
}

// fillContent writes what checkContent expects: every word is a function of
// its offset in the owner's arena.
func fillContent(b []byte) {
	for at := 0; at+8 <= len(b); at += 8 {
		binary.LittleEndian.PutUint64(b[at:], content(uint64(at)))
	}
}

func checkContent(arena *memory.Region, c transfer.Copy) error {
	b := arena.Bytes()[c.Local : c.Local+c.Bytes]
	for at := 0; at < len(b); at += 8 {
		want := content(uint64(c.Remote) + uint64(at))
		if have := binary.LittleEndian.Uint64(b[at:]); have != want {
			return fmt.Errorf("%w: word at %d of the owner's arena landed at %d as %#x, want %#x", errWrongByte, c.Remote+int64(at), c.Local+int64(at), have, want)
		}
	}
	return nil
}

// content spreads an offset over 64 bits.
func content(at uint64) uint64 {
	x := (at + 1) * 0x9e3779b97f4a7c15
	x ^= x >> 32
	x *= 0xd6e8feb86659fd93
	return x ^ x>>29
}
