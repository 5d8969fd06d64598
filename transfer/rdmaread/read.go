package rdmaread

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer"
)

// A window is what a lane has at once: as much as takes it about windowTime, so
// that others get their turn and a lane that fails loses little, within bounds.
const (
	windowTime   = 100 * time.Millisecond
	leastWindow  = 128 << 10
	firstWindow  = 2 << 20 // while it is not known how fast the lane is
	mostWindow   = 8 << 20
	windowCopies = 2048

	// placeTime is how long a window keeps its place on a port, which a peer that
	// answers nothing would keep from others for all its retries.
	placeTime = windowTime / 2

	spin = 20 * time.Microsecond // before a lane's goroutine sleeps
)

// Read is [transfer.Link.Read].
func (l *link) Read(ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
	started := time.Now()
	p := pull{l: l, copies: copies, served: started}
	err := p.read(ctx, seals)
	l.t.count(p.done, err)
	if err == nil {
		return nil
	}
	return &transfer.Error{
		Transport: Name, Peer: l.peer.Life, Address: l.at(err),
		Done: p.done, Total: p.total, Took: time.Since(started), Err: err,
	}
}

func (t *Transport) count(done int64, err error) {
	t.stats.readBytes.Add(uint64(done))
	switch {
	case err == nil:
		t.stats.reads.Add(1)
	case errors.Is(err, transfer.ErrStale):
		t.stats.stale.Add(1)
	default:
		t.stats.errors.Add(1)
	}
}

// at is the lane that an error names, or the one that was ready last.
func (l *link) at(err error) string {
	if f, ok := errors.AsType[*LaneError](err); ok {
		return fmt.Sprintf("%s %s -> %s", f.Device, f.From.Unmap(), f.To.Unmap())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.address
}

// pull is one read.
type pull struct {
	l     *link
	total int64

	served time.Time // when it was given a lane last, or has begun; guarded by the mutex of the link

	mu       sync.Mutex
	copies   []transfer.Copy // that nobody has taken yet
	index    int             // of the first of them
	cut      int64           // bytes of it that somebody has
	back     []part          // that lanes have given back
	left     int64           // bytes that nobody has: of copies and back
	done     int64           // bytes that have landed
	workers  int             // goroutines that work
	hands    int             // goroutines at first
	began    bool            // a window has been taken
	progress time.Time       // when something has landed last
	failures int             // of lanes
	fault    *LaneError      // the first of them
	kept     borrowed        // for the seal words: the lane that has landed the last byte
	posting  []borrowed      // lanes that read for this read
	ended    bool            // its context has ended, and those lanes are broken
	err      error           // what ends the read
	stop     context.CancelFunc
}

// part is what a lane has not landed of a window: copies that follow each other.
type part struct {
	copies []transfer.Copy
	index  int // of the first
}

// window is the work of a lane for one turn, with room that is used again.
type window struct {
	part
	ops   []rdma.Op
	way   way   // of all its copies
	stage stage // where that is not direct

	place atomic.Pointer[port] // where it has one
	timer *time.Timer          // ends that
}

func newWindow() any {
	w := new(window)
	w.timer = time.AfterFunc(placeTime, w.leave)
	return w
}

// enter takes a place on the port of a path, and reports false if waiting has
// ended before. A path that has failed and carried nothing since needs none.
func (l *link) enter(waiting context.Context, w *window, p *path) bool {
	l.mu.Lock()
	failed := p.rest > 0
	l.mu.Unlock()
	if failed {
		return true
	}
	select {
	case p.port.windows <- struct{}{}:
	default:
		select {
		case p.port.windows <- struct{}{}:
		case <-waiting.Done():
			return false
		}
	}
	w.place.Store(p.port)
	w.timer.Reset(placeTime)
	return true
}

// leave gives the place back, if it has not been. The timer may end a later place
// than that which it was set for; that is a little early, and no harm.
func (w *window) leave() {
	if p := w.place.Swap(nil); p != nil {
		<-p.windows
	}
}

func (p *pull) read(ctx context.Context, seals []transfer.Seal) (err error) {
	l := p.l
	if err := l.begin(); err != nil {
		p.total = max(0, transfer.Bytes(p.copies))
		return err
	}
	defer l.reads.Done()
	if p.total, err = transfer.Check(seals, p.copies, l.sizes); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return transfer.Reason(ctx)
	}
	ctx, end := l.bound(ctx, l.t.o.Limits.Total(p.total))
	defer end()
	// One for all windows, and so that none of them allocates.
	ending := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { p.abort(ctx); close(ending) })
	defer func() {
		if !stop() {
			<-ending
		}
	}()
	p.left = p.total
	copies := p.copies // which work takes
	if p.total > 0 {
		p.work(ctx)
	}
	if p.err == nil {
		p.err = l.t.flush(copies)
	}
	if p.err != nil {
		if p.kept.lane != nil {
			l.giveBack(p.kept)
		}
		return p.err
	}
	// Every lane has returned, and every byte has landed.
	return p.held(ctx, seals)
}

