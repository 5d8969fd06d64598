package node

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/kv"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/transfer"
)

// cache is the KV of one local rank, wherever it lies. Host memory is read and
// written in place. Device memory is copied by its device, many stretches in a call:
// within the arena, to and from the host tier, and for all else through the node's
// pinned memory (readArenas, writeArenas).
type cache struct {
	node   *Node
	rank   id.Rank
	host   kv.Cache      // of host memory
	device memory.Stager // nil: host memory
}

// cacheOf is that of a local rank.
func (n *Node) cacheOf(r id.Rank) (cache, error) {
	c := cache{node: n, rank: r}
	a := n.arenas[r]
	if a == nil {
		return c, fmt.Errorf("rank %d is not local, %v are: %w", r, n.ranks, id.ErrInvalid)
	}
	bytes, ok := transfer.InHost(a)
	if ok {
		var err error
		c.host, err = kv.NewCache(n.geometry.Layout, bytes)
		return c, err
	}
	if c.device, ok = a.(memory.Stager); !ok {
		return c, fmt.Errorf("rank %d is in memory of kind %T, which nothing here can copy: %w", r, a, id.ErrInvalid)
	}
	return c, nil
}

// write is [kv.Cache.Write]; no slot may be named twice.
func (c cache) write(ctx context.Context, layer int, at []page.Slot, k, v []byte, from page.DType) error {
	if c.device == nil {
		return c.host.Write(layer, at, k, v, from)
	}
	t, cells, err := c.tokens(layer, at, from)
	if err != nil {
		return fmt.Errorf("write: %w", err)
	}
	if want := len(at) * t.row; len(k) < want || len(v) < want {
		return fmt.Errorf("write %d tokens of %v: k has %d bytes and v %d, want %d of each: %w", len(at), from, len(k), len(v), want, kv.ErrInvalid)
	}
	return c.node.writeArenas(ctx, cells, func(at int64, b []byte) error {
		return t.each(at, b, func(isV bool, first, last int64, part []byte) error {
			tokens := k
			if isV {
				tokens = v
			}
			return kv.Convert(part, t.inside, tokens[first:last], t.outside)
		})
	})
}

// read is [kv.Cache.Read].
func (c cache) read(ctx context.Context, layer int, at []page.Slot, as page.DType) (k, v []byte, err error) {
	if c.device == nil {
		return c.host.Read(layer, at, as)
	}
	t, cells, err := c.tokens(layer, at, as)
	if err != nil {
		return nil, nil, fmt.Errorf("read: %w", err)
	}
	k, v = make([]byte, len(at)*t.row), make([]byte, len(at)*t.row)
	err = c.node.readArenas(ctx, cells, func(at int64, b []byte) error {
		return t.each(at, b, func(isV bool, first, last int64, part []byte) error {
			tokens := k
			if isV {
				tokens = v
			}
			return kv.Convert(tokens[first:last], t.outside, part, t.inside)
		})
	})
	if err != nil {
		return nil, nil, err
	}
	return k, v, nil
}

// tokens are K and V of tokens as a caller has them, and as they lie behind one
// another in pinned memory: K of all, then V of all.
type tokens struct {
	inside, outside page.DType
	dense           int64 // bytes of K, or of V, of all of them in pinned memory
	row             int   // bytes of K, or of V, of one of them outside
}

// tokens finds where those at the slots lie in the arena.
func (c cache) tokens(layer int, at []page.Slot, outside page.DType) (tokens, []transfer.Copy, error) {
	l := c.node.geometry.Layout
	if outside.Bytes() == 0 {
		return tokens{}, nil, fmt.Errorf("%v is unknown: %w", outside, kv.ErrInvalid)
	}
	cells, err := kv.Cells(nil, l, layer, at)
	if err != nil {
		return tokens{}, nil, err
	}
	elements := l.Heads * l.HeadDim
	t := tokens{
		inside: l.DType, outside: outside,
		dense: int64(len(at)*elements) * l.DType.Bytes(), row: elements * int(outside.Bytes()),
	}
	copies := make([]transfer.Copy, len(cells))
	for i, m := range cells {
		copies[i] = transfer.Copy{Rank: c.rank, Local: m.To, Bytes: m.Bytes}
	}
	return t, copies, nil
}

