package cluster

import (
	"net"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
)

// Whoever has a gossip key and no certificate that is let in gets no other key,
// and no ring of his is taken.
func TestKeysAreForTheProved(t *testing.T) {
	t.Parallel()
	a := authority(t)
	for name, stranger := range map[string]func(node id.Node) *identity.Identity{
		"no certificate":                func(id.Node) *identity.Identity { return nil },
		"of another authority":          func(node id.Node) *identity.Identity { return certified(t, authority(t), node) },
		"of a node that is not allowed": func(node id.Node) *identity.Identity { return certified(t, a, node) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			all := secure(t, 3, a, func(_ int, o *Options) { o.Identity = certified(t, a, o.Life.Node, "n*") })
			with := func(node id.Node, ring Ring) member {
				o := options(t, node, 1, anywhere(), all[0].Gossip().String())
				o.Ring, o.Identity = ring, stranger(node)
				return launch(t, o)
			}
			x := with("x", ringOf(0, 1))
			must(t, all[0].AddKey(soon(t), key(2)))
			_ = x.AddKey(brief(t), key(9)) // that it is his alone he may hear or not
			rash := with("rash", ringOf(1<<20, 1, 8))
			rash.askRing(rash.keys.idle, all[0].Gossip(), all[1].Gossip(), all[2].Gossip())
			must(t, all[1].UseKey(soon(t), IDOf(key(2)), false))
			must(t, all[2].RemoveKey(soon(t), IDOf(key(1)), false))
			wantRing(t, ringOf(3, 2), all...)
			for _, s := range []member{x, rash} {
				for _, k := range s.Ring().Keys {
					if IDOf(k) == IDOf(key(2)) {
						t.Errorf("%s has got a key: %s", s.Life(), s.Ring())
					}
				}
				for _, m := range all {
					if sees(m, s.Life()) {
						t.Errorf("%s is a member for %s", s.Life(), m.Life())
					}
				}
			}
		})
	}
}

// A packet is never answered with keys where names are proved.
func TestPacketsCarryNoKeys(t *testing.T) {
	t.Parallel()
	all := secure(t, 2, authority(t), nil)
	must(t, all[0].AddKey(soon(t), key(2)))
	outsider := newKeyring(Options{Ring: ringOf(0, 1), Label: all[0].keys.label}, &counters{})
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(all[0].Gossip()))
	must(t, err)
	defer conn.Close()
	answer := exchange(conn, outsider.envelope(7), patience)
	m, _, ok := outsider.open(answer)
	if !ok || m.kind != kindRingAnswer || m.nonce != 7 {
		t.Fatalf("answer of %d bytes", len(answer))
	}
	if len(m.keys) > 0 || !m.edition.same(all[0].Ring().edition()) {
		t.Errorf("answer with %d keys of %s", len(m.keys), m.edition)
	}
}

// A member that was down while keys were changed fetches the ring.
func TestProvedMemberFetchesTheRing(t *testing.T) {
	t.Parallel()
	a := authority(t)
	all := secure(t, 3, a, slowly)
	gone := all[2]
	kill(t, gone, all[0], all[1])
	must(t, all[0].AddKey(soon(t), key(2)))
	must(t, all[0].UseKey(soon(t), IDOf(key(2)), true))
	o := options(t, gone.Life().Node, gone.Life().Incarnation+1, anywhere(), all[0].Gossip().String())
	v := &vault{}
	o.Ring, o.SaveRing, o.Identity = ringOf(0, 1), v.save, certified(t, a, gone.Life().Node)
	back := launch(t, o)
	within(t, "it is back with the new ring", func() bool {
		return has(back, ringOf(2, 2, 1)) && sees(all[0], back.Life()) && sees(all[1], back.Life())
	})
	if !v.kept().edition().same(ringOf(2, 2, 1).edition()) {
		t.Errorf("it has kept %s", v.kept())
	}
}

// A ring that claims more changes than there can have been is not taken, so that
// nobody uses up the generations.
func TestGenerationsDoNotLeap(t *testing.T) {
	t.Parallel()
	k := newKeyring(Options{Ring: ringOf(5, 1), Label: "kvferry"}, &counters{})
	for _, g := range []uint64{5 + maxLeap + 1, MaxGeneration} {
		if changed, err := k.replace(t.Context(), ringOf(g, 1, 2), nil); changed || err == nil {
			t.Errorf("generation %d: changed %v, %v", g, changed, err)
		}
	}
	if changed, err := k.replace(t.Context(), ringOf(5+maxLeap, 1, 2), nil); !changed || err != nil {
		t.Errorf("the last one in reach: changed %v, %v", changed, err)
	}
}
