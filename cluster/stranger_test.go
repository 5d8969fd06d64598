package cluster

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime/metrics"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A node of another cluster begins at the address of a dead member, with names
// that are known here and newer incarnations. Nothing crosses, both clusters go
// on, and those who call the dead one are told, and do not hammer.
func TestAddressOfAnotherCluster(t *testing.T) {
	key, other := bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)
	for name, tt := range map[string]struct {
		label string
		key   []byte
	}{
		"another key":           {"-one", other},
		"another label":         {"-two", key},
		"another label and key": {"-two", other},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var w weather
			var log lines
			ours := group(t, 3, func(i int, o *Options) {
				encrypt(o, key)
				o.Label = label(t) + "-one"
				w.over(o)
				if i == 0 {
					o.Logger = slog.New(slog.NewTextHandler(&log, nil))
				}
			})
			taken := ours[2].Gossip()
			ours[2].Close()
			ours = ours[:2]
			o := options(t, "n2", 9, taken.String())
			encrypt(&o, tt.key)
			o.Label = label(t) + tt.label
			theirs := []member{launch(t, o)}
			o = options(t, "n1", 9, anywhere(), taken.String())
			encrypt(&o, tt.key)
			o.Label = label(t) + tt.label
			theirs = append(theirs, launch(t, o))
			joined(t, theirs[1])
			for i, m := range [][]member{ours, theirs} {
				if err := m[i].SetState(fmt.Appendf(nil, "state of %d", i)); err != nil {
					t.Fatal(err)
				}
			}
			within(t, "the dead one is lost", func() bool { return everybody(ours, "n0.1 n1.1") })

			// While it is newly lost it is called the most often.
			dials := map[netip.AddrPort]int{}
			w.dials(func(from, to netip.AddrPort) {
				if to == taken {
					dials[from]++
				}
			})
			begin := time.Now()
			within(t, "some time has passed, and somebody has called", func() bool {
				w.mu.Lock()
				defer w.mu.Unlock()
				return time.Since(begin) > time.Second && len(dials) > 0
			})
			w.mu.Lock()
			calls, callers := dials[ours[0].Gossip()]+dials[ours[1].Gossip()], len(dials)
			if callers > 2 {
				t.Errorf("calls came from %v", dials)
			}
			for from, n := range dials {
				// Once a second or so, ten times as often where all is faster.
				if most := 2 + int(15*time.Since(begin).Seconds()); n > most {
					t.Errorf("%s called %d times in %v, want at most %d", from, n, time.Since(begin), most)
				}
			}
			w.mu.Unlock()
			t.Logf("called %d times in %v by %d", calls, time.Since(begin), callers)
			talk(t, ours, "ours")
			talk(t, theirs, "theirs")
			if !everybody(ours, "n0.1 n1.1") || !everybody(theirs, "n1.9 n2.9") {
				t.Errorf("our members are %s, theirs %s", names(ours[0]), names(theirs[0]))
			}
			for _, m := range ours {
				if m.has("theirs: 0") || m.has("theirs: 1") || m.merged("state of 1") || fenced(m) || m.Newest() != 1 {
					t.Errorf("something of theirs has reached %s", m.Life())
				}
			}
			for _, m := range theirs {
				if m.has("ours: 0") || m.has("ours: 1") || m.merged("state of 0") || fenced(m) || m.Newest() != 9 {
					t.Errorf("something of ours has reached %s", m.Life())
				}
			}
			within(t, "who was called has counted it", func() bool { return theirs[0].Stats().BadMessages > 0 })
			within(t, "who called was told, and has logged it", func() bool {
				ours[0].joining.mu.Lock()
				defer ours[0].joining.mu.Unlock()
				last := ours[0].joining.last
				return last != nil && strings.Contains(last.Error(), taken.String()) && log.with("call members that are missing") > 0
			})
			if n := log.with("call members that are missing"); n > 3 {
				t.Errorf("it was logged %d times", n)
			}
		})
	}
}

