// Package layers keeps docs/architecture.md true: its test fails when a package
// imports one that it may not. Run it with -count=1: the test cache does not
// see what go list reads.
package layers

import (
	"bytes"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/kvferry/kvferry/"

// table lists every package, the ground first, with the packages of this
// module that it may import. Each of those must stand above it. It binds
// files that are not tests.
var table = []struct{ pkg, may string }{
	// 0
	{"internal/id", ""},

	// 1
	{"internal/double", ""},
	{"internal/page", "internal/id"},
	{"internal/memory", "internal/id"},
	{"rdma", "internal/id"},
	{"rdma/rdmatest", "internal/double internal/id rdma"},
	{"cuda/internal/driver", ""},
	{"cuda/internal/ptx", ""},
	{"cuda/cudatest", "internal/double cuda/internal/driver"},
	{"cuda", "internal/memory cuda/internal/driver cuda/internal/ptx"},
	{"internal/identity", "internal/id"},
	{"cluster", "internal/id internal/identity"},
	{"api/kvferrypb", "internal/id internal/page"},
	{"internal/config", "internal/id internal/page"},
	{"configs", ""},

	// 2
	{"manager", "internal/id internal/page"},
	{"transfer", "internal/id internal/page internal/memory"},
	{"api/wire", "internal/id internal/page"},
	{"internal/kv", "internal/id internal/page"},

	// 3
	{"transfer/transfertest", "internal/id internal/memory transfer"},
	{"transfer/tcp", "internal/id internal/identity internal/memory transfer"},
	{"transfer/rendezvous", "internal/id internal/memory transfer"},
	{"transfer/shm", "internal/id internal/memory transfer transfer/rendezvous"},
	{"transfer/cudaipc", "internal/id internal/memory cuda transfer transfer/rendezvous"},
	{"transfer/rdmaread", "internal/id internal/memory rdma transfer"},
	{"publish", "internal/id internal/page api/wire manager"},

	// 4
	{"internal/node", "internal/id internal/identity internal/page internal/kv internal/memory internal/config rdma cuda cluster api/kvferrypb " +
		"manager transfer api/wire transfer/tcp transfer/shm transfer/cudaipc transfer/rdmaread publish"},
	{"api/client", "internal/id internal/page internal/memory cuda api/kvferrypb"},
	{"internal/localcluster", "internal/id internal/identity internal/memory internal/config configs api/client api/kvferrypb"},
	{"internal/replay", "internal/id internal/page internal/memory cuda api/client api/kvferrypb"},
	{"internal/bench", "internal/id internal/page internal/kv internal/memory transfer transfer/tcp transfer/shm transfer/cudaipc transfer/rdmaread " +
		"api/client api/kvferrypb api/wire manager cluster publish"},

	// 5
	{"cmd/kvferry", "internal/id internal/identity internal/page internal/config configs rdma cuda api/kvferrypb api/wire api/client internal/node internal/localcluster internal/replay internal/bench"},

	// tests alone
	{"internal/localcluster/faults", ""},
	{"internal/node/pairtest", ""},
	{"internal/layers", ""},
}

// fences lists the outside packages, with all below them, that only some of
// ours may import.
var fences = map[string]string{
	"C":   "rdma cuda cuda/internal/driver",
	"net": "internal/node cluster api/client internal/localcluster internal/bench transfer/tcp transfer/rendezvous",
	// Addresses as values are for everybody.
	"net/netip": "*",
	// Who a peer is has one rule.
	"crypto/tls":                          "internal/identity cluster transfer/tcp internal/node",
	"testing":                             "transfer/transfertest rdma/rdmatest cuda/cudatest",
	"github.com/goccy/go-yaml":            "internal/config cmd/kvferry",
	"github.com/hashicorp/memberlist":     "cluster",
	"github.com/prometheus/client_golang": "internal/node",
	"github.com/spf13/cobra":              "cmd/kvferry",
	"github.com/ugorji/go/codec":          "api/wire",
	"google.golang.org/grpc":              "api/kvferrypb api/client internal/node",
	"gorgonia.org/cu":                     "cuda cuda/internal/driver",
}

// fence returns the narrowest fence around an outside package.
func fence(pkg string) (owners string, ok bool) {
	for at := pkg; at != ""; {
		if owners, ok = fences[at]; ok {
			return owners, true
		}
		i := strings.LastIndexByte(at, '/')
		at = at[:max(i, 0)]
	}
	return "", false
}

func TestImports(t *testing.T) {
	may := make(map[string][]string)
	for _, row := range table {
		for to := range strings.FieldsSeq(row.may) {
			if _, above := may[to]; !above {
				t.Errorf("table: %s imports %s, which does not stand above it", row.pkg, to)
			}
		}
		may[row.pkg] = strings.Fields(row.may)
	}
	// Every tag is set so that no file escapes; listing needs no C headers.
	list := exec.CommandContext(t.Context(), "go", "list", "-e", "-tags=cuda,rdma", "-f={{.ImportPath}} {{join .Imports \" \"}}", module+"...")
	var stderr bytes.Buffer
	list.Stderr = &stderr
	out, err := list.Output()
	if err != nil {
		t.Fatalf("list packages: %v\n%s", err, &stderr)
	}
	packages := 0
	for line := range strings.Lines(string(out)) {
		names := strings.Fields(line)
		from := strings.TrimPrefix(names[0], module)
		packages++
		if _, known := may[from]; !known {
			t.Errorf("%s has no row: add it here and to docs/architecture.md", from)
		}
		for _, name := range names[1:] {
			to, ours := strings.CutPrefix(name, module)
			if ours && !slices.Contains(may[from], to) {
				t.Errorf("%s must not import %s", from, to)
			}
			if owners, fenced := fence(name); !ours && fenced && owners != "*" && !slices.Contains(strings.Fields(owners), from) {
				t.Errorf("%s must not import %s: only %s may", from, name, owners)
			}
		}
	}
	if packages < 10 {
		t.Errorf("only %d packages were listed:\n%s", packages, out)
	}
}

func TestFence(t *testing.T) {
	for pkg, want := range map[string]string{
		"google.golang.org/grpc/codes": fences["google.golang.org/grpc"],
		"google.golang.org/grpcx":      "",
		"net":                          fences["net"],
		"net/http/pprof":               fences["net"],
		"net/netip":                    "*",
		"testing/synctest":             fences["testing"],
	} {
		if got, ok := fence(pkg); got != want || ok != (want != "") {
			t.Errorf("fence(%q) = %q, %v; want %q", pkg, got, ok, want)
		}
	}
}
