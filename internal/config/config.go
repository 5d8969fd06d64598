// Package config is the one YAML file that sets up a node: its keys, their
// defaults, and what may stand in them.
//
// A [Config] comes about in four layers, each over the one before: the
// defaults, the file, the environment (KVFERRY_ARENA_PAGES for arena.pages),
// the command line (--set arena.pages=1024). [Load] does all four and ends
// with [Config.Validate], which fills in what follows from other keys and
// reports everything that is wrong at once. A value remembers where it came
// from, so that every report names file, line, and column, or the variable,
// or the flag.
//
// The file is YAML of the plain kind: groups, keys, scalars, lists. Unknown
// and repeated keys are errors, and so are anchors, aliases, tags, and a second
// document. Whether this machine has what a configuration asks for, such as a
// GPU, is not looked at here.
package config

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/kvferry/kvferry/internal/page"
)

// Config sets up one node. It is a plain value: copy it, but do not change it
// while another goroutine reads it.
type Config struct {
	Node      Node      `yaml:"node"`
	Ports     Ports     `yaml:"ports"`
	Arena     Arena     `yaml:"arena"`
	Transfer  Transfer  `yaml:"transfer"`
	Cluster   Cluster   `yaml:"cluster"`
	Security  Security  `yaml:"security"`
	Timers    Timers    `yaml:"timers"`
	Telemetry Telemetry `yaml:"telemetry"`

	origins map[string]origin // by key, of what is not a default
	broken  map[string]bool   // keys whose value could not be read, and was reported
}

// Node is who this node is, and where.
type Node struct {
	Name  string `yaml:"name"`  // default: the host's name
	Group string `yaml:"group"` // nodes that share one engine's ranks; default: the name
	Role  string `yaml:"role"`  // prefill, decode, or both: a hint, it forbids nothing

	// Bind is where all services of peers listen. Advertise is what other nodes
	// dial; needed only where Bind is unspecified (0.0.0.0, ::), else it is Bind.
	Bind      netip.Addr `yaml:"bind"`
	Advertise netip.Addr `yaml:"advertise"`

	// StateDir keeps the node's incarnation; "" keeps nothing.
	StateDir string `yaml:"state_dir"`
	// Socket is where engines and the command line connect. The default is
	// kvferry/NAME.sock in $XDG_RUNTIME_DIR, or in /run without one.
	Socket string `yaml:"socket"`
}

// Ports are the node's ports; 0 takes any free one.
type Ports struct {
	Gossip int `yaml:"gossip"` // udp and tcp
	Peer   int `yaml:"peer"`
	Data   int `yaml:"data"`
	HTTP   int `yaml:"http"`
}

// Arena is the KV memory of each local rank, and what engine it is of.
type Arena struct {
	Ranks     []int `yaml:"ranks"`      // local ranks, ascending
	WorldSize int   `yaml:"world_size"` // ranks of the whole engine; default: the last local rank + 1
	// Memory says where the arenas lie: in host memory ([HostMemory]), in that of
	// the devices that it names ([Arena.Devices]), or where the engine has them
	// ([EngineMemory]).
	Memory string `yaml:"memory"`
	// Allocate says who gives pages to requests: node, or, of memory of its own,
	// engine.
	Allocate string `yaml:"allocate"`
	// CUDALibrary is the path of libcuda; "": where the loader finds it.
	CUDALibrary string `yaml:"cuda_library"`
	HugePages   string `yaml:"huge_pages"` // of host memory: auto or never

	Model    string `yaml:"model"`
	Revision string `yaml:"revision"`

	Pages Pages `yaml:"pages"` // of one rank, the sink page included: a count, or a size
	// HostPages is what each rank has in host memory besides, for tokens that are
	// offloaded; none: there is no host tier.
	HostPages Pages `yaml:"host_pages"`
	// Evict says what is offloaded when pages are short: the request that was
	// active least recently (recent), the one with the most pages (pages), or
	// nothing unless an engine asks for it (never).
	Evict string `yaml:"evict"`

	PageSize int `yaml:"page_size"` // tokens
	// MaxSeqLen bounds the tokens of one stream; 0: nothing but the pages does.
	MaxSeqLen int `yaml:"max_seq_len"`
	Layers    int `yaml:"layers"`
	Heads     int `yaml:"heads"` // KV heads on one rank; default: what kv_heads and world_size say
	// KVHeads and QOHeads are those of the model, for all ranks together; 0: heads
	// says it all. QOHeads must divide, too; default: KVHeads.
	KVHeads int    `yaml:"kv_heads"`
	QOHeads int    `yaml:"qo_heads"`
	HeadDim int    `yaml:"head_dim"`
	DType   string `yaml:"dtype"`  // bf16, fp16, fp32, fp8e4m3, or fp8e5m2
	Layout  string `yaml:"layout"` // NHD or HND
}

