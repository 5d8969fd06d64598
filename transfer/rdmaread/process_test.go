package rdmaread

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/rdma/rdmatest"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// ownerEnv is set, with an [ownerSpec], where this binary is an owner.
const ownerEnv = "KVFERRY_RDMA_OWNER"

type ownerSpec struct {
	Life    id.Life
	Socket  string
	Devices []string
	Bytes   int64
	Seed    int
	Timeout uint8
	Device  bool // the arena is in the memory of a device, and staged
	Held    bool // which copies nothing, ever
}

// ownerProcess serves an arena that holds a pattern, and one seal, until its
// standard input ends.
func ownerProcess() int {
	var s ownerSpec
	if err := json.Unmarshal([]byte(os.Getenv(ownerEnv)), &s); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if err := own(s); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func own(s ownerSpec) error {
	seals, err := memory.NewSealTable()
	if err != nil {
		return err
	}
	device := transfertest.NewDevice(transfertest.DeviceOptions{Delay: time.Millisecond})
	place := transfertest.Host
	if s.Device {
		place = device.Alloc
	}
	arena, err := place(s.Bytes)
	if err != nil {
		return err
	}
	b := make([]byte, s.Bytes)
	pattern(b, s.Seed)
	transfertest.Poke(arena, 0, b)
	if s.Held {
		device.Hold()
	}
	v, _ := id.SealValue(s.Life.Incarnation, 1)
	seals.Store(3, v)
	t, err := Listen(Options{
		Local: transfer.Local{Life: s.Life, Arenas: map[id.Rank]memory.Arena{0: arena}, Seals: seals}, Devices: s.Devices, Timeout: s.Timeout,
		Limits: transfertest.Calm(transfer.Limits{}),
		Call: func(context.Context, transfer.Peer, []byte) ([]byte, Call, error) {
			return nil, nil, errors.New("an owner")
		},
	})
	if err != nil {
		return err
	}
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "unix", s.Socket)
	if err != nil {
		return err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go answer1(t, c)
		}
	}()
	if err := json.NewEncoder(os.Stdout).Encode(t.Descriptor()); err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, os.Stdin) // until it ends
	return errors.Join(l.Close(), t.Close())
}

// answer1 is the owner's side of one call: a connection.
func answer1(t *Transport, c net.Conn) {
	defer c.Close()
	hello, err := receive(c)
	if err != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	asked := make(chan []byte)
	go func() { // until the reader hangs up
		defer cancel()
		hear(ctx, c, asked)
	}()
	_ = t.Serve(ctx, readerLife, hello, asked, func(b []byte) error { return send(c, b) })
}

// hear gives on what the other side says.
func hear(ctx context.Context, c net.Conn, to chan<- []byte) {
	for {
		b, err := receive(c)
		if err != nil {
			return
		}
		select {
		case to <- b:
		case <-ctx.Done():
			return
		}
	}
}

func send(c net.Conn, b []byte) error {
	_, err := c.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...))
	return err
}

func receive(c net.Conn) ([]byte, error) {
	var n [4]byte
	if _, err := io.ReadFull(c, n[:]); err != nil {
		return nil, err
	}
	b := make([]byte, binary.BigEndian.Uint32(n[:]))
	_, err := io.ReadFull(c, b)
	return b, err
}

// dialled is a Call over a connection.
type dialled struct {
	net.Conn
	answers chan []byte
	ended   chan struct{}
}

func (d *dialled) Send(_ context.Context, question []byte) error { return send(d.Conn, question) }
func (d *dialled) Answers() <-chan []byte                        { return d.answers }
func (d *dialled) Ended() <-chan struct{}                        { return d.ended }

