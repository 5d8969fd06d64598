package rdma

import (
	"io/fs"
	"net/netip"
	"reflect"
	"strconv"
	"testing"
	"testing/fstest"
)

// gid is an entry of a RoCE v2 table, of the device eth0.
func gid(index int, addr string) GID {
	a := netip.MustParseAddr(addr)
	return GID{Index: index, Addr: netip.AddrFrom16(a.As16()), Type: GIDRoCEv2, NetDev: "eth0"}
}

func (g GID) of(dev string) GID     { g.NetDev = dev; return g }
func (g GID) as(t GIDType) GID      { g.Type = t; return g }
func gids(list ...GID) []GID        { return list }
func peerOf(a string) netip.Addr    { return netip.MustParseAddr(a) }
func v1(index int, a string) GID    { return gid(index, a).as(GIDIB) }
func none() netip.Addr              { return netip.Addr{} }
func mapped(a string) netip.Addr    { return netip.AddrFrom16(netip.MustParseAddr(a).As16()) }
func ib(index int, addr string) GID { return gid(index, addr).as(GIDIB).of("") }

func TestChooseGID(t *testing.T) {
	usual := gids(v1(0, "fe80::1"), gid(1, "fe80::1"), v1(2, "10.0.0.1"), gid(3, "10.0.0.1"), v1(4, "2001:db8::1"), gid(5, "2001:db8::1"))
	for name, tt := range map[string]struct {
		gids []GID
		link LinkLayer
		peer netip.Addr
		want int
	}{
		"IPv4 before all":                       {gids: usual, want: 3},
		"the peer's family":                     {gids: usual, peer: peerOf("2001:db8:1::2"), want: 5},
		"the peer's family, as the wire has it": {gids: usual, peer: mapped("10.9.9.9"), want: 3},
		"a link-local peer":                     {gids: usual, peer: peerOf("fe80::2"), want: 1},
		"global before unique local":            {gids: gids(gid(0, "fe80::1"), gid(1, "fd00::1"), gid(2, "2001:db8::1")), want: 2},
		"unique local before link-local":        {gids: gids(gid(0, "fe80::1"), gid(1, "fd00::1")), want: 1},
		"v1 before link-local":                  {gids: gids(gid(0, "fe80::1"), v1(1, "10.0.0.1")), want: 1},
		"v2 before v1 of a better address":      {gids: gids(v1(0, "10.0.0.1"), gid(1, "fd00::1")), want: 1},
		"v2 before v1 of the peer's family":     {gids: gids(v1(0, "10.0.0.1"), gid(1, "fd00::1")), peer: peerOf("10.0.0.2"), want: 1},
		"v1 alone":                              {gids: gids(v1(0, "fe80::1"), v1(1, "10.0.0.1")), want: 1},
		"link-local alone":                      {gids: gids(v1(0, "fe80::1"), gid(1, "fe80::1")), want: 1},
		"link-local alone, of IPv4 too":         {gids: gids(gid(0, "fe80::1"), gid(1, "169.254.7.7")), want: 1},
		"IPv4 link-local is link-local":         {gids: gids(gid(0, "169.254.7.7"), gid(1, "fd00::1")), want: 1},
		"loopback is no better":                 {gids: gids(gid(0, "127.0.0.1"), gid(1, "fd00::1")), want: 1},
		"no family of the peer's":               {gids: gids(gid(0, "fd00::1"), gid(1, "2001:db8::1")), peer: peerOf("10.0.0.2"), want: 1},
		"the longest prefix":                    {gids: gids(gid(0, "10.1.0.1"), gid(1, "10.2.1.1"), gid(2, "10.2.2.1")), peer: peerOf("10.2.2.200"), want: 2},
		"the longest prefix, IPv6":              {gids: gids(gid(0, "2001:db8:0:1::1"), gid(1, "2001:db8:0:2::1")), peer: peerOf("2001:db8:0:2::9"), want: 1},
		"family before prefix":                  {gids: gids(gid(0, "2001:db8::1"), gid(1, "192.168.0.1")), peer: peerOf("10.0.0.1"), want: 1},
		"lowest index of equals":                {gids: gids(gid(7, "10.0.0.1"), gid(3, "10.0.0.1"), gid(5, "10.0.0.1")), want: 3},
		"docker":                                {gids: gids(gid(0, "172.17.0.1").of("docker0"), gid(1, "2001:db8::1")), want: 1},
		"cni":                                   {gids: gids(gid(0, "10.0.0.1").of("cni0"), gid(1, "10.0.0.2")), want: 1},
		"flannel":                               {gids: gids(gid(0, "10.0.0.1").of("flannel.1"), gid(1, "10.0.0.2")), want: 1},
		"calico":                                {gids: gids(gid(0, "10.0.0.1").of("cali12ab"), gid(1, "10.0.0.2")), want: 1},
		"vxlan":                                 {gids: gids(gid(0, "10.0.0.1").of("vxlan.calico"), gid(1, "10.0.0.2")), want: 1},
		"a private address is as good":          {gids: gids(gid(0, "172.17.0.1"), gid(1, "8.8.8.8")), want: 0},
		"veth may be the fabric":                {gids: gids(gid(0, "10.0.0.1").of("veth1"), gid(1, "10.0.0.2")), want: 0},
		"a bond, a bridge, a VLAN":              {gids: gids(gid(0, "10.0.0.1").of("bond0.100"), gid(1, "10.0.0.2").of("br0")), want: 0},
		"container before link-local":           {gids: gids(gid(0, "fe80::1"), gid(1, "172.17.0.1").of("docker0")), want: 1},
		"without device":                        {gids: gids(gid(0, "10.0.0.1").of(""), gid(1, "fd00::1")), want: 1},
		"without device before a container's":   {gids: gids(gid(0, "10.0.0.1").of("docker0"), gid(1, "10.0.0.2").of("")), want: 1},
		"all without device":                    {gids: gids(gid(0, "fe80::1").of(""), gid(1, "10.0.0.2").of("")), want: 1},
		"of no known type":                      {gids: gids(gid(0, "10.0.0.1").as(GIDUnknown), gid(1, "10.0.0.1")), want: 1},
		"InfiniBand, link-local as it is":       {link: LinkInfiniBand, gids: gids(ib(0, "fe80::1:2:3:4"), ib(1, "2001:db8::1")), want: 0},
		"InfiniBand, the peer's subnet":         {link: LinkInfiniBand, gids: gids(ib(0, "fe80::1:2:3:4"), ib(1, "fec0:0:0:1::7")), peer: peerOf("fec0:0:0:1::9"), want: 1},
		"InfiniBand, ports are not compared":    {link: LinkInfiniBand, gids: gids(ib(0, "fe80::1:2:3:4"), ib(1, "fe80::9:9:9:9")), peer: peerOf("fe80::9:9:9:8"), want: 0},
	} {
		t.Run(name, func(t *testing.T) {
			if tt.link == LinkUnspecified {
				tt.link = LinkEthernet
			}
			got, err := ChooseGID(tt.gids, tt.link, tt.peer)
			if err != nil || got.Index != tt.want {
				t.Errorf("chose %v, %v; want index %d", got, err, tt.want)
			}
		})
	}
	if got, err := ChooseGID(nil, LinkEthernet, none()); err == nil {
		t.Errorf("chose %v of none", got)
	}
}