// bound gives the context of a read: it ends with the link and with the total
// time too.
func (l *link) bound(ctx context.Context, total time.Duration) (context.Context, func()) {
	ctx, release := context.WithTimeoutCause(ctx, total, transfer.ErrTotal)
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(l.ctx, func() { cancel(context.Cause(l.ctx)) })
	return ctx, func() {
		stop()
		cancel(nil)
		release()
	}
}

// work moves all copies by as many lanes as there is work for, and returns when
// every one has returned.
func (p *pull) work(ctx context.Context) {
	waiting, stop := context.WithCancel(ctx)
	defer stop()
	p.stop = stop
	p.hands = p.l.hands(p.total, len(p.copies))
	p.workers = p.hands
	var work sync.WaitGroup
	for range p.hands - 1 {
		work.Go(func() { p.hand(ctx, waiting) })
	}
	p.hand(ctx, waiting)
	work.Wait()
	if p.err == nil && p.done != p.total { // our own bug
		p.err = fmt.Errorf("%d of %d bytes have landed, and nobody moves the rest", p.done, p.total)
	}
}

// hands is how many lanes are worth their while: those of paths that do not rest.
func (l *link) hands(total int64, copies int) int {
	worth := max((total+leastWindow-1)/leastWindow, int64((copies+windowCopies-1)/windowCopies))
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	lanes := 0
	for _, n := range l.lanes {
		if n.state != laneResting && !now.Before(n.path.until) {
			lanes++
		}
	}
	if lanes == 0 {
		lanes = len(l.lanes)
	}
	return int(min(worth, int64(lanes)))
}

// hand moves windows until there are none for it. It waits only while waiting
// has not ended: others may have done everything.
func (p *pull) hand(ctx, waiting context.Context) {
	w, _ := p.l.t.windows.Get().(*window)
	defer p.l.t.windows.Put(w)
	defer func() { p.failed(w.stage.end()) }()
	for more := true; more; {
		b, err := p.l.acquire(waiting, p)
		if err == nil && b.lane.path.port.d.staged && !w.stage.tryBegin(p.l.t.landing) {
			p.l.giveBack(b) // who waits for a buffer has no lane
			if err = w.stage.begin(waiting, p.l.t.landing); err == nil {
				continue
			}
		}
		if err != nil {
			p.unserved(ctx, err)
			return
		}
		more = p.turn(ctx, waiting, b, w)
	}
}

// turn moves one window by a lane, gives the lane back, and reports whether
// there may be more to do.
func (p *pull) turn(ctx, waiting context.Context, b borrowed, w *window) (more bool) {
	l := p.l
	if !l.enter(waiting, w, b.lane.path) {
		l.giveBack(b)
		p.unserved(ctx, transfer.Reason(waiting))
		return false
	}
	more, kept := p.move(ctx, b, w)
	w.timer.Stop()
	w.leave()
	if !kept {
		l.giveBack(b)
	}
	return more
}

// move lets a lane read a window, and returns when nothing of it can land any
// more. It reports whether there may be more to do, and whether the lane is kept.
func (p *pull) move(ctx context.Context, b borrowed, w *window) (more, kept bool) {
	l := p.l
	if ctx.Err() != nil { // the lane need not break
		p.unserved(ctx, ctx.Err())
		return false, false
	}
	if !p.take(w, l.rates(b.lane), b.queue.ways) {
		return false, false
	}
	started := time.Now()
	var landed int64
	var lost, err error
	if w.way == direct {
		w.fill(&b.lane.path.port.d.local, &b.queue.remote.arenas)
		var st rdma.Stats
		st, lost = p.post(ctx, b, w.ops, false)
		landed = w.landed(st.Done)
	} else {
		landed, lost, err = p.relay(ctx, b, w)
	}
	switch {
	case lost != nil:
		return p.lost(ctx, l.failed(ctx, b, lost), landed, w.rest(landed)), false
	case err != nil:
		p.failed(err)
		p.note(b, landed)
		return false, false
	default:
		l.landed(b.lane, landed, time.Since(started))
		return p.note(b, landed)
	}
}

