package cluster

import (
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
)

// detour is an address in front of a member, through which others reach it
// unless it is cut.
type detour struct {
	addr netip.AddrPort
	tcp  *net.TCPListener
	udp  *net.UDPConn
	work sync.WaitGroup

	mu    sync.Mutex
	to    netip.AddrPort
	cut   bool
	conns map[net.Conn]bool
	back  map[netip.AddrPort]*net.UDPConn
}

func newDetour(t testing.TB) *detour {
	t.Helper()
	tcp, udp, err := listen(mustAddr("127.0.0.1:0"))
	must(t, err)
	d := &detour{
		addr: udp.LocalAddr().(*net.UDPAddr).AddrPort(), tcp: tcp, udp: udp,
		conns: map[net.Conn]bool{}, back: map[netip.AddrPort]*net.UDPConn{},
	}
	d.work.Go(d.packets)
	d.work.Go(d.streams)
	t.Cleanup(func() {
		tcp.Close()
		udp.Close()
		d.set(true)
		d.mu.Lock()
		for _, c := range d.back {
			c.Close()
		}
		d.mu.Unlock()
		d.work.Wait()
	})
	return d
}

func (d *detour) lead(to netip.AddrPort) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.to = to
}

// set cuts it, or mends it.
func (d *detour) set(cut bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cut = cut
	if cut {
		for c := range d.conns {
			c.Close()
		}
	}
}

func (d *detour) packets() {
	buf := make([]byte, 64<<10)
	for {
		n, from, err := d.udp.ReadFromUDPAddrPort(buf)
		if err != nil {
			return
		}
		if c := d.there(from); c != nil {
			c.Write(buf[:n])
		}
	}
}

// there is the socket that stands for who sends, whose answers come back to him.
func (d *detour) there(from netip.AddrPort) *net.UDPConn {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cut || !d.to.IsValid() {
		return nil
	}
	if c := d.back[from]; c != nil {
		return c
	}
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(d.to))
	if err != nil {
		return nil
	}
	d.back[from] = c
	d.work.Go(func() {
		buf := make([]byte, 64<<10)
		for {
			n, err := c.Read(buf)
			if err != nil {
				return
			}
			d.mu.Lock()
			cut := d.cut
			d.mu.Unlock()
			if !cut {
				d.udp.WriteToUDPAddrPort(buf[:n], from)
			}
		}
	})
	return c
}

func (d *detour) streams() {
	for {
		near, err := d.tcp.Accept()
		if err != nil {
			return
		}
		d.mu.Lock()
		far, err := net.Dial("tcp", d.to.String())
		if d.cut || err != nil {
			d.mu.Unlock()
			near.Close()
			if err == nil {
				far.Close()
			}
			continue
		}
		for _, c := range []net.Conn{near, far} {
			d.conns[c] = true
		}
		d.mu.Unlock()
		end := sync.OnceFunc(func() {
			near.Close()
			far.Close()
			d.mu.Lock()
			defer d.mu.Unlock()
			delete(d.conns, near)
			delete(d.conns, far)
		})
		d.work.Go(func() { io.Copy(near, far); end() })
		d.work.Go(func() { io.Copy(far, near); end() })
	}
}

// Two that were parted while one of them changed its keys, or each its own, get
// one ring when the network is mended, without anybody's help.
func TestPartitionAndRotation(t *testing.T) {
	t.Parallel()
	for name, both := range map[string]bool{"on one side": false, "on both sides": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ways := []*detour{newDetour(t), newDetour(t)}
			all, _ := keyed(t, 2, func(i int, o *Options) {
				slowly(i, o)
				o.Bind, o.Advertise = mustAddr(free(t)), ways[i].addr
				ways[i].lead(o.Bind)
			})
			cut := func(yes bool) {
				for _, w := range ways {
					w.set(yes)
				}
			}
			cut(true)
			within(t, "they have lost each other", func() bool { return len(all[0].Members()) == 1 && len(all[1].Members()) == 1 })
			must(t, all[0].AddKey(soon(t), key(2)))
			if _, lost, _ := ringError(t, all[0].UseKey(soon(t), IDOf(key(2)), false)); lost != "n1" {
				t.Errorf("lost: %s", lost)
			}
			must(t, all[0].UseKey(soon(t), IDOf(key(2)), true))
			want := all[0].Ring()
			if both {
				must(t, all[1].AddKey(soon(t), key(3)))
				must(t, all[1].UseKey(soon(t), IDOf(key(3)), true))
				if other := all[1].Ring(); other.edition().newer(want.edition()) {
					want = other
				}
			}
			cut(false)
			took := within(t, "they are one, with one ring", func() bool {
				return len(all[0].Members()) == 2 && len(all[1].Members()) == 2 && has(all[0], want) && has(all[1], want)
			})
			t.Logf("one after %v", took)
			must(t, all[1].Send("n0", []byte("hello")))
			within(t, "they can read each other", func() bool { return all[0].has("hello") })
			must(t, all[1].RemoveKey(soon(t), IDOf(key(1)), false))
		})
	}
}
