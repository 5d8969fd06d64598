package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// The two processes of a pull speak JSON, a line a message: one order, then
// any number of questions; each is answered by one line. The end of the input
// ends the owner.
type (
	order struct {
		ArenaBytes int64 `json:"arena_bytes"`
	}
	offer struct {
		Node        id.Node        `json:"node"`
		Incarnation id.Incarnation `json:"incarnation"`
		Descriptor  []byte         `json:"descriptor"` // of the tcp transport
		ArenaBytes  int64          `json:"arena_bytes"`
		Seal        uint32         `json:"seal"`
		SealValue   uint64         `json:"seal_value"`
	}
	question struct{}
	usage    struct {
		CPUSeconds float64 `json:"cpu_seconds"`
	}
)

// benchRank is the one rank whose arena is pulled.
const benchRank = id.Rank(0)

// ServeOwner is the other process of a pull: it serves an arena by each
// transport until stdin ends, or ctx. It speaks one JSON line at a time.
func ServeOwner(ctx context.Context, stdin io.Reader, stdout io.Writer) error {
	in := json.NewDecoder(bufio.NewReader(stdin))
	out := json.NewEncoder(stdout)
	var o order
	if err := in.Decode(&o); err != nil {
		return fmt.Errorf("bench owner: read order: %w", err)
	}
	if o.ArenaBytes < MinChunkBytes || o.ArenaBytes > MaxArenaBytes {
		return fmt.Errorf("bench owner: arena of %d bytes is not in %d..%d", o.ArenaBytes, MinChunkBytes, int64(MaxArenaBytes))
	}
	life := id.Life{Node: "bench-owner", Incarnation: id.Incarnation(time.Now().UnixMicro())}
	m, err := newMemory(life, o.ArenaBytes)
	if err != nil {
		return fmt.Errorf("bench owner: %w", err)
	}
	defer m.close()
	fillContent(m.arena.Bytes())
	const sequence = 1
	value, _ := id.SealValue(life.Incarnation, sequence)
	m.seals.Store(0, value)
	t, err := tcp.Listen(tcp.Options{Local: m.local(life), Bind: loopback()})
	if err != nil {
		return fmt.Errorf("bench owner: %w", err)
	}
	defer t.Close()
	if err := out.Encode(offer{
		Node: life.Node, Incarnation: life.Incarnation, Descriptor: t.Descriptor(),
		ArenaBytes: m.arena.Size(), Seal: 0, SealValue: value,
	}); err != nil {
		return fmt.Errorf("bench owner: %w", err)
	}
	for ctx.Err() == nil {
		var q question
		if err := in.Decode(&q); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("bench owner: read question: %w", err)
		}
		if err := out.Encode(usage{cpuSeconds()}); err != nil {
			return fmt.Errorf("bench owner: %w", err)
		}
	}
	return context.Cause(ctx)
}

func loopback() netip.AddrPort { return netip.MustParseAddrPort("127.0.0.1:0") }

// sharedMemory is what one side of a pull has.
type sharedMemory struct {
	arena *memory.Region
	seals *memory.SealTable
}

func newMemory(life id.Life, size int64) (*sharedMemory, error) {
	arena, err := memory.New(string(life.Node), size)
	if err != nil {
		return nil, err
	}
	seals, err := memory.NewSealTable()
	if err != nil {
		return nil, errors.Join(err, arena.Close())
	}
	return &sharedMemory{arena, seals}, nil
}

func (m *sharedMemory) local(life id.Life) transfer.Local {
	return transfer.Local{Life: life, Arenas: map[id.Rank]*memory.Region{benchRank: m.arena}, Seals: m.seals}
}

func (m *sharedMemory) close() { _ = errors.Join(m.seals.Close(), m.arena.Close()) }

// cpuSeconds is what this process has used so far.
func cpuSeconds() float64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

// owner is the other process, as the reader holds it.
type owner struct {
	process *exec.Cmd
	stdin   io.WriteCloser
	in      *json.Decoder
	offer   offer
}

// Waits for the other process.
const (
	offerTimeout = 60 * time.Second // it populates its arena
	quitTimeout  = 10 * time.Second
)

// startOwner starts the process and returns when it serves. ctx ends it.
func startOwner(ctx context.Context, argv []string, arenaBytes int64) (*owner, error) {
	o := &owner{process: exec.CommandContext(ctx, argv[0], argv[1:]...)}
	o.process.Stderr = os.Stderr
	o.process.WaitDelay = quitTimeout
	var err error
	if o.stdin, err = o.process.StdinPipe(); err != nil {
		return nil, fmt.Errorf("start owner: %w", err)
	}
	stdout, err := o.process.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start owner: %w", err)
	}
	o.in = json.NewDecoder(bufio.NewReader(stdout))
	if err := o.process.Start(); err != nil {
		return nil, fmt.Errorf("start owner: %w", err)
	}
	// A process that never answers is killed, which ends the read.
	late := time.AfterFunc(offerTimeout, func() { _ = o.process.Process.Kill() })
	err = o.ask(order{arenaBytes}, &o.offer)
	late.Stop()
	if err == nil && o.offer.ArenaBytes < arenaBytes {
		err = fmt.Errorf("arena has %d bytes, %d were ordered", o.offer.ArenaBytes, arenaBytes)
	}
	if err != nil {
		return nil, fmt.Errorf("start owner %q: %w", argv, errors.Join(err, o.close()))
	}
	return o, nil
}

func (o *owner) ask(question, answer any) error {
	if err := json.NewEncoder(o.stdin).Encode(question); err != nil {
		return err
	}
	return o.in.Decode(answer)
}

func (o *owner) cpuSeconds() (float64, error) {
	var u usage
	if err := o.ask(question{}, &u); err != nil {
		return 0, fmt.Errorf("ask the owner for its CPU time: %w", err)
	}
	return u.CPUSeconds, nil
}

// close ends the process and waits for it.
func (o *owner) close() error {
	_ = o.stdin.Close() // the process may be gone
	late := time.AfterFunc(quitTimeout, func() { _ = o.process.Process.Kill() })
	defer late.Stop()
	return o.process.Wait()
}
