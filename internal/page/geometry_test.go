package page_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/internal/page"
)

func llama() page.Geometry {
	return page.Geometry{Model: "llama-3-8b", Revision: "main", WorldSize: 2, Layout: worked(page.NHD)}
}

func TestGeometryValidate(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*page.Geometry)
		ok     bool
	}{
		"as it is":               {func(*page.Geometry) {}, true},
		"no model":               {func(g *page.Geometry) { g.Model, g.Revision = "", "" }, true},
		"model too long":         {func(g *page.Geometry) { g.Model = strings.Repeat("x", 257) }, false},
		"model is not UTF-8":     {func(g *page.Geometry) { g.Model = "\xff" }, false},
		"revision too long":      {func(g *page.Geometry) { g.Revision = strings.Repeat("x", 257) }, false},
		"no world":               {func(g *page.Geometry) { g.WorldSize = 0 }, false},
		"largest world":          {func(g *page.Geometry) { g.WorldSize = 64 }, true},
		"world larger than that": {func(g *page.Geometry) { g.WorldSize = 65 }, false},
		"layout":                 {func(g *page.Geometry) { g.Layout.Layers = -1 }, false},
	} {
		t.Run(name, func(t *testing.T) {
			g := llama()
			tt.change(&g)
			if err := g.Validate(); (err == nil) != tt.ok || err != nil && !errors.Is(err, page.ErrInvalid) {
				t.Errorf("Validate() = %v, want ok %v", err, tt.ok)
			}
		})
	}
}

func TestDifferences(t *testing.T) {
	for field, tt := range map[string]struct {
		change       func(*page.Geometry)
		ours, theirs string
	}{
		"model":      {func(g *page.Geometry) { g.Model = "qwen" }, "llama-3-8b", "qwen"},
		"revision":   {func(g *page.Geometry) { g.Revision = "" }, "main", ""},
		"world_size": {func(g *page.Geometry) { g.WorldSize = 4 }, "2", "4"},
		"order":      {func(g *page.Geometry) { g.Layout.Order = page.HND }, "NHD", "HND"},
		"dtype":      {func(g *page.Geometry) { g.Layout.DType = page.FP8E4M3 }, "bf16", "fp8_e4m3"},
		"layers":     {func(g *page.Geometry) { g.Layout.Layers = 3 }, "2", "3"},
		"page_size":  {func(g *page.Geometry) { g.Layout.PageSize = 16 }, "8", "16"},
		"heads":      {func(g *page.Geometry) { g.Layout.Heads = 1 }, "2", "1"},
		"head_dim":   {func(g *page.Geometry) { g.Layout.HeadDim = 8 }, "4", "8"},
	} {
		t.Run(field, func(t *testing.T) {
			theirs := llama()
			tt.change(&theirs)
			want := page.Difference{Field: field, Ours: tt.ours, Theirs: tt.theirs}
			if got := llama().Differences(theirs); len(got) != 1 || got[0] != want {
				t.Errorf("Differences() = %v, want %v alone", got, want)
			}
			if llama().Fingerprint() == theirs.Fingerprint() {
				t.Error("the fingerprints are equal")
			}
		})
	}
}

func TestPagesMayDiffer(t *testing.T) {
	theirs := llama()
	theirs.Layout.Pages = 8
	if got := llama().Differences(theirs); len(got) != 0 {
		t.Errorf("Differences() = %v, want none", got)
	}
	if llama().Fingerprint() != theirs.Fingerprint() {
		t.Error("the fingerprints differ")
	}
}

func TestDifferencesNamesEveryField(t *testing.T) {
	var text []string
	for _, d := range llama().Differences(page.Geometry{}) {
		text = append(text, d.Field)
	}
	const want = "model revision world_size order dtype layers page_size heads head_dim"
	if got := strings.Join(text, " "); got != want {
		t.Errorf("fields = %s, want %s", got, want)
	}
}

// Peers of other versions compare this number: it never changes.
func TestFingerprintIsStable(t *testing.T) {
	if got, want := llama().Fingerprint(), uint64(0x3d10d13684f7475b); got != want {
		t.Errorf("Fingerprint() = %#x, want %#x", got, want)
	}
	shifted := llama()
	shifted.Model, shifted.Revision = "llama-3-8bm", "ain"
	if shifted.Fingerprint() == llama().Fingerprint() {
		t.Error("bytes moved from one field to the next give the same fingerprint")
	}
}

func ExampleGeometry_Differences() {
	ours, theirs := llama(), llama()
	theirs.Layout.PageSize = 16
	theirs.Layout.Pages = 1024
	for _, d := range ours.Differences(theirs) {
		fmt.Println(d)
	}
	// Output: page_size: ours "8", theirs "16"
}
