package config

import (
	"bytes"
	"cmp"
	"errors"
	"math"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// Transports are the transports that may be named in transfer.transports, in the
// order that they have if nothing is said.
func Transports() []string { return []string{"cudaipc", "shm", "rdma", "tcp"} }

// Bounds of the transfer section.
const (
	maxLanes   = 64
	maxWorkers = 256
	maxPath    = 4096 - 1 // of Linux
	maxReads   = 4096     // at once
	maxWaiting = 1 << 20
	minStaging = 16 << 20 // of which each of four has what rdmaread needs at least
	maxStaging = 1 << 40
	minSlice   = 4 << 10
	maxUnder   = 1 << 40 // bytes that are read at once
)

// Bounds of transfer.rdma: what the fields of a queue pair hold.
const (
	maxGID     = 255
	maxClass   = 255
	maxLevel   = 15
	maxTimeout = 31
	maxRetries = 6
	maxDepth   = 128 // reads of a queue pair
	maxPairs   = 64  // of a pair of ports
)

// maxSocketPath is the longest path of a unix socket. Beside the node's is one
// that hands out descriptors, or one where an engine brings its memory, too.
const maxSocketPath = 107

// maxTimer bounds every duration.
const maxTimer = 24 * time.Hour

// Validate fills in the defaults that follow from other keys, and checks
// everything. The error joins one [*Error] for each thing that is wrong.
func (c *Config) Validate() error {
	v := validation{config: c}
	v.node()
	v.ports()
	v.arena()
	v.transfer()
	v.cluster()
	v.security()
	v.timers()
	if !c.Telemetry.Bind.IsValid() {
		c.Telemetry.Bind = c.Node.Bind
	}
	// What has been reported as unreadable is neither missing nor out of bounds.
	return errors.Join(slices.DeleteFunc(v.errs, func(err error) bool {
		e, ok := errors.AsType[*Error](err)
		return ok && e.Key != "" && c.isBroken(e.Key)
	})...)
}

// validation gathers what is wrong.
type validation struct {
	config *Config
	errs   []error
}

func (v *validation) wrong(key, format string, args ...any) {
	v.errs = append(v.errs, v.config.fault(key, format, args...))
}

// oneOf checks a word.
func (v *validation) oneOf(key, value string, want ...string) {
	if !slices.Contains(want, value) {
		v.wrong(key, "unknown %.80q; want %s", value, strings.Join(want, ", "))
	}
}

// upTo checks a number: at least 1.
func (v *validation) upTo(key string, n, most int) {
	switch {
	case n >= 1 && n <= most:
	case n == 0 && v.config.origins[key] == origin{}:
		v.wrong(key, "is missing; want 1 to %d", most)
	default:
		v.wrong(key, "%d is not in 1 to %d", n, most)
	}
}

// name checks what stands in addresses, files, and logs.
func (v *validation) name(key, value string) {
	if id.Node(value).Validate() != nil {
		v.wrong(key, "%.80q is not a name; want 1 to %d letters, digits, '-', '_', or '.'", value, id.MaxNode)
	}
}

// DefaultSocket is where a node of that name has its engine socket unless
// node.socket says otherwise.
func DefaultSocket(name string) string {
	run := os.Getenv("XDG_RUNTIME_DIR")
	if run == "" {
		run = "/run"
	}
	return filepath.Join(run, "kvferry", name+".sock")
}

func (v *validation) node() {
	n := &v.config.Node
	if n.Name == "" {
		host, err := os.Hostname()
		if err != nil || id.Node(host).Validate() != nil {
			v.wrong("node.name", "is missing, and the host's name %.80q cannot serve; want 1 to %d letters, digits, '-', '_', or '.'", host, id.MaxNode)
			host = "-"
		}
		n.Name = host
	} else {
		v.name("node.name", n.Name)
	}
	if n.Group == "" {
		n.Group = n.Name
	} else {
		v.name("node.group", n.Group)
	}
	v.oneOf("node.role", n.Role, "prefill", "decode", "both")

	if !n.Bind.IsValid() {
		v.wrong("node.bind", "is empty; want an address of this machine, or 0.0.0.0 for all of them")
	}
	switch {
	case n.Advertise.IsValid():
		if n.Advertise.IsUnspecified() || n.Advertise.Zone() != "" || n.Advertise.IsMulticast() {
			v.wrong("node.advertise", "%s cannot be dialled; want the address at which other nodes reach this one", n.Advertise)
		}
	case n.Bind.IsUnspecified():
		v.wrong("node.advertise", "is missing, and node.bind is %s, which nobody can dial; want the address at which other nodes reach this one", n.Bind)
	default:
		n.Advertise = n.Bind
	}

	if n.Socket == "" {
		n.Socket = DefaultSocket(n.Name)
	}
	longest := maxSocketPath - len(".fd")
	if v.config.Arena.Memory == EngineMemory {
		longest = maxSocketPath - len(".arena")
	}
	if len(n.Socket) > longest {
		v.wrong("node.socket", "%q has %d bytes, and a unix socket's path may have %d here; want a shorter one", n.Socket, len(n.Socket), longest)
	}
}

func (v *validation) ports() {
	p := v.config.Ports
	taken := map[int]string{}
	for _, port := range []struct {
		key    string
		number int
	}{{"ports.gossip", p.Gossip}, {"ports.peer", p.Peer}, {"ports.data", p.Data}, {"ports.http", p.HTTP}} {
		if port.number < 0 || port.number > 65535 {
			v.wrong(port.key, "%d is not a port; want 1 to 65535, or 0 for any free one", port.number)
			continue
		}
		if other, ok := taken[port.number]; ok && port.number != 0 {
			v.wrong(port.key, "%d is also %s; want four different ports", port.number, other)
		}
		taken[port.number] = port.key
	}
}

// heads takes a rank's share of the model's heads, if those are said.
func (v *validation) heads() {
	a := &v.config.Arena
	said := v.config.origins["arena.heads"] != origin{}
	switch {
	case a.KVHeads == 0 && a.QOHeads != 0:
		v.wrong("arena.qo_heads", "%d is of no use without arena.kv_heads", a.QOHeads)
	case a.KVHeads == 0:
	case a.KVHeads < 1 || a.KVHeads > page.MaxHeads*id.MaxRanks:
		v.upTo("arena.kv_heads", a.KVHeads, page.MaxHeads*id.MaxRanks)
		return
	default:
		kv, _, err := page.Shard(a.KVHeads, cmp.Or(a.QOHeads, a.KVHeads), a.WorldSize)
		if err != nil {
			v.wrong("arena.kv_heads", "%v", err)
			return
		}
		if said && a.Heads != kv {
			v.wrong("arena.heads", "%d is not what arena.kv_heads and arena.world_size come to, which is %d; want one of them", a.Heads, kv)
			return
		}
		a.Heads = kv
	}
	v.upTo("arena.heads", a.Heads, page.MaxHeads)
}

// device matches one of arena.memory: what follows "cuda:".
var device = regexp.MustCompile(`^(0|[1-9][0-9]{0,2}|GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})$`)

func (v *validation) memory() {
	a := v.config.Arena
	v.library("arena.cuda_library", a.CUDALibrary)
	if a.Memory == HostMemory || a.Memory == EngineMemory {
		return
	}
	before, named := len(v.errs), strings.Split(a.Memory, ",")
	for _, name := range named {
		name = strings.TrimSpace(name)
		if id, ok := strings.CutPrefix(name, devicePrefix); !ok || !device.MatchString(id) {
			v.wrong("arena.memory", "unknown %.80q; want host, engine, or devices: cuda:N or cuda:GPU-UUID (nvidia-smi -L), for each local rank one, as in cuda:0,cuda:1, or one for all", name)
		}
	}
	if len(v.errs) == before && len(named) > 1 && len(named) != len(a.Ranks) {
		v.wrong("arena.memory", "names %d devices for the %d ranks of arena.ranks; want as many, or one for all", len(named), len(a.Ranks))
	}
}

// What arena.memory may be besides the names of devices.
const (
	HostMemory   = "host"   // the agent's, shared with the engine
	EngineMemory = "engine" // memory, of devices or of the host, that the engine has made and lends
)

// What arena.allocate may be.
const (
	NodeAllocates   = "node"
	EngineAllocates = "engine"
)

const devicePrefix = "cuda:"

// allocate lets an engine choose the pages of its own memory, and of no other.
func (v *validation) allocate() {
	a := v.config.Arena
	v.oneOf("arena.allocate", a.Allocate, NodeAllocates, EngineAllocates)
	switch {
	case a.Allocate != EngineAllocates:
	case a.Memory != EngineMemory:
		v.wrong("arena.allocate", "engine needs arena.memory: engine; where the node has the memory it gives the pages to requests")
	case a.HostPages != Pages{}:
		v.wrong("arena.host_pages", "%s with arena.allocate: engine; want none: an engine that chooses its pages keeps its own host tier", a.HostPages)
	}
}

// Devices are those that arena.memory names, one for each local rank: an ordinal
// of this process, or "GPU-" and a UUID. Nil: it names none. The configuration
// must be valid.
func (a Arena) Devices() []string {
	if a.Memory == HostMemory || a.Memory == EngineMemory {
		return nil
	}
	named := strings.Split(a.Memory, ",")
	devices := make([]string, len(a.Ranks))
	for i := range devices {
		devices[i] = strings.TrimPrefix(strings.TrimSpace(named[min(i, len(named)-1)]), devicePrefix)
	}
	return devices
}

func (v *validation) arena() {
	a := &v.config.Arena
	before := len(v.errs)
	switch {
	case len(a.Ranks) == 0:
		v.wrong("arena.ranks", "is empty; want the local ranks, such as [0]")
	case !slices.IsSorted(a.Ranks) || len(slices.Compact(slices.Clone(a.Ranks))) != len(a.Ranks):
		v.wrong("arena.ranks", "%v is not ascending", a.Ranks)
	case a.Ranks[0] < 0 || a.Ranks[len(a.Ranks)-1] >= id.MaxRanks:
		v.wrong("arena.ranks", "%v is not within 0 to %d", a.Ranks, id.MaxRanks-1)
	default:
		last := a.Ranks[len(a.Ranks)-1]
		if a.WorldSize == 0 && v.config.origins["arena.world_size"] == (origin{}) {
			a.WorldSize = last + 1
		}
		if a.WorldSize <= last || a.WorldSize > id.MaxRanks {
			v.wrong("arena.world_size", "%d is not in %d to %d: the last local rank is %d", a.WorldSize, last+1, id.MaxRanks, last)
		}
	}
	v.memory()
	v.allocate()
	v.oneOf("arena.huge_pages", a.HugePages, "auto", "never")
	v.oneOf("arena.evict", a.Evict, "recent", "pages", "never")
	if a.Model == "" {
		v.wrong("arena.model", "is missing; want the model's name: nodes of different models exchange no KV")
	}
	for _, f := range []struct{ key, value string }{{"arena.model", a.Model}, {"arena.revision", a.Revision}} {
		if len(f.value) > page.MaxModel || !utf8.ValidString(f.value) {
			v.wrong(f.key, "%.80q has %d bytes, want at most %d of UTF-8", f.value, len(f.value), page.MaxModel)
		}
	}
	v.upTo("arena.page_size", a.PageSize, page.MaxPageSize)
	if a.MaxSeqLen < 0 || a.MaxSeqLen > math.MaxInt32 {
		v.wrong("arena.max_seq_len", "%d is not in 0 to %d", a.MaxSeqLen, math.MaxInt32)
	}
	v.upTo("arena.layers", a.Layers, page.MaxLayers)
	v.heads()
	v.upTo("arena.head_dim", a.HeadDim, page.MaxHeadDim)
	if _, err := page.ParseDType(a.DType); err != nil {
		v.oneOf("arena.dtype", a.DType, page.BF16.String(), page.FP16.String(), page.FP32.String(), page.FP8E4M3.String(), page.FP8E5M2.String())
	}
	if _, err := page.ParseOrder(a.Layout); err != nil {
		v.oneOf("arena.layout", a.Layout, page.NHD.String(), page.HND.String())
	}
	if len(v.errs) > before || v.config.anyBroken("arena") { // what a page holds is not known
		if a.Pages == (Pages{}) {
			v.wrong("arena.pages", "is missing; want a number of pages, such as 1024, or a size, such as 2GiB")
		}
		return
	}

	l := a.layout(a.Pages)
	const least = 2 // the sink, and one to use
	switch {
	case a.Pages == Pages{}:
		v.wrong("arena.pages", "is missing; want a number of pages, such as 1024, or a size, such as 2GiB; one page is %s", Size(l.PageBytes()))
	case l.Pages < least:
		v.wrong("arena.pages", "%s is less than %d pages of %s", a.Pages, least, Size(l.PageBytes()))
	case l.Pages > page.MaxPages:
		v.wrong("arena.pages", "%s is %d pages of %s, want at most %d; larger pages would do", a.Pages, l.Pages, Size(l.PageBytes()), page.MaxPages)
	default:
		if err := v.config.Geometry().Validate(); err != nil {
			v.wrong("arena.pages", "%s: %v", a.Pages, err)
		}
	}
	switch host := a.layout(a.HostPages); {
	case a.HostPages == Pages{}: // no host tier
	case host.Pages < 1:
		v.wrong("arena.host_pages", "%s is less than a page of %s", a.HostPages, Size(l.PageBytes()))
	case host.Pages > page.MaxPages:
		v.wrong("arena.host_pages", "%s is %d pages of %s, want at most %d; larger pages would do", a.HostPages, host.Pages, Size(l.PageBytes()), page.MaxPages)
	default:
		if err := host.Validate(); err != nil {
			v.wrong("arena.host_pages", "%s: %v", a.HostPages, err)
		}
	}
}

// layout is the memory of one rank that has so many pages. Names that are not
// valid give 0.
func (a Arena) layout(pages Pages) page.Layout {
	order, _ := page.ParseOrder(a.Layout) // Validate has reported it
	dtype, _ := page.ParseDType(a.DType)
	l := page.Layout{
		Order: order, DType: dtype, Layers: a.Layers, Pages: pages.Count,
		PageSize: a.PageSize, Heads: a.Heads, HeadDim: a.HeadDim,
	}
	if pages.Size > 0 && l.PageBytes() > 0 {
		l.Pages = int(int64(pages.Size) / l.PageBytes())
	}
	return l
}

func (v *validation) transfer() {
	t := v.config.Transfer
	if len(t.Transports) == 0 {
		v.wrong("transfer.transports", "is empty; want some of %s", strings.Join(Transports(), ", "))
	}
	for i, name := range t.Transports {
		v.oneOf("transfer.transports", name, Transports()...)
		if slices.Contains(t.Transports[:i], name) {
			v.wrong("transfer.transports", "%q stands twice", name)
		}
	}
	v.oneOf("transfer.verify", t.Verify, "none", "page")
	if t.Require != "" && !slices.Contains(t.Transports, t.Require) {
		v.wrong("transfer.require", "%.80q is not one of transfer.transports %v", t.Require, t.Transports)
	}
	if t.Staging < minStaging || t.Staging > maxStaging {
		v.wrong("transfer.staging", "%s is not in %s to %s", t.Staging, Size(minStaging), Size(maxStaging))
	}
	v.orDefault("transfer.lanes", t.Lanes, maxLanes)
	v.orDefault("transfer.workers", t.Workers, maxWorkers)
	v.rendezvous()
	v.rdma()
	v.upTo("transfer.limits.in_flight", t.Limits.InFlight, maxReads)
	v.upTo("transfer.limits.waiting", t.Limits.Waiting, maxWaiting)
	if t.Limits.Bytes < minSlice || t.Limits.Bytes > maxUnder {
		v.wrong("transfer.limits.bytes", "%s is not in %s to %s", t.Limits.Bytes, Size(minSlice), Size(maxUnder))
	} else if t.Limits.Slice < minSlice || t.Limits.Slice > t.Limits.Bytes {
		v.wrong("transfer.limits.slice", "%s is not in %s to transfer.limits.bytes (%s)", t.Limits.Slice, Size(minSlice), t.Limits.Bytes)
	}
	v.timer("transfer.limits.dial", t.Limits.Dial)
	v.timer("transfer.limits.base", t.Limits.Base)
	if t.Limits.Rate < 1 {
		v.wrong("transfer.limits.rate", "%s is no rate; want bytes a second, such as 10MB", t.Limits.Rate)
	}
}

// orDefault checks a number of which 0 leaves the choice to whom it is for.
func (v *validation) orDefault(key string, n, most int) {
	if n < 0 || n > most {
		v.wrong(key, "%d is not in 1 to %d; 0, or leaving it out, takes the default", n, most)
	}
}

// between checks a number.
func (v *validation) between(key string, n, least, most int) {
	if n < least || n > most {
		v.wrong(key, "%d is not in %d to %d", n, least, most)
	}
}

// rdmaDevice matches a device, or a port of one: what the kernel takes for a name,
// less what would be odd in a configuration.
var rdmaDevice = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,63}(:[1-9][0-9]{0,2})?$`)

func (v *validation) rdma() {
	r := v.config.Transfer.RDMA
	for i, d := range r.Devices {
		if !rdmaDevice.MatchString(d) {
			v.wrong("transfer.rdma.devices", "%.80q is no device; want a name such as mlx5_0, or one of its ports, such as mlx5_0:1", d)
			continue
		}
		name, _, _ := strings.Cut(d, ":")
		for _, other := range r.Devices[:i] {
			if whole, _, _ := strings.Cut(other, ":"); other == d || whole == name && (other == name || d == name) {
				v.wrong("transfer.rdma.devices", "%s names what %s names, too", d, other)
			}
		}
	}
	if r.GIDIndex < -1 || r.GIDIndex > maxGID {
		v.wrong("transfer.rdma.gid_index", "%d is not in 0 to %d; -1, or leaving it out, lets the node choose", r.GIDIndex, maxGID)
	}
	v.between("transfer.rdma.traffic_class", r.TrafficClass, 0, maxClass)
	v.between("transfer.rdma.service_level", r.ServiceLevel, 0, maxLevel)
	if !slices.Contains([]int{0, 256, 512, 1024, 2048, 4096}, r.MTU) {
		v.wrong("transfer.rdma.mtu", "%d is none of 256, 512, 1024, 2048, 4096; 0, or leaving it out, takes the smaller of both ports'", r.MTU)
	}
	if r.Timeout == 0 {
		v.wrong("transfer.rdma.timeout", "0 waits for ever, also for a peer that is gone; want 1 to %d: 4.096us times two to this", maxTimeout)
	} else {
		v.between("transfer.rdma.timeout", r.Timeout, 1, maxTimeout)
	}
	if r.RetryCount == maxRetries+1 {
		v.wrong("transfer.rdma.retry_count", "%d tries for ever on some devices, also a peer that is gone; want 1 to %d", r.RetryCount, maxRetries)
	} else {
		v.between("transfer.rdma.retry_count", r.RetryCount, 1, maxRetries)
	}
	v.orDefault("transfer.rdma.reads", r.Reads, maxDepth)
	v.orDefault("transfer.rdma.queue_pairs", r.QueuePairs, maxPairs)
	v.library("transfer.rdma.library", r.Library)
}

// library checks the path of a shared library.
func (v *validation) library(key, value string) {
	if value != "" && (!filepath.IsAbs(value) || len(value) > maxPath) {
		v.wrong(key, "%.80q is no path that begins with /, of at most %d bytes; leaving it out takes what the loader finds", value, maxPath)
	}
}

// rendezvous is where all nodes of this user have their sockets, unless it is said.
func (v *validation) rendezvous() {
	t := &v.config.Transfer
	switch {
	case t.Rendezvous == "":
		t.Rendezvous = filepath.Dir(v.config.Node.Socket)
	case !filepath.IsAbs(t.Rendezvous):
		v.wrong("transfer.rendezvous", "%.80q is relative, and nodes that start elsewhere would not meet there; want a path that begins with /", t.Rendezvous)
	}
	if len(t.Rendezvous) > maxPath || strings.ContainsRune(t.Rendezvous, 0) {
		v.wrong("transfer.rendezvous", "%.80q is no path of a directory; want one of at most %d bytes", t.Rendezvous, maxPath)
	}
}

func (v *validation) cluster() {
	c := v.config.Cluster
	v.name("cluster.name", c.Name)
	for _, seed := range c.Join {
		if !HostPort(seed) {
			v.wrong("cluster.join", "%.80q is not host:port, such as 192.0.2.7:7900 or [fd00::7]:7900", seed)
		}
	}
	for i, k := range c.Keyring {
		if slices.ContainsFunc(c.Keyring[:i], func(other Key) bool { return bytes.Equal(k, other) }) {
			v.wrong("cluster.keyring", "the key with the id %s stands twice", k.ID())
		}
	}
	v.oneOf("cluster.preset", c.Preset, "default", "fast")
}

func (v *validation) security() {
	s := v.config.Security
	files := []struct{ key, path string }{
		{"security.certificate", s.Certificate}, {"security.key", s.Key}, {"security.ca", s.CA},
	}
	if s.Certificate != "" || s.Key != "" || s.CA != "" {
		for _, f := range files {
			if f.path == "" {
				v.wrong(f.key, "is missing; want certificate, key, and ca, or none of them")
			}
		}
	} else if len(s.Peers) > 0 {
		v.wrong("security.peers", "needs security.certificate, key, and ca: without them nobody's name is proved")
	}
	for _, p := range s.Peers {
		if !namePattern(p) {
			v.wrong("security.peers", "%.80q is no pattern of nodes' names; want names, in which * stands for any characters", p)
		}
	}
}

// namePattern tells whether [path.Match] understands a pattern, and a name can
// match it: whoever lets in "a b" lets in nobody.
func namePattern(p string) bool {
	_, err := path.Match(p, "")
	plain := strings.Map(func(r rune) rune {
		if strings.ContainsRune(`*?[]^\`, r) {
			return '-'
		}
		return r
	}, p)
	return err == nil && id.Node(plain).Validate() == nil
}

// HostPort tells whether s is a host's name or address, and a port. It looks
// nothing up.
func HostPort(s string) bool {
	if at, err := netip.ParseAddrPort(s); err == nil {
		return at.Port() != 0
	}
	i := strings.LastIndexByte(s, ':')
	if i < 1 || i > 253 {
		return false
	}
	for _, c := range s[:i] {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-', c == '.', c == '_':
		default:
			return false
		}
	}
	port, err := strconv.ParseUint(s[i+1:], 10, 16)
	return err == nil && port != 0
}

// timer checks a duration: more than nothing, and at most a day.
func (v *validation) timer(key string, d time.Duration) {
	if d <= 0 || d > maxTimer {
		v.wrong(key, "%v is not in 1ns to %v", d, maxTimer)
	}
}

func (v *validation) timers() {
	t := v.config.Timers
	before := len(v.errs)
	for _, timer := range []struct {
		key string
		d   time.Duration
	}{
		{"timers.hold", t.Hold},
		{"timers.max_hold", t.MaxHold},
		{"timers.lease", t.Lease},
		{"timers.lease_renew", t.LeaseRenew},
		{"timers.stall", t.Stall},
		{"timers.backoff_min", t.BackoffMin},
		{"timers.backoff_max", t.BackoffMax},
		{"timers.session_grace", t.SessionGrace},
		{"timers.tombstone", t.Tombstone},
		{"timers.drain", t.Drain},
		{"timers.grace", t.Grace},
	} {
		v.timer(timer.key, timer.d)
	}
	v.upTo("timers.attempts", t.Attempts, 100)
	if len(v.errs) > before || v.config.anyBroken("timers") {
		return
	}
	if t.LeaseRenew > t.Lease/2 {
		v.wrong("timers.lease_renew", "%v is more than half of timers.lease (%v): one lost renewal would end the lease", t.LeaseRenew, t.Lease)
	}
	if t.Hold > t.MaxHold {
		v.wrong("timers.hold", "%v is longer than timers.max_hold (%v)", t.Hold, t.MaxHold)
	}
	if t.Lease > t.MaxHold {
		v.wrong("timers.lease", "%v is longer than timers.max_hold (%v)", t.Lease, t.MaxHold)
	}
	if t.BackoffMin > t.BackoffMax {
		v.wrong("timers.backoff_min", "%v is longer than timers.backoff_max (%v)", t.BackoffMin, t.BackoffMax)
	}
}