// Transfer is how KV is pulled.
type Transfer struct {
	Transports []string `yaml:"transports"` // in order of preference
	// Require names the one transport that may be used: a peer that it does not
	// reach is an error, not a reason for another. "" takes the best.
	Require string `yaml:"require"`
	// Lanes are the connections of tcp that share one large read, Workers the
	// copies of shm that run at once; 0: what the transport thinks best.
	Lanes   int `yaml:"lanes"`
	Workers int `yaml:"workers"`
	// Rendezvous is the directory in which nodes of one host find each other for
	// shm: those that name the same one do. Default: the directory of Node.Socket.
	Rendezvous string `yaml:"rendezvous"`
	// Verify page compares what has landed with checksums that the owner makes
	// when it publishes, if it is set there, too; none does not.
	Verify string `yaml:"verify"`
	// Staging is the host memory through which bytes of device memory go where
	// nothing moves them from device to device, for the node and all transports
	// together. Only where an arena is device memory is it allocated. A node gives
	// each transport its share: what transports take where nobody says a size is for
	// those who open one without a node.
	Staging Size   `yaml:"staging"`
	RDMA    RDMA   `yaml:"rdma"`
	Limits  Limits `yaml:"limits"`
}

// RDMA is how rdma reads. What is left at its default fits most fabrics.
type RDMA struct {
	// Devices are those that may be used, each "mlx5_0" for all its ports that
	// are active, or "mlx5_0:1" for one of them. None: all that there are.
	Devices []string `yaml:"devices"`
	// GIDIndex is the source address's place in a port's table; -1 chooses: RoCE
	// v2 over IPv4 before global IPv6.
	GIDIndex int `yaml:"gid_index"`
	// TrafficClass is the byte of that name in the packet's header, which is DSCP
	// times four on RoCE, ServiceLevel the lane of InfiniBand and the priority of
	// RoCE without an address that names one.
	TrafficClass int `yaml:"traffic_class"`
	ServiceLevel int `yaml:"service_level"`
	MTU          int `yaml:"mtu"` // bytes of a packet; 0: the smaller of both ports'
	// Timeout is how long an answer is waited for before a packet is sent again:
	// 4.096 us times two to this. RetryCount is how often, until the peer counts
	// as gone.
	Timeout    int `yaml:"timeout"`
	RetryCount int `yaml:"retry_count"`
	// Reads are under way at once on one queue pair, QueuePairs are those of one
	// pair of ports; 0: what both devices can, and as many as fill the link.
	Reads      int `yaml:"reads"`
	QueuePairs int `yaml:"queue_pairs"`
	// Library is the path of libibverbs; "": where the loader finds it.
	Library string `yaml:"library"`
}

// Limits bound one node's pulls and one attempt at a pull: it may take
// Base + bytes/Rate, and connecting Dial of that. A pull is read in slices, so
// that what is urgent does not wait for the whole of what is not.
type Limits struct {
	InFlight int           `yaml:"in_flight"` // slices that are read at once; more wait
	Bytes    Size          `yaml:"bytes"`     // of them together
	Waiting  int           `yaml:"waiting"`   // slices that may wait; a pull that finds no room is refused
	Slice    Size          `yaml:"slice"`     // bytes of one at most
	Dial     time.Duration `yaml:"dial"`
	Base     time.Duration `yaml:"base"`
	Rate     Size          `yaml:"rate"` // bytes a second
}

