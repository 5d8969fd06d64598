package node_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/identity"
	"github.com/kvferry/kvferry/internal/page"
)

// sample is one line of /metrics.
type sample struct {
	name   string
	labels map[string]string
	value  float64
}

// key is how the line begins.
func (s sample) key() string {
	if len(s.labels) == 0 {
		return s.name
	}
	var labels []string
	for _, l := range slices.Sorted(maps.Keys(s.labels)) {
		labels = append(labels, fmt.Sprintf("%s=%q", l, s.labels[l]))
	}
	return s.name + "{" + strings.Join(labels, ",") + "}"
}

var (
	sampleLine = regexp.MustCompile(`^(\w+)(?:\{(.*)\})? (\S+)$`)
	labelPair  = regexp.MustCompile(`(\w+)="((?:[^"\\]|\\.)*)"`)
	familyLine = regexp.MustCompile(`(?m)^# TYPE (kvferry_\w+) (\w+)$`)
)

// exposition is /metrics as it is, and not compressed, which takes longer than all else.
func exposition(t testing.TB, n *member) []byte {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+n.Addresses().HTTP.String()+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept-Encoding", "identity")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("%s, %v\n%s", res.Status, err, raw)
	}
	return raw
}

// scrape reads /metrics: every family of ours with its type, and every sample.
func scrape(t testing.TB, n *member) (raw []byte, families map[string]string, samples map[string]sample) {
	t.Helper()
	raw = exposition(t, n)
	families, samples = make(map[string]string), make(map[string]sample)
	for _, m := range familyLine.FindAllSubmatch(raw, -1) {
		families[string(m[1])] = string(m[2])
	}
	for line := range strings.Lines(string(raw)) {
		if !strings.HasPrefix(line, "kvferry_") {
			continue
		}
		m := sampleLine.FindStringSubmatch(strings.TrimSuffix(line, "\n"))
		if m == nil {
			t.Fatalf("%q is no sample", line)
		}
		s := sample{name: m[1], labels: make(map[string]string)}
		for _, pair := range labelPair.FindAllStringSubmatch(m[2], -1) {
			s.labels[pair[1]] = pair[2]
		}
		var err error
		if s.value, err = strconv.ParseFloat(m[3], 64); err != nil {
			t.Fatal(err)
		}
		samples[s.key()] = s
	}
	return raw, families, samples
}

// documented are the metrics of the table in docs/operating.md, with their types.
func documented(t testing.TB) map[string]string {
	t.Helper()
	page, err := os.ReadFile("../../docs/operating.md")
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]string)
	for _, m := range regexp.MustCompile("(?m)^\\| `(kvferry_\\w+)(?:\\{[\\w,]+\\})?` \\| (\\w+) \\|").FindAllSubmatch(page, -1) {
		if all[string(m[1])] != "" {
			t.Errorf("%s stands twice in the table", m[1])
		}
		all[string(m[1])] = string(m[2])
	}
	return all
}

// words are the values that a label may have, whatever peers, engines, and
// strangers do.
func words() map[string][]string {
	codes := []string{"ok"}
	for _, code := range kvferrypb.Failure_Code_name {
		codes = append(codes, strings.ToLower(code))
	}
	return map[string][]string{
		"version": {""}, "go": {runtime.Version()},
		"code": codes, "transport": {"cudaipc", "shm", "rdma", "tcp", "none"}, "from": {"cudaipc", "shm", "rdma", "tcp"}, "to": {"cudaipc", "shm", "rdma", "tcp"}, "phase": {"read"},
		"state":   {"free", "owned", "limbo", "quarantine", "sink", "published", "engine", "pinned", "pending", "host_free", "host_used", "open", "sealed", "leased", "waiting", "queued", "reading", "backoff", "connected", "connecting", "failed", "suspect", "announced", "reserved", "urgent", "other"},
		"outcome": {"released", "expired", "revoked", "offloaded", "failed"}, "kind": {"publication", "retrieval", "slice"}, "where": {"reader"},
		"result": {
			"granted", "renewed", "refused", "ran_out", "counted", "duplicate", "late", "unknown", "dropped", "lost", "released", "expired", "revoked", "offloaded", "full", "failed", "other", "removed", "cut",
			"ok", "identity", "held", "stale", "answered", "good", "bad",
		},
		"why":     {"garbage", "stranger", "out_of_range", "stale", "busy", "evicted", "late", "unfit", "collision"},
		"field":   {"model", "revision", "world_size", "order", "dtype", "layers", "page_size", "heads", "head_dim"},
		"surface": {"arena", "engine", "fd", "peer", "data", "gossip", "link", "push", "push_pull"},
		"memory":  {"dma-buf", "peermem", "staged"}, "whose": {"own", "imported"},
		"direction": {"in", "out", "offload", "reload", "to_device", "to_host", "within"}, "by": {"peers", "us"}, "queue": {"memberlist", "own"}, "which": {"max", "floor"},
		"reason": {"outbox_full", "not_offered_again", "not_passed", "malformed", "unknown_version", "old_life", "no_member", "unavailable", "failed", "recovered"},
		"cause":  {"released", "expired", "owner_gone", "evicted", "admit", "retrieve", "reload"},
		"what": {
			"in", "out", "made", "overtaken", "shortened", "sent", "received", "ignored", "expected", "heard", "missed", "news", "duplicate", "conflict",
			"no_room", "window_full", "asked", "repaired", "wished", "applied", "failover", "replaced",
		},
	}
}

