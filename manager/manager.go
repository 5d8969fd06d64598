// Package manager decides which pages hold which request.
//
// A Manager has no clock, no goroutine and no I/O: it takes what it needs as
// arguments and returns the work to be done as a value. The life of a request:
//
//	prefill:  Ingest → (Admit → Plan → Commit → Publish)… → Remove
//	decode:   Ingest → AdmitRetrieve → Landed → (Admit → Plan → Commit)… → Remove
//	to rest:  Offload → Offloaded … Reload → Reloaded
//
// A request that is removed while what it has published as final is on the host
// is kept for its readers until the publication ends: see [Removed].
//
// All local ranks have arenas of one geometry and share one allocator, so a
// stream has one page list, the same on each of them. Every page is in exactly
// one place: free, owned (in the list of one stream, or reserved by a retrieval,
// a fork, or a reload that runs), in limbo, in quarantine, the sink, or the
// engine's.
//
//   - Limbo holds pages that left their stream while a live publication names
//     them. Only [Manager.Unsealed] lets them go, when the owner has changed the
//     seal words, so that no reader takes later bytes for the published ones.
//   - Quarantine holds pages that a given-up read may still write, and those of a
//     request that is gone while a fork or an offload may still copy from them.
//     Only the end of the read, the step, or the move lets them go.
//   - Where the engine chooses pages ([Options].Engine) none is ever free. It keeps
//     them, and gives them to streams ([Manager.Give]), which take what they need
//     from what they were given; what would be free is the engine's again once
//     [Manager.Returned] has named it.
//
// What is below the length of a live publication is never written: steps and
// reads write at or above the committed length, which only grows until Reset,
// forks write fresh pages, and a stream that is emptied, trimmed, forked over, or
// taken to the host leaves its published pages to limbo instead of filling them
// again.
//
// The semantics are those of M*'s KVManager; docs/mstar.md maps the names.
package manager

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"
	"sync"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

var (
	ErrUnknownRequest   = errors.New("unknown request")
	ErrUnknownToken     = errors.New("unknown or finished step token")
	ErrUnknownRetrieval = errors.New("unknown or finished retrieval")
	ErrUnknownLabel     = errors.New("unknown label")
	ErrInvalid          = errors.New("invalid argument")
	// ErrNoPages: see [*AllocationError]; try again when pages were freed.
	ErrNoPages = errors.New("not enough free pages")
	// ErrFull: a table has reached its bound; see [*FullError].
	ErrFull = errors.New("table is full")
	// ErrReading: a pull into the request runs; try again when it has ended.
	ErrReading = errors.New("request is being read into")
	// ErrStepInFlight: a step that was admitted has not been committed or aborted.
	ErrStepInFlight = errors.New("a step is in flight")
	// ErrFinal: the request was published with final; Reset it first.
	ErrFinal = errors.New("already published as final")
	// ErrEnded: the request's publication was ended (revoked, expired); Reset the request first.
	ErrEnded = errors.New("publication has ended")
	// ErrGone: this node published it for a request that has been removed, and
	// the one that asks for it now never had its tokens.
	ErrGone = errors.New("published by this node, and the request that published it is gone")
	// ErrDiverged: a step was committed on the retrieved stream.
	ErrDiverged = errors.New("stream has diverged from its publication")
	// ErrOffloading: see [*OffloadingError]; reload the request, or try again.
	ErrOffloading = errors.New("stream is on the host, or on its way")
	// ErrNoHost: the manager was made without host pages.
	ErrNoHost = errors.New("there is no host tier")
	// ErrHostFull: see [*HostError].
	ErrHostFull = errors.New("not enough free host pages")
	// ErrUnknownMove: it has ended, or its request has.
	ErrUnknownMove = errors.New("unknown or finished offload or reload")
	// ErrStaged: the step is staged, or the lane has a staged one; admit it or Unstage.
	ErrStaged = errors.New("step is staged")
	// ErrMixed: the nodes of one group have published different content.
	ErrMixed = errors.New("nodes of one group have published different content")
	// ErrIncompatible: see [*IncompatibleError].
	ErrIncompatible = errors.New("publication does not fit this node")
	// ErrMalformed: the publication contradicts itself; see [*MalformedError].
	ErrMalformed = errors.New("malformed publication")
	// ErrPage: see [*PageError]; nothing was given.
	ErrPage = errors.New("pages are not given")
)

// AllocationError is a refusal for lack of pages. Nothing is held. It wraps ErrNoPages.
type AllocationError struct {
	Request id.Request // the first one that did not fit
	Label   id.Label
	Short   int // pages missing for the whole call
	Free    int // 0 where the engine chooses: it has given too few
}

func (e *AllocationError) Error() string {
	return fmt.Sprintf("request %q label %q: %d pages short, %d free: %v", e.Request, e.Label, e.Short, e.Free, ErrNoPages)
}
func (e *AllocationError) Unwrap() error { return ErrNoPages }

