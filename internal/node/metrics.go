package node

import (
	"errors"
	"maps"
	"runtime"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rdmaread"
)

// metrics knows the names of everything that is measured. What other packages
// count is read from their Stats when it is asked for; the fields are what the
// node itself sees pass. No label carries a request, a page, or an unbounded
// peer, and what has never happened shows as 0.
type metrics struct {
	registry *prometheus.Registry

	retrievals       *prometheus.CounterVec
	retrieveSeconds  *prometheus.HistogramVec
	chunkBytes       prometheus.Histogram
	stale            *prometheus.CounterVec
	verified         *prometheus.CounterVec
	acks             *prometheus.CounterVec
	renewals         *prometheus.CounterVec
	leaseSlack       prometheus.Histogram
	handshakes       *prometheus.CounterVec
	handshakeSeconds prometheus.Histogram
	fallbacks        *prometheus.CounterVec
	rejects          *prometheus.CounterVec
	authFailures     *prometheus.CounterVec
	badMessages      *prometheus.CounterVec
	pushDropped      prometheus.Counter
	holdSeconds      prometheus.Histogram
	offloads         *prometheus.CounterVec
	hostBytes        *prometheus.CounterVec
	evictions        *prometheus.CounterVec
	beaconSeconds    prometheus.Histogram
	notPassed        prometheus.Counter
}

// Of these one part is counted here, the others elsewhere.
const (
	authFailuresTotal, authFailuresHelp = "auth_failures_total", "Callers refused, by where they called."
	droppedTotal, droppedHelp           = "gossip_dropped_items_total", "Gossiped items that went no further here, by reason."
)

func newMetrics(n *Node) *metrics {
	m := &metrics{registry: prometheus.NewRegistry()}
	m.registry.MustRegister(snapshot{n}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kvferry_" + name, Help: help}, labels)
		m.registry.MustRegister(c)
		return c
	}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "kvferry_" + name, Help: help, Buckets: buckets})
		m.registry.MustRegister(h)
		return h
	}
	seconds := prometheus.ExponentialBuckets(100e-6, 2.5, 16)

	m.retrievals = counter("retrievals_total", "Retrievals that ended, by code and transport.", "code", "transport")
	m.retrieveSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "kvferry_retrieve_seconds", Help: "Time of a retrieval by phase.", Buckets: seconds,
	}, []string{"phase"})
	m.registry.MustRegister(m.retrieveSeconds)
	m.chunkBytes = histogram("read_chunk_bytes", "Bytes of one contiguous copy.", prometheus.ExponentialBuckets(256, 4, 12))
	m.verified = counter("verified_pages_total", "Pages compared with their owner's checksums, or not, by result.", "result")
	m.stale = counter("stale_reads_total", "Reads that ended stale, by who noticed.", "where")
	m.acks = counter("acks_sent_total", "Acknowledgements of ours that did not reach the owner.", "result")
	m.renewals = counter("lease_requests_total", "Leases asked for and renewed here, by the owner's answer.", "result")
	m.leaseSlack = histogram("lease_slack_seconds", "What was left of a lease of ours when its renewal was answered; less than 0: it had run out.", []float64{0, 0.1, 0.5, 1, 2.5, 5, 10, 15, 20, 30, 60})
	m.handshakes = counter("handshakes_total", "Hellos to peers.", "result")
	m.handshakeSeconds = histogram("handshake_seconds", "Time of a hello.", seconds)
	m.fallbacks = counter("transport_fallbacks_total", "Changes of the transport by which a peer is read: to a worse one, and back.", "from", "to", "reason")
	m.rejects = counter("compat_rejects_total", "Peers whose KV differs, by field.", "field")
	m.authFailures = counter(authFailuresTotal, authFailuresHelp, "surface")
	m.badMessages = counter("bad_messages_total", "Messages of peers that were refused.", "surface")
	m.pushDropped = counter("pushes_dropped_total", "Pushes left to gossip since the peer's queue was full.").WithLabelValues()
	m.holdSeconds = histogram("hold_seconds", "Time from the first publish of a publication to its end.", prometheus.ExponentialBuckets(0.01, 3, 12))
	m.offloads = counter("offloads_total", "Moves of requests to the host and back, by how they ended.", "direction", "result")
	m.hostBytes = counter("host_bytes_total", "Bytes copied to the host and back.", "direction")
	m.evictions = counter("evictions_total", "Requests that were offloaded to make room, by what for.", "cause")
	m.beaconSeconds = histogram("gossip_beacon_seconds", "Time from a beacon of ours to the answer of a member.", seconds)
	m.notPassed = counter(droppedTotal, droppedHelp, "reason").WithLabelValues("not_passed")

	for _, direction := range []string{"offload", "reload"} {
		m.hostBytes.WithLabelValues(direction)
		for _, result := range []string{"ok", "removed", "cut", "failed"} {
			m.offloads.WithLabelValues(direction, result)
		}
	}
	m.retrieveSeconds.WithLabelValues("read")
	for _, by := range n.config.Transfer.Transports {
		m.retrievals.WithLabelValues("ok", by)
	}
	for i, from := range n.config.Transfer.Transports {
		for _, to := range n.config.Transfer.Transports[i+1:] {
			m.fallbacks.WithLabelValues(from, to, whyUnavailable)
			m.fallbacks.WithLabelValues(from, to, whyFailed)
			m.fallbacks.WithLabelValues(to, from, whyRecovered)
		}
	}
	for vec, values := range map[*prometheus.CounterVec][]string{
		m.evictions: {forAdmit, forRetrieve, forReload},
		m.verified:  {"good", "bad", "unknown"},
		m.stale:     {"reader"}, m.acks: {"dropped", "lost"}, m.renewals: {"granted"}, m.handshakes: {"ok", "identity", "failed"},
		m.authFailures: {"arena", "engine", "fd", "peer"}, m.badMessages: {"gossip", "link", "push", "push_pull"},
		m.rejects: {"model", "revision", "world_size", "order", "dtype", "layers", "page_size", "heads", "head_dim"}, // of page.Difference
	} {
		for _, v := range values {
			vec.WithLabelValues(v)
		}
	}
	return m
}

