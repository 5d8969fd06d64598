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

// readPage is how a node whose arena is on a GPU reads a page of a peer of the same
// host.
func readPage(ctx context.Context, local transfer.Local, runtime *cuda.Runtime, peer transfer.Peer, seal transfer.Seal) error {
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
	local := transfer.Local{
		Life:   id.Life{Node: "decode", Incarnation: 7},
		Arenas: map[id.Rank]memory.Arena{0: arena}, Seals: seals,
	}
	peer := transfer.Peer{Life: id.Life{Node: "prefill", Incarnation: 8}, ArenaBytes: map[id.Rank]int64{0: 8 << 20}}
	err = readPage(context.Background(), local, nil, peer, transfer.Seal{Index: 3, Value: 1})
	fmt.Println(errors.Is(err, transfer.ErrUnavailable))
	// Output: true
}
