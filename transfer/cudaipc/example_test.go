package cudaipc_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/cudaipc"
)

// Arenas in host memory are for other transports, which a caller takes then.
func ExampleListen() {
	arena, err := memory.New("example", 4096)
	if err != nil {
		fmt.Println(err)
		return
	}
	seals, err := memory.NewSealTable()
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = cudaipc.Listen(cudaipc.Options{
		Local: transfer.Local{
			Life:   id.Life{Node: "prefill", Incarnation: 7},
			Arenas: map[id.Rank]memory.Arena{0: arena}, Seals: seals,
		},
		Dir: "/run/kvferry",
	})
	fmt.Println(errors.Is(err, transfer.ErrUnavailable))
	// Output: true
}

// A node whose arena is on a GPU reads a page of a peer of the same host.
func ExampleTransport_Open() {
	read := func(ctx context.Context, local transfer.Local, runtime *cuda.Runtime, peer transfer.Peer, seal transfer.Seal) error {
		t, err := cudaipc.Listen(cudaipc.Options{Local: local, Runtime: runtime, Dir: "/run/kvferry"})
		if err != nil {
			return err
		}
		defer func() { _ = t.Close() }()
		link, err := t.Open(ctx, peer)
		if err != nil {
			return err
		}
		return link.Read(ctx, []transfer.Seal{seal}, []transfer.Copy{{Rank: 0, Remote: 2 << 20, Local: 4 << 20, Bytes: 2 << 20}})
	}
	_ = read
}
