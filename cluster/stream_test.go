package cluster

import (
	"bytes"
	"crypto/tls"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
)

func authority(t testing.TB) *identity.Authority {
	t.Helper()
	a, err := identity.NewAuthority("test", 24*time.Hour)
	must(t, err)
	return a
}

// certified is the identity of a node, which lets in the peers of some patterns.
func certified(t testing.TB, a *identity.Authority, node id.Node, peers ...string) *identity.Identity {
	t.Helper()
	o, err := a.Issue(t.TempDir(), node)
	must(t, err)
	o.Peers = peers
	i, err := identity.Load(o)
	must(t, err)
	return i
}

// secure starts a group with one gossip key and a certificate each.
func secure(t testing.TB, n int, a *identity.Authority, change func(i int, o *Options)) []member {
	t.Helper()
	return group(t, n, func(i int, o *Options) {
		o.Ring, o.Identity = ringOf(0, 1), certified(t, a, o.Life.Node)
		if change != nil {
			change(i, o)
		}
	})
}

// With certificates everything is as without, also without gossip keys.
func TestStreamsOverTLS(t *testing.T) {
	t.Parallel()
	for name, ring := range map[string]Ring{"keys": ringOf(0, 1), "plain": {}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := feel(t)
			a := authority(t)
			all := secure(t, 3, a, func(_ int, o *Options) { o.Ring = ring })
			must(t, all[0].SetState([]byte("state of n0")))
			within(t, "states are exchanged", func() bool { return all[1].merged("state of n0") && all[2].merged("state of n0") })
			must(t, all[0].Broadcast([]byte("hello")))
			within(t, "an item travels", func() bool { return all[1].has("hello") && all[2].has("hello") })
			p.leave(t, all[2])
			all[2].Close()
			o := options(t, "n2", 2, all[2].Gossip().String(), all[0].Gossip().String())
			o.Ring, o.Identity = ring, certified(t, a, "n2")
			again := launch(t, o)
			joined(t, again)
			within(t, "the next life is everywhere", func() bool { return sees(all[0], again.Life()) && sees(all[1], again.Life()) })
			for i, m := range all[:2] {
				s := m.Stats() // who gives up in a handshake that takes too long looks like one
				p.claim(t, s.Strangers == 0, "n%d has met %d strangers", i, s.Strangers)
			}
		})
	}
}

// Whatever a stranger lacks, it joins nothing, hears nothing, and is told of on
// both sides, with what to do.
func TestStrangersJoinNothing(t *testing.T) {
	t.Parallel()
	a, other := authority(t), authority(t)
	var log lines
	all := secure(t, 2, a, func(i int, o *Options) {
		o.Identity = certified(t, a, o.Life.Node, "n?", "friend")
		if i == 0 {
			o.Logger = slog.New(slog.NewTextHandler(&log, nil))
		}
	})
	must(t, all[0].SetState([]byte("secret")))
	seed := all[0].Gossip().String()
	for name, tt := range map[string]struct {
		change func(o *Options)
		says   string // what the stranger hears
		logged string // what the seed tells, of some of them; "": nothing
	}{
		"no-certificate":    {func(o *Options) { o.Identity = nil }, "the other side speaks TLS: set security.certificate", "speaks no TLS"},
		"another-authority": {func(o *Options) { o.Identity = certified(t, other, o.Life.Node) }, "refused", ""},
		"not-allowed":       {func(o *Options) { o.Identity = certified(t, a, o.Life.Node) }, "the other side refuses this node", "security.peers"},
		"another-node":      {func(o *Options) { o.Identity = certified(t, a, "n1") }, "is security.certificate of this node", "its certificate is of"},
		"no-key":            {func(o *Options) { o.Ring = Ring{}; o.Identity = certified(t, a, "friend") }, "gossip keys may differ", ""},
		"wrong-key":         {func(o *Options) { o.Ring = ringOf(0, 9); o.Identity = certified(t, a, "friend") }, "gossip keys may differ", ""},
		"wrong-label":       {func(o *Options) { o.Label = "other"; o.Identity = certified(t, a, "friend") }, "is cluster.name the same there", ""},
	} {
		o := options(t, id.Node(name), 1, anywhere(), seed, all[1].Gossip().String())
		o.Ring = ringOf(0, 1)
		tt.change(&o)
		t.Run(name, func(t *testing.T) {
			log.reset()
			s := launch(t, o)
			t.Cleanup(func() { t.Log(s.NotJoined()) })
			within(t, "it hears why", func() bool {
				err := s.NotJoined()
				return err != nil && strings.Contains(err.Error(), tt.says)
			})
			if tt.logged != "" {
				// It goes on trying. Lines come one in ten seconds, and the stranger
				// before may have taken that.
				within(t, "the log of the seed says "+tt.logged, func() bool {
					all[0].transport.strangers.again()
					return log.with(tt.logged) > 0
				})
			}
			// It knows their addresses, and so gets packets through if it has the key.
			forged := []byte("forged by " + name)
			s.list.SendToAddress(addressOf(all[0]), encodeItems([][]byte{forged}))
			if err := s.Joined(brief(t)); err == nil {
				t.Error("it joined")
			}
			if s.merged("secret") && name != "another-node" {
				t.Error("it has the state of a member")
			}
			for i, m := range all {
				if names(m) != "n0.1 n1.1" || m.about(s.Life().Node) != nil {
					t.Errorf("n%d sees %s, and heard %v", i, names(m), m.about(s.Life().Node))
				}
			}
			s.Close()
		})
	}
	if s := all[0].Stats(); s.Strangers < 3 {
		t.Errorf("%d strangers were counted", s.Strangers)
	}
	o := options(t, "friend", 1, anywhere(), seed)
	o.Ring, o.Identity = ringOf(0, 1), certified(t, a, "friend")
	friend := launch(t, o)
	joined(t, friend)
	within(t, "a friend is a member", func() bool { return sees(all[0], friend.Life()) && sees(all[1], friend.Life()) })
}

