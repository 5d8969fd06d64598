package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/kvferry/kvferry/internal/id"
)

// Where names are proved, packets say only which keys a ring has. The keys
// themselves are fetched over TLS from who has them, so neither does a stranger
// who knows one key get the others, nor is a ring of his taken:
//
//	packet:  question → answer without keys, of a newer ring
//	stream:  envelope of a question → envelope of the answer, with keys
//
// The stream is one of gossip's; what it begins with tells it from memberlist's.
const (
	fetchers   = 4
	fetchQueue = 64
	fetchPause = 200 * time.Millisecond // after one that has failed, of each fetcher
)

// errKeys is written by memberlist to its log for a stream that was about keys.
var errKeys = errors.New("stream about gossip keys")

// errand is a ring to be fetched: who has said that it has it, where, and in
// which answer.
type errand struct {
	said message
	from netip.AddrPort
}

// assign hands an errand to a fetcher. One that finds no place comes again with the
// next answer.
func (c *Cluster) assign(e errand) {
	select {
	case c.errands <- e:
	default:
		c.counters.queueDrops.Add(1)
	}
}

// fetch fetches rings. It ends with the cluster.
func (c *Cluster) fetch(ctx context.Context) {
	for {
		select {
		case <-c.done:
			return
		case e := <-c.errands:
			failed := false
			if _, own := c.keys.now(); e.said.edition.newer(own) { // it may have come from somebody else
				failed = !c.fetchRing(ctx, e)
			}
			c.keys.heard(e.said)
			if failed && !c.wait(fetchPause) {
				return
			}
		}
	}
}

// fetchRing takes the ring of who has said that it has a newer one.
func (c *Cluster) fetchRing(ctx context.Context, e errand) bool {
	m, err := c.askKeys(ctx, e.said.life, e.from)
	if err == nil && m.life != e.said.life {
		err = fmt.Errorf("it speaks for %s", m.life)
	}
	if err != nil {
		if hidden, ok := c.ringTrouble.pass(time.Now(), 1, troubleEvery); ok {
			c.log.Warn("cannot fetch a newer ring of gossip keys: others may become unreadable", "from", e.said.life.Node, "address", e.from, "ring", e.said.edition, "hidden", hidden, "err", err)
		}
		return false
	}
	c.adopt(ctx, m)
	return true
}

// askKeys asks a life for its ring over TLS: it has to prove its name.
func (c *Cluster) askKeys(ctx context.Context, from id.Life, at netip.AddrPort) (message, error) {
	ctx, cancel := context.WithTimeout(ctx, c.time.stream)
	defer cancel()
	conn, err := c.transport.DialAddressTimeout(memberlist.Address{Addr: at.String(), Name: listName(from)}, c.time.stream)
	if err != nil {
		return message{}, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if _, err := conn.Write(c.keys.envelope(c.keys.idle)); err != nil {
		return message{}, err
	}
	b, err := io.ReadAll(io.LimitReader(conn, maxPacket+1))
	if err != nil {
		return message{}, err
	}
	m, _, ok := c.keys.open(b)
	if !ok || m.kind != kindRingAnswer || m.nonce != c.keys.idle {
		return message{}, fmt.Errorf("answer of %d bytes about gossip keys: %w", len(b), errMalformed)
	}
	return m, nil
}

// answerKeys answers the question that a stream of a proved caller begins with.
// It is one TLS record, so it comes in one piece.
func (c *Cluster) answerKeys(question []byte) []byte {
	m, key, ok := c.keys.open(question)
	if !ok || m.kind != kindRingAsk {
		c.counters.badMessages.Add(1)
		return nil
	}
	return c.keys.reply(c.life, m, key, true)
}

// isAboutKeys says that a stream begins with an envelope.
func isAboutKeys(b []byte) bool { return bytes.HasPrefix(b, []byte(envelopeMagic)) }
