package faults

import (
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/cuda/cudatest"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/localcluster"
	"github.com/kvferry/kvferry/rdma/rdmatest"
	"github.com/kvferry/kvferry/transfer/cudaipc"
	"github.com/kvferry/kvferry/transfer/rdmaread"
	"github.com/kvferry/kvferry/transfer/shm"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// onDevices are settings of nodes with their arenas on a device.
func onDevices(w *cudatest.World) []string {
	return []string{"arena.memory=cuda:0", "arena.cuda_library=" + w.Library(), "transfer.staging=64MiB"}
}

// hostTransports are those by which arenas in host memory are read.
func hostTransports() []string {
	return slices.DeleteFunc(config.Transports(), func(name string) bool { return name == cudaipc.Name })
}

// newGPUs makes an emulated driver with devices of one test alone. Of all that
// processes had of it nothing may be left when they have ended. Where there can be
// no driver the test is skipped.
func newGPUs(t *testing.T) *cudatest.World {
	t.Helper()
	w, err := cudatest.New(cudatest.Options{Memory: 1 << 30})
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		if c := w.Counts(); c.Live() > 0 || c.DeviceBytes > 0 {
			t.Errorf("%d objects and %d bytes of the driver are left: %+v", c.Live(), c.DeviceBytes, c.Processes)
		}
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

// TestReplayOnDevices replays the demo on nodes whose arenas are device memory, by
// each transport. Every byte is verified, all came by that transport, the devices
// were asked in batches, and with the nodes all goes.
func TestReplayOnDevices(t *testing.T) {
	t.Parallel()
	for _, transport := range []string{cudaipc.Name, shm.Name, tcp.Name, rdmaread.Name} {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			w := newGPUs(t)
			env := slices.Concat(w.Env(), []string{"KVFERRY_ARENA_CUDA_LIBRARY=" + w.Library()})
			o := localcluster.Options{
				Prefill: 1, Decode: 1,
				Set: append(onDevices(w), "arena.pages=1024", "arena.page_size=16", "arena.head_dim=64", "transfer.transports="+transport),
			}
			if transport == rdmaread.Name {
				f := newFabric(t)
				f.Set(rdmatest.Faults{})
				env = append(env, f.Env()...)
				o.SetPrefill, o.SetDecode = []string{"transfer.rdma.devices=" + left}, []string{"transfer.rdma.devices=" + right}
			}
			o.Env = env
			c := start(t, o)
			run := beginIn(t, env, testLimit, "", "replay", "../../../configs/traces/demo.jsonl", "--limit", "8", "--prefill", c.Sockets("prefill")[0], "--decode", c.Sockets("decode")[0], "-o", "json")
			code := run.code(t)
			r := reportOf(t, run)
			t.Logf("%d requests, %d bytes in %.1f s: %v", r.Requests, r.VerifiedBytes, r.ElapsedSeconds, r.BytesByTransport)
			if code != 0 || !r.OK || r.Ready != r.Requests || r.Requests == 0 || r.VerifiedBytes != r.ReadyBytes || r.WrongBytes != 0 || r.Early != 0 {
				t.Errorf("exit code %d\n%s%s", code, run.stdout.String(), run.stderr.String())
			}
			if by := r.BytesByTransport; len(by) != 1 || by[transport] == 0 {
				t.Errorf("bytes by transport: %v, want all by %s", by, transport)
			}
			for _, n := range c.Nodes() {
				awaitFree(t, n.Node, dial(t, n.Engine), patience)
			}
			// What engines write, what nodes move, and what engines look at, all together.
			pages, calls := r.VerifiedBytes/(16*1024), uint64(0)
			for name, n := range w.Counts().Calls {
				if strings.HasPrefix(name, "cuMemcpy") || strings.HasPrefix(name, "cuLaunchKernel") {
					calls += n
				}
			}
			t.Logf("%d copies and kernels were started for %d pages, which were written, moved, and looked at", calls, pages)
			if calls == 0 || calls > uint64(pages) {
				t.Errorf("%d copies and kernels were started for %d pages, each written, moved, and looked at: want batches", calls, pages)
			}
		})
	}
}
