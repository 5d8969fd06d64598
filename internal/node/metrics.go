package node

import (
	"errors"
	"runtime"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/kvferry/kvferry/transfer"
)

// metrics knows the names of everything that is measured. What other packages
// count is read from their Stats when it is asked for; the fields are what the
// node itself sees pass. No label carries a request, a page, or an unbounded peer.
type metrics struct {
	registry *prometheus.Registry

	retrievals       *prometheus.CounterVec
	retrieveSeconds  *prometheus.HistogramVec
	chunkBytes       prometheus.Histogram
	stale            *prometheus.CounterVec
	acks             *prometheus.CounterVec
	renewals         *prometheus.CounterVec
	handshakes       *prometheus.CounterVec
	handshakeSeconds prometheus.Histogram
	fallbacks        *prometheus.CounterVec
	rejects          *prometheus.CounterVec
	authFailures     *prometheus.CounterVec
	badMessages      *prometheus.CounterVec
	pushDropped      prometheus.Counter
	holdSeconds      prometheus.Histogram
}

func newMetrics(n *Node) *metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kvferry_" + name, Help: help}, labels)
	}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: "kvferry_" + name, Help: help, Buckets: buckets})
	}
	seconds := prometheus.ExponentialBuckets(100e-6, 2.5, 16)
	m := &metrics{
		registry:   prometheus.NewRegistry(),
		retrievals: counter("retrievals_total", "Retrievals that ended, by code and transport.", "code", "transport"),
		retrieveSeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "kvferry_retrieve_seconds", Help: "Time of a retrieval by phase.", Buckets: seconds,
		}, []string{"phase"}),
		chunkBytes:       histogram("read_chunk_bytes", "Bytes of one contiguous copy.", prometheus.ExponentialBuckets(256, 4, 12)),
		stale:            counter("stale_reads_total", "Reads that ended stale, by who noticed.", "where"),
		acks:             counter("acks_sent_total", "Acknowledgements of ours that did not reach the owner.", "result"),
		renewals:         counter("lease_requests_total", "Leases asked for and renewed here, by the owner's answer.", "result"),
		handshakes:       counter("handshakes_total", "Hellos to peers.", "result"),
		handshakeSeconds: histogram("handshake_seconds", "Time of a hello.", seconds),
		fallbacks:        counter("transport_fallbacks_total", "Links opened by a worse transport.", "from", "to", "reason"),
		rejects:          counter("compat_rejects_total", "Peers whose KV differs, by field.", "field"),
		authFailures:     counter("auth_failures_total", "Callers refused.", "surface"),
		badMessages:      counter("bad_messages_total", "Messages of peers that were refused.", "surface"),
		pushDropped:      prometheus.NewCounter(prometheus.CounterOpts{Name: "kvferry_pushes_dropped_total", Help: "Pushes left to gossip since the peer's queue was full."}),
		holdSeconds:      histogram("hold_seconds", "Time from the first publish of a publication to its end.", prometheus.ExponentialBuckets(0.01, 3, 12)),
	}
	m.registry.MustRegister(
		m.retrievals, m.retrieveSeconds, m.chunkBytes, m.stale, m.acks, m.renewals, m.handshakes, m.handshakeSeconds,
		m.fallbacks, m.rejects, m.authFailures, m.badMessages, m.pushDropped, m.holdSeconds,
		snapshot{n}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
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
	case holdReleased, holdExpired, "revoked", "unknown", refusedFull, "failed":
	default:
		refused = "other" // it is the peer's word, and labels are bounded
	}
	m.renewals.WithLabelValues(refused).Inc()
}

// snapshot reads what other packages count when it is asked for.
type snapshot struct{ node *Node }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("kvferry_"+name, help, labels, nil)
}

// The descriptions are made when asked for; nothing is registered twice.
func (s snapshot) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(s, ch) }

