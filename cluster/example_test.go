package cluster_test

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/kvferry/kvferry/cluster"
	"github.com/kvferry/kvferry/internal/id"
)

// printer is a Handler that hands on what it hears of.
type printer struct {
	items  chan string
	joined chan id.Node
}

func (p printer) Items(items [][]byte) {
	for _, item := range items {
		p.items <- string(item)
	}
}
func (p printer) Joined(m cluster.Member)   { p.joined <- m.Life.Node }
func (p printer) Left(cluster.Member, bool) {}
func (p printer) Updated(cluster.Member)    {}
func (p printer) MergeState(state []byte)   {}

func Example() {
	start := func(node id.Node, seeds ...string) (*cluster.Cluster, printer) {
		p := printer{items: make(chan string, 10), joined: make(chan id.Node, 10)}
		c, err := cluster.Start(cluster.Options{
			Life:    id.Life{Node: node, Incarnation: id.Incarnation(time.Now().UnixMicro())},
			Bind:    netip.MustParseAddrPort("127.0.0.1:0"),
			Join:    seeds,
			Handler: p,
		})
		if err != nil {
			panic(err)
		}
		return c, p
	}
	prefill, heard := start("prefill-0")
	defer prefill.Close()
	decode, hears := start("decode-0", prefill.Gossip().String())
	defer decode.Close()

	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := decode.Joined(ctx); err != nil {
		panic(err)
	}
	fmt.Println("joined:", <-heard.joined)
	if err := prefill.Broadcast([]byte("request 7 is published")); err != nil {
		panic(err)
	}
	fmt.Println("item:", <-hears.items)
	for _, m := range decode.Members() {
		fmt.Println("member:", m.Life.Node)
	}
	// Output:
	// joined: decode-0
	// item: request 7 is published
	// member: decode-0
	// member: prefill-0
}
