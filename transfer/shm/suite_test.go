package shm

import (
	"flag"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

var soak = flag.Duration("soak", 2*time.Second, "how long reads, cancels, and restarts run at random")

func TestMain(m *testing.M) {
	if os.Getenv(ownerEnv) != "" {
		os.Exit(ownerProcess())
	}
	goleak.VerifyTestMain(m)
}

// factory starts transports that meet in one directory.
func factory(t testing.TB, o Options) transfertest.Factory {
	dir := t.TempDir()
	chmod(t, dir, 0o700)
	return transfertest.Factory{Name: Name, Start: func(local transfer.Local, limits transfer.Limits) (transfer.Transport, error) {
		o := o
		o.Local, o.Limits, o.Dir = local, limits, dir
		return Listen(o)
	}}
}

func TestSuite(t *testing.T) { transfertest.Run(t, factory(t, Options{Workers: 3})) }

func TestSuiteOneWorker(t *testing.T) { transfertest.Run(t, factory(t, Options{Workers: 1})) }

func TestSuiteCached(t *testing.T) {
	transfertest.Run(t, factory(t, Options{Workers: 2, Cached: true}))
}

// The suite below the faulty wrapper: what shm gets then are reads in pieces
// and in any order.
func TestSuiteFaulty(t *testing.T) {
	f := factory(t, Options{Workers: 2})
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

// Arenas of emulated devices, on the one side, the other, and both.
func TestSuiteStaged(t *testing.T) {
	transfertest.RunStaged(t, factory(t, Options{Workers: 2, Staging: 16 << 20}))
}

// What must hold of copies of devices, with one ring and one link.
func TestSuiteScarce(t *testing.T) {
	transfertest.RunScarce(t, factory(t, Options{Workers: 2, Staging: 1}))
}

// As little memory for staging as lets the suite open its links at an owner, and
// as little as there can be at a reader: small buffers, and two of them.
func TestSuiteStagedInLittle(t *testing.T) {
	device := transfertest.NewDevice(transfertest.DeviceOptions{})
	dir := meeting(t)
	f := transfertest.Factory{Name: Name, Owner: device.Alloc, Reader: device.Alloc, Start: func(local transfer.Local, limits transfer.Limits) (transfer.Transport, error) {
		o := Options{Local: local, Limits: limits, Dir: dir, Workers: 3, Staging: 2 << 20}
		if local.Life.Node == "reader" {
			o.Staging = 1
		}
		return Listen(o)
	}}
	t.Run("suite", func(t *testing.T) { transfertest.Run(t, f) })
	if err := device.Close(); err != nil {
		t.Error(err)
	}
}

// Between devices too.
func TestSoakStaged(t *testing.T) {
	device := transfertest.NewDevice(transfertest.DeviceOptions{})
	f := factory(t, Options{Workers: 2})
	f.Owner, f.Reader = device.Alloc, device.Alloc
	t.Run("soak", func(t *testing.T) { transfertest.Soak(t, f, *soak) })
	if err := device.Close(); err != nil {
		t.Error(err)
	}
}

func TestSoak(t *testing.T) { transfertest.Soak(t, factory(t, Options{Workers: 2}), *soak) }