func (s snapshot) Collect(ch chan<- prometheus.Metric) {
	n := s.node
	gauge := func(name, help string, v float64, labels ...string) {
		names, values := pairs(labels)
		ch <- prometheus.MustNewConstMetric(desc(name, help, names...), prometheus.GaugeValue, v, values...)
	}
	count := func(name, help string, v uint64, labels ...string) {
		names, values := pairs(labels)
		ch <- prometheus.MustNewConstMetric(desc(name, help, names...), prometheus.CounterValue, float64(v), values...)
	}
	gauge("build_info", "Always 1.", 1, "version", n.version, "go", runtime.Version())
	if n.cluster == nil { // not open yet
		return
	}
	now := time.Now()
	c := n.manager.Counts()
	for state, v := range map[string]int{"free": c.Free, "owned": c.Owned, "limbo": c.Limbo, "quarantine": c.Quarantine, "sink": c.Sink, "published": c.Published} {
		gauge("pages", "Pages by state; published ones are in other states, too.", float64(v), "state", state)
	}
	count("arena_faults_total", "Releases that the arena refused: a bug if not 0.", uint64(c.Faults))
	for cause, v := range n.owner.endings() {
		count("publications_total", "Publications that ended.", v, "outcome", cause)
	}
	h := n.owner.holds.stats(now)
	for state, v := range map[string]int{"open": h.open, "sealed": h.sealed, "leased": h.leased} {
		gauge("publications", "Live publications by state.", float64(v), "state", state)
	}
	gauge("leases", "Leases of readers on our publications.", float64(h.leases))
	gauge("oldest_seconds", "Age of the oldest of a kind.", h.oldest.Seconds(), "kind", "publication")
	for result, v := range map[string]uint64{"granted": h.granted, "renewed": h.renewed, "refused": h.refused, "ran_out": h.ranOut} {
		count("lease_renewals_total", "What became of readers' leases here.", v, "result", result)
	}
	for result, v := range h.acks {
		count("acks_total", "Acknowledgements of readers.", v, "result", string(result))
	}
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
	for state, v := range states {
		gauge("retrievals_inflight", "Publications that are followed here, by state.", float64(v), "state", state)
	}
	gauge("oldest_seconds", "Age of the oldest of a kind.", oldest.Seconds(), "kind", "retrieval")
	peers := map[string]int{"connected": 0, "connecting": 0, "failed": 0, "suspect": 0}
	for _, p := range n.peers.all() {
		state, _, _, _ := p.state()
		peers[state]++
	}
	for state, v := range peers {
		gauge("peers", "Other members by state.", float64(v), "state", state)
	}
	gauge("sessions", "Engines at work.", float64(n.sessions.count()))
	gauge("registered_bytes", "Memory that peers can read.", float64(n.geometry.Layout.Bytes())*float64(len(n.ranks)))
	for _, t := range n.transportStatus() {
		count("read_bytes_total", "Bytes read from peers.", t.GetReadBytes(), "transport", t.GetName())
		count("served_bytes_total", "Bytes read by peers.", t.GetServedBytes(), "transport", t.GetName())
	}
	if n.servers.tcp != nil {
		st := n.servers.tcp.Stats()
		for why, v := range map[string]uint64{
			"garbage": st.Garbage, "stranger": st.Strangers, "out_of_range": st.OutOfRange, "stale": st.ServedStale, "busy": st.Refused,
		} {
			count("served_refused_total", "What was refused at the data port.", v, "transport", "tcp", "why", why)
		}
	}
	g := n.cluster.Stats()
	for dir, v := range map[string]uint64{"out": g.ItemsOut, "in": g.ItemsIn, "dropped": g.ItemsDropped} {
		count("gossip_items_total", "Gossiped items.", v, "what", dir)
	}
	for dir, v := range map[string]uint64{"out": g.BytesOut, "in": g.BytesIn} {
		count("gossip_bytes_total", "Bytes of gossip.", v, "direction", dir)
	}
	for dir, v := range map[string]uint64{"out": g.PacketsOut, "in": g.PacketsIn} {
		count("gossip_packets_total", "Packets of gossip.", v, "direction", dir)
	}
	count("gossip_bad_messages_total", "Gossip that could not be decoded, or came from a stranger: another key or cluster name.", g.BadMessages)
	count("gossip_queue_drops_total", "Gossip that found a queue full.", g.QueueDrops)
	gauge("gossip_outbox", "Items that wait to be sent.", float64(g.Outbox))
	gauge("members", "Live members, this one included.", float64(g.Members))
	ready := 1.0
	if len(n.notReady()) > 0 {
		ready = 0
	}
	gauge("ready", "1 if /readyz says so.", ready)
}

func pairs(labels []string) (names, values []string) {
	for i := 0; i < len(labels); i += 2 {
		names, values = append(names, labels[i]), append(values, labels[i+1])
	}
	return names, values
}
