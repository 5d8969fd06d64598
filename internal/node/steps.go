package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
)

// Bounds of one step. Those of tokens hold for new ones and for padding alike.
const (
	maxStepTokens = 1 << 20
	maxStepForks  = 4096    // times the requests that they are made for
	maxSlots      = 1 << 16 // of captured graphs
	maxTurn       = time.Minute
)

// step is one that a session has admitted or staged. The calls on it exclude
// each other, so that no copy is made, and no token read or written, in pages
// that its end has let go.
type step struct {
	token manager.Token
	place chan struct{} // holds who is at work on it
	begun bool          // Admit is done with it; until then it counts as staged. Whoever is in place may look
}

// begin notes a step of the session's. s.mu is held.
func (s *session) begin(t manager.Token) *step {
	a := &step{token: t, place: make(chan struct{}, 1)}
	s.steps[t] = a
	return a
}

// admit admits a step; the one that is staged is taken or dropped, whichever
// comes of it.
func (s *session) admit(m *manager.Manager, st manager.Step) (manager.Token, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	staged := s.staged
	s.staged = nil
	t, err := m.Admit(st)
	if staged != nil && (err != nil || t != staged.token) {
		delete(s.steps, staged.token)
	}
	if err != nil {
		return 0, err
	}
	if s.steps[t] == nil {
		s.begin(t)
	}
	return t, nil
}

// stage admits a step ahead.
func (s *session) stage(m *manager.Manager, st manager.Step) (manager.Token, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t, err := m.Stage(st)
	if err != nil {
		return 0, err
	}
	s.staged = s.begin(t)
	return t, nil
}

// unstage drops what is staged.
func (s *session) unstage(m *manager.Manager) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m.Unstage(s.lane)
	if s.staged != nil {
		delete(s.steps, s.staged.token)
		s.staged = nil
	}
}

// step returns one of the session's, or nil.
func (s *session) step(t manager.Token) *step {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.steps[t]
}

// take returns one of the session's steps to one call alone, until leave. It
// waits for the call that has it.
func (s *session) take(ctx context.Context, t manager.Token) (a *step, leave func(), err error) {
	if a = s.step(t); a == nil {
		return nil, nil, fmt.Errorf("step %d: %w", t, manager.ErrUnknownToken)
	}
	select {
	case a.place <- struct{}{}:
	default:
		if err := s.await(ctx, a); err != nil {
			return nil, nil, fmt.Errorf("step %d: another call is at work on it: %w", t, err)
		}
	}
	leave = func() { <-a.place }
	if s.step(t) != a { // it has ended meanwhile
		leave()
		return nil, nil, fmt.Errorf("step %d: %w", t, manager.ErrUnknownToken)
	}
	return a, leave, nil
}

