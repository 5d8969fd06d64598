package tcp

import (
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"
)

// proxy passes connections to an owner, and ends or mutes them after so many
// bytes of a direction, or passes what is not what came.
type proxy struct {
	address net.Addr

	mu       sync.Mutex
	up, down []byte // what has passed, of all connections
	cut      cut
	era      int // connections of an earlier one are frozen
}

// cut says after how many bytes of one connection nothing passes any more;
// negative is never.
type cut struct {
	up, down int
	mute     bool          // the connection stays open
	flip     bool          // instead, the next byte is changed and all passes
	pace     time.Duration // between two pieces of at most 8 KiB
}

func newProxy(t testing.TB, owner netip.AddrPort) *proxy {
	p := &proxy{cut: cut{up: -1, down: -1}}
	p.address = script(t, func(c net.Conn) {
		p.mu.Lock()
		cut, era := p.cut, p.era
		p.mu.Unlock()
		to, err := dial(owner)
		if err != nil {
			return
		}
		defer func() { _ = to.Close() }()
		var work sync.WaitGroup
		work.Go(func() { p.pass(c, to, cut.up, cut, era, &p.up) })
		work.Go(func() { p.pass(to, c, cut.down, cut, era, &p.down) })
		work.Wait()
	})
	return p
}

func (p *proxy) pass(from, to net.Conn, limit int, cut cut, era int, log *[]byte) {
	buf := make([]byte, 64<<10)
	if cut.pace > 0 {
		buf = buf[:8<<10]
	}
	sent := 0
	for {
		n, err := from.Read(buf)
		p.mu.Lock()
		if era != p.era {
			n = 0
		}
		p.mu.Unlock()
		time.Sleep(cut.pace) // the fault
		if cut.flip && limit >= sent && limit < sent+n {
			buf[limit-sent] ^= 1
		}
		last := !cut.flip && limit >= 0 && sent+n >= limit
		if last {
			n = max(0, limit-sent)
		}
		if n > 0 {
			p.mu.Lock()
			*log = append(*log, buf[:n]...)
			p.mu.Unlock()
			if _, err := to.Write(buf[:n]); err != nil {
				last = true
			}
			sent += n
		}
		if last && cut.mute && err == nil {
			for err == nil { // swallow the rest
				_, err = from.Read(buf)
			}
		}
		if last || err != nil {
			_ = from.Close()
			_ = to.Close()
			return
		}
	}
}

func (p *proxy) set(c cut) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = c
}

// freeze lets nothing pass any more over the connections that there are.
func (p *proxy) freeze() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.era++
}

func (p *proxy) passed() (up, down []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.up, p.down
}
