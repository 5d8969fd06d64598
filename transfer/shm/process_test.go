package shm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rendezvous"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// ownerEnv makes the test binary an owner, or a reader: it is the JSON of an ownerSpec.
const ownerEnv = "KVFERRY_SHM_TEST_OWNER"

type ownerSpec struct {
	Life   id.Life
	Dir    string
	Bytes  int64
	Seed   int
	Device bool // the arena is on an emulated device, whose copies take a while

	// Of is whom the process is to read, over and over, instead of being one.
	Of   *transfer.Peer
	Seal transfer.Seal
}

// ownerReady is what the process prints when it serves.
type ownerReady struct {
	Descriptor []byte
	Bytes      int64
	Seal       transfer.Seal
}

// ownerProcess is the body of an owner: it serves until its input ends.
func ownerProcess() int {
	if err := ownerServe(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func ownerServe() error {
	var spec ownerSpec
	if err := json.Unmarshal([]byte(os.Getenv(ownerEnv)), &spec); err != nil {
		return err
	}
	seals, err := memory.NewSealTable()
	if err != nil {
		return err
	}
	place := transfertest.Host
	if spec.Device {
		place = transfertest.NewDevice(transfertest.DeviceOptions{Delay: time.Millisecond}).Alloc
	}
	arena, err := place(spec.Bytes)
	if err != nil {
		return err
	}
	b := make([]byte, arena.Size())
	pattern(b, spec.Seed)
	transfertest.Poke(arena, 0, b)
	value, _ := id.SealValue(spec.Life.Incarnation, 1)
	seals.Store(3, value)
	tr, err := Listen(Options{Local: transfer.Local{Life: spec.Life, Arenas: map[id.Rank]memory.Arena{0: arena}, Seals: seals}, Dir: spec.Dir, Limits: transfertest.Calm(transfer.Limits{})})
	if err != nil {
		return err
	}
	if spec.Of != nil {
		return readAgain(tr, spec)
	}
	line, err := json.Marshal(ownerReady{Descriptor: tr.Descriptor(), Bytes: arena.Size(), Seal: transfer.Seal{Index: 3, Value: value}})
	if err != nil {
		return err
	}
	fmt.Println(string(line))
	_, err = io.Copy(io.Discard, os.Stdin)
	return errors.Join(err, tr.Close())
}

// readAgain reads all of an owner's arena until it fails.
func readAgain(tr *Transport, spec ownerSpec) error {
	ctx := context.Background()
	l, err := tr.Open(ctx, *spec.Of)
	if err != nil {
		return err
	}
	fmt.Println("{}")
	for err == nil {
		err = l.Read(ctx, []transfer.Seal{spec.Seal}, []transfer.Copy{{Bytes: spec.Bytes}})
	}
	return err
}

// ownerNode is an owner in a process of its own.
type ownerNode struct {
	cmd   *exec.Cmd
	stdin io.Closer
	peer  transfer.Peer
	seal  transfer.Seal
}

// startOwner starts an owner, below the words of a command if there are any.
func startOwner(t testing.TB, spec ownerSpec, below ...string) *ownerNode {
	t.Helper()
	env, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	words := append(below, self)
	cmd := exec.CommandContext(t.Context(), words[0], words[1:]...)
	cmd.Env = append(os.Environ(), ownerEnv+"="+string(env))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(stdout).ReadBytes('\n')
	if err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if len(below) > 0 && strings.Contains(stderr.String(), "Operation not permitted") {
			t.Skipf("%s is not permitted here: %s", below[0], &stderr)
		}
		t.Fatalf("owner: %v: %s", err, &stderr)
	}
	var ready ownerReady
	if err := json.Unmarshal(line, &ready); err != nil {
		t.Fatal(err)
	}
	o := &ownerNode{cmd: cmd, stdin: stdin, seal: ready.Seal, peer: transfer.Peer{
		Life: spec.Life, Descriptor: ready.Descriptor, ArenaBytes: map[id.Rank]int64{0: ready.Bytes},
	}}
	t.Cleanup(func() { o.kill() })
	return o
}

// kill ends the process as a crash does, and waits for it. It may be called
// twice.
func (o *ownerNode) kill() {
	_ = o.cmd.Process.Kill()
	_ = o.cmd.Wait()
}

// stop ends it well.
func (o *ownerNode) stop(t testing.TB) {
	t.Helper()
	if err := o.stdin.Close(); err != nil {
		t.Error(err)
	}
	if err := o.cmd.Wait(); err != nil {
		t.Errorf("the owner ended with %v", err)
	}
}

// newReader is a reader with an arena.
func newReader(t testing.TB, dir string, size int64) *node {
	t.Helper()
	n := newNode(t, readerLife, size)
	n.listen(t, Options{Dir: dir, Workers: 2})
	return n
}

// An owner in another process is read, in whatever namespaces it runs, and its
// end ends the link.
func TestOwnerInAnotherProcess(t *testing.T) {
	for name, below := range map[string][]string{
		"same namespaces":             nil,
		"PID namespace":               {"unshare", "--pid", "--fork", "--kill-child", "--mount-proc"},
		"PID namespace, proc of ours": {"unshare", "--pid", "--fork", "--kill-child"},
		"PID, network, IPC, and UTS":  {"unshare", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"},
	} {
		t.Run(name, func(t *testing.T) {
			const size = 8 << 20
			dir := meeting(t)
			reader := newReader(t, dir, size)
			owner := startOwner(t, ownerSpec{Life: ownerLife, Dir: dir, Bytes: size, Seed: 5}, below...)
			l := open(t, reader, owner.peer)
			if err := l.Read(short(t), []transfer.Seal{owner.seal}, []transfer.Copy{{Remote: 4096, Local: 64, Bytes: size - 5000}}); err != nil {
				t.Fatal(err)
			}
			want := make([]byte, size)
			pattern(want, 5)
			if !bytes.Equal(reader.arena()[64:][:size-5000], want[4096:][:size-5000]) {
				t.Error("other bytes than the owner's")
			}
			owner.stop(t)
			eventually(t, "the memory of a peer that has ended is mapped", func() bool { return reader.t.Stats().Links == 0 })
			err := l.Read(short(t), []transfer.Seal{owner.seal}, []transfer.Copy{{Bytes: 1}})
			if e, ok := errors.AsType[*transfer.Error](err); !ok || !errors.Is(err, rendezvous.ErrGone) || e.Peer != ownerLife || e.Total != 1 {
				t.Errorf("Read of an owner that has ended: %v", err)
			}
		})
	}
}

// killRounds is how often a process is killed.
func killRounds() int { return max(4, int(*soak/time.Second)/3) }

// An owner that is killed while it is read takes nobody with it: the read ends
// with an error, and the next life can be read at once.
func TestOwnerIsKilledWhileItIsRead(t *testing.T) {
	const size = 16 << 20
	dir := meeting(t)
	reader := newReader(t, dir, size)
	long := make([]transfer.Copy, 4000) // a minute of work
	for i := range long {
		long[i] = transfer.Copy{Bytes: size}
	}
	for round := range killRounds() {
		life := id.Life{Node: "owner", Incarnation: id.Incarnation(1000 + round)}
		owner := startOwner(t, ownerSpec{Life: life, Dir: dir, Bytes: size, Seed: round})
		reader.arena()[0], reader.arena()[size-1] = 0, 0
		l := open(t, reader, owner.peer)
		if err := l.Read(short(t), []transfer.Seal{owner.seal}, long[:1]); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		before := reader.t.Stats().ReadBytes
		clear(reader.arena()[:4096])
		done := make(chan error, 1)
		go func() { done <- l.Read(short(t), []transfer.Seal{owner.seal}, long) }()
		eventually(t, "no byte lands", func() bool { return reader.arena()[round+1] != 0 })
		owner.kill()
		killed := time.Now()
		select {
		case err := <-done:
			e, ok := errors.AsType[*transfer.Error](err)
			if !ok || !errors.Is(err, rendezvous.ErrGone) || e.Peer != life || e.Done == 0 || reader.t.Stats().ReadBytes-before != uint64(e.Done) {
				t.Fatalf("round %d: %v", round, err)
			}
		case <-time.After(patience):
			t.Fatalf("round %d: Read hangs", round)
		}
		if took := time.Since(killed); took > 20*time.Second {
			t.Errorf("round %d: the read ended %v after the owner", round, took)
		}
	}
	if names := sockets(t, dir); len(names) != 2 {
		t.Errorf("%v is in the directory, want the reader and the last that was killed: each start removes what the one before left", names)
	}
	third := newNode(t, id.Life{Node: "third", Incarnation: 1}, 4096)
	third.listen(t, Options{Dir: dir})
	if names := sockets(t, dir); len(names) != 2 {
		t.Errorf("%v is in the directory after a start, want the two that are served", names)
	}
}

// An owner that is killed while its device fills a buffer ends the read, and a new
// life can be read at once.
func TestOwnerIsKilledWhileItGathers(t *testing.T) {
	const size = 4 << 20
	dir := meeting(t)
	for name, made := range map[string]func(testing.TB, id.Life, int64) *node{"to host": newNode, "to a device": newDeviceNode} {
		t.Run(name, func(t *testing.T) {
			reader := made(t, readerLife, size)
			reader.listen(t, Options{Dir: dir})
			files := 0
			for round := range killRounds() {
				life := id.Life{Node: "owner", Incarnation: id.Incarnation(1000 + round)}
				owner := startOwner(t, ownerSpec{Life: life, Dir: dir, Bytes: size, Seed: round, Device: true})
				l := open(t, reader, owner.peer)
				before := reader.t.Stats().ReadBytes
				done := testDone(l, owner.seal, slices.Repeat([]transfer.Copy{{Bytes: size}}, 4000))
				if err := l.Read(short(t), []transfer.Seal{owner.seal}, []transfer.Copy{{Remote: 10, Bytes: 4096}}); err != nil {
					t.Fatal(err)
				}
				owner.kill()
				killed := time.Now()
				err := <-done
				if took := time.Since(killed); !errors.Is(err, rendezvous.ErrGone) || took > 20*time.Second {
					t.Errorf("round %d: the read ended %v after the owner: %v", round, took, err)
				}
				if reader.t.Stats().ReadBytes == before {
					t.Errorf("round %d: nothing had landed", round)
				}
				eventually(t, "the ring of a peer that was killed is mapped", func() bool { return reader.t.Stats().Links == 0 })
				if files == 0 {
					files = openFiles(t)
				}
				eventually(t, "files are left open", func() bool { return openFiles(t) <= files })
			}
			if reader.device != nil {
				eventually(t, "copies are under way", func() bool { return reader.device.Counts().Live == 0 })
			}
		})
	}
}

func testDone(l *link, seal transfer.Seal, copies []transfer.Copy) <-chan error {
	done := make(chan error, 1)
	go func() { done <- l.Read(context.Background(), []transfer.Seal{seal}, copies) }()
	return done
}

// A reader that is killed while its device empties buffers leaves nothing at the
// owner, and is nobody's trouble.
func TestReaderIsKilledWhileItScatters(t *testing.T) {
	const size = 4 << 20
	rounds, dir := killRounds(), meeting(t)
	owner := newDeviceNode(t, ownerLife, size)
	owner.listen(t, Options{Dir: dir})
	seal, peer := owner.hold(1, 1), owner.peer()
	pinned := owner.device.Counts().Pinned
	for round := range rounds {
		life := id.Life{Node: "reader", Incarnation: id.Incarnation(1000 + round)}
		staged := owner.t.Stats().StagedBytes
		reader := startOwner(t, ownerSpec{Life: life, Dir: dir, Bytes: size, Device: round%2 == 0, Of: &peer, Seal: seal})
		eventually(t, "nothing is read", func() bool { return owner.t.Stats().StagedBytes > staged+size })
		reader.kill()
		eventually(t, "something of a reader that was killed is left", func() bool {
			s, c := owner.t.Stats(), owner.device.Counts()
			return s.Accepted == 0 && s.Rings == 0 && c.Pinned == pinned && c.Live == 0 && c.Unwaited == 0
		})
	}
	if s := owner.t.Stats(); s.Served != uint64(rounds) || s.Garbage != 0 {
		t.Errorf("stats %+v", s)
	}
}

func sockets(t testing.TB, dir string) (names []string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}
