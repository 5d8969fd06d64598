package node

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/cudaipc"
	"github.com/kvferry/kvferry/transfer/rdmaread"
	"github.com/kvferry/kvferry/transfer/shm"
)

// What came of a check, or of a probe.
const (
	StateOK     = "ok"
	StateWarn   = "warn"   // it works, and could be better
	StateFail   = "fail"   // it should work, and does not
	StateAbsent = "absent" // there is none, and none is needed
)

// Check is one thing of a machine that was looked at.
type Check struct {
	Name   string `json:"name"`  // such as "memory lock"
	State  string `json:"state"` // one of the constants
	Found  string `json:"found"`
	Remedy string `json:"remedy"` // "" if there is nothing to do
}

// Examination says for what a machine is looked at. The zero value is for a node
// of which nothing is known.
type Examination struct {
	// Config is the node's, validated; nil: of a new one, whose arena is not known.
	Config *config.Config
	// Serving are addresses that a node on this machine holds, by the names that
	// status gives them: these are not taken by somebody else.
	Serving map[string]string
}

// Examine looks at this machine, as this process may use it: it opens what it can,
// changes nothing, and needs no node.
func Examine(e Examination) []Check {
	m := thisMachine()
	return m.examine(e)
}

// Doctor is what this process finds.
func (a adminService) Doctor(context.Context, *kvferrypb.DoctorRequest) (*kvferrypb.DoctorResponse, error) {
	n := a.node
	res := &kvferrypb.DoctorResponse{Node: string(n.life.Node)}
	m := thisMachine()
	m.running, m.arenaPage = true, n.arenaPage()
	m.locked = slices.ContainsFunc(n.transports, func(t transfer.Transport) bool { return t.Name() == rdmaread.Name })
	if !m.locked { // a library that the node does without is not loaded into it
		m.load = func(string) error { return errNotOpen }
	}
	m.gpus = n.gpus
	for _, c := range slices.Concat(n.transportChecks(), m.examine(Examination{Config: n.config, Serving: n.serving()})) {
		res.Items = append(res.Items, &kvferrypb.DoctorResponse_Check{Name: c.Name, State: c.State, Found: c.Found, Remedy: c.Remedy})
	}
	return res, nil
}

// arenaPage is the size of the pages of host memory that the arenas lie on: the
// smallest; 0 if they do not lie there.
func (n *Node) arenaPage() int64 {
	var bytes int64
	for _, a := range n.arenas {
		on := int64(os.Getpagesize())
		var stat unix.Statfs_t
		region, ok := a.(*memory.Region)
		if !ok {
			continue
		}
		if err := unix.Fstatfs(int(region.File().Fd()), &stat); err == nil && uint32(stat.Type) == unix.HUGETLBFS_MAGIC {
			on = stat.Bsize
		}
		if bytes == 0 || on < bytes {
			bytes = on
		}
	}
	return bytes
}

// errNotOpen is why a node's check does not load the library.
var errNotOpen = errors.New("the node has not opened rdma: see its transport above")

func (n *Node) serving() map[string]string {
	return map[string]string{
		"gossip": n.addresses.Gossip.String(), "peer": n.addresses.Peer.String(), "data": dataAddress(n.addresses.Data), "http": n.addresses.HTTP.String(),
	}
}

// transportChecks are those that the node was to open.
func (n *Node) transportChecks() []Check {
	var list []Check
	for _, name := range n.config.Transfer.Transports {
		c := Check{Name: "transport " + name, State: StateOK, Found: "open"}
		if name == rdmaread.Name && n.rdma != nil {
			works, troubles := n.rdmaPorts()
			if len(troubles) > 0 {
				c.State, c.Found = StateWarn, "open, but "+strings.Join(troubles, "; ")
				c.Remedy = "mend it: the node uses what works, and looks by itself for what is back; its log"
			}
			if !works && n.config.Transfer.Require == name {
				c.State = StateFail
			}
			if staged := n.staged(); staged != "" && c.State == StateOK {
				c.State, c.Found = StateWarn, "open, but "+staged
				c.Remedy = "mend what it names, then restart the node: until then bytes take the way through host memory"
			}
		}
		if i := slices.IndexFunc(n.refused, func(r refusal) bool { return r.transport == name }); i >= 0 {
			c.State, c.Found = StateAbsent, n.refused[i].reason
			c.Remedy = "mend it and restart the node, if the node is to have it"
		}
		list = append(list, c)
	}
	return list
}

