package node_test

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
)

var verifying = [2]string{"transfer.verify", "page"}

// verified is what a node has found of pages, by result.
func verified(t testing.TB, n *member) (good, bad, unknown int) {
	t.Helper()
	_, _, samples := scrape(t, n)
	count := func(result string) int {
		return int(samples[fmt.Sprintf("kvferry_verified_pages_total{result=%q}", result)].value)
	}
	return count("good"), count("bad"), count("unknown")
}

// flip changes one byte of a published token, as a fault of the owner's memory would.
func (e *engine) flip(r string, token int) {
	at := e.pages(r)[token/8]
	done := false
	e.slot(int(at), token%8, func(_ id.Rank, layer, kv, head int, b []byte) {
		if !done && layer == 1 && kv == 1 && head == 1 {
			b[3] ^= 0x10
			done = true
		}
	})
}

// TestSpec has the numbered case of M*'s behaviour that takes checksums.
func TestSpec(t *testing.T) {
	t.Run("099 the producer overwrites a page between lease and read", func(t *testing.T) {
		t.Run("for good", func(t *testing.T) {
			g := newGate()
			prefill, decode := startGated(t, g.wrap, verifying)
			p, d := openEngine(t, prefill), openEngine(t, decode)
			p.ingest("r")
			d.ingest("r")
			for i, chunk := range chunks() {
				p.write("r", chunk)
				p.publish("r", i == 2)
			}
			done := d.retrieving("r", "", 0)
			<-g.came
			p.flip("r", 17)
			close(g.pass)
			got := <-done
			f := failureOf(t, got.err)
			if f.GetCode() != kvferrypb.Failure_CHECKSUM || !strings.Contains(f.GetMessage(), fmt.Sprintf("page %d of rank 0", p.pages("r")[2])) {
				t.Fatalf("%v, want CHECKSUM with the page", f)
			}
			if _, bad, _ := verified(t, decode); bad != 2 {
				t.Errorf("%d pages were found bad, want one twice", bad)
			}
			d.remove("r")
			awaitAllFree(t, decode)
		})
		t.Run("for a moment", func(t *testing.T) {
			g := newGate()
			prefill, decode := startGated(t, g.wrap, verifying)
			p, d := openEngine(t, prefill), openEngine(t, decode)
			p.ingest("r")
			d.ingest("r")
			tokens := 0
			for _, chunk := range chunks() {
				p.write("r", chunk)
				tokens += chunk
			}
			p.publish("r", true) // once: all of it comes in one read
			done := d.retrieving("r", "", 0)
			<-g.came
			p.flip("r", 17)
			g.pass <- struct{}{}
			<-g.came // it reads again
			p.flip("r", 17)
			g.pass <- struct{}{}
			if got := <-done; got.err != nil || got.res.GetReadiness() != kvferrypb.Readiness_READY {
				t.Fatalf("%v, %v", got.res, got.err)
			}
			if got := d.verify("r", "main"); got != tokens {
				t.Errorf("%d tokens, want %d", got, tokens)
			}
			if good, bad, unknown := verified(t, decode); good == 0 || bad != 1 || unknown != 0 {
				t.Errorf("%d good, %d bad, %d unknown", good, bad, unknown)
			}
		})
	})
}

// Chunks that end in the middle of a page are verified like others: two ranks,
// two labels, both layouts.
func TestEveryPageIsVerified(t *testing.T) {
	for name, set := range map[string][][2]string{
		"NHD": nil, "HND": {{"arena.layout", "HND"}}, "NHD on devices": {onDevice}, "HND on devices": {onDevice, {"arena.layout", "HND"}},
	} {
		t.Run(name, func(t *testing.T) {
			prefill, decode := startPair(t, append(set, verifying, [2]string{"arena.ranks", "0,1"})...)
			carry(t, "r", bring{chunks: []int{5, 6, 9, 13}, labels: []string{"main", "cfg"}, target: "decode"}, openEngine(t, prefill), openEngine(t, decode))
			if good, bad, unknown := verified(t, decode); good == 0 || bad != 0 || unknown != 0 {
				t.Errorf("%d good, %d bad, %d unknown", good, bad, unknown)
			}
		})
	}
}

