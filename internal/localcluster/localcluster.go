// Package localcluster runs a cluster of real processes on loopback, for
// `kvferry local` and for tests.
//
// A cluster is a directory (see [Root]) and the processes that its
// cluster.json names; nothing stays in memory between commands. Each node has
// a directory of its own there: its configuration, written whole by [Up] from
// one base and the node's name, role, and ports; its log; its state. Nodes run
// in sessions of their own, so that they outlive the command that started
// them, and are signalled only if the pid still is the process that was
// started. Whoever changes the directory holds its lock.
//
// The first node is the seed of all others. Up returns when every node is
// ready and sees all others, or it leaves nothing behind. From then on each
// node's configuration has the ports that it got, and all others to join, so
// that it can be started again from it.
package localcluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
)

// DefaultName is the name of a cluster that was given none.
const DefaultName = "default"

var (
	// ErrNotUp: there is no local cluster of that name.
	ErrNotUp = errors.New("local cluster is not up")
	// ErrUp: there is one already, and at least one of its processes runs.
	ErrUp = errors.New("local cluster is up already")
	// ErrOptions: what was asked of Up cannot be, whatever the machine.
	ErrOptions = errors.New("wrong options")
	// ErrUnknownNode: the cluster has no node of that name.
	ErrUnknownNode = errors.New("unknown node")
)

// Bounds of what is waited for.
const (
	startTimeout = 30 * time.Second
	lockTimeout  = 10 * time.Second
	portTimeout  = 10 * time.Second
	stopTimeout  = 15 * time.Second // from SIGTERM to SIGKILL
	killTimeout  = 10 * time.Second // from SIGKILL to the end
)

// Ready is a node's ready line: one line of JSON, all that an agent writes to
// its standard output.
type Ready struct {
	Node        string         `json:"node"`
	Incarnation uint64         `json:"incarnation,string"`
	Gossip      netip.AddrPort `json:"gossip"`
	Peer        netip.AddrPort `json:"peer"`
	Data        netip.AddrPort `json:"data"` // zero without tcp
	HTTP        netip.AddrPort `json:"http"`
	Engine      string         `json:"engine"` // path of the socket
}

// Node is one node of a cluster, as cluster.json has it.
type Node struct {
	Ready
	Process
	Role string `json:"role"`
	Dir  string `json:"dir"`
}

// Config is the path of the node's configuration.
func (n Node) Config() string { return filepath.Join(n.Dir, configFile) }

// Log is the path of the node's log. A node that was restarted appends to it.
func (n Node) Log() string { return filepath.Join(n.Dir, logFile) }

// Dial connects to the node; the caller closes the client.
func (n Node) Dial() (*client.Client, error) {
	if n.Engine == "" {
		return nil, fmt.Errorf("%w: it has not been ready yet", client.ErrUnreachable)
	}
	return client.Dial(n.Engine)
}

// Cluster is a local cluster that is or was up. It is safe for concurrent use.
type Cluster struct {
	dir string

	mu     sync.Mutex
	record record
}

// Load finds the cluster of that name below [Root]. The error wraps ErrNotUp if there is none.
func Load(name string) (*Cluster, error) {
	root, err := Root()
	if err != nil {
		return nil, err
	}
	return load(root, name)
}

func load(root, name string) (*Cluster, error) {
	dir, err := dirOf(root, name)
	if err != nil {
		return nil, err
	}
	r, err := readRecord(dir)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(r.Nodes) == 0 {
		return nil, fmt.Errorf("%w: %q in %s (start it with: kvferry local up --name %s)", ErrNotUp, name, root, name)
	}
	if err != nil {
		return nil, err
	}
	return &Cluster{dir: dir, record: r}, nil
}

// dirOf refuses a name that would leave the root.
func dirOf(root, name string) (string, error) {
	if err := id.Node(name).Validate(); err != nil || name == "." || name == ".." {
		return "", fmt.Errorf("local cluster's name %.80q: want letters, digits, '-', '_' or '.'", name)
	}
	return filepath.Join(root, name), nil
}

// Name is the cluster's name.
func (c *Cluster) Name() string { return c.record.Name }

// Nodes are all nodes, the seed first.
func (c *Cluster) Nodes() []Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.record.Nodes)
}

// Node finds a node by its name.
func (c *Cluster) Node(name string) (Node, bool) {
	for _, n := range c.Nodes() {
		if n.Node == name {
			return n, true
		}
	}
	return Node{}, false
}

