package cluster

import (
	"errors"
	"time"

	"github.com/kvferry/kvferry/internal/identity"
)

// provers is how many members are called at once to prove their names.
const provers = 8

// prove calls new members by their names, over TLS, where a gossip key is no
// proof of who somebody is: until one has shown a certificate of its name it is
// not a member for us, whatever memberlist believes. It ends with the cluster.
func (c *Cluster) prove() {
	for {
		p, ok, wait := c.calls.roster.unproved(time.Now())
		if !ok {
			t := time.NewTimer(wait)
			select {
			case <-t.C:
			case <-c.calls.roster.proves:
				t.Stop()
			case <-c.done:
				t.Stop()
				return
			}
			continue
		}
		poke(c.calls.roster.proves) // there may be more for the other provers
		// Whatever is sent would do; this tells both sides that they list each other.
		err := c.list.SendReliable(&p.to, encodeCall(kindAsk, c.joining.nonce, c.life, c.advertise))
		again := c.time.proof
		if errors.Is(err, identity.ErrRefused) {
			again = c.time.rejoinMax // the stream has told of it; somebody has to act
		}
		c.calls.roster.proved(p, err == nil, time.Now().Add(again))
		if c.over() {
			return
		}
	}
}