// failed ends the read by something that is not a lane's fault, if it has failed.
func (p *pull) failed(err error) {
	if err == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endLocked(err)
}

// post lets a lane read, and returns when nothing of it can land any more. The
// end of ctx breaks the lane.
func (p *pull) post(ctx context.Context, b borrowed, ops []rdma.Op, single bool) (rdma.Stats, error) {
	p.mu.Lock()
	if p.ended {
		p.mu.Unlock()
		return rdma.Stats{}, context.Cause(ctx)
	}
	p.posting = append(p.posting, b)
	p.mu.Unlock()
	st, err := b.queue.qp.Read(context.Background(), ops, rdma.ReadOptions{Spin: spin, Stall: p.l.t.o.Limits.Stall, Single: single})
	p.l.t.stats.crossings.Add(uint64(st.Calls))
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.posting, b)
	p.posting = slices.Delete(p.posting, i, i+1)
	return st, err
}

// abort breaks the lanes that read, since ctx has ended. A lane that has just
// ended its window is not given to anybody else, as it is marked before.
func (p *pull) abort(ctx context.Context) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	for _, b := range p.posting {
		p.l.breakQueue(b.lane, b.queue, context.Cause(ctx))
	}
}

// failed sees to a lane that has failed: when it returns nothing can land
// through it any more.
func (l *link) failed(ctx context.Context, b borrowed, err error) *LaneError {
	if errors.Is(err, rdma.ErrDrain) {
		l.t.destroy(b.queue.qp, l.peer.Life)
	}
	f := &LaneError{
		Device: b.lane.path.port.name(), Port: b.lane.path.port.number, From: b.queue.from, To: b.queue.to, Remote: b.lane.path.name,
		Peer: l.peer.Life, Err: stalled(err),
	}
	if c, ok := errors.AsType[*rdma.CompletionError](err); ok {
		f.Status = c.Status.String()
	}
	if why := l.whyBroken(b.queue); why != nil {
		f.Err = why // what the queue pair says is that somebody broke it
	} else if ctx.Err() == nil && !final(err) {
		l.fault(b.lane, f)
	}
	l.breakQueue(b.lane, b.queue, f.Err)
	return f
}

// rates are bytes a second of a lane, of the fastest that works, and of all that
// work; 0 if they are not known.
type rates struct {
	lane, best, all float64
	even            bool // they are of one path
}

func (l *link) rates(n *lane) (r rates) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r.lane, r.even = n.path.rate, true
	for _, other := range l.lanes {
		if other.state == laneIdle || other.state == laneBusy {
			r.best = max(r.best, other.path.rate)
			r.all += other.path.rate
			r.even = r.even && other.path == n.path
		}
	}
	return r
}

// take cuts the next window for a lane into w. Lanes of one path are as fast as
// each other, and get equal windows, the same number each. Of several paths, each
// takes half of its share of what is left, so that all end at about the same
// time, however wrong the rates are. A lane gets nothing that a faster one will
// have done sooner.
func (p *pull) take(w *window, r rates, ways *[id.MaxRanks]way) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left == 0 || p.err != nil {
		p.workers--
		return false
	}
	room := int64(firstWindow)
	if r.lane > 0 {
		room = min(max(int64(r.lane*windowTime.Seconds()), leastWindow), mostWindow)
	}
	if r.even {
		hands := int64(p.hands)
		rounds := (p.total-1)/(hands*room) + 1
		room = (p.total-1)/(hands*rounds) + 1
	} else if p.workers > 1 {
		share := float64(p.left) / float64(p.workers)
		if r.lane > 0 {
			share = float64(p.left) * r.lane / max(r.all, r.lane)
		}
		room = min(room, max(int64(share/2), leastWindow))
	}
	room = min(room, p.left)
	if p.workers > 1 && r.lane > 0 && float64(room)*r.best > 2*float64(p.left)*r.lane {
		p.workers--
		return false
	}
	if !p.began {
		p.began, p.progress = true, time.Now()
	}
	if n := len(p.back); n > 0 {
		w.set(p.back[n-1])
		p.back = p.back[:n-1]
		p.left -= transfer.Bytes(w.copies)
		p.sortOut(w, ways)
		return true
	}
	w.copies, w.index = w.copies[:0], p.index
	for room > 0 && len(p.copies) > 0 && len(w.copies) < windowCopies {
		c := p.copies[0]
		c.Remote += p.cut
		c.Local += p.cut
		c.Bytes -= p.cut
		if c.Bytes > room && c.Bytes > leastWindow { // pages stay whole
			c.Bytes = room
			p.cut += room
		} else {
			p.copies, p.cut = p.copies[1:], 0
			p.index++
		}
		room -= c.Bytes
		p.left -= c.Bytes
		w.copies = append(w.copies, c)
	}
	p.sortOut(w, ways)
	return true
}

