package faults

import (
	"net"
	"testing"
)

// TestIPv6 runs the usual over the other family.
func TestIPv6(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skipf("this machine has no loopback of IPv6: %v", err)
	}
	_ = l.Close()
	c := up(t, 1, 1, "node.bind=::1")
	for _, n := range c.Nodes() {
		if !n.Peer.Addr().Is6() || !n.Data.Addr().Is6() || !n.Gossip.Addr().Is6() {
			t.Errorf("%s is at %+v", n.Node, n.Ready)
		}
	}
	for _, byReference := range []bool{true, false} {
		r := newRequest("over IPv6", 60)
		if err := move(t.Context(), r, c.engine("prefill-0"), c.engine("decode-0"), byReference, patience); err != nil {
			t.Error(err)
		}
	}
}
