package rdma

import "fmt"

// Limits are what a device can do.
type Limits struct {
	MaxQPWR           int    // work requests outstanding on a queue pair
	MaxSGE            int    // pieces of local memory a work request
	MaxSGERead        int    // the same of an RDMA read; 0: the device does not tell
	MaxCQE            int    // completions that a queue holds
	MaxReadsInitiated int    // reads in flight that a queue pair asks for
	MaxReadsServed    int    // reads in flight that a queue pair answers
	MaxMR             int    // memory regions
	MaxMRSize         uint64 // bytes of one of them; 0: not told
}

// LinkLayer tells InfiniBand ports, which are addressed by LID, from Ethernet
// ones, which are addressed by GID. The values are those of IBV_LINK_LAYER_*.
type LinkLayer uint8

// The link layers.
const (
	LinkUnspecified LinkLayer = iota
	LinkInfiniBand
	LinkEthernet
)

func (l LinkLayer) String() string {
	switch l {
	case LinkInfiniBand:
		return "InfiniBand"
	case LinkEthernet:
		return "Ethernet"
	default:
		return "unknown link layer"
	}
}

// MTU is the greatest payload of a packet, as enum ibv_mtu: 1 is 256 bytes, 5
// is 4096.
type MTU uint8

// Bytes is 0 for what is no MTU.
func (m MTU) Bytes() int {
	if m < 1 || m > 5 {
		return 0
	}
	return 128 << m
}

// Port is the state of a port.
type Port struct {
	Number    int // from 1
	Active    bool
	State     string // such as "ACTIVE" or "DOWN"
	Link      LinkLayer
	ActiveMTU MTU
	LID       uint16 // 0 on Ethernet
	MaxMsg    uint32 // bytes of one read at most
	Rate      uint64 // bits a second; 0: unknown
}

// portState is enum ibv_port_state in the words of sysfs.
func portState(s int) string {
	names := [...]string{"NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"}
	if s < 0 || s >= len(names) {
		return fmt.Sprintf("state %d", s)
	}
	return names[s]
}

// portRate is what a port carries, in bits a second, of the width and the
// speed that a port's attributes give (one bit each, of the InfiniBand
// specification's PortInfo, for Ethernet too).
func portRate(width, speed uint8) uint64 {
	lanes := map[uint8]uint64{1: 1, 2: 4, 4: 8, 8: 12, 16: 2}[width]
	lane := map[uint8]uint64{ // in units of 100 Mb/s: SDR DDR QDR FDR10 FDR EDR HDR NDR
		1: 25, 2: 50, 4: 100, 8: 100, 16: 140, 32: 250, 64: 500, 128: 1000,
	}[speed]
	return lanes * lane * 100_000_000
}

// EventKind is what an [Event] means to whoever reads over the device.
type EventKind uint8

// The kinds of event.
const (
	EventOther  EventKind = iota
	PortActive            // Element is the port; the path may need seconds more
	PortError             // Element is the port
	DeviceFatal           // the device must be closed
	GIDChange             // Element is the port
	QPFatal               // Element is the number of the queue pair
)

// Event is something that happened to a device, not to a request.
type Event struct {
	Kind    EventKind
	Text    string // in the library's words
	Element uint32 // the port or the queue pair; 0 where neither is meant
}