// each calls do with the parts of b, which lies at an offset of pinned memory, and
// the stretch of K, or of V, that is each outside.
func (t tokens) each(at int64, b []byte, do func(isV bool, first, last int64, part []byte) error) error {
	for len(b) > 0 {
		isV, from, end := at >= t.dense, at, t.dense
		if isV {
			from, end = at-t.dense, 2*t.dense
		}
		part := b[:min(int64(len(b)), end-at)]
		first := from / t.inside.Bytes() * t.outside.Bytes()
		last := (from + int64(len(part))) / t.inside.Bytes() * t.outside.Bytes()
		if err := do(isV, first, last, part); err != nil {
			return err
		}
		at, b = at+int64(len(part)), b[len(part):]
	}
	return nil
}

// copyWithin makes the copies of a step's forks in the arena of a local rank, in
// their order. It returns when they are made.
func (n *Node) copyWithin(r id.Rank, copies []manager.Copy) error {
	c, err := n.cacheOf(r)
	if err != nil {
		return err
	}
	named := func(f manager.Copy, err error) error {
		return fmt.Errorf("fork of %q from %q to %q: %w", f.Request, f.From, f.To, err)
	}
	if c.device == nil {
		for _, f := range copies {
			if err := kv.Copy(c.host, f.Target, c.host, f.Source, f.Tokens); err != nil {
				return named(f, err)
			}
		}
		return nil
	}
	// A device makes the moves of one call in any order, and those of the next call
	// after it: a fork of pages that an earlier one writes, or onto pages that one
	// reads, begins another call. Source and target of one fork are two streams.
	var all tickets
	var segments []memory.Segment
	touched, l := make(map[page.Index]bool), n.geometry.Layout // true: written
	for _, f := range copies {
		moves, err := kv.Moves(nil, l, f.Target, l, f.Source, f.Tokens)
		if err != nil {
			return all.end(named(f, err))
		}
		if slices.ContainsFunc(f.Source, func(p page.Index) bool { return touched[p] }) ||
			slices.ContainsFunc(f.Target, func(p page.Index) bool { _, is := touched[p]; return is }) {
			all = append(all, c.device.Move(segments))
			segments = nil // lent
			clear(touched)
		}
		for _, p := range f.Source {
			touched[p] = false
		}
		for _, p := range f.Target {
			touched[p] = true
		}
		segments = appendSegments(segments, moves, true)
	}
	if len(segments) > 0 {
		all = append(all, c.device.Move(segments))
	}
	return copied("forks", all.end(nil))
}

// appendSegments says moves as a device takes them, into the arena or out of it.
func appendSegments(list []memory.Segment, moves []kv.Move, into bool) []memory.Segment {
	list = slices.Grow(list, len(moves))
	for _, m := range moves {
		s := memory.Segment{Arena: m.From, Other: m.To, Bytes: m.Bytes}
		if into {
			s.Arena, s.Other = m.To, m.From
		}
		list = append(list, s)
	}
	return list
}

// tickets are what devices have been given to copy.
type tickets []memory.Ticket

// end waits for all of it. The first error stands, err before those of the work.
func (w tickets) end(err error) error {
	for _, t := range w {
		if e := t.Wait(); err == nil {
			err = e
		}
	}
	return err
}

// sums are the checksums of spots, in their order.
func (n *Node) sums(ctx context.Context, list []spot) ([]uint32, error) {
	out := make([]uint32, len(list))
	if transfer.Staged(n.arenas) {
		return out, n.deviceSums(ctx, list, out)
	}
	var c cache
	for i, at := range list {
		var err error
		if i == 0 || c.rank != at.rank {
			c, err = n.cacheOf(at.rank)
		}
		if err == nil {
			out[i], err = c.host.Sum(at.page, at.slots)
		}
		if err != nil {
			return nil, fmt.Errorf("checksum of page %d of rank %d: %w", at.page, at.rank, err)
		}
	}
	return out, nil
}

// summedAtOnce bounds what is planned of a list of spots.
const summedAtOnce = 512