func (m *metrics) retrieval(err error, by string, took time.Duration) {
	code := "ok"
	if err != nil {
		f, _ := failureOf(err)
		code = strings.ToLower(f.GetCode().String())
	}
	if by == "" {
		by = "none"
	}
	m.retrievals.WithLabelValues(code, by).Inc()
	m.retrieveSeconds.WithLabelValues("read").Observe(took.Seconds())
}

// chunks observes a bounded sample, so that it costs nothing a page.
func (m *metrics) chunks(copies []transfer.Copy) {
	const sample = 16
	for i := 0; i < len(copies); i += max(1, len(copies)/sample) {
		m.chunkBytes.Observe(float64(copies[i].Bytes))
	}
}

func (m *metrics) handshake(took time.Duration, err error) {
	result := "ok"
	switch {
	case err == nil:
	case errors.Is(err, transfer.ErrIdentity):
		result = "identity"
	default:
		result = "failed"
	}
	m.handshakes.WithLabelValues(result).Inc()
	m.handshakeSeconds.Observe(took.Seconds())
}

func (m *metrics) incompatible(field string) { m.rejects.WithLabelValues(field).Inc() }

func (m *metrics) renewal(refused string) {
	switch refused {
	case "":
		refused = "granted"
	case holdReleased, holdExpired, holdOffloaded, "revoked", "unknown", refusedFull, "failed":
	default:
		refused = "other" // it is the peer's word, and labels are bounded
	}
	m.renewals.WithLabelValues(refused).Inc()
}

// snapshot reads what other packages count when it is asked for.
type snapshot struct{ node *Node }

// Describe says nothing: what there is depends on the configuration.
func (snapshot) Describe(chan<- *prometheus.Desc) {}

// Collect is called once the node serves.
func (s snapshot) Collect(ch chan<- prometheus.Metric) {
	out, now := samples(ch), time.Now()
	s.state(out)
	s.owner(out, now)
	s.reader(out, now)
	s.transports(out)
	s.rdma(out)
	s.cuda(out)
	s.gossip(out)
	s.log(out, now)
	s.board(out, now)
}