// Cluster is how nodes find each other.
type Cluster struct {
	Name    string   `yaml:"name"`    // nodes of another name are strangers
	Join    []string `yaml:"join"`    // host:port of the gossip of other nodes
	Keyring []Key    `yaml:"keyring"` // the first one encrypts; none: gossip is plain
	Preset  string   `yaml:"preset"`  // default, or fast: every interval divided by ten
}

// Security is who this node is to others, and whom it lets in. Without files
// everybody who reaches the ports is trusted.
type Security struct {
	// Paths of PEM files: this node's certificate, whose subject alternative name
	// is the node's name, its key, and the authority of all. All three or none.
	Certificate string `yaml:"certificate"`
	Key         string `yaml:"key"`
	CA          string `yaml:"ca"`
	// Peers are the nodes that are let in, by patterns of their names, as of
	// [path.Match]. Empty: every one that has a certificate of the authority.
	Peers []string `yaml:"peers"`
}

// On says whether peers must prove who they are.
func (s Security) On() bool { return s.Certificate != "" }

// Timers are durations that this node measures by its own clock.
type Timers struct {
	Hold         time.Duration `yaml:"hold"`        // an unread publication keeps its pages
	MaxHold      time.Duration `yaml:"max_hold"`    // no lease keeps them longer
	Lease        time.Duration `yaml:"lease"`       // a reader's lease, from each renewal
	LeaseRenew   time.Duration `yaml:"lease_renew"` // between renewals
	Stall        time.Duration `yaml:"stall"`       // an attempt without a byte
	Attempts     int           `yaml:"attempts"`    // at one retrieval
	BackoffMin   time.Duration `yaml:"backoff_min"` // before the second attempt
	BackoffMax   time.Duration `yaml:"backoff_max"`
	SessionGrace time.Duration `yaml:"session_grace"` // an engine's session without its event stream
	Tombstone    time.Duration `yaml:"tombstone"`     // late acknowledgements are known as such
	Drain        time.Duration `yaml:"drain"`         // what runs when the node is to end has so long
	Grace        time.Duration `yaml:"grace"`         // a lost node's publications are hidden, not forgotten
}

// Telemetry is what the node tells about itself.
type Telemetry struct {
	Bind netip.Addr `yaml:"bind"` // of ports.http; default: node.bind
}

// Default is the configuration of an empty file, before [Config.Validate]. It
// is not valid: there is no default model, nor the size of its KV.
func Default() *Config {
	return &Config{
		Node:  Node{Role: "both", Bind: netip.AddrFrom4([4]byte{127, 0, 0, 1})},
		Ports: Ports{Gossip: 7900, Peer: 7901, Data: 7902, HTTP: 7903},
		Arena: Arena{Ranks: []int{0}, Memory: HostMemory, Allocate: NodeAllocates, HugePages: "auto", Evict: "recent", DType: "bf16", Layout: "NHD"},
		Transfer: Transfer{
			Verify:     "none",
			Transports: Transports(),
			Staging:    256 << 20,
			RDMA:       RDMA{GIDIndex: -1, Timeout: 14, RetryCount: 6},
			Limits: Limits{
				InFlight: 64, Bytes: 256 << 20, Waiting: 4096, Slice: 32 << 20,
				Dial: 5 * time.Second, Base: 60 * time.Second, Rate: 10_000_000,
			},
		},
		Cluster: Cluster{Name: "default", Preset: "default"},
		Timers: Timers{
			Hold: 30 * time.Second, MaxHold: 900 * time.Second, Lease: 20 * time.Second, LeaseRenew: 5 * time.Second,
			Stall: 2 * time.Second, Attempts: 3, BackoffMin: 50 * time.Millisecond, BackoffMax: 2 * time.Second,
			SessionGrace: 10 * time.Second, Tombstone: 600 * time.Second, Drain: 10 * time.Second, Grace: 30 * time.Second,
		},
	}
}

