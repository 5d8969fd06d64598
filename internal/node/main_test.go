package node_test

import (
	"flag"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// soak is how long the tests that can go on for ever do.
var soak = flag.Duration("soak", 2*time.Second, "time of the stress test")

func TestMain(m *testing.M) {
	// memberlist waits for none of its goroutines: a probe may linger for a
	// second after Shutdown, for which goleak tries again.
	goleak.VerifyTestMain(m)
}