// TestMetricsBegin: what has never happened is 0, so that its first time shows
// as an increase.
func TestMetricsBegin(t *testing.T) {
	n := startNode(t, "fresh", nil)
	_, families, samples := scrape(t, n)
	want := documented(t)
	delete(want, "kvferry_certificate_expires_seconds") // and no certificate
	for name := range want {
		if families[name] == "" {
			t.Errorf("%s is not there", name)
		}
	}
	other := page.Geometry{Model: "m", Revision: "r", WorldSize: 1 << 20, Layout: page.Layout{Order: 200, DType: 200, Layers: -1, PageSize: -1, Heads: -1, HeadDim: -1}}
	for _, d := range n.config.Geometry().Differences(other) {
		if s, ok := samples[fmt.Sprintf("kvferry_compat_rejects_total{field=%q}", d.Field)]; !ok || s.value != 0 {
			t.Errorf("rejects by %s: %v, %v", d.Field, s, ok)
		}
	}
}

// TestMetrics: after traffic between real nodes, and the visits of strangers,
// /metrics has all that docs/operating.md has a line for and nothing else,
// spelled as Prometheus wants it, and no label says what others can choose.
func TestMetrics(t *testing.T) {
	a := newAuthority(t, year)
	set := [][2]string{{"cluster.keyring", testKey}, {"timers.lease_renew", "50ms"}, {"transfer.transports", "tcp,shm"}}
	prefill, decode := startSecure(t, a, set...)
	other := startWith(t, certified(t, a, configure(t, "decoy", prefill, append(set, [2]string{"arena.model", "another"})...), "prefill", "dec*"), nil)
	awaitPeers(t, prefill, decode, other)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	carry(t, "by push", bring{chunks: chunks(), target: "decode"}, p, d)
	carry(t, "by gossip", bring{chunks: chunks()}, p, d)

	// One that is followed for long, so that its lease is renewed.
	p.ingest("long")
	d.ingest("long")
	p.write("long", 8)
	p.publish("long", false, to("decode"))
	waits := d.retrieving("long", "", 0)

	// Without a certificate of the authority, on every port.
	stranger := identityOf(t, newAuthority(t, year), "decode")
	for protocol, at := range map[string]netip.AddrPort{
		identity.Gossip: prefill.Addresses().Gossip, identity.Peer: prefill.Addresses().Peer, identity.Data: prefill.Addresses().Data,
	} {
		config := stranger.Client(protocol, "")
		config.VerifyConnection = nil
		conn, err := net.Dial("tcp", at.String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := tls.Client(conn, config).HandshakeContext(t.Context()); err != nil {
			t.Errorf("%s: %v", protocol, err) // it is refused after this
		}
	}

	moved := map[*member][]string{
		prefill: {
			`kvferry_auth_failures_total{surface="gossip"}`, `kvferry_auth_failures_total{surface="peer"}`, `kvferry_auth_failures_total{surface="data"}`,
			`kvferry_compat_rejects_total{field="model"}`, `kvferry_certificate_expires_seconds`,
			`kvferry_gossip_items_total{what="out"}`, `kvferry_gossip_items_total{what="in"}`, `kvferry_gossip_bytes_total{direction="in"}`,
			`kvferry_log_announcements_total{what="made"}`, `kvferry_log_items_total`, `kvferry_log_bytes_total`, `kvferry_log_releases_total`,
			`kvferry_log_publications{state="announced"}`, `kvferry_log_sequence{which="max"}`, `kvferry_seal_words_free`,
			`kvferry_gossip_beacons_total{what="sent"}`, `kvferry_gossip_beacons_total{what="received"}`,
			`kvferry_gossip_echoes_total{what="expected"}`, `kvferry_gossip_echoes_total{what="sent"}`, `kvferry_gossip_keys`, `kvferry_gossip_key_packets`, `kvferry_gossip_nonce_budget_ratio`,
			`kvferry_served_bytes_total{transport="tcp"}`, `kvferry_served_answers_total{transport="tcp"}`, `kvferry_data_connections{by="peers",transport="tcp"}`,
			`kvferry_lease_renewals_total{result="renewed"}`, `kvferry_publications_total{outcome="released"}`, `kvferry_acks_total{result="counted"}`,
		},
		decode: {
			`kvferry_lease_slack_seconds_count`, `kvferry_lease_requests_total{result="granted"}`,
			`kvferry_board_items_total{what="received"}`, `kvferry_board_items_total{what="news"}`, `kvferry_board_announcements_total{what="news"}`,
			`kvferry_board_announcements_total{what="duplicate"}`, `kvferry_board_ended_entries_total{cause="released"}`,
			`kvferry_board_entries`, `kvferry_board_owners`, `kvferry_board_watched`, `kvferry_board_table_bytes`,
			`kvferry_reads_total{result="held",transport="tcp"}`, `kvferry_read_bytes_total{transport="tcp"}`, `kvferry_data_connections{by="us",transport="tcp"}`,
			`kvferry_retrievals_total{code="ok",transport="tcp"}`, `kvferry_retrieve_seconds_count{phase="read"}`, `kvferry_ready`, `kvferry_members`,
		},
	}
	for n, keys := range moved {
		await(t, n.Life().String()+" to count everything", func(context.Context) error {
			_, _, samples := scrape(t, n)
			for _, key := range keys {
				if s, ok := samples[key]; !ok || s.value <= 0 {
					return fmt.Errorf("%s is %v", key, s.value)
				}
			}
			return nil
		})
	}

	want := documented(t)
	allowed := words()
	for _, n := range []*member{prefill, decode} {
		raw, families, samples := scrape(t, n)
		for name, kind := range families {
			if want[name] != kind {
				t.Errorf("%s is a %s, and in docs/operating.md %q", name, kind, want[name])
			}
		}
		for name := range want {
			if families[name] == "" {
				t.Errorf("%s has no %s, which docs/operating.md lists", n.Life(), name)
			}
		}
		problems, err := promlint.New(bytes.NewReader(raw)).Lint()
		if err != nil {
			t.Fatal(err)
		}
		for _, problem := range problems {
			if strings.HasPrefix(problem.Metric, "kvferry_") {
				t.Errorf("%s: %s", problem.Metric, problem.Text)
			}
		}
		for key, s := range samples {
			for label, value := range s.labels {
				if label != "le" && !slices.Contains(allowed[label], value) {
					t.Errorf("%s: %q is not among the values of label %s", key, value, label)
				}
			}
		}
		for _, key := range []string{"kvferry_draining", "kvferry_arena_faults_total", "kvferry_gossip_key_saves_failed_total", `kvferry_stale_reads_total{where="reader"}`} {
			if v := samples[key].value; v != 0 {
				t.Errorf("%s: %s is %v", n.Life(), key, v)
			}
		}
		await(t, "gossip to be without a gap", func(context.Context) error {
			if v := metric(t, n, "kvferry_board_gap_age_seconds"); v != 0 {
				return fmt.Errorf("%s has one of %v s", n.Life(), v)
			}
			return nil
		})
	}

	p.publish("long", true, to("decode"))
	if got := <-waits; got.err != nil {
		t.Error(got.err)
	}
	p.ingest("unread")
	p.write("unread", 8)
	p.publish("unread", true)
	drained := make(chan error, 1)
	go func() { drained <- prefill.Drain(context.Background(), deadline) }()
	await(t, "/metrics to say that prefill drains", func(context.Context) error {
		if _, _, samples := scrape(t, prefill); samples["kvferry_draining"].value != 1 || samples["kvferry_ready"].value != 0 {
			return fmt.Errorf("draining %v, ready %v", samples["kvferry_draining"].value, samples["kvferry_ready"].value)
		}
		return nil
	})
	if err := prefill.Leave(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-drained; err != nil {
		t.Error(err)
	}
}
