package tcp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
	"github.com/kvferry/kvferry/transfer"
)

// fakePeer is a peer whose owner is a script.
func fakePeer(address net.Addr) transfer.Peer {
	return at(transfer.Peer{Life: ownerLife, ArenaBytes: map[id.Rank]int64{0: 1 << 20}}, address)
}

// newReader is a reader with an arena full of 0xcc.
func newReader(t testing.TB, o Options) *node {
	t.Helper()
	n := newNode(t, readerLife, 1<<20)
	fill(n.arena(), []byte{0xcc})
	n.listen(t, o)
	return n
}

// untouched wants every byte outside of the copies to be 0xcc.
func untouched(t testing.TB, n *node, copies ...transfer.Copy) {
	t.Helper()
	a := slices.Clone(n.arena())
	for _, c := range copies {
		fill(a[c.Local:][:c.Bytes], []byte{0xcc})
	}
	if same := bytes.Count(a, []byte{0xcc}); same != len(a) { // quick under the race detector too
		t.Errorf("%d bytes that are no destination were written, the first is %d", len(a)-same, slices.IndexFunc(a, func(b byte) bool { return b != 0xcc }))
	}
}

// around wants took to be the limit, and not much more.
func around(t testing.TB, what string, took, limit time.Duration) {
	t.Helper()
	if took < limit*4/5 || took > limit+20*time.Second {
		t.Errorf("%s took %v, want about %v", what, took, limit)
	}
}

