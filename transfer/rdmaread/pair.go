package rdmaread

import (
	"cmp"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strings"

	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer"
)

// pairing is a path to be: one port of each side, by their places.
type pairing struct {
	local, remote int
	gid           netip.Addr // of the remote port, that is dialled
}

// candidate is a pairing that is possible.
type candidate struct {
	pairing
	common int // bits that the addresses share
}

// pair gives every port of ours one of the peer's, and every port of the peer's
// one of ours, as evenly as can be: of the same link layer and address family,
// then the nearest by address, then of the same place.
func pair(ours, theirs []remotePort) ([]pairing, error) {
	var possible []candidate
	for i, o := range ours {
		for j, t := range theirs {
			if c, ok := match(o, t); ok {
				c.local, c.remote = i, j
				possible = append(possible, c)
			}
		}
	}
	if len(possible) == 0 {
		return nil, fmt.Errorf("no port here reaches one of the peer's: %s here, %s there; both need RDMA devices of one link layer, with addresses of one family: %w",
			portsText(ours), portsText(theirs), transfer.ErrUnavailable)
	}
	slices.SortStableFunc(possible, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(b.common, a.common), cmp.Compare(apart(a), apart(b)))
	})
	here, there := make([]int, len(ours)), make([]int, len(theirs)) // how often a port is used
	var pairs []pairing
	use := func(c candidate) {
		here[c.local]++
		there[c.remote]++
		pairs = append(pairs, c.pairing)
	}
	for _, c := range possible {
		if here[c.local] == 0 && there[c.remote] == 0 {
			use(c)
		}
	}
	// What is left over on one side shares what the other has.
	for i := range ours {
		if c, ok := leastUsed(possible, func(c candidate) (int, bool) { return there[c.remote], c.local == i }); ok && here[i] == 0 {
			use(c)
		}
	}
	for j := range theirs {
		if c, ok := leastUsed(possible, func(c candidate) (int, bool) { return here[c.local], c.remote == j }); ok && there[j] == 0 {
			use(c)
		}
	}
	slices.SortFunc(pairs, func(a, b pairing) int {
		return cmp.Or(cmp.Compare(a.local, b.local), cmp.Compare(a.remote, b.remote))
	})
	return pairs, nil
}

func apart(c candidate) int {
	d := c.local - c.remote
	return max(d, -d)
}

// leastUsed is the first of those that fit with the fewest uses.
func leastUsed(possible []candidate, uses func(candidate) (n int, fits bool)) (best candidate, ok bool) {
	least := 0
	for _, c := range possible {
		if n, fits := uses(c); fits && (!ok || n < least) {
			best, least, ok = c, n, true
		}
	}
	return best, ok
}

// match finds the two addresses of two ports that are nearest to each other.
func match(o, t remotePort) (c candidate, ok bool) {
	if o.link != t.link {
		return candidate{}, false
	}
	for _, mine := range o.gids {
		for _, its := range t.gids {
			if o.link == rdma.LinkEthernet && (mine.Is4In6() != its.Is4In6() || local(mine) != local(its)) {
				continue
			}
			if n := common(mine, its); !ok || n > c.common {
				c, ok = candidate{pairing: pairing{gid: its}, common: n}, true
			}
		}
	}
	return c, ok
}

// local reports whether an address ends at the next router.
func local(a netip.Addr) bool { return a.Unmap().IsLinkLocalUnicast() || a.Unmap().IsLoopback() }

// common counts the leading bits that two addresses share.
func common(a, b netip.Addr) int {
	x, y := a.As16(), b.As16()
	for i := range x {
		if d := x[i] ^ y[i]; d != 0 {
			return 8*i + bits.LeadingZeros8(d)
		}
	}
	return 128
}

func portsText(ports []remotePort) string {
	var all []string
	for _, p := range ports {
		var gids []string
		for _, g := range p.gids {
			gids = append(gids, g.Unmap().String())
		}
		if len(gids) == 0 {
			gids = []string{"no address"}
		}
		all = append(all, fmt.Sprintf("%s (%s: %s)", p.name, p.link, strings.Join(gids, ", ")))
	}
	if len(all) == 0 {
		return "none"
	}
	return strings.Join(all, ", ")
}
