package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// readBytes is how much one Read moves: a prompt of some thousand tokens.
const readBytes = 32 << 20

// puller is the reading side.
type puller struct {
	memory    *sharedMemory
	transport transfer.Transport
	link      transfer.Link
	owner     *owner
	seals     []transfer.Seal
}

// benchPull measures throughput by chunk size against iperf3.
func benchPull(ctx context.Context, o Options, r *Report) error {
	if len(o.Owner) == 0 {
		r.Missing = append(r.Missing, "pull: no owner process was named")
		return nil
	}
	iperf, err := findIperf()
	if err != nil {
		r.Missing = append(r.Missing, "limit of the pull: "+err.Error())
	}
	p, err := newPuller(ctx, o)
	if err != nil {
		return err
	}
	defer p.close()

	limits := make([]float64, 0, o.Rounds)
	runs := make([][]pulled, len(o.ChunkBytes))
	for round := range o.Rounds {
		limit := func() error {
			if iperf == "" {
				return nil
			}
			rate, err := runIperf(ctx, iperf, o.Concurrency)
			if err != nil {
				return err
			}
			limits = append(limits, rate)
			fmt.Fprintf(o.Progress, "round %d of %d: iperf3 -P %d: %.2f GB/s\n", round+1, o.Rounds, o.Concurrency, rate/1e9)
			return nil
		}
		// What runs first may find the machine otherwise than what runs last.
		if round%2 == 0 {
			if err := limit(); err != nil {
				return err
			}
		}
		for i, size := range o.ChunkBytes {
			run, err := p.pull(ctx, o, size, uint64(round))
			if err != nil {
				return fmt.Errorf("pull chunks of %d bytes: %w", size, err)
			}
			runs[i] = append(runs[i], run)
			fmt.Fprintf(o.Progress, "round %d of %d: pull of %d-byte chunks: %.2f GB/s\n", round+1, o.Rounds, size, run.bytesPerSecond/1e9)
		}
		if round%2 == 1 {
			if err := limit(); err != nil {
				return err
			}
		}
	}
	for i, size := range o.ChunkBytes {
		r.addPull(o, size, runs[i], limits)
	}
	return nil
}

// addPull makes a row of the rounds of one chunk size; limits are of the same
// rounds, or none.
func (r *Report) addPull(o Options, size int64, runs []pulled, limits []float64) {
	var rates, cpu, ratios []float64
	for i, run := range runs {
		rates = append(rates, run.bytesPerSecond)
		cpu = append(cpu, run.cpuSecondsPerGiB)
		if len(limits) > 0 {
			ratios = append(ratios, run.bytesPerSecond/limits[i])
		}
	}
	rate := spreadOf(rates)
	row := Row{
		Name: "pull, scattered", Transport: tcp.Name, ChunkBytes: size, Concurrency: o.Concurrency, Lanes: 1, Rounds: len(runs),
		BytesPerSecond: rate.median, BytesPerSecondMin: rate.min, BytesPerSecondMax: rate.max,
		CPUSecondsPerGiB: spreadOf(cpu).median,
	}
	if len(ratios) > 0 {
		ratio := spreadOf(ratios)
		row.Limit = fmt.Sprintf("iperf3 -P %d", o.Concurrency)
		row.LimitBytesPerSecond = spreadOf(limits).median
		row.Ratio, row.RatioMin, row.RatioMax = ratio.median, ratio.min, ratio.max
		if size == 64<<10 && o.Concurrency == 1 {
			r.Figures = append(r.Figures, floor("tcp pull of scattered 64 KiB chunks by iperf3 -P 1", ratio.median, "of the limit, median of rounds", 0.6))
		}
	}
	r.Rows = append(r.Rows, row)
}