func dialCall(socket string) func(context.Context, transfer.Peer, []byte) ([]byte, Call, error) {
	return func(ctx context.Context, _ transfer.Peer, hello []byte) ([]byte, Call, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
		if err != nil {
			return nil, nil, err
		}
		stop := context.AfterFunc(ctx, func() { c.Close() })
		err = send(c, hello)
		var b []byte
		if err == nil {
			b, err = receive(c)
		}
		if !stop() && err == nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			c.Close()
			return nil, nil, err
		}
		d := &dialled{Conn: c, answers: make(chan []byte, 16), ended: make(chan struct{})}
		go func() {
			defer close(d.ended)
			hear(context.Background(), c, d.answers)
		}()
		return b, d, nil
	}
}

// ownerNode is an owner in another process.
type ownerNode struct {
	cmd   *exec.Cmd
	stdin io.Closer
	peer  transfer.Peer
	seal  transfer.Seal
}

func startOwner(t testing.TB, w *rdmatest.World, s ownerSpec) *ownerNode {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if hw := rdmatest.Hardware(); w == nil {
		s.Devices, s.Timeout = hw[:1], 17
	}
	spec, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	o := &ownerNode{cmd: exec.CommandContext(t.Context(), exe)}
	o.cmd.Env = append(os.Environ(), ownerEnv+"="+string(spec))
	if w != nil {
		o.cmd.Env = append(o.cmd.Env, w.Env()...)
	}
	o.cmd.Stderr = os.Stderr
	o.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if o.stdin, err = o.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := o.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := o.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(o.kill)
	var descriptor []byte
	if err := json.NewDecoder(bufio.NewReader(out)).Decode(&descriptor); err != nil {
		t.Fatalf("the owner does not start: %v", err)
	}
	v, _ := id.SealValue(s.Life.Incarnation, 1)
	o.peer = transfer.Peer{Life: s.Life, Descriptor: descriptor, ArenaBytes: map[id.Rank]int64{0: s.Bytes}}
	o.seal = transfer.Seal{Index: 3, Value: v}
	return o
}

// kill ends the process, which may have ended.
func (o *ownerNode) kill() {
	_ = o.cmd.Process.Kill()
	_ = o.cmd.Wait()
}

// An owner that is killed while it is read ends the read within moments, and so
// does its link; nothing lands afterwards.
func TestOwnerIsKilledWhileItIsRead(t *testing.T) {
	const size = 8 << 20
	m, w := newMeeting(t, Options{})
	rounds := 3
	if w == nil {
		rounds = 2 // each takes a while there
	}
	long := make([]transfer.Copy, 2000) // a minute of work
	for i := range long {
		long[i] = transfer.Copy{Bytes: size}
	}
	for round := range rounds {
		socket := filepath.Join(shortDir(t), "owner")
		owner := startOwner(t, w, ownerSpec{Life: ownerLife, Socket: socket, Bytes: size, Seed: round})
		reader := newNode(t, readerLife, size)
		o := m.o
		o.Local, o.Call, o.Limits = reader.local, dialCall(socket), transfertest.Calm(transfer.Limits{})
		if w == nil {
			o.Devices = rdmatest.Hardware()[len(rdmatest.Hardware())-1:]
		}
		tr, err := Listen(o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { tr.Close() })
		reader.t = tr
		l := open(t, reader, owner.peer)
		if err := l.Read(short(t), []transfer.Seal{owner.seal}, long[:1]); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		want := make([]byte, size)
		pattern(want, round)
		if !bytes.Equal(reader.arena(), want) {
			t.Fatalf("round %d: other bytes than the owner's", round)
		}
		clear(reader.arena())
		done := make(chan error, 1)
		go func() { done <- l.Read(short(t), []transfer.Seal{owner.seal}, long) }()
		eventually(t, "no byte lands", func() bool { return reader.arena()[size-1] == want[size-1] && reader.arena()[size-2] == want[size-2] })
		owner.kill()
		killed := time.Now()
		select {
		case err = <-done:
		case <-time.After(patience):
			t.Fatalf("round %d: Read hangs", round)
		}
		took := time.Since(killed)
		e, ok := errors.AsType[*transfer.Error](err)
		if !ok || !errors.Is(err, transfer.ErrClosed) || e.Address == "" || e.Peer != ownerLife {
			t.Errorf("round %d: %v, want ErrClosed", round, err)
		}
		if w != nil && took > patience/4 {
			t.Errorf("round %d: the read ended %v after the owner", round, took)
		}
		t.Logf("round %d: the read ended %v after the owner: %v", round, took.Round(time.Millisecond), err)
		before := bytes.Clone(reader.arena())
		if err := l.Read(short(t), []transfer.Seal{owner.seal}, long[:1]); !errors.Is(err, transfer.ErrClosed) {
			t.Errorf("round %d: a read after the end: %v", round, err)
		}
		if !bytes.Equal(before, reader.arena()) {
			t.Errorf("round %d: a byte landed after Read had returned", round)
		}
	}
}