func (c *Cluster) node(name string) (Node, error) {
	n, ok := c.Node(name)
	if !ok {
		return n, fmt.Errorf("%w %q in local cluster %q", ErrUnknownNode, name, c.Name())
	}
	return n, nil
}

// Sockets are the engine sockets of the nodes of a role.
func (c *Cluster) Sockets(role string) []string {
	var sockets []string
	for _, n := range c.Nodes() {
		if n.Role == role {
			sockets = append(sockets, n.Engine)
		}
	}
	return sockets
}

// Kill signals a node's process. It does not wait; [Process.Wait] does.
func (c *Cluster) Kill(name string, sig syscall.Signal) error {
	n, err := c.node(name)
	if err != nil {
		return err
	}
	if err := n.Signal(sig); err != nil {
		return fmt.Errorf("kill node %s: %w", name, err)
	}
	return nil
}

// Down stops every node, one that SIGSTOP has stopped included, by SIGTERM and
// after 15 s by SIGKILL, and removes the cluster's directory. The error says which nodes had to be killed.
func (c *Cluster) Down(ctx context.Context) error {
	lockCtx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	l, err := lockDir(lockCtx, c.dir)
	if err != nil {
		return err
	}
	defer l.Close()
	if err := c.reload(); err != nil {
		return err
	}
	return c.tearDown(ctx)
}

// reload takes in what another command did before we had the lock; of a cluster
// that is gone there are no nodes.
func (c *Cluster) reload() error {
	r, err := readRecord(c.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.record.Nodes = r.Nodes
	return nil
}

// tearDown is Down under the lock.
func (c *Cluster) tearDown(ctx context.Context) error {
	nodes := c.Nodes()
	for _, n := range nodes {
		// One that has ended is what is wanted; others show below.
		_ = n.Signal(syscall.SIGTERM)
		_ = n.Signal(syscall.SIGCONT) // one that is stopped would not know
	}
	gentle, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	var errs []error
	for _, n := range nodes {
		if n.Wait(gentle) == nil {
			continue
		}
		if err := n.Signal(syscall.SIGKILL); err != nil && !errors.Is(err, errGone) {
			errs = append(errs, fmt.Errorf("stop node %s: %w", n.Node, err))
			continue
		}
		// Also when ctx has ended: nothing stays behind.
		hard, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
		err := n.Wait(hard)
		cancel()
		if err != nil {
			errs = append(errs, fmt.Errorf("stop node %s: %w", n.Node, err))
			continue
		}
		errs = append(errs, fmt.Errorf("node %s did not end after SIGTERM and was killed", n.Node))
	}
	return errors.Join(append(errs, removeDir(c.dir))...)
}

// NodeStatus is what a node says, or why it says nothing.
type NodeStatus struct {
	Node   Node
	Alive  bool                      // its process runs
	Status *kvferrypb.StatusResponse // nil if it does not answer
	Err    error                     // why not
}

// States of a node.
const (
	StateReady    = "ready"
	StateNotReady = "not ready"
	StateSilent   = "silent" // its process runs and does not answer
	StateDown     = "down"
)

// State is one of the states.
func (s NodeStatus) State() string {
	switch {
	case !s.Alive:
		return StateDown
	case s.Status == nil:
		return StateSilent
	case s.Status.GetReady():
		return StateReady
	default:
		return StateNotReady
	}
}

// Status asks every node, at most for two seconds each and all at once.
func (c *Cluster) Status(ctx context.Context) []NodeStatus {
	nodes := c.Nodes()
	out := make([]NodeStatus, len(nodes))
	var asked sync.WaitGroup
	for i, n := range nodes {
		asked.Go(func() {
			out[i] = NodeStatus{Node: n, Alive: n.Alive()}
			if out[i].Alive {
				out[i].Status, out[i].Err = ask(ctx, n)
			}
			if out[i].Err != nil {
				out[i].Alive = n.Alive() // it may have ended just now
			}
		})
	}
	asked.Wait()
	return out
}

func ask(ctx context.Context, n Node) (*kvferrypb.StatusResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	c, err := n.Dial()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.Admin().Status(ctx, &kvferrypb.StatusRequest{})
}

// ParseReady reads a ready line.
func ParseReady(line []byte) (Ready, error) {
	var r Ready
	if err := json.Unmarshal(line, &r); err != nil {
		return Ready{}, fmt.Errorf("read ready line %.200q: %w", line, err)
	}
	if r.Node == "" || r.Engine == "" {
		return Ready{}, fmt.Errorf("read ready line %.200q: no node or no engine socket", line)
	}
	return r, nil
}
