package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/page"
)

func someSide(name string) side {
	c := config.Default()
	return side{
		name: name,
		geometry: page.Geometry{Model: "m", WorldSize: 4, Layout: page.Layout{
			Order: page.NHD, DType: page.BF16, Layers: 2, Pages: 16, PageSize: 16, Heads: 2, HeadDim: 64,
		}},
		ranks: []int{0, 1}, transports: []string{"tcp"}, config: c,
	}
}

func TestCompare(t *testing.T) {
	key := func(b byte) config.Key { return config.Key(strings.Repeat(string(b), config.KeyBytes)) }
	for name, tt := range map[string]struct {
		change func(a, b *side)
		differ []string // with + where it blocks
	}{
		"equal":                {func(_, _ *side) {}, nil},
		"pages":                {func(a, _ *side) { a.geometry.Layout.Pages++ }, []string{"pages"}},
		"geometry":             {func(a, _ *side) { a.geometry.Layout.PageSize, a.geometry.Model = 32, "n" }, []string{"+model", "+page_size"}},
		"fewer ranks":          {func(a, _ *side) { a.ranks = []int{1} }, []string{"ranks"}},
		"more ranks":           {func(a, _ *side) { a.ranks = []int{0, 1, 2} }, []string{"ranks"}},
		"other ranks":          {func(a, _ *side) { a.ranks = []int{1, 2} }, []string{"+ranks"}},
		"ranks of a peer":      {func(a, _ *side) { a.ranks = nil }, nil},
		"no common transport":  {func(a, _ *side) { a.transports = []string{"shm"} }, []string{"+transports"}},
		"one common transport": {func(a, _ *side) { a.transports = []string{"shm", "tcp"} }, []string{"transports"}},
		"transports of a peer": {func(a, _ *side) { a.transports = nil }, nil},
		"cluster and preset":   {func(a, _ *side) { a.config.Cluster.Name, a.config.Cluster.Preset = "x", "fast" }, []string{"+cluster.name", "cluster.preset"}},
		"cluster of a node":    {func(a, b *side) { a.config.Cluster.Name, b.config = "x", nil }, nil},
		"one keyring":          {func(a, _ *side) { a.config.Cluster.Keyring = []config.Key{key('1')} }, []string{"+cluster.keyring"}},
		"other keys": {func(a, b *side) {
			a.config.Cluster.Keyring, b.config.Cluster.Keyring = []config.Key{key('1')}, []config.Key{key('2')}
		}, []string{"+cluster.keyring"}},
		"within a rotation": {func(a, b *side) {
			a.config.Cluster.Keyring, b.config.Cluster.Keyring = []config.Key{key('1'), key('2')}, []config.Key{key('2'), key('1')}
		}, []string{"cluster.keyring"}},
		"one is deaf": {func(a, b *side) {
			a.config.Cluster.Keyring, b.config.Cluster.Keyring = []config.Key{key('1'), key('2')}, []config.Key{key('2')}
		}, []string{"+cluster.keyring"}},
		"certificates of one":    {func(a, _ *side) { a.config.Security.Certificate = "c.pem" }, []string{"+security"}},
		"other paths of as many": {func(a, b *side) { a.config.Security.Certificate, b.config.Security.Certificate = "c.pem", "d.pem" }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := someSide("a"), someSide("b")
			tt.change(&a, &b)
			c := compare(a, b)
			var got []string
			for _, d := range c.Items {
				field := d.Field
				if d.Blocks {
					field = "+" + field
				}
				got = append(got, field)
			}
			if told := (a.config == nil) == (b.config == nil); told != (len(c.NotCompared) == 0) {
				t.Errorf("not compared: %v", c.NotCompared)
			}
			if !slices.Equal(got, tt.differ) || c.Compatible != (len(c.blocks()) == 0) {
				t.Errorf("%v, compatible %v; want %v", got, c.Compatible, tt.differ)
			}
		})
	}
}

func TestNodesAsOneKnowsThem(t *testing.T) {
	good := kvferrypb.FromGeometry(someSide("").geometry)
	all := knownTo(
		&kvferrypb.StatusResponse{Node: "a", Geometry: good, Ranks: []uint32{0, 1}, Transports: []*kvferrypb.TransportStatus{
			{Name: "shm", Reason: "none"}, {Name: "tcp", Available: true},
		}},
		&kvferrypb.PeersResponse{Items: []*kvferrypb.PeerItem{
			{Node: "b", Geometry: good, Transport: "tcp"},
			{Node: "c", Geometry: good},
			{Node: "young", State: "connecting", LastError: "refused"},
			{Node: "hostile", Geometry: &kvferrypb.Geometry{Order: "NHD", Dtype: "bf16", Layers: 1 << 31}},
		}},
	)
	a, errA := all.side("a")
	b, errB := all.side("b")
	if errA != nil || errB != nil || !slices.Equal(a.ranks, []int{0, 1}) || !slices.Equal(a.transports, []string{"tcp"}) || b.ranks != nil {
		t.Errorf("a %+v %v, b %+v %v", a, errA, b, errB)
	}
	if c := compare(a, b); !c.Compatible || len(c.Items) > 0 || !slices.Equal(c.Transports, []string{"tcp"}) {
		t.Errorf("a and b: %+v", c)
	}
	if c, err := all.side("c"); err != nil || compare(a, c).Transports != nil {
		t.Errorf("c: %+v %v", c, err)
	}
	for name, want := range map[string]string{
		"young": "has not told it yet", "hostile": "geometry of node hostile", "nobody": "a knows a, b, c",
	} {
		if s, err := all.side(name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v %v, want an error with %q", name, s, err, want)
		}
	}
}
