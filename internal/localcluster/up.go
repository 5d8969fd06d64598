package localcluster

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/configs"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/memory"
)

// Options set up a cluster. A zero field means its default.
type Options struct {
	Name            string // default "default"
	Prefill, Decode int    // nodes of each role; default 2 and 2 if both are 0
	// Config is the path of the configuration that all nodes share but for
	// name, role, addresses, and paths; default configs/local.yaml, built in.
	Config string
	// Set are keys over that, each "arena.pages=1024", SetPrefill and SetDecode
	// keys of the nodes of a role over those; none of [OwnKeys], nor of those that
	// Secure sets.
	Set, SetPrefill, SetDecode []string
	// Env are variables of the nodes besides this process's own, each "NAME=value";
	// a node that is started again has them, too.
	Env []string
	// Binary is the program to run as `BINARY agent -c FILE`; default this one.
	Binary string
	// Root is the directory of all clusters; default Root().
	Root string
	// Timeout of the whole start; default 30 s.
	Timeout time.Duration
	// Secure gives every node a certificate of one authority, whose key is kept
	// nowhere, and all of them a key for gossip.
	Secure bool
}

// MaxNodes bounds a cluster on one machine.
const MaxNodes = 64

// OwnKeys are the keys that are each node's own, so that Options.Set cannot
// set them; one that ends with a dot is all keys below it. What the shared
// configuration and the environment say of them does not count.
func OwnKeys() []string {
	return []string{
		"node.name", "node.group", "node.role", "node.advertise", "node.state_dir", "node.socket",
		"ports.", "cluster.join", "telemetry.bind",
	}
}

// roles are those that a node of a cluster may have, the seed's first.
func roles() []string { return []string{"prefill", "decode"} }

// count is how many nodes have a role.
func (o Options) count(role string) int {
	if role == "prefill" {
		return o.Prefill
	}
	return o.Decode
}

// given are keys that were set, and the flag that sets them.
type given struct {
	flag string
	keys []string
}

// given are all that is set for a node of a role; what stands later wins.
func (o Options) given(role string) []given {
	own := given{"--set-prefill", o.SetPrefill}
	if role != "prefill" {
		own = given{"--set-decode", o.SetDecode}
	}
	return []given{{"--set", o.Set}, own}
}

// checkSet refuses what would be ignored.
func checkSet(o Options) error {
	for _, role := range roles() {
		for _, g := range o.given(role) {
			for _, s := range g.keys {
				if err := checkKey(o, s); err != nil {
					return fmt.Errorf("%w: %s %s: %w", ErrOptions, g.flag, s, err)
				}
			}
		}
	}
	return nil
}

func checkKey(o Options, set string) error {
	own := OwnKeys()
	if o.Secure {
		own = append(own, secretKeys()...)
	}
	key, value, _ := strings.Cut(set, "=")
	for _, k := range own {
		if key == k || strings.HasSuffix(k, ".") && strings.HasPrefix(key, k) {
			return fmt.Errorf("every node of a local cluster gets a %s of its own", key)
		}
	}
	if at, err := netip.ParseAddr(value); key == "node.bind" && err == nil && !at.IsLoopback() {
		return errors.New("a local cluster is on loopback, such as 127.0.0.1 or ::1")
	}
	return nil
}

