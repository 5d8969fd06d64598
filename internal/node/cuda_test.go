package node_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/cuda/cudatest"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/internal/node"
	"github.com/kvferry/kvferry/transfer/cudaipc"
	"github.com/kvferry/kvferry/transfer/rdmaread"
	"github.com/kvferry/kvferry/transfer/shm"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// gpuWorld are the devices of this process, which has one world for good.
func gpuWorld() cudatest.Options { return cudatest.Options{Devices: 2, Peers: true} }

// useGPUs gives this process two devices of an emulated driver, and skips the test
// where there can be none. At the end nothing that the test has made of them may
// be left. It returns the world, and what names the driver to a node.
func useGPUs(t testing.TB) (*cudatest.World, [2]string) {
	t.Helper()
	w := cudatest.Use(t, gpuWorld())
	before := w.Counts().Live()
	t.Cleanup(func() { // after all that the test closes
		if c := w.Counts(); c.Live() != before && !t.Failed() {
			t.Errorf("%d objects of the driver are there, %d were before: %+v", c.Live(), before, c)
		}
	})
	return w, [2]string{"arena.cuda_library", w.Library()}
}

// importedByDriver is the arena of a device of the driver's as an engine imports
// it; nil of any other.
func importedByDriver(t testing.TB, s *client.Session, r id.Rank, n *member) memory.Arena {
	t.Helper()
	a, ok := n.ArenaOf(r).(*cuda.Arena)
	if !ok {
		return nil
	}
	if _, err := s.Arena(t.Context(), r); !errors.Is(err, client.ErrDeviceMemory) {
		t.Errorf("to map it: %v", err)
	}
	rt, err := cuda.Open(cuda.Options{Library: n.config.Arena.CUDALibrary})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := rt.Close(); err != nil {
			t.Error(err)
		}
	})
	imported, err := s.AnyArena(t.Context(), r, rt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := imported.Close(); err != nil {
			t.Error(err)
		}
	})
	if g := imported.(*cuda.Arena); rt.Stats().Imported != 1 || g.GPU() != a.GPU() {
		t.Errorf("it is on %v, imported: %v", g.GPU(), rt.Stats().Imported)
	}
	return imported
}

// onGPU names the devices of a node's ranks.
func onGPU(named string) [2]string { return [2]string{"arena.memory", named} }

// TestGPUs: between arenas on one device, on two, and on the host, every byte
// comes, in chunks with a pause before the last one, by each transport to which it
// makes a difference, and which leaves nothing of the driver's behind.
func TestGPUs(t *testing.T) {
	for name, sides := range map[string][2]string{
		"one device":     {"cuda:0", "cuda:0"},
		"two devices":    {"cuda:0,cuda:1", "cuda:1,cuda:0"},
		"device to host": {"cuda:0", "host"},
		"host to device": {"host", "cuda:1"},
	} {
		for _, by := range config.Transports() {
			if by == cudaipc.Name && (sides[0] == "host" || sides[1] == "host") {
				continue
			}
			if by != cudaipc.Name && name == "one device" { // each side goes through host memory, as on two
				continue
			}
			t.Run(name+" by "+by, func(t *testing.T) {
				w, driver := useGPUs(t)
				if by == rdmaread.Name {
					useFabric(t)
				}
				set := [][2]string{driver, {"arena.ranks", "0,1"}, {"transfer.transports", by}, {"transfer.staging", "16MiB"}, verifying}
				prefill := startNode(t, "prefill", nil, append(set, onGPU(sides[0]))...)
				decode := startNode(t, "decode", prefill, append(set, onGPU(sides[1]))...)
				awaitPeers(t, prefill, decode)
				p, d := openEngine(t, prefill), openEngine(t, decode)
				for _, b := range []bring{{target: "decode"}, {reference: true, labels: []string{"main", "cfg"}}} {
					b.chunks = chunks()
					carry(t, fmt.Sprintf("%v", b), b, p, d)
				}
				if got := over(t, "last", p, d); got != by {
					t.Errorf("it came by %s", got)
				}
				if good, bad, unknown := verified(t, decode); good == 0 || bad != 0 || unknown != 0 {
					t.Errorf("%d pages are good, %d bad, %d unknown", good, bad, unknown)
				}
				if item := probedBy(t, decode.probe(t, "prefill"), by); item.GetState() != node.StateOK {
					t.Errorf("probe: %v", item)
				}
				for n, memory := range map[*member]string{prefill: sides[0], decode: sides[1]} {
					dead := metric(t, n, "kvferry_cuda_dead")
					arenas := metric(t, n, `kvferry_cuda_arenas{whose="own"}`)
					if on := memory != "host"; dead != 0 || on != (arenas == 2) {
						t.Errorf("%s in %s has %v arenas on devices, dead: %v", n.Life(), memory, arenas, dead)
					}
				}
				if c := w.Counts(); c.DeviceBytes == 0 {
					t.Errorf("no memory of a device is taken: %+v", c)
				}
			})
		}
	}
}