func TestGIDsOfSysfs(t *testing.T) {
	m := fstest.MapFS{}
	add := func(index int, addr, kind, dev string) {
		n := strconv.Itoa(index)
		m["ports/1/gids/"+n] = file(addr + "\n")
		if kind != "" {
			m["ports/1/gid_attrs/types/"+n] = file(kind + "\n")
			m["ports/1/gid_attrs/ndevs/"+n] = file(dev + "\n")
		}
	}
	add(10, "0000:0000:0000:0000:0000:ffff:0a4d:0001", "RoCE v2", "eth0")
	add(2, "fe80:0000:0000:0000:0077:00ff:fe00:0001", "IB/RoCE v1", "eth0")
	add(3, "0000:0000:0000:0000:0000:0000:0000:0000", "", "") // unused
	add(4, "2001:0db8:0000:0000:0000:0000:0000:0001", "", "") // an old kernel
	m["ports/1/gids/x"] = file("fe80::1")
	m["ports/1/gids/5"] = file("no address")
	got, err := ReadGIDs(m, 1)
	want := []GID{
		{Index: 2, Addr: netip.MustParseAddr("fe80::77:ff:fe00:1"), Type: GIDIB, NetDev: "eth0"},
		{Index: 4, Addr: netip.MustParseAddr("2001:db8::1")},
		{Index: 10, Addr: netip.MustParseAddr("::ffff:10.77.0.1"), Type: GIDRoCEv2, NetDev: "eth0"},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, %v\nwant %v", got, err, want)
	}
	if got, err := ReadGIDs(m, 2); err == nil {
		t.Errorf("a port that is not there has %v", got)
	}
	if s := want[2].String(); s != "[10] 10.77.0.1 RoCE v2 eth0" {
		t.Errorf("text %q", s)
	}
	var _ fs.FS = m
}