// state is the node and its memory.
func (s snapshot) state(out samples) {
	n := s.node
	out.gauge("build_info", "Always 1.", 1, "version", n.version, "go", runtime.Version())
	if n.identity != nil {
		out.gauge("certificate_expires_seconds", "When this node's certificate ends, in unix time.", float64(n.identity.Expires().Unix()))
	}
	out.gauge("ready", "1 if /readyz says so.", bit(len(n.notReady()) == 0))
	out.gauge("draining", "1 if it takes no new work.", bit(n.isDraining()))
	out.gauge("sessions", "Engines at work.", float64(n.sessions.count()))
	out.gauge("registered_bytes", "Memory that peers can read.", float64(n.geometry.Layout.Bytes())*float64(len(n.ranks)))
	c := n.manager.Counts()
	out.gauges("pages", "Pages by state; published ones are in other states, too, and those of the host are no part of the arena.", "state", map[string]int{
		"free": c.Free, "owned": c.Owned, "limbo": c.Limbo, "quarantine": c.Quarantine, "sink": c.Sink, "published": c.Published, "engine": c.Engine,
		"host_free": c.HostFree, "host_used": c.HostUsed,
	})
	out.count("arena_faults_total", "Releases that the arena refused: a bug if not 0.", uint64(c.Faults))
}

// owner is what this node publishes.
func (s snapshot) owner(out samples, now time.Time) {
	ends := map[string]uint64{"released": 0, "expired": 0, "revoked": 0, "offloaded": 0, "failed": 0}
	maps.Copy(ends, s.node.owner.endings())
	out.counts("publications_total", "Publications that ended.", "outcome", ends)
	h := s.node.owner.holds.stats(now)
	out.gauges("publications", "Live publications by state.", "state", map[string]int{"open": h.open, "sealed": h.sealed, "leased": h.leased})
	out.gauge("tombstones", "Publications that have ended and are remembered.", float64(h.tombstones))
	out.gauge("leases", "Leases of readers on our publications.", float64(h.leases))
	out.age("oldest_seconds", "Age of the oldest of a kind.", h.oldest, "kind", "publication")
	out.counts("lease_renewals_total", "What became of readers' leases here.", "result", map[string]uint64{
		"granted": h.granted, "renewed": h.renewed, "refused": h.refused, "ran_out": h.ranOut,
	})
	for _, r := range []ackResult{ackCounted, ackDuplicate, ackLate, ackUnknown} {
		out.count("acks_total", "Acknowledgements of readers.", h.acks[r], "result", string(r))
	}
}

// reader is what is brought in here, and from whom.
func (s snapshot) reader(out samples, now time.Time) {
	n := s.node
	states := map[string]int{"waiting": 0, "queued": 0, "reading": 0, "backoff": 0}
	var oldest time.Duration
	for _, f := range n.follows.active() {
		f.mu.Lock()
		state := "waiting"
		if f.running != nil {
			state = f.running.state
		}
		f.mu.Unlock()
		states[state]++
		oldest = max(oldest, now.Sub(f.accepted))
	}
	out.gauges("retrievals_inflight", "Publications that are followed here, by state.", "state", states)
	out.age("oldest_seconds", "Age of the oldest of a kind.", oldest, "kind", "retrieval")
	q := n.reads.Stats()
	out.gauges("read_slices", "Slices of what is brought in, by whether they are read or wait for their turn.", "state", map[string]int{
		"reading": q.UnderWay.Places, "urgent": q.Urgent.Places, "other": q.Other.Places,
	})
	out.gauges("read_slice_bytes", "Bytes of these slices.", "state", map[string]int{
		"reading": int(q.UnderWay.Bytes), "urgent": int(q.Urgent.Bytes), "other": int(q.Other.Bytes),
	})
	out.age("oldest_seconds", "Age of the oldest of a kind.", q.Oldest, "kind", "slice")
	peers := map[string]int{"connected": 0, "connecting": 0, "failed": 0, "suspect": 0}
	for _, p := range n.peers.all() {
		state, _ := p.state()
		peers[state]++
	}
	out.gauges("peers", "Other members by state.", "state", peers)
}