// sortOut gives back what of a window does not go the way of its first copy.
func (p *pull) sortOut(w *window, ways *[id.MaxRanks]way) {
	w.way = direct
	if ways == nil {
		return
	}
	w.way = ways[w.copies[0].Rank]
	for i := range w.copies {
		if ways[w.copies[i].Rank] != w.way {
			p.back = append(p.back, part{slices.Clone(w.copies[i:]), w.index + i})
			p.left += transfer.Bytes(w.copies[i:])
			w.copies = w.copies[:i]
			return
		}
	}
}

// set copies a part, whose room is not the window's.
func (w *window) set(from part) {
	w.copies, w.index = append(w.copies[:0], from.copies...), from.index
}

// fill makes the ops of a window's copies, which have been checked: one each,
// but for those that cross the border of a slice on either side.
func (w *window) fill(here, there *[id.MaxRanks]region) {
	ops := w.ops[:0]
	for i := range w.copies {
		c := &w.copies[i]
		from, to := &there[c.Rank], &here[c.Rank]
		remote, local, n := uint64(c.Remote), uint64(c.Local), uint64(c.Bytes)
		rkey, rroom := from.at(remote)
		lkey, lroom := to.at(local)
		if n > rroom || n > lroom {
			ops = stretch(ops, from, remote, to, local, n)
			continue
		}
		ops = append(ops, rdma.Op{Local: to.addr + local, Remote: from.addr + remote, Len: uint32(n), LKey: lkey, RKey: rkey})
	}
	w.ops = ops
}

// at is the key of the slice that an offset is in, and the bytes up to its end.
func (r *region) at(offset uint64) (key uint32, room uint64) {
	if len(r.keys) == 1 {
		return r.keys[0], r.bytes - offset
	}
	i := offset / r.slice
	return r.keys[i], (i+1)*r.slice - offset
}

// landed is the bytes of the first n ops.
func (w *window) landed(n int) (bytes int64) {
	for i := range w.ops[:n] {
		bytes += int64(w.ops[i].Len)
	}
	return bytes
}

// rest is what is left of a window behind its first bytes.
func (w *window) rest(landed int64) part {
	copies, index := w.copies, w.index
	for len(copies) > 0 && copies[0].Bytes <= landed {
		landed -= copies[0].Bytes
		copies = copies[1:]
		index++
	}
	copies = slices.Clone(copies)
	if len(copies) > 0 {
		copies[0].Remote += landed
		copies[0].Local += landed
		copies[0].Bytes -= landed
	}
	return part{copies, index}
}

// note counts bytes that a lane has landed, and reports whether there may be more
// to do. The lane that has landed the last is kept for the seal words.
func (p *pull) note(b borrowed, landed int64) (more, kept bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.noteLocked(landed)
	if more = p.left > 0 && p.err == nil; !more {
		p.workers--
	}
	if kept = p.done == p.total; kept {
		p.kept = b
	}
	return more, kept
}

// noteLocked counts bytes. Nobody waits for a lane any more when they are all.
func (p *pull) noteLocked(landed int64) {
	if landed > 0 {
		p.done += landed
		p.progress = time.Now()
	}
	if p.done == p.total {
		p.stop()
	}
}

