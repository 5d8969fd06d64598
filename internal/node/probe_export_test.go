package node

import "github.com/kvferry/kvferry/manager"

// ReserveSeals takes all seal words that publications can have, and returns how
// often each was given.
func (n *Node) ReserveSeals() map[uint32]int {
	given := make(map[uint32]int)
	for i := manager.PublicationID(1 << 40); ; i++ {
		_, seal, _, err := n.plog.Reserve(i)
		if err != nil {
			return given
		}
		given[seal]++
	}
}

// ProbeWord is the seal word that no publication has.
const ProbeWord = probeWord