// TestPullIsFewCalls: a pull of pages that lie anywhere is a call of the driver or
// two for each window, not one a page.
func TestPullIsFewCalls(t *testing.T) {
	for _, by := range []string{cudaipc.Name, shm.Name, tcp.Name} {
		t.Run(by, func(t *testing.T) {
			w, driver := useGPUs(t)
			if len(w.Options().Hide) > 0 {
				t.Skip("a driver that has no batches")
			}
			set := [][2]string{driver, onGPU("cuda:0"), {"arena.pages", "512"}, {"arena.layers", "8"}, {"transfer.transports", by}}
			prefill := startNode(t, "prefill", nil, set...)
			decode := startNode(t, "decode", prefill, set...)
			awaitPeers(t, prefill, decode)
			p, d := openEngine(t, prefill), openEngine(t, decode)
			const pages = 100
			p.ingest("other")
			p.ingest("r")
			for range pages {
				for _, r := range []string{"r", "other"} { // neighbours are of different streams
					step, err := p.Admit(p.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment(r, "", 8)}})
					if err != nil {
						t.Fatal(err)
					}
					if _, err := p.Commit(p.ctx(), &kvferrypb.CommitRequest{Step: step.GetStep()}); err != nil {
						t.Fatal(err)
					}
				}
			}
			d.ingest("warm")
			p.ingest("warm")
			p.write("warm", 1)
			p.publish("warm", true, to("decode"))
			if _, err := d.retrieve("warm", "", 0, deadline); err != nil { // links are open
				t.Fatal(err)
			}
			d.ingest("r")
			before := copiesOf(w)
			p.publish("r", true, to("decode"))
			if _, err := d.retrieve("r", "", 0, deadline); err != nil {
				t.Fatal(err)
			}
			made := copiesOf(w)
			total := uint64(0)
			for call := range made {
				total += made[call] - before[call]
			}
			if segments := uint64(pages * 8); total == 0 || total > segments/20 {
				t.Errorf("%d copies of the driver for %d stretches: %v, before %v", total, segments, made, before)
			}
		})
	}
}

// copiesOf are the calls of the driver that copy, and launch kernels.
func copiesOf(w *cudatest.World) map[string]uint64 {
	calls := maps.Clone(w.Counts().Calls)
	maps.DeleteFunc(calls, func(name string, _ uint64) bool {
		return !strings.HasPrefix(name, "cuMemcpy") && !strings.HasPrefix(name, "cuLaunch")
	})
	return calls
}

