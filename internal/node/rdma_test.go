package node_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/node"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/rdma/rdmatest"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rdmaread"
	"github.com/kvferry/kvferry/transfer/shm"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// fabric is the world of devices that all tests share which are parallel: nothing
// goes wrong there.
var fabric = sync.OnceValues(func() (w *rdmatest.World, err error) {
	library, err := rdmatest.Build()
	if err != nil {
		return nil, err
	}
	if err := rdma.Load(library); err != nil {
		return nil, err
	}
	if fabricDir, err = os.MkdirTemp("", "kvf"); err != nil {
		return nil, err
	}
	if w, err = rdmatest.NewWorld(fabricDir, rdmatest.DeviceSpec{Name: "double0"}, rdmatest.DeviceSpec{Name: "double1"}); err != nil {
		return nil, err
	}
	for _, v := range w.Env() {
		if name, value, _ := strings.Cut(v, "="); name != "LD_LIBRARY_PATH" { // it is for the loader of another process
			err = errors.Join(err, os.Setenv(name, value))
		}
	}
	return w, err
})

var fabricDir string // of its files, "" if there are none

// useFabric gives this process devices, and skips the test where there can be none.
func useFabric(t testing.TB) {
	t.Helper()
	if _, err := fabric(); err != nil {
		t.Skip(err)
	}
}

// useNoDevices gives this process none.
func useNoDevices(t *testing.T) {
	t.Helper()
	if library, err := rdmatest.Build(); err == nil {
		_ = rdma.Load(library) // before anybody loads another one; a build without rdma has none
	}
	t.Setenv("KVFERRY_VERBS_DOUBLE", "")
}

// overRDMA lets nodes read each other by RDMA alone.
var overRDMA = [2]string{"transfer.transports", "rdma"}

// impatient makes nodes notice soon what does not answer.
func impatient() [][2]string {
	return [][2]string{{"timers.backoff_min", "1ms"}, {"timers.stall", "5s"}}
}

// awaitAllClosed waits until nothing of a world is open.
func awaitAllClosed(t testing.TB, w *rdmatest.World) {
	t.Helper()
	await(t, "nothing of the devices to be open", func(context.Context) error {
		c := w.Counts()
		if left := [...]int{c.Contexts, c.PDs, c.Regions, c.CQs, c.QPs, c.Channels}; left != [6]int{} {
			return fmt.Errorf("contexts, domains, regions, completion queues, queue pairs, and channels: %v", left)
		}
		return nil
	})
}

// TestPairByRDMA: every byte comes by RDMA, with certificates and without, and of
// a node that has closed nothing is left, on either side.
func TestPairByRDMA(t *testing.T) {
	for name, secure := range map[string]bool{"plain": false, "secure": true} {
		t.Run(name, func(t *testing.T) {
			w := rdmatest.Use(t)
			set := [][2]string{{"transfer.transports", "shm,rdma,tcp"}, {"transfer.require", "rdma"}}
			var prefill, decode *member
			if secure {
				prefill, decode = startSecure(t, newAuthority(t, year), append(set, [2]string{"cluster.keyring", testKey})...)
			} else {
				prefill, decode = startPair(t, set...)
			}
			p, d := openEngine(t, prefill), openEngine(t, decode)
			for _, b := range []bring{{target: "decode", reference: true}, {}, {poll: true}} {
				b.chunks = chunks()
				carry(t, fmt.Sprintf("%v", b), b, p, d)
			}
			if by := over(t, "r1", p, d); by != rdmaread.Name {
				t.Errorf("it came by %s", by)
			}
			read := metric(t, decode, `kvferry_read_bytes_total{transport="rdma"}`)
			if c := w.Counts(); read < 4*36*128 || float64(c.ReadBytes) < read {
				t.Errorf("%v bytes were read, %d of them by the devices", read, c.ReadBytes)
			}
			for n, names := range map[*member][]string{
				decode:  {`kvferry_data_connections{by="us",transport="rdma"}`, `kvferry_rdma_crossings_total`, `kvferry_rdma_registered_bytes`},
				prefill: {`kvferry_data_connections{by="peers",transport="rdma"}`, `kvferry_served_links_total{transport="rdma"}`, `kvferry_rdma_registered_bytes`},
			} {
				for _, name := range names {
					if metric(t, n, name) == 0 {
						t.Errorf("%s: %s is 0", n.Life(), name)
					}
				}
			}
			for _, r := range peerOf(t, decode, "prefill").GetRefused() {
				t.Errorf("%v is refused, and not there at all", r)
			}
			decode.close()
			await(t, "the owner to let go", func(context.Context) error {
				if c := w.Counts(); c.QPs > 0 {
					return fmt.Errorf("%d queue pairs", c.QPs)
				}
				return nil
			})
			prefill.close()
			awaitAllClosed(t, w)
		})
	}
}

