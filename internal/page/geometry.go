package page

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strconv"
	"unicode/utf8"

	"github.com/kvferry/kvferry/internal/id"
)

// MaxModel bounds the name of a model, and of its revision, in bytes.
const MaxModel = 256

// Geometry is what two nodes must agree on to exchange KV, and the page count,
// in which they may differ.
type Geometry struct {
	Model     string
	Revision  string
	WorldSize int // ranks of the engine
	Layout    Layout
}

// Validate checks the names, the world size, and the layout. The error names
// the field and wraps [ErrInvalid].
func (g Geometry) Validate() error {
	for _, f := range [...]struct{ name, value string }{{"model", g.Model}, {"revision", g.Revision}} {
		if len(f.value) > MaxModel || !utf8.ValidString(f.value) {
			return fmt.Errorf("%s %.80q has %d bytes, want at most %d of UTF-8: %w", f.name, f.value, len(f.value), MaxModel, ErrInvalid)
		}
	}
	if g.WorldSize < 1 || g.WorldSize > id.MaxRanks {
		return fmt.Errorf("world_size %d is not in 1..%d: %w", g.WorldSize, id.MaxRanks, ErrInvalid)
	}
	return g.Layout.Validate()
}

// Difference is a field in which two geometries differ.
type Difference struct {
	Field  string
	Ours   string
	Theirs string
}

func (d Difference) String() string {
	return fmt.Sprintf("%s: ours %q, theirs %q", d.Field, d.Ours, d.Theirs)
}

// Differences lists the fields that keep g and theirs from exchanging KV, in a
// fixed order; none if they may. Pages is not one of them.
func (g Geometry) Differences(theirs Geometry) []Difference {
	var list []Difference
	for i, f := range g.fields() {
		if other := theirs.fields()[i].value; f.value != other {
			list = append(list, Difference{Field: f.name, Ours: f.value, Theirs: other})
		}
	}
	return list
}

// Fingerprint is equal for geometries without differences, on every machine
// and in every version. It is a hint: only Differences decides.
func (g Geometry) Fingerprint() uint64 {
	text := []byte("kvferry geometry 1")
	for _, f := range g.fields() {
		text = binary.AppendUvarint(text, uint64(len(f.value)))
		text = append(text, f.value...)
	}
	sum := sha256.Sum256(text)
	return binary.BigEndian.Uint64(sum[:8])
}

type field struct{ name, value string }

// fields are those that must agree. The order is part of the fingerprint.
func (g Geometry) fields() [9]field {
	return [...]field{
		{"model", g.Model},
		{"revision", g.Revision},
		{"world_size", strconv.Itoa(g.WorldSize)},
		{"order", g.Layout.Order.String()},
		{"dtype", g.Layout.DType.String()},
		{"layers", strconv.Itoa(g.Layout.Layers)},
		{"page_size", strconv.Itoa(g.Layout.PageSize)},
		{"heads", strconv.Itoa(g.Layout.Heads)},
		{"head_dim", strconv.Itoa(g.Layout.HeadDim)},
	}
}