// TestGPUsAreChosen: with nothing said of transports, arenas on devices of one
// host are read from device to device, one in host memory otherwise, and everybody
// can see why.
func TestGPUsAreChosen(t *testing.T) {
	w, driver := useGPUs(t)
	useNoDevices(t)
	all := [2]string{"transfer.transports", strings.Join(config.Transports(), ",")}
	prefill := startNode(t, "prefill", nil, driver, all, onGPU("cuda:0"))
	decode := startNode(t, "decode", prefill, driver, all, onGPU("cuda:1"))
	plain := startNode(t, "plain", prefill, all)
	awaitPeers(t, prefill, decode, plain)
	p, d, h := openEngine(t, prefill), openEngine(t, decode), openEngine(t, plain)
	if by := over(t, "r1", p, d); by != cudaipc.Name {
		t.Errorf("it came by %s", by)
	}
	if by := over(t, "r2", p, h); by != shm.Name {
		t.Errorf("it came to the host by %s", by)
	}
	s, err := prefill.admin.Status(t.Context(), &kvferrypb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if !transportOf(s, cudaipc.Name).GetAvailable() || len(s.GetDevices()) != 1 || s.GetDevices()[0].GetFailed() != "" || s.GetDevices()[0].GetName() == "" {
		t.Errorf("%v", s)
	}
	device := s.GetDevices()[0]
	if m := s.GetMemory(); len(m) != 1 || m[0].GetPlace() != "cuda:"+device.GetUuid() {
		t.Errorf("the arena lies in %v", m)
	}
	if s, err = plain.admin.Status(t.Context(), &kvferrypb.StatusRequest{}); err != nil {
		t.Fatal(err)
	}
	if i := transportOf(s, cudaipc.Name); i.GetAvailable() || !strings.Contains(i.GetReason(), "arena.memory") || !strings.Contains(i.GetReason(), "this machine") {
		t.Errorf("%v", i)
	}
	if m := s.GetMemory(); len(m) != 1 || m[0].GetPlace() != "host" || len(s.GetDevices()) > 0 {
		t.Errorf("the arena lies in %v", m)
	}
	const context = "cuDevicePrimaryCtxRetain"
	contexts := w.Counts().Calls[context]
	r, err := prefill.admin.Doctor(t.Context(), &kvferrypb.DoctorRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if made := w.Counts().Calls[context] - contexts; made > 0 || contexts == 0 {
		t.Errorf("to look at all devices the node used %d of them, after %d", made, contexts)
	}
	for _, name := range []string{"transport cudaipc", "cuda library", "gpu 0", "gpu 1", "huge pages"} {
		if c := checkOf(r, name); c.GetState() != node.StateOK {
			t.Errorf("%s: %v", name, c)
		}
	}
	if c := checkOf(r, "gpu 0"); !strings.Contains(c.GetFound(), device.GetUuid()) || !strings.Contains(c.GetFound(), device.GetName()) || !strings.Contains(c.GetFound(), "CUDA 12.9") {
		t.Errorf("%v", c)
	}
	if r, err = plain.admin.Doctor(t.Context(), &kvferrypb.DoctorRequest{}); err != nil {
		t.Fatal(err)
	}
	if c := checkOf(r, "gpu 0"); c != nil {
		t.Errorf("a node in host memory has asked the driver: %v", c)
	}
}

// TestGPUThatIsNotThere: what cannot be had ends the start, with what there is, and
// what to do.
func TestGPUThatIsNotThere(t *testing.T) {
	w, driver := useGPUs(t)
	for name, tt := range map[string]struct {
		set  [][2]string
		want []string
	}{
		"no such device":   {[][2]string{driver, onGPU("cuda:7")}, []string{"arena.memory", "cuda:7", "0 to 1"}},
		"no such UUID":     {[][2]string{driver, onGPU("cuda:GPU-01234567-89ab-cdef-0123-456789abcdef")}, []string{"GPU-01234567", "CUDA_VISIBLE_DEVICES"}},
		"too little of it": {[][2]string{driver, onGPU("cuda:0"), {"arena.pages", "2GiB"}}, []string{"arena.pages", "rank 0"}},
	} {
		t.Run(name, func(t *testing.T) {
			before := w.Counts().Live()
			n, err := node.Start(t.Context(), node.Options{Config: configure(t, "n", nil, tt.set...)})
			if err == nil {
				t.Error(errors.New("it starts"), n.Close(t.Context()))
				return
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not have %q", err, want)
				}
			}
			if left := w.Counts().Live(); left != before {
				t.Errorf("%d objects are left of %d", left, before)
			}
		})
	}
}

// TestHostTierOfGPUs: what went to the host comes back, by a batch each way.
func TestHostTierOfGPUs(t *testing.T) {
	w, driver := useGPUs(t)
	n, _ := startHosted(t, "n", nil, driver, onGPU("cuda:0,cuda:1"), [2]string{"arena.ranks", "0,1"})
	e := openEngine(t, n)
	e.ingest("r", "main")
	e.ingest("other")
	for range 10 {
		e.write("r", 8)
		e.write("other", 8)
	}
	before := copiesOf(w)
	e.offload("r")
	e.reload("r")
	made := copiesOf(w)
	total := uint64(0)
	for call := range made {
		total += made[call] - before[call]
	}
	if len(w.Options().Hide) == 0 && total > 8 { // of two ranks, there and back, with kernels
		t.Errorf("%d calls of the driver: %v, before %v", total, made, before)
	}
	for _, r := range []string{"r", "other"} {
		if got := e.verify(r, "main"); got != 80 {
			t.Errorf("%s has %d tokens", r, got)
		}
	}
	await(t, "host memory to be pinned", func(context.Context) error {
		if v := metric(t, n, `kvferry_cuda_pinned_bytes{state="pinned"}`); v < 2*64*2*8*128 {
			return fmt.Errorf("%v bytes are", v)
		}
		return nil
	})
}

// process of its own: a node on a device, which is told by lines what to do.
const gpuNode = "KVFERRY_TEST_GPU_NODE"

// TestGPUProcess is the other process of tests.
func TestGPUProcess(t *testing.T) {
	file := os.Getenv(gpuNode)
	if file == "" {
		t.Skip("the other process of tests alone")
	}
	c, err := config.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	n, err := node.Start(t.Context(), node.Options{Config: c})
	if err != nil {
		t.Fatal(err)
	}
	m := &member{Node: n, config: c, t: t}
	m.admin = dial(t, m).Admin()
	e := openEngine(t, m)
	in := bufio.NewReader(os.Stdin)
	if os.Getenv(gpuReads) != "" {
		e.ingest("r")
		pace(in, "reads")
		if res, err := e.retrieve("r", "", 0, deadline); err != nil || e.verify("r", "main") != 20 {
			t.Errorf("%v, %v", res, err)
		}
		pace(in, "has read")
		return
	}
	e.ingest("r")
	e.write("r", 20)
	e.publish("r", true)
	pace(in, "published")
	if os.Getenv(gpuDies) == "" {
		<-t.Context().Done()
		return
	}
	// Its device dies now: whoever copies finds out.
	_, err = e.ReadKV(e.ctx(), &kvferrypb.ReadKVRequest{Step: readStep(t, e)})
	if err == nil {
		t.Error("a dead device was read")
	}
	<-n.Done()
	status, err := m.admin.Status(t.Context(), &kvferrypb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var failed []string
	for _, d := range status.GetDevices() {
		if d.GetFailed() != "" {
			failed = append(failed, d.GetFailed())
		}
	}
	if len(status.GetDevices()) != 2 || len(failed) != 1 || !strings.Contains(failed[0], cuda.ErrDead.Error()) {
		t.Errorf("one of two devices is dead, these have failed: %q", failed)
	}
	res, err := http.Get("http://" + n.Addresses().HTTP.String() + "/readyz")
	if err != nil {
		t.Fatal(err)
	}
	why, _ := io.ReadAll(res.Body)
	_ = res.Body.Close()
	fmt.Printf("%sended %v: %v, %v, ready %d %q, closed %v\n", stepMark, n.Err(), errors.Is(n.Err(), node.ErrDevice), errors.Is(n.Err(), cuda.ErrDead), res.StatusCode, why, n.Close(context.Background()))
	os.Exit(0) // what the engine has imported cannot be closed properly any more
}

const (
	gpuDies  = "KVFERRY_TEST_GPU_DIES"  // the process waits for the death of its device
	gpuReads = "KVFERRY_TEST_GPU_READS" // it reads instead of publishing
)

func readStep(t testing.TB, e *engine) uint64 {
	t.Helper()
	e.ingest("more")
	step, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("more", "", 2)}})
	if err != nil {
		t.Fatal(err)
	}
	return step.GetStep()
}