// TestPreferenceOfRDMA: it stands between shared memory and TCP.
func TestPreferenceOfRDMA(t *testing.T) {
	rdmatest.Use(t)
	all := [2]string{"transfer.transports", "shm,rdma,tcp"}
	prefill := startNode(t, "prefill", nil, all)
	near := startNode(t, "near", prefill, all)
	far := startNode(t, "far", prefill, all, elsewhere(t))
	lacks := startNode(t, "lacks", prefill, elsewhere(t))
	awaitPeers(t, prefill, near, far, lacks)
	p := openEngine(t, prefill)
	for by, n := range map[string]*member{shm.Name: near, rdmaread.Name: far, tcp.Name: lacks} {
		name := string(n.Life().Node)
		e := openEngine(t, n)
		p.ingest(name)
		e.ingest(name)
		p.write(name, 20)
		p.publish(name, true, to(name))
		if res, err := e.retrieve(name, "", 0, deadline); err != nil || res.GetTransport() != by {
			t.Errorf("to %s: %v, %v, want it by %s", name, res, err, by)
		}
		if got := e.verify(name, "main"); got != 20 {
			t.Errorf("%d tokens at %s", got, name)
		}
	}
	// From one that has none it comes another way, and that shows.
	l, f := openEngine(t, lacks), openEngine(t, far)
	l.ingest("back")
	f.ingest("back")
	l.write("back", 20)
	l.publish("back", true, to("far"))
	if res, err := f.retrieve("back", "", 0, deadline); err != nil || res.GetTransport() != tcp.Name {
		t.Errorf("%v, %v, want it by tcp", res, err)
	}
	if r := refusal(peerOf(t, far, "lacks"), rdmaread.Name); r == nil || !strings.Contains(r.GetReason(), "does not have it") || r.GetRetryIn() != nil {
		t.Errorf("%v, want that the peer does not have it, for good", r)
	}
}