// Up starts a cluster and returns when every node is ready and sees all others
// as members. On any failure, the end of ctx included, everything that was started
// is stopped and removed, and the error has the end of the culprit's log.
func Up(ctx context.Context, o Options) (*Cluster, error) {
	if o.Name == "" {
		o.Name = DefaultName
	}
	if o.Prefill == 0 && o.Decode == 0 {
		o.Prefill, o.Decode = 2, 2
	}
	if o.Timeout <= 0 {
		o.Timeout = startTimeout
	}
	if n := o.Prefill + o.Decode; o.Prefill < 0 || o.Decode < 0 || n > MaxNodes {
		return nil, fmt.Errorf("start local cluster %q: %w: %d prefill and %d decode nodes: want at most %d in all", o.Name, ErrOptions, o.Prefill, o.Decode, MaxNodes)
	}
	if err := checkSet(o); err != nil {
		return nil, fmt.Errorf("start local cluster %q: %w", o.Name, err)
	}
	secrets, err := newSecrets(o)
	if err != nil {
		return nil, fmt.Errorf("start local cluster %q: %w", o.Name, err)
	}
	c, err := prepare(&o, secrets)
	if err != nil {
		return nil, fmt.Errorf("start local cluster %q: %w", o.Name, err)
	}
	lockCtx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	l, err := lockDir(lockCtx, c.dir)
	if err != nil {
		return nil, fmt.Errorf("start local cluster %q: %w", o.Name, err)
	}
	defer l.Close()
	if err := c.clearStale(); err != nil {
		return nil, fmt.Errorf("start local cluster %q: %w", o.Name, err)
	}
	if err := c.startAll(ctx, o, secrets); err != nil {
		// ctx may be what ended; the clean-up has deadlines of its own.
		return nil, errors.Join(fmt.Errorf("start local cluster %q: %w", o.Name, err), c.tearDown(context.WithoutCancel(ctx)))
	}
	return c, nil
}

// prepare checks everything that can be checked before anything is made.
func prepare(o *Options, secrets *secrets) (*Cluster, error) {
	if o.Root == "" {
		root, err := Root()
		if err != nil {
			return nil, err
		}
		o.Root = root
	}
	if o.Binary == "" {
		self, err := os.Executable()
		if err != nil {
			return nil, fmt.Errorf("find this program: %w", err)
		}
		o.Binary = self
	}
	dir, err := dirOf(o.Root, o.Name)
	if err != nil {
		return nil, err
	}
	c := &Cluster{dir: dir, record: record{Name: o.Name, Binary: o.Binary, Env: o.Env}}
	return c, c.enoughMemory(*o, secrets)
}

// enoughMemory refuses what would end with the kernel killing something.
func (c *Cluster) enoughMemory(o Options, secrets *secrets) error {
	nodes := c.nodes(o)
	var total int64
	for _, n := range nodes {
		conf, err := nodeConfig(o, n, nil, secrets)
		if err != nil {
			return err
		}
		ranks := int64(len(conf.Arena.Ranks))
		arena := conf.Geometry().Layout.Bytes()
		if conf.Arena.Memory != config.HostMemory {
			arena = 0 // on a GPU, or an engine's, which has it by then
		}
		host, _ := conf.HostLayout() // without one it has no bytes
		if arena > math.MaxInt64-host.Bytes() || arena+host.Bytes() > (math.MaxInt64-total)/ranks {
			return fmt.Errorf("arenas and host tiers of %d nodes: %w", len(nodes), memory.ErrLimit)
		}
		total += (arena + host.Bytes()) * ranks
	}
	if err := memory.Fits(total); err != nil {
		return fmt.Errorf("memory for %d nodes, %s in all (make them fewer, or give them fewer --pages, --host-pages, or --layers): %w", len(nodes), config.Size(total), err)
	}
	return nil
}

