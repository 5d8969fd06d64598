package kv

import (
	"fmt"
	"unsafe"

	"github.com/kvferry/kvferry/internal/page"
)

// Copy copies the first tokens token slots of the pages from of src to the
// pages to of dst, page by page in order, all layers, K and V. The last page is
// cut at the token border: the slots above it are not touched, nor are the
// pages behind it.
//
// The layouts must agree in all but Pages, and the lists must be equally long
// and hold the tokens. Where src and dst are the same cache, the result is as
// if every source had been read before anything was written; if pages of such a
// copy depend on each other, it takes a buffer of one layer of the pages. Two
// different caches must not share memory. Of a page that is named twice in to
// the later copy stays.
func Copy(dst Cache, to []page.Index, src Cache, from []page.Index, tokens int) error {
	err := checkCopy(dst.Layout, to, src.Layout, from, tokens)
	if err == nil && overlap(dst, src) && (unsafe.SliceData(dst.Bytes) != unsafe.SliceData(src.Bytes) || dst.Layout != src.Layout) {
		err = fmt.Errorf("two caches share memory: %w", ErrInvalid)
	}
	if err != nil {
		return fmt.Errorf("copy %d tokens: %w", tokens, err)
	}
	n := page.Count(tokens, src.Layout.PageSize)
	to, from = to[:n], from[:n]
	all := appendMoves(nil, src.Layout, to, from, tokens)

	// A single move is right even onto itself.
	var buffer []byte
	if len(all) > 1 && overlap(dst, src) && meet(to, from) {
		buffer = make([]byte, int64(n)*src.Layout.LayerPageBytes())
	}
	for layer := range int64(src.Layout.Layers) {
		d := dst.Bytes[layer*dst.Layout.LayerBytes():]
		s := src.Bytes[layer*src.Layout.LayerBytes():]
		if buffer == nil {
			for _, m := range all {
				copy(d[m.To:][:m.Bytes], s[m.From:][:m.Bytes])
			}
			continue
		}
		rest := buffer
		for _, m := range all {
			rest = rest[copy(rest, s[m.From:][:m.Bytes]):]
		}
		rest = buffer
		for _, m := range all {
			rest = rest[copy(d[m.To:][:m.Bytes], rest):]
		}
	}
	return nil
}

func checkCopy(dst page.Layout, to []page.Index, src page.Layout, from []page.Index, tokens int) error {
	ours, theirs := page.Geometry{Layout: dst}, page.Geometry{Layout: src}
	if d := ours.Differences(theirs); len(d) > 0 {
		return fmt.Errorf("layouts differ, ours the target: %v: %w", d, ErrInvalid)
	}
	if len(to) != len(from) {
		return fmt.Errorf("%d pages to %d pages: %w", len(from), len(to), ErrInvalid)
	}
	if tokens < 0 || page.Count(tokens, src.PageSize) > len(from) {
		return fmt.Errorf("%d pages of %d tokens: %w", len(from), src.PageSize, ErrRange)
	}
	for i := range from {
		if err := checkPage(src, from[i]); err != nil {
			return fmt.Errorf("source %d: %w", i, err)
		}
		if err := checkPage(dst, to[i]); err != nil {
			return fmt.Errorf("target %d: %w", i, err)
		}
	}
	return nil
}

// appendMoves appends the fewest moves that copy the tokens in order, of any
// layer, with offsets from its start. Pages that are neighbours on both sides
// are moved as one.
func appendMoves(list []Move, l page.Layout, to, from []page.Index, tokens int) []Move {
	size := l.LayerPageBytes()
	full := tokens / l.PageSize
	for i := 0; i < full; {
		end := i + 1
		for end < full && to[end] == to[end-1]+1 && from[end] == from[end-1]+1 {
			end++
		}
		list = append(list, Move{int64(to[i]) * size, int64(from[i]) * size, int64(end-i) * size})
		i = end
	}
	if cut := tokens % l.PageSize; cut > 0 {
		chunks := l.Chunks(0, 0, 0, cut)
		for i := range chunks.Count {
			list = append(list, Move{int64(to[full])*size + chunks.At(i), int64(from[full])*size + chunks.At(i), chunks.Bytes})
		}
	}
	return list
}

// overlap says whether two caches share memory.
func overlap(a, b Cache) bool {
	if len(a.Bytes) == 0 || len(b.Bytes) == 0 {
		return false
	}
	first, second := uintptr(unsafe.Pointer(&a.Bytes[0])), uintptr(unsafe.Pointer(&b.Bytes[0]))
	return first < second+uintptr(len(b.Bytes)) && second < first+uintptr(len(a.Bytes))
}

// meet says whether a page is in both lists.
func meet(to, from []page.Index) bool {
	set := make(map[page.Index]bool, len(to))
	for _, p := range to {
		set[p] = true
	}
	for _, p := range from {
		if set[p] {
			return true
		}
	}
	return false
}
