package faults

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/localcluster"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// testLimit bounds a whole test, a soak's time not counted, patience each thing
// that a test waits for on a machine that is busy with others.
const (
	testLimit = 10 * time.Minute
	patience  = time.Minute
	poll      = 20 * time.Millisecond
)

// small are the keys that all clusters here share: 128 bytes a token, 1 KiB a page.
func small(set ...string) []string {
	return append([]string{
		"cluster.preset=fast",
		"arena.model=faults", "arena.pages=256", "arena.page_size=8", "arena.layers=2", "arena.heads=2", "arena.head_dim=8",
		"timers.attempts=2", "timers.backoff_max=200ms",
	}, set...)
}

// cluster is a local cluster of a test.
type cluster struct {
	*localcluster.Cluster
	t   *testing.T
	ctx context.Context // of the test
}

// up starts a cluster for the test's time.
func up(t *testing.T, prefill, decode int, set ...string) *cluster {
	t.Helper()
	return start(t, localcluster.Options{Prefill: prefill, Decode: decode, Set: set})
}

// start starts a cluster for the test's time. At the end its logs are looked at.
func start(t *testing.T, o localcluster.Options) *cluster {
	t.Helper()
	root, err := os.MkdirTemp(built.dir, "c")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), *soak+testLimit)
	t.Cleanup(cancel)
	o.Binary, o.Root, o.Timeout = built.binary, root, 2*time.Minute
	o.Set = append(small("node.bind="+loopback()), o.Set...)
	c, err := localcluster.Up(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, n := range c.Nodes() {
			_ = n.Signal(syscall.SIGCONT) // of one that ended it is an error
			checkLog(t, n.Node, n.Log())
		}
		if err := c.Down(context.Background()); err != nil {
			t.Errorf("down: %v", err)
		}
	})
	return &cluster{Cluster: c, t: t, ctx: ctx}
}

// loopbacks numbers them.
var loopbacks atomic.Uint32

// loopback is an address for one cluster or front alone, as the next one is: a
// node that is killed finds its ports free again, since no connection and no
// other test's node has borrowed one.
func loopback() string {
	n := uint32(os.Getpid())<<4 + loopbacks.Add(1) // also of other runs at the same time
	return fmt.Sprintf("127.%d.%d.1", 128+n>>8%64, byte(n))
}

// alarm is what no log may have. A node that finds a later life of its name
// says so as an error, and then ends or begins anew.
var alarm = regexp.MustCompile(`DATA RACE|panic:|fatal error:|goroutine \d+ \[|level=ERROR msg="[^a]|level=ERROR msg="a [^n]`)

// checkLog looks for our own bugs in a node's log, and shows the log of a test
// that has failed.
func checkLog(t *testing.T, name, path string) {
	log, err := os.ReadFile(path)
	if err != nil {
		t.Errorf("log of %s: %v", name, err)
		return
	}
	if at := alarm.FindIndex(log); at != nil {
		t.Errorf("log of %s:\n%s", name, log[max(0, at[0]-500):min(len(log), at[1]+4000)])
	} else if t.Failed() {
		t.Logf("end of the log of %s:\n%s", name, log[max(0, len(log)-3000):])
	}
}

func (c *cluster) must(name string) localcluster.Node {
	c.t.Helper()
	n, ok := c.Node(name)
	if !ok {
		c.t.Fatalf("no node %s", name)
	}
	return n
}

// engine opens an engine on a node for the test's time.
func (c *cluster) engine(name string) *engine {
	c.t.Helper()
	return attach(c.t, c.must(name).Engine)
}

func attach(t *testing.T, socket string) *engine {
	t.Helper()
	e, err := openEngine(t.Context(), socket, "both")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.close() }) // its node may be gone
	return e
}

// kill ends a node as a crash does, and waits for its end.
func (c *cluster) kill(name string) {
	c.t.Helper()
	n := c.must(name)
	if err := c.Kill(name, syscall.SIGKILL); err != nil {
		c.t.Fatal(err)
	}
	if err := n.Wait(c.ctx); err != nil {
		c.t.Fatal(err)
	}
}

// tcpOnly starts nodes again without shared memory, and waits until all nodes
// have met: a mixed cluster, with both transports at work.
func (c *cluster) tcpOnly(names ...string) {
	c.t.Helper()
	for _, name := range names {
		n := c.must(name)
		c.kill(name)
		conf := configOf(c.t, n)
		conf.Transfer.Transports = []string{tcp.Name}
		raw, err := conf.Marshal()
		if err != nil {
			c.t.Fatal(err)
		}
		if err := os.WriteFile(n.Config(), raw, 0o600); err != nil {
			c.t.Fatal(err)
		}
		if err := c.Restart(c.ctx, name, true); err != nil {
			c.t.Fatal(err)
		}
	}
	if err := c.Meet(c.ctx); err != nil {
		c.t.Fatal(err)
	}
}