// transports are those that are open.
func (s snapshot) transports(out samples) {
	for _, t := range s.node.counting {
		c, is := t.counts(), []string{"transport", t.transport}
		out.count("read_bytes_total", "Bytes read from peers.", c.readBytes, is...)
		out.count("staged_bytes_total", "Bytes that went through pinned host memory, since an arena is in the memory of a GPU: read from peers, and for them.", c.staged, is...)
		out.counts("reads_total", "Reads from peers, a slice each, by how they ended.", "result", map[string]uint64{
			"held": c.held, "stale": c.stale, "failed": c.failed,
		}, is...)
		if c.blind {
			out.count("served_links_total", "Links opened by peers that read by themselves.", c.links, is...)
		} else {
			out.count("served_bytes_total", "Bytes read by peers.", c.answered, is...)
			out.count("served_answers_total", "Answers with bytes, to reads of peers; a read is one or several.", c.answers, is...)
			out.count(authFailuresTotal, authFailuresHelp, c.unproven, "surface", "data")
		}
		out.counts("served_refused_total", "What was refused of what came to a transport.", "why", c.refused, is...)
		out.gauges("data_connections", "Connections that are open.", "by", c.connections, is...)
	}
}

// rdma is what only that transport counts: 0 where it is not open.
func (s snapshot) rdma(out samples) {
	var c rdmaread.Stats
	if s.node.rdma != nil {
		c = s.node.rdma.Stats()
	}
	out.gauge("rdma_registered_bytes", "Memory that devices have registered for peers to read, arenas and seal table, on all devices together.", float64(c.RegisteredBytes))
	out.counts("rdma_lane_failures_total", "What broken lanes made necessary: a window that another lane or a fresh queue pair ended, and a fresh queue pair.", "what", map[string]uint64{
		"failover": c.Failovers, "replaced": c.Replaced,
	})
	out.gauges("rdma_arenas", "Arenas in the memory of GPUs by how cards reach them, counted for each card; staged: through host memory, the slowest.", "memory", map[string]int{
		"dma-buf": c.DMABufs, "peermem": c.PeerMems, "staged": c.Staged,
	})
	out.count("rdma_crossings_total", "Calls into the verbs library to post reads and to reap them.", c.Crossings)
}

// cuda is what the driver was asked for: 0 where no arena is in device memory.
func (s snapshot) cuda(out samples) {
	var c cuda.Stats
	dead := false
	if r := s.node.cuda; r != nil {
		c, dead = r.Stats(), r.Reason() != nil
	}
	for d, name := range map[cuda.Direction]string{cuda.HostToDevice: "to_device", cuda.DeviceToHost: "to_host", cuda.DeviceToDevice: "within"} {
		out.count("cuda_copy_calls_total", "Calls of the driver that start copies, by direction.", c.Copies[d].Calls, "direction", name)
		out.count("cuda_copy_segments_total", "Contiguous stretches that copies were asked for.", c.Copies[d].Segments, "direction", name)
		out.count("cuda_copy_bytes_total", "Bytes of them.", c.Copies[d].Bytes, "direction", name)
		out.count("cuda_copy_slow_bytes_total", "Bytes of them whose host memory was not pinned.", c.Copies[d].Slow, "direction", name)
	}
	out.count("cuda_kernels_total", "Launches of the kernel that spreads small stretches.", c.Kernels)
	out.gauges("cuda_arenas", "Arenas in the memory of GPUs: this node's, and those of peers that it has imported.", "whose", map[string]int{
		"own": c.Arenas, "imported": c.Imported,
	})
	out.gauges("cuda_pinned_bytes", "Host memory that is registered with the driver, so that it is copied fast, and what is still to be.", "state", map[string]int{
		"pinned": int(c.Pinned), "pending": int(c.Pinning),
	})
	out.gauge("cuda_dead", "1 if a GPU has failed for good: the node ends, since only a new process gets it again.", bit(dead))
}

