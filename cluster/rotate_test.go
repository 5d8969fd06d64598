package cluster

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
)

// vault is where a member keeps its ring.
type vault struct {
	mu   sync.Mutex
	ring Ring
	err  error // of the next saves
}

func (v *vault) save(r Ring) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.err == nil {
		v.ring = r
	}
	return v.err
}

func (v *vault) fail(err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.err = err
}

func (v *vault) kept() Ring {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.ring
}

// keyed starts a group that has one key, each with its vault.
func keyed(t testing.TB, n int, change func(i int, o *Options)) ([]member, []*vault) {
	t.Helper()
	vaults := make([]*vault, n)
	all := group(t, n, func(i int, o *Options) {
		vaults[i] = &vault{}
		o.Ring, o.SaveRing = ringOf(0, 1), vaults[i].save
		if change != nil {
			change(i, o)
		}
	})
	return all, vaults
}

// soon is a context for what should be done at once.
func soon(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

var errImpatient = errors.New("out of patience")

// brief is a context for what waits in vain, and for nothing that must happen
// before it gives up.
func brief(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), moment, errImpatient)
	t.Cleanup(cancel)
	return ctx
}

// blocked is a context for a step of a rotation that somebody is in the way of:
// it ends as brief's does, but once all others have the member's ring, or have
// said why not.
func blocked(t testing.TB, m member) context.Context {
	t.Helper()
	ctx, cancel := context.WithCancelCause(soon(t))
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for !isBlocked(m) {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
		cancel(errImpatient)
	}()
	t.Cleanup(func() { cancel(nil); <-done })
	return ctx
}