// freeze stops a node; see [standstill].
func (c *cluster) freeze(name string) {
	c.t.Helper()
	standstill(c.t, name, c.must(name).PID)
}

// standstill stops a process and waits until none of its threads runs: the signal
// alone leaves it a moment in which it may still answer.
func standstill(t *testing.T, name string, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	tasks := fmt.Sprintf("/proc/%d/task/*/stat", pid)
	await(t, name+" to stand still", patience, func(context.Context) error {
		stats, err := filepath.Glob(tasks)
		if err != nil || len(stats) == 0 {
			return errors.Join(err, errors.New("it has no threads"))
		}
		for _, path := range stats {
			stat, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			// Its name, in parentheses, may hold anything.
			if state := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])); len(state) == 0 || state[0] != "T" {
				return fmt.Errorf("%s: %s", path, stat)
			}
		}
		return nil
	})
}

// await polls until probe returns nil; each call of it has two seconds.
func await(t *testing.T, what string, limit time.Duration, probe func(ctx context.Context) error) {
	t.Helper()
	if err := waitFor(t.Context(), limit, probe); err != nil {
		t.Fatalf("wait for %s: %v", what, err)
	}
}

func waitFor(ctx context.Context, limit time.Duration, probe func(ctx context.Context) error) error {
	within, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not within %v", limit))
	defer cancel()
	return localcluster.WaitFor(within, poll, func() error {
		// Not of within: the last answer is to say what is missing.
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		return probe(ctx)
	})
}

// dial opens an operator's connection for the test's time.
func dial(t *testing.T, socket string) kvferrypb.AdminClient {
	t.Helper()
	c, err := client.Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c.Admin()
}

// lives are the incarnations that a node sees, by node.
func lives(ctx context.Context, a kvferrypb.AdminClient) (map[string]uint64, error) {
	res, err := a.Members(ctx, &kvferrypb.MembersRequest{})
	if err != nil {
		return nil, err
	}
	all := make(map[string]uint64)
	for _, m := range res.GetItems() {
		all[m.GetNode()] = m.GetIncarnation()
	}
	return all, nil
}

// known are the publications of a node that another one would offer.
func known(ctx context.Context, a kvferrypb.AdminClient, owner string) ([]*kvferrypb.PublicationItem, error) {
	res, err := a.Publications(ctx, &kvferrypb.PublicationsRequest{Remote: true, Limit: 100_000})
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(res.GetItems(), func(i *kvferrypb.PublicationItem) bool { return i.GetOwner() != owner }), nil
}

// conserved checks that no page is lost, and says which are not free.
func conserved(ctx context.Context, a kvferrypb.AdminClient) (used uint32, err error) {
	res, err := a.Arena(ctx, &kvferrypb.ArenaRequest{})
	if err != nil {
		return 0, err
	}
	p := res.GetPages()
	if all := p.GetFree() + p.GetOwned() + p.GetLimbo() + p.GetQuarantine() + p.GetSink(); all != p.GetTotal() {
		return 0, fmt.Errorf("%d of %d pages are accounted for: %v", all, p.GetTotal(), p)
	}
	return p.GetTotal() - p.GetSink() - p.GetFree(), nil
}

// awaitFree waits until a node has all its pages back.
func awaitFree(t *testing.T, name string, a kvferrypb.AdminClient, limit time.Duration) {
	t.Helper()
	await(t, "all pages of "+name, limit, func(ctx context.Context) error {
		used, err := conserved(ctx, a)
		if err == nil && used > 0 {
			arena, _ := a.Arena(ctx, &kvferrypb.ArenaRequest{})
			own, _ := a.Publications(ctx, &kvferrypb.PublicationsRequest{})
			err = fmt.Errorf("%d are not free: %v; streams %v; publications %v", used, arena.GetPages(), arena.GetItems(), own.GetItems())
		}
		return err
	})
}

// wantFailure checks that an error is a node's, of one of the codes, and names
// the peer's life.
func wantFailure(t *testing.T, err error, node string, incarnation uint64, codes ...kvferrypb.Failure_Code) *kvferrypb.Failure {
	t.Helper()
	var e *client.Error
	if !errors.As(err, &e) {
		t.Fatalf("error %v, want a node's failure %v", err, codes)
	}
	f := e.Failure
	if !slices.Contains(codes, f.GetCode()) {
		t.Errorf("code %v, want %v: %v", f.GetCode(), codes, err)
	}
	if f.GetPeer() != node || f.GetPeerIncarnation() != incarnation {
		t.Errorf("failure names peer %q incarnation %d, want %s %d: %v", f.GetPeer(), f.GetPeerIncarnation(), node, incarnation, err)
	}
	if f.GetRemedy() == "" {
		t.Errorf("failure says not what to do: %v", err)
	}
	return f
}

