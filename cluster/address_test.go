package cluster

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/hashicorp/memberlist"

	"github.com/kvferry/kvferry/internal/id"
)

func addressOf(m member) memberlist.Address {
	return memberlist.Address{Addr: m.Gossip().String(), Name: listName(m.Life())}
}

func TestOptions(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		change func(o *Options)
		want   string
	}{
		"no name":             {func(o *Options) { o.Life.Node = "" }, "node name"},
		"no incarnation":      {func(o *Options) { o.Life.Incarnation = 0 }, "incarnation"},
		"no bind":             {func(o *Options) { o.Bind = netip.AddrPort{} }, "bind"},
		"no handler":          {func(o *Options) { o.Handler = nil }, "handler"},
		"long label":          {func(o *Options) { o.Label = strings.Repeat("l", MaxLabel+1) }, "label"},
		"short key":           {func(o *Options) { o.Ring.Keys = [][]byte{make([]byte, 32), make([]byte, 16)} }, "key 1"},
		"seed without port":   {func(o *Options) { o.Join = []string{"10.0.0.1"} }, `"10.0.0.1"`},
		"seed with port 0":    {func(o *Options) { o.Join = []string{"10.0.0.1:0"} }, `"10.0.0.1:0"`},
		"role of bad letters": {func(o *Options) { o.Meta.Role = "Both!" }, "role"},
		"long group":          {func(o *Options) { o.Meta.Group = id.Group(strings.Repeat("g", 65)) }, "group"},
		"peer of no address":  {func(o *Options) { o.Meta.Peer = netip.MustParseAddrPort("0.0.0.0:7901") }, "peer"},
		"advertise nowhere":   {func(o *Options) { o.Advertise = netip.MustParseAddrPort("0.0.0.0:7900") }, "advertise"},
		"unspecified, alone":  {func(o *Options) { o.Bind = netip.MustParseAddrPort("0.0.0.0:0") }, "set an address to advertise"},
		"unspecified6, alone": {func(o *Options) { o.Bind = netip.MustParseAddrPort("[::]:0") }, "set an address to advertise"},
		"loopback, and a seed that is not": {
			func(o *Options) { o.Join = []string{"192.0.2.1:7900"} },
			"seed 192.0.2.1:7900 is on another machine",
		},
		"loopback advertised to such a seed": {func(o *Options) {
			o.Bind, o.Advertise, o.Join = netip.MustParseAddrPort("0.0.0.0:0"), netip.MustParseAddrPort("127.0.0.1:0"), []string{"192.0.2.1:7900"}
		}, "loopback"},
	} {
		t.Run(name, func(t *testing.T) {
			o := options(t, "a", 1, anywhere())
			o.Handler = &recorder{}
			tt.change(&o)
			c, err := Start(o)
			if err == nil {
				c.Close()
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("start: %v, want an error about %q", err, tt.want)
			}
		})
	}
}

func TestAdvertise(t *testing.T) {
	t.Parallel()
	seed := launch(t, options(t, "seed", 1, anywhere()))
	life := id.Incarnation(0)
	for name, tt := range map[string]struct {
		bind, advertise string
		want            string
	}{
		"chosen by the route to the seed": {"0.0.0.0:0", "", "127.0.0.1"},
		"given, with the bound port":      {"0.0.0.0:0", "127.0.0.63:0", "127.0.0.63"},
		"the bound one":                   {"127.0.0.64:0", "", "127.0.0.64"},
	} {
		t.Run(name, func(t *testing.T) {
			o := options(t, "b", 1, tt.bind, seed.Gossip().String())
			if tt.advertise != "" {
				o.Advertise = netip.MustParseAddrPort(tt.advertise)
			}
			life++
			o.Label, o.Life.Incarnation = seed.keys.label, life
			b := launch(t, o)
			joined(t, b)
			if got := b.Gossip(); got.Addr().String() != tt.want || got.Port() != b.bound.Port() {
				t.Errorf("advertises %s, bound to %s, want %s", got, b.bound, tt.want)
			}
			for _, m := range seed.Members() {
				if m.Life == b.Life() && m.Gossip != b.Gossip() {
					t.Errorf("seed sees it at %s, want %s", m.Gossip, b.Gossip())
				}
			}
			if err := seed.Send("b", []byte("hello")); err != nil {
				t.Fatal(err)
			}
			b.Close()
		})
	}
}
