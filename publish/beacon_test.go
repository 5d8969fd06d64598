package publish

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
)

// hashes are so many members.
func hashes(n int) []id.NodeHash {
	all := make([]id.NodeHash, n)
	for i := range all {
		all[i] = id.Node(fmt.Sprintf("n-%d", i)).Hash()
	}
	return all
}

func TestBeacon(t *testing.T) {
	for name, tt := range map[string]struct {
		fast        bool
		every, wait time.Duration
	}{
		"as it is": {every: 10 * time.Second, wait: time.Second},
		"fast":     {fast: true, every: time.Second, wait: 100 * ms},
	} {
		t.Run(name, func(t *testing.T) {
			l := NewLog(LogOptions{Life: alpha, Fast: tt.fast})
			there := hashes(10)
			members := func() []id.NodeHash { return there }
			sent := func(at time.Duration) *wire.Beacon {
				t.Helper()
				out := l.Beacon(t0.Add(at), members)
				if len(out.Broadcast) == 0 {
					return nil
				}
				return decode(t, out.Broadcast[0]).(*wire.Beacon)
			}
			b := sent(0)
			if b == nil || b.Number != 1 || b.Modulus != 1 || b.Owner != alpha.Node.Hash() || b.Incarnation != alpha.Incarnation {
				t.Fatalf("%+v", b)
			}
			echo := func(at time.Duration, from id.NodeHash, number uint64) (time.Duration, bool) {
				return l.Echo(t0.Add(at), &wire.Echo{From: from, Owner: alpha.Node.Hash(), Incarnation: alpha.Incarnation, Number: number})
			}
			for _, m := range there[:6] {
				if took, ok := echo(7*ms, m, 1); !ok || took != 7*ms {
					t.Errorf("an answer: %v, %v", took, ok)
				}
			}
			for what, heard := range map[string]bool{
				"a second time":          second(echo(7*ms, there[0], 1)),
				"by nobody we know":      second(echo(7*ms, 99, 1)),
				"of another beacon":      second(echo(7*ms, there[6], 2)),
				"too late":               second(echo(tt.wait, there[6], 1)),
				"of another life's":      second(l.Echo(t0, &wire.Echo{From: there[6], Owner: alpha.Node.Hash(), Incarnation: 1, Number: 1})),
				"of another owner's":     second(l.Echo(t0, &wire.Echo{From: there[6], Owner: 5, Incarnation: alpha.Incarnation, Number: 1})),
				"of a beacon before any": second(NewLog(LogOptions{Life: alpha}).Echo(t0, &wire.Echo{From: there[6], Owner: alpha.Node.Hash(), Incarnation: alpha.Incarnation})),
			} {
				if heard {
					t.Errorf("heard %s", what)
				}
			}
			if s := l.Stats(); s.Beacons != 1 || s.EchoesExpected != 10 || s.EchoesHeard != 6 || s.EchoesMissed != 0 {
				t.Errorf("%+v", s)
			}
			there = there[:8] // two have left
			if b := sent(tt.wait); b != nil {
				t.Errorf("another one: %+v", b)
			}
			sent(tt.wait + ms)
			if s := l.Stats(); s.EchoesHeard != 6 || s.EchoesMissed != 2 {
				t.Errorf("%+v", s)
			}
			if b := sent(tt.every - ms); b != nil {
				t.Errorf("too early: %+v", b)
			}
			there = hashes(1000)
			if b := sent(tt.every); b == nil || b.Number != 2 || b.Modulus != 62 {
				t.Errorf("%+v", b)
			}
			if n := l.Stats().EchoesExpected - 10; n < 4 || n > 40 {
				t.Errorf("%d of 1,000 are to answer, want about 16", n)
			}
			there = nil
			if b := sent(2 * tt.every); b != nil {
				t.Errorf("to nobody: %+v", b)
			}
		})
	}
}

func second[A, B any](_ A, b B) B { return b }

