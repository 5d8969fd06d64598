package localcluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
)

// root is a short path: sockets lie below it.
func root(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "lc")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	t.Setenv("XDG_RUNTIME_DIR", dir)
	return filepath.Join(dir, "kvferry", "local")
}

func options(sets ...string) Options {
	return Options{Prefill: 1, Decode: 2, Set: append([]string{"arena.pages=4"}, sets...), Timeout: time.Minute}
}

func deadline(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func up(t *testing.T, o Options) *Cluster {
	t.Helper()
	ctx := deadline(t, 2*time.Minute)
	c, err := Up(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Down(context.Background()); err != nil {
			t.Errorf("down: %v", err)
		}
	})
	return c
}

// nothingLeft fails if a process of the nodes runs or the root is there.
func nothingLeft(t *testing.T, root string, nodes []Node) {
	t.Helper()
	for _, n := range nodes {
		if n.Alive() {
			t.Errorf("node %s runs with pid %d", n.Node, n.PID)
		}
	}
	if left, err := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(root)), "*")); len(left) > 0 || err != nil {
		t.Errorf("left behind: %v %v", left, err)
	}
}

// processes counts the agents whose configuration lies below root.
func processes(t *testing.T, root string) int {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, path := range all {
		line, err := os.ReadFile(path) // of a zombie it is empty
		if err == nil && strings.Contains(string(line), root) {
			n++
		}
	}
	return n
}

func TestUpAndDown(t *testing.T) {
	dir := root(t)
	c := up(t, options())
	nodes := c.Nodes()
	var names []string
	for _, n := range nodes {
		names = append(names, n.Node)
		if !n.Alive() {
			t.Errorf("node %s does not run", n.Node)
		}
		if sid, _ := unix.Getsid(n.PID); sid != n.PID {
			t.Errorf("node %s is in session %d, want one of its own, %d", n.Node, sid, n.PID)
		}
		i, err := os.Stat(n.Config())
		if err != nil || i.Mode().Perm() != 0o600 {
			t.Errorf("configuration of %s: %v %v, want mode 0600", n.Node, i.Mode(), err)
		}
	}
	if got := strings.Join(names, " "); got != "prefill-0 decode-0 decode-1" {
		t.Errorf("nodes %s", got)
	}
	conf, err := config.Load(nodes[2].Config())
	if err != nil {
		t.Fatal(err)
	}
	if conf.Node.Role != "decode" || conf.Arena.Pages.Count != 4 {
		t.Errorf("decode-1 is a %s node of %s pages", conf.Node.Role, conf.Arena.Pages)
	}
	settled(t, nodes)
	i, err := os.Stat(filepath.Join(dir, DefaultName))
	if err != nil || i.Mode().Perm() != 0o700 {
		t.Errorf("directory: %v %v, want mode 0700", i.Mode(), err)
	}

	loaded, err := Load(DefaultName)
	if err != nil {
		t.Fatal(err)
	}
	if n, ok := loaded.Node("decode-1"); !ok || n != nodes[2] {
		t.Errorf("loaded %+v, want %+v", n, nodes[2])
	}
	if got := loaded.Sockets("decode"); len(got) != 2 || got[0] != nodes[1].Engine {
		t.Errorf("sockets of decode nodes: %v", got)
	}
	for _, s := range loaded.Status(t.Context()) {
		if s.State() != StateReady || s.Status.GetNode() != s.Node.Node {
			t.Errorf("node %s is %s: %v", s.Node.Node, s.State(), s.Err)
		}
	}
	if err := loaded.Down(deadline(t, time.Minute)); err != nil {
		t.Error(err)
	}
	nothingLeft(t, dir, nodes)
	if _, err := Load(DefaultName); !errors.Is(err, ErrNotUp) {
		t.Errorf("load after down: %v, want ErrNotUp", err)
	}
}

// settled fails unless each node's configuration brings it back where it is,
// and to all others.
func settled(t *testing.T, nodes []Node) {
	t.Helper()
	for _, n := range nodes {
		conf, err := config.Load(n.Config())
		if err != nil {
			t.Fatal(err)
		}
		p := conf.Ports
		if got, want := []int{p.Gossip, p.Peer, p.Data, p.HTTP}, []int{int(n.Gossip.Port()), int(n.Peer.Port()), int(n.Data.Port()), int(n.HTTP.Port())}; !slices.Equal(got, want) {
			t.Errorf("ports in the file of %s: %v, want %v", n.Node, got, want)
		}
		var others []string
		for _, o := range nodes {
			if o.Node != n.Node {
				others = append(others, o.Gossip.String())
			}
		}
		if !slices.Equal(conf.Cluster.Join, others) {
			t.Errorf("%s joins %v, want all others, %v", n.Node, conf.Cluster.Join, others)
		}
	}
}

