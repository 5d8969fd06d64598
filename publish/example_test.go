package publish_test

import (
	"fmt"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/publish"
)

// An owner publishes a request and grows it; a reader elsewhere is woken.
func Example() {
	now := time.Now()
	owner := id.Life{Node: "prefill-1", Incarnation: 7}
	log := publish.NewLog(publish.LogOptions{Life: owner})
	board := publish.NewBoard(publish.BoardOptions{Life: id.Life{Node: "decode-1", Incarnation: 3}})
	board.Member(now, owner, true)

	gossip := func() {
		for _, item := range log.Outgoing(now, 1<<20) { // by way of the cluster
			if _, _, err := board.Receive(now, item); err != nil {
				fmt.Println(err)
			}
		}
	}
	changed, cancel := board.Watch("cmpl-42")
	defer cancel()

	p := manager.Publication{ID: 1, Request: "cmpl-42", Streams: []manager.Stream{
		{Label: id.Main, Ranks: []id.Rank{0}, Tokens: 300, Pages: []page.Index{5, 6, 7}},
	}}
	name, seal, _, err := log.Reserve(p.ID)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("reserved", name, "and seal word", seal) // which is stored now
	if _, err := log.Announce(now, p, 30*time.Second); err != nil {
		fmt.Println(err)
		return
	}
	gossip()

	<-changed
	for _, e := range board.ByRequest(now, "cmpl-42") {
		s := e.Publication.Streams[0]
		fmt.Println("read", e.Name, s.Label, s.Tokens, "tokens in pages", s.Pages)
	}

	if err := log.Release(now, p.ID); err != nil { // the seal word has been cleared
		fmt.Println(err)
		return
	}
	gossip()
	_, err = board.ByName(now, name)
	fmt.Println(err)
	// Output:
	// reserved prefill-1.7/1 and seal word 0
	// read prefill-1.7/1 main 300 tokens in pages [5 6 7]
	// prefill-1.7/1: publication has ended
}
