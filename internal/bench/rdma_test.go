package bench

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/rdma/rdmatest"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rdmaread"
)

// world gives both processes two emulated devices.
func world(t *testing.T) *rdmatest.World {
	t.Helper()
	w := rdmatest.Use(t)
	for _, pair := range w.Env() {
		name, value, _ := strings.Cut(pair, "=")
		t.Setenv(name, value)
	}
	return w
}

// rdma is measured between two processes, each on a device of its own; where
// there is no ib_read_bw there is no ratio.
func TestRDMA(t *testing.T) {
	w := world(t)
	o := small(t)
	o.Transports, o.Devices, o.Contiguity = []string{rdmaread.Name}, []string{"double0", "double1"}, []float64{0}
	o.ChunkBytes = []int64{16 << 10, 64 << 10}
	o.Parts = []string{"submit", "pull"}
	t.Setenv("PATH", t.TempDir())
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Missing) != 1 || !strings.Contains(r.Missing[0], "limit of the pull by rdma: ib_read_bw is not installed") {
		t.Errorf("missing %q, want the limit alone", r.Missing)
	}
	if len(r.Rows) != 2 || len(r.Costs) != 1 {
		t.Fatalf("%d rows and %d costs: %+v", len(r.Rows), len(r.Costs), r)
	}
	for _, row := range r.Rows {
		if row.Transport != rdmaread.Name || row.Lanes < 2 || row.BytesPerSecond <= 0 || !(row.CrossingsPerChunk > 0) {
			t.Errorf("row %+v", row)
		}
	}
	if c := r.Costs[0]; c.AllocsPerPage > 0.01 {
		t.Errorf("a read allocates more for more pages: %+v", c)
	}
	if n := w.Counts(); n.QPs != 0 || n.Regions != 0 {
		t.Errorf("left behind: %+v", n)
	}
}

func TestRDMADevices(t *testing.T) {
	for name, tt := range map[string]struct {
		devices       []string
		reader, owner string
	}{
		"all":   {nil, "", ""},
		"one":   {[]string{"a"}, "a", "a"},
		"two":   {[]string{"a", "b:2"}, "a", "b:2"},
		"empty": {[]string{}, "", ""},
	} {
		s := setup{Devices: tt.devices}
		if reader, owner := strings.Join(s.readerDevices(), " "), strings.Join(s.ownerDevices(), " "); reader != tt.reader || owner != tt.owner {
			t.Errorf("%s: %q and %q, want %q and %q", name, reader, owner, tt.reader, tt.owner)
		}
	}
	if _, err := Run(t.Context(), Options{Devices: []string{"a", "b", "c"}}); err == nil {
		t.Error("three devices: measured")
	}
}

// There is one limit for one port of each side.
func TestReadBWNeedsOnePort(t *testing.T) {
	if _, err := findReadBW(rdmaPort{}, rdmaPort{"a", 1}, 2); err == nil || !strings.Contains(err.Error(), "--device") {
		t.Errorf("several ports: %v", err)
	}
	world(t)
	for name, tt := range map[string]struct {
		devices []string
		want    rdmaPort
	}{"all": {nil, rdmaPort{}}, "one": {[]string{"double1"}, rdmaPort{"double1", 1}}} {
		s, err := newSide("bench-reader", setup{ArenaBytes: 1 << 20, Transports: []string{rdmaread.Name}}, tt.devices)
		if err != nil {
			t.Fatal(err)
		}
		if have := s.rdmaPort(); have != tt.want {
			t.Errorf("%s: %+v, want %+v", name, have, tt.want)
		}
		s.close()
	}
}

// The limit is the size that is faster by its median, and no choice of rounds.
func TestReadBWLimit(t *testing.T) {
	row := &pulls{transport: rdmaread.Name}
	other := &pulls{transport: "tcp", limit: "iperf3"}
	b := &pullBench{readBW: &readBW{pairs: 2}, rows: []*pulls{row, other}}
	row.chunkBytes = 16 << 10
	b.readBWs = [][]float64{{9, 1, 1}, {1, 1, 1}, {2, 3, 4}}
	b.limitRDMA()
	if row.limit != "ib_read_bw -q 2 -o 16 -s 1048576" || !slices.Equal(row.limits, []float64{2, 3, 4}) || !slices.Equal(row.likes, []float64{9, 1, 1}) || other.limit != "iperf3" {
		t.Errorf("limits %+v, %+v", row, other)
	}
}