func TestMuteServer(t *testing.T) {
	silent := script(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	hasty := newReader(t, Options{Limits: transfer.Limits{Dial: 150 * time.Millisecond}})
	started := time.Now()
	_, err := hasty.t.Open(short(t), fakePeer(silent))
	if !errors.Is(err, transfer.ErrStalled) || !strings.Contains(err.Error(), ownerLife.String()) {
		t.Errorf("Open: %v, want ErrStalled and the peer's name", err)
	}
	around(t, "Open", time.Since(started), 150*time.Millisecond)

	greets := script(t, func(c net.Conn) {
		if greet(c) == nil {
			_, _ = io.Copy(io.Discard, c)
		}
	})
	reader := newReader(t, Options{Limits: transfer.Limits{Stall: 100 * time.Millisecond}})
	link := open(t, reader, fakePeer(greets))
	started = time.Now()
	err = link.Read(short(t), []transfer.Seal{{Value: 1}}, []transfer.Copy{{Bytes: 3 << 18}})
	if !errors.Is(err, transfer.ErrStalled) {
		t.Errorf("Read: %v, want ErrStalled", err)
	}
	around(t, "Read", time.Since(started), 100*time.Millisecond)
	if e, ok := errors.AsType[*transfer.Error](err); !ok || e.Address != greets.String() || e.Peer != ownerLife || e.Total != 3<<18 || e.Done != 0 {
		t.Errorf("Read: %+v", err)
	}
	for n, errs := range map[*node]uint64{hasty: 0, reader: 1} {
		if s := n.t.Stats(); s.Errors != errs || s.Dialled != 0 {
			t.Errorf("stats %+v", s)
		}
		untouched(t, n)
	}
}

// A peer that never stalls but is too slow ends with the total time.
func TestTotalTime(t *testing.T) {
	drips := script(t, func(c net.Conn) {
		if greet(c) != nil {
			return
		}
		h, _, err := receiveFrame(c)
		if err != nil {
			return
		}
		_, err = c.Write(appendHeader(nil, dataOf(h.request, 1<<19)))
		for err == nil {
			time.Sleep(10 * time.Millisecond) // the fault
			_, err = c.Write([]byte{1})
		}
	})
	const total = 3 * time.Second // in which some bytes land on any machine
	reader := newReader(t, Options{Limits: transfer.Limits{Base: total, Rate: 1 << 40}})
	link := open(t, reader, fakePeer(drips))
	started := time.Now()
	err := link.Read(short(t), []transfer.Seal{{Value: 1}}, []transfer.Copy{{Bytes: 1 << 19}})
	around(t, "Read", time.Since(started), total)
	e, ok := errors.AsType[*transfer.Error](err)
	if !errors.Is(err, transfer.ErrStalled) || !ok || e.Done == 0 || e.Done > 1000 {
		t.Errorf("Read: %v, want ErrStalled and the few bytes that landed", err)
	}
}

// A hostile owner gets an error that says what was wrong, and writes nowhere
// but into the destinations.
func TestHostileAnswers(t *testing.T) {
	copies := []transfer.Copy{{Local: 100, Bytes: 50}, {Local: 5000, Bytes: 50}}
	data := bytes.Repeat([]byte{0xdd}, 100)
	h := func(k kind, request uint64, length, aux uint32) header {
		return header{kind: k, owner: ownerLife.Incarnation, request: request, length: length, aux: aux}
	}
	frame := appendHeader
	held := uint32(verdictHeld)
	otherLife := h(kindData, 1, 100, 0)
	otherLife.owner++
	lateLife := h(kindVerdict, 1, 0, held)
	lateLife.owner++
	badVersion := frame(nil, h(kindData, 1, 100, 0))
	badVersion[3] = 2
	for name, tt := range map[string]struct {
		answer []byte
		want   error
	}{
		"data of another life":         {frame(nil, otherLife), transfer.ErrIdentity},
		"verdict of another life":      {frame(append(frame(nil, h(kindData, 1, 100, 0)), data...), lateLife), transfer.ErrIdentity},
		"identity":                     {frame(nil, h(kindVerdict, 1, 0, uint32(verdictIdentity))), transfer.ErrIdentity},
		"stale":                        {frame(nil, h(kindVerdict, 1, 0, uint32(verdictStale))), transfer.ErrStale},
		"stale at the end":             {frame(append(frame(nil, h(kindData, 1, 100, 0)), data...), h(kindVerdict, 1, 0, uint32(verdictStale))), transfer.ErrStale},
		"range":                        {frame(nil, h(kindVerdict, 1, 0, uint32(verdictRange))), transfer.ErrRange},
		"another request":              {frame(nil, h(kindData, 2, 100, 0)), errGarbage},
		"another version":              {badVersion, errGarbage},
		"fewer bytes":                  {frame(append(frame(nil, h(kindData, 1, 99, 0)), data[:99]...), h(kindVerdict, 1, 0, held)), errGarbage},
		"more bytes":                   {frame(append(frame(nil, h(kindData, 1, 101, 0)), append(data, 1)...), h(kindVerdict, 1, 0, held)), errGarbage},
		"4 GiB":                        {frame(nil, h(kindData, 1, 1<<32-1, 0)), errGarbage},
		"held without bytes":           {frame(nil, h(kindVerdict, 1, 0, held)), errGarbage},
		"verdict 0":                    {frame(append(frame(nil, h(kindData, 1, 100, 0)), data...), h(kindVerdict, 1, 0, 0)), errGarbage},
		"verdict 99":                   {frame(nil, h(kindVerdict, 1, 0, 99)), errGarbage},
		"verdict with bytes":           {frame(append(frame(nil, h(kindData, 1, 100, 0)), data...), h(kindVerdict, 1, 5, held)), errGarbage},
		"verdict of another request":   {frame(append(frame(nil, h(kindData, 1, 100, 0)), data...), h(kindVerdict, 2, 0, held)), errGarbage},
		"data instead of a verdict":    {frame(append(frame(nil, h(kindData, 1, 100, 0)), data...), h(kindData, 1, 0, 0)), errGarbage},
		"welcome instead of data":      {appendWelcome(nil, welcome{owner: ownerLife, bytes: 1, copies: 1, seals: 1, inFlight: 1}), errGarbage},
		"data with a verdict in it":    {frame(nil, h(kindData, 1, 100, held)), errGarbage},
		"text":                         {[]byte("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"), errGarbage},
		"nothing":                      {nil, io.ErrUnexpectedEOF},
		"half a header":                {frame(nil, h(kindData, 1, 100, 0))[:20], io.ErrUnexpectedEOF},
		"half the bytes":               {append(frame(nil, h(kindData, 1, 100, 0)), data[:60]...), io.ErrUnexpectedEOF},
		"no verdict":                   {append(frame(nil, h(kindData, 1, 100, 0)), data...), io.ErrUnexpectedEOF},
		"held, and a tail of rubbish":  {append(frame(append(frame(nil, h(kindData, 1, 100, 0)), data...), h(kindVerdict, 1, 0, held)), data...), nil},
		"stale, and a tail of rubbish": {append(frame(nil, h(kindVerdict, 1, 0, uint32(verdictStale))), data...), transfer.ErrStale},
	} {
		t.Run(name, func(t *testing.T) {
			owner := script(t, func(c net.Conn) {
				if greet(c) != nil {
					return
				}
				if _, _, err := receiveFrame(c); err != nil {
					return
				}
				if _, err := c.Write(tt.answer); err != nil {
					return
				}
				if errors.Is(tt.want, io.ErrUnexpectedEOF) {
					return // hang up
				}
				_, _ = io.Copy(io.Discard, c)
			})
			reader := newReader(t, Options{})
			link := open(t, reader, fakePeer(owner))
			err := link.Read(short(t), []transfer.Seal{{Value: 1}}, copies)
			if !errors.Is(err, tt.want) {
				t.Errorf("Read: %v, want %v", err, tt.want)
			}
			if e, ok := errors.AsType[*transfer.Error](err); err != nil && (!ok || e.Total != 100 || e.Done < 0 || e.Done > 100) {
				t.Errorf("Read: %+v", err)
			}
			untouched(t, reader, copies...)
			if strings.HasSuffix(name, "rubbish") {
				err := link.Read(short(t), []transfer.Seal{{Value: 1}}, copies)
				if !errors.Is(err, errGarbage) {
					t.Errorf("the read after rubbish: %v, want garbage", err)
				}
				untouched(t, reader, copies...)
			}
		})
	}
}

func TestHostileWelcome(t *testing.T) {
	good := appendWelcome(nil, welcome{owner: ownerLife, bytes: 1, copies: 1, seals: 1, inFlight: 1})
	change := func(at int, to byte) []byte {
		b := slices.Clone(good)
		b[at] = to
		return b
	}
	for name, tt := range map[string]struct {
		answer []byte
		want   error
	}{
		"another incarnation": {appendWelcome(nil, welcome{owner: id.Life{Node: "owner", Incarnation: 3}, bytes: 1, copies: 1, seals: 1, inFlight: 1}), transfer.ErrIdentity},
		"another name":        {appendWelcome(nil, welcome{owner: id.Life{Node: "other", Incarnation: ownerLife.Incarnation}, bytes: 1, copies: 1, seals: 1, inFlight: 1}), transfer.ErrIdentity},
		"identity":            {appendHeader(nil, verdictOf(0, verdictIdentity)), transfer.ErrIdentity},
		"stale":               {appendHeader(nil, verdictOf(0, verdictStale)), errGarbage},
		"a bound of 0":        {change(len(good)-1, 0), errGarbage},
		"a huge one":          {change(24, 0xff), errGarbage},
		"a short one":         {change(27, 5), errGarbage},
		"with a request":      {change(23, 1), errGarbage},
		"text":                {[]byte("SSH-2.0-OpenSSH_9.9 and so on and so forth\r\n"), errGarbage},
		"cut off":             {good[:40], io.ErrUnexpectedEOF},
		"nothing":             {nil, io.ErrUnexpectedEOF},
	} {
		owner := script(t, func(c net.Conn) {
			if _, _, err := receiveFrame(c); err == nil {
				_, _ = c.Write(tt.answer)
			}
		})
		reader := newReader(t, Options{})
		link, err := reader.t.Open(short(t), fakePeer(owner))
		if err == nil {
			_ = link.Close()
		}
		if !errors.Is(err, tt.want) {
			t.Errorf("welcome: %s: %v, want %v", name, err, tt.want)
		}
		if n := reader.t.Stats().Dialled; n != 0 {
			t.Errorf("welcome: %s: %d connections are left", name, n)
		}
	}
}

// Answers to requests that were never sent are not taken.
func TestAnswersAhead(t *testing.T) {
	copies := make([]transfer.Copy, 1000)
	for i := range copies {
		copies[i] = transfer.Copy{Local: int64(i) * 100, Bytes: 100}
	}
	owner := script(t, func(c net.Conn) {
		if greet(c) != nil {
			return
		}
		var b []byte
		for i := range uint64(10) {
			b = append(appendHeader(b, dataOf(i+1, 10_000)), make([]byte, 10_000)...)
			b = appendHeader(b, verdictOf(i+1, verdictHeld))
		}
		_, _ = c.Write(b)
		_, _ = io.Copy(io.Discard, c)
	})
	reader := newReader(t, Options{})
	link := open(t, reader, fakePeer(owner))
	err := link.Read(short(t), []transfer.Seal{{Value: 1}}, copies)
	// If the requests were faster than the answers they may be answers.
	if err != nil && !errors.Is(err, errGarbage) {
		t.Errorf("Read: %v", err)
	}
	untouched(t, reader, copies...)
}

// Whatever the bounds of the peer, every byte arrives.
func TestUnlikeBounds(t *testing.T) { bothWays(t, testUnlikeBounds) }

func testUnlikeBounds(t *testing.T, o, r Options) {
	for _, offer := range []welcome{
		{bytes: 1 << 30, copies: 1 << 30, seals: 1 << 30, inFlight: 1 << 30},
		{bytes: 5000, copies: 1 << 20, seals: 2, inFlight: 1},
		{bytes: 5000, copies: 3, seals: 2, inFlight: 2},
		{bytes: 40 << 10, copies: 7, seals: 2, inFlight: 3},
	} {
		owner, reader := newPair(t, 1<<20, o, r)
		offer.owner = ownerLife
		owner.t.server.mu.Lock()
		owner.t.server.offer = offer
		owner.t.server.mu.Unlock()
		seals := []transfer.Seal{owner.hold(1, 1), owner.hold(2, 2)}
		link := open(t, reader, owner.peer())
		var copies []transfer.Copy
		want := slices.Clone(reader.arena())
		for i := range int64(50) {
			c := transfer.Copy{Remote: (49 - i) * 20_000, Local: i*20_000 + 3, Bytes: 1 + i*390}
			copies = append(copies, c)
			copy(want[c.Local:c.Local+c.Bytes], owner.arena()[c.Remote:])
		}
		for range 3 {
			if err := link.Read(short(t), seals, copies); err != nil {
				t.Fatalf("bounds %+v: %v", offer, err)
			}
			if !bytes.Equal(reader.arena(), want) {
				t.Fatalf("bounds %+v: other bytes", offer)
			}
			clear(reader.arena())
			clear(want)
			for _, c := range copies {
				copy(want[c.Local:c.Local+c.Bytes], owner.arena()[c.Remote:])
			}
		}
		if offer.seals == 2 {
			err := link.Read(short(t), append(seals, owner.hold(3, 3)), copies)
			if err == nil || errors.Is(err, transfer.ErrStale) {
				t.Errorf("more seals than the peer takes: %v", err)
			}
		}
	}
}

// places are offsets at which to disturb a connection: each one of the read, or
// of a connection with TLS, whose handshake is long, some of both.
func places(secure bool, shake, whole int) (at []int) {
	if !secure {
		shake = whole
	}
	sparse, dense := 1, 1
	switch {
	case secure && *soak < time.Minute:
		sparse, dense = 211, 7
	case secure:
		sparse, dense = 97, 3
	}
	for n := rand.IntN(sparse); n < shake; n += sparse {
		at = append(at, n)
	}
	for n := shake + rand.IntN(dense); n < whole; n += dense {
		at = append(at, n)
	}
	return at
}

// TestCutAtEveryByte ends the connection after every number of bytes, in each
// direction. A read ends with an error, or is right, and the link works again
// when the network does.
func TestCutAtEveryByte(t *testing.T) { bothWays(t, cutAtEveryByte) }

func cutAtEveryByte(t *testing.T, o, r Options) {
	disturb(t, o, r, transfer.Limits{}, func(up, down int) cut { return cut{up: up, down: down} })
}

// With TLS, a byte that was changed on the way is an error, and never a byte.
func TestChangedBytes(t *testing.T) {
	a := newAuthority(t)
	o, r := Options{Identity: issue(t, a, ownerLife.Node, nil)}, Options{Identity: issue(t, a, readerLife.Node, nil)}
	// A length that has grown is waited for.
	const soon = 300 * time.Millisecond
	disturb(t, o, r, transfer.Limits{Dial: soon, Stall: soon}, func(up, down int) cut { return cut{up: up, down: down, flip: true} })
}

// disturb lets faults happen to reads with these limits.
func disturb(t *testing.T, o, r Options, limits transfer.Limits, fault func(up, down int) cut) {
	owner, reader := newPair(t, 4096, o, r)
	seals := []transfer.Seal{owner.hold(7, 41)}
	copies := []transfer.Copy{{Remote: 100, Local: 7, Bytes: 40}, {Remote: 3, Local: 900, Bytes: 5}}
	p := newProxy(t, owner.t.Bound())
	peer := at(owner.peer(), p.address)
	link := open(t, reader, peer)
	up, down := p.passed()
	shakeUp, shakeDown := len(up), len(down)
	if err := link.Read(short(t), seals, copies); err != nil {
		t.Fatal(err)
	}
	up, down = p.passed()
	ups, downs := len(up), len(down)
	want := slices.Clone(reader.arena())

	try := func(c cut) {
		p.set(c)
		defer p.set(cut{up: -1, down: -1})
		reader.hurry(limits)
		link, err := reader.t.Open(short(t), peer)
		if err != nil { // in the handshake
			if errors.Is(err, identity.ErrRefused) && !c.flip {
				t.Errorf("cut %+v: %v, nobody was refused", c, err)
			}
			return
		}
		defer func() { _ = link.Close() }()
		clear(reader.arena()[:2048])
		err = link.Read(short(t), seals, copies)
		if _, ok := errors.AsType[*transfer.Error](err); err != nil && !ok {
			t.Errorf("cut %+v: %v is no *transfer.Error", c, err)
		}
		if err == nil && (!bytes.Equal(reader.arena()[7:47], want[7:47]) || !bytes.Equal(reader.arena()[900:905], want[900:905])) {
			t.Errorf("cut %+v: a read without an error has other bytes", c)
		}
		if errors.Is(err, transfer.ErrStale) {
			t.Errorf("cut %+v: %v", c, err)
		}
		p.set(cut{up: -1, down: -1})
		if err == nil {
			return // the fault is still to come, or never comes
		}
		reader.hurry(transfer.Limits{})
		if err := link.Read(short(t), seals, copies); err != nil {
			t.Errorf("after cut %+v: %v", c, err)
		}
	}
	for _, n := range places(r.Identity != nil, shakeUp, ups) {
		try(fault(n, -1))
	}
	for _, n := range places(r.Identity != nil, shakeDown, downs) {
		try(fault(-1, n))
	}
	if ups < 100 || downs < 150 || shakeUp >= ups || shakeDown >= downs {
		t.Errorf("only %d and %d places to cut, of these %d and %d before the read", ups, downs, shakeUp, shakeDown)
	}
}

// TestMuteAtEveryByte lets the connection stand, and nothing pass any more.
func TestMuteAtEveryByte(t *testing.T) { bothWays(t, muteAtEveryByte) }

func muteAtEveryByte(t *testing.T, o, r Options) {
	r.Limits = transfer.Limits{Dial: 30 * time.Millisecond, Stall: 30 * time.Millisecond}
	last, step := 120, 13
	if r.Identity != nil {
		r.Limits.Dial = 500 * time.Millisecond
		last, step = 5000, 260
	}
	owner, _ := newPair(t, 4096, o, Options{})
	seals := []transfer.Seal{owner.hold(7, 41)}
	copies := []transfer.Copy{{Remote: 100, Local: 7, Bytes: 40}, {Remote: 3, Local: 900, Bytes: 5}}
	var work sync.WaitGroup
	try := func(c cut) {
		reader := newReader(t, r)
		p := newProxy(t, owner.t.Bound())
		p.set(c)
		work.Go(func() {
			started := time.Now()
			link, err := reader.t.Open(context.Background(), at(owner.peer(), p.address))
			if err == nil {
				err = link.Read(context.Background(), seals, copies)
				_ = link.Close()
			}
			up, down := p.passed()
			if err == nil && (len(up) >= c.up && c.up >= 0 || len(down) >= c.down && c.down >= 0) {
				t.Errorf("cut %+v: no error", c)
			}
			if took := time.Since(started); took > 20*time.Second {
				t.Errorf("cut %+v: %v after %v", c, err, took)
			}
			if err != nil {
				untouched(t, reader, copies...)
			}
		})
	}
	for n := 0; n < last; n += step {
		try(cut{up: n, down: -1, mute: true})
		try(cut{up: -1, down: n, mute: true})
	}
	work.Wait()
}

func TestOwnerRestarts(t *testing.T) { bothWays(t, testOwnerRestarts) }

func testOwnerRestarts(t *testing.T, o, r Options) {
	o.Bind = netip.MustParseAddrPort(ownPorts)
	owner, reader := newPair(t, 4096, o, r)
	seals := []transfer.Seal{owner.hold(1, 1)}
	copies := []transfer.Copy{{Bytes: 100}}
	link := open(t, reader, owner.peer())
	if err := link.Read(short(t), seals, copies); err != nil {
		t.Fatal(err)
	}

	// The same life behind the same port: the link connects again.
	address := owner.t.Bound()
	if err := owner.t.Close(); err != nil {
		t.Fatal(err)
	}
	o.Bind = address
	again := owner.listen(t, o)
	if err := link.Read(short(t), seals, copies); err != nil {
		t.Errorf("Read from the same life after its transport started again: %v", err)
	}

	// Another life there: never a byte of it over the old link.
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
	if err := link.Read(short(t), seals, copies); err == nil || errors.Is(err, transfer.ErrIdentity) {
		t.Errorf("Read while nobody listens: %v", err)
	}
	reborn := newNode(t, id.Life{Node: "owner", Incarnation: ownerLife.Incarnation + 1}, 4096)
	reborn.local.Seals.Store(1, seals[0].Value)
	for i := range reborn.arena() {
		reborn.arena()[i] = 0xee
	}
	reborn.listen(t, o)
	clear(reader.arena())
	for range 3 {
		if err := link.Read(short(t), seals, copies); !errors.Is(err, transfer.ErrIdentity) {
			t.Errorf("Read over the link to the former life: %v, want ErrIdentity", err)
		}
	}
	if bytes.Contains(reader.arena(), []byte{0xee}) {
		t.Error("bytes of the new life came over the link to the former one")
	}
	fresh := open(t, reader, reborn.peer())
	if err := fresh.Read(short(t), []transfer.Seal{reborn.hold(2, 5)}, copies); err != nil {
		t.Errorf("Read over a new link: %v", err)
	}
}

// An owner that ends an idle connection costs a new one, not an error.
func TestIdleConnectionEnds(t *testing.T) { bothWays(t, testIdleConnectionEnds) }

func testIdleConnectionEnds(t *testing.T, o, r Options) {
	owner, reader := newPair(t, 4096, o, r)
	seals := []transfer.Seal{owner.hold(1, 1)}
	link := open(t, reader, owner.peer())
	for range 3 {
		eventually(t, "the idle connection stays", func() bool {
			each(owner.t, func(c *served) { _ = c.tcp.SetReadDeadline(time.Now()) }) // as at the end of the idle time
			return owner.t.Stats().Accepted == 0
		})
		if err := link.Read(short(t), seals, []transfer.Copy{{Bytes: 100}}); err != nil {
			t.Error(err)
		}
	}
}

// A connection that breaks in the middle of an answer is an error, and not
// silently tried again.
func TestBrokenInTheMiddle(t *testing.T) {
	var mu sync.Mutex
	accepted := 0
	owner := script(t, func(c net.Conn) {
		mu.Lock()
		accepted++
		mu.Unlock()
		if greet(c) != nil {
			return
		}
		for i := uint64(1); ; i++ {
			if _, _, err := receiveFrame(c); err != nil {
				return
			}
			b := append(appendHeader(nil, dataOf(i, 10)), make([]byte, 10)...)
			if i == 3 {
				_, _ = c.Write(b[:headerBytes+4])
				return
			}
			if _, err := c.Write(appendHeader(b, verdictOf(i, verdictHeld))); err != nil {
				return
			}
		}
	})
	reader := newReader(t, Options{})
	link := open(t, reader, fakePeer(owner))
	seals, copies := []transfer.Seal{{Value: 1}}, []transfer.Copy{{Bytes: 10}}
	for range 2 {
		if err := link.Read(short(t), seals, copies); err != nil {
			t.Fatal(err)
		}
	}
	err := link.Read(short(t), seals, copies)
	if e, ok := errors.AsType[*transfer.Error](err); !ok || !errors.Is(err, io.ErrUnexpectedEOF) || e.Done != 4 {
		t.Errorf("Read: %v, want the end after 4 bytes", err)
	}
	mu.Lock()
	defer mu.Unlock()
	if accepted != 1 {
		t.Errorf("%d connections, want 1", accepted)
	}
}

// When a network drops what was connected (a NAT that forgets), one read
// stalls, and the next does not try the other idle connections in turn.
func TestStallDropsIdleConnections(t *testing.T) { bothWays(t, testStallDropsIdleConnections) }

func testStallDropsIdleConnections(t *testing.T, o, r Options) {
	owner, _ := newPair(t, 1<<20, o, Options{})
	reader := newReader(t, r)
	p := newProxy(t, owner.t.Bound())
	seals := []transfer.Seal{owner.hold(1, 1)}
	l := open(t, reader, at(owner.peer(), p.address)).(*link)
	for range 3 {
		c, err := l.dial(short(t))
		if err != nil {
			t.Fatal(err)
		}
		l.push(c)
	}
	p.freeze()
	reader.hurry(transfer.Limits{Stall: 200 * time.Millisecond})
	if err := l.Read(short(t), seals, []transfer.Copy{{Bytes: 10}}); !errors.Is(err, transfer.ErrStalled) {
		t.Errorf("the first read: %v, want ErrStalled", err)
	}
	reader.hurry(transfer.Limits{})
	if err := l.Read(short(t), seals, []transfer.Copy{{Bytes: 10}}); err != nil {
		t.Errorf("the next read: %v", err)
	}
}

// A read that is over does not wait for requests that the owner does not take.
func TestStaleWhileRequestsAreBlocked(t *testing.T) {
	owner := script(t, func(c net.Conn) {
		if _, _, err := receiveFrame(c); err != nil {
			return
		}
		_, err := c.Write(appendWelcome(nil, welcome{owner: ownerLife, bytes: 1 << 20, copies: 1, seals: maxSeals, inFlight: 1 << 20}))
		if err != nil {
			return
		}
		h := make([]byte, headerBytes)
		if _, err := io.ReadFull(c, h); err != nil {
			return
		}
		time.Sleep(50 * time.Millisecond) // the fault: not a request more is taken
		_, _ = c.Write(appendHeader(nil, verdictOf(1, verdictStale)))
		<-t.Context().Done()
	})
	reader := newReader(t, Options{MaxInFlight: maxInFlight, Limits: transfer.Limits{Stall: patience}})
	link := open(t, reader, fakePeer(owner))
	seals := slices.Repeat([]transfer.Seal{{Value: 1}}, maxSeals) // 12 KiB a request
	copies := make([]transfer.Copy, 2000)
	for i := range copies {
		copies[i] = transfer.Copy{Local: int64(i), Bytes: 1}
	}
	started := time.Now()
	if err := link.Read(short(t), seals, copies); !errors.Is(err, transfer.ErrStale) {
		t.Errorf("Read: %v, want ErrStale", err)
	}
	if took := time.Since(started); took > patience/2 {
		t.Errorf("Read took %v, it waited for its requests", took)
	}
	untouched(t, reader)
}

// A read that is cancelled takes its own connection with it and no other.
func TestCancelDisturbsNobody(t *testing.T) { bothWays(t, testCancelDisturbsNobody) }

func testCancelDisturbsNobody(t *testing.T, o, r Options) {
	const size = 8 << 20
	owner, reader := newPair(t, size, o, r)
	seals := []transfer.Seal{owner.hold(1, 1)}
	link := open(t, reader, owner.peer())
	stop := make(chan struct{})
	var work sync.WaitGroup
	for i := range int64(2) {
		work.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := link.Read(short(t), seals, []transfer.Copy{{Remote: i << 20, Local: i << 20, Bytes: 1 << 20}}); err != nil {
					t.Errorf("another read: %v", err)
					return
				}
			}
		})
	}
	for range 30 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		err := link.Read(ctx, seals, []transfer.Copy{{Remote: 2 << 20, Local: 2 << 20, Bytes: 6 << 20}})
		cancel()
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the cancelled read: %v", err)
		}
	}
	close(stop)
	work.Wait()
}

