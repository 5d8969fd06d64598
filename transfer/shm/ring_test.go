package shm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rendezvous"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

const ringArena = 8 << 20

// ringPair is an owner with a device, and a reader with one if it is to have.
func ringPair(t testing.TB, readerToo bool, o, r Options) (owner, reader *node) {
	t.Helper()
	owner, reader = newDeviceNode(t, ownerLife, ringArena), newNode(t, readerLife, ringArena)
	if readerToo {
		reader = newDeviceNode(t, readerLife, ringArena)
	}
	b := make([]byte, ringArena)
	pattern(b, 1)
	transfertest.Poke(owner.local.Arenas[0], 0, b)
	o.Dir = meeting(t)
	r.Dir = o.Dir
	owner.listen(t, o)
	reader.listen(t, r)
	return owner, reader
}

// rings asks for files of the ring, and does with the connection as then says.
func rings(then func(c *rendezvous.Conn) error) acting {
	return acting{watch: then, attach: func(c *rendezvous.Conn) error {
		for _, label := range []uint16{sealLabel, ringLabel} {
			f, err := c.ReceiveFile(label)
			if err != nil {
				return err
			}
			_ = f.Close()
		}
		return c.Settle()
	}}
}

// A reader that asks for garbage loses its connection, and is counted; nothing of
// its ring is left, and others read on.
func TestHostileReaderOfARing(t *testing.T) {
	owner, reader := ringPair(t, false, Options{}, Options{})
	seal := owner.hold(1, 1)
	l := open(t, reader, owner.peer())
	pinned := owner.device.Counts().Pinned
	hostile := meets(t, owner.dir)
	ask := func(buffer int, copies ...transfer.Copy) []byte { return appendAsk(nil, buffer, copies) }
	good := transfer.Copy{Bytes: 4096}
	owner.device.Hold(transfertest.ToHost)
	for name, asks := range map[string][][]byte{
		"nothing":                    {nil},
		"no copy":                    {ask(0)},
		"a buffer that is not there": {ask(ringBuffers, good)},
		"a buffer twice":             {ask(1, good), ask(1, good)},
		"a rank that is not there":   {ask(0, transfer.Copy{Rank: 1, Bytes: 1})},
		"bytes behind the arena":     {ask(0, transfer.Copy{Remote: ringArena, Bytes: 1})},
		"bytes at -1":                {ask(0, transfer.Copy{Remote: -1, Bytes: 2})},
		"more than a buffer":         {ask(0, transfer.Copy{Bytes: 1 << 20}, good)},
		"no bytes":                   {ask(0, transfer.Copy{})},
		"garbage behind what counts": {ask(0, good), ask(2, good), ask(3)},
	} {
		before := owner.t.Stats()
		h, err := hostile.Open(short(t), owner.peer(), rings(func(c *rendezvous.Conn) error {
			for _, body := range asks {
				if err := c.Send(kindAsk, body); err != nil {
					return err
				}
			}
			for {
				if _, _, err := c.Receive(maxFilledBody); err != nil {
					return err
				}
			}
		}))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if len(asks) > 1 { // what was right is under way, and its ring stays until it is over
			eventually(t, name+": no copy has begun", func() bool { return owner.device.Counts().Live == len(asks)-1 })
			if owner.t.Stats().Rings != 2 {
				t.Errorf("%s: %d rings while copies run into them, want 2", name, owner.t.Stats().Rings)
			}
			owner.device.Let(transfertest.ToHost, len(asks)-1)
		}
		<-h.Ended()
		h.Close()
		eventually(t, name+" is not counted", func() bool { return owner.t.Stats().Garbage == before.Garbage+1 })
		eventually(t, name+": its ring is left", func() bool {
			return owner.t.Stats().Rings == 1 && owner.t.Stats().Accepted == 1 && owner.device.Counts().Pinned == pinned
		})
	}
	owner.device.Release()
	if err := l.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: ringArena}}); err != nil {
		t.Errorf("a good reader: %v", err)
	}
}

// There is room for so many rings, whoever comes; who leaves makes room.
func TestRingsAreBounded(t *testing.T) {
	owner, reader := ringPair(t, false, Options{Staging: 2 << 20}, Options{})
	room := cap(owner.t.staging.room)
	pinned := owner.device.Counts().Pinned
	var links []*link
	for range room {
		links = append(links, open(t, reader, owner.peer()))
	}
	_, err := reader.t.Open(short(t), owner.peer())
	if !errors.Is(err, transfer.ErrUnavailable) || !strings.Contains(err.Error(), "busy") {
		t.Errorf("one ring too many: %v, want that the owner is busy", err)
	}
	if got := owner.device.Counts().Pinned - pinned; got > 1<<20 || got == 0 {
		t.Errorf("%d bytes of rings are pinned, want at most half of the memory for staging", got)
	}
	if s := owner.t.Stats(); s.Rings != room || s.Refused != 1 {
		t.Errorf("stats %+v, want %d rings and one refused", s, room)
	}
	if err := links[0].Close(); err != nil {
		t.Error(err)
	}
	eventually(t, "a ring that was given up counts", func() bool { return owner.t.Stats().Rings == room-1 })
	open(t, reader, owner.peer())
}

