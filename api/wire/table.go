package wire

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// tableRecord is the refs and lists of an announcement, whose last three fields
// it has.
type tableRecord struct {
	_struct struct{} `codec:",toarray"`
	Labels  []string
	Refs    []refRecord
	Lists   [][]byte
}

// EncodeTable returns the refs and lists of an announcement as it has them on
// the wire. It is for keeping many: thousands of pages take a few bytes. It fails
// as [Append] does.
func EncodeTable(refs []Ref, lists [][]page.Index) ([]byte, error) {
	t, err := newTableRecord(refs, lists)
	if err != nil {
		return nil, fmt.Errorf("encode table: %w", err)
	}
	b, err := pack(&t)
	return bytes.Clone(b), err // no byte more than it has
}

// DecodeTable decodes what [EncodeTable] made. It keeps nothing of b. The error
// wraps [ErrMessage].
func DecodeTable(b []byte) (refs []Ref, lists [][]page.Index, err error) {
	var t tableRecord
	if err := unpack(b, &tableForm, &t); err != nil {
		return nil, nil, fmt.Errorf("decode table: %w", err)
	}
	if refs, lists, err = t.table(MaxPages); err != nil {
		return nil, nil, fmt.Errorf("decode table: %w", err)
	}
	return refs, lists, nil
}

func newTableRecord(refs []Ref, lists [][]page.Index) (t tableRecord, err error) {
	switch {
	case len(lists) > maxLists:
		return t, fmt.Errorf("%d page lists, at most %d: %w", len(lists), maxLists, ErrMessage)
	case len(refs) > maxRefs:
		return t, fmt.Errorf("%d streams, at most %d: %w", len(refs), maxRefs, ErrMessage)
	}
	t = tableRecord{Labels: make([]string, 0, 1), Refs: make([]refRecord, len(refs))}
	for i := range refs {
		if l := string(refs[i].Label); !slices.Contains(t.Labels, l) {
			t.Labels = append(t.Labels, l)
		}
	}
	slices.Sort(t.Labels)
	for i := range refs {
		f := &refs[i]
		label, _ := slices.BinarySearch(t.Labels, string(f.Label))
		t.Refs[i] = refRecord{
			Label: uint8(label), RankMask: f.RankMask, List: uint8(f.List),
			Prefix: uint32(f.Prefix), Start: uint32(f.Start), Tokens: uint32(f.Tokens), State: f.State,
		}
	}
	if len(t.Labels) > id.MaxLabels {
		return t, fmt.Errorf("%d labels, at most %d: %w", len(t.Labels), id.MaxLabels, ErrMessage)
	}
	if err := validateTable(refs, lists); err != nil {
		return t, err
	}
	if lists != nil {
		t.Lists = make([][]byte, len(lists))
		for i, l := range lists {
			t.Lists[i] = appendList(nil, l)
		}
	}
	return t, nil
}

// table unfolds to at most maxPages pages.
func (t *tableRecord) table(maxPages int) (refs []Ref, lists [][]page.Index, err error) {
	for i := 1; i < len(t.Labels); i++ {
		if t.Labels[i] <= t.Labels[i-1] {
			return nil, nil, fmt.Errorf("labels are not ascending: %w", ErrMessage)
		}
	}
	if len(t.Refs) > 0 {
		refs = make([]Ref, len(t.Refs))
	}
	for i := range t.Refs {
		f := &t.Refs[i]
		if int(f.Label) >= len(t.Labels) {
			return nil, nil, fmt.Errorf("stream %d names label %d of %d: %w", i, f.Label, len(t.Labels), ErrMessage)
		}
		refs[i] = Ref{
			Label: id.Label(t.Labels[f.Label]), RankMask: f.RankMask, List: int(f.List),
			Prefix: int(f.Prefix), Start: int(f.Start), Tokens: int(f.Tokens), State: f.State,
		}
	}
	if t.Lists != nil {
		lists = make([][]page.Index, len(t.Lists))
		for i, l := range t.Lists {
			if lists[i], err = decodeList(l, maxPages); err != nil {
				return nil, nil, fmt.Errorf("page list %d: %w", i, err)
			}
			maxPages -= len(lists[i])
		}
	}
	if err := validateTable(refs, lists); err != nil {
		return nil, nil, err
	}
	return refs, lists, nil
}

// validateTable is what both sides keep to.
func validateTable(refs []Ref, lists [][]page.Index) error {
	if len(refs) == 0 && lists != nil {
		return fmt.Errorf("page lists without streams: %w", ErrMessage)
	}
	ranks := make(map[id.Label]uint64, 1)
	for i := range refs {
		r := &refs[i]
		if err := r.Label.Validate(); err != nil {
			return fmt.Errorf("stream %d: %w: %w", i, ErrMessage, err)
		}
		seen := ranks[r.Label]
		switch {
		case r.RankMask == 0:
			return fmt.Errorf("stream %d has no rank: %w", i, ErrMessage)
		case seen&r.RankMask != 0:
			return fmt.Errorf("label %q has two streams of one rank: %w", string(r.Label), ErrMessage)
		case r.List < 0 || r.List >= maxLists || lists != nil && r.List >= len(lists):
			return fmt.Errorf("stream %d names page list %d of %d: %w", i, r.List, len(lists), ErrMessage)
		case r.Start < 0 || r.Start > r.Tokens || r.Tokens > maxTokens:
			return fmt.Errorf("stream %d has tokens %d to %d: %w", i, r.Start, r.Tokens, ErrMessage)
		case r.Prefix < 0 || r.Prefix > 0 && r.Prefix >= r.Start:
			return fmt.Errorf("stream %d keeps %d tokens of %d in front: %w", i, r.Prefix, r.Start, ErrMessage)
		case r.State > lastState:
			return fmt.Errorf("stream %d has state %d: %w", i, r.State, ErrMessage)
		case r.State != resident && lists != nil && len(lists[r.List]) > 0:
			return fmt.Errorf("stream %d has %d pages in state %d: %w", i, len(lists[r.List]), r.State, ErrMessage)
		}
		ranks[r.Label] = seen | r.RankMask
	}
	return nil
}