// An owner that is killed while it gathers, or while its device does not, ends the
// read within moments, and a byte that was staged lands nowhere afterwards.
func TestOwnerIsKilledWhileItGathers(t *testing.T) {
	const size = 8 << 20
	for name, held := range map[string]bool{"gathering": false, "its device hangs": true} {
		t.Run(name, func(t *testing.T) {
			m, w := newMeeting(t, Options{})
			socket := filepath.Join(shortDir(t), "owner")
			owner := startOwner(t, w, ownerSpec{Life: ownerLife, Socket: socket, Bytes: size, Seed: 1, Device: true, Held: held})
			device := newDevice(t, transfertest.DeviceOptions{})
			reader := deviceNode(t, readerLife, places(device)[Staged], size, 1)
			o := m.o
			o.Local, o.Call, o.Limits = reader.local, dialCall(socket), transfertest.Calm(transfer.Limits{Stall: patience})
			if w == nil {
				o.Devices = rdmatest.Hardware()[len(rdmatest.Hardware())-1:]
			}
			tr, err := Listen(o)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { tr.Close() })
			reader.t = tr
			l := open(t, reader, owner.peer)
			long := make([]transfer.Copy, 2000)
			for i := range long {
				long[i] = transfer.Copy{Bytes: size}
			}
			done := make(chan error, 1)
			go func() { done <- l.Read(short(t), []transfer.Seal{owner.seal}, long) }()
			if held {
				eventually(t, "something is asked", func() bool {
					return tr.landing.Lent() > 0
				})
			} else {
				eventually(t, "something is scattered", func() bool { return tr.Stats().StagedBytes > size })
			}
			owner.kill()
			killed := time.Now()
			select {
			case err = <-done:
			case <-time.After(patience):
				t.Fatal("Read hangs")
			}
			took := time.Since(killed)
			if !errors.Is(err, transfer.ErrClosed) || w != nil && took > patience/4 {
				t.Errorf("%v, %v after the owner", err, took)
			}
			reader.put(make([]byte, size)) // somebody else's
			if n := device.Counts().Live; n != 0 || tr.landing.Lent() != 0 {
				t.Errorf("%d copies run, and %d buffers are in use", n, tr.landing.Lent())
			}
			if !bytes.Equal(reader.bytes(), make([]byte, size)) {
				t.Error("a byte landed after Read had returned")
			}
		})
	}
}