// machine is where a check looks: files are all of it, the rest is what files do
// not tell.
type machine struct {
	files       fs.FS // "/"
	libraryPath string
	uid         int
	running     bool  // as the node itself, which has taken what it needs
	locked      bool  // rdma's memory included
	arenaPage   int64 // bytes of the pages that its arena lies on; 0: not in host memory

	rlimit  func(resource int) (soft uint64, err error)
	memlock func(need uint64) error
	open    func(path string) error    // for reading and writing, and closes it again
	load    func(library string) error // binds verbs
	gpus    func(library string) ([]gpu, error)
	synced  func() (bool, error) // the clock, with another one
}

func thisMachine() machine {
	return machine{
		files: os.DirFS("/"), libraryPath: os.Getenv("LD_LIBRARY_PATH"), uid: os.Getuid(),
		rlimit: func(resource int) (uint64, error) {
			var r unix.Rlimit
			err := unix.Getrlimit(resource, &r)
			return r.Cur, err
		},
		memlock: rdma.CheckMemlock, load: rdma.Load, gpus: openGPUs,
		open: func(path string) error {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			return f.Close()
		},
		synced: func() (bool, error) {
			var t unix.Timex
			state, err := unix.Adjtimex(&t) // with no mode set it only tells
			return state != unix.TIME_ERROR && t.Status&unix.STA_UNSYNC == 0, err
		},
	}
}

func (m machine) examine(e Examination) []Check {
	fabric := m.fabric(e.Config)
	list := []Check{m.memoryLock(e.Config, fabric), m.openFiles(e.Config), m.hugePages(e.Config), m.devShm(), m.rendezvous(e.Config), m.receiveBuffer()}
	list = append(list, m.ports(e)...)
	list = append(list, fabric.checks...)
	list = append(list, m.gpu(e.Config, fabric)...)
	return append(list, m.clock())
}

// lockedBytes are what rdma locks but for its queues, and what that is: the arenas
// of all ranks, or where they are on GPUs what they may be staged in, and the seal
// table. What an engine lends may be either.
func lockedBytes(c *config.Config) (n int64, what string) {
	if len(c.Arena.Devices()) > 0 {
		return stagingShare(c) + memory.Words*8, "memory for staging"
	}
	if c.Arena.Memory == config.EngineMemory {
		what = " that the engine lends, if it is in host memory"
	}
	return int64(len(c.Arena.Ranks))*c.Geometry().Layout.Bytes() + memory.Words*8, "the arena" + what
}

// sizeText is a size for people, in whole MiB where there is one.
func sizeText(n uint64) string {
	const mib = 1 << 20
	if n > mib && n < math.MaxInt64-mib {
		n = (n + mib - 1) / mib * mib
	}
	return config.Size(min(n, math.MaxInt64)).String()
}

// memoryLock compares the limit with what rdma registers.
func (m machine) memoryLock(c *config.Config, f fabric) Check {
	check := Check{Name: "memory lock", State: StateOK}
	allowed, limited := allowedLock(m.memlock(math.MaxInt64))
	switch {
	case m.locked:
		check.Found = "what is needed was locked when the node started"
		return check
	case !limited:
		check.Found = "not limited"
		return check
	case !f.usable:
		check.Found = sizeText(allowed) + " may be locked; only rdma locks memory, and is not used here"
		return check
	case c == nil:
		check.State, check.Remedy = StateWarn, rdma.MemlockAdvice
		check.Found = fmt.Sprintf("%s may be locked; rdma locks the whole arena (-c FILE says how much that is)", sizeText(allowed))
		return check
	}
	bytes, what := lockedBytes(c)
	need := (uint64(bytes) + rdmaread.SpareBytes) * uint64(f.locks)
	check.Found = fmt.Sprintf("%s may be locked, rdma locks %s: %s, the seal table, and queues", sizeText(allowed), sizeText(need), what)
	if f.locks > 1 {
		check.Found += fmt.Sprintf(", for each of %d devices", f.locks)
	}
	if m.memlock(need) != nil {
		check.State, check.Remedy = StateFail, rdma.MemlockAdvice
		if c.Arena.Memory == config.EngineMemory { // which memory that is, is not known
			check.State = StateWarn
		}
	}
	return check
}

// allowedLock is what an error of [rdma.CheckMemlock] says may be locked.
func allowedLock(err error) (bytes uint64, limited bool) {
	if e, ok := errors.AsType[*rdma.MemlockError](err); ok {
		return e.Allowed, true
	}
	return 0, false
}

// fewFiles are so few descriptors that a cluster of some hundred nodes may run
// out of them: a peer takes up to ten.
const fewFiles = 4096