// meetingPlace is a rendezvous of a test's own: who is killed leaves its sockets.
func meetingPlace(t testing.TB) [2]string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kvf")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return [2]string{"transfer.rendezvous", dir}
}

// TestGPUDies: a node whose device is dead gives itself up with the driver's
// reason, and ends.
func TestGPUDies(t *testing.T) {
	if testing.Short() {
		t.Skip("-short")
	}
	if _, err := cudatest.Build(); err != nil {
		t.Skip(err)
	}
	w, err := cudatest.New(cudatest.Options{Devices: 2}) // of the other process alone
	if err != nil {
		t.Fatal(err)
	}
	c := configure(t, "n", nil, onGPU("cuda:0,cuda:1"), [2]string{"arena.ranks", "0,1"}, [2]string{"arena.cuda_library", w.Library()}, meetingPlace(t))
	p := startProcess(t, "TestGPUProcess", append(w.Env(), gpuNode+"="+writeConfig(t, c), gpuDies+"=1")...)
	p.upTo("published")
	w.Set(cudatest.Faults{Poison: cudatest.IllegalAddress})
	p.proceed()
	got := p.next()
	for _, want := range []string{"ended", "GPU of this node's arenas is dead", "new process", ": true, true", "ready 503", "closed <nil>"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q does not have %q", got, want)
		}
	}
}

