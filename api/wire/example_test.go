package wire_test

import (
	"fmt"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// One owner announces a publication and ends another.
func Example() {
	lists := [][]page.Index{{7, 8, 9, 12, 11}}
	refs := []wire.Ref{{Label: id.Main, RankMask: 0b11, Tokens: 600}}
	item, err := wire.Encode(wire.Batches{{
		Owner: id.Node("prefill-1").Hash(), Incarnation: 7, Floor: 40,
		Announcements: []wire.Announcement{{
			Sequence: 43, Publication: 43, Request: id.Request("cmpl-42").Hash(), Seal: 3, TTLMillis: 30000, Final: true,
			Refs: refs, Lists: lists, Digest: wire.Digest(refs, lists), Pages: 5,
		}},
		Releases: []id.Sequence{41},
	}})
	if err != nil {
		fmt.Println(err)
		return
	}
	m, err := wire.Decode(item, wire.MaxPages)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, b := range m.(wire.Batches) {
		for _, a := range b.Announcements {
			fmt.Println("publication", a.Publication, "has", a.Refs[0].Tokens, "tokens in pages", a.Lists[a.Refs[0].List])
		}
		fmt.Println("ended", b.Releases)
	}
	// Output:
	// publication 43 has 600 tokens in pages [7 8 9 12 11]
	// ended [41]
}

// A reference goes through a router as text.
func ExampleKeys() {
	keys := wire.Keys{[]byte("the gossip key of the cluster...")}
	s, err := keys.Encode(wire.Reference{
		Publication: id.Publication{Owner: id.Life{Node: "prefill-1", Incarnation: 7}, Sequence: 43},
		Request:     "cmpl-42", Seal: 3,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	r, err := keys.Decode(s)
	fmt.Println(r.Publication, r.Request, err)
	_, err = wire.Keys{[]byte("another key")}.Decode(s)
	fmt.Println(err)
	// Output:
	// prefill-1.7/43 cmpl-42 <nil>
	// decode reference: no key of 1 has signed it: malformed or forged reference
}