// leastChunk is how small the chunks are in which engines lend the memory of GPUs.
const leastChunk = 2 << 20

// openFiles compares the limit with what peers take, and the memory of an engine,
// which may come in chunks with a descriptor each.
func (m machine) openFiles(c *config.Config) Check {
	soft, err := m.rlimit(unix.RLIMIT_NOFILE)
	check := Check{Name: "open files", State: StateOK}
	need, lent := uint64(fewFiles), ""
	if c != nil && c.Arena.Memory == config.EngineMemory && (!m.running || m.arenaPage == 0) {
		chunks := len(c.Arena.Ranks) * int(min(maxLendFiles, (c.Geometry().Layout.Bytes()+leastChunk-1)/leastChunk))
		need += filesOfLent(chunks)
		lent = fmt.Sprintf(", and memory of a GPU that an engine lends in chunks (expandable segments) up to %d", filesOfLent(chunks))
	}
	switch {
	case err != nil:
		check.State, check.Found = StateWarn, err.Error()
	case soft == math.MaxUint64:
		check.Found = "not limited"
	default:
		check.Found = fmt.Sprintf("%d; a peer takes up to ten%s", soft, lent)
		if soft < need {
			enough := max(65536, need)
			check.State, check.Remedy = StateWarn, fmt.Sprintf("ulimit -n %d; systemd: LimitNOFILE=%d", enough, enough)
		}
	}
	return check
}

// hugePages tells of the pool, and of a node that runs what its arena lies on.
func (m machine) hugePages(c *config.Config) Check {
	check := Check{Name: "huge pages", State: StateOK}
	info := m.lines("proc/meminfo")
	size, free := number(info["Hugepagesize"])<<10, max(0, number(info["HugePages_Free"])-number(info["HugePages_Rsvd"]))
	switch {
	case c != nil && c.Arena.HugePages == "never":
		check.Found = "not wanted: arena.huge_pages is never"
		return check
	case c != nil && c.Arena.Memory == config.EngineMemory:
		check.Found = "not needed: the arena is the engine's"
		return check
	case m.running && m.arenaPage == 0, c != nil && len(c.Arena.Devices()) > 0:
		check.Found = "not needed: the arena is in the memory of a GPU"
		return check
	case m.running:
		if m.arenaPage > int64(os.Getpagesize()) {
			check.Found = "the arena lies on pages of " + sizeText(uint64(m.arenaPage))
			return check
		}
		check.State, check.Found = StateAbsent, "the arena lies on small pages"
	case size == 0:
		check.State, check.Found = StateAbsent, "this kernel has none"
		return check
	case c == nil && free > 0:
		check.Found = fmt.Sprintf("%d of %s are free", free, sizeText(uint64(size)))
		return check
	case free == 0:
		check.State, check.Found = StateAbsent, "none are free: small pages are used"
	default:
		check.Found = fmt.Sprintf("%d of %s are free", free, sizeText(uint64(size)))
	}
	if c == nil || size == 0 {
		check.Remedy = "sysctl vm.nr_hugepages=N, before the agent starts"
		return check
	}
	rank := c.Geometry().Layout.Bytes()
	need := int64(len(c.Arena.Ranks)) * ((rank + size - 1) / size)
	if rank < 8*size {
		check.Found += "; it is too small for huge ones"
		return check
	}
	check.Found += fmt.Sprintf("; the arena takes %d", need)
	if m.running || need > free {
		if free > 0 && !m.running {
			check.State = StateWarn
		}
		check.Remedy = fmt.Sprintf("sysctl vm.nr_hugepages=%d, then start the agent; registering and copying get faster", need)
	}
	return check
}

// devShm is looked at because others need it.
func (m machine) devShm() Check {
	check := Check{Name: "/dev/shm", State: StateOK, Found: "not needed: arenas are memfds, which count as shared memory of the agent's cgroup, whatever its size"}
	if _, err := fs.Stat(m.files, "dev/shm"); err != nil {
		check.State = StateAbsent
	}
	return check
}