func isBlocked(m member) bool {
	others := m.calls.roster.len()
	m.keys.mu.Lock()
	defer m.keys.mu.Unlock()
	for _, q := range m.keys.questions {
		same, why := 0, 0
		for _, a := range q.answers {
			switch {
			case a.edition.same(m.keys.edition):
				same++
			case a.trouble != "" || a.edition.generation+m.keys.edition.generation == 0:
				why++
			}
		}
		if why > 0 && same+why == others {
			return true
		}
	}
	return false
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func has(m member, r Ring) bool { return m.Ring().edition().same(r.edition()) }

func wantRing(t testing.TB, r Ring, all ...member) {
	t.Helper()
	for _, m := range all {
		if !has(m, r) {
			t.Errorf("%s has %s, want %s", m.Life(), m.Ring(), r)
		}
	}
}

// ringError returns the error's nodes in the way.
func ringError(t testing.TB, err error) (missing, lost string, begun bool) {
	t.Helper()
	e, ok := errors.AsType[*RingError](err)
	if !ok {
		t.Fatalf("%v, want a RingError", err)
	}
	var all []string
	for node := range e.Missing {
		all = append(all, string(node))
	}
	slices.Sort(all)
	for _, node := range append(all, joinNodes(e.Lost)) {
		if !strings.Contains(err.Error(), node) {
			t.Errorf("%q does not name %s", err, node)
		}
	}
	return strings.Join(all, ", "), joinNodes(e.Lost), e.Begun
}

// Under load a rotation makes no packet unreadable, and loses nothing.
func TestRotationLosesNothing(t *testing.T) {
	t.Parallel()
	const n = 4
	type mark struct{ from, to, number uint32 }
	var got sync.Map
	all, vaults := keyed(t, n, func(i int, o *Options) {
		o.Handler = &recorder{onItems: func(items [][]byte) {
			for _, item := range items {
				got.Store(mark{binary.BigEndian.Uint32(item), uint32(i), binary.BigEndian.Uint32(item[4:])}, true)
			}
		}}
	})
	done := make(chan struct{})
	var load sync.WaitGroup
	var sent [n]atomic.Uint32
	for i, m := range all {
		load.Go(func() {
			tick := time.NewTicker(2 * time.Millisecond)
			defer tick.Stop()
			for k := uint32(0); ; k++ {
				select {
				case <-done:
					return
				case <-tick.C:
				}
				item := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, uint32(i)), k)
				for to := range n {
					if to != i {
						if err := m.Send(id.Node(fmt.Sprint("n", to)), item); err != nil {
							t.Error(err)
						}
					}
				}
				sent[i].Store(k + 1)
			}
		})
	}
	arrived := func(i, to int, k uint32) {
		t.Helper()
		within(t, fmt.Sprintf("item %d of n%d is at n%d", k, i, to), func() bool {
			_, ok := got.Load(mark{uint32(i), uint32(to), k})
			return ok
		})
	}
	more := func() { // time goes by, and nothing that was sent before it is still under way
		t.Helper()
		until := sent[0].Load() + 50
		within(t, "more is sent", func() bool { return sent[0].Load() > until })
		for i := range all {
			last := sent[i].Load()
			for to := range n {
				if to != i && last > 0 {
					arrived(i, to, last-1)
				}
			}
		}
	}
	more()
	begin := time.Now()
	must(t, all[0].AddKey(soon(t), key(2)))
	t.Logf("added in %v", time.Since(begin))
	wantRing(t, ringOf(1, 1, 2), all...)
	more()
	must(t, all[1].UseKey(soon(t), IDOf(key(2)), false))
	wantRing(t, ringOf(2, 2, 1), all...)
	more()
	must(t, all[2].RemoveKey(soon(t), IDOf(key(1)), false))
	wantRing(t, ringOf(3, 2), all...)
	more()
	close(done)
	load.Wait()
	for i := range all {
		for to := range n {
			for k := range sent[i].Load() {
				if to != i {
					arrived(i, to, k)
				}
			}
		}
	}
	for i, m := range all {
		s := m.Stats()
		if s.Unreadable != 0 || s.KeyGeneration != 3 || s.Keys != 1 || s.KeyPackets == 0 {
			t.Errorf("n%d: %d unreadable, generation %d, %d keys, %d packets under it", i, s.Unreadable, s.KeyGeneration, s.Keys, s.KeyPackets)
		}
		if !vaults[i].kept().edition().same(ringOf(3, 2).edition()) {
			t.Errorf("n%d has kept %s", i, vaults[i].kept())
		}
		for _, o := range all {
			if e := m.about(o.Life().Node); len(e) > 1 {
				t.Errorf("n%d: %v", i, e)
			}
		}
	}
	rings, err := all[3].Rings(soon(t))
	if err != nil || len(rings) != n {
		t.Fatalf("%d rings, %v", len(rings), err)
	}
	for i, r := range rings {
		if want := id.Node(fmt.Sprint("n", i)); r.Node != want || !r.Same || r.Generation != 3 || r.Err != nil || !slices.Equal(r.Keys, []KeyID{IDOf(key(2))}) {
			t.Errorf("ring %d is %+v", i, r)
		}
	}
	// Who asks twice for the same gets it.
	must(t, all[3].UseKey(soon(t), IDOf(key(2)), false))
	must(t, all[3].AddKey(soon(t), key(2)))
	wantRing(t, ringOf(3, 2), all...)
}