// A call is answered, hears of its end on either side, and leaves nothing, as
// goleak sees.
func TestCall(t *testing.T) {
	world(t)
	dir := t.TempDir()
	owner, reader := newRDMASide(t, "bench-owner", dir), newRDMASide(t, "bench-reader", dir)
	calls, err := startCallServer(t.Context(), dir, owner.rdma())
	if err != nil {
		t.Fatal(err)
	}
	peer := transfer.Peer{Life: owner.life, Descriptor: owner.rdma().Descriptor(), ArenaBytes: map[id.Rank]int64{benchRank: owner.arena.Size()}}
	link, err := reader.rdma().Open(t.Context(), peer)
	if err != nil {
		t.Fatal(err)
	}
	value, _ := id.SealValue(owner.life.Incarnation, 1)
	owner.seals.Store(0, value)
	if err := link.Read(t.Context(), []transfer.Seal{{Index: 0, Value: value}}, []transfer.Copy{{Rank: benchRank, Bytes: 4096}}); err != nil {
		t.Error(err)
	}

	// Garbage is not answered.
	if answer, _, err := dialCall(t.Context(), dir, reader.life, peer, []byte("garbage")); err == nil {
		t.Errorf("garbage is answered by %q", answer)
	}
	// A peer that ends the call is heard of.
	calls.close()
	if err := within(t.Context(), time.Minute, func() bool { return reader.rdma().Stats().Lanes == 0 }); err != nil || reader.rdma().Stats().Lanes != 0 {
		t.Errorf("lanes of a call that has ended: %+v, %v", reader.rdma().Stats(), err)
	}
	if n := owner.rdma().Stats().Accepted; n != 0 {
		t.Errorf("the owner keeps %d queue pairs", n)
	}
	if _, _, err := dialCall(t.Context(), dir, reader.life, peer, nil); err == nil {
		t.Error("nobody answered, and there is no error")
	}
	if err := link.Close(); err != nil {
		t.Error(err)
	}
}

func newRDMASide(t *testing.T, node id.Node, dir string) *side {
	t.Helper()
	s, err := newSide(node, setup{ArenaBytes: 1 << 20, Transports: []string{rdmaread.Name}, Rendezvous: dir}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.close)
	if s.rdma() == nil {
		t.Fatalf("no rdma: %s", s.refused[rdmaread.Name])
	}
	return s
}

func TestParseReadBW(t *testing.T) {
	for _, text := range []string{"1.0", "Device not recognized to implement inline feature. Disabling it\n-----\n1.000\n"} {
		if rate, err := parseReadBW([]byte(text)); err != nil || math.Abs(rate-125e6) > 1 {
			t.Errorf("%q: %v, %v", text, rate, err)
		}
	}
	for _, bad := range []string{"", "Couldn't connect to 127.0.0.1:18515", "0.0", "-1", "NaN"} {
		if _, err := parseReadBW([]byte(bad)); err == nil {
			t.Errorf("parsed %q", bad)
		}
	}
}

func TestListening(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1
   1: 0100007F:0050 0100007F:1F91 01 00000000:00000000 00:00000000 00000000     0        0 1 1
`
	for port, want := range map[uint64]bool{0x1f90: true, 0x50: false, 0x1f91: false, 0x90: false} {
		if have := listening(table, port); have != want {
			t.Errorf("port %#x: %v", port, have)
		}
	}
}

// stand is a program in the place of ib_read_bw.
func stand(t *testing.T, script string) *readBW {
	t.Helper()
	path := filepath.Join(t.TempDir(), "ib_read_bw")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o700); err != nil {
		t.Fatal(err)
	}
	return &readBW{path, rdmaPort{"a", 1}, rdmaPort{"b", 2}, 2}
}

// What ib_read_bw says when it fails is told, and it leaves no process.
func TestReadBWThatFails(t *testing.T) {
	if _, err := stand(t, "echo no device; exit 1").run(t.Context(), 65536); err == nil || !strings.Contains(err.Error(), "does not listen") {
		t.Errorf("a server that ends: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := stand(t, "exec sleep 60").run(ctx, 65536); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a server that does not listen: %v", err)
	}
}