// Load returns a valid configuration: the defaults, the file at path ("" for
// none), the environment of this process, and then sets, each "key=value". A
// fault of content is one or more [*Error], joined: all that is wrong in all
// of them, unless the file is no YAML at all.
func Load(path string, sets ...string) (*Config, error) {
	c := Default()
	var errs []error
	if path != "" {
		b, err := read(path)
		if err != nil {
			return nil, fmt.Errorf("read configuration: %w", err)
		}
		if c, err = parse(path, b); c == nil {
			return nil, err
		}
		errs = append(errs, err)
	}
	errs = append(errs, c.SetEnviron(os.Environ()))
	for _, s := range sets {
		key, value, ok := strings.Cut(s, "=")
		if !ok {
			errs = append(errs, &Error{Where: "--set " + s, Problem: "want KEY=VALUE, such as arena.pages=1024"})
			continue
		}
		errs = append(errs, c.Set(key, value))
	}
	if err := errors.Join(append(errs, c.Validate())...); err != nil {
		return nil, err
	}
	return c, nil
}

// read returns the content of a file of at most maxDocument bytes.
func read(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxDocument+1))
}

// Marshal returns the configuration as a document that [Parse] reads back. It
// holds the keyring in the clear.
func (c *Config) Marshal() ([]byte, error) { return yaml.Marshal(c) }

// Redacted is Marshal for people and their logs: each key of the keyring is its
// [Key.ID], which [Parse] takes for no key.
func (c *Config) Redacted() ([]byte, error) {
	return yaml.MarshalWithOptions(c, yaml.CustomMarshaler(func(k Key) ([]byte, error) { return []byte(strconv.Quote(k.ID())), nil }))
}

// Geometry is what peers must agree on to exchange KV with this node. The
// configuration must be valid.
func (c *Config) Geometry() page.Geometry {
	return page.Geometry{
		Model:     c.Arena.Model,
		Revision:  c.Arena.Revision,
		WorldSize: c.Arena.WorldSize,
		Layout:    c.Arena.layout(c.Arena.Pages),
	}
}

// HostLayout is the memory of the host tier, of one rank; ok is false if there
// is none. The configuration must be valid.
func (c *Config) HostLayout() (_ page.Layout, ok bool) {
	l := c.Arena.layout(c.Arena.HostPages)
	return l, l.Pages > 0
}

// Error is one thing that is wrong.
type Error struct {
	Key     string // such as "arena.pages"; "" if it is not about one key
	Where   string // "prefill.yaml:3:10", "KVFERRY_ARENA_PAGES", "--set arena.pages"; "" of a default or a missing key
	Excerpt string // the line of the file with a mark under the place; "" if not of a file, or secret
	Problem string // what is wrong, and what to write instead
}

func (e *Error) Error() string {
	s := e.Problem
	if e.Key != "" && !strings.HasSuffix(e.Where, " "+e.Key) {
		s = e.Key + ": " + s
	}
	if e.Where != "" {
		s = e.Where + ": " + s
	}
	if e.Excerpt != "" {
		s += "\n" + e.Excerpt
	}
	return s
}

// origin is where a value came from: Where and Excerpt of its errors.
type origin struct{ where, excerpt string }

// fault is an error at a key, placed where its value came from.
func (c *Config) fault(key, format string, args ...any) *Error {
	o := c.origins[key]
	return &Error{Key: key, Where: o.where, Excerpt: o.excerpt, Problem: fmt.Sprintf(format, args...)}
}

// setBroken notes that a key's value was read, or was not; [Config.Validate]
// says nothing more of one that was not.
func (c *Config) setBroken(key string, broken bool) {
	if broken && c.broken == nil {
		c.broken = make(map[string]bool)
	}
	if broken {
		c.broken[key] = true
	} else {
		delete(c.broken, key)
	}
}

// isBroken tells of a key, and of one in a group that is broken as a whole.
func (c *Config) isBroken(key string) bool {
	for b := range c.broken {
		if key == b || strings.HasPrefix(key, b+".") {
			return true
		}
	}
	return false
}

// anyBroken tells of the keys in a group.
func (c *Config) anyBroken(group string) bool {
	for b := range c.broken {
		if b == group || strings.HasPrefix(b, group+".") {
			return true
		}
	}
	return false
}

func (c *Config) setOrigin(key string, o origin) {
	if c.origins == nil {
		c.origins = make(map[string]origin)
	}
	c.origins[key] = o
}