// clearStale removes what a cluster left of which nothing runs any more.
func (c *Cluster) clearStale() error {
	old, err := readRecord(c.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if i := slices.IndexFunc(old.Nodes, func(n Node) bool { return n.Alive() }); i >= 0 {
		return fmt.Errorf("%w: node %s runs with pid %d (stop it with: kvferry local down --name %s)", ErrUp, old.Nodes[i].Node, old.Nodes[i].PID, c.record.Name)
	}
	rest, err := os.ReadDir(c.dir)
	if err != nil {
		return fmt.Errorf("remove old cluster: %w", err)
	}
	for _, e := range rest {
		if e.Name() == lockFile {
			continue
		}
		if err := os.RemoveAll(filepath.Join(c.dir, e.Name())); err != nil {
			return fmt.Errorf("remove old cluster: %w", err)
		}
	}
	return nil
}

// nodes names the nodes of a new cluster, the seed first.
func (c *Cluster) nodes(o Options) []Node {
	var nodes []Node
	add := func(role string, count int) {
		for i := range count {
			name := fmt.Sprintf("%s-%d", role, i)
			nodes = append(nodes, Node{Ready: Ready{Node: name}, Role: role, Dir: filepath.Join(c.dir, name)})
		}
	}
	for _, role := range roles() {
		add(role, o.count(role))
	}
	return nodes
}

// startAll starts the seed, then all others at once, and waits until they have
// found each other.
func (c *Cluster) startAll(ctx context.Context, o Options, secrets *secrets) error {
	ctx, cancel := context.WithTimeoutCause(ctx, o.Timeout, fmt.Errorf("not up within %v", o.Timeout))
	defer cancel()
	nodes := c.nodes(o)
	var join []string
	for len(nodes) > 0 {
		batch := nodes
		if join == nil {
			batch = nodes[:1]
		}
		nodes = nodes[len(batch):]
		started := make([]*start, 0, len(batch))
		for _, n := range batch {
			conf, err := nodeConfig(o, n, join, secrets)
			if err != nil {
				return err
			}
			if err := secrets.issue(n); err != nil {
				return err
			}
			s, err := c.start(n, conf)
			if err != nil {
				return err
			}
			defer s.Close()
			started = append(started, s)
		}
		for _, s := range started {
			if err := c.awaitReady(ctx, s); err != nil {
				return err
			}
		}
		join = []string{c.Nodes()[0].Gossip.String()}
	}
	if err := c.Meet(ctx); err != nil {
		return err
	}
	return c.settle()
}

// nodeConfig is the configuration of one node: the shared one, and what is
// its own.
func nodeConfig(o Options, n Node, join []string, secrets *secrets) (*config.Config, error) {
	name, raw := "configs/local.yaml", configs.Local()
	if o.Config != "" {
		name = o.Config
		var err error
		if raw, err = os.ReadFile(name); err != nil {
			return nil, fmt.Errorf("read configuration: %w", err)
		}
	}
	c, err := config.Parse(name, raw)
	if err != nil {
		return nil, err
	}
	if err := c.SetEnviron(os.Environ()); err != nil {
		return nil, err
	}
	for _, g := range o.given(n.Role) {
		for _, s := range g.keys {
			key, value, ok := strings.Cut(s, "=")
			if !ok {
				return nil, fmt.Errorf("%s %q: want KEY=VALUE, such as arena.pages=1024", g.flag, s)
			}
			if err := c.SetBy(g.flag, key, value); err != nil {
				return nil, err
			}
		}
	}
	if !c.Node.Bind.IsLoopback() {
		c.Node.Bind = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	c.Node.Advertise, c.Telemetry.Bind = c.Node.Bind, c.Node.Bind
	c.Node.Name, c.Node.Group, c.Node.Role = n.Node, n.Node, n.Role
	c.Node.StateDir = filepath.Join(n.Dir, stateDir)
	c.Node.Socket = filepath.Join(n.Dir, "sock")
	if c.Transfer.Rendezvous == "" {
		c.Transfer.Rendezvous = filepath.Join(filepath.Dir(n.Dir), rendezvousDir)
	}
	c.Ports = config.Ports{}
	c.Cluster.Join = join
	secrets.apply(n, c)
	return c, c.Validate()
}

func readConfig(n Node) (*config.Config, error) {
	raw, err := os.ReadFile(n.Config())
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	return config.Parse(n.Config(), raw)
}

func writeConfig(n Node, conf *config.Config) error {
	raw, err := conf.Marshal()
	if err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	// It holds the keyring.
	if err := os.WriteFile(n.Config(), raw, 0o600); err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	return nil
}

// settle writes into every node's configuration the ports that the node has
// got, and all others as those to join: a node that is started from its file
// comes back where it was.
func (c *Cluster) settle() error {
	nodes := c.Nodes()
	for _, n := range nodes {
		conf, err := readConfig(n)
		if err != nil {
			return fmt.Errorf("node %s: %w", n.Node, err)
		}
		conf.Ports = config.Ports{Gossip: int(n.Gossip.Port()), Peer: int(n.Peer.Port()), Data: int(n.Data.Port()), HTTP: int(n.HTTP.Port())}
		conf.Cluster.Join = nil
		for _, other := range nodes {
			if other.Node != n.Node && other.Gossip.IsValid() { // not if it was never ready
				conf.Cluster.Join = append(conf.Cluster.Join, other.Gossip.String())
			}
		}
		if err := writeConfig(n, conf); err != nil {
			return fmt.Errorf("node %s: %w", n.Node, err)
		}
	}
	return nil
}

// start is a process from its start to its ready line.
type start struct {
	node   Node
	stdout *os.File
}

func (s *start) Close() error { return s.stdout.Close() }

// start runs a node and writes it into cluster.json before it does anything,
// so that Down finds it whatever happens to us.
func (c *Cluster) start(n Node, conf *config.Config) (*start, error) {
	if err := os.MkdirAll(conf.Node.StateDir, 0o700); err != nil {
		return nil, fmt.Errorf("start node %s: %w", n.Node, err)
	}
	if err := writeConfig(n, conf); err != nil {
		return nil, fmt.Errorf("start node %s: %w", n.Node, err)
	}
	log, err := os.OpenFile(n.Log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("start node %s: %w", n.Node, err)
	}
	defer log.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start node %s: %w", n.Node, err)
	}
	defer w.Close()
	cmd := exec.Cmd{
		Path:   c.record.Binary,
		Args:   []string{"kvferry", "agent", "-c", n.Config()},
		Env:    c.environ(),
		Dir:    n.Dir,
		Stdout: w,
		Stderr: log,
		// A session of its own: it outlives our terminal.
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	if err := cmd.Start(); err != nil {
		r.Close()
		return nil, fmt.Errorf("start node %s: %w", n.Node, err)
	}
	n.Process, err = processOf(cmd.Process.Pid)
	// From here on it is known by pid and start time, to us as to any later command.
	_ = cmd.Process.Release()
	if err == nil {
		err = c.put(n)
	}
	if err != nil {
		r.Close()
		_ = n.Signal(syscall.SIGKILL)
		return nil, fmt.Errorf("start node %s: %w", n.Node, err)
	}
	return &start{node: n, stdout: r}, nil
}

// environ is our environment less what would change a node's configuration:
// it has been applied already.
func (c *Cluster) environ() []string {
	ours := slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, "KVFERRY_") })
	return append(ours, c.record.Env...)
}