// While our device empties a buffer the owner's fills others, and while one is
// emptied the next is filled by our processors: nothing waits for the whole way.
func TestCopiesOverlap(t *testing.T) {
	t.Run("device to device", func(t *testing.T) {
		owner, reader := ringPair(t, true, Options{}, Options{})
		seal := owner.hold(1, 1)
		l := open(t, reader, owner.peer())
		reader.device.Hold(transfertest.FromHost)
		done := make(chan error, 1)
		go func() { done <- l.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: ringArena}}) }()
		eventually(t, "not every buffer is filled while none is emptied", func() bool {
			return owner.device.Counts().Calls[transfertest.ToHost] == ringBuffers && owner.device.Counts().Live == 0
		})
		eventually(t, "not two buffers are being emptied", func() bool { return reader.device.Counts().Live >= 1 })
		reader.device.Release()
		if err := <-done; err != nil {
			t.Error(err)
		}
		same(t, owner, reader)
	})
	t.Run("host to device", func(t *testing.T) {
		owner, reader := newNode(t, ownerLife, ringArena), newDeviceNode(t, readerLife, ringArena)
		pattern(owner.arena(), 1)
		o := Options{Dir: meeting(t), Workers: 1}
		owner.listen(t, o)
		reader.listen(t, o)
		seal := owner.hold(1, 1)
		l := open(t, reader, owner.peer())
		reader.device.Hold(transfertest.FromHost)
		done := make(chan error, 1)
		go func() { done <- l.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: ringArena}}) }()
		eventually(t, "no second buffer is filled while the first is emptied", func() bool { return reader.device.Counts().Live == 2 })
		reader.device.Release()
		if err := <-done; err != nil {
			t.Error(err)
		}
		same(t, owner, reader)
	})
}

// same compares the arenas.
func same(t testing.TB, owner, reader *node) {
	t.Helper()
	want, got := make([]byte, ringArena), make([]byte, ringArena)
	transfertest.Peek(owner.local.Arenas[0], 0, want)
	transfertest.Peek(reader.local.Arenas[0], 0, got)
	if !slices.Equal(want, got) {
		t.Error("other bytes than the owner's")
	}
}

// One call of a device for a buffer and a rank, however small the pages are.
func TestOneCallABuffer(t *testing.T) {
	owner, reader := ringPair(t, true, Options{}, Options{})
	seal := owner.hold(1, 1)
	l := open(t, reader, owner.peer())
	for _, chunk := range []int{512, 4096, 64 << 10} {
		before := [2]transfertest.Counts{owner.device.Counts(), reader.device.Counts()}
		copies := shuffled(ringArena, chunk)
		if err := l.Read(short(t), []transfer.Seal{seal}, copies); err != nil {
			t.Fatal(err)
		}
		per := min(l.ring.size/chunk, maxCopies) // copies of one buffer
		want := (len(copies) + per - 1) / per
		for i, d := range []*transfertest.Device{owner.device, reader.device} {
			of := []transfertest.Direction{transfertest.ToHost, transfertest.FromHost}[i]
			if got := d.Counts().Calls[of] - before[i].Calls[of]; got != want {
				t.Errorf("%d copies of %d bytes are %d calls of side %d, want %d", len(copies), chunk, got, i, want)
			}
			if got := d.Counts().Segments[of] - before[i].Segments[of]; got < len(copies) {
				t.Errorf("%d copies of %d bytes are %d segments of side %d", len(copies), chunk, got, i)
			}
		}
	}
	if n := owner.device.Counts().Slow + reader.device.Counts().Slow; n > 0 {
		t.Errorf("%d calls with memory that is not pinned", n)
	}
	if s := owner.t.Stats(); s.StagedBytes != 3*ringArena {
		t.Errorf("stats %+v, want %d staged bytes", s, 3*ringArena)
	}
}

// Reads that are cancelled while their buffers are being filled return at once;
// the buffers come back when the owner has answered, and nothing of them lands.
func TestDroppedBuffersComeBack(t *testing.T) {
	owner, reader := ringPair(t, false, Options{}, Options{Limits: transfer.Limits{Stall: 3 * time.Second}}) // which only the read without a buffer takes
	seals := []transfer.Seal{owner.hold(1, 1)}
	l := open(t, reader, owner.peer())
	owner.device.Hold(transfertest.ToHost)
	ctx, cancel := context.WithCancel(short(t))
	done := make(chan error, 1)
	go func() { done <- l.Read(ctx, seals, []transfer.Copy{{Bytes: ringArena}}) }()
	eventually(t, "not all buffers are asked for", func() bool { return owner.device.Counts().Live == ringBuffers })
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("Read: %v, want Canceled", err)
	}
	before := reader.arena()[0]
	err := l.Read(short(t), seals, []transfer.Copy{{Bytes: 4096}})
	if !errors.Is(err, transfer.ErrStalled) {
		t.Errorf("a read for which there is no buffer: %v, want ErrStalled", err)
	}
	owner.device.Release()
	eventually(t, "the buffers do not come back", func() bool { return len(l.ring.free) == ringBuffers })
	if reader.arena()[0] != before {
		t.Error("a byte landed behind its read")
	}
	if err := l.Read(short(t), seals, []transfer.Copy{{Bytes: ringArena}}); err != nil {
		t.Error(err)
	}
	same(t, owner, reader)
}

