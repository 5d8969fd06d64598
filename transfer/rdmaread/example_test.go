package rdmaread_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rdmaread"
)

// A node that has devices to read with listens on all of them, and passes on to
// another transport if it has none.
func ExampleListen() {
	listen := func(local transfer.Local, call func(context.Context, transfer.Peer, []byte) ([]byte, rdmaread.Call, error)) (*rdmaread.Transport, error) {
		t, err := rdmaread.Listen(rdmaread.Options{Local: local, Call: call})
		if errors.Is(err, transfer.ErrUnavailable) {
			return nil, nil // the next transport is taken
		}
		return t, err
	}
	_, err := listen(transfer.Local{Life: id.Life{Node: "decode", Incarnation: 1}}, nil)
	fmt.Println(err)
	// Output: listen rdma: no seal table
}