func (s *session) await(ctx context.Context, a *step) error {
	ctx, stop := s.within(ctx)
	defer stop()
	ctx, cancel := context.WithTimeoutCause(ctx, maxTurn, errTooLate)
	defer cancel()
	select {
	case a.place <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// finish forgets a step; false if it is none of the session's.
func (s *session) finish(t manager.Token) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.steps[t]
	if a == nil {
		return false
	}
	delete(s.steps, t)
	if s.staged == a {
		s.staged = nil
	}
	return true
}

// abort ends a step for a cause, which it returns. One that has not begun may
// be at work in a call, which does nothing but look.
func (n *Node) abort(s *session, t manager.Token, cause error) error {
	if !s.finish(t) {
		return cause
	}
	return errors.Join(cause, n.manager.Abort(t))
}

// plan makes a step's plans, and lends them to use.
func (n *Node) plan(t manager.Token, use func(*manager.Plans) error) error {
	plans, ok := n.sessions.plans.Get().(*manager.Plans)
	if !ok {
		plans = new(manager.Plans)
	}
	defer n.sessions.plans.Put(plans)
	if err := n.manager.Plan(t, plans); err != nil {
		return err
	}
	return use(plans)
}

// copyPages makes the copies of a step's forks, in order, in the arena of every
// local rank.
func (n *Node) copyPages(t manager.Token, copies []manager.Copy) error {
	if len(copies) == 0 {
		return nil
	}
	var ranks errgroup.Group // each has an arena of its own
	for _, r := range n.ranks {
		ranks.Go(func() error {
			if err := n.copyWithin(r, copies); err != nil {
				return fmt.Errorf("step %d: %w", t, err)
			}
			return nil
		})
	}
	return ranks.Wait()
}

// stepOf checks what an engine says of a step, and that it is about the
// session's requests. The manager checks what is left.
func (e engineService) stepOf(s *session, req *kvferrypb.AdmitRequest) (manager.Step, error) {
	step := manager.Step{
		Discard: req.GetDiscard(), Lane: s.lane, Walk: id.Walk(req.GetWalk()),
		Segments: make([]manager.Segment, 0, len(req.GetSegments())),
		PreForks: forksOf(req.GetPreForks()), PostForks: forksOf(req.GetPostForks()),
		Lease: manager.Lease{Slot: int(req.GetLease().GetSlot()), Tokens: int(req.GetLease().GetTokens())},
	}
	invalid := func(format string, args ...any) (manager.Step, error) {
		return manager.Step{}, fmt.Errorf("admit: %s: %w", fmt.Sprintf(format, args...), manager.ErrInvalid)
	}
	if err := step.Walk.Validate(); err != nil {
		return manager.Step{}, fmt.Errorf("admit: %w", err)
	}
	if step.Lease.Slot >= maxSlots {
		return invalid("slot %d of captured graphs, there are at most %d", step.Lease.Slot, maxSlots)
	}
	var tokens uint64
	for _, seg := range req.GetSegments() {
		if tokens += uint64(seg.GetSpan()); tokens > maxStepTokens {
			return invalid("%.80q: step of more than %d tokens", seg.GetRequest(), maxStepTokens)
		}
		r := id.Request(seg.GetRequest())
		if err := e.node.sessions.own(s, r); err != nil {
			return manager.Step{}, err
		}
		step.Segments = append(step.Segments, manager.Segment{Request: r, Label: labelOf(seg.GetLabel()), Span: int(seg.GetSpan())})
	}
	if pad := step.Lease.Tokens; pad > 0 {
		plans := distinct(step.Segments, func(g manager.Segment) id.Label { return g.Label }) // at most
		if pad > maxStepTokens/max(1, plans) {
			return invalid("lease of %d tokens for %d labels, at most %d in all", pad, plans, maxStepTokens)
		}
	}
	if req.GetRows() != nil {
		step.Rows = make([]id.Request, 0, len(req.GetRows().GetRequests()))
	}
	for _, row := range req.GetRows().GetRequests() {
		r := id.Request(row)
		if err := e.node.sessions.own(s, r); err != nil {
			return manager.Step{}, fmt.Errorf("row: %w", err)
		}
		step.Rows = append(step.Rows, r)
	}
	if forks := len(step.PreForks) + len(step.PostForks); forks > 0 {
		rows := len(step.Rows)
		if step.Rows == nil {
			rows = distinct(step.Segments, func(g manager.Segment) id.Request { return g.Request })
		}
		if forks > maxStepForks/max(1, rows) {
			return invalid("%d forks of %d requests, at most %d in all", forks, rows, maxStepForks)
		}
	}
	for _, c := range req.GetCombined() {
		step.Combined = append(step.Combined, manager.Combined{Sources: labels(&kvferrypb.Labels{Labels: c.GetSources()}), Label: id.Label(c.GetLabel())})
	}
	return step, nil
}

func forksOf(list []*kvferrypb.Fork) []manager.Fork {
	var out []manager.Fork
	for _, f := range list {
		out = append(out, manager.Fork{From: labelOf(f.GetFrom()), To: id.Label(f.GetTo())})
	}
	return out
}

// distinct counts the keys of the segments.
func distinct[K comparable](segments []manager.Segment, key func(manager.Segment) K) int {
	seen := make(map[K]struct{})
	for _, g := range segments {
		seen[key(g)] = struct{}{}
	}
	return len(seen)
}

func (e engineService) Admit(ctx context.Context, req *kvferrypb.AdmitRequest) (*kvferrypb.AdmitResponse, error) {
	s, leave, err := e.session(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	if err := e.node.sessions.give(s, req.GetGrants()); err != nil {
		return nil, err
	}
	step, err := e.stepOf(s, req)
	if err != nil {
		return nil, err
	}
	n := e.node
	var token manager.Token
	err = n.withRoom(ctx, forAdmit, func() (err error) {
		token, err = s.admit(n.manager, step)
		return err
	}, requestsOf(step)...)
	if err != nil {
		return nil, err
	}
	res := &kvferrypb.AdmitResponse{Step: uint64(token)}
	a, done, err := s.take(ctx, token) // somebody may look at it, if it was staged
	if err != nil {
		return nil, n.abort(s, token, err)
	}
	defer done()
	if req.GetPlan() || len(step.PreForks) > 0 {
		err = n.plan(token, func(p *manager.Plans) error {
			if err := n.copyPages(token, p.Copies); err != nil || !req.GetPlan() {
				return err
			}
			res.Plans, err = planMessages(token, p)
			return err
		})
	}
	if err != nil {
		return nil, n.abort(s, token, err)
	}
	a.begun = true
	return res, nil
}

func (e engineService) Stage(ctx context.Context, req *kvferrypb.AdmitRequest) (*kvferrypb.AdmitResponse, error) {
	s, leave, err := e.session(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	if err := e.node.sessions.give(s, req.GetGrants()); err != nil {
		return nil, err
	}
	step, err := e.stepOf(s, req)
	if err != nil {
		return nil, err
	}
	token, err := s.stage(e.node.manager, step)
	if err != nil {
		return nil, err
	}
	res := &kvferrypb.AdmitResponse{Step: uint64(token)}
	if req.GetPlan() {
		if res.Plans, err = e.planOf(token); err != nil {
			return nil, e.node.abort(s, token, err)
		}
	}
	return res, nil
}

func (e engineService) Unstage(ctx context.Context, _ *kvferrypb.UnstageRequest) (*kvferrypb.UnstageResponse, error) {
	s, leave, err := e.session(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	s.unstage(e.node.manager)
	return &kvferrypb.UnstageResponse{}, nil
}

func (e engineService) Plan(ctx context.Context, req *kvferrypb.PlanRequest) (*kvferrypb.PlanResponse, error) {
	s, leave, err := e.session(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	a, done, err := s.take(ctx, manager.Token(req.GetStep()))
	if err != nil {
		return nil, err
	}
	defer done()
	plans, err := e.planOf(a.token)
	return &kvferrypb.PlanResponse{Plans: plans}, err
}

// planOf answers with a step's plans. Its copies were made by Admit.
func (e engineService) planOf(t manager.Token) (out []*kvferrypb.PlanOutput, err error) {
	err = e.node.plan(t, func(p *manager.Plans) error {
		out, err = planMessages(t, p)
		return err
	})
	return out, err
}

// planMessages copies plans: a message may be sent when their buffers serve the
// next ones.
func planMessages(t manager.Token, made *manager.Plans) ([]*kvferrypb.PlanOutput, error) {
	out := make([]*kvferrypb.PlanOutput, 0, len(made.Plans))
	for i := range made.Plans {
		p := &made.Plans[i]
		o := &kvferrypb.PlanOutput{
			Label:    string(p.Label),
			QoIndptr: slices.Clone(p.Indptrs.QO), PagedKvIndptr: slices.Clone(p.Indptrs.Pages),
			PagedKvIndices: slices.Clone(p.Indptrs.Indices), PagedKvLastPageLen: slices.Clone(p.Indptrs.LastPageLen),
			TokenToPage: make([]uint32, len(p.Slots)), TokenToSlot: make([]uint32, len(p.Slots)), TotalTokens: uint32(p.Total),
			Views: make([]*kvferrypb.View, len(p.Views)),
		}
		for i, s := range p.Slots {
			o.TokenToPage[i], o.TokenToSlot[i] = uint32(s.Page), uint32(s.Slot)
		}
		for i, v := range p.Views {
			o.Views[i] = &kvferrypb.View{
				Request: string(v.Request), Label: string(v.Label), Length: uint32(v.Length), Compute: uint32(v.Compute), Generation: v.Generation,
				Released: uint32(v.Released), Prefix: uint32(v.Prefix),
			}
		}
		out = append(out, o)
	}
	if bytes := proto.Size(&kvferrypb.AdmitResponse{Step: uint64(t), Plans: out}); bytes > kvferrypb.MaxMessage {
		return nil, fmt.Errorf("plan step %d: its plans have %d bytes, a message at most %d: %w", t, bytes, kvferrypb.MaxMessage, manager.ErrInvalid)
	}
	return out, nil
}

// take is the session, and a step of it to this call alone.
func (e engineService) take(ctx context.Context, t uint64) (s *session, a *step, leave func(), err error) {
	s, leaveSession, err := e.session(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	a, leaveStep, err := s.take(ctx, manager.Token(t))
	if err != nil {
		leaveSession()
		return nil, nil, nil, err
	}
	return s, a, func() {
		leaveStep()
		leaveSession()
	}, nil
}

// running is take of a step that has begun.
func (e engineService) running(ctx context.Context, t uint64) (s *session, a *step, leave func(), err error) {
	s, a, leave, err = e.take(ctx, t)
	if err == nil && !a.begun {
		leave()
		err = fmt.Errorf("step %d: %w", t, manager.ErrStaged)
	}
	return s, a, leave, err
}

func (e engineService) Commit(ctx context.Context, req *kvferrypb.CommitRequest) (*kvferrypb.CommitResponse, error) {
	committed, err := e.commit(ctx, req.GetStep())
	if err != nil {
		return nil, err
	}
	res := &kvferrypb.CommitResponse{}
	for _, r := range committed.Missing {
		res.Missing = append(res.Missing, string(r))
	}
	for _, p := range req.GetPublish() {
		result := &kvferrypb.PublishResult{}
		if result.Response, err = e.Publish(ctx, p); err != nil {
			result.Failure, _ = failureOf(err)
		}
		res.Published = append(res.Published, result)
	}
	return res, nil
}

// commit makes the copies of the forks that follow the segments, and ends the
// step. Publications that end by that have ended when it returns.
func (e engineService) commit(ctx context.Context, t uint64) (manager.Committed, error) {
	s, a, leave, err := e.running(ctx, t)
	if err != nil {
		return manager.Committed{}, err
	}
	defer leave()
	n := e.node
	copies, err := n.manager.PostForks(a.token)
	if err == nil {
		err = n.copyPages(a.token, copies)
	}
	if err != nil {
		return manager.Committed{}, n.abort(s, a.token, err)
	}
	s.finish(a.token)
	committed, ends, err := n.owner.commit(time.Now(), a.token)
	if err != nil {
		return manager.Committed{}, err
	}
	if len(ends) > 0 {
		n.announceEnds(ends)
	}
	return committed, nil
}

func (e engineService) Abort(ctx context.Context, req *kvferrypb.AbortRequest) (*kvferrypb.AbortResponse, error) {
	s, a, leave, err := e.take(ctx, req.GetStep())
	if err != nil {
		return nil, err
	}
	defer leave()
	return &kvferrypb.AbortResponse{}, e.node.abort(s, a.token, nil)
}