// An owner that makes no checksums is read all the same.
func TestUnknownChecksums(t *testing.T) {
	prefill := startNode(t, "prefill", nil)
	decode := startNode(t, "decode", prefill, verifying)
	awaitPeers(t, prefill, decode)
	carry(t, "r", bring{chunks: []int{5, 6, 9}}, openEngine(t, prefill), openEngine(t, decode))
	if good, bad, unknown := verified(t, decode); good != 0 || bad != 0 || unknown == 0 {
		t.Errorf("%d good, %d bad, %d unknown", good, bad, unknown)
	}
}

// Whoever asks for nonsense gets an error, and for what is not there no sum.
func TestHostileChecksums(t *testing.T) {
	prefill := startNode(t, "prefill", nil, verifying)
	p := openEngine(t, prefill)
	p.ingest("r")
	p.write("r", 20)
	name := p.publish("r", true).GetPublication()
	peer := callPeer(t, prefill)
	life := uint64(prefill.Life().Incarnation)
	ask := func(change func(*kvferrypb.ChecksumsRequest)) (*kvferrypb.ChecksumsResponse, error) {
		req := &kvferrypb.ChecksumsRequest{Incarnation: life, Sequence: name, Pages: []uint32{uint32(p.pages("r")[0])}, Slots: []uint32{8}}
		change(req)
		return peer.Checksums(p.ctx(), req)
	}
	if res, err := ask(func(*kvferrypb.ChecksumsRequest) {}); err != nil || len(res.GetSums()) != 1 || res.GetSums()[0] < 0 {
		t.Fatalf("%v, %v", res, err)
	}
	for what, change := range map[string]func(*kvferrypb.ChecksumsRequest){
		"another rank":   func(r *kvferrypb.ChecksumsRequest) { r.Rank = 1 << 31 },
		"another page":   func(r *kvferrypb.ChecksumsRequest) { r.Pages[0] = 1 << 31 },
		"no slots":       func(r *kvferrypb.ChecksumsRequest) { r.Slots[0] = 0 },
		"unlike lengths": func(r *kvferrypb.ChecksumsRequest) { r.Slots[0] = 7 },
	} {
		if res, err := ask(change); err != nil || len(res.GetSums()) != 1 || res.GetSums()[0] != -1 {
			t.Errorf("%s: %v, %v", what, res, err)
		}
	}
	for what, c := range map[string]struct {
		code   codes.Code
		change func(*kvferrypb.ChecksumsRequest)
	}{
		"another life": {codes.Aborted, func(r *kvferrypb.ChecksumsRequest) { r.Incarnation++ }},
		"unknown":      {codes.NotFound, func(r *kvferrypb.ChecksumsRequest) { r.Sequence += 99 }},
		"lists differ": {codes.InvalidArgument, func(r *kvferrypb.ChecksumsRequest) { r.Slots = nil }},
		"far too many": {codes.InvalidArgument, func(r *kvferrypb.ChecksumsRequest) { r.Pages, r.Slots = make([]uint32, 1<<17), make([]uint32, 1<<17) }},
	} {
		if res, err := ask(c.change); status.Code(err) != c.code {
			t.Errorf("%s: %v, %v, want %v", what, res, err, c.code)
		}
	}
}

// What goes on for a publication that went to the host is verified whole, also
// when more was committed since.
func TestContinuedPagesAreVerified(t *testing.T) {
	set := [][2]string{verifying, {"arena.host_pages", "64"}}
	prefill := startNode(t, "prefill", nil, set...)
	decode := startNode(t, "decode", prefill, set...)
	awaitPeers(t, prefill, decode)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("r", "cfg", "main")
	d.ingest("r", "cfg", "main")
	for i, chunk := range chunks() {
		p.write("r", chunk, "main", "cfg")
		p.publish("r", i == 2)
	}
	tokens := p.verify("r", "main")
	p.write("r", 40, "cfg") // the engine goes on, and has not published it
	if _, err := p.Offload(p.ctx(), &kvferrypb.OffloadRequest{Request: "r"}); err != nil {
		t.Fatal(err)
	}
	if res, err := d.retrieve("r", "", 0, deadline); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
		t.Fatalf("%v, %v", res, err)
	}
	for _, l := range []string{"main", "cfg"} {
		if got := d.verify("r", l); got != tokens {
			t.Errorf("%d tokens of %s, want %d", got, l, tokens)
		}
	}
	if good, bad, unknown := verified(t, decode); good == 0 || bad != 0 || unknown != 0 {
		t.Errorf("%d good, %d bad, %d unknown", good, bad, unknown)
	}
}
