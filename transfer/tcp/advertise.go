package tcp

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/kvferry/kvferry/transfer"
)

// A descriptor is text: the protocol version, "tls" where the data port speaks
// that, what names the machine, then the addresses, with a space between each.
const (
	maxDescriptor = 4096
	maxAddresses  = 8
	withTLS       = "tls"
	noMachine     = "-"
)

// errAddress: the configured addresses are of no use to a peer.
var errAddress = errors.New("no address for peers")

// advertised chooses what peers are told, from what was asked for and what was
// bound. An address that no peer can dial is refused here, where somebody reads
// the message.
func advertised(ask, bound netip.AddrPort) ([]netip.AddrPort, error) {
	if ask.IsValid() {
		port := ask.Port()
		if port == 0 {
			port = bound.Port()
		}
		if err := dialable(ask.Addr()); err != nil {
			return nil, fmt.Errorf("advertise %s: %w", ask, err)
		}
		if ask.Addr().IsLoopback() && !bound.Addr().IsLoopback() && !bound.Addr().IsUnspecified() {
			return nil, fmt.Errorf("advertise %s: peers would be sent to themselves, the server listens on %s: %w", ask, bound, errAddress)
		}
		return []netip.AddrPort{netip.AddrPortFrom(ask.Addr().Unmap(), port)}, nil
	}
	if !bound.Addr().IsUnspecified() {
		if err := dialable(bound.Addr()); err != nil {
			return nil, fmt.Errorf("advertise %s: %w", bound, err)
		}
		return []netip.AddrPort{bound}, nil
	}
	found := routable(bound.Addr())
	if len(found) == 0 {
		return nil, fmt.Errorf("bound to %s and this machine has no routable address: set the data address to advertise: %w", bound, errAddress)
	}
	addresses := make([]netip.AddrPort, len(found))
	for i, a := range found {
		addresses[i] = netip.AddrPortFrom(a, bound.Port())
	}
	return addresses, nil
}

func dialable(a netip.Addr) error {
	switch {
	case a.IsUnspecified():
		return fmt.Errorf("no peer can dial an unspecified address: set the data address to advertise: %w", errAddress)
	case a.IsLinkLocalUnicast():
		return fmt.Errorf("a link-local address means another interface to every peer: set a routable data address to advertise: %w", errAddress)
	case a.IsMulticast():
		return fmt.Errorf("a multicast address cannot be dialled: %w", errAddress)
	}
	return nil
}

// routable finds the addresses from which this machine sends to the world; if
// it has no default route, those of its interfaces, where each family has just
// one. More than one is a choice that only the operator can make.
func routable(unspecified netip.Addr) (found []netip.Addr) {
	families := []struct{ network, world string }{{"udp4", "198.51.100.1:9"}}
	if unspecified.Is6() {
		families = append(families, struct{ network, world string }{"udp6", "[2001:db8::1]:9"})
	}
	for _, f := range families {
		if a, ok := source(f.network, f.world); ok {
			found = append(found, a)
		} else if all := interfaceAddresses(f.network == "udp6"); len(all) == 1 {
			found = append(found, all[0])
		}
	}
	return found
}

// source is the address from which this machine would send; a UDP socket that
// is connected sends nothing.
func source(network, world string) (netip.Addr, bool) {
	var d net.Dialer
	c, err := d.DialContext(context.Background(), network, world)
	if err != nil {
		return netip.Addr{}, false
	}
	defer func() { _ = c.Close() }() // nothing was sent
	a, err := netip.ParseAddrPort(c.LocalAddr().String())
	if err != nil || !usable(a.Addr()) {
		return netip.Addr{}, false
	}
	return a.Addr().Unmap(), true
}

func interfaceAddresses(six bool) (found []netip.Addr) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	for _, n := range all {
		p, err := netip.ParsePrefix(n.String())
		if err == nil && usable(p.Addr()) && p.Addr().Unmap().Is6() == six {
			found = append(found, p.Addr().Unmap())
		}
	}
	return found
}

func usable(a netip.Addr) bool { return a.IsGlobalUnicast() && !a.IsLoopback() }

// descriptor is what peers get.
func descriptor(secure bool, machine string, addresses []netip.AddrPort) []byte {
	b := strconv.AppendInt(nil, version, 10)
	b = append(b, ' ')
	if secure {
		b = append(b, withTLS+" "...)
	}
	b = append(b, machine...)
	for _, a := range addresses {
		b = append(b, ' ')
		b = a.AppendTo(b)
	}
	return b
}

// parseDescriptor checks what a peer said and returns the addresses that can
// mean the peer from this machine. secure says whether this node has a
// certificate: a peer is dialled by TLS or without, never by either.
func parseDescriptor(d []byte, secure bool, here string) ([]netip.AddrPort, error) {
	if len(d) == 0 {
		return nil, fmt.Errorf("the peer has no tcp: %w", transfer.ErrUnavailable)
	}
	if len(d) > maxDescriptor {
		return nil, fmt.Errorf("descriptor of %d bytes, at most %d", len(d), maxDescriptor)
	}
	words := strings.Split(string(d), " ")
	theirs := len(words) > 1 && words[1] == withTLS
	if theirs {
		words = slices.Delete(words, 1, 2)
	}
	v, err := strconv.Atoi(words[0])
	switch {
	case err != nil || len(words) < 3 || len(words) > 2+maxAddresses:
		return nil, fmt.Errorf("descriptor %.80q is malformed", d)
	case v != version:
		return nil, fmt.Errorf("the peer speaks protocol version %d, we speak %d: %w", v, version, transfer.ErrUnavailable)
	}
	var addresses []netip.AddrPort
	for _, w := range words[2:] {
		a, err := netip.ParseAddrPort(w)
		if err != nil || a.Port() == 0 || dialable(a.Addr()) != nil {
			return nil, fmt.Errorf("descriptor %.80q: %.80q is no address to dial", d, w)
		}
		addresses = append(addresses, a)
	}
	switch {
	case theirs && !secure:
		return nil, fmt.Errorf("the peer speaks TLS on its data port and this node has no certificate: set security.certificate, key, and ca on both: %w", transfer.ErrUnavailable)
	case !theirs && secure:
		return nil, fmt.Errorf("the peer speaks no TLS on its data port and this node has a certificate: set security.certificate, key, and ca on both: %w", transfer.ErrUnavailable)
	}
	if there := words[1]; there != here && there != noMachine && here != noMachine {
		// A loopback address of another machine would be one of ours.
		addresses = slices.DeleteFunc(addresses, func(a netip.AddrPort) bool { return a.Addr().IsLoopback() })
	}
	if len(addresses) == 0 {
		return nil, fmt.Errorf("the peer is on another machine and advertises only loopback addresses: set its data address to advertise: %w", transfer.ErrUnavailable)
	}
	return addresses, nil
}

// machine names this machine's network: the same boot and the same network
// namespace share their loopback.
func machine() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return noMachine
	}
	space, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return noMachine
	}
	sum := sha256.Sum256([]byte(strings.TrimSpace(string(boot)) + " " + space))
	return hex.EncodeToString(sum[:8])
}