// OffloadingError is a refusal because a stream is not resident. It wraps ErrOffloading.
type OffloadingError struct {
	Request id.Request
	Label   id.Label
}

func (e *OffloadingError) Error() string {
	return fmt.Sprintf("request %q label %q: %v", e.Request, e.Label, ErrOffloading)
}
func (e *OffloadingError) Unwrap() error { return ErrOffloading }

// HostError is an offload of which nothing fits on the host. It wraps ErrHostFull.
type HostError struct {
	Short int // host pages missing for the largest stream
	Free  int
}

func (e *HostError) Error() string {
	return fmt.Sprintf("%d host pages short, %d free: %v", e.Short, e.Free, ErrHostFull)
}
func (e *HostError) Unwrap() error { return ErrHostFull }

// FullError names the table that is full and its bound. It wraps ErrFull.
type FullError struct {
	Table string
	Limit int
}

func (e *FullError) Error() string {
	return fmt.Sprintf("%v: at most %d %s", ErrFull, e.Limit, e.Table)
}
func (e *FullError) Unwrap() error { return ErrFull }

// IncompatibleError names every field in which owner and reader differ. It wraps ErrIncompatible.
type IncompatibleError struct {
	Fields []page.Difference
}

func (e *IncompatibleError) Error() string {
	fields := make([]string, len(e.Fields))
	for i, f := range e.Fields {
		fields[i] = f.String()
	}
	return fmt.Sprintf("%v: %s", ErrIncompatible, strings.Join(fields, "; "))
}
func (e *IncompatibleError) Unwrap() error { return ErrIncompatible }

// MalformedError names the field that is wrong. It wraps ErrMalformed.
type MalformedError struct{ Field, Problem string }

func (e *MalformedError) Error() string {
	return fmt.Sprintf("%v: %s: %s", ErrMalformed, e.Field, e.Problem)
}
func (e *MalformedError) Unwrap() error { return ErrMalformed }

// Options set up a Manager. A zero field that is not required means its default.
type Options struct {
	Life     id.Life       // this node's; a publication of this life is never read
	Geometry page.Geometry // of one rank; required
	Ranks    []id.Rank     // local ranks, ascending; default {0}
	Requests int           // bound of live requests; default 65,536
	Labels   int           // bound of labels of one request; default and most 255
	Steps    int           // bound of steps in flight; default 65,536
	Tokens   int           // bound of tokens of one stream (M*'s max_seq_len); default 2^31-1
	Host     int           // pages of the host tier; 0: there is none
	// Engine says that the engine chooses the pages of every stream; see
	// [Manager.Give]. There is no host tier then: who chooses pages keeps its own.
	Engine bool
	// Check makes every method verify conservation before it returns and panic
	// if it is broken. For tests.
	Check bool
}

// Counts are pages by state, the first six sum up to the arena, and entries
// by table.
type Counts struct {
	Free, Owned, Limbo, Quarantine, Sink int
	Engine                               int // kept by it, where it chooses
	Published                            int // named by a live publication, wherever they are
	Requests, Steps                      int
	Kept                                 int // requests that were removed, and are kept for their publications
	Publications, Retrievals             int
	// Pages of the host tier: free, and holding tokens or on the way to it.
	HostFree, HostUsed int
	Moves              int // offloads and reloads that run
	// Faults counts releases that the arena refused. Not 0 is a bug of this package.
	Faults int
}

// Manager is safe for concurrent use.
type Manager struct {
	life     id.Life
	geometry page.Geometry
	size     int // of a page, in tokens
	ranks    []id.Rank
	rankMask uint64
	limits   struct{ requests, labels, steps, tokens int }
	check    bool

	mu              sync.Mutex // guards all below
	arena           arena
	requests        map[id.Request]*request
	kept            map[id.Request]*request // removed, by key: as many as publications at most
	steps           map[Token]*step
	publications    map[PublicationID]*publication
	retrievals      map[RetrievalID]*retrieval
	host            pool
	moves           map[MoveID]*hostMove
	staged          map[Lane]Token // of steps
	lastToken       Token
	lastPublication PublicationID
	lastRetrieval   RetrievalID
	lastMove        MoveID
	ticks           uint64
	faults          int
	returns         chan struct{} // one: there are pages to be told
	packing         packing       // scratch of Admit
	rows            []*request    // scratch of Admit
	spare           *step         // an ended one, to be used again
}

