package cudaipc

import (
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/cuda/cudatest"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

var soak = flag.Duration("soak", 2*time.Second, "how long reads, cancels, and restarts run at random")

// worldOptions are those of the emulated driver.
var worldOptions = cudatest.Options{Devices: 2, Peers: true}

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		os.Exit(child())
	}
	if os.Getenv(pidnsEnv) != "" {
		n, err := pidNamespace()
		fmt.Println(n)
		if err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(tests{m})
}

// tests runs all tests, and then ends the driver.
type tests struct{ m *testing.M }

func (t tests) Run() int {
	code := t.m.Run()
	if err := closeDriver(); err != nil {
		fmt.Fprintln(os.Stderr, "close the driver:", err)
		return max(code, 1)
	}
	return code
}

// small are batches of which even the reads of a suite have several.
var small = Options{batchBytes: 128 << 10, batchCopies: 16}

// factory starts transports that meet in one directory, the owner's memory on one
// device and the reader's on another or the same.
func factory(t testing.TB, o Options, owner, reader int) transfertest.Factory {
	dir := rendezvousDir(t)
	r := gpu(t)
	return transfertest.Factory{
		Name:  Name,
		Owner: place(t, owner), Reader: place(t, reader),
		Start: func(local transfer.Local, limits transfer.Limits) (transfer.Transport, error) {
			o := o
			o.Local, o.Limits, o.Dir, o.Runtime = local, limits, dir, r
			return Listen(o)
		},
	}
}

func TestSuite(t *testing.T) { transfertest.Run(t, factory(t, small, 0, 0)) }

func TestSoak(t *testing.T) {
	t.Run("one device", func(t *testing.T) { transfertest.Soak(t, factory(t, small, 0, 0), *soak/2) })
	t.Run("two devices", func(t *testing.T) { transfertest.Soak(t, factory(t, small, 1, 0), *soak/2) })
}