// An owner whose reader goes away in the middle waits for its device before it
// frees the ring, and a transport that has closed touches no arena.
func TestOwnerWaitsForItsDevice(t *testing.T) {
	owner, reader := ringPair(t, false, Options{Limits: transfer.Limits{Stall: 50 * time.Millisecond}}, Options{})
	seals := []transfer.Seal{owner.hold(1, 1)}
	pinned := owner.device.Counts().Pinned
	l := open(t, reader, owner.peer())
	owner.device.Hold(transfertest.ToHost)
	done := make(chan error, 1)
	go func() { done <- l.Read(short(t), seals, []transfer.Copy{{Bytes: ringArena}}) }()
	eventually(t, "no copy has begun", func() bool { return owner.device.Counts().Live > 0 })
	_ = l.Close()
	if err := <-done; !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("Read: %v, want ErrClosed", err)
	}
	closed := make(chan error, 1)
	go func() { closed <- owner.t.Close() }()
	eventually(t, "the owner does not close", func() bool {
		_, err := reader.t.Open(short(t), owner.peer())
		return err != nil
	})
	select {
	case err := <-closed:
		t.Errorf("the owner closed below its device's copies: %v", err)
	case <-time.After(4 * 50 * time.Millisecond): // the stall time is long over
	}
	if c := owner.device.Counts(); c.Pinned == pinned || c.Live == 0 {
		t.Errorf("%+v while copies are held, want the ring", c)
	}
	owner.device.Release()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if c := owner.device.Counts(); c.Pinned != 0 || c.Live != 0 || c.Unwaited != 0 {
		t.Errorf("%+v behind Close", c)
	}
}

// What the owner's device died of is what its reader hears.
func TestReaderHearsWhatTheDeviceDiedOf(t *testing.T) {
	owner, reader := ringPair(t, false, Options{}, Options{})
	l := open(t, reader, owner.peer())
	owner.device.Kill(errors.New("an illegal address was met"))
	err := l.Read(short(t), []transfer.Seal{owner.hold(1, 1)}, []transfer.Copy{{Bytes: ringArena}})
	if e, ok := errors.AsType[*transfer.Error](err); !ok || e.Done != 0 || !strings.Contains(err.Error(), "an illegal address was met") || !strings.Contains(err.Error(), "the peer") {
		t.Errorf("Read: %v, want the reason", err)
	}
}

// A word that changes while a buffer is filled ends the read stale, whatever came.
func TestSealIsReadBehindTheDevice(t *testing.T) {
	owner, reader := ringPair(t, true, Options{}, Options{})
	seals := []transfer.Seal{owner.hold(1, 1)}
	l := open(t, reader, owner.peer())
	reader.device.Hold(transfertest.FromHost)
	done := make(chan error, 1)
	go func() { done <- l.Read(short(t), seals, []transfer.Copy{{Bytes: 4096}}) }()
	eventually(t, "nothing is being emptied", func() bool { return reader.device.Counts().Live == 1 })
	owner.local.Seals.Store(1, 0)
	reader.device.Release()
	if err := <-done; !errors.Is(err, transfer.ErrStale) {
		t.Errorf("Read: %v, want ErrStale", err)
	}
}

// BenchmarkReadStaged is what a read costs beside what devices take, which here
// are processors that copy.
func BenchmarkReadStaged(b *testing.B) {
	const read = 4 << 20
	for name, device := range map[string][2]bool{"device-host": {true, false}, "host-device": {false, true}, "device-device": {true, true}} {
		made := func(life id.Life, device bool) *node {
			if device {
				return newDeviceNode(b, life, ringArena)
			}
			return newNode(b, life, ringArena)
		}
		owner, reader := made(ownerLife, device[0]), made(readerLife, device[1])
		o := Options{Dir: meeting(b)}
		owner.listen(b, o)
		reader.listen(b, o)
		l := open(b, reader, owner.peer())
		seals := []transfer.Seal{owner.hold(1, 1)}
		for _, chunk := range []int{4 << 10, 64 << 10} {
			copies := shuffled(ringArena, chunk)[:read/chunk]
			b.Run(fmt.Sprintf("%s/chunk=%d", name, chunk), func(b *testing.B) {
				b.SetBytes(read)
				b.ReportAllocs()
				for b.Loop() {
					if err := l.Read(b.Context(), seals, copies); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