// gossip is what the cluster counts.
func (s snapshot) gossip(out samples) {
	g := s.node.cluster.Stats()
	out.counts("gossip_items_total", "Gossiped items.", "what", map[string]uint64{"out": g.ItemsOut, "in": g.ItemsIn})
	out.counts(droppedTotal, droppedHelp, "reason", map[string]uint64{"outbox_full": g.ItemsDropped, "not_offered_again": g.RingDropped})
	out.counts("gossip_bytes_total", "Bytes of gossip.", "direction", map[string]uint64{"out": g.BytesOut, "in": g.BytesIn})
	out.counts("gossip_packets_total", "Packets of gossip.", "direction", map[string]uint64{"out": g.PacketsOut, "in": g.PacketsIn})
	out.count("gossip_pushes_failed_total", "Packets of items that could not be sent to a member.", g.PushesFailed)
	out.count("gossip_bad_messages_total", "Gossip that could not be decoded, or came from a stranger: another key or cluster name.", g.BadMessages)
	out.count("gossip_unreadable_total", "Packets and streams that one side had no gossip key for.", g.Unreadable)
	out.counts("gossip_queue_drops_total", "Gossip that found a queue full.", "queue", map[string]uint64{
		"memberlist": g.HandoffDrops, "own": g.QueueDrops - min(g.HandoffDrops, g.QueueDrops),
	})
	out.count("gossip_streams_cut_total", "Streams that were too long, or too slow to prove a name.", g.StreamsCut)
	out.count(authFailuresTotal, authFailuresHelp, g.Strangers, "surface", "gossip")
	out.gauge("gossip_outbox", "Items that wait to be pushed.", float64(g.Outbox))
	out.age("gossip_outbox_age_seconds", "Age of the oldest item that waits to be pushed.", g.OutboxAge)
	out.gauge("gossip_ring", "Items that are to be offered again.", float64(g.Ring))

	out.gauge("members", "Live members, this one included.", float64(g.Members))
	out.counts("members_refused_total", "Announcements of members that were refused: stale, malformed, out of reach, too many, or of a name whose hash another has.", "why", map[string]uint64{
		"unfit": g.Refused, "collision": g.Collisions + s.node.board.Stats().Collisions,
	})
	out.count("members_conflicts_total", "Members of one life at two addresses.", g.Conflicts)
	out.count("members_diverged_total", "Times that the table of members had to be mended.", g.Diverged)

	out.gauge("gossip_keys", "Keys on the ring; 0: gossip is plain.", float64(g.Keys))
	out.gauge("gossip_key_generation", "Changes that have made the ring; 0: it is the configuration's.", float64(g.KeyGeneration))
	out.gauge("gossip_key_packets", "Packets of ours under the key in use.", float64(g.KeyPackets))
	out.gauge("gossip_nonce_budget_ratio", "Packets of ours under the key in use, times the members, in parts of the 2^32 that one key is good for.", float64(g.KeyPackets)*float64(g.Members)/(1<<32))
	out.count("gossip_key_saves_failed_total", "Rings that could not be kept in node.state_dir, and were not taken.", g.KeySaves)
}

// log is this node's own log.
func (s snapshot) log(out samples, now time.Time) {
	l := s.node.plog.Stats()
	out.counts("log_announcements_total", "Announcements made; of them, those overtaken before they were gossiped, and those gossiped without their pages, to save room.", "what", map[string]uint64{
		"made": l.Announced, "overtaken": l.Overtaken, "shortened": l.Shortened,
	})
	out.count("log_releases_total", "Ends of publications.", l.Released)
	out.count("log_items_total", "Items handed over for gossip.", l.Items)
	out.count("log_bytes_total", "Bytes of them.", l.ItemBytes)
	out.gauge("log_backlog", "Announcements and ends that wait for room in gossip.", float64(l.Waiting))
	out.age("log_backlog_age_seconds", "Age of the oldest that waits for room in gossip.", since(now, l.WaitingSince))
	out.gauges("log_publications", "Publications by whether they are announced yet.", "state", map[string]int{"announced": l.Live, "reserved": l.Reserved})
	out.gauges("log_sequence", "Sequences: the greatest, and the floor, up to which everything has ended.", "which", map[string]int{"max": int(l.Max), "floor": int(l.Floor)})
	out.gauge("seal_words_free", "Seal words that are free.", float64(l.Words))
	out.counts("log_nacks_total", "Questions of readers for what they miss.", "result", map[string]uint64{"answered": l.Nacks, "refused": l.NacksRefused})
	out.count("log_repairs_total", "Sequences that the answers spoke of.", l.Repairs)
	out.count("log_snapshots_total", "Snapshots given.", l.Snapshots)
	out.count("gossip_beacons_total", "Beacons.", l.Beacons, "what", "sent")
	out.counts("gossip_echoes_total", "Answers to beacons.", "what", map[string]uint64{"expected": l.EchoesExpected, "heard": l.EchoesHeard, "missed": l.EchoesMissed})
}