// TestOwnerOfGPUKilled: of an owner that was killed, while it is read and when it is
// not, a reader keeps neither memory nor files.
func TestOwnerOfGPUKilled(t *testing.T) {
	for _, by := range []string{cudaipc.Name, shm.Name} {
		for _, when := range []string{"between reads", "while it is read"} {
			t.Run(by+" "+when, func(t *testing.T) {
				w, driver := useGPUs(t)
				g := newGate()
				if when == "between reads" {
					close(g.pass)
				}
				set := [][2]string{driver, onGPU("cuda:0"), {"transfer.transports", by}, meetingPlace(t)}
				decode := startWith(t, configure(t, "decode", nil, set...), g.wrap)
				d := openEngine(t, decode)
				c := configure(t, "prefill", decode, set...)
				p := startProcess(t, "TestGPUProcess", append(w.Env(), gpuNode+"="+writeConfig(t, c))...)
				p.upTo("published")
				d.ingest("r")
				done := d.retrieving("r", "", 0)
				<-g.came
				if when == "between reads" {
					if got := <-done; got.err != nil || d.verify("r", "main") != 20 {
						t.Errorf("%v, %v", got.res, got.err)
					}
				}
				if err := p.cmd.Process.Signal(syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
				_ = p.cmd.Wait()
				if when != "between reads" {
					close(g.pass)
					if got := <-done; got.err == nil && d.verify("r", "main") != 20 {
						t.Errorf("%v", got.res)
					}
				}
				d.remove("r")
				awaitAllFree(t, decode)
				await(t, "imports to be closed", func(context.Context) error {
					if v := metric(t, decode, `kvferry_cuda_arenas{whose="imported"}`); v != 0 {
						return fmt.Errorf("%v are open", v)
					}
					return nil
				})
			})
		}
	}
}

// TestReaderOfGPUKilled: an owner keeps nothing for a reader that was killed, when
// it had read and while it did.
func TestReaderOfGPUKilled(t *testing.T) {
	for _, by := range []string{cudaipc.Name, shm.Name, tcp.Name} {
		for _, when := range []string{"reads", "has read"} {
			t.Run(by+", "+when, func(t *testing.T) {
				w, driver := useGPUs(t)
				set := [][2]string{driver, onGPU("cuda:0"), {"transfer.transports", by}, meetingPlace(t)}
				before := w.Counts().Live()
				prefill := startNode(t, "prefill", nil, set...)
				p := openEngine(t, prefill)
				p.ingest("r")
				p.write("r", 20)
				p.publish("r", true)
				metric(t, prefill, "kvferry_cuda_dead") // its connection stays
				files, live := openFiles(t), w.Counts().Live()
				if live <= before {
					t.Errorf("%d objects of the driver with an arena, %d without", live, before)
				}
				d := startProcess(t, "TestGPUProcess", append(w.Env(), gpuNode+"="+writeConfig(t, configure(t, "decode", prefill, set...)), gpuReads+"=1")...)
				d.upTo(when)
				if when == "reads" {
					d.proceed() // and is killed at whatever it does
				}
				d.kill()
				await(t, "nothing to be left of the reader", func(context.Context) error {
					for _, side := range []string{"us", "peers"} {
						if v := metric(t, prefill, fmt.Sprintf("kvferry_data_connections{by=%q,transport=%q}", side, by)); v != 0 {
							return fmt.Errorf("%v connections by %s", v, side)
						}
					}
					if now := w.Counts().Live(); now != live {
						return fmt.Errorf("%d objects of the driver, %d before", now, live)
					}
					if now := openFiles(t); now > files {
						return fmt.Errorf("%d files are open, %d before", now, files)
					}
					return nil
				})
				if got := p.verify("r", "main"); got != 20 {
					t.Errorf("the owner has %d tokens", got)
				}
			})
		}
	}
}