func TestRotationRefuses(t *testing.T) {
	t.Parallel()
	plain := launch(t, options(t, "plain", 1, anywhere()))
	for name, err := range map[string]error{
		"add":    plain.AddKey(t.Context(), key(1)),
		"use":    plain.UseKey(t.Context(), IDOf(key(1)), false),
		"remove": plain.RemoveKey(t.Context(), IDOf(key(1)), true),
	} {
		if !errors.Is(err, ErrPlain) || !strings.Contains(err.Error(), "cluster.keyring") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if rings, err := plain.Rings(t.Context()); err != nil || len(rings) != 1 || rings[0].Node != "plain" || len(rings[0].Keys) > 0 {
		t.Errorf("rings of a plain one: %+v, %v", rings, err)
	}

	o := options(t, "alone", 1, anywhere())
	o.Ring = ringOf(0, 1, 2, 3, 4, 5, 6, 7, 8)
	alone := launch(t, o)
	if err := alone.AddKey(t.Context(), key(9)); err == nil || !strings.Contains(err.Error(), "remove one first") {
		t.Errorf("a ninth: %v", err)
	}
	if err := alone.AddKey(t.Context(), key(9)[1:]); err == nil {
		t.Error("a short key was added")
	}
	for name, err := range map[string]error{
		"use":    alone.UseKey(t.Context(), IDOf(key(9)), true),
		"remove": alone.RemoveKey(t.Context(), IDOf(key(9)), true),
	} {
		if !errors.Is(err, ErrUnknownKey) || !strings.Contains(err.Error(), IDOf(key(9)).String()) {
			t.Errorf("%s an unknown one: %v", name, err)
		}
	}
	if err := alone.RemoveKey(t.Context(), IDOf(key(1)), true); err == nil || !strings.Contains(err.Error(), "use another first") {
		t.Errorf("remove the one that encrypts: %v", err)
	}
	if !has(alone, o.Ring) {
		t.Errorf("after all that the ring is %s", alone.Ring())
	}
	must(t, alone.RemoveKey(t.Context(), IDOf(key(4)), false))
	must(t, alone.AddKey(t.Context(), key(9)))
	wantRing(t, ringOf(2, 1, 2, 3, 5, 6, 7, 8, 9), alone)
	o.Ring.Generation = MaxGeneration
	o.Life.Node = "last"
	if err := launch(t, o).UseKey(t.Context(), IDOf(key(2)), false); err == nil || !strings.Contains(err.Error(), "cluster.keyring") {
		t.Errorf("after the last generation: %v", err)
	}
}

// A member that cannot keep a key stops the rotation, and is named with what is
// wrong; once mended the step is seen through by repeating it.
func TestUseNeedsAllToHaveTheKey(t *testing.T) {
	t.Parallel()
	all, vaults := keyed(t, 3, nil)
	vaults[2].fail(errors.New("no space left on device"))
	err := all[0].AddKey(blocked(t, all[0]), key(2))
	if missing, _, begun := ringError(t, err); missing != "n2" || !begun || !strings.Contains(err.Error(), "no space left") || !strings.Contains(err.Error(), "out of patience") {
		t.Errorf("add: %v", err)
	}
	wantRing(t, ringOf(1, 1, 2), all[0], all[1])
	wantRing(t, ringOf(0, 1), all[2])
	for name, step := range map[string]func() error{
		"use":    func() error { return all[0].UseKey(blocked(t, all[0]), IDOf(key(2)), false) },
		"forced": func() error { return all[1].UseKey(blocked(t, all[1]), IDOf(key(2)), true) },
		"remove": func() error { return all[1].RemoveKey(blocked(t, all[1]), IDOf(key(2)), true) },
	} {
		if missing, _, begun := ringError(t, step()); missing != "n2" || begun {
			t.Errorf("%s: %s is missing, begun %v", name, missing, begun)
		}
	}
	wantRing(t, ringOf(1, 1, 2), all[0], all[1])
	rings, err := all[0].Rings(soon(t))
	if err != nil || len(rings) != 3 || rings[2].Same || rings[2].Err == nil || rings[2].Generation != 0 || !rings[1].Same {
		t.Errorf("rings: %+v, %v", rings, err)
	}
	if s := all[2].Stats(); s.KeySaves == 0 {
		t.Error("a ring that was not kept was not counted")
	}
	vaults[2].fail(nil)
	must(t, all[0].AddKey(soon(t), key(2)))
	wantRing(t, ringOf(1, 1, 2), all...)
	// Of two who are in the way of a removal the one here counts as well.
	vaults[1].fail(errors.New("read-only file system"))
	if err := all[1].UseKey(soon(t), IDOf(key(2)), false); err == nil || !strings.Contains(err.Error(), "read-only file system") {
		t.Errorf("use where it cannot be kept: %v", err)
	}
	wantRing(t, ringOf(1, 1, 2), all...)
	vaults[1].fail(nil)
	must(t, all[1].UseKey(soon(t), IDOf(key(2)), false))
	vaults[2].fail(errors.New("no space left on device"))
	if _, _, begun := ringError(t, all[0].RemoveKey(blocked(t, all[0]), IDOf(key(1)), false)); !begun {
		t.Error("the removal has not begun")
	}
	vaults[2].fail(nil)
	// By somebody else, who no longer has the key himself; or it has gone by itself.
	if err := all[1].RemoveKey(soon(t), IDOf(key(1)), false); err != nil && !errors.Is(err, ErrUnknownKey) {
		t.Errorf("repeated removal: %v", err)
	}
	wantRing(t, ringOf(3, 2), all...)
}

// Different keys in configurations are nobody's wish.
func TestConfiguredRingsStay(t *testing.T) {
	t.Parallel()
	all, _ := keyed(t, 2, func(i int, o *Options) {
		if i == 1 {
			o.Ring = ringOf(0, 1, 2)
		}
	})
	err := all[0].AddKey(blocked(t, all[0]), key(3))
	if missing, _, begun := ringError(t, err); missing != "n1" || begun || !strings.Contains(err.Error(), "make cluster.keyring the same") {
		t.Errorf("add: %v", err)
	}
	wantRing(t, ringOf(0, 1), all[0])
	wantRing(t, ringOf(0, 1, 2), all[1])
}

func kill(t testing.TB, m member, rest ...member) {
	t.Helper()
	m.Close()
	within(t, "it is lost", func() bool {
		return !slices.ContainsFunc(rest, func(r member) bool { return sees(r, m.Life()) })
	})
}

// Who was lost before it had the key is not left behind but by force, and who
// was down comes back with the new ring.
func TestLostMemberAndRotation(t *testing.T) {
	t.Parallel()
	for name, seeds := range map[string]bool{"with seeds": true, "without seeds": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			all, vaults := keyed(t, 3, slowly)
			addr := all[2].Gossip().String()
			kill(t, all[2], all[0], all[1])
			must(t, all[0].AddKey(soon(t), key(2)))
			if _, lost, begun := ringError(t, all[0].UseKey(soon(t), IDOf(key(2)), false)); lost != "n2" || begun {
				t.Errorf("use: %s is lost, begun %v", lost, begun)
			}
			wantRing(t, ringOf(1, 1, 2), all[:2]...)
			must(t, all[0].UseKey(soon(t), IDOf(key(2)), true))
			wantRing(t, ringOf(2, 2, 1), all[:2]...)
			if _, lost, _ := ringError(t, all[1].RemoveKey(soon(t), IDOf(key(1)), false)); lost != "n2" {
				t.Errorf("remove: %s is lost", lost)
			}
			o := options(t, "n2", 2, addr)
			if seeds {
				o.Join = []string{all[0].Gossip().String(), all[1].Gossip().String()}
			}
			o.Ring, o.SaveRing = ringOf(0, 1), vaults[2].save
			again := launch(t, o)
			took := within(t, "it is back with the new ring", func() bool {
				return has(again, ringOf(2, 2, 1)) && sees(all[0], again.Life()) && sees(all[1], again.Life())
			})
			t.Logf("back after %v", took)
			joined(t, again)
			if !vaults[2].kept().edition().same(ringOf(2, 2, 1).edition()) {
				t.Errorf("it has kept %s", vaults[2].kept())
			}
			must(t, all[1].RemoveKey(soon(t), IDOf(key(1)), false))
			wantRing(t, ringOf(3, 2), all[0], all[1], again)
			if !seeds {
				return
			}
			kill(t, again, all[0], all[1])
			must(t, all[1].AddKey(soon(t), key(3)))
			if _, lost, _ := ringError(t, all[1].UseKey(soon(t), IDOf(key(3)), false)); lost != "n2" {
				t.Errorf("use of a key that it never had: %s is lost", lost)
			}
			must(t, all[1].UseKey(soon(t), IDOf(key(2)), false))
		})
	}
}