// put adds or replaces a node in cluster.json.
func (c *Cluster) put(n Node) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := slices.IndexFunc(c.record.Nodes, func(m Node) bool { return m.Node == n.Node }); i >= 0 {
		c.record.Nodes[i] = n
	} else {
		c.record.Nodes = append(c.record.Nodes, n)
	}
	return c.record.write(c.dir)
}

// awaitReady reads the node's ready line.
func (c *Cluster) awaitReady(ctx context.Context, s *start) error {
	defer context.AfterFunc(ctx, func() { _ = s.stdout.SetReadDeadline(time.Unix(1, 0)) })()
	line, err := bufio.NewReader(io.LimitReader(s.stdout, 64<<10)).ReadBytes('\n')
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("node %s: %w%s", s.node.Node, context.Cause(ctx), logTail(s.node))
	case errors.Is(err, io.EOF):
		return fmt.Errorf("node %s ended before it was ready%s", s.node.Node, logTail(s.node))
	case err != nil:
		return fmt.Errorf("node %s: read ready line: %w", s.node.Node, err)
	}
	ready, err := ParseReady(line)
	if err != nil {
		return fmt.Errorf("node %s: %w", s.node.Node, err)
	}
	s.node.Ready = ready
	return c.put(s.node)
}

// Meet waits until every node that runs is ready and sees every other one that
// runs, in its present life. A node that ends meanwhile is an error.
func (c *Cluster) Meet(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	nodes := slices.DeleteFunc(c.Nodes(), func(n Node) bool { return !n.Alive() })
	for _, n := range nodes {
		admin, err := n.Dial()
		if err != nil {
			return fmt.Errorf("node %s: %w", n.Node, err)
		}
		err = WaitFor(ctx, 20*time.Millisecond, func() error {
			if !n.Alive() {
				cancel(fmt.Errorf("node %s ended%s", n.Node, logTail(n)))
				return errGone
			}
			if err := sees(ctx, admin, nodes); err != nil {
				return err
			}
			return ready(ctx, n)
		})
		admin.Close()
		if err != nil {
			return fmt.Errorf("node %s: %w", n.Node, err)
		}
	}
	return nil
}