func TestUpTwice(t *testing.T) {
	root(t)
	c := up(t, options())
	_, err := Up(deadline(t, time.Minute), options())
	if !errors.Is(err, ErrUp) {
		t.Errorf("second up: %v, want ErrUp", err)
	}
	for _, n := range c.Nodes() {
		if !n.Alive() {
			t.Errorf("the second up ended node %s", n.Node)
		}
	}
	o := options()
	o.Name = "other"
	other := up(t, o)
	if a, b := c.Nodes()[0].PID, other.Nodes()[0].PID; a == b {
		t.Errorf("two clusters share pid %d", a)
	}
}

func TestFailureOfOneNodeTearsDown(t *testing.T) {
	for name, tt := range map[string]struct {
		model   string
		timeout time.Duration
		want    []string // in the error
	}{
		"seed dies":      {model: "die prefill-0", want: []string{"prefill-0 ended before it was ready", "prefill-0 has no wish to live"}},
		"last node dies": {model: "die decode-1", want: []string{"decode-1 ended before it was ready", "decode-1 has no wish to live"}},
		"no ready line":  {model: "mute decode-0", timeout: 8 * time.Second, want: []string{"decode-0", "not up within 8s", "hello from decode-0"}},
		"another line":   {model: "garbage decode-0", want: []string{"decode-0", "read ready line"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := root(t)
			o := options("arena.model=" + tt.model)
			if tt.timeout > 0 {
				o.Timeout = tt.timeout
			}
			c, err := Up(deadline(t, 2*time.Minute), o)
			if err == nil {
				_ = c.Down(context.Background())
				t.Fatal("up")
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
			if n := processes(t, dir); n > 0 {
				t.Errorf("%d processes run", n)
			}
			nothingLeft(t, dir, nil)
		})
	}
}

func TestUpEndsWithItsContext(t *testing.T) {
	dir := root(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	interrupted := errors.New("interrupted")
	watch := make(chan struct{})
	go func() {
		defer close(watch)
		_ = WaitFor(deadline(t, time.Minute), 10*time.Millisecond, func() error {
			if r, err := readRecord(filepath.Join(dir, DefaultName)); err != nil || len(r.Nodes) < 2 {
				return errors.New("not begun")
			}
			return nil
		})
		cancel(interrupted)
	}()
	_, err := Up(ctx, options("arena.model=mute decode-0"))
	<-watch
	if !errors.Is(err, interrupted) {
		t.Errorf("up: %v, want the context's cause", err)
	}
	if n := processes(t, dir); n > 0 {
		t.Errorf("%d processes run", n)
	}
	nothingLeft(t, dir, nil)
}

func TestDownKillsTheStubborn(t *testing.T) {
	dir := root(t)
	o := options("arena.model=stubborn decode-0")
	c, err := Up(deadline(t, 2*time.Minute), o)
	if err != nil {
		t.Fatal(err)
	}
	nodes := c.Nodes()
	ctx := deadline(t, 500*time.Millisecond)
	err = c.Down(ctx)
	if err == nil || !strings.Contains(err.Error(), "decode-0 did not end after SIGTERM") {
		t.Errorf("down: %v, want it to name decode-0", err)
	}
	nothingLeft(t, dir, nodes)
}

func TestDownWakesTheStopped(t *testing.T) {
	dir := root(t)
	c, err := Up(deadline(t, 2*time.Minute), options())
	if err != nil {
		t.Fatal(err)
	}
	nodes := c.Nodes()
	for _, n := range nodes {
		if err := c.Kill(n.Node, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Down(deadline(t, time.Minute)); err != nil {
		t.Errorf("down: %v", err)
	}
	nothingLeft(t, dir, nodes)
}

// A node that was not ready yet has no socket to ask.
func TestStatusBeforeReady(t *testing.T) {
	c := &Cluster{record: record{Nodes: []Node{{Ready: Ready{Node: "a"}, Process: self(t)}}}}
	s := c.Status(t.Context())[0]
	if s.State() != StateSilent || s.Err == nil || !strings.Contains(s.Err.Error(), "not been ready yet") {
		t.Errorf("status %s: %v", s.State(), s.Err)
	}
}

func self(t *testing.T) Process {
	t.Helper()
	p, err := processOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestDownSignalsOnlyItsOwnProcesses(t *testing.T) {
	root(t)
	c := up(t, options())
	// A stranger that has the pid of decode-1 now.
	stranger := exec.Command("sleep", "60")
	if err := stranger.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stranger.Process.Kill(); _ = stranger.Wait() }()
	n, _ := c.Node("decode-1")
	if err := c.Kill("decode-1", syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := n.Wait(deadline(t, time.Minute)); err != nil {
		t.Fatal(err)
	}
	n.PID = stranger.Process.Pid
	if err := c.put(n); err != nil {
		t.Fatal(err)
	}
	if err := c.Kill("decode-1", syscall.SIGKILL); !errors.Is(err, errGone) {
		t.Errorf("kill of another's pid: %v, want errGone", err)
	}
	if s := c.Status(t.Context())[2]; s.State() != StateDown {
		t.Errorf("node with another's pid is %s", s.State())
	}
	if err := c.Down(deadline(t, time.Minute)); err != nil {
		t.Error(err)
	}
	if _, _, err := status(stranger.Process.Pid); err != nil {
		t.Errorf("the stranger has ended: %v", err)
	}
	if state, _, _ := status(stranger.Process.Pid); state == 'Z' {
		t.Error("the stranger was killed")
	}
}

func TestStaleRecord(t *testing.T) {
	dir := filepath.Join(root(t), DefaultName)
	// What a machine that went down leaves: nodes of pids that are others' now.
	if err := os.MkdirAll(filepath.Join(dir, "prefill-0", "state"), 0o700); err != nil {
		t.Fatal(err)
	}
	old := record{Name: DefaultName, Nodes: []Node{{
		Ready: Ready{Node: "prefill-0", Engine: "/nowhere"}, Process: Process{PID: os.Getpid(), Start: 1}, Role: "prefill", Dir: "..",
	}}}
	if err := old.write(dir); err != nil {
		t.Fatal(err)
	}
	mark := filepath.Join(dir, "prefill-0", "state", "mark")
	if err := os.WriteFile(mark, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := up(t, options())
	if _, err := os.Stat(mark); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("old state is still there: %v", err)
	}
	if n := c.Nodes()[0]; !n.Alive() || n.PID == os.Getpid() {
		t.Errorf("seed is %+v", n)
	}
}

func TestUnreadableRecordIsLeftAlone(t *testing.T) {
	dir := filepath.Join(root(t), DefaultName)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, recordFile)
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, f := range map[string]func() error{
		"up":   func() error { _, err := Up(deadline(t, time.Minute), options()); return err },
		"load": func() error { _, err := Load(DefaultName); return err },
	} {
		if err := f(); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v, want the file named", name, err)
		}
	}
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
}

func TestRestart(t *testing.T) {
	for name, same := range map[string]bool{"same ports": true, "new ports": false} {
		t.Run(name, func(t *testing.T) {
			root(t)
			c := up(t, options())
			before, _ := c.Node("prefill-0")
			ctx := deadline(t, 2*time.Minute)
			if err := c.Restart(ctx, "prefill-0", same); err != nil {
				t.Fatal(err)
			}
			if err := c.Meet(ctx); err != nil {
				t.Fatal(err)
			}
			after, _ := c.Node("prefill-0")
			if after.PID == before.PID || before.Alive() || !after.Alive() {
				t.Errorf("before %+v, after %+v", before.Process, after.Process)
			}
			if (after.HTTP == before.HTTP) != same || after.Engine != before.Engine {
				t.Errorf("http %v became %v, socket %s became %s", before.HTTP, after.HTTP, before.Engine, after.Engine)
			}
			settled(t, c.Nodes())
		})
	}
}

// What is said of one role goes over what is said of all, and stays when a node
// is started again, and so do variables.
func TestSetsOfOneRole(t *testing.T) {
	root(t)
	o := options("timers.hold=7s", "timers.lease=7s", "timers.lease_renew=1s")
	o.Decode = 1
	o.SetPrefill = []string{"timers.hold=8s", "transfer.rdma.devices=a,b:1"}
	o.SetDecode = []string{"timers.lease=9s", "timers.lease=10s"}
	o.Env = []string{"KVFERRY_DOUBLE=/of/this/cluster", "HOME=/nowhere"}
	t.Setenv("KVFERRY_TIMERS_DRAIN", "3s")
	c := up(t, o)
	check := func() {
		t.Helper()
		for name, want := range map[string][]time.Duration{"prefill-0": {8 * time.Second, 7 * time.Second}, "decode-0": {7 * time.Second, 10 * time.Second}} {
			n, _ := c.Node(name)
			conf, err := config.Load(n.Config())
			if err != nil {
				t.Fatal(err)
			}
			if got := []time.Duration{conf.Timers.Hold, conf.Timers.Lease}; !slices.Equal(got, want) {
				t.Errorf("%s has %v, want %v", name, got, want)
			}
			if devices := conf.Transfer.RDMA.Devices; slices.Equal(devices, []string{"a", "b:1"}) != (name == "prefill-0") {
				t.Errorf("%s has devices %v", name, devices)
			}
			if conf.Timers.Drain != 3*time.Second {
				t.Errorf("%s drains %v", name, conf.Timers.Drain)
			}
			environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", n.PID))
			if err != nil {
				t.Fatal(err)
			}
			if all := strings.Split(string(environ), "\x00"); !slices.Contains(all, o.Env[0]) || !slices.Contains(all, o.Env[1]) || strings.Contains(string(environ), "KVFERRY_TIMERS") {
				t.Errorf("%s has variables %q", name, all)
			}
		}
	}
	check()
	c, err := Load(DefaultName) // as another command does
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Restart(deadline(t, 2*time.Minute), "decode-0", true); err != nil {
		t.Fatal(err)
	}
	check()
}

// Every node proves its name, all have one key for gossip, and what made the
// certificates is gone.
func TestSecure(t *testing.T) {
	dir := root(t)
	o := options("security.peers=prefill-*,decode-*")
	o.Secure = true
	c := up(t, o)
	check := func() (files map[string]string, keys []string) {
		t.Helper()
		files = map[string]string{}
		if err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.Type() == fs.ModeSocket {
				return err
			}
			i, err := e.Info()
			if err != nil {
				return err
			}
			if e.IsDir() {
				if i.Mode().Perm() != 0o700 {
					t.Errorf("%s has mode %v, want 0700", path, i.Mode())
				}
				return nil
			}
			b, err := os.ReadFile(path)
			files[path] = string(b)
			if strings.Contains(string(b), "PRIVATE KEY") || strings.Contains(string(b), "keyring") {
				keys = append(keys, strings.TrimPrefix(path, filepath.Join(dir, DefaultName)))
				if i.Mode().Perm() != 0o600 {
					t.Errorf("%s has mode %v, want 0600", path, i.Mode())
				}
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return files, keys
	}
	before, keys := check()
	if want := []string{
		"/decode-0/config.yaml", "/decode-0/node.key", "/decode-1/config.yaml", "/decode-1/node.key", "/prefill-0/config.yaml", "/prefill-0/node.key",
	}; !slices.Equal(keys, want) {
		t.Errorf("keys lie in %v, want %v: nodes' own, and none of the authority", keys, want)
	}
	ids := map[string]bool{}
	ca := map[string]bool{}
	for _, n := range c.Nodes() {
		conf, err := config.Load(n.Config())
		if err != nil {
			t.Fatal(err)
		}
		s := conf.Security
		if _, err := identity.Load(identity.Options{Node: id.Node(n.Node), Certificate: s.Certificate, Key: s.Key, CA: s.CA}); err != nil || !slices.Equal(s.Peers, []string{"prefill-*", "decode-*"}) {
			t.Errorf("%s: %+v: %v", n.Node, s, err)
		}
		if len(conf.Cluster.Keyring) != 1 || len(conf.Cluster.Keyring[0]) != config.KeyBytes {
			t.Fatalf("%s has %d keys", n.Node, len(conf.Cluster.Keyring))
		}
		ids[conf.Cluster.Keyring[0].ID()] = true
		ca[before[s.CA]] = true
	}
	if zero := make(config.Key, config.KeyBytes).ID(); len(ids) != 1 || ids[zero] || len(ca) != 1 || ca[""] {
		t.Errorf("keys %v and %d authorities, want one of each", ids, len(ca))
	}

	if err := c.Restart(deadline(t, 2*time.Minute), "decode-0", true); err != nil {
		t.Fatal(err)
	}
	after, _ := check()
	for path, b := range before {
		if strings.HasSuffix(path, ".pem") || strings.HasSuffix(path, ".key") {
			if after[path] != b {
				t.Errorf("%s has changed", path)
			}
		}
	}
	n, _ := c.Node("decode-0")
	conf, err := config.Load(n.Config())
	if err != nil || !conf.Security.On() || len(conf.Cluster.Keyring) != 1 || !ids[conf.Cluster.Keyring[0].ID()] {
		t.Errorf("after a restart: %+v, %v", conf.Security, err)
	}

	o = options()
	o.Name = "open"
	conf, err = config.Load(up(t, o).Nodes()[0].Config())
	if err != nil || conf.Security.On() || len(conf.Cluster.Keyring) != 0 {
		t.Errorf("an open cluster has %+v and %d keys, %v", conf.Security, len(conf.Cluster.Keyring), err)
	}
}

func TestUpRefuses(t *testing.T) {
	for name, tt := range map[string]struct {
		o    Options
		want string
	}{
		"more than the memory":             {Options{Prefill: 1, Decode: 1, Set: []string{"arena.pages=32TiB", "arena.page_size=4096"}}, "memory for 2 nodes"},
		"more on the host than the memory": {Options{Prefill: 1, Decode: 1, Set: []string{"arena.host_pages=32TiB", "arena.page_size=4096"}}, "memory for 2 nodes"},
		"too many nodes":                   {Options{Prefill: MaxNodes, Decode: 1}, "at most 64"},
		"fewer than none":                  {Options{Prefill: -1, Decode: 2}, "-1 prefill"},
		"a name that climbs":               {Options{Name: ".."}, "local cluster's name"},
		"a name with a slash":              {Options{Name: "a/b"}, "local cluster's name"},
		"no configuration":                 {Options{Config: "/nosuch/file.yaml"}, "/nosuch/file.yaml"},
		"a set without value":              {Options{Set: []string{"arena.pages"}}, "KEY=VALUE"},
		"a key of each node":               {Options{Set: []string{"node.name=x"}}, "--set node.name=x"},
		"a port":                           {Options{Set: []string{"ports.http=80"}}, "of its own"},
		"not loopback":                     {Options{Set: []string{"node.bind=0.0.0.0"}}, "loopback"},
		"an unknown key":                   {Options{Set: []string{"arena.nosuch=1"}}, "nosuch"},
		"a certificate":                    {Options{Secure: true, Set: []string{"security.certificate=x"}}, "of its own"},
		"a keyring":                        {Options{Secure: true, Set: []string{"cluster.keyring="}}, "of its own"},
		"a key of each node, of a role":    {Options{SetDecode: []string{"ports.http=80"}}, "--set-decode ports.http=80: every node"},
		"an unknown key, of a role":        {Options{SetPrefill: []string{"arena.nosuch=1"}}, "--set-prefill arena.nosuch: unknown key"},
		"a set without value, of a role":   {Options{SetDecode: []string{"arena.pages"}}, `--set-decode "arena.pages": want KEY=VALUE`},
		"more than the memory, of a role":  {Options{Prefill: 1, Decode: 1, SetDecode: []string{"arena.pages=32TiB", "arena.page_size=4096"}}, "memory for 2 nodes"},
		"more than a number":               {Options{Prefill: 32, Decode: 32, Set: []string{"arena.pages=1048576TiB", "arena.page_size=4096", "arena.layers=1024", "arena.heads=1024", "arena.head_dim=4096"}}, "arenas and host tiers of 64 nodes"},
		"peers nobody proves":              {Options{Set: []string{"security.peers=x"}}, "security.peers"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := root(t)
			_, err := Up(deadline(t, time.Minute), tt.o)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("up: %v, want %q", err, tt.want)
			}
			nothingLeft(t, dir, nil)
		})
	}
}

func TestOwnKeysAreKeys(t *testing.T) {
	for _, own := range append(OwnKeys(), secretKeys()...) {
		if !slices.ContainsFunc(config.Keys(), func(k string) bool { return k == own || strings.HasSuffix(own, ".") && strings.HasPrefix(k, own) }) {
			t.Errorf("no key is %s", own)
		}
	}
}

func TestParseStat(t *testing.T) {
	rest := " S 1 2 2 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4242 1 1"
	for name, tt := range map[string]struct {
		stat  string
		state byte
		start uint64
		fails bool
	}{
		"plain":              {stat: "7 (sleep)" + rest, state: 'S', start: 4242},
		"name like a field":  {stat: "7 (a) Z 9 (b c)" + rest, state: 'S', start: 4242},
		"zombie":             {stat: "7 (sleep)" + strings.Replace(rest, " S ", " Z ", 1), state: 'Z', start: 4242},
		"cut off":            {stat: "7 (sleep) S 1 2", fails: true},
		"empty":              {fails: true},
		"no number":          {stat: "7 (sleep)" + strings.Replace(rest, "4242", "many", 1), fails: true},
		"number of 65 bits":  {stat: "7 (sleep)" + strings.Replace(rest, "4242", "36893488147419103232", 1), fails: true},
		"no name, few words": {stat: "7", fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			state, start, err := parseStat([]byte(tt.stat))
			if (err != nil) != tt.fails || !tt.fails && (state != tt.state || start != tt.start) {
				t.Errorf("parseStat = %c %d %v", state, start, err)
			}
		})
	}
}

func TestProcessIsNotFooledByAnotherStart(t *testing.T) {
	p, err := processOf(os.Getpid())
	if err != nil || !p.Alive() {
		t.Fatalf("this process: %+v %v", p, err)
	}
	p.Start++
	if p.Alive() {
		t.Error("another start time counts as alive")
	}
	if err := p.Signal(syscall.SIGKILL); !errors.Is(err, errGone) {
		t.Errorf("signal: %v, want errGone", err)
	}
	for _, pid := range []int{-1, 0, 1} {
		if err := (Process{PID: pid}).Signal(syscall.SIGTERM); err == nil {
			t.Errorf("signal of pid %d went out", pid)
		}
	}
}

// A killed process keeps its ports until the last of its threads has ended; the
// first one may be a zombie long before.
func TestProcessLivesAsLongAsItsLastThread(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "headless")
	hold, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill() }()
	p, err := processOf(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if err := WaitFor(deadline(t, time.Minute), time.Millisecond, func() error {
		if state, _, err := status(p.PID); state != 'Z' {
			return errors.Join(fmt.Errorf("state %c", state), err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if !p.Alive() {
		t.Error("a process with a thread that runs does not count as alive")
	}
	if err := hold.Close(); err != nil {
		t.Error(err)
	}
	if err := p.Wait(deadline(t, time.Minute)); err != nil {
		t.Error(err)
	}
}

func TestLockOfARemovedDirectoryIsTakenAgain(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "c")
	first, err := lockDir(deadline(t, time.Minute), dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := lockDir(deadline(t, 100*time.Millisecond), dir); err == nil || !strings.Contains(err.Error(), "another command") {
		t.Errorf("second lock: %v", err)
	}
	got := make(chan error, 1)
	go func() {
		second, err := lockDir(deadline(t, time.Minute), dir)
		if err == nil {
			_, err = os.Stat(filepath.Join(dir, lockFile))
			second.Close()
		}
		got <- err
	}()
	if err := removeDir(dir); err != nil {
		t.Error(err)
	}
	if err := first.Close(); err != nil {
		t.Error(err)
	}
	if err := <-got; err != nil {
		t.Errorf("lock after removal: %v", err)
	}
}

func TestRoot(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", "/x")
	if got, err := Root(); got != "/x/kvferry/local" || err != nil {
		t.Errorf("Root() = %s %v", got, err)
	}
}

func TestSharedDirectory(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	mine := filepath.Join(os.TempDir(), "kvferry-"+strconv.Itoa(os.Getuid()))
	if got, err := sharedRoot(); got != filepath.Join(mine, "local") || err != nil {
		t.Errorf("sharedRoot() = %s %v", got, err)
	}
	if err := os.Chmod(mine, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := sharedRoot(); err == nil || !strings.Contains(err.Error(), "0700") {
		t.Errorf("sharedRoot() of an open directory: %v", err)
	}
	if err := os.Remove(mine); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(t.TempDir(), mine); err != nil {
		t.Fatal(err)
	}
	if _, err := sharedRoot(); err == nil {
		t.Error("sharedRoot() follows a link")
	}
}

func TestWaitFor(t *testing.T) {
	n := 0
	if err := WaitFor(t.Context(), time.Microsecond, func() error {
		if n++; n < 3 {
			return errors.New("not yet")
		}
		return nil
	}); err != nil || n != 3 {
		t.Errorf("WaitFor: %v after %d probes", err, n)
	}
	why, cause := errors.New("not yet"), errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	if err := WaitFor(ctx, time.Hour, func() error { return why }); !errors.Is(err, why) || !errors.Is(err, cause) {
		t.Errorf("WaitFor of an ended context: %v", err)
	}
}
