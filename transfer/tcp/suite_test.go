package tcp

import (
	"flag"
	"net"
	"net/netip"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

var soak = flag.Duration("soak", 2*time.Second, "how long reads, cancels, and restarts run at random")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func factory(bind string) transfertest.Factory {
	return transfertest.Factory{Name: Name, Start: func(local transfer.Local, limits transfer.Limits) (transfer.Transport, error) {
		return Listen(Options{Local: local, Bind: netip.MustParseAddrPort(bind), Limits: limits})
	}}
}

func TestSuite(t *testing.T) { transfertest.Run(t, factory("127.0.0.1:0")) }

func TestSuiteIPv6(t *testing.T) {
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.MustParseAddrPort("[::1]:0")))
	if err != nil {
		t.Skipf("no IPv6 here: %v", err)
	}
	_ = l.Close()
	transfertest.Run(t, factory("[::1]:0"))
}

// The suite over TLS, where every node has a certificate of one authority.
func TestSuiteTLS(t *testing.T) {
	a := newAuthority(t)
	transfertest.Run(t, transfertest.Factory{Name: Name, Start: func(local transfer.Local, limits transfer.Limits) (transfer.Transport, error) {
		return Listen(Options{
			Local: local, Bind: netip.MustParseAddrPort("127.0.0.1:0"), Limits: limits,
			Identity: issue(t, a, local.Life.Node, nil),
		})
	}})
}

// The suite where arenas are on a device.
func TestSuiteStaged(t *testing.T) {
	transfertest.RunStaged(t, transfertest.Factory{Name: Name, Start: func(local transfer.Local, limits transfer.Limits) (transfer.Transport, error) {
		return Listen(Options{Local: local, Bind: netip.MustParseAddrPort("127.0.0.1:0"), Limits: limits, Staging: 16 << 20})
	}})
}

// Two buffers each way, which reads and answers wait for.
func TestSuiteScarce(t *testing.T) {
	transfertest.RunScarce(t, transfertest.Factory{Name: Name, Start: func(local transfer.Local, limits transfer.Limits) (transfer.Transport, error) {
		return Listen(Options{Local: local, Bind: netip.MustParseAddrPort("127.0.0.1:0"), Limits: limits, Staging: 1, LinkConns: 16})
	}})
}

func TestSoak(t *testing.T) { transfertest.Soak(t, factory("127.0.0.1:0"), *soak) }

// The suite below the faulty wrapper: what tcp gets then are reads in pieces
// and in any order.
func TestSuiteFaulty(t *testing.T) {
	f := factory("127.0.0.1:0")
	start := f.Start
	f.Start = func(local transfer.Local, limits transfer.Limits) (transfer.Transport, error) {
		tr, err := start(local, limits)
		if err != nil {
			return nil, err
		}
		return transfertest.NewFaulty(tr, limits, func(int) transfertest.Fault {
			return transfertest.Fault{Delay: 20 * time.Microsecond, Reorder: true}
		}), nil
	}
	transfertest.Run(t, f)
}
