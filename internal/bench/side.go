package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rdmaread"
	"github.com/kvferry/kvferry/transfer/shm"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// benchRank is the one rank whose arena is pulled.
const benchRank = id.Rank(0)

// Transports are the names of those that are measured.
func Transports() []string { return []string{shm.Name, rdmaread.Name, tcp.Name} }

// setup is how both processes of a pull are set up. Of what it leaves out the
// transports have their own defaults.
type setup struct {
	ArenaBytes int64    `json:"arena_bytes"`
	Transports []string `json:"transports"`
	Rendezvous string   `json:"rendezvous"` // a directory, for shm, and for the calls of rdma
	Devices    []string `json:"devices"`    // of rdma: the reader's, the owner's; the only one is both's; none: all
	LinkConns  int      `json:"link_conns"`
	Lanes      int      `json:"lanes"`
	Workers    int      `json:"workers"`
}

func (s setup) validate() error {
	if s.ArenaBytes < MinChunkBytes || s.ArenaBytes > MaxArenaBytes {
		return fmt.Errorf("arena of %d bytes is not in %d..%d", s.ArenaBytes, MinChunkBytes, int64(MaxArenaBytes))
	}
	for _, name := range s.Transports {
		if !slices.Contains(Transports(), name) {
			return fmt.Errorf("transport %.40q is none of %v", name, Transports())
		}
	}
	if len(s.Devices) > 2 {
		return fmt.Errorf("%d RDMA devices are more than two", len(s.Devices))
	}
	return nil
}

// readerDevices and ownerDevices are those that rdma is to use; none: all.
func (s setup) readerDevices() []string { return s.Devices[:min(len(s.Devices), 1)] }
func (s setup) ownerDevices() []string  { return s.Devices[max(len(s.Devices)-1, 0):] }

// side is one of the two processes of a pull: its memory, and the transports that
// it could open.
type side struct {
	life       id.Life
	arena      *memory.Region
	seals      *memory.SealTable
	transports map[string]transfer.Transport
	refused    map[string]string // the others, and why
}

// newSide opens what it can; devices are the RDMA ones.
func newSide(node id.Node, o setup, devices []string) (_ *side, err error) {
	s := &side{
		life:       id.Life{Node: node, Incarnation: id.Incarnation(time.Now().UnixMicro())},
		transports: make(map[string]transfer.Transport), refused: make(map[string]string),
	}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if err := o.validate(); err != nil {
		return nil, err
	}
	if s.arena, err = memory.New(string(node), o.ArenaBytes); err != nil {
		return nil, err
	}
	if s.seals, err = memory.NewSealTable(); err != nil {
		return nil, err
	}
	for _, name := range o.Transports {
		t, err := s.listen(name, o, devices)
		switch {
		case err == nil:
			s.transports[name] = t
		case errors.Is(err, transfer.ErrUnavailable):
			s.refused[name] = err.Error()
		default:
			return nil, err
		}
	}
	return s, nil
}

func (s *side) listen(name string, o setup, devices []string) (transfer.Transport, error) {
	local := transfer.Local{Life: s.life, Arenas: map[id.Rank]memory.Arena{benchRank: s.arena}, Seals: s.seals}
	switch name {
	case shm.Name:
		return shm.Listen(shm.Options{Local: local, Dir: o.Rendezvous, Workers: o.Workers})
	case rdmaread.Name:
		return rdmaread.Listen(rdmaread.Options{
			Local: local, Devices: devices, Reads: rdmaReads,
			Call: func(ctx context.Context, peer transfer.Peer, hello []byte) ([]byte, rdmaread.Call, error) {
				return dialCall(ctx, o.Rendezvous, s.life, peer, hello)
			},
		})
	default:
		return tcp.Listen(tcp.Options{Local: local, Bind: loopback(), LinkConns: o.LinkConns, Lanes: o.Lanes})
	}
}

// rdma is nil if that is not open.
func (s *side) rdma() *rdmaread.Transport {
	t, _ := s.transports[rdmaread.Name].(*rdmaread.Transport)
	return t
}

// rdmaPort is the port that rdma uses; the zero one if there are several, or none.
func (s *side) rdmaPort() (only rdmaPort) {
	if s.rdma() == nil {
		return only
	}
	for _, p := range s.rdma().Paths() {
		switch {
		case p.Peer != id.Life{}:
		case only.Device != "":
			return rdmaPort{}
		default:
			only = rdmaPort{p.Device, p.Port}
		}
	}
	return only
}

func loopback() netip.AddrPort { return netip.MustParseAddrPort("127.0.0.1:0") }

func (s *side) close() {
	for _, t := range s.transports {
		_ = t.Close()
	}
	if s.seals != nil {
		_ = s.seals.Close()
	}
	if s.arena != nil {
		_ = s.arena.Close()
	}
}

// cpuSeconds is what this process has used so far.
func cpuSeconds() float64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}
