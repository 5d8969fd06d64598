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

var soak = flag.Duration("soak", 5*time.Second, "how long reads, cancels, and restarts run at random")

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

func TestSoak(t *testing.T) { transfertest.Soak(t, factory(t, Options{Workers: 2}), *soak) }
