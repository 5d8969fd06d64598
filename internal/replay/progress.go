package replay

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/sys/unix"
)

// How often progress is shown: on a terminal, and anywhere else.
const (
	barPeriod  = 200 * time.Millisecond
	linePeriod = 10 * time.Second
)

// progress shows how far a run is until it is closed.
type progress struct {
	run  *run
	out  io.Writer
	bars *mpb.Progress // nil: lines
	bar  *mpb.Bar
	stop chan struct{}
	work sync.WaitGroup
}

// startProgress begins to show; nil shows nothing.
func startProgress(w io.Writer, r *run) *progress {
	if w == nil {
		return nil
	}
	p := &progress{run: r, out: w, stop: make(chan struct{})}
	period := linePeriod
	if isTerminal(w) {
		period = barPeriod
		p.bars = mpb.New(mpb.WithOutput(w), mpb.WithWidth(48), mpb.WithRefreshRate(barPeriod))
		p.bar = p.bars.AddBar(0, // what there is to do may grow
			mpb.PrependDecorators(decor.Name("verified "), decor.CountersKibiByte("% .1f of % .1f")),
			mpb.AppendDecorators(decor.Percentage(), decor.Any(func(decor.Statistics) string {
				c := r.count()
				return fmt.Sprintf("  %d of %d requests, %d failed", c.ended, c.requests, c.failed)
			})),
		)
	}
	p.work.Go(func() { p.show(period) })
	return p
}

func (p *progress) show(period time.Duration) {
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-p.stop:
			return
		}
		c := p.run.count()
		if p.bar != nil {
			p.set(c)
			continue
		}
		fmt.Fprintf(p.out, "%d of %d requests ended, %d failed, %s verified\n", c.ended, c.requests, c.failed, bytesText(c.verified))
	}
}

// close shows the end and returns when nothing is written any more.
func (p *progress) close() {
	if p == nil {
		return
	}
	close(p.stop)
	p.work.Wait()
	if p.bar == nil {
		return
	}
	p.set(p.run.count())
	p.bar.Abort(false)
	p.bars.Wait()
}

func (p *progress) set(c counts) {
	p.bar.SetTotal(c.bytes, false)
	p.bar.SetCurrent(c.verified)
}

// counts is how far a run is.
type counts struct {
	requests, ended, failed int
	bytes, verified         int64
}

func (r *run) count() (c counts) {
	r.note(func(s *stats) {
		c = counts{
			requests: s.requests, ended: s.ready + s.failed, failed: s.failed,
			bytes: r.bytes(s.tokens), verified: s.verified,
		}
	})
	return c
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// bytesText is a number of bytes for people.
func bytesText(n int64) string {
	const units = "KMGTPE"
	if n < 1<<10 {
		return fmt.Sprintf("%d B", n)
	}
	value, unit := float64(n)/(1<<10), 0
	for value >= 1<<10 && unit < len(units)-1 {
		value /= 1 << 10
		unit++
	}
	return fmt.Sprintf("%.1f %ciB", value, units[unit])
}
