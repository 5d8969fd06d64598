package node_test

import (
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// soak is how long the tests that can go on for ever do.
var soak = flag.Duration("soak", time.Second, "time of the stress test")

// rendezvous is where the nodes of all tests meet for shm, unless they say otherwise.
var rendezvous string

func TestMain(m *testing.M) {
	var err error
	if rendezvous, err = os.MkdirTemp("", "kvf"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if left, _ := os.ReadDir(rendezvous); len(left) > 0 && code == 0 {
		fmt.Fprintln(os.Stderr, "sockets are left:", left)
		code = 1
	}
	_ = os.RemoveAll(rendezvous)
	_ = os.RemoveAll(fabricDir) // which may be ""
	// memberlist waits for none of its goroutines: a probe may outlive its
	// cluster by its longest interval.
	for end := time.Now().Add(deadline); time.Now().Before(end); {
		if err = goleak.Find(); err == nil {
			break
		}
	}
	if err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}