// load is requests that go from one engine to another, all the time.
type load struct {
	t    *testing.T
	stop context.CancelFunc
	work sync.WaitGroup

	mu   sync.Mutex
	done int
	errs []error
}

// loadPause is between two requests of a load: other tests run at the same time.
const loadPause = 100 * time.Millisecond

// startLoad runs until stopped; any failure is the test's.
func startLoad(t *testing.T, from, to *engine, tokens int) *load {
	ctx, cancel := context.WithCancel(t.Context())
	l := &load{t: t, stop: cancel}
	for worker := range 2 {
		l.work.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				r := newRequest(fmt.Sprintf("load/%s/%s/%d/%d", from.node(), to.node(), worker, i), tokens+i%7)
				if i%2 == 0 {
					r.target = to.node()
				}
				// Not cut off at the end: it must end well.
				err := move(context.WithoutCancel(ctx), r, from, to, i%3 == 0, patience)
				l.mu.Lock()
				l.done++
				if err != nil {
					l.errs = append(l.errs, err)
				}
				failed := len(l.errs)
				l.mu.Unlock()
				if failed > 10 {
					return
				}
				pause(ctx, loadPause)
			}
		})
	}
	t.Cleanup(l.end)
	return l
}

func (l *load) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.done
}

// more waits until n requests more are done.
func (l *load) more(n int) {
	l.t.Helper()
	want := l.count() + n
	await(l.t, fmt.Sprintf("%d requests of the load", n), patience, func(context.Context) error {
		if have := l.count(); have < want {
			return fmt.Errorf("%d are missing", want-have)
		}
		return nil
	})
}

// end stops the load; it may be called twice.
func (l *load) end() {
	l.t.Helper()
	l.stop()
	l.work.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, err := range l.errs {
		l.t.Errorf("undisturbed request: %v", err)
	}
	if l.done == 0 {
		l.t.Error("the load did nothing")
	}
	l.errs, l.done = nil, max(l.done, 1)
}

// agent is a node that localcluster does not know.
type agent struct {
	localcluster.Ready
	pid    int
	logs   string
	exited chan struct{} // closed when it has ended
	code   int           // valid then
}

// configOf is the configuration of a node, to be varied for another.
func configOf(t *testing.T, n localcluster.Node) *config.Config {
	t.Helper()
	raw, err := os.ReadFile(n.Config())
	if err != nil {
		t.Fatal(err)
	}
	c, err := config.Parse(n.Config(), raw)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// another is a configuration like a node's for a node of another name, which
// joins through it.
func another(t *testing.T, n localcluster.Node, name string) *config.Config {
	t.Helper()
	c := configOf(t, n)
	dir, err := os.MkdirTemp(built.dir, "a")
	if err != nil {
		t.Fatal(err)
	}
	c.Node.Name, c.Node.Group, c.Node.Role = name, name, "both"
	c.Node.Socket, c.Node.StateDir = filepath.Join(dir, "sock"), filepath.Join(dir, "state")
	c.Ports = config.Ports{}
	c.Cluster.Join = []string{n.Gossip.String()}
	return c
}

// launch runs an agent, below the words of a command if there are any, and does
// not wait for it; ready gets its ready line, or the end of its output.
func launch(t *testing.T, c *config.Config, below ...string) (a *agent, ready <-chan []byte) {
	t.Helper()
	dir, err := os.MkdirTemp(built.dir, "r")
	if err != nil {
		t.Fatal(err)
	}
	raw, err := c.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "config.yaml")
	if err := os.WriteFile(file, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	a = &agent{logs: filepath.Join(dir, "log"), exited: make(chan struct{})}
	log, err := os.Create(a.logs)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	words := append(below, built.binary, "agent", "-c", file)
	cmd := exec.Command(words[0], words[1:]...)
	cmd.Stderr = log
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	a.pid = cmd.Process.Pid
	lines := make(chan []byte, 1)
	go func() {
		defer close(a.exited)
		line, _ := bufio.NewReader(out).ReadBytes('\n')
		lines <- line
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait() // the code says it
		a.code = cmd.ProcessState.ExitCode()
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGCONT)
		_ = cmd.Process.Signal(syscall.SIGTERM)
		for _, pid := range children(a.pid) { // a command that it is below does not pass it on
			_ = syscall.Kill(pid, syscall.SIGTERM)
		}
		select {
		case <-a.exited:
		case <-time.After(patience):
			t.Errorf("agent %s does not end", c.Node.Name)
			_ = cmd.Process.Kill()
			<-a.exited
		}
		checkLog(t, c.Node.Name, a.logs)
	})
	return a, lines
}

// children are the processes that a process's first thread has started.
func children(pid int) (pids []int) {
	list, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid)) // of one that has ended there is none
	for word := range strings.FieldsSeq(string(list)) {
		if child, err := strconv.Atoi(word); err == nil {
			pids = append(pids, child)
		}
	}
	return pids
}

