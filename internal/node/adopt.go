package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
)

// ErrUnlent is wrapped by Err of a node that gave itself up because the engine
// that lent its arena has ended, or wants it back.
var ErrUnlent = errors.New("the engine that lent the arena is gone, or has taken it back: this life has nothing to offer any more; start the agent again, it waits for the engine")

// ErrUnadopted is wrapped where a start was called off before an engine has
// brought its memory.
var ErrUnadopted = errors.New("no engine has brought its memory")

// errNothing: a connection ended before anything was said.
var errNothing = errors.New("nothing was said")

// errUnfit: an engine's memory is not what this node can use.
var errUnfit = errors.New("memory does not fit")

// Bounds of what an engine says when it brings its memory.
const (
	lendTime     = 10 * time.Second // for all of it
	replyTime    = 5 * time.Second
	maxLendFiles = cuda.MaxChunks // descriptors of one arena
)

// adoption is the memory of an engine, from the moment that it was brought. It
// lasts as long as the connection stands.
//
//	engine gone:  the words are cleared → the node ends, and closes what it has mapped
//	node gone:    the connection ends → the engine clears the words, and brings all to the next life
type adoption struct {
	node *Node
	conn *net.UnixConn
	work sync.WaitGroup

	mu    sync.Mutex
	seals *memory.SealTable // nil: closed
}

// adoptArenas waits until an engine has brought the arena of every local rank and
// the seal table. It answers the engine when the node serves.
func (n *Node) adoptArenas(ctx context.Context) error {
	path := n.config.Node.Socket + kvferrypb.ArenaSuffix
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("make the folder of node.socket: %w", err)
	}
	l, err := listenUnix(ctx, path)
	if err != nil {
		return err
	}
	defer l.Close()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	n.log.Info("waits for an engine to bring its memory", "socket", path, "ranks", n.config.Arena.Ranks, "bytes", n.geometry.Layout.Bytes())
	for {
		c, err := l.AcceptUnix()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = c.Close()
			}
			return fmt.Errorf("wait at %s: %w: %w", path, ErrUnadopted, context.Cause(ctx))
		case err != nil: // out of descriptors, for example
			sleep(ctx, 50*time.Millisecond)
			continue
		}
		if err = n.adopt(ctx, c); err == nil {
			n.log.Info("an engine lends its memory", "ranks", n.config.Arena.Ranks, "bytes", n.geometry.Layout.Bytes())
			return nil
		}
		if errors.Is(err, errNothing) { // who looks whether the socket is served
			_ = c.Close()
			continue
		}
		n.log.Warn("an engine's memory was not taken", "err", err)
		_ = replyLend(c, &kvferrypb.Lent{Refused: err.Error()}) // it may be gone
		_ = c.Close()
	}
}

// adopt takes what one engine brings, all or nothing.
func (n *Node) adopt(ctx context.Context, c *net.UnixConn) (err error) {
	if err := c.SetDeadline(time.Now().Add(lendTime)); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	if err := checkPeerUser(c); err != nil {
		n.metrics.authFailures.WithLabelValues("arena").Inc()
		return err
	}
	var lend kvferrypb.Lend
	if err := kvferrypb.ReadFrame(c, &lend); errors.Is(err, io.EOF) {
		return errNothing
	} else if err != nil {
		return fmt.Errorf("read what the engine lends: %w", err)
	}
	if err := n.fits(&lend); err != nil {
		return err
	}
	a := &adoption{node: n, conn: c}
	closers := []func() error{a.end}
	arenas := make(map[id.Rank]memory.Arena)
	var lent disjoint
	defer func() {
		if err == nil {
			return
		}
		for _, arena := range arenas {
			_ = arena.Close() // nothing of it was used
		}
	}()
	for _, m := range lend.GetArenas() {
		r := id.Rank(m.GetRank())
		files, err := receiveFiles(c, int(m.GetFiles()))
		if err != nil {
			return fmt.Errorf("rank %d: %w", r, err)
		}
		arena, err := n.take(m, files, &lent)
		if err != nil {
			return fmt.Errorf("rank %d: %w", r, err)
		}
		arenas[r] = arena
		closers = append(closers, arena.Close)
	}
	files, err := receiveFiles(c, 1)
	if err != nil {
		return fmt.Errorf("seal table: %w", err)
	}
	if err := lent.file(files[0]); err != nil {
		return errors.Join(fmt.Errorf("seal table: %w", err), files[0].Close())
	}
	seals, err := memory.MapSealTable(files[0], true)
	if err != nil {
		return fmt.Errorf("seal table: %w", err)
	}
	a.seals = seals
	// Before any page is handed out or written: a reader of an earlier life must
	// not take what comes for what that one has published.
	a.clear()
	seal := probeSeal(n.life)
	seals.Store(seal.Index, seal.Value)
	if err := c.SetDeadline(time.Time{}); err != nil {
		return errors.Join(err, a.close())
	}
	n.arenas, n.seals = arenas, seals
	n.closers = append(append(n.closers, closers...), a.close)
	if n.engineChooses() {
		n.begin = append(n.begin, func() { n.spawn(n.sessions.tellPages) })
	}
	n.begin = append(n.begin, a.welcome)
	a.work.Go(a.watch)
	return nil
}

