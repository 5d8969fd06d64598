package kvferrypb

import (
	"fmt"
	"math"

	"github.com/kvferry/kvferry/internal/page"
)

// FromGeometry is g as a message.
func FromGeometry(g page.Geometry) *Geometry {
	l := g.Layout
	return &Geometry{
		Model: g.Model, Revision: g.Revision, WorldSize: uint32(g.WorldSize),
		Order: l.Order.String(), Dtype: l.DType.String(),
		Layers: uint32(l.Layers), Pages: uint32(l.Pages), PageSize: uint32(l.PageSize),
		Heads: uint32(l.Heads), HeadDim: uint32(l.HeadDim),
	}
}

// ToGeometry checks a message and returns the geometry; g may be nil, which is
// an error like every other that does not validate.
func ToGeometry(g *Geometry) (page.Geometry, error) {
	order, err := page.ParseOrder(g.GetOrder())
	if err != nil {
		return page.Geometry{}, err
	}
	dtype, err := page.ParseDType(g.GetDtype())
	if err != nil {
		return page.Geometry{}, err
	}
	for _, n := range []uint32{g.GetWorldSize(), g.GetLayers(), g.GetPages(), g.GetPageSize(), g.GetHeads(), g.GetHeadDim()} {
		if n > math.MaxInt32 {
			return page.Geometry{}, fmt.Errorf("geometry has %d of something: %w", n, page.ErrInvalid)
		}
	}
	out := page.Geometry{
		Model: g.GetModel(), Revision: g.GetRevision(), WorldSize: int(g.GetWorldSize()),
		Layout: page.Layout{
			Order: order, DType: dtype,
			Layers: int(g.GetLayers()), Pages: int(g.GetPages()), PageSize: int(g.GetPageSize()),
			Heads: int(g.GetHeads()), HeadDim: int(g.GetHeadDim()),
		},
	}
	return out, out.Validate()
}