// Waiting for a connection of the pool is bounded by the caller alone.
func TestWaitForAConnection(t *testing.T) {
	got := make(chan struct{})
	owner := script(t, func(c net.Conn) {
		if greet(c) == nil {
			if _, _, err := receiveFrame(c); err == nil {
				close(got)
			}
			_, _ = io.Copy(io.Discard, c)
		}
	})
	reader := newReader(t, Options{LinkConns: 1, Limits: transfer.Limits{Stall: time.Hour}})
	l := open(t, reader, fakePeer(owner)).(*link)
	seals, copies := []transfer.Seal{{Value: 1}}, []transfer.Copy{{Bytes: 10}}
	first, second := make(chan error, 1), make(chan error, 1)
	go func() { first <- l.Read(context.Background(), seals, copies) }()
	<-got
	ctx, cancel := context.WithCancel(t.Context())
	go func() { second <- l.Read(ctx, seals, copies) }()
	eventually(t, "there is no second read", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.reads) == 2
	})
	cancel()
	if err := <-second; !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "wait for a connection") {
		t.Errorf("the second read: %v, want that it waited for a connection", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-first; !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("the first read: %v, want ErrClosed", err)
	}
}

func TestStats(t *testing.T) { bothWays(t, testStats) }

func testStats(t *testing.T, o, r Options) {
	owner, reader := newPair(t, 8<<20, o, r)
	seals := []transfer.Seal{owner.hold(1, 1)}
	link := open(t, reader, owner.peer())
	if err := link.Read(short(t), seals, []transfer.Copy{{Bytes: frameBytes + 1}}); err != nil {
		t.Fatal(err)
	}
	if err := link.Read(short(t), seals, []transfer.Copy{{Remote: 8 << 20, Bytes: 1}}); err == nil {
		t.Fatal("no error")
	}
	owner.local.Seals.Store(1, 0)
	if err := link.Read(short(t), seals, []transfer.Copy{{Bytes: 10}}); err == nil {
		t.Fatal("no error")
	}
	if got, want := reader.t.Stats(), (Stats{Reads: 1, ReadBytes: frameBytes + 1, Stale: 1, Errors: 1, Dialled: 1}); got != want {
		t.Errorf("the reader's stats are %+v, want %+v", got, want)
	}
	if got, want := owner.t.Stats(), (Stats{Served: 2, ServedBytes: frameBytes + 1, ServedStale: 1, Accepted: 1}); got != want {
		t.Errorf("the owner's stats are %+v, want %+v", got, want)
	}
}

// What a read allocates does not grow with its requests: one that takes forty has
// about what one has that takes two.
func TestRequestsAllocateNothing(t *testing.T) {
	const size, most, bytes = 4 << 20, 40 * frameCopies, 32
	owner, reader := newPair(t, size, Options{}, Options{})
	seals := []transfer.Seal{owner.hold(1, 1)}
	link := open(t, reader, owner.peer())
	copies := make([]transfer.Copy, most)
	for i := range copies {
		copies[i] = transfer.Copy{Remote: int64(i) * bytes, Local: int64(most-1-i) * bytes, Bytes: bytes}
	}
	allocations := func(n int) float64 {
		return testing.AllocsPerRun(5, func() {
			if err := link.Read(context.Background(), seals, copies[:n]); err != nil {
				t.Fatal(err)
			}
		})
	}
	allocations(most) // what grows once
	few, many := allocations(2*frameCopies), allocations(most)
	if many > few+2 { // of the runtime, now and then
		t.Errorf("%v allocations for 2 requests, %v for 40", few, many)
	}
}