// Whoever sends more packets than a member can look at slows it down, but splits
// nobody off, delays nothing for long, and costs no memory.
func TestFloodOfStrangers(t *testing.T) {
	const n, rate = 4, 200
	p := feel(t)
	key := bytes.Repeat([]byte{1}, 32)
	carriers := make([]*carrier, n)
	all := group(t, n, func(i int, o *Options) {
		probing(i, o)
		carriers[i] = &carrier{}
		o.Handler = carriers[i].handler()
		o.Label = "kvferry"
		encrypt(o, key)
	})
	for i, m := range all {
		carriers[i].self.Store(m.Cluster)
	}
	target := all[0].Gossip()
	var junk [][]byte
	for range 64 {
		b := make([]byte, 20+rand.IntN(1400))
		for i := range b {
			b[i] = byte(rand.Uint32())
		}
		junk = append(junk, b, append([]byte("\xf4\x07kvferry"), b...), append([]byte("\xf4\x07kvferry\x01"), b...))
	}
	stopped := make(chan struct{})
	var wg sync.WaitGroup
	stop := sync.OnceFunc(func() { close(stopped); wg.Wait() })
	t.Cleanup(stop)
	var sent atomic.Uint64
	udp, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(target))
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	wg.Go(func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for i := 0; ; i++ {
			if i%1000 == 0 { // leaves something of the machine to the members
				select {
				case <-stopped:
					return
				case <-tick.C:
				}
			}
			udp.Write(junk[i%len(junk)])
			sent.Add(1)
		}
	})
	before, most := heap(), uint64(0)
	begin := map[uint32]time.Time{}
	tick := time.NewTicker(time.Second / rate)
	defer tick.Stop()
	next := uint32(0)
	for end := time.Now().Add(max(2*time.Second, *soak)); time.Now().Before(end); next++ {
		<-tick.C
		begin[next] = time.Now()
		if err := all[next%n].Broadcast(numbered(next, 120)); err != nil {
			t.Fatal(err)
		}
		if next%50 == 0 {
			most = max(most, max(heap(), before)-before)
		}
	}
	stop()
	<-time.After(300 * time.Millisecond) // what is under way
	var near, far []time.Duration
	for k := range next {
		for i, c := range carriers {
			at, ok := c.saw(k)
			switch {
			case !ok || i == int(k%n): // its own
			case i == 0:
				near = append(near, at.Sub(begin[k]))
			default:
				far = append(far, at.Sub(begin[k]))
			}
		}
	}
	heard := func(d []time.Duration, members int) float64 {
		return float64(len(d)) / (float64(next) * float64(members*(n-1)) / n)
	}
	nearHeard, farHeard := heard(near, 1), heard(far, n-1)
	near50, near99, nearMost := quantiles(near)
	far50, far99, _ := quantiles(far)
	s := all[0].Stats()
	t.Logf("%d packets of junk, %d dropped, %d refused; heap grew by %d KiB", sent.Load(), s.QueueDrops, s.BadMessages, most>>10)
	t.Logf("under fire: %.1f %% of the items, p50 %v, p99 %v, %v at most", 100*nearHeard, near50, near99, nearMost)
	t.Logf("the others: %.1f %% of the items, p50 %v, p99 %v", 100*farHeard, far50, far99)
	for _, m := range all {
		lost := losses(m)
		p.claim(t, lost == nil, "%s lost members: %v", m.Life(), lost)
	}
	// Whoever is under fire loses packets, which the items' owners repair; but
	// what comes through is not late, and the others hardly notice.
	p.claim(t, nearHeard > 0.05 && nearMost < time.Second, "under fire: %.1f %% of the items, %v at most", 100*nearHeard, nearMost)
	p.claim(t, farHeard > 0.9 && far99 < 500*time.Millisecond, "the others: %.1f %% of the items, p99 %v", 100*farHeard, far99)
	if s.BadMessages == 0 || most > 8<<20 {
		t.Errorf("%d refused, heap grew by %d MiB", s.BadMessages, most>>20)
	}
	within(t, "items are everywhere again", func() bool {
		all[1].Broadcast(numbered(next, 120))
		for i, c := range carriers {
			if _, ok := c.saw(next); !ok && i != 1 {
				return false
			}
		}
		return true
	})
}