// lost takes what a lane has failed by, and what it has not landed, which is to
// be moved by another. It ends the read if that makes no sense.
func (p *pull) lost(ctx context.Context, f *LaneError, landed int64, rest part) (more bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.noteLocked(landed)
	f.Copy, f.Done = rest.index, p.done
	if err := p.hopeless(ctx, f); err != nil {
		p.endLocked(err)
		return false
	}
	p.l.t.stats.failovers.Add(1)
	if len(rest.copies) > 0 {
		p.back = append(p.back, rest)
		p.left += transfer.Bytes(rest.copies)
	}
	return true
}

// hopeless counts the failure of a lane, and says what the read ends with, nil
// if it goes on.
func (p *pull) hopeless(ctx context.Context, f *LaneError) error {
	p.failures++
	if p.fault == nil {
		p.fault = f
	}
	switch {
	case p.l.ctx.Err() != nil:
		return context.Cause(p.l.ctx)
	case ctx.Err() != nil:
		return transfer.Reason(ctx)
	case final(f.Err):
		return f
	case p.failures > 2*len(p.l.lanes)+2, time.Since(p.progress) >= p.l.t.o.Limits.Stall:
		return p.fault
	}
	return nil
}

// endLocked ends the read; the first reason counts. Windows that are under way
// are waited for.
func (p *pull) endLocked(err error) {
	if p.err == nil {
		p.err = err
	}
	p.stop()
}

// unserved ends a read that gets no lane, unless it has ended already.
func (p *pull) unserved(ctx context.Context, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done != p.total {
		p.endLocked(p.reason(ctx, err))
	}
}

// reason is the error of a read that gets no lane.
func (p *pull) reason(ctx context.Context, err error) error {
	switch {
	case p.l.ctx.Err() != nil:
		return context.Cause(p.l.ctx)
	case ctx.Err() != nil:
		return transfer.Reason(ctx)
	case p.fault != nil && p.fault.says(err):
		return p.fault
	case p.fault != nil:
		return fmt.Errorf("%w; then there was no lane left: %v", p.fault, err) //nolint:errorlint // the first cause counts
	default:
		return err
	}
}

// held reads the seal words anew, and compares. Everything has landed before.
func (p *pull) held(ctx context.Context, seals []transfer.Seal) error {
	var room [sealsAtOnce]rdma.Op
	p.progress = time.Now()
	for len(seals) > 0 {
		some := seals[:min(len(seals), sealsAtOnce)]
		b := p.kept
		p.kept = borrowed{}
		if b.lane == nil {
			var err error
			if b, err = p.l.acquire(ctx, p); err != nil {
				return p.reason(ctx, err)
			}
		}
		if ctx.Err() != nil {
			p.l.giveBack(b)
			return p.reason(ctx, ctx.Err())
		}
		held, fault := p.look(ctx, b, some, room[:0])
		p.l.giveBack(b)
		switch {
		case fault != nil:
			fault.Copy, fault.Done = -1, p.done
			if err := p.hopeless(ctx, fault); err != nil {
				return err
			}
			p.l.t.stats.failovers.Add(1)
		case !held:
			return transfer.ErrStale
		default:
			seals = seals[len(some):]
		}
	}
	return nil
}

// look reads seal words by one lane into its scratch, each by a read of its own.
func (p *pull) look(ctx context.Context, b borrowed, seals []transfer.Seal, ops []rdma.Op) (held bool, fault *LaneError) {
	table := &b.queue.remote.seals
	for i, s := range seals {
		word := word(b.lane.scratch, i)
		atomic.StoreUint64(word, ^s.Value) // what an earlier read left there proves nothing
		offset := uint64(s.Index) * 8
		key, _ := table.at(offset)
		ops = append(ops, rdma.Op{Local: uint64(uintptr(unsafe.Pointer(word))), Remote: table.addr + offset, Len: 8, LKey: b.lane.path.key, RKey: key})
	}
	if _, err := p.post(ctx, b, ops, true); err != nil {
		return false, p.l.failed(ctx, b, err)
	}
	for i, s := range seals {
		// Nothing is held by a value of 0: that is what a free word holds.
		if s.Value == 0 || atomic.LoadUint64(word(b.lane.scratch, i)) != s.Value {
			return false, nil
		}
	}
	return true, nil
}

// word is the place of the i-th seal word in a lane's scratch.
func word(scratch []byte, i int) *uint64 {
	return (*uint64)(unsafe.Pointer(&scratch[i*sealStride]))
}