// sees asks a node for its members.
func sees(ctx context.Context, c *client.Client, nodes []Node) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	m, err := c.Admin().Members(ctx, &kvferrypb.MembersRequest{})
	if err != nil {
		return err
	}
	for _, n := range nodes {
		if !slices.ContainsFunc(m.GetItems(), func(i *kvferrypb.Member) bool {
			return i.GetNode() == n.Node && i.GetIncarnation() == n.Incarnation
		}) {
			return fmt.Errorf("does not see %s yet", n.Node)
		}
	}
	return nil
}

// ready asks for /readyz.
func ready(ctx context.Context, n Node) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+n.HTTP.String()+"/readyz", http.NoBody)
	if err != nil {
		return err
	}
	t := &http.Transport{DisableKeepAlives: true}
	defer t.CloseIdleConnections()
	res, err := (&http.Client{Transport: t}).Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		why, _ := io.ReadAll(io.LimitReader(res.Body, 1<<10))
		return fmt.Errorf("not ready: %s: %s", res.Status, bytes.TrimSpace(why))
	}
	return nil
}

// logTail is the end of a node's log, for an error.
func logTail(n Node) string {
	const most, lines = 8 << 10, 12
	f, err := os.Open(n.Log())
	if err != nil {
		return ""
	}
	defer f.Close()
	if i, err := f.Stat(); err == nil && i.Size() > most {
		if _, err := f.Seek(-most, io.SeekEnd); err != nil {
			return ""
		}
	}
	raw, err := io.ReadAll(io.LimitReader(f, most))
	text := strings.TrimSpace(string(raw))
	if err != nil || text == "" {
		return "; its log is empty"
	}
	all := strings.Split(text, "\n")
	return "; the end of its log:\n    " + strings.Join(all[max(0, len(all)-lines):], "\n    ")
}

// Restart starts a node again from its files, after SIGKILL if it still runs,
// and waits for its ready line; [Cluster.Meet] waits until all see it. It joins
// through all others, and listens where its last life did, or without samePorts
// on other ports.
func (c *Cluster) Restart(ctx context.Context, name string, samePorts bool) error {
	lockCtx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	l, err := lockDir(lockCtx, c.dir)
	if err != nil {
		return err
	}
	defer l.Close()
	if err := c.reload(); err != nil {
		return fmt.Errorf("restart node %s: %w", name, err)
	}
	n, err := c.node(name)
	if err != nil {
		return err
	}
	if err := n.Signal(syscall.SIGKILL); err != nil && !errors.Is(err, errGone) {
		return fmt.Errorf("restart node %s: %w", name, err)
	}
	ctx, stop := context.WithTimeout(ctx, startTimeout)
	defer stop()
	if err := n.Wait(ctx); err != nil {
		return fmt.Errorf("restart node %s: %w", name, err)
	}
	conf, err := readConfig(n)
	if err != nil {
		return fmt.Errorf("restart node %s: %w", name, err)
	}
	if !samePorts {
		conf.Ports = config.Ports{}
	} else if err := awaitPorts(ctx, n); err != nil {
		return fmt.Errorf("restart node %s: %w", name, err)
	}
	s, err := c.start(n, conf)
	if err != nil {
		return fmt.Errorf("restart: %w", err)
	}
	defer s.Close()
	if err := c.awaitReady(ctx, s); err != nil {
		return fmt.Errorf("restart: %w", err)
	}
	if err := c.settle(); err != nil {
		return fmt.Errorf("restart node %s: %w", name, err)
	}
	return nil
}

// awaitPorts waits until the ports of a node that has ended can be had again:
// they are of the ephemeral range, so that any connection of this machine may
// borrow one.
func awaitPorts(ctx context.Context, n Node) error {
	ctx, cancel := context.WithTimeout(ctx, portTimeout)
	defer cancel()
	return WaitFor(ctx, 20*time.Millisecond, func() error {
		for _, at := range []netip.AddrPort{n.Gossip, n.Peer, n.Data, n.HTTP} {
			if !at.IsValid() { // it has no such port
				continue
			}
			l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", at.String())
			if err != nil {
				return err
			}
			l.Close()
		}
		return nil
	})
}