// rendezvous applies the rules of transfer/rendezvous to the directory.
func (m machine) rendezvous(c *config.Config) Check {
	check := Check{Name: "rendezvous", State: StateOK}
	dir, bad := filepath.Dir(config.DefaultSocket("node")), StateWarn
	if c != nil {
		dir = c.Transfer.Rendezvous
		ipc := uses(c, cudaipc.Name) && c.Arena.Memory != config.HostMemory
		if !uses(c, shm.Name) && !ipc {
			check.State, check.Found = StateAbsent, "not needed: neither shm nor cudaipc is used"
			return check
		}
		if c.Transfer.Require == shm.Name || c.Transfer.Require == cudaipc.Name {
			bad = StateFail
		}
	}
	info, err := fs.Stat(m.files, rooted(dir))
	owner := m.uid
	if err == nil {
		if s, ok := info.Sys().(*syscall.Stat_t); ok {
			owner = int(s.Uid)
		}
	}
	const another = "or set transfer.rendezvous to a directory of the agent's user"
	switch {
	case errors.Is(err, fs.ErrNotExist):
		check.Found = dir + " is not there; the agent makes it"
	case err != nil:
		check.State, check.Found, check.Remedy = bad, err.Error(), "let this user read it, "+another
	case !info.IsDir():
		check.State, check.Found, check.Remedy = bad, dir+" is no directory", "remove it, "+another
	case owner != m.uid:
		check.State, check.Found = bad, fmt.Sprintf("%s belongs to user %d, this is user %d", dir, owner, m.uid)
		check.Remedy = fmt.Sprintf("chown %d %s, %s", m.uid, dir, another)
	case info.Mode().Perm()&0o022 != 0:
		check.State, check.Found = bad, fmt.Sprintf("%s is writable by others (mode %#o), so it is not used", dir, info.Mode().Perm())
		check.Remedy = fmt.Sprintf("chmod 0700 %s, %s", dir, another)
	default:
		check.Found = dir + " can be used"
	}
	return check
}

// rooted is an absolute path as a name in the files of a machine.
func rooted(p string) string { return cmp.Or(strings.Trim(path.Clean("/"+p), "/"), ".") }

// uses says whether a configuration lets a transport be used.
func uses(c *config.Config, transport string) bool {
	return slices.Contains(c.Transfer.Transports, transport) && (c.Transfer.Require == "" || c.Transfer.Require == transport)
}

// gossipBuffer is what the gossip port asks for.
const gossipBuffer = 4 << 20

func (m machine) receiveBuffer() Check {
	const file = "proc/sys/net/core/rmem_max"
	check := Check{Name: "receive buffer", State: StateOK}
	b, err := fs.ReadFile(m.files, file)
	most := number(string(b))
	switch {
	case err != nil:
		check.State, check.Found = StateAbsent, "net.core.rmem_max is not shown here"
	case most < gossipBuffer:
		check.State, check.Found = StateWarn, fmt.Sprintf("net.core.rmem_max is %d: gossip may be lost in bursts, and is then repaired", most)
		check.Remedy = fmt.Sprintf("sysctl net.core.rmem_max=%d", gossipBuffer)
	default:
		check.Found = fmt.Sprintf("net.core.rmem_max is %d", most)
	}
	return check
}

// ports looks who has those of the configuration, or the default ones.
func (m machine) ports(e Examination) []Check {
	c, bad := e.Config, StateFail
	if c == nil {
		c, bad = config.Default(), StateWarn
	}
	http := c.Telemetry.Bind
	if !http.IsValid() {
		http = c.Node.Bind
	}
	var list []Check
	for _, p := range []struct {
		name      string
		bind      netip.Addr
		port      int
		protocols []string
	}{
		{"gossip", c.Node.Bind, c.Ports.Gossip, []string{"tcp", "udp"}},
		{"peer", c.Node.Bind, c.Ports.Peer, []string{"tcp"}},
		{"data", c.Node.Bind, c.Ports.Data, []string{"tcp"}},
		{"http", http, c.Ports.HTTP, []string{"tcp"}},
	} {
		check := Check{Name: "port " + p.name, State: StateOK}
		serving := e.Serving[p.name]
		switch {
		case m.running && serving == "":
			check.State, check.Found = StateAbsent, "not opened: nothing of this node needs it"
		case m.running || serving != "" && strings.HasSuffix(serving, ":"+strconv.Itoa(p.port)):
			check.Found = serving + " is the node's"
		case p.port == 0:
			check.Found = "any free one"
		default:
			at := netip.AddrPortFrom(p.bind, uint16(p.port))
			if by := m.listener(at, p.protocols); by != "" {
				check.State, check.Found = bad, fmt.Sprintf("%s is taken by %s", at, by)
				check.Remedy = fmt.Sprintf("stop that, or set ports.%s", p.name)
			} else {
				check.Found = at.String() + " is free"
			}
		}
		list = append(list, check)
	}
	return list
}

