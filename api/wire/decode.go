package wire

import (
	"fmt"
	"math"

	"github.com/ugorji/go/codec"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// Decode decodes a message whose page lists have at most maxPages pages
// together. It keeps nothing of b.
//
// What it returns keeps every promise of the types' comments: sequences lie
// above the floor, indexes in range, a (label, rank) has one stream, and where
// the lists travel along, digest and number of pages fit them. Whether a
// stream has enough pages for its tokens it cannot know. The error wraps
// [ErrVersion] if the message may be sound and is only too new, else
// [ErrMessage].
func Decode(b []byte, maxPages int) (Message, error) {
	kind, body, err := open(b)
	if err != nil {
		return nil, err
	}
	switch kind {
	case kindBatch:
		var records []batchRecord
		if err := unpack(body, &batchForm, &records); err != nil {
			return nil, fmt.Errorf("decode batch: %w", err)
		}
		batches := make(Batches, len(records))
		for i := range records {
			if maxPages, err = records[i].batch(&batches[i], maxPages); err != nil {
				return nil, fmt.Errorf("decode batch of owner %#x: %w", records[i].Owner, err)
			}
		}
		return batches, nil
	case kindCheck:
		var r checkRecord
		if err := unpack(body, &checkForm, &r); err != nil {
			return nil, fmt.Errorf("decode checkpoint: %w", err)
		}
		return r.check()
	case kindNack:
		var r nackRecord
		if err := unpack(body, &nackForm, &r); err != nil {
			return nil, fmt.Errorf("decode nack: %w", err)
		}
		missing, err := decodeMissing(r.Missing)
		if err != nil {
			return nil, fmt.Errorf("decode nack: %w", err)
		}
		return &Nack{
			From: id.NodeHash(r.From), Owner: id.NodeHash(r.Owner), Incarnation: id.Incarnation(r.Incarnation),
			Missing: missing,
		}, nil
	case kindBye:
		var r byeRecord
		if err := unpack(body, &byeForm, &r); err != nil {
			return nil, fmt.Errorf("decode bye: %w", err)
		}
		return &Bye{Owner: id.NodeHash(r.Owner), Incarnation: id.Incarnation(r.Incarnation), Max: id.Sequence(r.Max)}, nil
	default:
		return nil, fmt.Errorf("decode kind %d: %w", kind, ErrVersion)
	}
}

// DecodeChecks decodes what [EncodeChecks] made.
func DecodeChecks(b []byte) ([]Check, error) {
	kind, body, err := open(b)
	if err != nil {
		return nil, err
	}
	if kind != kindState {
		return nil, fmt.Errorf("decode kind %d as checkpoints: %w", kind, ErrVersion)
	}
	var records []checkRecord
	if err := unpack(body, &stateForm, &records); err != nil {
		return nil, fmt.Errorf("decode checkpoints: %w", err)
	}
	checks := make([]Check, len(records))
	for i := range records {
		c, err := records[i].check()
		if err != nil {
			return nil, err
		}
		checks[i] = *c
	}
	return checks, nil
}

func open(b []byte) (kind byte, body []byte, err error) {
	if len(b) < headBytes || b[0] != magic {
		return 0, nil, fmt.Errorf("decode %d bytes: no header: %w", len(b), ErrMessage)
	}
	if b[1] != version {
		return 0, nil, fmt.Errorf("decode version %d: %w", b[1], ErrVersion)
	}
	return b[2], b[headBytes:], nil
}

func unpack(b []byte, f *form, v any) error {
	if err := f.check(b); err != nil {
		return err
	}
	if err := codec.NewDecoderBytes(b, handle).Decode(v); err != nil {
		return fmt.Errorf("%w: %w", ErrMessage, err)
	}
	return nil
}

// batch fills b in and returns how many pages are left to be unfolded.
func (r *batchRecord) batch(b *Batch, maxPages int) (left int, err error) {
	*b = Batch{
		Owner: id.NodeHash(r.Owner), Incarnation: id.Incarnation(r.Incarnation), Floor: id.Sequence(r.Floor),
		Announcements: make([]Announcement, len(r.Announcements)),
	}
	for i := range r.Announcements {
		if maxPages, err = r.Announcements[i].announcement(&b.Announcements[i], b.Floor, maxPages); err != nil {
			return 0, fmt.Errorf("announcement %d: %w", i, err)
		}
	}
	last := b.Floor
	if len(r.Releases) > 0 {
		b.Releases = make([]id.Sequence, 0, len(r.Releases)/2+1)
	}
	for rest := r.Releases; len(rest) > 0; {
		gap, more, ok := uvarint(rest)
		if !ok || gap == 0 || gap > math.MaxUint64-uint64(last) {
			return 0, fmt.Errorf("releases are not ascending: %w", ErrMessage)
		}
		last += id.Sequence(gap)
		b.Releases = append(b.Releases, last)
		rest = more
	}
	return maxPages, nil
}

// announcement fills a in and returns how many pages are left to be unfolded.
func (r *announcementRecord) announcement(a *Announcement, floor id.Sequence, maxPages int) (left int, err error) {
	if r.Publication == 0 || r.Publication > r.Sequence || uint64(r.Sequence) > math.MaxUint64-uint64(floor) {
		return 0, fmt.Errorf("sequence %d, publication %d above floor %d: %w", r.Sequence, r.Publication, floor, ErrMessage)
	}
	*a = Announcement{
		Sequence: floor + id.Sequence(r.Sequence), Publication: floor + id.Sequence(r.Publication),
		Request: id.RequestHash(r.Request), Seal: r.Seal, ContentEpoch: r.ContentEpoch, TTLMillis: r.TTLMillis,
		Final: r.Flags&flagFinal != 0, Digest: r.Digest, Pages: r.Pages,
	}
	for i := 1; i < len(r.Labels); i++ {
		if r.Labels[i] <= r.Labels[i-1] {
			return 0, fmt.Errorf("labels are not ascending: %w", ErrMessage)
		}
	}
	if len(r.Refs) > 0 {
		a.Refs = make([]Ref, len(r.Refs))
	}
	for i := range r.Refs {
		f := &r.Refs[i]
		if int(f.Label) >= len(r.Labels) {
			return 0, fmt.Errorf("stream %d names label %d of %d: %w", i, f.Label, len(r.Labels), ErrMessage)
		}
		a.Refs[i] = Ref{
			Label: id.Label(r.Labels[f.Label]), RankMask: f.RankMask, List: int(f.List),
			Start: int(f.Start), Tokens: int(f.Tokens), State: f.State,
		}
	}
	if r.Lists != nil {
		a.Lists = make([][]page.Index, len(r.Lists))
		for i, l := range r.Lists {
			if a.Lists[i], err = decodeList(l, maxPages); err != nil {
				return 0, fmt.Errorf("page list %d: %w", i, err)
			}
			maxPages -= len(a.Lists[i])
		}
	}
	if err := a.validate(); err != nil {
		return 0, err
	}
	if a.Lists != nil {
		if n := pages(a.Lists); uint64(n) != uint64(a.Pages) {
			return 0, fmt.Errorf("%d pages where %d were announced: %w", n, a.Pages, ErrMessage)
		}
		if d := Digest(a.Refs, a.Lists); d != a.Digest {
			return 0, fmt.Errorf("digest %#x of refs and lists, announced %#x: %w", d, a.Digest, ErrMessage)
		}
	}
	return maxPages, nil
}

// validate is what both sides keep to.
func (a *Announcement) validate() error {
	if len(a.Refs) == 0 && a.Lists != nil {
		return fmt.Errorf("page lists without streams: %w", ErrMessage)
	}
	ranks := make(map[id.Label]uint64, 1)
	for i := range a.Refs {
		r := &a.Refs[i]
		if err := r.Label.Validate(); err != nil {
			return fmt.Errorf("stream %d: %w: %w", i, ErrMessage, err)
		}
		seen := ranks[r.Label]
		switch {
		case r.RankMask == 0:
			return fmt.Errorf("stream %d has no rank: %w", i, ErrMessage)
		case seen&r.RankMask != 0:
			return fmt.Errorf("label %q has two streams of one rank: %w", string(r.Label), ErrMessage)
		case r.List < 0 || r.List >= maxLists || a.Lists != nil && r.List >= len(a.Lists):
			return fmt.Errorf("stream %d names page list %d of %d: %w", i, r.List, len(a.Lists), ErrMessage)
		case r.Start < 0 || r.Start > r.Tokens || r.Tokens > maxTokens:
			return fmt.Errorf("stream %d has tokens %d to %d: %w", i, r.Start, r.Tokens, ErrMessage)
		case r.State > lastState:
			return fmt.Errorf("stream %d has state %d: %w", i, r.State, ErrMessage)
		}
		ranks[r.Label] = seen | r.RankMask
	}
	return nil
}

func (r *checkRecord) check() (*Check, error) {
	if r.Floor > r.Max || uint64(r.Live) > r.Max-r.Floor {
		return nil, fmt.Errorf("decode checkpoint: %d live in (%d, %d]: %w", r.Live, r.Floor, r.Max, ErrMessage)
	}
	return &Check{
		Owner: id.NodeHash(r.Owner), Incarnation: id.Incarnation(r.Incarnation),
		Floor: id.Sequence(r.Floor), Max: id.Sequence(r.Max), Hash: r.Hash, Live: r.Live, Version: r.Version,
	}, nil
}

func decodeMissing(b []byte) ([]id.Sequence, error) {
	var missing []id.Sequence
	last := uint64(0)
	for len(b) > 0 {
		gap, rest, ok := uvarint(b)
		if !ok || gap == 0 || gap > math.MaxUint64-last {
			return nil, fmt.Errorf("ranges are not ascending: %w", ErrMessage)
		}
		more, rest, ok := uvarint(rest)
		first := last + gap
		if !ok || more >= uint64(MaxMissing-len(missing)) || more > math.MaxUint64-first {
			return nil, fmt.Errorf("more than %d sequences: %w", MaxMissing, ErrMessage)
		}
		b = rest
		last = first + more
		for s := first; ; s++ {
			missing = append(missing, id.Sequence(s))
			if s == last {
				break
			}
		}
	}
	if len(missing) == 0 {
		return nil, fmt.Errorf("no sequence: %w", ErrMessage)
	}
	return missing, nil
}