// deviceSums goes by layers, in which neighbouring pages are one stretch.
func (n *Node) deviceSums(ctx context.Context, list []spot, out []uint32) error {
	order := make([]int, len(list))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(list[a].rank, list[b].rank) })
	var moves []kv.Move
	var copies []transfer.Copy
	var of []int // the spot of each
	for some := range slices.Chunk(order, summedAtOnce) {
		copies, of = copies[:0], of[:0]
		for layer := range n.geometry.Layout.Layers {
			for _, i := range some {
				at := list[i]
				var err error
				if moves, err = kv.Summed(moves[:0], n.geometry.Layout, layer, at.page, at.slots, 0); err != nil {
					return fmt.Errorf("checksum of page %d of rank %d: %w", at.page, at.rank, err)
				}
				for _, m := range moves {
					copies, of = append(copies, transfer.Copy{Rank: at.rank, Local: m.From, Bytes: m.Bytes}), append(of, i)
				}
			}
		}
		next, left := 0, copies[0].Bytes // of copies: what comes next, and how much of it
		err := n.readArenas(ctx, copies, func(_ int64, b []byte) error {
			for len(b) > 0 {
				part := b[:min(int64(len(b)), left)]
				out[of[next]] = kv.AddSum(out[of[next]], part)
				b, left = b[len(part):], left-int64(len(part))
				if left == 0 && next+1 < len(copies) {
					next++
					left = copies[next].Bytes
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// pinned is a buffer of the node's pool, and what is copied to or from it.
type pinned struct {
	buf     []byte
	copies  []transfer.Copy
	bytes   int64
	staging transfer.Staging
}

// readArenas brings what copies name of the local arenas (Local) into pinned memory,
// in pieces, one behind the other. It shows them to use in order, each with its
// offset in the whole, and lent: the next one is copied meanwhile.
func (n *Node) readArenas(ctx context.Context, copies []transfer.Copy, use func(at int64, b []byte) error) error {
	two, release, err := n.buffers(ctx)
	if err != nil {
		return err
	}
	defer release()
	cutter, more := transfer.Cut(copies, int64(n.staging.Size()), transfer.StagedCopies), len(copies) > 0
	var at int64
	for started, used := 0, 0; more || used < started; {
		if more && started-used < len(two) {
			p := &two[started%len(two)]
			p.copies, more = cutter.Next(p.copies[:0])
			p.bytes = transfer.Bytes(p.copies)
			p.staging.Gather(p.buf, n.arenas, transfer.Reader, p.copies)
			started++
			continue
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		p := &two[used%len(two)]
		if err := p.staging.Wait(); err != nil {
			return copied("read the arena", err)
		}
		if err := use(at, p.buf[:p.bytes]); err != nil {
			return err
		}
		at += p.bytes
		used++
	}
	return nil
}

// writeArenas is readArenas the other way round: what fill puts into each piece goes into
// the arenas. It returns when all of it is there. After an error any part may be.
func (n *Node) writeArenas(ctx context.Context, copies []transfer.Copy, fill func(at int64, b []byte) error) error {
	two, release, err := n.buffers(ctx)
	if err != nil {
		return err
	}
	defer release()
	cutter, more := transfer.Cut(copies, int64(n.staging.Size()), transfer.StagedCopies), len(copies) > 0
	var at int64
	for i := 0; more; i++ {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		p := &two[i%len(two)]
		if err := p.staging.Wait(); err != nil { // of what was in it before
			return copied("write the arena", err)
		}
		p.copies, more = cutter.Next(p.copies[:0])
		p.bytes = transfer.Bytes(p.copies)
		if err := fill(at, p.buf[:p.bytes]); err != nil {
			return err
		}
		p.staging.Scatter(n.arenas, transfer.Reader, p.copies, p.buf)
		at += p.bytes
	}
	for i := range two {
		if err := two[i].staging.Wait(); err != nil {
			return copied("write the arena", err)
		}
	}
	return nil
}

// buffers takes two buffers of the pool, or one if there is no other now. Release
// gives them back when nothing is copied any more.
func (n *Node) buffers(ctx context.Context) (two []pinned, release func(), err error) {
	b, err := n.staging.Get(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("wait for memory to copy through: %w", err)
	}
	two = append(two, pinned{buf: b})
	if b, ok := n.staging.TryGet(); ok {
		two = append(two, pinned{buf: b})
	}
	return two, func() {
		for i := range two {
			_ = two[i].staging.Wait() // whoever needs to know has waited
			n.staging.Put(two[i].buf)
		}
	}, nil
}
