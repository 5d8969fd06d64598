package tcp_test

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// local makes the memory of a node: one arena and a seal table.
func local(life id.Life) (transfer.Local, error) {
	seals, err := memory.NewSealTable()
	if err != nil {
		return transfer.Local{}, err
	}
	arena, err := memory.New("example", 4096)
	if err != nil {
		return transfer.Local{}, err
	}
	return transfer.Local{Life: life, Arenas: map[id.Rank]memory.Arena{0: arena}, Seals: seals}, nil
}

func read() (string, error) {
	owner, err := local(id.Life{Node: "prefill", Incarnation: 7})
	if err != nil {
		return "", err
	}
	reader, err := local(id.Life{Node: "decode", Incarnation: 8})
	if err != nil {
		return "", err
	}
	anyPort := netip.MustParseAddrPort("127.0.0.1:0")
	serving, err := tcp.Listen(tcp.Options{Local: owner, Bind: anyPort})
	if err != nil {
		return "", err
	}
	defer func() { _ = serving.Close() }()
	reading, err := tcp.Listen(tcp.Options{Local: reader, Bind: anyPort})
	if err != nil {
		return "", err
	}
	defer func() { _ = reading.Close() }()

	copy(memoryOf(owner)[100:], "pages of a request")
	value, _ := id.SealValue(owner.Life.Incarnation, 1)
	owner.Seals.Store(3, value) // held

	link, err := reading.Open(context.Background(), transfer.Peer{
		Life: owner.Life, Descriptor: serving.Descriptor(), ArenaBytes: map[id.Rank]int64{0: 4096},
	})
	if err != nil {
		return "", err
	}
	err = link.Read(context.Background(),
		[]transfer.Seal{{Index: 3, Value: value}},
		[]transfer.Copy{{Rank: 0, Remote: 100, Local: 0, Bytes: 18}})
	return string(memoryOf(reader)[:18]), err
}

func ExampleListen() {
	fmt.Println(read())
	// Output: pages of a request <nil>
}

func memoryOf(l transfer.Local) []byte {
	b, _ := transfer.InHost(l.Arenas[0])
	return b
}
