package transfertest_test

import (
	"testing"

	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// A transport's own test runs the suite with a factory.
func ExampleRun() {
	_ = func(t *testing.T) {
		var network transfertest.Network
		transfertest.Run(t, transfertest.Factory{
			Name: transfertest.MemoryName,
			Start: func(local transfer.Local, _ transfer.Limits) (transfer.Transport, error) {
				return network.Listen(local), nil
			},
		})
	}
}
