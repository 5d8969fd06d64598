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
var soak = flag.Duration("soak", 2*time.Second, "time of the stress test")

func TestMain(m *testing.M) {
	code := m.Run()
	// memberlist waits for none of its goroutines: a probe may outlive its
	// cluster by its longest interval.
	var err error
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); {
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
