package cudaipc

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// childEnv makes the test binary a node: it is the JSON of a childSpec.
const childEnv = "KVFERRY_CUDAIPC_TEST_CHILD"

// pidnsEnv makes it print the number of its PID namespace.
const pidnsEnv = "KVFERRY_CUDAIPC_TEST_PIDNS"

// noPause: a process under the race detector does not wait for a second at its end.
const noPause = "GORACE=atexit_sleep_ms=0"

type childSpec struct {
	Life    id.Life
	Library string
	Dir     string
	Bytes   int64
	Devices []int // of the arenas, by rank
	Seed    int   // of what the arenas hold
	Chunk   int64 // the arenas are of chunks of so many bytes, which files tell; 0: of one allocation
	Churn   bool  // publish one sequence after the other, each in the whole arena of rank 0

	Peer *transfer.Peer // to be read until the process ends
	Seal transfer.Seal  // of it
	Stay bool           // on one link; else on one after the other
	Want int            // seed of what must be read there
}

// childReady is what the process prints when it serves.
type childReady struct {
	Descriptor []byte
	Bytes      map[id.Rank]int64
	Seal       transfer.Seal
}

// word is the seal word of the tests.
const word = 3

// child is the body of the process: it works until its input ends.
func child() int {
	if err := childWork(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func childWork() (err error) {
	var s childSpec
	if err := json.Unmarshal([]byte(os.Getenv(childEnv)), &s); err != nil {
		return err
	}
	r, err := cuda.Open(cuda.Options{Library: s.Library})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	seals, err := memory.NewSealTable()
	if err != nil {
		return err
	}
	n := &node{local: transfer.Local{Life: s.Life, Arenas: map[id.Rank]memory.Arena{}, Seals: seals}, size: s.Bytes, r: r}
	ready := childReady{Bytes: map[id.Rank]int64{}}
	for rank, device := range s.Devices {
		a, err := alloc(r, r.GPUs()[device].UUID, s.Bytes, s.Chunk)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, a.Close()) }()
		n.local.Arenas[id.Rank(rank)] = a
		n.fill(id.Rank(rank), s.Seed+rank)
		ready.Bytes[id.Rank(rank)] = s.Bytes
	}
	ready.Seal = n.hold(word, 1)
	n.t, err = Listen(Options{Local: n.local, Runtime: r, Dir: s.Dir, Limits: transfertest.Calm(transfer.Limits{})})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.t.Close()) }()
	ready.Descriptor = n.t.Descriptor()
	line, err := json.Marshal(ready)
	if err != nil {
		return err
	}
	fmt.Println(string(line))
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	switch {
	case s.Churn:
		n.churn(ctx)
	case s.Peer != nil:
		return n.readFor(ctx, s)
	}
	<-ctx.Done()
	return nil
}

// churn publishes by the owner's rule: the word ends first, then the pages are
// somebody else's.
func (n *node) churn(ctx context.Context) {
	b := make([]byte, n.size)
	for seq := id.Sequence(2); ctx.Err() == nil; seq++ {
		n.local.Seals.Store(word, 0)
		pattern(b, int(seq))
		n.poke(0, 0, b)
		n.hold(word, seq)
		<-time.After(time.Duration(rand.IntN(3)) * time.Millisecond)
	}
}

