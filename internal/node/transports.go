package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/cudaipc"
	"github.com/kvferry/kvferry/transfer/rdmaread"
	"github.com/kvferry/kvferry/transfer/shm"
	"github.com/kvferry/kvferry/transfer/tcp"
)

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
	staged              uint64            // bytes that went through pinned memory, of both sides
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
	n.linking = make(map[string]linkServer)
	var tried, reasons []string // those that may be used, and what came of them
	for _, name := range want.Transports {
		if want.Require != "" && name != want.Require {
			n.refused = append(n.refused, refusal{name, "transfer.require is " + want.Require})
			continue
		}
		tried = append(tried, name)
		t, read, err := n.openTransport(name)
		switch {
		case errors.Is(err, transfer.ErrUnavailable) && name == rdmaread.Name && len(want.RDMA.Devices) > 0:
			return fmt.Errorf("transfer.rdma.devices names %s: %w", strings.Join(want.RDMA.Devices, ", "), err)
		case errors.Is(err, transfer.ErrUnavailable):
			n.refused = append(n.refused, refusal{name, err.Error()})
			reasons = append(reasons, err.Error())
			level := slog.LevelWarn
			if _, absent := errors.AsType[*absentError](err); absent && want.Require == "" && slices.Equal(want.Transports, config.Transports()) {
				level = slog.LevelInfo // who asks for whatever there is does not miss a device
			}
			n.log.Log(n.ctx, level, "transport is not available", "transport", name, "err", err)
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
	for _, name := range config.Transports() {
		if !slices.Contains(want.Transports, name) {
			n.refused = append(n.refused, refusal{name, "not in transfer.transports"})
		}
	}
	if len(n.transports) == 0 {
		key := "transfer.transports"
		if want.Require != "" {
			key = "transfer.require"
		}
		return fmt.Errorf("%s (%s): %w: %s; see kvferry doctor -c FILE", key, strings.Join(tried, ", "), transfer.ErrUnavailable, strings.Join(reasons, "; "))
	}
	return nil
}

func (n *Node) openTransport(name string) (transfer.Transport, func() counts, error) {
	local := transfer.Local{Life: n.life, Arenas: n.arenas, Seals: n.seals}
	l := n.config.Transfer.Limits
	limits := transfer.Limits{Dial: l.Dial, Stall: n.config.Timers.Stall, Base: l.Base, Rate: int64(l.Rate)}
	switch name {
	case cudaipc.Name:
		return n.openCUDAIPC(local, limits)
	case shm.Name:
		return n.openSHM(local, limits)
	case rdmaread.Name:
		return n.openRDMA(local, limits)
	case tcp.Name:
		return n.openTCP(local, limits)
	default:
		return nil, nil, fmt.Errorf("transport %.80q is unknown: %w", name, transfer.ErrUnavailable) // the configuration has been checked
	}
}

func (n *Node) openCUDAIPC(local transfer.Local, limits transfer.Limits) (transfer.Transport, func() counts, error) {
	if n.cuda == nil {
		return nil, nil, &absentError{errHostMemory}
	}
	dir := n.config.Transfer.Rendezvous
	t, err := cudaipc.Listen(cudaipc.Options{Local: local, Runtime: n.cuda, Dir: dir, Limits: limits, Logger: n.log})
	if err != nil {
		return nil, nil, fmt.Errorf("open cudaipc in %s (transfer.rendezvous): %w", dir, err)
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

func (n *Node) openSHM(local transfer.Local, limits transfer.Limits) (transfer.Transport, func() counts, error) {
	dir := n.config.Transfer.Rendezvous
	t, err := shm.Listen(shm.Options{
		Local: local, Dir: dir, Workers: n.config.Transfer.Workers,
		Cached: n.config.Transfer.Verify == "page", Staging: stagingShare(n.config), Limits: limits, Logger: n.log,
	})
	if err != nil {
		return nil, nil, fmt.Errorf("open shm in %s (transfer.rendezvous): %w", dir, err)
	}
	return t, func() counts {
		s := t.Stats()
		return counts{
			held: s.Reads, stale: s.Stale, failed: s.Errors, readBytes: s.ReadBytes, staged: s.StagedBytes,
			links: s.Served, blind: true,
			refused:     map[string]uint64{"garbage": s.Garbage, "stranger": s.Strangers, "busy": s.Refused, "evicted": s.Evicted},
			connections: map[string]int{"peers": s.Accepted, "us": s.Links},
		}
	}, nil
}

func (n *Node) openRDMA(local transfer.Local, limits transfer.Limits) (transfer.Transport, func() counts, error) {
	c := n.config.Transfer.RDMA
	var gid *int // chosen
	if c.GIDIndex >= 0 {
		gid = &c.GIDIndex
	}
	if c.Library != "" {
		if err := rdma.Load(c.Library); err != nil {
			return nil, nil, fmt.Errorf("transfer.rdma.library %s: %w", c.Library, err) // which was named, so it is not done without
		}
	}
	t, err := rdmaread.Listen(rdmaread.Options{
		Local: local, Staging: stagingShare(n.config), Limits: limits, Logger: n.log,
		Devices: c.Devices, GIDIndex: gid, MTU: c.MTU, Reads: c.Reads, QueuePairs: c.QueuePairs, Library: c.Library,
		TrafficClass: uint8(c.TrafficClass), ServiceLevel: uint8(c.ServiceLevel), Timeout: uint8(c.Timeout), RetryCount: uint8(c.RetryCount),
		Call: func(ctx context.Context, peer transfer.Peer, hello []byte) ([]byte, rdmaread.Call, error) {
			answer, call, err := n.callPeer(ctx, rdmaread.Name, peer.Life, hello)
			if err != nil {
				return nil, nil, err
			}
			return answer, call, nil
		},
	})
	switch {
	case errors.Is(err, transfer.ErrUnavailable):
		return nil, nil, noRDMA(err)
	case err != nil:
		return nil, nil, fmt.Errorf("open rdma (transfer.rdma, or take it out of transfer.transports): %w", err)
	}
	n.rdma, n.linking[rdmaread.Name] = t, t
	for _, p := range t.Paths() {
		log := n.log.With("device", p.Device, "port", p.Port, "link", p.Link, "gid", p.GID, "state", p.State, "memory", p.Memory.String())
		if p.Why != "" { // of a faster way
			log = log.With("why", p.Why)
		}
		log.Info("RDMA port")
	}
	return t, func() counts {
		s := t.Stats()
		return counts{
			held: s.Reads, stale: s.Stale, failed: s.Errors, readBytes: s.ReadBytes, staged: s.StagedBytes,
			links: s.Served, blind: true,
			refused:     map[string]uint64{"garbage": s.Garbage, "stranger": s.Strangers, "busy": s.Refused + n.links.refusals(), "late": s.Late},
			connections: map[string]int{"peers": s.Accepted, "us": s.Lanes},
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
		Lanes: n.config.Transfer.Lanes, Staging: stagingShare(n.config), Limits: limits, Logger: n.log,
	})
	if err != nil {
		return nil, nil, errPort("data", "ports.data", bind, err)
	}
	n.addresses.Data = t.Advertised()[0]
	return t, func() counts {
		s := t.Stats()
		return counts{
			held: s.Reads, stale: s.Stale, failed: s.Errors, readBytes: s.ReadBytes, staged: s.Gathered + s.Scattered,
			answers: s.Served, answered: s.ServedBytes,
			refused: map[string]uint64{
				"garbage": s.Garbage, "stranger": s.Strangers, "out_of_range": s.OutOfRange, "stale": s.ServedStale, "busy": s.Refused, "evicted": s.Evicted,
			},
			unproven:    s.Unproven,
			connections: map[string]int{"peers": s.Accepted, "us": s.Dialled},
		}
	}, nil
}

// absentError: there is no device, usable or not, or nothing that one is needed
// for. It wraps [transfer.ErrUnavailable].
type absentError struct{ why error }

func (e *absentError) Error() string { return e.why.Error() }
func (*absentError) Unwrap() error   { return transfer.ErrUnavailable }

// errHostMemory is why a node without device memory has no cudaipc.
var errHostMemory = errors.New("the arenas are in host memory (arena.memory), and it is for those on GPUs")

// noRDMA says why there is no rdma: what the machine's files say, if it has no
// device at all.
func noRDMA(err error) error {
	if listed, _ := rdma.Devices(); len(listed) > 0 {
		return err
	}
	found, probed := rdma.Probe(os.DirFS("/"), os.Getenv("LD_LIBRARY_PATH"))
	if len(found) > 0 {
		return err
	}
	return &absentError{probed}
}

// couldHave says what this machine has for cudaipc, which a node of host memory
// does without.
func couldHave() string {
	found, err := cuda.Probe(os.DirFS("/"), os.Getenv("LD_LIBRARY_PATH"))
	if err != nil {
		return "; this machine: " + err.Error()
	}
	return fmt.Sprintf("; this machine has %d, driver %s", len(found.Devices), found.Driver)
}

func (n *Node) transportStatus() []*kvferrypb.TransportStatus {
	var out []*kvferrypb.TransportStatus
	for _, t := range n.counting {
		c := t.counts()
		s := &kvferrypb.TransportStatus{
			Name: t.transport, Available: true,
			ReadBytes: c.readBytes, Reads: c.held, Failures: c.failed, Stale: c.stale, StagedBytes: c.staged,
		}
		if !c.blind {
			s.ServedBytes = &c.answered
		}
		if t.transport == rdmaread.Name {
			n.showPorts(s)
		}
		out = append(out, s)
	}
	for _, r := range n.refused {
		s := &kvferrypb.TransportStatus{Name: r.transport, Reason: r.reason}
		if r.transport == cudaipc.Name && n.cuda == nil {
			s.Reason += couldHave()
		}
		out = append(out, s)
	}
	return out
}

// portActive is the state of a port, or of a path, that works.
const portActive = "active"

// showPorts tells of each port of ours. Without one that works nothing can be read.
func (n *Node) showPorts(s *kvferrypb.TransportStatus) {
	for _, p := range n.rdma.Paths() {
		if p.Peer == (id.Life{}) {
			s.Ports = append(s.Ports, &kvferrypb.TransportStatus_Port{
				Device: p.Device, Port: uint32(p.Port), Link: p.Link, Gid: p.GID, State: p.State, Lanes: uint32(p.Lanes),
				Memory: p.Memory.String(), Why: p.Why,
			})
		}
	}
	if works, troubles := n.rdmaPorts(); !works {
		s.Available, s.Reason = false, "no port works: "+strings.Join(troubles, "; ")
	}
}

// staged says which of our cards reach an arena on a GPU only through host memory,
// and why; "" if none does.
func (n *Node) staged() string {
	var all []string
	for _, p := range n.rdma.Paths() {
		if p.Peer == (id.Life{}) && p.Memory == rdmaread.Staged {
			all = append(all, fmt.Sprintf("%s:%d reaches the GPU through host memory: %s", p.Device, p.Port, p.Why))
		}
	}
	return strings.Join(all, "; ")
}

// rdmaPorts says whether one of our ports works, and why the others do not.
func (n *Node) rdmaPorts() (works bool, troubles []string) {
	for _, p := range n.rdma.Paths() {
		switch {
		case p.Peer != (id.Life{}): // a path of a link
		case p.State == portActive:
			works = true
		case !slices.Contains(troubles, p.State): // a device that has failed says so of each port
			troubles = append(troubles, p.State)
		}
	}
	return works, troubles
}
