package node

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/shm"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// notBuilt is why a transport that kvferry is to have is not there.
const notBuilt = "not built into this binary"

// refusal says why a transport is not used.
type refusal struct{ transport, reason string }

func (r refusal) String() string { return r.transport + ": " + r.reason }

// counting reads what an open transport has counted.
type counting struct {
	transport string
	counts    func() counts
}

// counts are what transports count, in words that fit all of them.
type counts struct {
	held, stale, failed uint64 // reads of ours, a slice each, by how they ended
	readBytes           uint64
	answers, answered   uint64            // to reads of peers, and bytes in them
	links               uint64            // that peers have opened to read by themselves: what, we do not see
	blind               bool              // that is how it is read: there are links, and no answers
	refused             map[string]uint64 // what came to us, by why it was refused
	unproven            uint64            // of them, callers without a certificate that lets them in
	connections         map[string]int    // that are open, by whom
}

// openTransports opens what the configuration names and this machine has, and
// notes for all others why they are not used.
func (n *Node) openTransports(wrap func(transfer.Transport) transfer.Transport) error {
	// Everything that runs is ended before the memory that it uses is closed.
	defer func() { n.closers = append(n.closers, n.quiesce) }()
	want := n.config.Transfer
	for _, name := range want.Transports {
		if want.Require != "" && name != want.Require {
			n.refused = append(n.refused, refusal{name, "transfer.require is " + want.Require})
			continue
		}
		t, read, err := n.openTransport(name)
		switch {
		case errors.Is(err, transfer.ErrUnavailable):
			n.refused = append(n.refused, refusal{name, err.Error()})
			n.log.Warn("transport is not available", "transport", name, "err", err)
			continue
		case err != nil:
			return err
		}
		n.closers = append(n.closers, t.Close)
		n.counting = append(n.counting, counting{name, read})
		if wrap != nil {
			t = wrap(t)
		}
		n.transports = append(n.transports, t)
	}
	for _, name := range slices.Concat([]string{"cudaipc", "rdma"}, config.Transports()) {
		if !slices.Contains(want.Transports, name) {
			n.refused = append(n.refused, refusal{name, missing(name)})
		}
	}
	if len(n.transports) == 0 {
		return fmt.Errorf("open transports: none of %v can be used (transfer.require %q): %v: %w", want.Transports, want.Require, n.refused, transfer.ErrUnavailable)
	}
	return nil
}

func (n *Node) openTransport(name string) (transfer.Transport, func() counts, error) {
	local := transfer.Local{Life: n.life, Arenas: n.arenas, Seals: n.seals}
	l := n.config.Transfer.Limits
	limits := transfer.Limits{Dial: l.Dial, Stall: n.config.Timers.Stall, Base: l.Base, Rate: int64(l.Rate)}
	switch name {
	case shm.Name:
		return n.openSHM(local, limits)
	case tcp.Name:
		return n.openTCP(local, limits)
	default:
		return nil, nil, fmt.Errorf("%s: %w", missing(name), transfer.ErrUnavailable)
	}
}

func (n *Node) openSHM(local transfer.Local, limits transfer.Limits) (transfer.Transport, func() counts, error) {
	dir := n.config.Transfer.Rendezvous
	t, err := shm.Listen(shm.Options{
		Local: local, Dir: dir, Workers: n.config.Transfer.Workers,
		Cached: n.config.Transfer.Verify == "page", Limits: limits, Logger: n.log,
	})
	if err != nil {
		return nil, nil, fmt.Errorf("open shm in %s (transfer.rendezvous): %w", dir, err)
	}
	return t, func() counts {
		s := t.Stats()
		return counts{
			held: s.Reads, stale: s.Stale, failed: s.Errors, readBytes: s.ReadBytes,
			links: s.Served, blind: true,
			refused:     map[string]uint64{"garbage": s.Garbage, "stranger": s.Strangers, "busy": s.Refused, "evicted": s.Evicted},
			connections: map[string]int{"peers": s.Accepted, "us": s.Links},
		}
	}, nil
}

func (n *Node) openTCP(local transfer.Local, limits transfer.Limits) (transfer.Transport, func() counts, error) {
	bind := n.bind(n.config.Ports.Data)
	var advertise netip.AddrPort
	if n.config.Node.Advertise.IsValid() {
		advertise = netip.AddrPortFrom(n.config.Node.Advertise, 0)
	}
	t, err := tcp.Listen(tcp.Options{
		Local: local, Bind: bind, Advertise: advertise, Identity: n.identity,
		Lanes: n.config.Transfer.Lanes, Limits: limits, Logger: n.log,
	})
	if err != nil {
		return nil, nil, errPort("data", "ports.data", bind, err)
	}
	n.addresses.Data = t.Advertised()[0]
	return t, func() counts {
		s := t.Stats()
		return counts{
			held: s.Reads, stale: s.Stale, failed: s.Errors, readBytes: s.ReadBytes,
			answers: s.Served, answered: s.ServedBytes,
			refused: map[string]uint64{
				"garbage": s.Garbage, "stranger": s.Strangers, "out_of_range": s.OutOfRange, "stale": s.ServedStale, "busy": s.Refused, "evicted": s.Evicted,
			},
			unproven:    s.Unproven,
			connections: map[string]int{"peers": s.Accepted, "us": s.Dialled},
		}
	}, nil
}

// missing says why a transport is not there, and whether this machine could
// use it.
func missing(name string) string {
	var err error
	switch name {
	case "rdma":
		_, err = rdma.Probe(os.DirFS("/"), os.Getenv("LD_LIBRARY_PATH"))
	case "cudaipc":
		_, err = cuda.Probe(os.DirFS("/"), os.Getenv("LD_LIBRARY_PATH"))
	default:
		if slices.Contains(config.Transports(), name) {
			return "not in transfer.transports"
		}
	}
	if err != nil {
		return fmt.Sprintf("%s; this machine: %v", notBuilt, err)
	}
	return notBuilt
}

func (n *Node) transportStatus() []*kvferrypb.TransportStatus {
	var out []*kvferrypb.TransportStatus
	for _, t := range n.counting {
		c := t.counts()
		s := &kvferrypb.TransportStatus{
			Name: t.transport, Available: true,
			ReadBytes: c.readBytes, Reads: c.held, Failures: c.failed, Stale: c.stale,
		}
		if !c.blind {
			s.ServedBytes = &c.answered
		}
		out = append(out, s)
	}
	for _, r := range n.refused {
		out = append(out, &kvferrypb.TransportStatus{Name: r.transport, Reason: r.reason})
	}
	return out
}