// TestNoRDMA: a machine without devices says so and uses what it has, quietly
// where nobody asked for devices; and does not start where it has to have them.
func TestNoRDMA(t *testing.T) {
	for name, tt := range map[string]struct {
		set   [2]string
		level string // "": it does not start
	}{
		"whatever there is": {[2]string{"transfer.transports", "shm,rdma,tcp"}, "WARN"}, // there is one, which is down
		"named":             {[2]string{"transfer.transports", "rdma,tcp"}, "WARN"},
		"alone":             {overRDMA, ""},
		"required":          {[2]string{"transfer.require", "rdma"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			rdmatest.Use(t, []rdmatest.DeviceSpec{{Name: "double0", Down: true}}...)
			c := configure(t, "prefill", nil, [2]string{"transfer.transports", "shm,rdma,tcp"}, tt.set)
			var log lines
			n, err := node.Start(t.Context(), node.Options{Config: c, Logger: slog.New(slog.NewTextHandler(&log, nil))})
			if tt.level == "" {
				if err == nil {
					n.Close(t.Context())
					t.Fatal("it starts without the only transport")
				}
				if !errors.Is(err, transfer.ErrUnavailable) || !strings.Contains(err.Error(), "double0") || !strings.Contains(err.Error(), "kvferry doctor") {
					t.Errorf("%v, want ErrUnavailable, the device, and where to look", err)
				}
				if strings.Contains(err.Error(), "cudaipc") || strings.Contains(err.Error(), "tcp") {
					t.Errorf("%v tells of transports that nobody asked for", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			m := &member{Node: n, config: c, t: t}
			t.Cleanup(m.close)
			m.admin = dial(t, m).Admin()
			if got := log.of("transport is not available"); len(got) != 1 || !strings.Contains(got[0], "level="+tt.level) || !strings.Contains(got[0], "transport=rdma") {
				t.Errorf("the log says %q", got)
			}
			res, err := m.admin.Status(t.Context(), &kvferrypb.StatusRequest{})
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range res.GetTransports() {
				if s.GetName() == rdmaread.Name && (s.GetAvailable() || !strings.Contains(s.GetReason(), "double0")) {
					t.Errorf("%v, want that it is not available, and why", s)
				}
			}
		})
	}
}

// TestNoCard: who asks for whatever there is does not miss a card; who names one, or
// a library, does, on a machine without any.
func TestNoCard(t *testing.T) {
	if cards, _ := rdma.Probe(os.DirFS("/"), ""); len(cards) > 0 {
		t.Skipf("this machine has %v", cards)
	}
	all := [2]string{"transfer.transports", strings.Join(config.Transports(), ",")}
	for name, tt := range map[string]struct {
		set  [2]string
		says []string // nil: it starts
	}{
		"whatever there is": {set: all},
		"a device":          {[2]string{"transfer.rdma.devices", "mlx5_9"}, []string{"transfer.rdma.devices names mlx5_9"}},
		"rdma":              {[2]string{"transfer.require", "rdma"}, []string{"transfer.require (rdma)", "no device in /sys/class/infiniband", "kvferry doctor -c FILE"}},
		"a library":         {[2]string{"transfer.rdma.library", "/nosuch/libibverbs.so.1"}, []string{"transfer.rdma.library", "/nosuch/libibverbs.so.1"}},
	} {
		t.Run(name, func(t *testing.T) {
			useNoDevices(t)
			c := configure(t, "prefill", nil, all, tt.set)
			var log lines
			n, err := node.Start(t.Context(), node.Options{Config: c, Logger: slog.New(slog.NewTextHandler(&log, nil))})
			if err == nil {
				defer n.Close(t.Context())
			}
			if tt.says == nil {
				got := log.of("transport is not available") // rdma, and for want of a GPU cudaipc
				if err != nil || len(got) != 2 || slices.ContainsFunc(got, func(line string) bool { return !strings.Contains(line, "level=INFO") }) {
					t.Errorf("%v, the log says %q", err, got)
				}
				return
			}
			if err == nil {
				t.Fatal("it starts")
			}
			for _, s := range tt.says {
				if !strings.Contains(err.Error(), s) {
					t.Errorf("%v does not say %q", err, s)
				}
			}
			if strings.Contains(err.Error(), "cudaipc") || len(err.Error()) > 500 {
				t.Errorf("%v says too much", err)
			}
		})
	}
}

// TestBrokenRDMAEndsTheStart: a machine that has devices and cannot use them as it
// was told does not quietly do without.
func TestBrokenRDMAEndsTheStart(t *testing.T) {
	all := [2]string{"transfer.transports", "shm,rdma,tcp"}
	for name, tt := range map[string]struct {
		faults rdmatest.Faults
		set    [][2]string
		says   []string
	}{
		"a device that is not there": {set: [][2]string{{"transfer.rdma.devices", "double0,mlx5_7"}}, says: []string{"mlx5_7", "transfer.rdma"}},
		"a port that is not there":   {set: [][2]string{{"transfer.rdma.devices", "double0:2"}}, says: []string{"double0", "2"}},
		"no memory to lock":          {faults: rdmatest.Faults{Memlock: 1 << 10}, says: []string{"double0", "memory"}},
		"no domain":                  {faults: rdmatest.Faults{PDENOMEM: 1}, says: []string{"double0"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := rdmatest.Use(t)
			w.Set(tt.faults)
			n, err := node.Start(t.Context(), node.Options{Config: configure(t, "prefill", nil, append(tt.set, all)...), Logger: logger(t)})
			if err == nil {
				n.Close(t.Context())
				t.Fatal("it starts")
			}
			if errors.Is(err, transfer.ErrUnavailable) {
				t.Errorf("%v: is a reason to use another transport", err)
			}
			for _, s := range tt.says {
				if !strings.Contains(err.Error(), s) {
					t.Errorf("%v does not say %q", err, s)
				}
			}
			awaitAllClosed(t, w)
		})
	}
}

// TestBrokenFabricIsTold: reads that fail are errors first, then another transport
// is used, which shows and is warned of, and when all is well RDMA is back.
func TestBrokenFabricIsTold(t *testing.T) {
	w := rdmatest.Use(t)
	by := [2]string{"transfer.transports", "rdma,tcp"}
	prefill := startNode(t, "prefill", nil, by)
	var log lines
	c := configure(t, "decode", prefill, append(impatient(), by, [2]string{"timers.attempts", "9"})...)
	decode := startLogging(t, c, slog.New(slog.NewTextHandler(&log, nil)), nil)
	awaitPeers(t, prefill, decode)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	if by := over(t, "before", p, d); by != rdmaread.Name {
		t.Errorf("it came by %s", by)
	}
	w.Set(rdmatest.Faults{Lose: 1000, RetryWindow: 20 * time.Millisecond})
	if by := over(t, "broken", p, d); by != tcp.Name {
		t.Errorf("it came by %s", by)
	}
	// A link can be opened all the same, and after a rest it is tried again.
	i := peerOf(t, decode, "prefill")
	if r := refusal(i, rdmaread.Name); !strings.Contains(r.GetReason(), "double") && i.GetTransport() != rdmaread.Name {
		t.Errorf("%v, want why it is not used, and the device", i)
	}
	if got := log.of("better transport is not used any more"); len(got) == 0 || !strings.Contains(got[0], "level=WARN") || !strings.Contains(got[0], "double") {
		t.Errorf("the log says %q", got)
	}
	if v := metric(t, decode, `kvferry_reads_total{result="failed",transport="rdma"}`); v < 2 {
		t.Errorf("%v reads have failed, want two before another transport is used", v)
	}
	w.Clear()
	await(t, "decode to come back to rdma", func(context.Context) error {
		if p := peerOf(t, decode, "prefill"); p.GetTransport() != rdmaread.Name {
			return fmt.Errorf("%v", p)
		}
		return nil
	})
	if by := over(t, "after", p, d); by != rdmaread.Name {
		t.Errorf("it came by %s", by)
	}
	if got := fallbacks(t, decode, tcp.Name, rdmaread.Name, "recovered"); got == 0 {
		t.Error("nothing says that it came back")
	}
}

// TestDeadCardShows: a node whose only card has died says so, and says when a port
// is down and back.
func TestDeadCardShows(t *testing.T) {
	w := rdmatest.Use(t, rdmatest.DeviceSpec{Name: "double0"})
	prefill, decode := startPair(t, append(impatient(), [2]string{"transfer.transports", "rdma,tcp"})...)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	if by := over(t, "before", p, d); by != rdmaread.Name {
		t.Fatalf("it came by %s", by)
	}
	if i := peerOf(t, decode, "prefill"); !strings.Contains(i.GetPath(), "double0:1") || !strings.Contains(i.GetPath(), "lanes") {
		t.Errorf("path %q, want the device and its lanes", i.GetPath())
	}
	show := func(says string) error {
		res, err := decode.admin.Status(t.Context(), &kvferrypb.StatusRequest{})
		if err != nil {
			return err
		}
		doctor, err := decode.admin.Doctor(t.Context(), &kvferrypb.DoctorRequest{})
		if err != nil {
			return err
		}
		s, row := transportOf(res, rdmaread.Name), checkOf(doctor, "transport rdma")
		if len(s.GetPorts()) != 1 || s.GetPorts()[0].GetDevice() != "double0" || s.GetPorts()[0].GetGid() == "" {
			return fmt.Errorf("%v, want one port of double0", s)
		}
		state := s.GetPorts()[0].GetState()
		if says == "" {
			if !s.GetAvailable() || s.GetReason() != "" || state != "active" || row.GetState() != node.StateOK {
				return fmt.Errorf("%v, %v, want that all is well", s, row)
			}
			return nil
		}
		if s.GetAvailable() || !strings.Contains(s.GetReason(), says) || !strings.Contains(state, says) || row.GetState() != node.StateWarn || !strings.Contains(row.GetFound(), says) || row.GetRemedy() == "" {
			return fmt.Errorf("%v, %v, want that it %q", s, row, says)
		}
		return nil
	}
	for _, e := range []struct {
		kind rdmatest.EventKind
		says string
	}{{rdmatest.PortActive, ""}, {rdmatest.PortError, "is down"}, {rdmatest.PortActive, ""}, {rdmatest.DeviceFatal, "has failed"}} {
		if err := w.Event("double0", e.kind); err != nil {
			t.Fatal(err)
		}
		await(t, fmt.Sprintf("%v to show", e.kind), func(context.Context) error { return show(e.says) })
	}
	if by := over(t, "after", p, d); by != tcp.Name {
		t.Errorf("it came by %s", by)
	}
}

func transportOf(s *kvferrypb.StatusResponse, name string) *kvferrypb.TransportStatus {
	for _, t := range s.GetTransports() {
		if t.GetName() == name {
			return t
		}
	}
	return nil
}

func checkOf(r *kvferrypb.DoctorResponse, name string) *kvferrypb.DoctorResponse_Check {
	for _, c := range r.GetItems() {
		if c.GetName() == name {
			return c
		}
	}
	return nil
}

// TestRequiredFabricBreaks: without another transport a read that fails is an
// error that names peer, transport, and cause, and frees its pages.
func TestRequiredFabricBreaks(t *testing.T) {
	w := rdmatest.Use(t)
	prefill, decode := startPair(t, append(impatient(), overRDMA, [2]string{"timers.attempts", "2"})...)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	if by := over(t, "before", p, d); by != rdmaread.Name {
		t.Errorf("it came by %s", by)
	}
	w.Set(rdmatest.Faults{Lose: 1000, RetryWindow: 20 * time.Millisecond})
	p.ingest("r1")
	d.ingest("r1")
	p.write("r1", 20)
	p.publish("r1", true, to("decode"))
	begin := time.Now()
	_, err := d.retrieve("r1", "", 0, deadline)
	if f := failureOf(t, err); f.GetCode() != kvferrypb.Failure_TRANSPORT || f.GetPeer() != "prefill" || f.GetTransport() != rdmaread.Name || !strings.Contains(f.GetMessage(), "double") {
		t.Errorf("%v, want TRANSPORT of prefill by rdma, and the device", f)
	}
	if took := time.Since(begin); took > deadline/2 {
		t.Errorf("it took %v", took)
	}
	d.remove("r1")
	d.remove("before")
	awaitAllFree(t, decode)
	w.Clear()
	if by := over(t, "after", p, d); by != rdmaread.Name {
		t.Errorf("it came by %s", by)
	}
}

// TestOneOfTwoPathsFails: the other one carries on, and nobody notices but the
// metrics.
func TestOneOfTwoPathsFails(t *testing.T) {
	w := rdmatest.Use(t)
	prefill, decode := startPair(t, append(impatient(), overRDMA, [2]string{"timers.attempts", "1"})...)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	if by := over(t, "both", p, d); by != rdmaread.Name {
		t.Errorf("it came by %s", by)
	}
	const lanes = `kvferry_data_connections{by="us",transport="rdma"}`
	whole := metric(t, decode, lanes)
	for _, device := range []string{"double0", "double1"} {
		if err := w.Event(device, rdmatest.PortError); err != nil {
			t.Fatal(err)
		}
		for i := range 3 {
			carry(t, fmt.Sprintf("without %s %d", device, i), bring{chunks: chunks(), target: "decode"}, p, d)
		}
		if err := w.Event(device, rdmatest.PortActive); err != nil {
			t.Fatal(err)
		}
		await(t, "its lanes to be back", func(context.Context) error {
			if n := metric(t, decode, lanes); n < whole {
				return fmt.Errorf("%v of %v", n, whole)
			}
			return nil
		})
	}
	if n := metric(t, decode, `kvferry_rdma_lane_failures_total{what="replaced"}`); n < whole {
		t.Errorf("%v lanes have a fresh queue pair, want all of them, which are %v", n, whole)
	}
	for _, n := range []*member{prefill, decode} {
		if r := refusal(peerOf(t, n, map[*member]string{prefill: "decode", decode: "prefill"}[n]), rdmaread.Name); r != nil {
			t.Errorf("%v", r)
		}
	}
}

// TestHostileRDMA: garbage from a member makes no queue pair, and shows.
func TestHostileRDMA(t *testing.T) {
	w := rdmatest.Use(t)
	by := [2]string{"transfer.transports", "rdma,tcp"}
	prefill := startNode(t, "prefill", nil, by)
	decode := startNode(t, "decode", prefill, append(impatient(), by)...)
	awaitPeers(t, prefill, decode)

	peer := dialPeer(t, prefill, insecure.NewCredentials())
	const garbage = `kvferry_served_refused_total{transport="rdma",why="garbage"}`
	for i, hello := range [][]byte{nil, []byte("garbage"), []byte("kvr\x01\x02"), make([]byte, node.MaxHello)} {
		err := askLink(t, peer, &kvferrypb.LinkRequest{
			From: &kvferrypb.Life{Node: "decode", Incarnation: uint64(decode.Life().Incarnation)},
			To:   "prefill", ToIncarnation: uint64(prefill.Life().Incarnation), Transport: "rdma", Hello: hello,
		})
		if status.Code(err) != codes.Unavailable {
			t.Errorf("hello %.20q: %v", hello, err)
		}
		if n := metric(t, prefill, garbage); n != float64(i+1) {
			t.Errorf("%v pieces of garbage, want %d", n, i+1)
		}
	}
	if c := w.Counts(); c.QPs > 0 {
		t.Errorf("%d queue pairs", c.QPs)
	}

	d := openEngine(t, decode)
	imp := startImpostor(t, decode, func(_ context.Context, r *kvferrypb.HelloResponse) {
		r.Transports = append(r.Transports, &kvferrypb.Transport{Name: rdmaread.Name, Address: []byte("kvr\x01\x01garbage")})
	})
	a, ref := imp.announce(t, honest("r1"))
	imp.lookup = func(*kvferrypb.LookupRequest) (*kvferrypb.Announcement, error) {
		return &kvferrypb.Announcement{Message: a.Full, Request: "r1"}, nil
	}
	d.ingest("r1")
	if res, err := d.retrieve("r1", ref, 0, deadline); err != nil || res.GetTransport() != tcp.Name {
		t.Errorf("%v, %v, want it by tcp", res, err)
	}
	if r := refusal(peerOf(t, decode, "impostor"), rdmaread.Name); r == nil || !strings.Contains(r.GetReason(), "descriptor") {
		t.Errorf("%v does not say why", r)
	}
	d.remove("r1")
}
