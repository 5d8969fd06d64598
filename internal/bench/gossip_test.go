package bench

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"
)

// smallGossip measures quickly, and nothing that could be relied upon. A process
// that stands still for two seconds still has time for some announcements.
func smallGossip() gossipPlan {
	return gossipPlan{
		rounds: 2, nodes: []int{3, 5}, rate: 30, goal: 80, fast: true,
		idle: 50 * time.Millisecond, life: 300 * time.Millisecond, window: 1200 * time.Millisecond, settle: 3 * time.Second,
	}
}

func TestGossip(t *testing.T) {
	o, err := Options{}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	o.Progress = &said
	r := &Report{Machine: thisMachine(), Rows: []Row{}, Missing: []string{}}
	if err := smallGossip().run(t.Context(), o, r); err != nil {
		t.Fatal(err)
	}
	sizes := make(map[int]bool)
	for _, row := range r.Gossip.Rows {
		sizes[row.Nodes] = true
		// On a busy machine some end before all have heard of them.
		if row.Complete < 0.5 || row.Complete > 1 || row.Made <= 0 || row.Samples <= 0 || row.OneP50 <= 0 || row.OneP50 > row.OneP99 || row.OneP99 > row.OneP99Max || row.AllP99 > row.AllP99Max ||
			row.BytesPerSecond <= 0 || row.PacketsPerSecond <= 0 || row.Cores <= 0 {
			t.Errorf("row %+v", row)
		}
		if row.AnnouncementsPerSecond == 30 && (row.Rounds != 2 || row.IdleBytesPerSecond <= 0 || row.IdlePacketsPerSecond <= 0) {
			t.Errorf("row %+v, want 2 rounds and the idle traffic before", row)
		}
	}
	if !sizes[3] || !sizes[5] || len(sizes) != 2 {
		t.Errorf("rows of %v nodes, want 3 and 5", sizes)
	}
	if n := len(r.Figures) + 2*len(r.Missing); n != 4 {
		t.Errorf("figures %+v, missing %q, want 4, or what is missing of them", r.Figures, r.Missing)
	}
	if n := strings.Count(said.String(), "\n"); n < 2*3 /* each size, and at least one rate that was sought */ {
		t.Errorf("progress has %d lines:\n%s", n, &said)
	}

	var table bytes.Buffer
	if err := r.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{table.String(), r.Markdown("")} {
		for _, want := range []string{"3 nodes", "5 nodes", "on any other", "kB/s"} {
			if !strings.Contains(text, want) {
				t.Errorf("report lacks %q:\n%s", want, text)
			}
		}
	}
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(text, &back); err != nil || !slices.Equal(back.Gossip.Rows, r.Gossip.Rows) {
		t.Errorf("JSON gives %+v back, %v", back.Gossip, err)
	}
}

// What some do not hear of is neither complete nor fast.
func TestLoadSeesWhoIsDeaf(t *testing.T) {
	m, err := startMesh(t.Context(), 3, true)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.close(); err != nil {
			t.Error(err)
		}
	}()
	if err := m.members[2].cluster.Close(); err != nil {
		t.Fatal(err)
	}
	const settle = 300 * time.Millisecond
	out, err := load{rate: 100, life: 300 * time.Millisecond, window: 1200 * time.Millisecond, settle: settle}.run(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	if out.complete <= 0 || out.complete >= 1 || out.holds(100) {
		t.Errorf("%.2f %% known, want some and not all", 100*out.complete)
	}
	if waited := float64(settle.Microseconds()); out.all.p50 < waited || out.all.samples == 0 {
		t.Errorf("all know after %.0f us of %d, want at least the %.0f us that were waited", out.all.p50, out.all.samples, waited)
	}
}

func TestHolds(t *testing.T) {
	good := loaded{made: 99, complete: 1, cleared: true}
	if !good.holds(100) {
		t.Errorf("%+v does not hold", good)
	}
	for name, spoil := range map[string]func(*loaded){
		"rate not reached":   func(l *loaded) { l.made = 97 },
		"rate made up for":   func(l *loaded) { l.made = 103 },
		"one not known":      func(l *loaded) { l.complete = 0.99999 },
		"an end not known":   func(l *loaded) { l.cleared = false },
		"one taken for dead": func(l *loaded) { l.lost = 1 },
	} {
		if l := good; spoil != nil {
			spoil(&l)
			if l.holds(100) {
				t.Errorf("%s: holds", name)
			}
		}
	}
}

func TestSeek(t *testing.T) {
	p := gossipPlan{rate: 500, goal: 5000, greater: []float64{7500, 10000}}
	for name, tt := range map[string]struct {
		holds float64 // the most
		want  float64
		tried []float64
	}{
		"all":          {20000, 10000, []float64{5000, 7500, 10000}},
		"one above":    {8000, 7500, []float64{5000, 7500, 10000}},
		"the goal":     {5000, 5000, []float64{5000, 7500}},
		"less":         {1300, 1250, []float64{5000, 2500, 1250}},
		"next to none": {10, 0, []float64{5000, 2500, 1250, 625}},
	} {
		var tried []float64
		got, err := p.seek(func(rate float64) (bool, error) {
			tried = append(tried, rate)
			return rate <= tt.holds, nil
		})
		if err != nil || got != tt.want || !slices.Equal(tried, tt.tried) {
			t.Errorf("%s: %v after %v, %v; want %v after %v", name, got, tried, err, tt.want, tt.tried)
		}
	}
}

func TestGossipFigures(t *testing.T) {
	p := gossipPlan{nodes: []int{8, 32}, rate: 500, goal: 5000}
	of := func(nodes int, bytes, packets, p99 float64) gossiped {
		return gossiped{
			nodes: nodes, rate: 500, idle: traffic{10, 1},
			loaded: loaded{made: 500, complete: 1, cleared: true, traffic: traffic{10 + bytes, 1 + packets}, one: delay{p99: p99}},
		}
	}
	other := of(8, 1, 1, 1e9)
	other.rate = 5000
	behind := of(32, 1, 1, 0)
	behind.made = 300
	for name, tt := range map[string]struct {
		runs    []gossiped
		highest float64
		met     []bool
		missing int
	}{
		"packets grow":    {[]gossiped{of(8, 1000, 100, 49_000), of(32, 1050, 120, 0), other}, 7500, []bool{true, true, true, false}, 0},
		"bytes grow":      {[]gossiped{of(8, 1000, 100, 49_000), of(32, 1200, 100, 0)}, 5000, []bool{true, true, false, true}, 0},
		"slow and late":   {[]gossiped{of(8, 1000, 100, 51_000), of(32, 1000, 100, 0)}, 2500, []bool{false, false, true, true}, 0},
		"not held":        {[]gossiped{of(8, 1000, 100, 49_000), behind}, 5000, []bool{true, true}, 1},
		"held in a round": {[]gossiped{of(8, 1000, 100, 0), behind, of(8, 1000, 100, 0), of(32, 1500, 100, 0)}, 5000, []bool{true, true, false, true}, 0},
	} {
		r := &Report{}
		p.figures(r, tt.runs, []float64{tt.highest})
		var met []bool
		for _, f := range r.Figures {
			met = append(met, f.Met)
		}
		if !slices.Equal(met, tt.met) || len(r.Missing) != tt.missing {
			t.Errorf("%s: met %v, missing %q; figures %+v", name, met, r.Missing, r.Figures)
		}
	}
}
