package config

import (
	"bytes"
	"encoding/base64"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/configs"
	"github.com/kvferry/kvferry/internal/page"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// minimal is the least that is valid.
const minimal = `
node: {name: n}
arena: {model: m, pages: 64, page_size: 16, layers: 2, heads: 1, head_dim: 64}
`

// load parses and validates a document.
func load(t *testing.T, document string) *Config {
	t.Helper()
	c, err := Parse("test.yaml", []byte(document))
	if err == nil {
		err = c.Validate()
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestBadDocumentsSayWhereAndWhatInstead(t *testing.T) {
	files, err := filepath.Glob("testdata/bad/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no documents: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".yaml"), func(t *testing.T) {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			c, err := Parse(filepath.Base(file), b)
			if err == nil {
				err = c.Validate()
			}
			if err == nil {
				t.Fatal("accepted")
			}
			if _, ok := errors.AsType[*Error](err); !ok {
				t.Errorf("%T is not an *Error", err)
			}
			golden := strings.TrimSuffix(file, ".yaml") + ".golden"
			if *update {
				if err := os.WriteFile(golden, []byte(err.Error()+"\n"), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, readErr := os.ReadFile(golden)
			if readErr != nil {
				t.Fatal(readErr)
			}
			if got := err.Error() + "\n"; got != string(want) {
				t.Errorf("got:\n%s\nwant:\n%s", got, want)
			}
		})
	}
}

// Whatever layer it is in, every mistake is reported, and once.
func TestLoadReportsAllLayers(t *testing.T) {
	t.Setenv("KVFERRY_ARENA_HEADS", "many")
	t.Setenv("KVFERRY_ARENA_NOSUCH", "1")
	_, err := Load("testdata/bad/several.yaml", "arena.dtype=int4", "nosuch.key=1", "arena.layers")
	for _, want := range []string{
		"several.yaml:3:3: ", "several.yaml:6:10: arena.pages", "several.yaml:7:11: arena.layers", "several.yaml:10:3: ", "several.yaml:11:9: timers",
		"several.yaml:12:15: ports.http", "several.yaml:12:30: ports.gossip", "KVFERRY_ARENA_HEADS: ", "KVFERRY_ARENA_NOSUCH: ",
		"--set arena.dtype: ", "--set nosuch.key: ", "--set arena.layers: want KEY=VALUE", "arena.page_size: is missing",
	} {
		if strings.Count(fmt.Sprint(err), want) != 1 {
			t.Errorf("error does not have %q once:\n%v", want, err)
		}
	}
	if n := len(strings.Split(fmt.Sprint(err), "is missing")) - 1; n != 1 {
		t.Errorf("%d keys are missing, want page_size alone:\n%v", n, err)
	}
}

func TestGoodDocuments(t *testing.T) {
	for name, tt := range map[string]struct {
		document string
		check    func(c *Config) bool
	}{
		"minimal": {minimal, func(c *Config) bool {
			return c.Ports == Ports{7900, 7901, 7902, 7903} && c.Timers.Hold == 30*time.Second && c.Node.Group == "n" &&
				c.Node.Advertise == netip.MustParseAddr("127.0.0.1") && c.Telemetry.Bind == c.Node.Bind && c.Arena.WorldSize == 1
		}},
		"flow style, quotes, comments": {
			"{node: {\"name\": 'n'}, # a comment\n arena: {model: \"m\", pages: 64, page_size: 16, layers: 2, heads: 1, head_dim: 64}}",
			func(c *Config) bool { return c.Node.Name == "n" && c.Arena.Layers == 2 },
		},
		"name that looks like a number": {"node: {name: 007}" + minimal[len("\nnode: {name: n}"):], func(c *Config) bool {
			return c.Node.Name == "007"
		}},
		"group with all keys commented out": {minimal + "timers:\n  # hold: 1s\n", func(c *Config) bool {
			return c.Timers.Hold == 30*time.Second
		}},
		"pages as a size": {strings.Replace(minimal, "pages: 64", "pages: 1MiB", 1), func(c *Config) bool {
			return c.Geometry().Layout.Pages == 128 // of 2 x 2 x 16 x 64 x 2 bytes
		}},
		"no host tier": {minimal, func(c *Config) bool {
			_, ok := c.HostLayout()
			return !ok && c.Arena.Evict == "recent"
		}},
		"host pages": {strings.Replace(minimal, "pages: 64", "pages: 64, host_pages: 128", 1), func(c *Config) bool {
			l, ok := c.HostLayout()
			return ok && l.Pages == 128 && l.PageBytes() == c.Geometry().Layout.PageBytes() && c.Geometry().Layout.Pages == 64
		}},
		"host pages as a size": {strings.Replace(minimal, "pages: 64", "pages: 64, host_pages: 1MiB, evict: never", 1), func(c *Config) bool {
			l, ok := c.HostLayout()
			return ok && l.Pages == 128 && c.Arena.Evict == "never"
		}},
		"pages as a size that is no multiple": {strings.Replace(minimal, "pages: 64", "pages: 17KB", 1), func(c *Config) bool {
			return c.Geometry().Layout.Pages == 2
		}},
		"ranks in the middle of an engine": {strings.Replace(minimal, "pages: 64", "pages: 64, ranks: [2, 3], world_size: 8", 1), func(c *Config) bool {
			return c.Geometry().WorldSize == 8 && slices.Equal(c.Arena.Ranks, []int{2, 3})
		}},
		"IPv6 seeds": {minimal + "cluster:\n  join: ['[fd00::7]:7900', node-1.example:7900]", func(c *Config) bool {
			return len(c.Cluster.Join) == 2
		}},
		"transports": {minimal, func(c *Config) bool {
			r := RDMA{GIDIndex: -1, Timeout: 14, RetryCount: 6}
			return slices.Equal(c.Transfer.Transports, []string{"cudaipc", "shm", "rdma", "tcp"}) && reflect.DeepEqual(c.Transfer.RDMA, r)
		}},
		"RDMA": {
			minimal + "transfer: {require: rdma, rdma: {devices: ['mlx5_0:1', 'mlx5_0:2', mlx5_1], mtu: 1024, retry_count: 1, gid_index: 0}}",
			func(c *Config) bool {
				r := RDMA{Devices: []string{"mlx5_0:1", "mlx5_0:2", "mlx5_1"}, MTU: 1024, Timeout: 14, RetryCount: 1}
				return reflect.DeepEqual(c.Transfer.RDMA, r)
			},
		},
		"host memory": {minimal, func(c *Config) bool {
			return c.Arena.Memory == HostMemory && c.Arena.Devices() == nil && c.Arena.CUDALibrary == "" && c.Transfer.Staging == 256<<20
		}},
		"memory of the engine": {strings.Replace(minimal, "pages: 64", "pages: 64, memory: engine", 1), func(c *Config) bool {
			return c.Arena.Memory == EngineMemory && c.Arena.Devices() == nil && c.Arena.Allocate == NodeAllocates
		}},
		"pages that the engine gives": {strings.Replace(minimal, "pages: 64", "pages: 64, memory: engine, allocate: engine", 1), func(c *Config) bool {
			return c.Arena.Allocate == EngineAllocates
		}},
		"a device": {
			strings.Replace(minimal, "pages: 64", "pages: 64, memory: cuda:0, cuda_library: /opt/libcuda.so.1", 1) + "transfer: {staging: 1GiB}",
			func(c *Config) bool {
				return slices.Equal(c.Arena.Devices(), []string{"0"}) && c.Arena.CUDALibrary == "/opt/libcuda.so.1" && c.Transfer.Staging == 1<<30
			},
		},
		"a device by its UUID": {
			strings.Replace(minimal, "pages: 64", "pages: 64, memory: cuda:GPU-01234567-89ab-cdef-0123-456789ABCDEF", 1),
			func(c *Config) bool {
				return slices.Equal(c.Arena.Devices(), []string{"GPU-01234567-89ab-cdef-0123-456789ABCDEF"})
			},
		},
		"a device for each rank": {
			strings.Replace(minimal, "pages: 64", `pages: 64, ranks: [2, 3], memory: "cuda:1, cuda:12"`, 1),
			func(c *Config) bool { return slices.Equal(c.Arena.Devices(), []string{"1", "12"}) },
		},
		"one device for all ranks": {
			strings.Replace(minimal, "pages: 64", "pages: 64, ranks: [0, 1, 2], memory: cuda:3", 1),
			func(c *Config) bool { return slices.Equal(c.Arena.Devices(), []string{"3", "3", "3"}) },
		},
		"any port": {minimal + "ports: {gossip: 0, peer: 0, data: 0, http: 0}", func(c *Config) bool {
			return c.Ports == Ports{}
		}},
		"certificates, all peers": {minimal + "security: {certificate: a.pem, key: a.key, ca: ca.pem}", func(c *Config) bool {
			return c.Security.On() && c.Security.CA == "ca.pem" && len(c.Security.Peers) == 0
		}},
		"certificates, some peers": {
			minimal + "security: {certificate: a.pem, key: a.key, ca: ca.pem, peers: ['prefill-*', 'decode-[0-9]', 'x?', 'a.b_C-1', '*']}",
			func(c *Config) bool { return len(c.Security.Peers) == 5 },
		},
		"no certificates": {minimal + "security: {certificate: ''}", func(c *Config) bool { return !c.Security.On() }},
		"time to drain":   {minimal + "timers: {drain: 2m}", func(c *Config) bool { return c.Timers.Drain == 2*time.Minute }},
		"all addresses": {strings.Replace(minimal, "{name: n}", "{name: n, bind: '::', advertise: fd00::7}", 1), func(c *Config) bool {
			return c.Node.Bind.IsUnspecified() && c.Node.Advertise == netip.MustParseAddr("fd00::7")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			if c := load(t, tt.document); !tt.check(c) {
				t.Errorf("got %+v", c)
			}
		})
	}
}

func TestExamplesAreValid(t *testing.T) {
	want := page.Layout{Order: page.NHD, DType: page.BF16, Layers: 2, Pages: 1024, PageSize: 128, Heads: 2, HeadDim: 64}
	configs := map[string]*Config{}
	for _, name := range []string{"prefill", "decode", "local"} {
		c, err := Load("../../configs/" + name + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		if got := c.Geometry().Layout; got != want || got.TokenBytes() != 1024 {
			t.Errorf("%s: layout %+v, want %+v", name, got, want)
		}
		configs[name] = c
	}
	p, d := configs["prefill"], configs["decode"]
	if diff := p.Geometry().Differences(d.Geometry()); len(diff) != 0 {
		t.Errorf("prefill and decode differ: %v", diff)
	}
	if p.Node.Name == d.Node.Name || p.Cluster.Name != d.Cluster.Name {
		t.Error("prefill and decode need two names and one cluster")
	}
	for _, port := range []int{p.Ports.Gossip, p.Ports.Peer, p.Ports.Data, p.Ports.HTTP} {
		if slices.Contains([]int{d.Ports.Gossip, d.Ports.Peer, d.Ports.Data, d.Ports.HTTP}, port) {
			t.Errorf("both use port %d", port)
		}
	}
	if want := fmt.Sprintf("127.0.0.1:%d", p.Ports.Gossip); !slices.Contains(d.Cluster.Join, want) {
		t.Errorf("decode joins %v, want %s", d.Cluster.Join, want)
	}
}

// The configuration to start from is valid as it stands, and so is every line
// that it proposes.
func TestStarterIsValid(t *testing.T) {
	proposal := regexp.MustCompile(`(?m)^( *)# ( *[a-z_]+:.*)$`)
	for _, role := range []string{"prefill", "decode", "both"} {
		starter := string(configs.Node(role))
		c := load(t, starter)
		if c.Node.Role != role || c.Node.Bind.IsUnspecified() || c.Security.On() || len(c.Cluster.Keyring) > 0 {
			t.Errorf("as it stands: %+v", c)
		}
		if n := len(proposal.FindAllString(starter, -1)); n < 20 {
			t.Fatalf("%d proposals", n)
		}
		key := base64.StdEncoding.EncodeToString(make([]byte, KeyBytes))
		c = load(t, strings.Replace(proposal.ReplaceAllString(starter, "$1$2"), "[KEY]", "["+key+"]", 1))
		d := Default()
		if c.Node.Role != role || c.Ports != d.Ports || c.Timers != d.Timers || c.Cluster.Name != d.Cluster.Name || !slices.Equal(c.Arena.Ranks, d.Arena.Ranks) ||
			c.Arena.DType != d.Arena.DType || c.Arena.Layout != d.Arena.Layout {
			t.Errorf("%s: what it proposes for a default is none: %+v", role, c)
		}
		if !c.Security.On() || len(c.Security.Peers) == 0 || len(c.Cluster.Keyring) != 1 || len(c.Cluster.Join) == 0 || c.Node.StateDir == "" || c.Node.Advertise == c.Node.Bind {
			t.Errorf("%s: it does not propose all that a cluster wants: %+v", role, c)
		}
	}
}

func TestDefaultsStandAsDocumented(t *testing.T) {
	c := Default()
	for key, want := range map[string]any{
		"timers.hold": c.Timers.Hold == 30*time.Second, "timers.lease": c.Timers.Lease == 20*time.Second,
		"timers.lease_renew": c.Timers.LeaseRenew == 5*time.Second, "timers.stall": c.Timers.Stall == 2*time.Second,
		"timers.attempts": c.Timers.Attempts == 3, "timers.max_hold": c.Timers.MaxHold == 900*time.Second,
		"timers.drain": c.Timers.Drain == 10*time.Second, "timers.session_grace": c.Timers.SessionGrace == 10*time.Second, "timers.tombstone": c.Timers.Tombstone == 600*time.Second,
	} {
		if want != true {
			t.Errorf("%s is not what the documents say", key)
		}
	}
}

func TestEnvironmentAndFlagsWin(t *testing.T) {
	t.Setenv("KVFERRY_ARENA_PAGES", "128")
	t.Setenv("KVFERRY_TIMERS_LEASE_RENEW", "1s")
	t.Setenv("KVFERRY_CLUSTER_JOIN", "10.0.0.1:7900, 10.0.0.2:7900")
	t.Setenv("KVFERRY_TRANSFER_LIMITS_IN_FLIGHT", "7")
	t.Setenv("KVFERRY_SOCKET", "/of/the/command/line")
	t.Setenv("KVFERRY_SECURITY_CERTIFICATE", "/of/env.pem")
	t.Setenv("KVFERRY_SECURITY_KEY", "/of/env.key")
	t.Setenv("KVFERRY_SECURITY_PEERS", "prefill-*, decode-*")
	t.Setenv("KVFERRY_TIMERS_DRAIN", "1m")
	path := filepath.Join(t.TempDir(), "a.yaml")
	if err := os.WriteFile(path, []byte(minimal), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := Load(path, "arena.pages=256", "node.role=decode", "cluster.preset=fast", "security.ca=/of/flag.pem", "timers.drain=3s")
	if err != nil {
		t.Fatal(err)
	}
	if c.Arena.Pages.Count != 256 || c.Timers.LeaseRenew != time.Second || c.Transfer.Limits.InFlight != 7 || c.Node.Role != "decode" ||
		!slices.Equal(c.Cluster.Join, []string{"10.0.0.1:7900", "10.0.0.2:7900"}) || c.Timers.Drain != 3*time.Second {
		t.Errorf("got %+v", c)
	}
	if s := c.Security; s.Certificate != "/of/env.pem" || s.Key != "/of/env.key" || s.CA != "/of/flag.pem" || !slices.Equal(s.Peers, []string{"prefill-*", "decode-*"}) {
		t.Errorf("got %+v", s)
	}
	if c, err = Load(path, "cluster.join=", "security.ca=x"); err != nil || len(c.Cluster.Join) != 0 {
		t.Errorf("an empty list: got %v, %v", c, err)
	}
}

func TestBadOverridesNameTheirOrigin(t *testing.T) {
	for name, tt := range map[string]struct {
		env  string
		sets []string
		want string
	}{
		"variable with a bad value":     {env: "KVFERRY_TIMERS_HOLD=soon", want: `KVFERRY_TIMERS_HOLD: timers.hold: "soon" is not a duration; want a number and a unit, such as 30s, 500ms, or 5m`},
		"variable out of range":         {env: "KVFERRY_ARENA_LAYERS=-1", want: `KVFERRY_ARENA_LAYERS: arena.layers: -1 is not in 1 to 1024`},
		"variable that is no key":       {env: "KVFERRY_PORTS_GOSIP=1", want: `KVFERRY_PORTS_GOSIP: unknown variable; known are KVFERRY_PORTS_DATA, KVFERRY_PORTS_GOSSIP, KVFERRY_PORTS_HTTP, KVFERRY_PORTS_PEER`},
		"flag with a bad value":         {sets: []string{"ports.http=http"}, want: `--set ports.http: "http" is not a whole number`},
		"flag out of range":             {sets: []string{"ports.http=70000"}, want: `--set ports.http: 70000 is not a port; want 1 to 65535, or 0 for any free one`},
		"flag that is no key":           {sets: []string{"ports.https=1"}, want: `--set ports.https: unknown key "https" in ports; known are gossip, peer, data, http`},
		"flag that is a group":          {sets: []string{"ports=1"}, want: `--set ports: ports is a group; set one of its keys: gossip, peer, data, http`},
		"flag below a key":              {sets: []string{"ports.http.x=1"}, want: `--set ports.http.x: ports.http has no keys below it`},
		"flag without a value":          {sets: []string{"ports.http"}, want: `--set ports.http: want KEY=VALUE, such as arena.pages=1024`},
		"flag with too many elements":   {sets: []string{"cluster.join=" + strings.Repeat("a:1,", 64) + "a:1"}, want: `--set cluster.join: has 65 elements, want at most 64`},
		"certificate alone":             {env: "KVFERRY_SECURITY_CERTIFICATE=a.pem", sets: []string{"security.ca=ca.pem"}, want: `security.key: is missing; want certificate, key, and ca, or none of them`},
		"peers nobody proves":           {env: "KVFERRY_SECURITY_PEERS=a", want: `KVFERRY_SECURITY_PEERS: security.peers: needs security.certificate, key, and ca: without them nobody's name is proved`},
		"pattern that matches nobody":   {sets: []string{"security.peers=a b"}, want: "--set security.peers: needs security.certificate, key, and ca: without them nobody's name is proved\n--set security.peers: \"a b\" is no pattern of nodes' names; want names, in which * stands for any characters"},
		"security key that is no key":   {env: "KVFERRY_SECURITY_CERT=a.pem", want: `KVFERRY_SECURITY_CERT: unknown variable; known are KVFERRY_SECURITY_CA, KVFERRY_SECURITY_CERTIFICATE, KVFERRY_SECURITY_KEY, KVFERRY_SECURITY_PEERS`},
		"retries for ever":              {env: "KVFERRY_TRANSFER_RDMA_RETRY_COUNT=7", want: `KVFERRY_TRANSFER_RDMA_RETRY_COUNT: transfer.rdma.retry_count: 7 tries for ever on some devices, also a peer that is gone; want 1 to 6`},
		"port of a device, and all":     {sets: []string{"transfer.rdma.devices=mlx5_0:1,mlx5_0"}, want: `--set transfer.rdma.devices: mlx5_0 names what mlx5_0:1 names, too`},
		"devices for too few ranks":     {sets: []string{"arena.memory=cuda:0,cuda:1,cuda:2", "arena.ranks=0,1"}, want: `--set arena.memory: names 3 devices for the 2 ranks of arena.ranks; want as many, or one for all`},
		"pages of the node's memory":    {sets: []string{"arena.allocate=engine"}, want: `--set arena.allocate: engine needs arena.memory: engine; where the node has the memory it gives the pages to requests`},
		"host tier of the engine":       {sets: []string{"arena.allocate=engine", "arena.memory=engine", "arena.host_pages=64"}, want: `--set arena.host_pages: 64 with arena.allocate: engine; want none: an engine that chooses its pages keeps its own host tier`},
		"nobody allocates":              {sets: []string{"arena.allocate=nobody"}, want: `--set arena.allocate: unknown "nobody"; want node, engine`},
		"device of another kind":        {env: "KVFERRY_ARENA_MEMORY=gpu", want: `KVFERRY_ARENA_MEMORY: arena.memory: unknown "gpu"; want host, engine, or devices: cuda:N or cuda:GPU-UUID (nvidia-smi -L), for each local rank one, as in cuda:0,cuda:1, or one for all`},
		"no time to drain":              {env: "KVFERRY_TIMERS_DRAIN=-1s", want: `KVFERRY_TIMERS_DRAIN: timers.drain: -1s is not in 1ns to 24h0m0s`},
		"private key for its path":      {sets: []string{"security.certificate=a", "security.ca=b", "security.key=-----BEGIN PRIVATE KEY-----"}, want: `--set security.key: is PEM itself; want the path of a file that holds it`},
		"more of it":                    {env: "KVFERRY_SECURITY_KEY=-----BEGIN PRIVATE KEY-----\nc2Vjcm\n", want: `KVFERRY_SECURITY_KEY: security.key: is PEM itself; want the path of a file that holds it`},
		"two lines":                     {sets: []string{"arena.model=a\nb"}, want: `--set arena.model: "a\nb" has what cannot be printed`},
		"what a terminal obeys":         {env: "KVFERRY_NODE_STATE_DIR=a\x1b[31m", want: `KVFERRY_NODE_STATE_DIR: node.state_dir: "a\x1b[31m" has what cannot be printed`},
		"no text":                       {sets: []string{"node.socket=\xff"}, want: `--set node.socket: "\xff" has what cannot be printed`},
		"id of a key for the key":       {sets: []string{"cluster.keyring=ba773285f758e374"}, want: `--set cluster.keyring: is the id of a key; want the key itself, 32 bytes in base64`},
		"secret in a flag is not shown": {sets: []string{"cluster.keyring=hunter2"}, want: `--set cluster.keyring: key is not base64; make one with: head -c 32 /dev/urandom | base64`},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "a.yaml")
			if err := os.WriteFile(path, []byte(minimal), 0o600); err != nil {
				t.Fatal(err)
			}
			if name, value, ok := strings.Cut(tt.env, "="); ok {
				t.Setenv(name, value)
			}
			_, err := Load(path, tt.sets...)
			if err == nil || err.Error() != tt.want {
				t.Errorf("got  %v\nwant %s", err, tt.want)
			}
		})
	}
}

func TestLoadWithoutAFile(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", "/run/user/7")
	c, err := Load("", "node.name=n", "arena.model=m", "arena.pages=64", "arena.page_size=16", "arena.layers=1", "arena.heads=1", "arena.head_dim=8")
	if err != nil {
		t.Fatal(err)
	}
	if want := "/run/user/7/kvferry/n.sock"; c.Node.Socket != want {
		t.Errorf("socket %s, want %s", c.Node.Socket, want)
	}
	t.Setenv("XDG_RUNTIME_DIR", "")
	c.Node.Socket = ""
	if err := c.Validate(); err != nil || c.Node.Socket != "/run/kvferry/n.sock" {
		t.Errorf("socket %s, %v", c.Node.Socket, err)
	}
	if _, err := Load(filepath.Join(t.TempDir(), "none.yaml")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want that it does not exist", err)
	}
}

func TestNameDefaultsToTheHost(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Skipf("no host name: %v", err)
	}
	c, err := Parse("", []byte(strings.Replace(minimal, "node: {name: n}", "", 1)))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	if c.Node.Name != host {
		t.Errorf("name %q, want %q", c.Node.Name, host)
	}
}

// Every key can be set, stands in Marshal's document, and has a variable of its own.
func TestEveryKeyIsReachable(t *testing.T) {
	values := map[string]string{
		"node.bind": "192.0.2.1", "node.advertise": "192.0.2.2", "telemetry.bind": "127.0.0.1", "arena.ranks": "0,1", "arena.world_size": "4",
		"arena.heads": "2", "arena.kv_heads": "8", "arena.qo_heads": "32",
		"arena.pages": "3GiB", "arena.host_pages": "7GiB", "arena.evict": "pages", "node.role": "decode", "arena.memory": "engine", "arena.allocate": "node", "arena.cuda_library": "/opt/libcuda.so.1", "arena.huge_pages": "never", "arena.dtype": "fp8_e4m3", "arena.layout": "HND",
		"transfer.transports": "tcp", "transfer.require": "tcp", "transfer.verify": "page", "transfer.lanes": "5", "transfer.workers": "3", "transfer.rendezvous": "/x", "transfer.staging": "16MiB",
		"transfer.limits.rate": "1MB", "transfer.limits.bytes": "9MiB", "transfer.limits.slice": "2MiB", "cluster.join": "a:1", "cluster.preset": "fast", "security.peers": "a-*,b",
		"transfer.rdma.devices": "mlx5_0:1,mlx5_0:2,mlx5_1", "transfer.rdma.gid_index": "3", "transfer.rdma.traffic_class": "106", "transfer.rdma.service_level": "3",
		"transfer.rdma.mtu": "4096", "transfer.rdma.timeout": "16", "transfer.rdma.retry_count": "5", "transfer.rdma.reads": "8", "transfer.rdma.queue_pairs": "4",
		"transfer.rdma.library": "/opt/lib/libibverbs.so.1",
		"cluster.keyring":       "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=", "timers.attempts": "5",
		"timers.lease_renew": "2s", "timers.backoff_min": "1s", "transfer.limits.dial": "1m1s", "transfer.limits.base": "1m1s",
	}
	var c Config
	variables := map[string]bool{}
	for i, key := range Keys() {
		value, ok := values[key]
		switch {
		case ok:
		case strings.HasPrefix(key, "timers."):
			value = "7s"
		case strings.HasPrefix(key, "ports."), strings.HasPrefix(key, "arena."), key == "transfer.limits.in_flight", key == "transfer.limits.waiting":
			value = fmt.Sprint(1000 + i)
			if key != "arena.model" && key != "arena.revision" {
				value = fmt.Sprint(100 + i)
			}
		default:
			value = "x"
		}
		if variables[variable(key)] {
			t.Errorf("two keys have the variable %s", variable(key))
		}
		variables[variable(key)] = true
		before, err := c.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.SetEnviron([]string{variable(key) + "=" + value}); err != nil {
			t.Fatal(err)
		}
		after, err := c.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Equal(before, after) {
			t.Errorf("%s = %s does not show in\n%s", key, value, after)
		}
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	roundTrip(t, &c)
}

// roundTrip checks that a configuration survives its document.
func roundTrip(t *testing.T, c *Config) {
	t.Helper()
	b, err := c.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	again, err := Parse("again.yaml", b)
	if err != nil {
		t.Fatalf("%v\n%s", err, b)
	}
	plain := func(c *Config) Config {
		p := *c
		p.origins = nil
		if len(p.Cluster.Join) == 0 {
			p.Cluster.Join = nil
		}
		if len(p.Cluster.Keyring) == 0 {
			p.Cluster.Keyring = nil
		}
		if len(p.Security.Peers) == 0 {
			p.Security.Peers = nil
		}
		if len(p.Transfer.RDMA.Devices) == 0 {
			p.Transfer.RDMA.Devices = nil
		}
		return p
	}
	if got, want := plain(again), plain(c); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v\nin\n%s", got, want, b)
	}
}

func TestKeysDoNotPrint(t *testing.T) {
	c := load(t, minimal+"cluster: {keyring: [c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2U=]}")
	for _, format := range []string{"%v", "%+v", "%#v", "%s", "%x", "%q"} {
		text := fmt.Sprintf(format, *c)
		if strings.Contains(text, "secret") || strings.Contains(text, "c2Vj") || strings.Contains(text, "736563") || strings.Contains(text, "0x73, 0x65") {
			t.Errorf("%s shows the key: %s", format, text)
		}
	}
	if len(c.Cluster.Keyring[0]) != KeyBytes {
		t.Errorf("key has %d bytes", len(c.Cluster.Keyring[0]))
	}
	roundTrip(t, c)

	err := c.Set("node.role", "x")
	if err == nil {
		err = c.Validate()
	}
	_, bad := Parse("a.yaml", []byte("cluster: {keyring: [c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2U=], x: 1}"))
	for _, err := range []error{err, bad} {
		if err == nil || strings.Contains(err.Error(), "c2Vj") {
			t.Errorf("got %v, want an error without the key", err)
		}
	}
}

// What is shown holds everything but the keys, and nobody can take it for them.
func TestRedactedShowsIDsForKeys(t *testing.T) {
	const a, b = "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2U=", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="
	c := load(t, minimal+"cluster: {keyring: ["+a+", "+b+"]}\nsecurity: {certificate: a.pem, key: a.key, ca: ca.pem, peers: ['b-*']}")
	shown, err := c.Redacted()
	if err != nil {
		t.Fatal(err)
	}
	whole, err := c.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	want := string(whole)
	for i, text := range []string{a, b} {
		want = strings.Replace(want, "- "+text+"\n", "- \""+c.Cluster.Keyring[i].ID()+"\"\n", 1)
	}
	if got := string(shown); got != want || strings.Contains(got, a) || strings.Contains(got, b) {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if _, err := Parse("shown.yaml", shown); err == nil || !strings.Contains(err.Error(), "id of a key") {
		t.Errorf("parse what was shown: %v, want that an id is no key", err)
	}
	c = load(t, minimal)
	shown, err = c.Redacted()
	if err != nil {
		t.Fatal(err)
	}
	again, err := Parse("shown.yaml", shown)
	if err != nil || again.Validate() != nil {
		t.Errorf("without a keyring what is shown is a configuration: %v\n%s", err, shown)
	}
}

// Members compare their rings by these ids: they are part of the protocol.
func TestKeyIDIsFixed(t *testing.T) {
	counted := make(Key, KeyBytes)
	for i := range counted {
		counted[i] = byte(i)
	}
	for want, k := range map[string]Key{"ba773285f758e374": make(Key, KeyBytes), "5c8ed05f07ec7e31": counted} {
		if got := k.ID(); got != want {
			t.Errorf("id %s, want %s", got, want)
		}
	}
}

func TestSize(t *testing.T) {
	for text, want := range map[string]Size{
		"0": 0, "1": 1, "1024": 1024, "1KiB": 1024, "1kib": 1024, "2 GiB": 2 << 30, "3TiB": 3 << 40, "10MB": 10_000_000, "5GB": 5e9,
		"7B": 7, "8388607TiB": 8388607 << 40,
	} {
		var s Size
		if err := s.UnmarshalText([]byte(text)); err != nil || s != want {
			t.Errorf("%q = %d, %v; want %d", text, s, err, want)
		}
		var again Size
		if err := again.UnmarshalText([]byte(s.String())); err != nil || again != s {
			t.Errorf("%q prints as %q, which reads as %d, %v", text, s, again, err)
		}
	}
	for _, text := range []string{"", " ", "GiB", "-1", "+1", "1.5GiB", "1e9", "0x10", "1 2", "1XB", "1Gi", "8388608TiB", "99999999999999999999"} {
		var s Size
		if err := s.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q = %d, want an error", text, s)
		}
		var p Pages
		if err := p.UnmarshalText([]byte(text)); err == nil && text != "1e9" {
			t.Errorf("pages %q = %v, want an error", text, p)
		}
	}
}

func TestHostileDocuments(t *testing.T) {
	for name, b := range map[string][]byte{
		"too long":      bytes.Repeat([]byte("#"), maxDocument+1),
		"not text":      {0xff, 0xfe, 0},
		"deep sequence": bytes.Repeat([]byte("["), maxDocument),
		"deep mapping":  bytes.Repeat([]byte("{a: "), maxDocument/4),
		"deep block":    bytes.Repeat([]byte("- "), maxDocument/2),
		"deep keys":     bytes.Repeat([]byte("? "), maxDocument/2),
		"steps": func() (b []byte) {
			for depth := 0; len(b)+depth+3 < maxDocument; depth++ {
				b = append(append(b, bytes.Repeat([]byte(" "), depth)...), "a:\n"...)
			}
			return b
		}(),
		"many documents": bytes.Repeat([]byte("---\na\n"), maxDocument/60),
		"long line":      append([]byte("node: {name: "), bytes.Repeat([]byte("x"), 60000)...),
	} {
		t.Run(name, func(t *testing.T) {
			c, err := Parse("a.yaml", b)
			if err == nil {
				err = c.Validate()
			}
			if err == nil {
				t.Fatal("accepted")
			}
			if len(err.Error()) > 4096 {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
		})
	}
}

// Nothing crashes the parser, faults are *Error, and what is valid survives
// its own document.
func FuzzParse(f *testing.F) {
	f.Add([]byte(minimal))
	for _, pattern := range []string{"testdata/bad/*.yaml", "../../configs/*.yaml"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			f.Fatalf("no seeds: %v", err)
		}
		for _, file := range files {
			b, err := os.ReadFile(file)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(b)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := Parse("fuzz.yaml", b)
		if err == nil {
			err = c.Validate()
		}
		if err != nil {
			if _, ok := errors.AsType[*Error](err); !ok {
				t.Fatalf("%T: %v", err, err)
			}
			return
		}
		roundTrip(t, c)
	})
}

func ExampleLoad() {
	c, err := Load("../../configs/prefill.yaml", "arena.pages=2GiB", "ports.http=0")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(c.Node.Name, c.Geometry().Layout.Pages)
	// Output: prefill 16384
}

// The heads of a rank are its share of the model's.
func TestHeadsOfTheModel(t *testing.T) {
	for _, tt := range []struct {
		set  string
		want int
	}{{"kv_heads: 8", 2}, {"kv_heads: 8, qo_heads: 32", 2}, {"kv_heads: 2, qo_heads: 32", 1}, {"kv_heads: 8, heads: 2", 2}} {
		c, err := Parse("", []byte("node: {name: n}\narena: {model: m, pages: 8, page_size: 16, layers: 1, head_dim: 4, world_size: 4, "+tt.set+"}\n"))
		if err == nil {
			err = c.Validate()
		}
		if err != nil || c.Geometry().Layout.Heads != tt.want {
			t.Errorf("%s: %d heads, %v", tt.set, c.Geometry().Layout.Heads, err)
		}
	}
}
