package rdma

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math/bits"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
)

// GIDType is how packets with a GID as source address are framed.
type GIDType uint8

// The types of GID.
const (
	GIDUnknown GIDType = iota
	GIDIB              // InfiniBand, or RoCE v1: Ethernet frames that no router passes on
	GIDRoCEv2          // UDP
)

func (t GIDType) String() string {
	switch t {
	case GIDIB:
		return "IB/RoCE v1"
	case GIDRoCEv2:
		return "RoCE v2"
	default:
		return "unknown type"
	}
}

// GID is one entry of a port's address table.
type GID struct {
	Index  int
	Addr   netip.Addr // as IPv6; IPv4-mapped where the network device has an IPv4 address
	Type   GIDType
	NetDev string // the network device that it belongs to; "" on InfiniBand, and if that is gone or not in this namespace
}

func (g GID) String() string {
	return strings.TrimSpace(fmt.Sprintf("[%d] %s %s %s", g.Index, g.Addr.Unmap(), g.Type, g.NetDev))
}

// ReadGIDs reads the address table of a port from its device's directory in
// sysfs. The kernel offers it there to every user, with the framing and the
// network device of each entry, which the plain verb does not tell.
func ReadGIDs(device fs.FS, port int) ([]GID, error) {
	dir := path.Join("ports", strconv.Itoa(port))
	entries, err := fs.ReadDir(device, path.Join(dir, "gids"))
	if err != nil {
		return nil, fmt.Errorf("read GIDs of port %d: %w", port, err)
	}
	var list []GID
	for _, e := range entries {
		index, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		addr, err := netip.ParseAddr(attribute(device, path.Join(dir, "gids"), e.Name()))
		if err != nil || !addr.Is6() || addr.IsUnspecified() {
			continue // an unused entry
		}
		g := GID{Index: index, Addr: addr}
		switch attribute(device, path.Join(dir, "gid_attrs", "types"), e.Name()) {
		case "RoCE v2":
			g.Type = GIDRoCEv2
		case "IB/RoCE v1":
			g.Type = GIDIB
		}
		if dev, err := fs.ReadFile(device, path.Join(dir, "gid_attrs", "ndevs", e.Name())); err == nil {
			g.NetDev = strings.TrimSpace(string(dev))
		}
		list = append(list, g)
	}
	slices.SortFunc(list, func(a, b GID) int { return cmp.Compare(a.Index, b.Index) })
	return list, nil
}

// ChooseGID picks the entry of a port's table to send from. The peer is the
// address to be reached, if it is known, or the zero Addr.
//
// On Ethernet a RoCE v2 entry with an IPv4 address comes first, then one with
// a global IPv6 address, then a unique local one, then RoCE v1; link-local
// addresses, which end at the next router, come last. Entries without a
// network device, and those of the devices that container networks make, come
// behind others; devices are told by name, since containers and data centres
// use the same private addresses. Where the peer is known, entries of its
// family are preferred, then the one with the longest prefix in common.
//
// On InfiniBand it is the first entry of the peer's subnet, or the first. The
// lowest index settles ties, so that the choice is the same at every start.
func ChooseGID(gids []GID, link LinkLayer, peer netip.Addr) (GID, error) {
	if len(gids) == 0 {
		return GID{}, errors.New("the port's GID table is empty: is its network device up, with an address, and in this network namespace?")
	}
	var to netip.Addr
	if peer.IsValid() {
		to = netip.AddrFrom16(peer.As16())
	}
	return slices.MinFunc(gids, func(a, b GID) int {
		return cmp.Or(slices.Compare(b.merits(link, to), a.merits(link, to)), cmp.Compare(a.Index, b.Index))
	}), nil
}

// merits are what speaks for an entry, the weightiest first.
func (g GID) merits(link LinkLayer, peer netip.Addr) []int {
	if link == LinkInfiniBand {
		return []int{min(commonPrefix(g.Addr, peer), 64)} // the rest names the port, not the subnet
	}
	addr := g.Addr.Unmap()
	class := 0
	switch {
	case addr.Is4():
		class = 3
	case !addr.IsPrivate():
		class = 2
	default: // unique local
		class = 1
	}
	return []int{
		one(near(addr) == near(peer.Unmap())),
		g.netDevMerit(),
		one(g.Type == GIDRoCEv2),
		one(peer.IsValid() && addr.Is4() == peer.Unmap().Is4()),
		class,
		commonPrefix(g.Addr, peer),
	}
}

// near tells an address that no router leads to.
func near(a netip.Addr) bool { return a.IsLinkLocalUnicast() || a.IsLoopback() }

func (g GID) netDevMerit() int {
	for _, prefix := range []string{"docker", "cni", "flannel", "cali", "vxlan"} {
		if strings.HasPrefix(g.NetDev, prefix) {
			return 0
		}
	}
	return 1 + one(g.NetDev != "")
}

func one(b bool) int {
	if b {
		return 1
	}
	return 0
}

// commonPrefix counts the leading bits that two addresses share; 0 if b is no
// address.
func commonPrefix(a, b netip.Addr) int {
	if !b.IsValid() {
		return 0
	}
	x, y := a.As16(), b.As16()
	for i := range x {
		if d := x[i] ^ y[i]; d != 0 {
			return 8*i + bits.LeadingZeros8(d)
		}
	}
	return 128
}