func (l *lines) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.out.Reset()
}

// again lets the next line pass.
func (h *hush) again() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.begin = time.Time{}
}

// A node that has TLS calls one that has not.
func TestPlainSeedOfSecureNode(t *testing.T) {
	t.Parallel()
	var log lines
	o := options(t, "plain", 1, anywhere())
	o.Logger = slog.New(slog.NewTextHandler(&log, nil))
	seed := launch(t, o)
	o = options(t, "secure", 1, anywhere(), seed.Gossip().String())
	o.Identity = certified(t, authority(t), "secure")
	s := launch(t, o)
	within(t, "it hears why", func() bool {
		err := s.NotJoined()
		return err != nil && strings.Contains(err.Error(), "security.certificate")
	})
	within(t, "the seed tells why", func() bool { return log.with("it speaks TLS: set security.certificate") > 0 })
	if seed.Stats().Strangers == 0 || len(seed.Members()) != 1 {
		t.Errorf("%d strangers, members %s", seed.Stats().Strangers, names(seed))
	}
}

// Who has a gossip key and no certificate can make memberlist believe in a
// member, but not us; nor does such a one count as lost when it is gone.
func TestMembersProveTheirNames(t *testing.T) {
	t.Parallel()
	// Not so fast that it is found missing from memberlist's list before it was called twice.
	all := secure(t, 2, authority(t), func(_ int, o *Options) { o.Fast = false })
	tcp, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(mustAddr("127.0.0.1:0"))) // somebody is there, and says nothing
	must(t, err)
	defer tcp.Close()
	must(t, tcp.SetDeadline(time.Now().Add(patience)))
	ghost := listed(id.Life{Node: "ghost", Incarnation: 1})
	ghost.Port = uint16(tcp.Addr().(*net.TCPAddr).Port)
	must(t, all[0].calls.NotifyAlive(ghost))
	all[0].calls.NotifyJoin(ghost)
	called, err := tcp.Accept()
	must(t, err)
	called.Close()
	// It is called again, in vain.
	called, err = tcp.Accept()
	must(t, err)
	called.Close()
	if sees(all[0], id.Life{Node: "ghost", Incarnation: 1}) || all[0].about("ghost") != nil {
		t.Errorf("a ghost is a member: %s", names(all[0]))
	}
	all[0].calls.NotifyLeave(ghost)
	if lost := all[0].calls.roster.lostRings(time.Now()); len(lost) != 0 {
		t.Errorf("lost: %v", lost)
	}
}