// board is the other owners' logs.
func (s snapshot) board(out samples, now time.Time) {
	b := s.node.board.Stats()
	out.counts("board_items_total", "Gossiped messages, and those of them that were news and passed on.", "what", map[string]uint64{"received": b.Items, "news": b.Passed})
	out.counts(droppedTotal, droppedHelp, "reason", map[string]uint64{
		"malformed": b.Malformed, "unknown_version": b.Unknown, "old_life": b.Old, "no_member": b.Unparked,
	})
	out.counts("board_announcements_total", "Announcements of others by what became of them.", "what", map[string]uint64{
		"news": b.News, "duplicate": b.Duplicates, "conflict": b.Conflicts, "no_room": b.Refused, "window_full": b.Gaps,
	})
	out.counts("board_ended_entries_total", "Publications of others that show no more; an expired one is released later, too.", "cause", map[string]uint64{
		"released": b.Released, "expired": b.Expired, "owner_gone": b.Dropped, "evicted": b.Evicted,
	})
	out.gauge("board_entries", "Publications of others that are known.", float64(b.Entries))
	out.gauge("board_owners", "Lives whose log is followed.", float64(b.Owners))
	out.gauge("board_parked", "Messages of owners that are no members yet.", float64(b.Parked))
	out.gauge("board_watched", "Requests that are waited for.", float64(b.Watched))
	out.gauge("board_table_bytes", "Page tables of others' publications, unfolded.", float64(b.TableBytes))
	out.count("board_tables_dropped_total", "Page tables given up for lack of room: they are looked up.", b.NoTable)
	out.age("board_gap_age_seconds", "For how long something of a member's log has been missing.", since(now, b.OldestGap))
	out.count("board_nacks_total", "Questions to owners for what is missing.", b.Nacks)
	out.counts("board_repairs_total", "Sequences asked for, and those that came after that.", "what", map[string]uint64{"asked": b.Asked, "repaired": b.Repaired})
	out.count("board_hash_mismatches_total", "Checkpoints that show that a release was missed.", b.Mismatches)
	out.counts("board_resyncs_total", "Snapshots of an owner's log, wished for and applied.", "what", map[string]uint64{"wished": b.Resyncs, "applied": b.Synced})
	out.counts("gossip_beacons_total", "Beacons.", "what", map[string]uint64{"received": b.Beacons, "ignored": b.OldBeacons})
	out.count("gossip_echoes_total", "Answers to beacons.", b.Echoes, "what", "sent")
}

// samples is where a collector puts what it has read. Labels are names, each
// with its value behind it.
type samples chan<- prometheus.Metric

func (out samples) put(kind prometheus.ValueType, name, help string, v float64, labels []string) {
	var names, values []string
	for i := 0; i < len(labels); i += 2 {
		names, values = append(names, labels[i]), append(values, labels[i+1])
	}
	out <- prometheus.MustNewConstMetric(prometheus.NewDesc("kvferry_"+name, help, names, nil), kind, v, values...)
}

func (out samples) gauge(name, help string, v float64, labels ...string) {
	out.put(prometheus.GaugeValue, name, help, v, labels)
}

func (out samples) age(name, help string, d time.Duration, labels ...string) {
	out.gauge(name, help, d.Seconds(), labels...)
}

func (out samples) count(name, help string, v uint64, labels ...string) {
	out.put(prometheus.CounterValue, name, help, float64(v), labels)
}

// gauges puts one for each value of a label.
func (out samples) gauges(name, help, label string, all map[string]int, labels ...string) {
	for value, v := range all {
		out.gauge(name, help, float64(v), append(labels, label, value)...)
	}
}

// counts puts one for each value of a label.
func (out samples) counts(name, help, label string, all map[string]uint64, labels ...string) {
	for value, v := range all {
		out.count(name, help, v, append(labels, label, value)...)
	}
}

// since is 0 for the zero time.
func since(now, t time.Time) time.Duration {
	if t.IsZero() {
		return 0
	}
	return max(0, now.Sub(t))
}

func bit(is bool) float64 {
	if is {
		return 1
	}
	return 0
}
