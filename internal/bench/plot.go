package bench

import (
	"errors"
	"fmt"
	"image/color"
	"io"
	"math"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	_ "gonum.org/v1/plot/vg/vgimg" // png
	_ "gonum.org/v1/plot/vg/vgpdf" // pdf
	_ "gonum.org/v1/plot/vg/vgsvg" // svg
)

// PlotFormats are those of [Report.Plot], which are the suffixes of such files too.
func PlotFormats() []string { return []string{"svg", "png", "pdf"} }

// Plot writes a picture of the throughput of scattered chunks by their size, a line
// for each transport and one for its limit. format is one of [PlotFormats].
func (r *Report) Plot(w io.Writer, format string) error {
	if !slices.Contains(PlotFormats(), format) {
		return fmt.Errorf("plot: format %q is none of %v", format, PlotFormats())
	}
	p := plot.New()
	p.Title.Text = "Throughput of scattered chunks, medians"
	p.X.Label.Text, p.Y.Label.Text = "chunk", "GB/s"
	p.X.Scale, p.Y.Min = plot.LogScale{}, 0
	p.Legend.Top, p.Legend.Left = true, true
	p.Add(plotter.NewGrid())
	var sizes []int64
	for i, name := range Transports() {
		var reached, limit plotter.XYs
		by := ""
		for _, row := range r.Rows {
			if row.Transport != name || row.Contiguity != 0 {
				continue
			}
			sizes = append(sizes, row.ChunkBytes)
			reached = append(reached, plotter.XY{X: float64(row.ChunkBytes), Y: row.BytesPerSecond / 1e9})
			if row.Limit != "" {
				by = row.Limit
				limit = append(limit, plotter.XY{X: float64(row.ChunkBytes), Y: row.LimitBytesPerSecond / 1e9})
			}
		}
		for _, l := range []struct {
			name   string
			points plotter.XYs
			dashes []vg.Length
		}{{name, reached, nil}, {by, limit, []vg.Length{vg.Points(5), vg.Points(4)}}} {
			if len(l.points) == 0 {
				continue
			}
			line, points, err := plotter.NewLinePoints(l.points)
			if err != nil {
				return fmt.Errorf("plot %s: %w", l.name, err)
			}
			colour := []color.Color{color.RGBA{B: 200, G: 90, A: 255}, color.RGBA{R: 40, G: 140, B: 40, A: 255}, color.RGBA{R: 200, G: 70, A: 255}}[i]
			line.Width, line.Color, line.Dashes = vg.Points(1.5), colour, l.dashes
			points.Color, points.Shape, points.Radius = colour, draw.CircleGlyph{}, vg.Points(2)
			p.Add(line, points)
			p.Legend.Add(l.name, line, points)
		}
	}
	if len(sizes) == 0 {
		return errors.New("plot: no scattered chunks were pulled")
	}
	slices.Sort(sizes)
	sizes = slices.Compact(sizes)
	var ticks plot.ConstantTicks
	for _, n := range sizes {
		ticks = append(ticks, plot.Tick{Value: float64(n), Label: bytesText(n)})
	}
	p.X.Tick.Marker = ticks
	// Room for what stands at the ends, also of one size alone.
	p.X.Min, p.X.Max = float64(sizes[0])/math.Sqrt2, float64(sizes[len(sizes)-1])*math.Sqrt2
	p.Y.Max *= 1.25 // for the legend
	out, err := p.WriterTo(16*vg.Centimeter, 9*vg.Centimeter, format)
	if err == nil {
		_, err = out.WriteTo(w)
	}
	if err != nil {
		return fmt.Errorf("plot: %w", err)
	}
	return nil
}
