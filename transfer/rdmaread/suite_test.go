package rdmaread

import (
	"context"
	"flag"
	"net/netip"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/rdma/rdmatest"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

var soak = flag.Duration("soak", 2*time.Second, "how long reads, cancels, and restarts run at random; from a minute on, the long tests run in full")

func TestMain(m *testing.M) {
	if os.Getenv(ownerEnv) != "" {
		os.Exit(ownerProcess())
	}
	if os.Getenv(readerEnv) != "" {
		os.Exit(readerProcess())
	}
	goleak.VerifyTestMain(m)
}

// factory starts transports that meet.
func (m *meeting) factory() transfertest.Factory {
	return transfertest.Factory{Name: Name, Start: func(local transfer.Local, limits transfer.Limits) (transfer.Transport, error) {
		o := m.o
		o.Local, o.Limits = local, limits
		return m.listen(o)
	}}
}

func TestSuite(t *testing.T) {
	m, _ := newMeeting(t, Options{})
	transfertest.Run(t, m.factory())
}

// With one lane, and memory of devices on both sides.
func TestSuiteOneDevice(t *testing.T) {
	m, _ := newMeeting(t, Options{QueuePairs: 1, root: withPeerMem}, rdmatest.DeviceSpec{Name: "only"})
	transfertest.Run(t, m.on(t, ByPeerMem, ByDMABuf))
}

// And with memory of a device at the owner's alone.
func TestSuiteIPv6(t *testing.T) {
	m, _ := newMeeting(t, Options{},
		rdmatest.DeviceSpec{Name: "six0", GIDs: []netip.Addr{netip.MustParseAddr("fe80::1"), netip.MustParseAddr("fd00:1::1")}},
		rdmatest.DeviceSpec{Name: "six1", GIDs: []netip.Addr{netip.MustParseAddr("2001:db8::1")}})
	transfertest.Run(t, m.on(t, ByDMABuf, InHost))
}

// An InfiniBand port is reached by its LID; this one takes small regions too, so
// that every arena is sliced.
func TestSuiteInfiniBand(t *testing.T) {
	m, _ := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "ib0", InfiniBand: true, MaxMRSize: 160 << 10, MaxMsg: 24 << 10, MaxReads: 4})
	transfertest.Run(t, m.factory())
}

// Memory of a device that this one reaches neither by a dma-buf nor by its address:
// what each side has there goes through its host. On devices of the machine too:
// Soft-RoCE takes no dma-buf.
func TestSuiteStaged(t *testing.T) {
	m, _ := newMeeting(t, Options{QueuePairs: 1, Staging: 6 * leastStaging})
	transfertest.RunStaged(t, m.factory())
}

// The suite below the faulty wrapper: what the transport gets then are reads in
// pieces and in any order.
func TestSuiteFaulty(t *testing.T) {
	m, _ := newMeeting(t, Options{})
	f := m.factory()
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

func TestSoak(t *testing.T) {
	m, w := newMeeting(t, Options{})
	f := m.factory()
	if w == nil { // an emulated processor needs longer for a read than links live there
		start := f.Start
		f.Start = func(local transfer.Local, limits transfer.Limits) (transfer.Transport, error) {
			tr, err := start(local, limits)
			if err != nil {
				return nil, err
			}
			return patient{tr}, nil
		}
	}
	d := *soak
	if w == nil {
		d = max(d, 45*time.Second)
	}
	transfertest.Soak(t, f, d)
}

// patient is a transport whose links are closed a little later than asked for.
type patient struct{ transfer.Transport }

func (p patient) Open(ctx context.Context, peer transfer.Peer) (transfer.Link, error) {
	l, err := p.Transport.Open(ctx, peer)
	if err != nil {
		return nil, err
	}
	return patientLink{l}, nil
}

type patientLink struct{ transfer.Link }

func (l patientLink) Close() error {
	pause(3 * time.Second)
	return l.Link.Close()
}
