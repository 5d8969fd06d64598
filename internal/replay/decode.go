package replay

import (
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
)

// doDecode takes the prompt's KV as it is published, checks every byte of it,
// decodes, and looks at everything again before it removes the request. As long
// as it knows of no publication it ends with offered, too.
func (j *job) doDecode(ctx, offered context.Context) error {
	if err := j.ingest(ctx, j.decode); err != nil {
		return err
	}
	waiting, stop := with(ctx, offered)
	defer stop()
	reference := ""
	if j.byReference {
		select {
		case reference = <-j.reference:
			waiting = ctx
		case <-waiting.Done():
			return context.Cause(waiting)
		}
	}
	if err := j.retrievePart(waiting, reference); err != nil {
		return because(waiting, err)
	}
	if err := j.retrieveAll(ctx, reference); err != nil {
		return err
	}
	var err error
	if j.verified, err = j.check(ctx, j.lengths(j.tokens), j.tokens); err != nil {
		return err
	}
	j.to.note(func(r *NodeReport) { r.Bytes += j.verified })
	for i := range j.steps {
		if err := j.decodeStep(ctx, j.tokens+i); err != nil {
			return err
		}
		if err := pause(ctx, j.run.o.StepPause); err != nil {
			return err
		}
	}
	// Decoding must have changed nothing, and nobody may have got our pages.
	if j.steps > 0 {
		if _, err := j.check(ctx, j.lengths(j.tokens+j.steps), j.tokens+j.steps); err != nil {
			return err
		}
	}
	_, err = j.decode.session.Remove(ctx, &kvferrypb.RemoveRequest{Request: string(j.request)})
	return err
}

// retrievePart waits for the first chunk alone and checks what came. The
// request may be further on by then.
func (j *job) retrievePart(ctx context.Context, reference string) error {
	answer, err := j.retrieve(ctx, reference, j.chunk)
	if err != nil {
		return fmt.Errorf("first %d of %d tokens: %w", j.chunk, j.tokens, err)
	}
	landed := make([]int, len(j.streams))
	for _, l := range answer.GetLengths() {
		if i := slices.IndexFunc(j.streams, func(s stream) bool { return string(s.label) == l.GetLabel() }); i >= 0 {
			landed[i] = int(l.GetTokens())
		}
	}
	if least := slices.Min(landed); least < j.chunk {
		return failf(CodeWrongAnswer, "ready with %d tokens, want at least %d of every label: %v", least, j.chunk, answer.GetLengths())
	}
	_, err = j.check(ctx, landed, j.chunk)
	return err
}

// lengths says that every stream has so many tokens.
func (j *job) lengths(tokens int) []int {
	return slices.Repeat([]int{tokens}, len(j.streams))
}

// retrieveAll waits until the request is ready as a whole: not before the
// final publish was called.
func (j *job) retrieveAll(ctx context.Context, reference string) error {
	answer, err := j.retrieve(ctx, reference, 0)
	ready := j.run.now()
	final := j.final.Load()
	if err != nil {
		return fmt.Errorf("all %d tokens: %w", j.tokens, err)
	}
	if final == 0 {
		j.run.noteEarly()
		return failf(CodeEarly, "node %s reports ready with %v, the final publish was not called yet", j.decode.node(), answer.GetLengths())
	}
	for _, l := range answer.GetLengths() {
		if n := int(l.GetTokens()); n < j.tokens {
			j.run.noteEarly()
			return failf(CodeEarly, "node %s reports ready with %d of %d tokens of label %s", j.decode.node(), n, j.tokens, l.GetLabel())
		} else if n > j.tokens {
			return failf(CodeWrongAnswer, "ready with %d tokens of label %s, the prompt has %d", n, l.GetLabel(), j.tokens)
		}
	}
	j.run.noteReady(time.Duration(ready-final), answer.GetTransport(), int64(answer.GetBytes()))
	return nil
}

func (j *job) retrieve(ctx context.Context, reference string, minTokens int) (*kvferrypb.AdmitRetrieveResponse, error) {
	answer, err := again(ctx, j, j.decode, func() (*kvferrypb.AdmitRetrieveResponse, error) {
		// The node gives up a little before we do: it can say what it waits for.
		deadline, _ := ctx.Deadline() // do has set one
		wait := max(time.Until(deadline)*19/20, time.Millisecond)
		return j.decode.session.AdmitRetrieve(ctx, &kvferrypb.AdmitRetrieveRequest{
			Request: string(j.request), Reference: reference, MinTokens: uint32(minTokens), Wait: durationpb.New(wait),
		})
	})
	if err != nil {
		return nil, err
	}
	if answer.GetReadiness() != kvferrypb.Readiness_READY {
		return nil, failf(CodeWrongAnswer, "node answers %v to a call that waits until ready", answer.GetReadiness())
	}
	owner := id.Life{Node: id.Node(answer.GetOwner()), Incarnation: id.Incarnation(answer.GetOwnerIncarnation())}
	if owner != j.prefill.name() {
		return nil, failf(CodeWrongAnswer, "request was read from %s, its owner is %s", owner, j.prefill.name())
	}
	return answer, nil
}

// check compares the first tokens of every stream with what they have to be.
// It learns where they lie from a step that adds nothing, which keeps them there;
// lengths are those of the whole streams.
func (j *job) check(ctx context.Context, lengths []int, tokens int) (verified int64, err error) {
	d := j.decode
	s, err := j.admit(ctx, d, j.tokens, 0)
	if err != nil {
		return 0, err
	}
	defer s.giveUp(ctx)
	for i, v := range s.views {
		if v.length != lengths[i] {
			return 0, failf(CodeWrongAnswer, "stream of label %s has %d tokens, want %d", v.stream.label, v.length, lengths[i])
		}
	}
	var first *mistake
	for _, v := range s.views {
		for _, r := range d.ranks {
			looked, wrong, m, err := r.check(j.request, v.stream, v.pages, tokens)
			if err != nil {
				return verified, fmt.Errorf("look at %d tokens of label %s on rank %d of node %s: %w", tokens, v.stream.label, r.id, d.node(), err)
			}
			verified += looked - wrong
			if wrong > 0 {
				j.run.noteWrong(wrong)
			}
			if first == nil {
				first = m
			}
		}
	}
	if first != nil {
		return verified, &failure{CodeWrongBytes, first}
	}
	return verified, s.abort(ctx)
}

// decodeStep generates one token of every stream.
func (j *job) decodeStep(ctx context.Context, token int) error {
	s, err := j.admit(ctx, j.decode, token, 1)
	if err != nil {
		return err
	}
	defer s.giveUp(ctx)
	if _, err := j.write(s, token); err != nil {
		return err
	}
	answer, err := s.commit(ctx)
	if err != nil {
		return err
	}
	if len(answer.GetMissing()) > 0 {
		return failf(CodeWrongAnswer, "commit of token %d: request is missing", token)
	}
	j.run.noteDecoded(int64(len(s.views)))
	return nil
}
