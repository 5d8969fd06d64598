package manager

import (
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// Segment appends Span tokens to a stream in one step; 0 only reads it.
type Segment struct {
	Request id.Request
	Label   id.Label
	Span    int
}

// Fork makes the stream To a copy of the stream From of the same request.
type Fork struct {
	From, To id.Label
}

// Step is one forward pass over many requests. At most one segment a (request, label).
type Step struct {
	Segments []Segment
	// Discard: the tokens of the step do not become part of the streams (M*'s
	// commit=false). Forks are made all the same.
	Discard bool
	// Combined packs the segments of several labels into one plan label.
	Combined []Combined
	// PreForks are made before the segments are written, PostForks after that,
	// each list in order, for every request of Rows. A request that does not have
	// From is passed over; after the segments it has what these make.
	PreForks, PostForks []Fork
	// Rows are the requests of the batch with those that pad it (M*'s
	// padded_request_ids); nil: those of Segments.
	Rows []id.Request
	// Lane tells drivers of steps apart: each has at most one staged step.
	Lane Lane
	// Walk names the traversal of the model's graph. Only staging looks at it.
	Walk id.Walk
	// Lease is the slot of a captured graph that replays the step; zero: none.
	Lease Lease
}

// Lane numbers who drives steps.
type Lane uint64

// Lease is a slot of captured graphs, and how many tokens the graph always
// writes: plans are padded up to them by writes to the sink.
type Lease struct {
	Slot   int
	Tokens int
}

// Combined packs the segments of Sources, in this order, label by label, under
// Label. Each source is in at most one Combined.
type Combined struct {
	Sources []id.Label
	Label   id.Label
}

// equal says that the two steps do the same, in the same order.
func (s *Step) equal(o *Step) bool {
	return s.Discard == o.Discard && s.Lane == o.Lane && s.Walk == o.Walk && s.Lease == o.Lease && (s.Rows == nil) == (o.Rows == nil) &&
		slices.Equal(s.Segments, o.Segments) && slices.Equal(s.PreForks, o.PreForks) && slices.Equal(s.PostForks, o.PostForks) &&
		slices.Equal(s.Rows, o.Rows) && slices.EqualFunc(s.Combined, o.Combined, func(a, b Combined) bool {
		return a.Label == b.Label && slices.Equal(a.Sources, b.Sources)
	})
}

func (s *Step) clone() *Step {
	c := *s
	c.Segments, c.Rows = slices.Clone(s.Segments), slices.Clone(s.Rows)
	c.PreForks, c.PostForks = slices.Clone(s.PreForks), slices.Clone(s.PostForks)
	c.Combined = slices.Clone(s.Combined)
	for i := range c.Combined {
		c.Combined[i].Sources = slices.Clone(s.Combined[i].Sources)
	}
	return &c
}

// Token names an admitted step, from 1, never reused. It ends with Commit or Abort.
type Token uint64

// step is an admitted step.
type step struct {
	segments []segment // as they were given
	forks    []fork    // those before the segments first
	pre      int       // of forks, how many are before
	discard  bool
	lease    Lease
	order    []int32 // of segments, in pack order; empty: as they were given
	plans    []packed
	created  []segment // streams that it made, in order; no more than request, stream, and epoch are set
	// staged: it was admitted ahead, and nobody has asked for it yet. It has its
	// pages, and its requests are in flight, but it writes nothing.
	staged *Step
	// drain are the pages, in quarantine, of requests that were removed or reset
	// while a fork may still copy from them.
	drain []page.Index
}

// packed is one plan label: the segments [from, to) of the pack order.
type packed struct {
	label    id.Label
	from, to int
}

type segment struct {
	request    *request
	stream     *stream
	epoch      uint32 // of the request at Admit
	base, span int    // tokens: stored at Admit, and new
	list       int32  // whose pages it writes: 0 the stream's own, i those of forks[i-1]
}

// fork is one copy for one request. Its target's pages are the step's own until
// Commit gives them to the stream, so that nothing is overwritten in place, and
// Abort leaves no trace.
type fork struct {
	request  *request
	from, to *stream
	epoch    uint32 // of the request at Admit
	source   int32  // whose pages are copied: 0 the source stream's own, i those of forks[i-1]
	last     bool   // of the step's onto that target: what Commit gives to it
	tokens   int    // of the source at this point of the step
	reach    int    // tokens that the pages must have room for
	released int    // of the source
	prefix   int    // of the source
	// What the target takes over: of the source as it is at Admit for a fork
	// before the segments, at Commit for one after them.
	position  int
	retention Retention
	pages     []page.Index
}

// reach is how far a step that is being admitted takes a stream.
type reach struct {
	step    Token // which one; of another one it is void
	tokens  int   // length at this point
	own     int   // tokens that its own pages must have room for
	list    int32 // whose pages hold it at this point, as in segment; in the end, the last fork onto it
	written bool  // a segment of the step is on it
}

// live reports whether the stream is still the one that the step was admitted to.
func (g *segment) live() bool { return g.epoch == g.request.epoch && g.request.key == "" }

func (f *fork) live() bool { return f.epoch == f.request.epoch && f.request.key == "" }

// writes reports whether it writes slots of the stream's own pages.
func (g *segment) writes() bool { return g.span > 0 && g.list == 0 }

// overtaken reports whether another step has written where this one would.
func (g *segment) overtaken() bool { return g.writes() && g.base != g.stream.stored }

// at returns the i-th segment in pack order.
func (s *step) at(i int) *segment {
	if len(s.order) > 0 {
		i = int(s.order[i])
	}
	return &s.segments[i]
}

// pages returns the list that a segment or a fork means.
func (s *step) pages(own *stream, list int32) []page.Index {
	if list == 0 {
		return own.pages
	}
	return s.forks[list-1].pages
}

// carry notes what the targets of the forks [from, to) take over.
func (s *step) carry(from, to int) {
	for i := from; i < to; i++ {
		f := &s.forks[i]
		if f.source == 0 {
			f.position, f.retention = f.from.position, f.from.retention
		} else {
			up := &s.forks[f.source-1]
			f.position, f.retention = up.position, up.retention
		}
	}
}

// current reports whether the step would be admitted as it was.
func (s *step) current() bool {
	for i := range s.segments {
		g := &s.segments[i]
		if !g.live() || g.list == 0 && g.base != g.stream.stored {
			return false
		}
	}
	for i := range s.forks {
		if !s.forks[i].live() {
			return false
		}
	}
	return true
}
