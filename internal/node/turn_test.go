package node

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/metadata"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// TestTurn: a call waits for the one that has its step, no longer than its own
// deadline, its session, or the bound, and finds the step gone if that one
// ended it.
func TestTurn(t *testing.T) {
	late := errors.New("late")
	for name, tt := range map[string]struct {
		end  func(s *session, leave, cancel func())
		want error
	}{
		"it is let go":          {func(_ *session, leave, _ func()) { leave() }, nil},
		"it was ended":          {func(s *session, leave, _ func()) { s.finish(7); leave() }, manager.ErrUnknownToken},
		"the caller gives up":   {func(_ *session, _, cancel func()) { cancel() }, late},
		"the session has ended": {func(s *session, _, _ func()) { s.stop(errNoSession) }, errNoSession},
		"nothing happens":       {func(*session, func(), func()) { time.Sleep(maxTurn) }, errTooLate},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSession(time.Now(), "t", "e")
				s.steps[7] = &step{token: 7, place: make(chan struct{}, 1)}
				_, leave, err := s.take(t.Context(), 7)
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				out := make(chan error, 1)
				go func() {
					_, leave, err := s.take(ctx, 7)
					if err == nil {
						leave()
					}
					out <- err
				}()
				synctest.Wait() // it waits
				tt.end(s, leave, func() { cancel(late) })
				if err := <-out; !errors.Is(err, tt.want) {
					t.Errorf("%v, want %v", err, tt.want)
				}
			})
		})
	}
	s := newSession(time.Now(), "t", "e")
	if _, _, err := s.take(t.Context(), 8); !errors.Is(err, manager.ErrUnknownToken) {
		t.Errorf("a step that is not there: %v", err)
	}
}

// TestFailedCopyLeavesNothing: a step of which a fork could not be copied is gone.
func TestFailedCopyLeavesNothing(t *testing.T) {
	g := page.Geometry{WorldSize: 1, Layout: page.Layout{Layers: 1, Pages: 16, PageSize: 4, Heads: 1, HeadDim: 2, DType: page.BF16, Order: page.NHD}}
	m, err := manager.New(manager.Options{Geometry: g, Check: true})
	if err != nil {
		t.Fatal(err)
	}
	n := &Node{manager: m, geometry: g, ranks: []id.Rank{0}} // without an arena
	n.sessions = newSessions(n)
	s, err := n.sessions.open(time.Now(), "e")
	if err != nil {
		t.Fatal(err)
	}
	if err := n.sessions.ingest(s, "r", manager.RequestConfig{}); err != nil {
		t.Fatal(err)
	}
	e := engineService{node: n}
	ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs(kvferrypb.SessionKey, s.token))
	token, err := m.Admit(manager.Step{Segments: []manager.Segment{{Request: "r", Label: id.Main, Span: 6}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Commit(token); err != nil {
		t.Fatal(err)
	}
	before := m.Counts()
	fork := []*kvferrypb.Fork{{To: "cfg"}}
	if _, err := e.Admit(ctx, &kvferrypb.AdmitRequest{Rows: &kvferrypb.AdmitRequest_Rows{Requests: []string{"r"}}, PreForks: fork}); !errors.Is(err, id.ErrInvalid) {
		t.Errorf("admit = %v", err)
	}
	step, err := e.Admit(ctx, &kvferrypb.AdmitRequest{Rows: &kvferrypb.AdmitRequest_Rows{Requests: []string{"r"}}, PostForks: fork})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Commit(ctx, &kvferrypb.CommitRequest{Step: step.GetStep()}); !errors.Is(err, id.ErrInvalid) {
		t.Errorf("commit = %v", err)
	}
	if after := m.Counts(); after != before {
		t.Errorf("%+v, before %+v", after, before)
	}
	if len(s.steps) != 0 {
		t.Errorf("the session has %d steps", len(s.steps))
	}
}