// A removed key is dead: who comes back with it alone stays out, and says why.
func TestRemovedKeyIsDead(t *testing.T) {
	t.Parallel()
	all, _ := keyed(t, 3, slowly)
	old := newKeyring(Options{Ring: ringOf(0, 1), Label: label(t)}, &counters{})
	seed := all[0].Gossip()
	if _, ok := inquire(t, old, seed, patience); !ok {
		t.Fatal("a key of the ring opens nothing")
	}
	kill(t, all[2], all[0], all[1])
	must(t, all[0].AddKey(soon(t), key(2)))
	must(t, all[0].UseKey(soon(t), IDOf(key(2)), true))
	must(t, all[0].RemoveKey(soon(t), IDOf(key(1)), true))
	wantRing(t, ringOf(3, 2), all[:2]...)
	before := all[0].Stats().BadMessages
	if m, ok := inquire(t, old, seed, moment); ok {
		t.Errorf("a removed key got the answer %+v", m)
	}
	within(t, "the question is counted", func() bool { return all[0].Stats().BadMessages > before })
	o := options(t, "n2", 2, anywhere(), seed.String())
	o.Ring = ringOf(0, 1)
	again := launch(t, o)
	within(t, "it says why it stays out", func() bool {
		err := again.NotJoined()
		return err != nil && strings.Contains(err.Error(), "gossip keys may differ") && strings.Contains(err.Error(), IDOf(key(1)).String())
	})
	within(t, "so does who waits for it", func() bool {
		err := again.Joined(brief(t))
		if err == nil {
			t.Fatal("it joined")
		}
		return strings.Contains(err.Error(), "gossip keys may differ") && strings.Contains(err.Error(), IDOf(key(1)).String())
	})
	again.list.SendToAddress(addressOf(all[0]), encodeItems([][]byte{[]byte("under the old key")}))
	wantRing(t, ringOf(0, 1), again)
	if len(again.Members()) != 1 || sees(all[0], again.Life()) || sees(all[1], again.Life()) || all[0].has("under the old key") {
		t.Errorf("with a removed key it sees %s, and is seen as %s", names(again), names(all[0]))
	}
}