func newPuller(ctx context.Context, o Options) (_ *puller, err error) {
	fmt.Fprintf(o.Progress, "starting the owner with an arena of %d MiB\n", o.ArenaBytes>>20)
	p := &puller{}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	if p.owner, err = startOwner(ctx, o.Owner, o.ArenaBytes); err != nil {
		return nil, err
	}
	life := id.Life{Node: "bench-reader", Incarnation: id.Incarnation(time.Now().UnixMicro())}
	if p.memory, err = newMemory(life, o.ArenaBytes); err != nil {
		return nil, err
	}
	t, err := tcp.Listen(tcp.Options{Local: p.memory.local(life), Bind: loopback(), LinkConns: o.Concurrency})
	if err != nil {
		return nil, err
	}
	p.transport = t
	offer := p.owner.offer
	p.seals = []transfer.Seal{{Index: offer.Seal, Value: offer.SealValue}}
	p.link, err = t.Open(ctx, transfer.Peer{
		Life:       id.Life{Node: offer.Node, Incarnation: offer.Incarnation},
		Descriptor: offer.Descriptor,
		ArenaBytes: map[id.Rank]int64{benchRank: offer.ArenaBytes},
	})
	return p, err
}

func (p *puller) close() {
	if p.link != nil {
		_ = p.link.Close()
	}
	if p.transport != nil {
		_ = p.transport.Close()
	}
	if p.memory != nil {
		p.memory.close()
	}
	if p.owner != nil {
		_ = p.owner.close() // measured already; its errors are on stderr
	}
}

// pulled is one run of one round.
type pulled struct{ bytesPerSecond, cpuSecondsPerGiB float64 }

// pull moves every chunk of the owner's arena to another place of ours, again
// and again until the duration is over, and checks what lies there in the end.
func (p *puller) pull(ctx context.Context, o Options, size int64, seed uint64) (pulled, error) {
	copies := scatter(o.ArenaBytes, size, rand.New(rand.NewPCG(seed, uint64(size))))
	var batches [][]transfer.Copy
	for step := int(max(1, min(readBytes/size, int64(len(copies)/o.Concurrency)))); len(copies) > 0; {
		n := min(step, len(copies))
		batches = append(batches, copies[:n])
		copies = copies[n:]
	}
	ownerBefore, err := p.owner.cpuSeconds()
	if err != nil {
		return pulled{}, err
	}
	before := cpuSeconds()
	start := time.Now()
	var next, bytes atomic.Int64
	errs := make([]error, o.Concurrency)
	var work sync.WaitGroup
	for i := range errs {
		work.Go(func() {
			for {
				n := next.Add(1) - 1
				// Every chunk at least once, whole arenas or not.
				if n >= int64(len(batches)) && time.Since(start) >= o.Duration {
					return
				}
				batch := batches[n%int64(len(batches))]
				if errs[i] = p.link.Read(ctx, p.seals, batch); errs[i] != nil {
					return
				}
				bytes.Add(int64(len(batch)) * size)
			}
		})
	}
	work.Wait()
	elapsed := time.Since(start)
	cpu := cpuSeconds() - before
	ownerAfter, err := p.owner.cpuSeconds()
	if err := errors.Join(append(errs, err)...); err != nil {
		return pulled{}, err
	}
	for _, batch := range batches {
		for _, c := range batch {
			if err := checkContent(p.memory.arena, c); err != nil {
				return pulled{}, err
			}
		}
	}
	return pulled{
		bytesPerSecond:   float64(bytes.Load()) / elapsed.Seconds(),
		cpuSecondsPerGiB: (cpu + ownerAfter - ownerBefore) / float64(bytes.Load()) * (1 << 30),
	}, nil
}

// scatter pairs every chunk of one arena with one of another, in no order.
func scatter(arenaBytes, size int64, r *rand.Rand) []transfer.Copy {
	n := int(arenaBytes / size)
	remote, local := r.Perm(n), r.Perm(n)
	copies := make([]transfer.Copy, n)
	for i := range copies {
		copies[i] = transfer.Copy{Rank: benchRank, Remote: int64(remote[i]) * size, Local: int64(local[i]) * size, Bytes: size}
	}
	return copies
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
			return fmt.Errorf("wrong byte: word at %d of the owner's arena landed at %d as %#x, want %#x", c.Remote+int64(at), c.Local+int64(at), have, want)
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