// A few bytes that announce a million members, or many megabytes, are refused
// before anything is set aside for them.
func TestHugeCountsAreRefused(t *testing.T) {
	p := feel(t)
	all := group(t, 2, func(i int, o *Options) {
		probing(i, o)
		encrypt(o, bytes.Repeat([]byte{1}, 32))
		o.Label = "kvferry"
	})
	const label = "\xf4\x07kvferry"
	number := func(n uint32) string { return string(binary.BigEndian.AppendUint32([]byte{0xce}, n)) }
	states := "\x06\x83\xa5Nodes" + number(1<<20) + "\xacUserStateLen" + number(20<<20) + "\xa4Join\xc3"
	crafted := map[string]string{
		"a million members":       label + states,
		"without a label":         states,
		"a long message":          label + "\x08\x81\xaaUserMsgLen" + number(20<<20),
		"a long ciphertext":       label + "\x0a\x01\x40\x00\x00\x01",
		"a longer ciphertext":     label + "\x0a\xff\xff\xff\xff\x01",
		"something compressed":    label + "\x09\x82\xa4Algo\x00\xa3Buf\xc6\x01\x40\x00\x00",
		"many messages in one":    label + "\x07\xff" + strings.Repeat("\xff", 600),
		"a label and nothing":     "\xf4\xff",
		"a label that is no such": "\xf4\x00\x06",
	}
	before, bad := allocated(), all[0].Stats().BadMessages
	var wg sync.WaitGroup
	for name, b := range crafted {
		for range 8 {
			wg.Go(func() {
				conn, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(all[0].Gossip()))
				if err != nil {
					t.Error(err)
					return
				}
				defer conn.Close()
				conn.SetDeadline(time.Now().Add(patience))
				conn.Write([]byte(b))
				conn.CloseWrite()
				if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("%s: the stream is still open", name)
				}
				udp, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(all[0].Gossip()))
				if err != nil {
					t.Error(err)
					return
				}
				defer udp.Close()
				udp.Write([]byte(b))
			})
		}
	}
	wg.Wait()
	grew := allocated() - before
	t.Logf("%d KiB were allocated for %d streams", grew>>10, 8*len(crafted))
	if grew > 16<<20 {
		t.Errorf("%d MiB were allocated", grew>>20)
	}
	within(t, "it was counted", func() bool { return all[0].Stats().BadMessages-bad >= uint64(8*len(crafted)) })
	talk(t, all, "still here")
	lost := losses(all[0])
	p.claim(t, lost == nil, "members were lost: %v", lost)
}

// memberlist lets go of a stream that ends before the label is written.
func TestStreamThatIsResetIsClosed(t *testing.T) {
	t.Parallel()
	ln, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(mustAddr("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	m := launch(t, options(t, "a", 1, anywhere()))
	conn, err := m.transport.DialTimeout(ln.Addr().String(), time.Second)
	if err != nil {
		t.Fatal(err)
	}
	peer, err := ln.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	peer.SetLinger(0)
	peer.Close()
	within(t, "nothing can be written", func() bool {
		_, err := conn.Write([]byte("label"))
		return err != nil
	})
	m.transport.mu.Lock()
	defer m.transport.mu.Unlock()
	if n := len(m.transport.open); n > 0 {
		t.Errorf("%d streams are open", n)
	}
}

// allocated is what was ever allocated on the heap.
func allocated() uint64 {
	all := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(all)
	return all[0].Value.Uint64()
}
