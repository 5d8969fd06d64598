package kvferrypb_test

import (
	"errors"
	"math"
	"testing"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/page"
)

func geometry() page.Geometry {
	return page.Geometry{Model: "m", Revision: "r", WorldSize: 2, Layout: page.Layout{
		Order: page.HND, DType: page.FP8E4M3, Layers: 3, Pages: 100, PageSize: 16, Heads: 2, HeadDim: 64,
	}}
}

func TestGeometrySurvives(t *testing.T) {
	got, err := kvferrypb.ToGeometry(kvferrypb.FromGeometry(geometry()))
	if err != nil || got != geometry() {
		t.Errorf("%+v, %v, want %+v", got, err, geometry())
	}
}

func TestGeometryIsChecked(t *testing.T) {
	for name, change := range map[string]func(*kvferrypb.Geometry){
		"no order":        func(g *kvferrypb.Geometry) { g.Order = "" },
		"an order":        func(g *kvferrypb.Geometry) { g.Order = "DHN" },
		"a type":          func(g *kvferrypb.Geometry) { g.Dtype = "fp64" },
		"no layers":       func(g *kvferrypb.Geometry) { g.Layers = 0 },
		"too many layers": func(g *kvferrypb.Geometry) { g.Layers = math.MaxUint32 },
		"too many pages":  func(g *kvferrypb.Geometry) { g.Pages = math.MaxInt32 },
		"no world":        func(g *kvferrypb.Geometry) { g.WorldSize = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			g := kvferrypb.FromGeometry(geometry())
			change(g)
			if _, err := kvferrypb.ToGeometry(g); !errors.Is(err, page.ErrInvalid) {
				t.Errorf("ToGeometry = %v, want ErrInvalid", err)
			}
		})
	}
	if _, err := kvferrypb.ToGeometry(nil); !errors.Is(err, page.ErrInvalid) {
		t.Errorf("ToGeometry(nil) = %v, want ErrInvalid", err)
	}
}
