package node_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/internal/node"
	"github.com/kvferry/kvferry/transfer/rdmaread"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// importedBy is the arena of a device as an engine has it.
func importedBy(t testing.TB, s *client.Session, r id.Rank, n *member) memory.Arena {
	t.Helper()
	a := n.ArenaOf(r)
	if _, err := s.Arena(t.Context(), r); err == nil {
		t.Errorf("rank %d is mapped, and lies on a device", r)
	}
	if imported := importedByDriver(t, s, r, n); imported != nil {
		return imported
	}
	return a // an emulated device has no other processes
}

// TestDevicesAndHosts: what is pulled from, and to, the memory of a device comes
// whole, in chunks with a pause before the last one, by every transport that both
// sides have.
func TestDevicesAndHosts(t *testing.T) {
	for name, sides := range map[string][2][][2]string{
		"device to host":   {{onDevice}, nil},
		"host to device":   {nil, {onDevice}},
		"device to device": {{onDevice}, {onDevice}},
	} {
		for _, by := range hostTransports() {
			t.Run(name+" by "+by, func(t *testing.T) {
				t.Parallel()
				if by == rdmaread.Name {
					useFabric(t)
				}
				set := [][2]string{{"transfer.transports", by}, {"arena.ranks", "0,1"}}
				prefill := startNode(t, "prefill", nil, append(sides[0], set...)...)
				decode := startNode(t, "decode", prefill, append(sides[1], set...)...)
				awaitPeers(t, prefill, decode)
				p, d := openEngine(t, prefill), openEngine(t, decode)
				for _, b := range []bring{{target: "decode"}, {reference: true, labels: []string{"main", "cfg"}}} {
					b.chunks = chunks()
					carry(t, fmt.Sprintf("%v", b), b, p, d)
				}
				probeAndCompareSinks(t, p, d, decode, by)
				stagedBy := map[*member]float64{}
				for _, n := range []*member{prefill, decode} {
					stagedBy[n] = metric(t, n, fmt.Sprintf("kvferry_staged_bytes_total{transport=%q}", by))
					if n.device == nil {
						if stagedBy[n] > 0 {
							t.Errorf("%s, in host memory, has staged %v bytes", n.Life(), stagedBy[n])
						}
						continue
					}
					if c := n.device.Counts(); c.Slow > 0 {
						t.Errorf("%s copied %d times through memory that is not pinned", n.Life(), c.Slow)
					}
				}
				if stagedBy[prefill]+stagedBy[decode] == 0 { // where both stage, one buffer may serve both
					t.Error("nothing was staged")
				}
			})
		}
	}
}

// probeAndCompareSinks has a node read a peer's sink into its own.
func probeAndCompareSinks(t *testing.T, p, d *engine, decode *member, by string) {
	t.Helper()
	want := make(map[int][]byte)
	p.sink(func(layer int, b []byte) {
		for i := range b {
			b[i] = byte(5*i + layer + 3)
		}
		want[layer] = bytes.Clone(b)
	})
	checkProbed(t, probedBy(t, decode.probe(t, "prefill"), by), d.Geometry().Layout.PageBytes())
	d.sink(func(layer int, b []byte) {
		if !bytes.Equal(b, want[layer]) {
			t.Errorf("layer %d of the sink is not the owner's", layer)
		}
	})
}

// calls are what a device was asked for since the last look.
func (m *member) calls(before *transfertest.Counts) (made transfertest.Counts) {
	now := m.device.Counts()
	for d := range now.Calls {
		made.Calls[d] = now.Calls[d] - before.Calls[d]
		made.Segments[d] = now.Segments[d] - before.Segments[d]
		made.Bytes[d] = now.Bytes[d] - before.Bytes[d]
	}
	*before = now
	return made
}