// Strangers that send junk for as long as they may cost little memory, with
// certificates and without, and the members stay together.
func TestStrangersCostLittle(t *testing.T) {
	for name, secured := range map[string]bool{"gossip key": false, "gossip key and certificates": true} {
		t.Run(name, func(t *testing.T) {
			a := authority(t)
			all := secure(t, 2, a, func(i int, o *Options) {
				probing(i, o)
				o.Label = "kvferry"
				if !secured {
					o.Identity = nil
				}
			})
			addr := all[0].Gossip()
			block := make([]byte, 256<<10)
			label := []byte("\xf4\x07kvferry\x0a")
			hello := clientHello(t)
			before := heap()
			var wg sync.WaitGroup
			done := make(chan struct{})
			for i := range 100 {
				wg.Go(func() {
					conn, err := net.Dial("tcp", addr.String())
					if err != nil {
						return
					}
					defer conn.Close()
					conn.SetDeadline(time.Now().Add(4 * time.Second))
					switch {
					case !secured || i%3 == 0: // "20 MB of ciphertext follow"
						conn.Write(append(slices.Clone(label), 1, 0x30, 0, 0))
					case i%3 == 1: // a handshake of 16 MB
						conn.Write([]byte{tlsHandshake, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff})
					default:
						conn.Write(hello)
					}
					for range 80 {
						if _, err := conn.Write(block); err != nil {
							return
						}
					}
				})
			}
			go func() { wg.Wait(); close(done) }()
			udp, err := net.Dial("udp", addr.String())
			must(t, err)
			defer udp.Close()
			junk := make([]byte, 1400)
			tick := time.NewTicker(5 * time.Millisecond)
			defer tick.Stop()
			var most uint64
			for running := true; running; {
				select {
				case <-done:
					running = false
				case <-tick.C:
					for i := range junk {
						junk[i] = byte(rand.Uint32())
					}
					if rand.IntN(2) == 0 {
						copy(junk, envelopeMagic)
					}
					udp.Write(junk[:1+rand.IntN(len(junk))])
					if h := heap(); h > before {
						most = max(most, h-before)
					}
				}
			}
			var s Stats
			within(t, "somebody is refused", func() bool { s = all[0].Stats(); return s.StreamsCut+s.Strangers > 0 })
			t.Logf("heap grew by %d KiB at most; %d streams cut, %d strangers", most>>10, s.StreamsCut, s.Strangers)
			if most > 20<<20 {
				t.Errorf("heap grew by %d MiB", most>>20)
			}
			talk(t, all, "still here")
			o := options(t, "late", 1, anywhere(), addr.String())
			o.Label, o.Ring = all[0].keys.label, ringOf(0, 1)
			if secured {
				o.Identity = certified(t, a, "late")
			}
			joined(t, launch(t, o))
		})
	}
}

// clientHello is what a TLS client says first.
func clientHello(t testing.TB) []byte {
	t.Helper()
	here, there := net.Pipe()
	defer here.Close()
	go func() {
		_ = tls.Client(there, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{identity.Gossip}}).HandshakeContext(t.Context())
		there.Close()
	}()
	b := make([]byte, 4096)
	n, err := here.Read(b)
	must(t, err)
	return b[:n]
}

// A stranger that begins a handshake and says no more holds its place for a
// moment only.
func TestHandshakeIsBounded(t *testing.T) {
	t.Parallel()
	a := authority(t)
	all := secure(t, 1, a, nil)
	hello := clientHello(t)
	for range maxStreams {
		conn, err := net.Dial("tcp", all[0].Gossip().String())
		must(t, err)
		defer conn.Close()
		conn.Write(hello)
	}
	o := options(t, "b", 1, anywhere(), all[0].Gossip().String())
	o.Ring, o.Identity = ringOf(0, 1), certified(t, a, "b")
	begin := time.Now()
	joined(t, launch(t, o))
	t.Logf("joined %v after", time.Since(begin))
}

func TestLongestPacket(t *testing.T) {
	t.Parallel()
	c := launch(t, options(t, "a", 1, anywhere()))
	if err := c.transport.send(make([]byte, maxPacket), c.Gossip()); err != nil {
		t.Errorf("the longest: %v", err)
	}
	if err := c.transport.send(make([]byte, maxPacket+1), c.Gossip()); !errors.Is(err, errPacketTooLong) {
		t.Errorf("longer: %v", err)
	}
	// With everything that memberlist puts around it.
	for name, ring := range map[string]Ring{"keys": ringOf(0, 1), "plain": {}} {
		all := group(t, 2, func(_ int, o *Options) { o.Ring, o.Label = ring, strings.Repeat("l", MaxLabel) })
		item := bytes.Repeat([]byte("i"), MaxItem)
		for range 50 {
			must(t, all[0].Send("n1", item))
			must(t, all[0].Broadcast(item))
		}
		within(t, "they are there", func() bool { return all[1].has(string(item)) })
		if s := all[0].Stats(); s.PushesFailed != 0 {
			t.Errorf("%s: %d pushes failed", name, s.PushesFailed)
		}
		p, _ := all[0].calls.roster.peer("n1")
		message, _ := pack([][]byte{item})
		for len(message) < packBytes {
			message = append(message, 0)
		}
		if err := all[0].tell(p, message); err != nil {
			t.Errorf("%s: a full message: %v", name, err)
		}
		if err := all[0].tell(p, append(message, make([]byte, encryption)...)); !errors.Is(err, errPacketTooLong) {
			t.Errorf("%s: a longer one: %v", name, err)
		}
	}
}
