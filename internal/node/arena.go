package node

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
)

// openMemory opens the arenas of all local ranks, the seal table, and what device
// memory is copied through. devices opens arenas on devices; nil: the driver does.
func (n *Node) openMemory(ctx context.Context, devices func(*Node) error) error {
	var err error
	switch lies := n.config.Arena.Memory; {
	case lies == config.HostMemory:
		err = n.openHostArenas()
	case lies == config.EngineMemory:
		err = n.adoptArenas(ctx)
	case devices != nil:
		err = devices(n)
	default:
		err = n.openDeviceArenas()
	}
	if err == nil {
		err = n.openStaging()
	}
	if err != nil || n.seals != nil { // an engine brings the table that guards its memory
		return err
	}
	seals, err := memory.NewSealTable()
	if err != nil {
		return err
	}
	seal := probeSeal(n.life)
	seals.Store(seal.Index, seal.Value)
	n.seals = seals
	n.closers = append(n.closers, seals.Close)
	return nil
}

// openHostArenas maps and populates the arenas of all local ranks.
func (n *Node) openHostArenas() error {
	size := n.geometry.Layout.Bytes()
	create := memory.New
	if n.config.Arena.HugePages == "never" {
		create = memory.NewPlain
	}
	for _, r := range n.ranks {
		a, err := create(fmt.Sprintf("kvferry-%s-rank%d", n.life.Node, r), size)
		if err != nil {
			return fmt.Errorf("open the arena of rank %d (%d pages of %d bytes; arena.pages and the number of arena.ranks set its size): %w", r, n.geometry.Layout.Pages, n.geometry.Layout.PageBytes(), err)
		}
		n.arenas[r] = a
		n.closers = append(n.closers, a.Close)
	}
	return nil
}

// Bounds of handing arenas over.
const (
	tokenBytes  = 32
	tokenTime   = 10 * time.Second
	maxTokens   = 1024
	maxHandlers = 64

	handoverTime = 5 * time.Second // of one connection
)

// handover gives the arenas to engines: OpenArena makes a token, and who sends it
// over the socket gets the memfd, or what imports device memory.
type handover struct {
	node     *Node
	listener *net.UnixListener
	work     sync.WaitGroup
	places   chan struct{}

	mu     sync.Mutex
	tokens map[[tokenBytes]byte]grant
}

type grant struct {
	rank  id.Rank
	until time.Time
}

func (n *Node) openHandover(ctx context.Context, path string) (*handover, error) {
	l, err := listenUnix(ctx, path)
	if err != nil {
		return nil, err
	}
	h := &handover{node: n, listener: l, places: make(chan struct{}, maxHandlers), tokens: make(map[[tokenBytes]byte]grant)}
	n.begin = append(n.begin, func() { h.work.Go(h.serve) })
	return h, nil
}

// token makes a token that is good once.
func (h *handover) token(r id.Rank) ([]byte, error) {
	var t [tokenBytes]byte
	if _, err := rand.Read(t[:]); err != nil {
		return nil, err
	}
	now := time.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	for old, g := range h.tokens {
		if now.After(g.until) {
			delete(h.tokens, old)
		}
	}
	if len(h.tokens) >= maxTokens {
		return nil, fmt.Errorf("open the arena of rank %d: %d tokens wait: %w", r, len(h.tokens), errTooMany)
	}
	h.tokens[t] = grant{r, now.Add(tokenTime)}
	return t[:], nil
}

func (h *handover) redeem(t [tokenBytes]byte) (id.Rank, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g, ok := h.tokens[t]
	delete(h.tokens, t)
	return g.rank, ok && time.Now().Before(g.until)
}

func (h *handover) serve() {
	for {
		c, err := h.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors, for example
			if !sleep(h.node.ctx, 50*time.Millisecond) {
				return
			}
			continue
		}
		select {
		case h.places <- struct{}{}:
			h.work.Go(func() {
				defer func() { <-h.places }()
				h.give(c)
			})
		default:
			_ = c.Close()
		}
	}
}

func (h *handover) give(c *net.UnixConn) {
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(handoverTime)); err != nil {
		return
	}
	// The end of the node does not wait for whoever says nothing.
	defer context.AfterFunc(h.node.ctx, func() { _ = c.Close() })()
	if err := checkPeerUser(c); err != nil {
		h.node.metrics.authFailures.WithLabelValues("fd").Inc()
		h.node.log.Warn("arena refused", "err", err)
		return
	}
	var t [tokenBytes]byte
	if _, err := io.ReadFull(c, t[:]); err != nil {
		return
	}
	r, ok := h.redeem(t)
	if !ok {
		h.node.metrics.authFailures.WithLabelValues("fd").Inc()
		return
	}
	if err := h.send(c, r); err != nil {
		h.node.log.Warn("arena was not handed over", "rank", int(r), "err", err)
	}
}

func (h *handover) send(c *net.UnixConn, r id.Rank) error {
	switch a := h.node.arenas[r].(type) {
	case *memory.Region:
		return memory.SendFile(c, []byte{kvferrypb.HandedFile}, a.File())
	case *cuda.Arena:
		handle, files, err := a.Export()
		if err != nil {
			return err
		}
		defer func() {
			for _, f := range files {
				_ = f.Close()
			}
		}()
		frame, err := kvferrypb.HandleFrame(handle.Append(nil))
		if err != nil {
			return err
		}
		if _, err := c.Write(frame); err != nil {
			return fmt.Errorf("send handle: %w", err)
		}
		for _, f := range files {
			if err := memory.SendFile(c, []byte{kvferrypb.HandedHandle}, f); err != nil {
				return err
			}
		}
		return nil
	default:
		return fmt.Errorf("memory of kind %T is not for other processes", a)
	}
}

func (h *handover) close() error {
	err := h.listener.Close()
	h.work.Wait()
	return err
}

// listenUnix listens at a path that only this user can reach. A socket file
// that nobody serves is replaced; one that is served is an error.
func listenUnix(ctx context.Context, path string) (*net.UnixListener, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	var d net.Dialer
	if c, err := d.DialContext(ctx, "unix", path); err == nil {
		_ = c.Close()
		return nil, fmt.Errorf("listen at %s: another process serves it (another agent with this node.name or node.socket?)", path)
	}
	if st, err := os.Lstat(path); err == nil && st.Mode()&os.ModeSocket != 0 {
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("listen at %s: %w", path, err)
		}
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("listen at %s: %w", path, err), l.Close())
	}
	return l, nil
}