// startAgent runs an agent until the end of the test, and waits until it is ready.
func startAgent(t *testing.T, c *config.Config) *agent {
	t.Helper()
	return startAgents(t, c)[0]
}

// startAgents starts several at once.
func startAgents(t *testing.T, configs ...*config.Config) []*agent {
	t.Helper()
	agents, lines := make([]*agent, len(configs)), make([]<-chan []byte, len(configs))
	for i, c := range configs {
		agents[i], lines[i] = launch(t, c)
	}
	for i, a := range agents {
		name := configs[i].Node.Name
		select {
		case line := <-lines[i]:
			var err error
			if a.Ready, err = localcluster.ParseReady(line); err != nil {
				t.Fatalf("agent %s: %v\n%s", name, err, a.log(t))
			}
		case <-time.After(patience):
			t.Fatalf("agent %s is not ready\n%s", name, a.log(t))
		}
	}
	return agents
}

func (a *agent) log(t *testing.T) string {
	t.Helper()
	log, err := os.ReadFile(a.logs)
	if err != nil {
		t.Fatal(err)
	}
	return string(log)
}

// awaitExit waits for the end of the process and returns its exit code and log.
func (a *agent) awaitExit(t *testing.T) (int, string) {
	t.Helper()
	select {
	case <-a.exited:
	case <-time.After(patience):
		t.Fatalf("the agent does not end:\n%s", a.log(t))
	}
	return a.code, a.log(t)
}

// kill ends an agent as a crash does.
func (a *agent) kill(t *testing.T) {
	t.Helper()
	if err := syscall.Kill(a.pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	a.awaitExit(t)
}

// leave ends an agent by SIGTERM, and well.
func (a *agent) leave(t *testing.T) {
	t.Helper()
	if err := syscall.Kill(a.pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code, log := a.awaitExit(t); code != 0 {
		t.Errorf("agent %s ended with exit code %d:\n%s", a.Node, code, log)
	}
}

// usage is what a process must not use more and more of.
type usage struct{ files, goroutines int }

// usageOf counts a node's open files and goroutines.
func usageOf(ctx context.Context, pid int, http string) (u usage, err error) {
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return u, err
	}
	u.files = len(files)
	body, err := get(ctx, "http://"+http+"/debug/pprof/goroutine?debug=1")
	if err != nil {
		return u, err
	}
	_, rest, _ := strings.Cut(body, "total ")
	count, _, _ := strings.Cut(rest, "\n")
	u.goroutines, err = strconv.Atoi(count)
	return u, err
}

// readBytes are what a node has read over a transport.
func readBytes(ctx context.Context, http, transport string) (float64, error) {
	return metric(ctx, http, readMetric, labelOf(transport))
}

const readMetric = "kvferry_read_bytes_total"

func labelOf(transport string) string { return fmt.Sprintf("transport=%q", transport) }

// metric is the sum of a metric's series that have all the labels, each `name="value"`.
func metric(ctx context.Context, http, name string, labels ...string) (sum float64, err error) {
	body, err := get(ctx, "http://"+http+"/metrics")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(body) {
		rest, ok := strings.CutPrefix(line, name)
		if !ok || rest[0] != ' ' && rest[0] != '{' || slices.ContainsFunc(labels, func(l string) bool { return !strings.Contains(rest, l) }) {
			continue
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(rest[strings.LastIndexByte(rest, ' '):]), 64)
		if err != nil {
			return 0, err
		}
		sum += v
	}
	return sum, nil
}

func get(ctx context.Context, url string) (string, error) {
	code, body, err := ask(ctx, url)
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("get %s: %d", url, code)
	}
	return body, err
}

// ask returns whatever a node answers.
func ask(ctx context.Context, url string) (code int, text string, err error) {
	ctx, cancel := context.WithTimeout(ctx, hangLimit)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return 0, "", err
	}
	transport := &http.Transport{DisableKeepAlives: true} // one connection a question, gone after it
	defer transport.CloseIdleConnections()
	res, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return 0, "", err
	}
	defer res.Body.Close()
	var body bytes.Buffer
	_, err = body.ReadFrom(res.Body)
	return res.StatusCode, body.String(), err
}

// awaitUsage waits until a node uses no more than it did, and a little.
func awaitUsage(t *testing.T, name string, pid int, http string, before usage, spare int) {
	t.Helper()
	await(t, "flat use of files and goroutines by "+name, patience, func(ctx context.Context) error {
		now, err := usageOf(ctx, pid, http)
		if err == nil && (now.files > before.files+spare || now.goroutines > before.goroutines+spare) {
			err = fmt.Errorf("%+v, before %+v", now, before)
		}
		return err
	})
}