// New returns a manager with every page but the sink free. The error wraps
// ErrInvalid.
func New(o Options) (*Manager, error) {
	if err := o.Geometry.Validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if o.Geometry.Layout.Pages < 2 {
		return nil, fmt.Errorf("%w: an arena of %d page has room for the sink only", ErrInvalid, o.Geometry.Layout.Pages)
	}
	m := &Manager{
		life:         o.Life,
		geometry:     o.Geometry,
		size:         o.Geometry.Layout.PageSize,
		check:        o.Check,
		arena:        newArena(o.Geometry.Layout.Pages, o.Engine),
		requests:     make(map[id.Request]*request),
		kept:         make(map[id.Request]*request),
		steps:        make(map[Token]*step),
		publications: make(map[PublicationID]*publication),
		retrievals:   make(map[RetrievalID]*retrieval),
		moves:        make(map[MoveID]*hostMove),
		staged:       make(map[Lane]Token),
		returns:      make(chan struct{}, 1),
	}
	if o.Engine && o.Host != 0 {
		return nil, fmt.Errorf("%w: %d host pages where the engine chooses pages", ErrInvalid, o.Host)
	}
	if o.Host < 0 || o.Host > page.MaxPages {
		return nil, fmt.Errorf("%w: %d host pages are not in 0..%d", ErrInvalid, o.Host, page.MaxPages)
	}
	m.host = newPool(o.Host)
	m.ranks = append(m.ranks, o.Ranks...)
	if len(m.ranks) == 0 {
		m.ranks = []id.Rank{0}
	}
	mask, problem := rankMask(m.ranks, o.Geometry.WorldSize)
	if problem != "" {
		return nil, fmt.Errorf("%w: ranks: %s", ErrInvalid, problem)
	}
	m.rankMask = mask
	for _, l := range []struct {
		name           string
		to             *int
		value, or, max int
	}{
		{"requests", &m.limits.requests, o.Requests, 65_536, 1 << 30},
		{"labels", &m.limits.labels, o.Labels, id.MaxLabels, id.MaxLabels},
		{"steps", &m.limits.steps, o.Steps, 65_536, 1 << 30},
		{"tokens", &m.limits.tokens, o.Tokens, math.MaxInt32, math.MaxInt32},
	} {
		if l.value < 0 || l.value > l.max {
			return nil, fmt.Errorf("%w: bound of %s %d is not in 0..%d", ErrInvalid, l.name, l.value, l.max)
		}
		*l.to = l.value
		if l.value == 0 {
			*l.to = l.or
		}
	}
	return m, nil
}

// rankMask returns the ranks as bits, or what is wrong with them.
func rankMask(ranks []id.Rank, world int) (mask uint64, problem string) {
	if len(ranks) == 0 {
		return 0, "none"
	}
	for i, r := range ranks {
		switch {
		case r < 0 || int(r) >= world || r >= id.MaxRanks:
			return 0, "rank " + strconv.Itoa(int(r)) + " is not below the world size " + strconv.Itoa(world)
		case i > 0 && r <= ranks[i-1]:
			return 0, "not ascending"
		}
		mask |= 1 << r
	}
	return mask, ""
}

// rankText is the inverse, for people.
func rankText(mask uint64) string {
	var b strings.Builder
	for ; mask != 0; mask &= mask - 1 {
		if b.Len() > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(strconv.Itoa(bits.TrailingZeros64(mask)))
	}
	return b.String()
}

// Counts returns the pages by state.
func (m *Manager) Counts() Counts {
	m.mu.Lock()
	defer m.unlock()
	return Counts{
		Free:         m.arena.counts[free],
		Owned:        m.arena.counts[owned],
		Limbo:        m.arena.counts[limbo],
		Quarantine:   m.arena.counts[quarantine],
		Sink:         m.arena.counts[sink],
		Engine:       m.arena.counts[engine],
		Published:    m.arena.published,
		Requests:     len(m.requests),
		Kept:         len(m.kept),
		Steps:        len(m.steps),
		Publications: len(m.publications),
		Retrievals:   len(m.retrievals),
		HostFree:     m.host.free(),
		HostUsed:     m.host.pages() - m.host.free(),
		Moves:        len(m.moves),
		Faults:       m.faults,
	}
}

// unlock ends every method.
func (m *Manager) unlock() {
	defer m.mu.Unlock()
	if len(m.arena.returned) > 0 {
		select {
		case m.returns <- struct{}{}:
		default:
		}
	}
	if m.check {
		if err := m.verify(); err != nil {
			panic(err)
		}
	}
}

// fault is our own bug. A daemon refuses what would corrupt the arena, counts
// it and lives on; a test ends.
func (m *Manager) fault(err error) {
	if err == nil {
		return
	}
	if m.check {
		panic(err)
	}
	m.faults++
}

// release takes pages out of what owned them.
func (m *Manager) release(pages []page.Index) {
	for _, p := range pages {
		m.fault(m.arena.release(p))
	}
}

// quarantine takes pages that may still be written out of what owned them.
func (m *Manager) quarantine(pages []page.Index) {
	for _, p := range pages {
		m.fault(m.arena.quarantine(p))
	}
}