// A reader that is killed with buffers under way leaves no ring behind.
func TestReaderIsKilledWhileItIsGatheredFor(t *testing.T) {
	m, w := newMeeting(t, Options{})
	device := newDevice(t, transfertest.DeviceOptions{Delay: time.Millisecond})
	owner := deviceNode(t, ownerLife, places(device)[Staged], 4<<20, 1)
	owner.listen(t, m, Options{Staging: 4 * leastStaging})
	socket := filepath.Join(shortDir(t), "owner")
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var work sync.WaitGroup
	defer work.Wait()
	defer l.Close()
	work.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			work.Go(func() { answer1(owner.t, c) })
		}
	})
	seal := owner.hold(3, 1)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for round := range 3 {
		s := readerSpec{Peer: owner.peer(), Seal: seal, Socket: socket, Bytes: 4 << 20}
		if w == nil {
			s.Devices, s.Timeout = rdmatest.Hardware()[len(rdmatest.Hardware())-1:], 17
		}
		spec, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), exe)
		cmd.Env = append(os.Environ(), readerEnv+"="+string(spec))
		if w != nil {
			cmd.Env = append(cmd.Env, w.Env()...)
		}
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		before := owner.t.Stats().Gathers
		eventually(t, "the reader reads", func() bool { return owner.t.Stats().Gathers > before+20 })
		if round == 1 {
			device.Hold() // it is killed while nothing ends
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // it was killed
		if round == 1 {
			eventually(t, "its queue pairs are destroyed", func() bool { return w == nil || w.Counts().QPs == 0 })
			if owner.t.Stats().Rings == 0 {
				t.Error("rings are given back that a device writes to")
			}
			device.Release()
		}
		eventually(t, "its rings are given back", func() bool { s := owner.t.Stats(); return s.Rings == 0 && s.Accepted == 0 })
		if n := owner.t.rings.Lent(); n != 0 || device.Counts().Live != 0 {
			t.Errorf("%d rings are in use, %d copies run", n, device.Counts().Live)
		}
	}
}

// readerEnv is set, with a [readerSpec], where this binary is a reader.
const readerEnv = "KVFERRY_RDMA_READER"

type readerSpec struct {
	Peer    transfer.Peer
	Seal    transfer.Seal
	Socket  string
	Devices []string
	Bytes   int64
	Timeout uint8
}

// readerProcess reads for ever.
func readerProcess() int {
	err := func() error {
		var s readerSpec
		if err := json.Unmarshal([]byte(os.Getenv(readerEnv)), &s); err != nil {
			return err
		}
		seals, err := memory.NewSealTable()
		if err != nil {
			return err
		}
		arena, err := transfertest.NewDevice(transfertest.DeviceOptions{}).Alloc(s.Bytes)
		if err != nil {
			return err
		}
		t, err := Listen(Options{
			Local:   transfer.Local{Life: readerLife, Arenas: map[id.Rank]memory.Arena{0: arena}, Seals: seals},
			Devices: s.Devices, Timeout: s.Timeout, Call: dialCall(s.Socket), Staging: 2 * leastStaging, Limits: transfertest.Calm(transfer.Limits{}),
		})
		if err != nil {
			return err
		}
		l, err := t.Open(context.Background(), s.Peer)
		for err == nil {
			err = l.Read(context.Background(), []transfer.Seal{s.Seal}, []transfer.Copy{{Bytes: s.Bytes}})
		}
		return err
	}()
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// An owner that is stopped is read all the same: its processor takes no part.
func TestOwnerIsStoppedAndReadAllTheSame(t *testing.T) {
	const size = 4 << 20
	m, w := newMeeting(t, Options{})
	socket := filepath.Join(shortDir(t), "owner")
	owner := startOwner(t, w, ownerSpec{Life: ownerLife, Socket: socket, Bytes: size, Seed: 1})
	reader := newNode(t, readerLife, size)
	o := m.o
	o.Local, o.Call, o.Limits = reader.local, dialCall(socket), transfertest.Calm(transfer.Limits{})
	if w == nil {
		o.Devices = rdmatest.Hardware()[len(rdmatest.Hardware())-1:]
	}
	tr, err := Listen(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tr.Close() })
	reader.t = tr
	l := open(t, reader, owner.peer)
	if err := owner.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer owner.cmd.Process.Signal(syscall.SIGCONT)
	if err := l.Read(short(t), []transfer.Seal{owner.seal}, []transfer.Copy{{Bytes: size}}); err != nil {
		t.Fatalf("Read of an owner that is stopped: %v", err)
	}
	want := make([]byte, size)
	pattern(want, 1)
	if !bytes.Equal(reader.arena(), want) {
		t.Error("other bytes than the owner's")
	}
}

// shortDir is a directory whose path leaves room for the name of a socket.
func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "rdma")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}