// inquire asks a member as an outsider who has a keyring.
func inquire(t testing.TB, k *keyring, to addrPort, wait time.Duration) (message, bool) {
	t.Helper()
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	answer := exchange(conn, k.envelope(77), wait)
	m, at := unseal(k.label, answer, k.locks)
	return m, at >= 0
}

// moment is for an answer that may not come.
const moment = 300 * time.Millisecond

// exchange sends a packet, again and again since it may get lost, and returns
// the answer; nil: there was none for so long.
func exchange(conn *net.UDPConn, packet []byte, wait time.Duration) []byte {
	buf := make([]byte, maxPacket+1)
	for begin := time.Now(); time.Since(begin) < wait; {
		conn.Write(packet)
		conn.SetReadDeadline(time.Now().Add(moment / 3))
		if n, err := conn.Read(buf); err == nil {
			return buf[:n]
		}
	}
	return nil
}

// Two halves of a cluster that were rotated apart get one ring when they meet.
func TestHalvesGetOneRing(t *testing.T) {
	t.Parallel()
	var halves [2][]member
	for h := range halves {
		halves[h], _ = keyed(t, 2, func(i int, o *Options) { o.Life.Node = id.Node(fmt.Sprint("h", h, "n", i)) })
		must(t, halves[h][0].AddKey(soon(t), key(byte(2+h))))
		must(t, halves[h][1].UseKey(soon(t), IDOf(key(byte(2+h))), false))
	}
	want := halves[0][0].Ring()
	if other := halves[1][0].Ring(); other.edition().newer(want.edition()) {
		want = other
	}
	must(t, halves[0][1].JoinSeeds(soon(t), []string{halves[1][0].Gossip().String()}))
	all := slices.Concat(halves[0], halves[1])
	took := within(t, "all see all, with one ring", func() bool {
		return !slices.ContainsFunc(all, func(m member) bool { return len(m.Members()) != 4 || !has(m, want) })
	})
	t.Logf("one after %v", took)
	must(t, all[0].RemoveKey(soon(t), IDOf(key(1)), true))
}

// Of two changes at the same time one wins everywhere, and the other is told.
func TestTwoOperatorsAtOnce(t *testing.T) {
	t.Parallel()
	all, _ := keyed(t, 3, nil)
	var work sync.WaitGroup
	for i := range 3 {
		work.Go(func() {
			for ctx := soon(t); ; {
				err := all[i].AddKey(ctx, key(byte(2+i)))
				if err == nil {
					return
				}
				if _, ok := errors.AsType[*RingError](err); !ok && !errors.Is(err, ErrOvertaken) || ctx.Err() != nil {
					t.Errorf("n%d: %v", i, err)
					return
				}
			}
		})
	}
	work.Wait()
	within(t, "all have one ring", func() bool { return has(all[0], all[1].Ring()) && has(all[0], all[2].Ring()) })
	r := all[0].Ring()
	for n := range byte(4) {
		if !slices.Contains(r.IDs(), IDOf(key(1+n))) {
			t.Errorf("key %d is not on %s", 1+n, r)
		}
	}
}

