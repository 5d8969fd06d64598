package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"
)

// resolveTimeout bounds a name look-up.
const resolveTimeout = 2 * time.Second

// check refuses what cannot work and fills in the defaults.
func (o *Options) check() error {
	if err := o.Life.Node.Validate(); err != nil {
		return err
	}
	if o.Life.Incarnation == 0 {
		return errors.New("incarnation is 0")
	}
	if err := o.Meta.check(); err != nil {
		return fmt.Errorf("metadata: %w", err)
	}
	if o.Label == "" {
		o.Label = "kvferry"
	}
	if len(o.Label) > MaxLabel {
		return fmt.Errorf("label %q has %d bytes, want at most %d", o.Label, len(o.Label), MaxLabel)
	}
	if !o.Bind.Addr().IsValid() {
		return errors.New("bind address is missing")
	}
	o.Bind = unmap(o.Bind)
	if o.Advertise.Addr().IsValid() {
		// A port of 0 is filled in when the bound one is known.
		if err := checkAddress(netip.AddrPortFrom(o.Advertise.Addr(), max(o.Advertise.Port(), 1))); err != nil {
			return fmt.Errorf("advertise: %w", err)
		}
		o.Advertise = unmap(o.Advertise)
	}
	if len(o.Join) > maxSeeds {
		return fmt.Errorf("%d seeds, want at most %d", len(o.Join), maxSeeds)
	}
	for _, seed := range o.Join {
		if _, _, err := splitSeed(seed); err != nil {
			return err
		}
	}
	if err := o.Ring.check(); err != nil {
		return err
	}
	if o.Handler == nil {
		return errors.New("handler is missing")
	}
	if o.Fanout <= 0 {
		o.Fanout = 4
	}
	if o.Again == 0 {
		o.Again = 1
	}
	return nil
}

func splitSeed(seed string) (host string, port uint16, err error) {
	host, text, err := net.SplitHostPort(seed)
	if err != nil {
		return "", 0, fmt.Errorf("seed %q: want host:port: %w", seed, err)
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 || host == "" {
		return "", 0, fmt.Errorf("seed %q: want a host and a port from 1 to 65535", seed)
	}
	return host, uint16(n), nil
}

// resolve returns the addresses of a seed.
func resolve(ctx context.Context, seed string) ([]netip.AddrPort, error) {
	host, port, err := splitSeed(seed)
	if err != nil {
		return nil, err
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		return []netip.AddrPort{netip.AddrPortFrom(ip.Unmap(), port)}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, fmt.Errorf("seed %q: %w", seed, err)
	}
	addrs := make([]netip.AddrPort, len(ips))
	for i, ip := range ips {
		addrs[i] = netip.AddrPortFrom(ip.Unmap(), port)
	}
	return addrs, nil
}

// advertised chooses the address that others are told. It refuses a choice that
// the seeds could not use.
func advertised(o Options, bound netip.AddrPort) (netip.AddrPort, error) {
	ctx, cancel := context.WithTimeout(context.Background(), resolveTimeout)
	defer cancel()
	chosen := o.Advertise
	switch {
	case chosen.Addr().IsValid() && chosen.Port() == 0:
		chosen = netip.AddrPortFrom(chosen.Addr(), bound.Port())
	case chosen.Addr().IsValid():
	case !bound.Addr().IsUnspecified():
		chosen = bound
	default:
		ip, err := routed(ctx, o.Join, bound.Addr().Is4())
		if err != nil {
			return netip.AddrPort{}, fmt.Errorf("bound to %s, which cannot be advertised: %w: set an address to advertise, or bind to one that others can reach", bound, err)
		}
		chosen = netip.AddrPortFrom(ip, bound.Port())
	}
	if err := checkAddress(chosen); err != nil {
		return netip.AddrPort{}, fmt.Errorf("advertise: %w", err)
	}
	return chosen, checkSeeds(ctx, o.Join, bound, chosen)
}

// checkSeeds refuses seeds that could not answer us.
func checkSeeds(ctx context.Context, seeds []string, bound, advertise netip.AddrPort) error {
	if !advertise.Addr().IsLoopback() && !bound.Addr().IsLoopback() {
		return nil
	}
	for _, seed := range seeds {
		addrs, _ := resolve(ctx, seed) // one that has no address yet is tried later
		for _, a := range addrs {
			if !a.Addr().IsLoopback() {
				return fmt.Errorf("seed %s is on another machine, but we are bound to %s and advertise %s, a loopback address: bind to one that others can reach", seed, bound, advertise)
			}
		}
	}
	return nil
}

// routed is the address from which this machine reaches the first seed that
// has one. Nothing is sent.
func routed(ctx context.Context, seeds []string, only4 bool) (netip.Addr, error) {
	network := "udp"
	if only4 {
		network = "udp4"
	}
	err := errors.New("there is no seed to choose one for")
	for _, seed := range seeds {
		var addrs []netip.AddrPort
		if addrs, err = resolve(ctx, seed); err != nil {
			continue
		}
		for _, a := range addrs {
			var conn net.Conn
			var d net.Dialer
			if conn, err = d.DialContext(ctx, network, a.String()); err == nil {
				conn.Close()
				return conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap(), nil
			}
		}
	}
	return netip.Addr{}, err
}