// listener says who keeps a port from being bound; "" if nobody does.
func (m machine) listener(at netip.AddrPort, protocols []string) string {
	for _, protocol := range protocols {
		for _, table := range []string{protocol, protocol + "6"} {
			text, err := fs.ReadFile(m.files, "proc/net/"+table)
			if err != nil {
				continue
			}
			for line := range strings.Lines(string(text)) {
				// SL LOCAL REMOTE STATE QUEUES TIMER RETRANSMITS UID TIMEOUT INODE ...
				f := strings.Fields(line)
				if len(f) < 10 || protocol == "tcp" && f[3] != "0A" { // LISTEN
					continue
				}
				local, ok := kernelAddress(f[1])
				if !ok || local.Port() != at.Port() {
					continue
				}
				if a := local.Addr(); a == at.Addr().Unmap() || a.IsUnspecified() || at.Addr().IsUnspecified() {
					return fmt.Sprintf("%s (%s)", m.holder(f[9], f[7]), protocol)
				}
			}
		}
	}
	return ""
}

// kernelAddress reads an address of /proc/net: words of 32 bits as this machine
// keeps them, which is little endian on all that kvferry runs on, and the port.
func kernelAddress(s string) (netip.AddrPort, bool) {
	host, port, ok := strings.Cut(s, ":")
	b, err := hex.DecodeString(host)
	n, errPort := strconv.ParseUint(port, 16, 16)
	if !ok || err != nil || errPort != nil || len(b)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for word := range slices.Chunk(b, 4) {
		slices.Reverse(word)
	}
	a, ok := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(a.Unmap(), uint16(n)), ok
}

// holder names the process that has a socket, or its user if that is another one.
func (m machine) holder(inode, uid string) string {
	links, err := fs.Glob(m.files, "proc/[0-9]*/fd/[0-9]*")
	if err != nil {
		return "user " + uid
	}
	for _, link := range links {
		if to, err := fs.ReadLink(m.files, link); err == nil && to == "socket:["+inode+"]" {
			process := path.Dir(path.Dir(link))
			name, _ := fs.ReadFile(m.files, path.Join(process, "comm"))
			return fmt.Sprintf("%s, process %s", cmp.Or(strings.TrimSpace(string(name)), "unnamed"), path.Base(process))
		}
	}
	return "a process of user " + uid
}

// clock is shown for whoever compares logs.
func (m machine) clock() Check {
	check := Check{Name: "clock", State: StateOK}
	synced, err := m.synced()
	switch {
	case err != nil:
		check.State, check.Found = StateAbsent, fmt.Sprintf("whether it is synchronised is not shown: %v", err)
	case synced:
		check.Found = "synchronised; kvferry needs no clocks that agree"
	default:
		check.Found = "not synchronised; kvferry needs no clocks that agree, but logs are easier to compare"
	}
	return check
}

// exported is what exports says of a library that has a function.
const exported = "libibverbs has ibv_reg_dmabuf_mr"

// exports looks into the verbs library as it lies there.
func (m machine) exports(function string) string {
	at := rdma.Library(m.files, m.libraryPath)
	if at == "" {
		return "no libibverbs"
	}
	b, err := fs.ReadFile(m.files, at)
	switch {
	case err != nil:
		return "libibverbs cannot be read"
	case bytes.Contains(b, []byte("\x00"+function+"\x00")):
		return exported
	default:
		return "libibverbs has no " + function
	}
}

// atLeast compares a kernel's release, such as 6.1.0-57-amd64.
func atLeast(release string, major, minor int) bool {
	var a, b int
	if n, _ := fmt.Sscanf(release, "%d.%d", &a, &b); n != 2 {
		return false
	}
	return a > major || a == major && b >= minor
}

// text is the content of a short file, "" if there is none.
func (m machine) text(name string) string {
	b, _ := fs.ReadFile(m.files, name)
	return strings.TrimSpace(string(b))
}

// lines reads a file of lines such as "HugePages_Free: 5".
func (m machine) lines(name string) map[string]string {
	fields := make(map[string]string)
	for line := range strings.Lines(m.text(name)) {
		key, value, _ := strings.Cut(line, ":")
		fields[key] = strings.TrimSpace(value)
	}
	return fields
}

// number reads the first word of a text; 0 if that is none, or too large to be
// multiplied.
func number(s string) int64 {
	words := strings.Fields(s)
	if len(words) == 0 {
		return 0
	}
	n, err := strconv.ParseInt(words[0], 10, 64)
	if err != nil || n < 0 || n > math.MaxInt64>>20 {
		return 0
	}
	return n
}