// TestDeviceIsAskedInBatches: however many pages there are, and wherever they lie,
// what the node does with them is one call of the device for each stream.
func TestDeviceIsAskedInBatches(t *testing.T) {
	n, _ := startHosted(t, "n", nil, onDevice, verifying, [2]string{"arena.pages", "640"}, [2]string{"arena.host_pages", "512"})
	e := openEngine(t, n)
	const pages, bytes = 101, 101 * 8 * 128
	e.ingest("other")
	e.ingest("r", "main")
	for range pages { // pages of one lie between those of the other
		e.write("r", 8)
		e.write("other", 8)
	}
	var step *kvferrypb.AdmitResponse
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	row := make([]byte, 2*8*2)
	seen := n.device.Counts()
	for _, tt := range []struct {
		what  string
		do    func()
		way   transfertest.Direction
		calls int
		bytes int64
	}{
		{"two forks of one stream", func() {
			var err error
			step, err = e.Admit(e.ctx(), &kvferrypb.AdmitRequest{PreForks: forks("main", "x", "main", "y"), Segments: []*kvferrypb.Segment{segment("r", "", 1)}})
			must(err)
		}, transfertest.Within, 1, 2 * bytes},
		{"write a token", func() {
			_, err := e.WriteKV(e.ctx(), &kvferrypb.WriteKVRequest{Step: step.GetStep(), K: row, V: row})
			must(err)
		}, transfertest.FromHost, 1, 2 * int64(len(row))},
		{"read it", func() {
			_, err := e.ReadKV(e.ctx(), &kvferrypb.ReadKVRequest{Step: step.GetStep()})
			must(err)
			_, err = e.Abort(e.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()})
			must(err)
		}, transfertest.ToHost, 1, 2 * int64(len(row))},
		{"a fork of a fork", func() {
			step, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{PreForks: forks("main", "x", "x", "y"), Segments: []*kvferrypb.Segment{segment("r", "", 0)}})
			must(err)
			_, err = e.Commit(e.ctx(), &kvferrypb.CommitRequest{Step: step.GetStep()})
			must(err)
		}, transfertest.Within, 2, 2 * bytes},
		{"publish with checksums", func() { e.publish("other", true) }, transfertest.ToHost, 1, bytes},
		{"offload three streams", func() { e.offload("r") }, transfertest.ToHost, 3, 3 * bytes},
		{"reload them", func() { e.reload("r") }, transfertest.FromHost, 3, 3 * bytes},
	} {
		tt.do()
		made := n.calls(&seen)
		want := transfertest.Counts{}
		want.Calls[tt.way], want.Bytes[tt.way] = tt.calls, tt.bytes
		if made.Calls != want.Calls || made.Bytes != want.Bytes {
			t.Errorf("%s: calls %v of %v bytes, want %v of %v", tt.what, made.Calls, made.Bytes, want.Calls, want.Bytes)
		}
	}
	if c := n.device.Counts(); c.Slow > 0 || c.Pinned == 0 {
		t.Errorf("%d copies were slow, %d bytes are pinned", c.Slow, c.Pinned)
	}
	for _, label := range []string{"main", "x", "y"} {
		plan := e.planOf("r", label)
		if got := e.compare("r", "main", plan); got != pages*8 {
			t.Errorf("%s has %d tokens", label, got)
		}
	}
}

// planOf is what a step that only reads is told of a stream.
func (e *engine) planOf(r, label string) *kvferrypb.PlanOutput {
	e.t.Helper()
	step, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{Plan: true, Segments: []*kvferrypb.Segment{{Request: r, Label: label}}})
	if err != nil {
		e.t.Fatal(err)
	}
	if _, err := e.Abort(e.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()}); err != nil {
		e.t.Fatal(err)
	}
	return step.GetPlans()[0]
}

// TestDeviceFails: an operation that a device has failed ends with its type and
// the device's reason, leaves what was there, and works again afterwards.
func TestDeviceFails(t *testing.T) {
	n, _ := startHosted(t, "n", nil, onDevice, [2]string{"arena.ranks", "0,1"})
	e := openEngine(t, n)
	e.ingest("r", "main", "cfg")
	e.write("r", 20, "main", "cfg")
	broken := errors.New("its copy engine is on fire")
	refused := func(what string, err error) {
		t.Helper()
		if f := failureOf(t, err); f.GetCode() != kvferrypb.Failure_INTERNAL || !strings.Contains(f.GetMessage(), broken.Error()) || !strings.Contains(f.GetRemedy(), "nvidia-smi") {
			t.Errorf("%s: %v", what, f)
		}
	}
	n.device.Fail(broken)
	_, err := e.Offload(e.ctx(), &kvferrypb.OffloadRequest{Request: "r"})
	refused("offload", err)
	if e.offloaded("r") {
		t.Error("it moved")
	}
	_, err = e.Admit(e.ctx(), &kvferrypb.AdmitRequest{PreForks: forks("main", "more"), Segments: []*kvferrypb.Segment{segment("r", "", 1)}})
	refused("fork", err)
	step, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r", "", 2)}})
	if err != nil {
		t.Fatal(err)
	}
	row := make([]byte, 2*2*8*2)
	_, err = e.WriteKV(e.ctx(), &kvferrypb.WriteKVRequest{Step: step.GetStep(), K: row, V: row})
	refused("write", err)
	_, err = e.ReadKV(e.ctx(), &kvferrypb.ReadKVRequest{Step: step.GetStep()})
	refused("read", err)
	if _, err := e.Abort(e.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()}); err != nil {
		t.Fatal(err)
	}
	n.device.Fail(nil)
	e.offload("r")
	n.device.Fail(broken)
	_, err = e.Reload(e.ctx(), &kvferrypb.ReloadRequest{Request: "r"})
	refused("reload", err)
	if got := counts(t, n); !e.offloaded("r") || got.GetFree() != 63 {
		t.Errorf("%v", got)
	}
	n.device.Fail(nil)
	e.reload("r")
	for _, label := range []string{"main", "cfg"} {
		if got := e.verify("r", label); got != 20 {
			t.Errorf("%d tokens of %s are back", got, label)
		}
	}
	e.remove("r")
	awaitNothing(t, n)
}

