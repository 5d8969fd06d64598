package manager

import (
	"fmt"
	"math"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// Retention trims a stream at every commit: the oldest whole pages behind the
// first Prefix tokens are let go until Budget tokens or less than a page more
// are kept. Positions stay what they were. The zero value keeps everything.
type Retention struct {
	Budget int // tokens, Prefix included; 0: all
	Prefix int // tokens, rounded up to whole pages
}

func (r Retention) validate(l id.Label) error {
	if err := l.Validate(); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if r.Budget < 0 || r.Prefix < 0 || r.Budget > math.MaxInt32 || r.Prefix > r.Budget {
		return fmt.Errorf("%w: label %q keeps %d tokens, %d of them in front", ErrInvalid, l, r.Budget, r.Prefix)
	}
	return nil
}

// trim applies the stream's retention. While another step is on the request it
// waits for the next commit: that one's addresses count from what is there.
//
// Pages that are published leave to limbo. Their publication goes on: what it
// names has not changed, and later announcements begin further behind.
func (m *Manager) trim(req *request, s *stream) {
	if s.retention.Budget == 0 || req.inFlight > 0 {
		return
	}
	first := s.prefix / m.size // page behind the prefix
	if s.released == 0 {
		first = page.Count(s.retention.Prefix, m.size)
	}
	held := s.stored - s.released
	n := min((held-s.retention.Budget)/m.size, page.Count(held, m.size)-1-first)
	if n <= 0 {
		return
	}
	m.release(s.pages[first : first+n])
	s.pages = slices.Delete(s.pages, first, first+n)
	s.named -= min(n, max(0, s.named-first))
	s.prefix = first * m.size
	s.released += n * m.size
	s.mutation++
}

// start is the first token behind what was released; 0 if nothing was.
func (s *stream) start() int {
	if s.released == 0 {
		return 0
	}
	return s.prefix + s.released
}