// fits checks what is said of the memory.
func (n *Node) fits(lend *kvferrypb.Lend) error {
	if v := lend.GetVersion(); v != kvferrypb.LendVersion {
		return fmt.Errorf("%w: the engine speaks version %d of this exchange, the node %d: update the older one", errUnfit, v, kvferrypb.LendVersion)
	}
	seen := make(map[id.Rank]bool)
	inDevices, files := 0, 0
	for _, m := range lend.GetArenas() {
		r := id.Rank(m.GetRank())
		switch want := uint64(n.geometry.Layout.Bytes()); {
		case m.GetRank() >= id.MaxRanks || !slices.Contains(n.ranks, r):
			return fmt.Errorf("%w: the engine lends rank %d, the node has %v (arena.ranks)", errUnfit, m.GetRank(), n.ranks)
		case seen[r]:
			return fmt.Errorf("%w: the engine lends rank %d twice", errUnfit, r)
		case m.GetBytes() != want:
			return fmt.Errorf("%w: rank %d: the engine lends %d bytes, the node's arena has %d (%d pages of %d bytes)",
				errUnfit, r, m.GetBytes(), want, n.geometry.Layout.Pages, n.geometry.Layout.PageBytes())
		case len(m.GetCuda()) == 0 && m.GetFiles() != 1, m.GetFiles() > maxLendFiles:
			return fmt.Errorf("%w: rank %d comes with %d descriptors", errUnfit, r, m.GetFiles())
		}
		seen[r] = true
		if len(m.GetCuda()) > 0 {
			inDevices++
			files += int(m.GetFiles())
		}
	}
	if err := roomForFiles(files); err != nil {
		return fmt.Errorf("%w: %w", errUnfit, err)
	}
	switch {
	case len(seen) != len(n.ranks):
		return fmt.Errorf("%w: the engine lends %d ranks, the node has %v (arena.ranks)", errUnfit, len(seen), n.ranks)
	case inDevices != 0 && inDevices != len(seen):
		return fmt.Errorf("%w: %d of %d ranks are in memory of devices: all must be, or none", errUnfit, inDevices, len(seen))
	}
	return nil
}

// take maps or imports one arena, and takes its files over, also with an error.
func (n *Node) take(m *kvferrypb.Lend_Arena, files []*os.File, before *disjoint) (memory.Arena, error) {
	bytes := int64(m.GetBytes())
	if len(m.GetCuda()) == 0 {
		if err := before.file(files[0]); err != nil {
			return nil, errors.Join(err, closeFiles(files))
		}
		return memory.Map(files[0], bytes, true)
	}
	handle, err := cuda.ParseHandle(m.GetCuda())
	switch {
	case err != nil:
	case handle.Kind == cuda.Files && len(files) == 0:
		err = fmt.Errorf("%w: %s", errUnfit, kvferrypb.ShareRemedy)
	case handle.Bytes != bytes:
		err = fmt.Errorf("%w: %d bytes are lent, the handle is of %d", errUnfit, bytes, handle.Bytes)
	default:
		err = before.handle(handle)
	}
	if err != nil {
		return nil, errors.Join(err, closeFiles(files))
	}
	runtime, err := n.openCUDA()
	if err != nil {
		return nil, errors.Join(err, closeFiles(files))
	}
	arena, err := runtime.Import(handle, files)
	if err != nil {
		return nil, err
	}
	if arena.Size() < bytes {
		return nil, errors.Join(fmt.Errorf("%w: %d bytes are lent, %d could be imported", errUnfit, bytes, arena.Size()), arena.Close())
	}
	return arena, nil
}