// readFor reads a peer over and over.
func (n *node) readFor(ctx context.Context, s childSpec) error {
	want := make([]byte, n.size)
	pattern(want, s.Want)
	for ctx.Err() == nil {
		if err := n.readLink(ctx, s, want); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// readLink reads a peer by one link.
func (n *node) readLink(ctx context.Context, s childSpec, want []byte) error {
	l, err := n.t.Open(ctx, *s.Peer)
	if err != nil {
		return err
	}
	for read := 0; err == nil && (s.Stay || read < 20); read++ {
		err = l.Read(ctx, []transfer.Seal{s.Seal}, pages(n.size, 64<<10))
		if err == nil && !bytes.Equal(n.peek(0), want) {
			err = errors.New("a read that held brought other bytes")
		}
	}
	return errors.Join(err, l.Close())
}

// pages are the pages of an arena, each to where it came from.
func pages(size, page int64) (copies []transfer.Copy) {
	for at := int64(0); at < size; at += page {
		copies = append(copies, transfer.Copy{Remote: at, Local: at, Bytes: min(page, size-at)})
	}
	return copies
}

// process is a node in a process of its own.
type process struct {
	cmd    *exec.Cmd
	stdin  io.Closer
	stderr bytes.Buffer
	peer   transfer.Peer
	seal   transfer.Seal
}

// start starts a node, below the words of a command if there are any.
func start(t testing.TB, s childSpec, below ...string) *process {
	t.Helper()
	gpu(t)
	var env []string
	if w := driver.world; w != nil {
		s.Library, env = w.Library(), w.Env()
	}
	spec, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	words := append(below, self)
	p := &process{cmd: exec.CommandContext(t.Context(), words[0], words[1:]...)}
	p.cmd.Env = append(append(os.Environ(), env...), childEnv+"="+string(spec), noPause)
	p.cmd.Stderr = &p.stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	line, err := bufio.NewReader(stdout).ReadBytes('\n')
	if err != nil {
		p.kill()
		if len(below) > 0 && strings.Contains(p.stderr.String(), "Operation not permitted") {
			t.Skipf("%s is not permitted here: %s", below[0], &p.stderr)
		}
		t.Fatalf("node: %v: %s", err, &p.stderr)
	}
	var ready childReady
	if err := json.Unmarshal(line, &ready); err != nil {
		t.Fatal(err)
	}
	p.seal = ready.Seal
	p.peer = transfer.Peer{Life: s.Life, Descriptor: ready.Descriptor, ArenaBytes: ready.Bytes}
	return p
}

// kill ends the process as a crash does, and waits for it. It may be called
// twice.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// end ends it well.
func (p *process) end(t testing.TB) {
	t.Helper()
	if err := p.stdin.Close(); err != nil {
		t.Error(err)
	}
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("the process ended with %v: %s", err, &p.stderr)
	}
}

// newReader is a reader that listens, with an arena on each of the devices.
func newReader(t testing.TB, o Options, size int64, devices ...int) *node {
	t.Helper()
	r := gpu(t)
	n := newNode(t, r, readerLife, size, devices...)
	n.listen(t, o)
	return n
}

// An owner in another process is read; its end ends the link, and lets go of its
// memory.
func TestOwnerInAnotherProcess(t *testing.T) {
	const size = 4 << 20
	dir := rendezvousDir(t)
	last := second(gpu(t))
	reader := newReader(t, Options{Dir: dir}, size, 0, last, 0)
	before := live()
	owner := start(t, childSpec{Life: ownerLife, Dir: dir, Bytes: size, Devices: []int{0, 0, last}, Seed: 5})
	l := open(t, reader, owner.peer)
	if s := reader.t.Stats(); s.Imported != 3 || s.Links != 1 {
		t.Errorf("stats %+v, want one link and three arenas", s)
	}
	var copies []transfer.Copy
	for rank := range id.Rank(3) {
		copies = append(copies, transfer.Copy{Rank: rank, Remote: 4096, Local: 64, Bytes: size - 5000})
	}
	if err := l.Read(short(t), []transfer.Seal{owner.seal}, copies); err != nil {
		t.Fatal(err)
	}
	for rank := range id.Rank(3) {
		want := make([]byte, size)
		pattern(want, 5+int(rank))
		got := reader.peek(rank)
		differ(t, fmt.Sprintf("rank %d", int(rank)), got[64:][:size-5000], want[4096:][:size-5000])
		if got[63] != 0 || got[64+size-5000] != 0 {
			t.Errorf("rank %d: a byte beside the destination was written", int(rank))
		}
	}
	owner.end(t)
	eventually(t, "the memory of a peer that has ended is imported", func() bool { s := reader.t.Stats(); return s.Links == 0 && s.Imported == 0 })
	err := l.Read(short(t), []transfer.Seal{owner.seal}, []transfer.Copy{{Bytes: 1}})
	if e, ok := errors.AsType[*transfer.Error](err); !ok || !errors.Is(err, transfer.ErrClosed) || e.Peer != ownerLife || e.Total != 1 || e.Address == "" {
		t.Errorf("Read of an owner that has ended: %v", err)
	}
	if after := live(); after != before {
		t.Errorf("the driver has %s after the peer's end, %s before it", after, before)
	}
}

// What a read that held has brought is one publication, while the owner, in
// another process, ends one after the other and uses its pages again.
func TestPagesReusedInAnotherProcess(t *testing.T) {
	const size = 1 << 20
	dir := rendezvousDir(t)
	reader := newReader(t, Options{Dir: dir}, size, 0)
	owner := start(t, childSpec{Life: ownerLife, Dir: dir, Bytes: size, Devices: []int{0}, Churn: true})
	l := open(t, reader, owner.peer)
	zero, _ := id.SealValue(ownerLife.Incarnation, 0)
	want := make([]byte, size)
	right, stale := 0, 0
	for end := time.Now().Add(patience); (right < 50 || stale < 20) && time.Now().Before(end); {
		value, _ := l.seals.Load(word)
		err := l.Read(short(t), []transfer.Seal{{Index: word, Value: value}}, pages(size, 4096))
		switch {
		case err == nil:
			right++
			pattern(want, int(value^zero))
			differ(t, fmt.Sprintf("sequence %d", value^zero), reader.peek(0), want)
			if t.Failed() {
				return
			}
		case errors.Is(err, transfer.ErrStale):
			stale++
		default:
			t.Fatal(err)
		}
	}
	t.Logf("%d reads were right, %d stale", right, stale)
	if right == 0 || stale == 0 {
		t.Errorf("%d reads were right, %d stale: not both were seen", right, stale)
	}
	owner.end(t)
}

// Memory that an engine has given to the owner, which has imported it itself, is
// read as the owner's own: of one allocation, and of chunks.
func TestAdoptedMemory(t *testing.T) {
	const size = 5 << 20
	for name, chunk := range map[string]int64{"an allocation": 0, "chunks": 2 << 20} {
		t.Run(name, func(t *testing.T) {
			r, dir, before := gpu(t), rendezvousDir(t), live()
			// The engine is a node too here, by whose transport we get its handle.
			engine := start(t, childSpec{Life: id.Life{Node: "engine", Incarnation: 1}, Dir: dir, Bytes: size, Devices: []int{0}, Seed: 4, Chunk: chunk})
			owner := newNode(t, r, ownerLife, size)
			adopted := adopt(t, r, dir, engine.peer)
			owner.local.Arenas[0] = adopted
			owner.listen(t, Options{Dir: dir})
			peer, seal := owner.peer(), owner.hold(word, 1)

			reader := newReader(t, Options{Dir: dir}, size, 0)
			want := make([]byte, size)
			pattern(want, 4)
			l := open(t, reader, peer)
			if err := l.Read(short(t), []transfer.Seal{seal}, pages(size, 64<<10)); err != nil {
				t.Fatal(err)
			}
			differ(t, "the reader's arena", reader.peek(0), want)
			other := start(t, childSpec{Life: id.Life{Node: "other", Incarnation: 1}, Dir: dir, Bytes: size, Devices: []int{0}, Peer: &peer, Seal: seal, Want: 4})
			eventually(t, "another process does not read it", func() bool { return owner.t.Stats().Served >= 3 })
			other.end(t)

			// Whichever of the three ends, the others let go.
			if err := owner.t.Close(); err != nil {
				t.Error(err)
			}
			owner.drop(t)
			if err := reader.t.Close(); err != nil {
				t.Error(err)
			}
			reader.drop(t)
			engine.end(t)
			if now := live(); now != before {
				t.Errorf("the driver has %s, %s before", now, before)
			}
		})
	}
}

// adopt imports rank 0 of a peer, as an engine's memory.
func adopt(t testing.TB, r *cuda.Runtime, dir string, peer transfer.Peer) *cuda.Arena {
	t.Helper()
	n := newNode(t, r, id.Life{Node: "broker", Incarnation: 1}, 0)
	n.listen(t, Options{Dir: dir})
	h, files := handleOf(t, n, peer)
	a, err := r.Import(h, files)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// Memory that files tell is read from another PID namespace too; a handle that
// names a process is not.
func TestAnotherPIDNamespace(t *testing.T) {
	const size = 3 << 20
	r := gpu(t)
	for name, chunk := range map[string]int64{"an allocation": 0, "chunks": 2 << 20} {
		t.Run(name, func(t *testing.T) {
			dir := rendezvousDir(t)
			owner := newNode(t, r, ownerLife, size)
			a, err := alloc(r, deviceOf(t, r, 0), size, chunk)
			if err != nil {
				t.Fatal(err)
			}
			owner.local.Arenas[0] = a
			want := owner.fill(0, 6)
			owner.listen(t, Options{Dir: dir})
			owner.t.pidns++ // as it would say there
			reader := newReader(t, Options{Dir: dir}, size, 0)
			l, err := reader.t.Open(short(t), owner.peer())
			if chunk == 0 {
				if !errors.Is(err, transfer.ErrUnavailable) || !strings.Contains(err.Error(), "PID namespace") || !strings.Contains(err.Error(), "hostPID") {
					t.Errorf("Open: %v, want ErrUnavailable and what to set", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := l.Read(short(t), []transfer.Seal{owner.hold(1, 1)}, []transfer.Copy{{Bytes: size}}); err != nil {
				t.Error(err)
			}
			differ(t, "the reader's arena", reader.peek(0), want)
		})
	}
}

// killRounds is how often a process is killed.
func killRounds() int { return max(6, int(*soak/time.Second)*2) }

// An owner that is killed at any moment takes nobody with it: reads end with an
// error that says so, and nothing of it is left, neither here nor in the driver.
func TestOwnerIsKilledAtAnyPoint(t *testing.T) {
	const size = 2 << 20
	dir := rendezvousDir(t)
	last := second(gpu(t))
	reader := newReader(t, Options{Dir: dir}, size, 0, last)
	files, before := openFiles(t), live()
	for round := range killRounds() {
		life := id.Life{Node: "owner", Incarnation: id.Incarnation(1000 + round)}
		owner := start(t, childSpec{Life: life, Dir: dir, Bytes: size, Devices: []int{0, last}, Seed: round, Chunk: int64(round/2%2) << 20})
		copies := append(pages(size, 4096), transfer.Copy{Rank: 1, Bytes: size})
		var reads atomic.Int64
		done := make(chan error, 1)
		go func() {
			for {
				l, err := reader.t.Open(short(t), owner.peer)
				for n := 0; err == nil && n < 3; n++ { // then another link
					if err = l.Read(short(t), []transfer.Seal{owner.seal}, copies); err == nil {
						reads.Add(1)
					} else if _, ok := errors.AsType[*transfer.Error](err); !ok || !errors.Is(err, transfer.ErrClosed) {
						t.Errorf("round %d: Read: %v (%T), want that the peer has hung up", round, err, err)
					}
				}
				if l != nil {
					_ = l.Close()
				}
				if err != nil {
					done <- err
					return
				}
			}
		}()
		if round%2 == 0 { // else at any moment of the first link
			eventually(t, "no read ends", func() bool { return reads.Load() > 0 || len(done) > 0 })
		}
		<-time.After(time.Duration(rand.IntN(20_000)) * time.Microsecond)
		owner.kill()
		killed := time.Now()
		select {
		case err := <-done:
			if !strings.Contains(err.Error(), life.String()) {
				t.Errorf("round %d: %v does not name the peer", round, err)
			}
		case <-time.After(patience):
			t.Fatalf("round %d: reads go on after %d", round, reads.Load())
		}
		if took := time.Since(killed); took > 20*time.Second {
			t.Errorf("round %d: reads ended %v after the owner", round, took)
		}
		if s := reader.t.Stats(); s.Links != 0 || s.Imported != 0 {
			t.Errorf("round %d: stats %+v", round, s)
		}
		eventually(t, fmt.Sprintf("round %d: the driver has %s, %s before", round, live(), before), func() bool { return live() == before })
	}
	eventually(t, "files are left open", func() bool { return openFiles(t) <= files })
}

// A reader that is killed at any moment leaves nothing with its owner, which goes
// on, and closes without waiting for the dead.
func TestReaderIsKilledAtAnyPoint(t *testing.T) {
	const size = 2 << 20
	r := gpu(t)
	dir := rendezvousDir(t)
	owner := newNode(t, r, ownerLife, size, 0)
	want := owner.fill(0, 9)
	owner.listen(t, Options{Dir: dir, Limits: transfer.Limits{Stall: patience}})
	peer, seal := owner.peer(), owner.hold(word, 1)
	files, before := openFiles(t), live()
	for round := range killRounds() {
		reader := start(t, childSpec{Life: id.Life{Node: "reader", Incarnation: id.Incarnation(round + 1)}, Dir: dir, Bytes: size, Devices: []int{round % 2 * second(r)}, Peer: &peer, Seal: seal, Want: 9})
		if round%2 == 0 {
			eventually(t, "the reader is not served", func() bool { return owner.t.Stats().Served > 0 })
		}
		<-time.After(time.Duration(rand.IntN(20_000)) * time.Microsecond)
		reader.kill()
		eventually(t, "a dead reader is connected", func() bool { return owner.t.Stats().Accepted == 0 })
		eventually(t, fmt.Sprintf("round %d: the driver has %s, %s before", round, live(), before), func() bool { return live() == before })
	}
	if s := owner.t.Stats(); s.Garbage+s.Strangers+s.Refused != 0 {
		t.Errorf("stats %+v", s)
	}
	differ(t, "the owner's arena", owner.peek(0), want)
	eventually(t, "files are left open", func() bool { return openFiles(t) <= files })
	reader := start(t, childSpec{Life: readerLife, Dir: dir, Bytes: size, Devices: []int{0}, Peer: &peer, Seal: seal, Want: 9})
	eventually(t, "the reader is not served", func() bool { return owner.t.Stats().Accepted > 0 })
	reader.kill()
	started := time.Now()
	if err := owner.t.Close(); err != nil {
		t.Error(err)
	}
	if took := time.Since(started); took > patience/2 {
		t.Errorf("Close took %v after a reader that is dead", took)
	}
}

// A reader that is stopped is waited for, for the stall time, and not longer.
// When it goes on it finds that what it was reading has ended.
func TestStoppedReaderIsWaitedFor(t *testing.T) {
	const size, stall = 1 << 20, 200 * time.Millisecond
	w, r := emulated(t), gpu(t)
	dir := rendezvousDir(t)
	owner := newNode(t, r, ownerLife, size, 0)
	owner.fill(0, 0)
	owner.listen(t, Options{Dir: dir, Limits: transfer.Limits{Stall: stall}})
	peer, seal := owner.peer(), owner.hold(word, 1)
	reader := start(t, childSpec{Life: readerLife, Dir: dir, Bytes: size, Devices: []int{0}, Peer: &peer, Seal: seal, Stay: true})
	eventually(t, "the reader imports nothing", func() bool { return w.Counts().Imports > 0 })
	if err := reader.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	owner.local.Seals.Store(word, 0)
	started := time.Now()
	if err := owner.t.Close(); err != nil {
		t.Error(err)
	}
	if took := time.Since(started); took < stall/2 || took > stall+20*time.Second {
		t.Errorf("Close took %v with a reader that is stopped, want %v", took, stall)
	}
	owner.drop(t) // the memory goes under the reader
	if err := reader.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := reader.cmd.Wait(); err == nil {
		t.Error("the reader read what had ended")
	}
	if text := reader.stderr.String(); !strings.Contains(text, transfer.ErrStale.Error()) && !strings.Contains(text, "hung up") {
		t.Errorf("the reader ended with %q, want that it is stale, or that the peer has hung up", text)
	}
}

// The number of a PID namespace is another one in another, whatever proc it has.
func TestPIDNamespace(t *testing.T) {
	ours, err := pidNamespace()
	if err != nil || ours == 0 {
		t.Fatalf("%d, %v", ours, err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	numbers := map[string]string{"ours": fmt.Sprint(ours)}
	for name, words := range map[string][]string{
		"a child":               {self},
		"another":               {"unshare", "--pid", "--fork", "--kill-child", "--mount-proc", self},
		"another, with our own": {"unshare", "--pid", "--fork", "--kill-child", self},
	} {
		cmd := exec.CommandContext(t.Context(), words[0], words[1:]...)
		cmd.Env = append(os.Environ(), pidnsEnv+"=1", noPause)
		out, err := cmd.CombinedOutput()
		if err != nil {
			if strings.Contains(string(out), "Operation not permitted") {
				t.Skipf("%s is not permitted here: %s", words[0], out)
			}
			t.Fatalf("%s: %v: %s", name, err, out)
		}
		numbers[name] = strings.TrimSpace(string(out))
	}
	if numbers["a child"] != numbers["ours"] || numbers["another"] == numbers["ours"] || numbers["another, with our own"] == numbers["ours"] {
		t.Errorf("numbers %v", numbers)
	}
}
