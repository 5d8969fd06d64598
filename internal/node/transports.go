package node

import (
	"fmt"
	"net/netip"
	"os"
	"slices"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// notBuilt is why a transport that kvferry is to have is not there.
const notBuilt = "not built into this binary"

// openTransports opens what the configuration names and this machine has, and
// notes for all others why they are not used.
func (n *Node) openTransports(wrap func(transfer.Transport) transfer.Transport) error {
	// Everything that runs is ended before the memory that it uses is closed.
	defer func() { n.closers = append(n.closers, n.quiesce) }()
	want := n.config.Transfer
	for _, name := range want.Transports {
		switch {
		case want.Require != "" && name != want.Require:
			n.refused = append(n.refused, transfer.Refusal{Transport: name, Reason: "transfer.require is " + want.Require})
		case name == tcp.Name:
			t, err := n.openTCP()
			if err != nil {
				return err
			}
			n.servers.tcp = t
			n.transports = append(n.transports, t)
		default:
			n.refused = append(n.refused, transfer.Refusal{Transport: name, Reason: missing(name)})
		}
	}
	for _, name := range []string{"cudaipc", "shm", "rdma"} {
		if !slices.Contains(want.Transports, name) {
			n.refused = append(n.refused, transfer.Refusal{Transport: name, Reason: missing(name)})
		}
	}
	if len(n.transports) == 0 {
		return fmt.Errorf("open transports: none of %v can be used (transfer.require %q): %v: %w", want.Transports, want.Require, n.refused, transfer.ErrUnavailable)
	}
	if wrap != nil {
		for i, t := range n.transports {
			n.transports[i] = wrap(t)
		}
	}
	return nil
}

func (n *Node) openTCP() (*tcp.Transport, error) {
	bind := n.bind(n.config.Ports.Data)
	var advertise netip.AddrPort
	if n.config.Node.Advertise.IsValid() {
		advertise = netip.AddrPortFrom(n.config.Node.Advertise, 0)
	}
	limits := n.config.Transfer.Limits
	t, err := tcp.Listen(tcp.Options{
		Local:     transfer.Local{Life: n.life, Arenas: n.arenas, Seals: n.seals},
		Bind:      bind,
		Advertise: advertise,
		Identity:  n.identity,
		Limits:    transfer.Limits{Dial: limits.Dial, Stall: n.config.Timers.Stall, Base: limits.Base, Rate: int64(limits.Rate)},
		Logger:    n.log,
	})
	if err != nil {
		return nil, errPort("data", "ports.data", bind, err)
	}
	n.closers = append(n.closers, t.Close)
	n.addresses.Data = t.Advertised()[0]
	return t, nil
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
	}
	if err != nil {
		return fmt.Sprintf("%s; this machine: %v", notBuilt, err)
	}
	return notBuilt
}

func (n *Node) transportStatus() []*kvferrypb.TransportStatus {
	var out []*kvferrypb.TransportStatus
	for _, t := range n.transports {
		s := &kvferrypb.TransportStatus{Name: t.Name(), Available: true}
		if t.Name() == tcp.Name {
			st := n.servers.tcp.Stats()
			s.ReadBytes, s.ServedBytes, s.Reads, s.Failures, s.Stale = st.ReadBytes, st.ServedBytes, st.Reads, st.Errors, st.Stale
		}
		out = append(out, s)
	}
	for _, r := range n.refused {
		out = append(out, &kvferrypb.TransportStatus{Name: r.Transport, Reason: r.Reason})
	}
	return out
}
