package rdmaread

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer"
)

// eth is a port of Ethernet.
func eth(gids ...string) remotePort {
	p := remotePort{name: "eth", link: rdma.LinkEthernet, reads: 16}
	for _, g := range gids {
		p.gids = append(p.gids, addr(g))
	}
	return p
}

func ib(gid string) remotePort {
	return remotePort{name: "ib", link: rdma.LinkInfiniBand, reads: 16, gids: []netip.Addr{addr(gid)}}
}

func TestPair(t *testing.T) {
	for name, tt := range map[string]struct {
		ours, theirs []remotePort
		want         string // "local>remote by address" of each
	}{
		"one and one":               {[]remotePort{eth("10.0.0.1")}, []remotePort{eth("10.0.0.2")}, "0>0 10.0.0.2"},
		"by subnet":                 {[]remotePort{eth("10.1.0.1"), eth("10.2.0.1")}, []remotePort{eth("10.2.0.9"), eth("10.1.0.9")}, "0>1 10.1.0.9, 1>0 10.2.0.9"},
		"by place in one subnet":    {[]remotePort{eth("10.0.0.16"), eth("10.0.0.17")}, []remotePort{eth("10.0.1.16"), eth("10.0.1.16")}, "0>0 10.0.1.16, 1>1 10.0.1.16"},
		"same family":               {[]remotePort{eth("10.0.0.1", "2001:db8::1")}, []remotePort{eth("2001:db8::2")}, "0>0 2001:db8::2"},
		"nearest of two families":   {[]remotePort{eth("10.0.0.1", "2001:db8::1")}, []remotePort{eth("172.16.0.1", "2001:db8::2")}, "0>0 2001:db8::2"},
		"same link layer":           {[]remotePort{eth("10.0.0.1"), ib("fe80::1")}, []remotePort{ib("fe80::2"), eth("10.0.0.2")}, "0>1 10.0.0.2, 1>0 fe80::2"},
		"link-local with its kind":  {[]remotePort{eth("fe80::1")}, []remotePort{eth("fe80::2")}, "0>0 fe80::2"},
		"more of ours":              {[]remotePort{eth("10.0.0.1"), eth("10.0.0.2"), eth("10.0.0.3")}, []remotePort{eth("10.0.0.9")}, "0>0 10.0.0.9, 1>0 10.0.0.9, 2>0 10.0.0.9"},
		"more of theirs":            {[]remotePort{eth("10.0.0.1")}, []remotePort{eth("10.0.0.8"), eth("10.0.0.9")}, "0>0 10.0.0.8, 0>1 10.0.0.9"},
		"what is of no use is left": {[]remotePort{eth("10.0.0.1"), eth("2001:db8::1")}, []remotePort{eth("10.0.0.8")}, "0>0 10.0.0.8"},
	} {
		pairs, err := pair(tt.ours, tt.theirs)
		var got []string
		for _, p := range pairs {
			got = append(got, fmt.Sprintf("%d>%d %s", p.local, p.remote, p.gid.Unmap()))
		}
		if err != nil || strings.Join(got, ", ") != tt.want {
			t.Errorf("%s: %s, %v, want %s", name, strings.Join(got, ", "), err, tt.want)
		}
	}
}

func TestNothingInCommonIsNamed(t *testing.T) {
	for name, tt := range map[string]struct{ ours, theirs []remotePort }{
		"families":    {[]remotePort{eth("10.0.0.1")}, []remotePort{eth("2001:db8::2")}},
		"link layers": {[]remotePort{eth("10.0.0.1")}, []remotePort{ib("fe80::2")}},
		"no port":     {[]remotePort{eth("10.0.0.1")}, nil},
		"no address":  {[]remotePort{eth("10.0.0.1")}, []remotePort{eth()}},
		"link-local":  {[]remotePort{eth("fe80::1")}, []remotePort{eth("2001:db8::2")}},
	} {
		_, err := pair(tt.ours, tt.theirs)
		if !errors.Is(err, transfer.ErrUnavailable) {
			t.Errorf("%s: %v, want ErrUnavailable", name, err)
			continue
		}
		for _, p := range append(slices.Clone(tt.ours), tt.theirs...) {
			for _, g := range p.gids {
				if !strings.Contains(err.Error(), g.Unmap().String()) {
					t.Errorf("%s: %q does not name %s", name, err, g.Unmap())
				}
			}
		}
	}
}

// Every port that can be used is, and none much more than others are.
func TestEveryPortIsUsedAndNoneTooOften(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ports := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) remotePort {
			return eth(fmt.Sprintf("10.0.%d.%d", rapid.IntRange(0, 3).Draw(t, "subnet"), rapid.IntRange(1, 250).Draw(t, "host")))
		}), 1, 16)
		ours, theirs := ports.Draw(t, "ours"), ports.Draw(t, "theirs")
		pairs, err := pair(ours, theirs)
		if err != nil {
			t.Fatal(err)
		}
		here, there := make([]int, len(ours)), make([]int, len(theirs))
		for _, p := range pairs {
			here[p.local]++
			there[p.remote]++
			if !slices.Contains(theirs[p.remote].gids, p.gid) {
				t.Fatalf("%s is dialled, which is none of %v", p.gid, theirs[p.remote].gids)
			}
		}
		if len(pairs) != max(len(ours), len(theirs)) || slices.Contains(here, 0) || slices.Contains(there, 0) {
			t.Fatalf("%d pairs of %d and %d ports: %v, %v", len(pairs), len(ours), len(theirs), here, there)
		}
		for _, n := range [][2]int{{slices.Max(here), len(ours)}, {slices.Max(there), len(theirs)}} {
			if most := (len(pairs) + n[1] - 1) / n[1]; n[0] > most+1 {
				t.Fatalf("a port is used %d times, %d would do: %v, %v", n[0], most, here, there)
			}
		}
	})
}

func TestUsable(t *testing.T) {
	gid := func(index int, a string, kind rdma.GIDType) rdma.GID {
		return rdma.GID{Index: index, Addr: addr(a), Type: kind, NetDev: "eth0"}
	}
	all := []rdma.GID{gid(0, "fe80::1", rdma.GIDIB), gid(1, "fe80::1", rdma.GIDRoCEv2), gid(2, "10.0.0.1", rdma.GIDIB), gid(3, "2001:db8::1", rdma.GIDRoCEv2), gid(4, "10.0.0.1", rdma.GIDRoCEv2)}
	two, nine := 2, 9
	for name, tt := range map[string]struct {
		gids  []rdma.GID
		index *int
		want  []int
	}{
		"the best first":          {all, nil, []int{4, 3}},
		"link-local if all":       {all[:2], nil, []int{1}},
		"RoCE v1 if all":          {all[:1], nil, []int{0}},
		"global v1 before a link": {all[:3], nil, []int{2}},
		"named":                   {all, &two, []int{2}},
		"named, and not there":    {all, &nine, nil},
		"none":                    {nil, nil, nil},
	} {
		got, err := usable(tt.gids, rdma.LinkEthernet, tt.index)
		var indexes []int
		for _, g := range got {
			indexes = append(indexes, g.Index)
		}
		if !slices.Equal(indexes, tt.want) || (err == nil) != (tt.want != nil) {
			t.Errorf("%s: %v, %v, want %v", name, indexes, err, tt.want)
		}
	}
}