func receiveFiles(c *net.UnixConn, count int) ([]*os.File, error) {
	var files []*os.File
	for range count {
		var b [1]byte
		_, f, err := memory.ReceiveFile(c, b[:])
		if err != nil {
			return nil, errors.Join(err, closeFiles(files))
		}
		files = append(files, f)
	}
	return files, nil
}

func closeFiles(files []*os.File) error {
	var errs []error
	for _, f := range files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// disjoint is memory that was lent, all of it different: what is written to one
// rank's must not be written to another's. Of chunks with a file each nobody here
// can tell whether two are the same memory: the engine, which has their addresses,
// does.
type disjoint struct {
	files   []os.FileInfo // of host memory
	handles []cuda.Handle // of a device's
}

var errSame = fmt.Errorf("%w: it is the same memory as another rank's", errUnfit)

// file adds host memory.
func (d *disjoint) file(f *os.File) error {
	st, err := f.Stat()
	if err != nil {
		return err
	}
	for _, b := range d.files {
		if os.SameFile(b, st) {
			return errSame
		}
	}
	d.files = append(d.files, st)
	return nil
}

// handle adds memory of a device. Different parts of one allocation, which has one
// handle, are disjoint.
func (d *disjoint) handle(h cuda.Handle) error {
	for _, b := range d.handles {
		if b.Kind == cuda.Legacy && h.Kind == cuda.Legacy && b.UUID == h.UUID && b.IPC == h.IPC &&
			b.Offset < h.Offset+h.Bytes && h.Offset < b.Offset+b.Bytes {
			return errSame
		}
	}
	d.handles = append(d.handles, h)
	return nil
}

// replyLend says how it ended.
func replyLend(c *net.UnixConn, m *kvferrypb.Lent) error {
	frame, err := kvferrypb.FrameOf(m)
	if err != nil {
		return err
	}
	if err := c.SetWriteDeadline(time.Now().Add(replyTime)); err != nil {
		return err
	}
	_, err = c.Write(frame)
	return err
}

// welcome tells the engine that the node serves.
func (a *adoption) welcome() {
	life := a.node.life
	if err := replyLend(a.conn, &kvferrypb.Lent{Node: string(life.Node), Incarnation: uint64(life.Incarnation)}); err != nil {
		_ = a.conn.Close() // which watch sees
	}
}

// watch ends the node when the connection ends.
func (a *adoption) watch() {
	var b [1]byte
	count, err := a.conn.Read(b[:])
	switch {
	case count > 0:
		err = fmt.Errorf("%w: it speaks out of turn", ErrUnlent)
	case errors.Is(err, io.EOF):
		err = ErrUnlent
	default:
		err = fmt.Errorf("%w: %w", ErrUnlent, err)
	}
	a.clear() // what readers still see is refused, from now on
	a.node.stop(err)
}

// clear changes every word of the table.
func (a *adoption) clear() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.seals == nil {
		return
	}
	for i := range uint32(memory.Words) {
		a.seals.Store(i, 0)
	}
}

// close ends the seal table, in which nothing holds any more: whatever is left
// was this life's. It may be called twice.
func (a *adoption) close() error {
	a.clear()
	a.mu.Lock()
	defer a.mu.Unlock()
	seals := a.seals
	if seals == nil {
		return nil
	}
	a.seals = nil
	return seals.Close()
}

// end gives the memory back. It runs when nothing here touches it any more, and
// says so to the engine by the end of the connection.
func (a *adoption) end() error {
	_ = a.conn.Close() // which watch may have found broken
	a.work.Wait()
	return nil
}
