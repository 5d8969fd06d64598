package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rdmaread"
)

// lanesTimeout is for the other lanes of a link that is open.
const lanesTimeout = 5 * time.Second

// puller is the reading side, with a link to the owner by each transport.
type puller struct {
	*side
	dir     *scratch // where peers of one host meet
	owner   *owner
	links   map[string]transfer.Link
	refused map[string]string // transports without a link, and why
	seals   []transfer.Seal
}

// newPuller starts the owner's process and opens the links. ctx ends the process.
func newPuller(ctx context.Context, o Options, with setup) (_ *puller, err error) {
	fmt.Fprintf(o.Progress, "starting the owner with an arena of %s\n", bytesText(with.ArenaBytes))
	p := &puller{links: make(map[string]transfer.Link), refused: make(map[string]string)}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	if p.dir, err = newScratch(); err != nil {
		return nil, err
	}
	with.Rendezvous = p.dir.path
	if p.owner, err = startOwner(ctx, o.Owner, with); err != nil {
		return nil, err
	}
	if p.side, err = newSide("bench-reader", with, with.readerDevices()); err != nil {
		return nil, err
	}
	offer := p.owner.offer
	p.seals = []transfer.Seal{{Index: offer.Seal, Value: offer.SealValue}}
	for _, name := range with.Transports {
		if why, ok := p.side.refused[name]; ok {
			p.refused[name] = why
			continue
		}
		if why, ok := offer.Refused[name]; ok {
			p.refused[name] = "the other process: " + why
			continue
		}
		link, err := p.transports[name].Open(ctx, transfer.Peer{
			Life: offer.Life, Descriptor: offer.Descriptors[name], ArenaBytes: map[id.Rank]int64{benchRank: offer.ArenaBytes},
		})
		switch {
		case err == nil:
			p.links[name] = link
		case errors.Is(err, transfer.ErrUnavailable):
			p.refused[name] = err.Error()
		default:
			return nil, err
		}
	}
	return p, nil
}

// rdmaLanes waits until all lanes are ready that rdma wants, a while, and returns
// how many are.
func (p *puller) rdmaLanes(ctx context.Context) (ready int, err error) {
	err = within(ctx, lanesTimeout, func() bool {
		wanted := 0
		ready = 0
		for _, path := range p.rdma().Paths() {
			if path.Peer == p.owner.offer.Life {
				ready, wanted = ready+path.Lanes, wanted+path.Wanted
			}
		}
		return wanted > 0 && ready == wanted
	})
	return ready, err
}

// crossings are the calls into C that reading by a transport has made so far.
func (p *puller) crossings(transport string) uint64 {
	if transport != rdmaread.Name {
		return 0
	}
	return p.rdma().Stats().Crossings
}

// measured are the transports that have a link, in the order of [Transports].
// What the others lack is noted as missing of what.
func (p *puller) measured(r *Report, what string) []string {
	var names []string
	for _, name := range Transports() {
		if _, ok := p.links[name]; ok {
			names = append(names, name)
		} else if why, asked := p.refused[name]; asked {
			r.Missing = append(r.Missing, fmt.Sprintf("%s by %s: %s", what, name, why))
		}
	}
	return names
}

// close ends the other process and leaves no file.
func (p *puller) close() error {
	for _, l := range p.links {
		_ = l.Close()
	}
	if p.side != nil {
		p.side.close()
	}
	if p.owner != nil {
		_ = p.owner.child.close() // measured already; its errors are on stderr
	}
	return p.dir.close()
}

// pulled is one run of one round.
type pulled struct {
	bytesPerSecond, cpuSecondsPerGiB float64
	crossings                        float64         // into C, a byte
	reads                            []time.Duration // each Read took
}

// pull makes the copies, each at least once, and again until the duration is over,
// a batch a Read and so many reads at once, and checks what has arrived, outside of
// the time.
func (p *puller) pull(ctx context.Context, transport string, batches [][]transfer.Copy, concurrency int, d time.Duration) (pulled, error) {
	link := p.links[transport]
	ownerBefore, err := p.owner.cpuSeconds()
	if err != nil {
		return pulled{}, err
	}
	type reader struct {
		took []time.Duration
		err  error
	}
	readers := make([]reader, concurrency)
	before, crossed := cpuSeconds(), p.crossings(transport)
	start := time.Now()
	var next, bytes atomic.Int64
	var work sync.WaitGroup
	for i := range readers {
		work.Go(func() {
			for r := &readers[i]; ; {
				n, begin := next.Add(1)-1, time.Now()
				// Every chunk at least once, whole arenas or not.
				if n >= int64(len(batches)) && begin.Sub(start) >= d {
					return
				}
				batch := batches[n%int64(len(batches))]
				if r.err = link.Read(ctx, p.seals, batch); r.err != nil {
					return
				}
				r.took = append(r.took, time.Since(begin))
				bytes.Add(transfer.Bytes(batch))
			}
		})
	}
	work.Wait()
	elapsed := time.Since(start)
	cpu := cpuSeconds() - before
	ownerAfter, err := p.owner.cpuSeconds()
	run := pulled{
		bytesPerSecond:   float64(bytes.Load()) / elapsed.Seconds(),
		cpuSecondsPerGiB: (cpu + ownerAfter - ownerBefore) / float64(bytes.Load()) * (1 << 30),
		crossings:        float64(p.crossings(transport)-crossed) / float64(bytes.Load()),
	}
	for _, r := range readers {
		err = errors.Join(err, r.err)
		run.reads = append(run.reads, r.took...)
	}
	if err != nil {
		return pulled{}, err
	}
	for c := range slices.Values(slices.Concat(batches...)) {
		if err := checkContent(p.arena, c); err != nil {
			return pulled{}, err
		}
	}
	return run, nil
}