// TestBeaconsArePassedOnAndAnsweredOnce, whoever says what how often.
func TestBeaconsArePassedOnAndAnsweredOnce(t *testing.T) {
	b := board(BoardOptions{})
	say := func(at time.Duration, life id.Life, number uint64, modulus uint32) (passed bool, answer *wire.Echo) {
		t.Helper()
		item := encode(t, &wire.Beacon{Owner: life.Node.Hash(), Incarnation: life.Incarnation, Number: number, Modulus: modulus})
		out, forLog, err := b.Receive(t0.Add(at), item)
		if err != nil || forLog != nil || len(out.Send) > 1 {
			t.Fatalf("Receive = %+v, %v, %v", out, forLog, err)
		}
		verify(t, b, t0)
		if len(out.Send) == 1 {
			if out.Send[0].To != life.Node {
				t.Errorf("answered %q", out.Send[0].To)
			}
			answer = decode(t, out.Send[0].Item).(*wire.Echo)
		}
		return len(out.Broadcast) == 1, answer
	}
	passed, echo := say(0, alpha, 5, 1)
	if want := (wire.Echo{From: beta.Node.Hash(), Owner: alpha.Node.Hash(), Incarnation: alpha.Incarnation, Number: 5}); !passed || echo == nil || *echo != want {
		t.Errorf("passed on %v, answered %+v", passed, echo)
	}
	for name, tt := range map[string]struct {
		at             time.Duration
		life           id.Life
		number         uint64
		modulus        uint32
		passed, answer bool
	}{
		"again":                      {at: 10 * time.Second, life: alpha, number: 5, modulus: 1},
		"an old one":                 {at: 10 * time.Second, life: alpha, number: 4, modulus: 1},
		"a flood":                    {at: time.Second - ms, life: alpha, number: 6, modulus: 1},
		"of an older life":           {at: 10 * time.Second, life: id.Life{Node: "alpha", Incarnation: 1}, number: 9, modulus: 1},
		"our own, come back":         {at: 10 * time.Second, life: beta, number: 9, modulus: 1},
		"of no member":               {at: 10 * time.Second, life: gamma, number: 1, modulus: 1, passed: true},
		"of a modulus that is great": {at: 20 * time.Second, life: alpha, number: 7, modulus: 1<<32 - 1, passed: true},
	} {
		if passed, echo := say(tt.at, tt.life, tt.number, tt.modulus); passed != tt.passed || (echo != nil) != tt.answer {
			t.Errorf("%s: passed on %v, answered %+v", name, passed, echo)
		}
	}
	// A flood of numbers that grow is heard once a second.
	answers := 0
	for i := range uint64(5000) {
		if _, echo := say(30*time.Second+time.Duration(i)*ms, alpha, 100+i, 1); echo != nil {
			answers++
		}
	}
	if answers != 5 {
		t.Errorf("%d answers in five seconds", answers)
	}
	if s := b.Stats(); s.Echoes != 6 || s.Beacons != 8 || s.OldBeacons != 4998 {
		t.Errorf("%+v", s)
	}
	// Strangers' beacons wait like everything else of theirs, and in the same room.
	for i := range 2 * maxParked {
		say(0, id.Life{Node: id.Node(fmt.Sprintf("stranger-%d", i)), Incarnation: 1}, 1, 1)
	}
	if s := b.Stats(); s.Parked != maxParked || s.Owners > maxParked+2 {
		t.Errorf("%+v", s)
	}
}

func TestEchoesForThisLogAreReturned(t *testing.T) {
	b := board(BoardOptions{})
	for name, tt := range map[string]struct {
		echo wire.Echo
		want bool
	}{
		"ours":          {wire.Echo{From: alpha.Node.Hash(), Owner: beta.Node.Hash(), Incarnation: beta.Incarnation, Number: 3}, true},
		"another life":  {wire.Echo{From: alpha.Node.Hash(), Owner: beta.Node.Hash(), Incarnation: 1, Number: 3}, false},
		"another owner": {wire.Echo{From: alpha.Node.Hash(), Owner: gamma.Node.Hash(), Incarnation: beta.Incarnation, Number: 3}, false},
		"a stranger":    {wire.Echo{From: gamma.Node.Hash(), Owner: beta.Node.Hash(), Incarnation: beta.Incarnation, Number: 3}, false},
	} {
		out, forLog, err := b.Receive(t0, encode(t, &tt.echo))
		got, ok := forLog.(*wire.Echo)
		if err != nil || ok != tt.want || ok && *got != tt.echo || out.Broadcast != nil {
			t.Errorf("%s: %+v, %+v, %v", name, out, forLog, err)
		}
	}
}
