package faults

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/Shopify/toxiproxy/v2"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
)

// weathers are what may befall a connection. Each begins on a proxy and
// returns what ends it.
func weathers() map[string]func(t *testing.T, p *toxiproxy.Proxy) (heal func()) {
	return map[string]func(t *testing.T, p *toxiproxy.Proxy) (heal func()){
		// Connections end, and new ones are refused.
		"cut": func(t *testing.T, p *toxiproxy.Proxy) func() {
			p.Stop()
			healed := false
			return func() {
				if healed {
					return
				}
				healed = true
				if err := p.Start(); err != nil {
					t.Error(err)
				}
			}
		},
		// Nothing passes, and nothing ends.
		"stall": func(t *testing.T, p *toxiproxy.Proxy) func() { return toxic(t, p, "timeout", `{"timeout": 0}`) },
		// Every connection is reset after a moment.
		"reset": func(t *testing.T, p *toxiproxy.Proxy) func() { return toxic(t, p, "reset_peer", `{"timeout": 30}`) },
		// It arrives late, and in small pieces.
		"slow": func(t *testing.T, p *toxiproxy.Proxy) func() {
			late := toxic(t, p, "latency", `{"latency": 60, "jitter": 40}`)
			thin := toxic(t, p, "slicer", `{"average_size": 700, "size_variation": 600, "delay": 50}`)
			return func() { late(); thin() }
		},
	}
}

// foulWait is how long a request waits through it.
const foulWait = 3 * time.Second

// foulCodes are how a request may end whose owner is out of reach for a time.
var foulCodes = []kvferrypb.Failure_Code{
	kvferrypb.Failure_OWNER_LOST, kvferrypb.Failure_TRANSPORT, kvferrypb.Failure_DEADLINE, kvferrypb.Failure_NOT_FOUND,
	kvferrypb.Failure_STALE, kvferrypb.Failure_EXPIRED, kvferrypb.Failure_REVOKED,
}

// TestWeather lets every kind of weather befall every port of an owner. A
// request that goes through it ends well, every byte checked, or with a typed
// error, in time; another pair of nodes notices nothing; and once the weather is
// over all is well without anybody doing anything.
func TestWeather(t *testing.T) {
	for name, begin := range weathers() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			weather(t, name, begin)
		})
	}
}

func weather(t *testing.T, name string, begin func(*testing.T, *toxiproxy.Proxy) func()) {
	c := up(t, 1, 2, overTCP, "timers.lease=5s", "timers.lease_renew=1s", "timers.stall=2s", "timers.hold=5s")
	l := startLoad(t, c.engine("prefill-0"), c.engine("decode-1"), 30)
	l.more(2)
	f, owner := behind(t, c, "behind", nil)
	from, to := attach(t, owner.Engine), c.engine("decode-0")
	admin, reader := dial(t, owner.Engine), dial(t, c.must("decode-0").Engine)
	one := func(what string, wait time.Duration) error {
		r := newRequest(what+" of "+owner.Node, 90)
		err := move(t.Context(), r, from, to, true, wait)
		if err == nil || client.CodeOf(err) == kvferrypb.Failure_UNSPECIFIED {
			return err
		}
		from.remove(r.name)
		return err
	}
	fair := func(when string) {
		t.Helper()
		n := 0
		await(t, "requests "+when, patience, func(context.Context) error {
			n++
			err := one(fmt.Sprintf("%s %d", when, n), foulWait)
			if err != nil && !slices.Contains(foulCodes, client.CodeOf(err)) {
				t.Errorf("%s: %v", when, err)
			}
			return err
		})
	}
	fair("before")
	ports := map[string]*toxiproxy.Proxy{"gossip": f.gossip, "peer": f.peer, "data": f.data}
	for _, port := range []string{"gossip", "peer", "data"} {
		heal := begin(t, ports[port])
		good, foul := 0, map[kvferrypb.Failure_Code]int{}
		for i := range 4 {
			start := time.Now()
			err := one(fmt.Sprintf("%s on the %s port %d", name, port, i), foulWait)
			code := client.CodeOf(err)
			switch {
			case err == nil:
				good++
			case slices.Contains(foulCodes, code):
				foul[code]++
			default:
				t.Errorf("%s on the %s port: request ends with %v", name, port, err)
			}
			if took := time.Since(start); took > 4*hangLimit {
				t.Errorf("%s on the %s port: it took %v", name, port, took)
			}
		}
		if port == "gossip" && good == 0 {
			t.Errorf("%s on the gossip port alone: no request went well: %v", name, foul)
		}
		heal()
		begin := time.Now()
		fair("after the " + port + " port")
		t.Logf("%s on the %s port: %d went well, %v; of use %v after it", name, port, good, foul, time.Since(begin).Round(time.Millisecond))
		await(t, "one life of the owner", patience, func(ctx context.Context) error {
			seen, err := lives(ctx, reader)
			if err == nil && seen[owner.Node] != owner.Incarnation {
				err = fmt.Errorf("incarnation %d, want %d", seen[owner.Node], owner.Incarnation)
			}
			return err
		})
	}
	l.more(2)
	l.end()
	awaitFree(t, owner.Node, admin, patience)
	for _, n := range c.Nodes() {
		awaitFree(t, n.Node, dial(t, n.Engine), patience)
	}
	if _, err := admin.Status(t.Context(), &kvferrypb.StatusRequest{}); err != nil {
		t.Error(errors.Join(errors.New("the owner does not answer"), err))
	}
}
