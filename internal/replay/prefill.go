package replay

import (
	"context"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

// doPrefill computes the prompt in chunks and publishes after each one. It
// removes the request as soon as the final publication is out: that one lives
// on until its reader has it. With a host tier it waits until then: what the node
// has moved to its host would go with the request.
func (j *job) doPrefill(ctx context.Context) error {
	l := j.prefill
	if err := j.ingest(ctx, l); err != nil {
		return err
	}
	for from := 0; from < j.tokens; {
		span := min(j.chunk, j.tokens-from)
		if err := j.prefillChunk(ctx, from, span); err != nil {
			return err
		}
		from += span
	}
	if l.hostPages > 0 {
		if err := j.awaitRelease(ctx); err != nil {
			return err
		}
	}
	_, err := l.session.Remove(ctx, &kvferrypb.RemoveRequest{Request: string(j.request)})
	return err
}

func (j *job) prefillChunk(ctx context.Context, from, span int) error {
	s, err := j.admit(ctx, j.prefill, from, span)
	if err != nil {
		return err
	}
	defer s.giveUp(ctx)
	n, err := j.write(s, from)
	if err != nil {
		return err
	}
	j.from.note(func(r *NodeReport) { r.Bytes += n })
	final := from+span == j.tokens
	if final {
		if err := pause(ctx, j.run.o.Pause); err != nil {
			return err
		}
		j.final.Store(j.run.now())
	}
	answer, err := s.commit(ctx, &kvferrypb.PublishRequest{Request: string(j.request), Target: string(j.decode.node()), Final: final})
	if err != nil {
		return err
	}
	if len(answer.GetMissing()) > 0 || len(answer.GetPublished()) != 1 {
		return failf(CodeWrongAnswer, "commit of tokens %d to %d: %d requests missing, %d publishes", from, from+span, len(answer.GetMissing()), len(answer.GetPublished()))
	}
	published := answer.GetPublished()[0]
	if f := published.GetFailure(); f != nil {
		return failf(f.GetCode().String(), "publish %d tokens: %s", from+span, f.GetMessage())
	}
	lengths := published.GetResponse().GetLengths()
	if len(lengths) != len(s.views) {
		return failf(CodeWrongAnswer, "published %d labels, want %d", len(lengths), len(s.views))
	}
	for _, length := range lengths {
		if int(length.GetTokens()) != from+span {
			return failf(CodeWrongAnswer, "published %d tokens of label %s, want %d", length.GetTokens(), length.GetLabel(), from+span)
		}
	}
	j.published = final
	if from == 0 {
		j.reference <- published.GetResponse().GetReference()
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
