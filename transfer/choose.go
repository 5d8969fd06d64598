package transfer

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// Refusal says why a transport was not taken.
type Refusal struct {
	Transport string
	Reason    string
}

func (r Refusal) String() string { return r.Transport + ": " + r.Reason }

// Choose opens a link by the first of ours, in order of preference, that the
// peer has too. Only ErrUnavailable, or a peer without the transport, lets it
// pass to the next one; every pass is recorded. descriptors are the peer's, by
// transport name; peer.Descriptor is set from them.
//
// If none is left the error wraps [ErrUnavailable] and repeats every refusal.
// Any other error of a transport, and the end of ctx, end the choice: a broken
// transport must be seen, not be made up for by a slower one. The refusals are
// returned in either case.
func Choose(ctx context.Context, ours []Transport, peer Peer, descriptors map[string][]byte) (Transport, Link, []Refusal, error) {
	var refusals []Refusal
	for _, t := range ours {
		if ctx.Err() != nil {
			return nil, nil, refusals, fmt.Errorf("open a link to %s: %w", peer.Life, context.Cause(ctx))
		}
		descriptor, ok := descriptors[t.Name()]
		if !ok {
			refusals = append(refusals, Refusal{t.Name(), "the peer does not have it"})
			continue
		}
		peer.Descriptor = descriptor
		link, err := t.Open(ctx, peer)
		if err == nil {
			return t, link, refusals, nil
		}
		if !errors.Is(err, ErrUnavailable) {
			return nil, nil, refusals, fmt.Errorf("open a link to %s by %s: %w", peer.Life, t.Name(), err)
		}
		refusals = append(refusals, Refusal{t.Name(), err.Error()})
	}
	return nil, nil, refusals, fmt.Errorf("open a link to %s: %w", peer.Life, none(refusals))
}

// none is the error of a choice that has run out of transports.
func none(refusals []Refusal) error {
	if len(refusals) == 0 {
		return fmt.Errorf("no transport is configured here: %w", ErrUnavailable)
	}
	var text []string
	for _, r := range refusals {
		text = append(text, r.String())
	}
	return fmt.Errorf("%w: %s", ErrUnavailable, strings.Join(text, "; "))
}