// TestMemoryThatIsNotPinned: a device that pins nothing is slow, and that is said.
func TestMemoryThatIsNotPinned(t *testing.T) {
	device := transfertest.NewDevice(transfertest.DeviceOptions{Pin: errors.New("no more of it")})
	c := configure(t, "n", nil, onDevice, [2]string{"arena.host_pages", "64"})
	var log lines
	n, err := node.Start(t.Context(), node.Options{Config: c, Logger: slog.New(slog.NewTextHandler(&log, nil))}.Allocating(device.Alloc))
	if err != nil {
		t.Fatal(err)
	}
	m := &member{Node: n, config: c, device: device, t: t}
	t.Cleanup(m.close)
	e := openEngine(t, m)
	e.ingest("r")
	e.write("r", 20)
	e.offload("r")
	e.reload("r")
	if got := e.verify("r", "main"); got != 20 {
		t.Errorf("%d tokens", got)
	}
	m.close()
	for _, what := range []string{"staging", "host tier"} {
		said := log.of("no more of it")
		if !slices.ContainsFunc(said, func(line string) bool { return strings.Contains(line, what) && strings.Contains(line, "level=WARN") }) {
			t.Errorf("nothing is said of %s: %q", what, said)
		}
	}
}

// TestCloseWaitsForTheDevice: the end of a node cuts no copy that its device has
// been given, for a call or for the host tier, and frees neither end of it before it
// is over.
func TestCloseWaitsForTheDevice(t *testing.T) {
	for name, begin := range map[string]func(e *engine){
		"read": func(e *engine) {
			ask := &kvferrypb.ReadKVRequest{Step: readStep(e.t, e)}
			go func() { _, _ = e.ReadKV(e.ctx(), ask) }()
		},
		"offload": func(e *engine) { e.offloading("r") },
	} {
		t.Run(name, func(t *testing.T) {
			n, _ := startHosted(t, "n", nil, onDevice)
			e := openEngine(t, n)
			e.ingest("r")
			e.write("r", 20)
			n.device.Hold(transfertest.ToHost)
			begin(e) // it ends with what was asked for, or that the node closes
			await(t, "the device to copy", func(context.Context) error {
				if c := n.device.Counts(); c.Live == 0 {
					return fmt.Errorf("%+v", c)
				}
				return nil
			})
			closed := make(chan struct{})
			go func() {
				defer close(closed)
				n.close() // an arena that is left, or a copy that nobody waited for, is an error
			}()
			<-n.Done()
			select {
			case <-closed:
				t.Error("the node has ended, and its device still copies")
			case <-time.After(stillCopies):
			}
			if c := n.device.Counts(); c.Live == 0 || c.Arenas != 1 {
				t.Errorf("%+v", c)
			}
			n.device.Release(transfertest.ToHost)
			<-closed
		})
	}
}

// stillCopies is longer than a node needs that waits for nothing, the second included
// that calls have to end by themselves.
const stillCopies = 1500 * time.Millisecond

// TestLeastStaging: with as little as transfer.staging may be every transport opens.
func TestLeastStaging(t *testing.T) {
	useFabric(t)
	n := startNode(t, "n", nil, onDevice, [2]string{"transfer.transports", strings.Join(hostTransports(), ",")}, [2]string{"transfer.staging", "16MiB"})
	s, err := n.admin.Status(t.Context(), &kvferrypb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range hostTransports() {
		if i := transportOf(s, name); !i.GetAvailable() {
			t.Errorf("%s: %v", name, i)
		}
	}
}
