package kv

import (
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/internal/page"
)

// Move is one contiguous stretch of a copy: offsets in bytes from the starts of
// the memory that it goes to and of the memory that it comes from.
type Move struct{ To, From, Bytes int64 }

// Moves appends to list the fewest moves that do what [Copy] does between caches
// of these layouts, all layers: for memory that no processor reaches. It refuses
// what Copy refuses, and a page that is named twice in to: moves may be made in
// any order, and several at once. So within one cache no page may be in both lists,
// unless all of the sources are read before anything is written.
func Moves(list []Move, dst page.Layout, to []page.Index, src page.Layout, from []page.Index, tokens int) ([]Move, error) {
	err := checkCopy(dst, to, src, from, tokens)
	if err == nil {
		to, from = to[:page.Count(tokens, src.PageSize)], from[:page.Count(tokens, src.PageSize)]
		err = checkOnce(to)
	}
	if err != nil {
		return list, fmt.Errorf("moves of %d tokens: %w", tokens, err)
	}
	first := len(list) // all layers look alike, so one is planned and then repeated
	list = appendMoves(list, src, to, from, tokens)
	layer := list[first:]
	list = slices.Grow(list, len(layer)*(src.Layers-1))
	for n := int64(1); n < int64(src.Layers); n++ {
		for _, m := range layer {
			list = append(list, Move{m.To + n*dst.LayerBytes(), m.From + n*src.LayerBytes(), m.Bytes})
		}
	}
	return list, nil
}

// checkOnce refuses a page that is named twice.
func checkOnce(to []page.Index) error {
	sorted := slices.Sorted(slices.Values(to))
	for i := 1; i < len(sorted); i++ {
		if sorted[i] == sorted[i-1] {
			return fmt.Errorf("page %d is copied to twice: %w", sorted[i], ErrInvalid)
		}
	}
	return nil
}

// Cells appends to list where K and V of tokens lie at their slots in one layer:
// To in the cache; From in a buffer of elements of the cache's type that holds K as
// [token, head, element], and V of all of them behind it. They may be written in
// any order: of a slot that is named twice any token may stay.
func Cells(list []Move, l page.Layout, layer int, at []page.Slot) ([]Move, error) {
	if err := check(l, layer, at, l.DType); err != nil {
		return list, err
	}
	first := len(list)
	each(l, layer, at, l.DType, func(p piece) {
		list = append(list, Move{To: p.k, From: int64(p.outside), Bytes: p.bytes})
	})
	v, n := l.Strides().KV, int64(len(at)*row(l, l.DType))
	for _, k := range list[first:] {
		list = append(list, Move{To: k.To + v, From: k.From + n, Bytes: k.Bytes})
	}
	return list, nil
}
