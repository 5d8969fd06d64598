package wire

import (
	"fmt"
	"math"
	"sync"

	"github.com/ugorji/go/codec"

	"github.com/kvferry/kvferry/internal/id"
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
	case kindBeacon:
		var r beaconRecord
		if err := unpack(body, &beaconForm, &r); err != nil {
			return nil, fmt.Errorf("decode beacon: %w", err)
		}
		return &Beacon{Owner: id.NodeHash(r.Owner), Incarnation: id.Incarnation(r.Incarnation), Number: r.Number, Modulus: r.Modulus}, nil
	case kindEcho:
		var r echoRecord
		if err := unpack(body, &echoForm, &r); err != nil {
			return nil, fmt.Errorf("decode echo: %w", err)
		}
		return &Echo{From: id.NodeHash(r.From), Owner: id.NodeHash(r.Owner), Incarnation: id.Incarnation(r.Incarnation), Number: r.Number}, nil
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
	d := decoders.Get().(*codec.Decoder)
	d.ResetBytes(b)
	err := d.Decode(v)
	d.ResetBytes(nil) // the pool keeps no message
	decoders.Put(d)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrMessage, err)
	}
	return nil
}

// decoders are used again: a new one costs more than a message.
var decoders = sync.Pool{New: func() any { return codec.NewDecoderBytes(nil, handle) }} //nolint:gochecknoglobals // it holds nothing

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
	t := tableRecord{Labels: r.Labels, Refs: r.Refs, Lists: r.Lists}
	if a.Refs, a.Lists, err = t.table(maxPages); err != nil {
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
	return maxPages - pages(a.Lists), nil
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