// Whatever was recorded of a rotation changes nothing when it is sent again.
func TestReplayedRingsChangeNothing(t *testing.T) {
	t.Parallel()
	all, _ := keyed(t, 3, nil)
	outsider := newKeyring(Options{Ring: ringOf(0, 1), Label: label(t)}, &counters{})
	var recorded [][]byte
	record := func() {
		for _, m := range all {
			question := m.keys.envelope(m.keys.idle)
			recorded = append(recorded, question, m.keys.reply(m.Life(), message{nonce: m.keys.idle, edition: ringOf(0, 1).edition()}, IDOf(m.Ring().Keys[0]), true))
			conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(m.Gossip()))
			must(t, err)
			if answer := exchange(conn, outsider.envelope(m.keys.idle), moment); answer != nil {
				recorded = append(recorded, answer)
			}
			conn.Close()
		}
	}
	record()
	must(t, all[0].AddKey(soon(t), key(2)))
	record()
	must(t, all[0].UseKey(soon(t), IDOf(key(2)), false))
	record()
	must(t, all[0].RemoveKey(soon(t), IDOf(key(1)), false))
	record()
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(mustAddr("127.0.0.1:0")))
	must(t, err)
	defer conn.Close()
	before := all[0].Stats()
	for range 3 {
		for _, b := range recorded {
			for _, m := range all {
				conn.WriteToUDPAddrPort(b, m.Gossip())
			}
		}
	}
	within(t, "they have been looked at", func() bool {
		return all[0].Stats().BadMessages > before.BadMessages+uint64(len(recorded))
	})
	must(t, all[1].AddKey(soon(t), key(3)))
	wantRing(t, ringOf(4, 2, 3), all...)
	// As a message of memberlist's it is not taken either.
	all[1].Send("n0", []byte("in order"))
	forged := encodeRingAnswer(all[0].keys.idle, all[1].Life(), ringOf(9, 2, 9).edition(), ringOf(9, 2, 9).Keys, "")
	p, _ := all[1].calls.roster.peer("n0")
	must(t, all[1].tell(p, forged))
	must(t, all[1].Send("n0", []byte("after it")))
	within(t, "it was looked at", func() bool { return all[0].has("after it") })
	wantRing(t, ringOf(4, 2, 3), all...)
	// Strangers' floods are dropped, and the members go on.
	for range 3 * openedAtOnce {
		conn.WriteToUDPAddrPort(recorded[0], all[0].Gossip())
	}
	within(t, "rotation goes on", func() bool { return all[0].UseKey(soon(t), IDOf(key(3)), false) == nil })
}

// A step ends with its context, and with the cluster.
func TestRotationEnds(t *testing.T) {
	t.Parallel()
	all, _ := keyed(t, 2, nil)
	all[1].Close() // nobody finds it lost
	err := all[0].AddKey(brief(t), key(2))
	if missing, _, begun := ringError(t, err); missing != "n1" || begun || !strings.Contains(err.Error(), "no answer") {
		t.Errorf("add: %v", err)
	}
	waits := make(chan error, 2)
	go func() { waits <- all[0].AddKey(t.Context(), key(2)) }()
	go func() {
		_, err := all[0].Rings(t.Context())
		waits <- err
	}()
	within(t, "both ask", func() bool {
		all[0].keys.mu.Lock()
		defer all[0].keys.mu.Unlock()
		return len(all[0].keys.questions) == 2
	})
	all[0].Close()
	for range 2 {
		select {
		case err := <-waits:
			if err != nil && !errors.Is(err, ErrClosed) {
				t.Errorf("closed: %v", err)
			}
		case <-time.After(patience):
			t.Fatal("it waits on")
		}
	}
}
