package wire

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/ugorji/go/codec"

	"github.com/kvferry/kvferry/internal/id"
)

// A message begins with magic, version, and its kind.
const (
	magic   = 0x4B // K
	version = 1

	kindBatch  = 1
	kindCheck  = 2
	kindNack   = 3
	kindBye    = 4
	kindState  = 5 // of push/pull, never gossiped
	kindBeacon = 6
	kindEcho   = 7

	headBytes = 3
)

const (
	flagFinal = 1

	resident  = 0 // the state of a stream that has pages
	lastState = 2
)

// The records as the codec sees them; form.go says the same in other words.
type (
	batchRecord struct {
		_struct       struct{} `codec:",toarray"`
		Owner         uint64
		Incarnation   uint64
		Floor         uint64
		Announcements []announcementRecord
		Releases      []byte
	}
	announcementRecord struct {
		_struct      struct{} `codec:",toarray"`
		Sequence     uint32
		Publication  uint32
		Request      []byte
		Seal         uint32
		ContentEpoch uint32
		TTLMillis    uint32
		Flags        uint8
		Digest       uint64
		Pages        uint32
		Labels       []string
		Refs         []refRecord
		Lists        [][]byte
	}
	refRecord struct {
		_struct  struct{} `codec:",toarray"`
		Label    uint8
		RankMask uint64
		List     uint8
		Prefix   uint32
		Start    uint32
		Tokens   uint32
		State    uint8
	}
	checkRecord struct {
		_struct     struct{} `codec:",toarray"`
		Owner       uint64
		Incarnation uint64
		Floor       uint64
		Max         uint64
		Hash        uint64
		Live        uint32
		Version     uint64
	}
	nackRecord struct {
		_struct     struct{} `codec:",toarray"`
		From        uint64
		Owner       uint64
		Incarnation uint64
		Missing     []byte
	}
	byeRecord struct {
		_struct     struct{} `codec:",toarray"`
		Owner       uint64
		Incarnation uint64
		Max         uint64
	}
	beaconRecord struct {
		_struct     struct{} `codec:",toarray"`
		Owner       uint64
		Incarnation uint64
		Number      uint64
		Modulus     uint32
	}
	echoRecord struct {
		_struct     struct{} `codec:",toarray"`
		From        uint64
		Owner       uint64
		Incarnation uint64
		Number      uint64
	}
)

// handle is never changed after this.
var handle = newHandle() //nolint:gochecknoglobals // it caches what it has learned of our types

func newHandle() *codec.MsgpackHandle {
	h := new(codec.MsgpackHandle)
	h.WriteExt = true // text is str and bytes are bin
	h.MaxInitLen = 1024
	return h
}

// Encode returns the bytes of m; see [Append].
func Encode(m Message) ([]byte, error) { return Append(nil, m) }

// Append appends the bytes of m to dst. It fails only if m is not what its
// type's comments say; the error wraps [ErrMessage]. Digest and Pages of an
// announcement are taken as they are.
func Append(dst []byte, m Message) ([]byte, error) {
	switch m := m.(type) {
	case Batches:
		records := make([]batchRecord, len(m))
		for i := range m {
			var err error
			if records[i], err = m[i].record(); err != nil {
				return nil, err
			}
		}
		return appendBody(dst, kindBatch, records)
	case *Check:
		return appendBody(dst, kindCheck, m.record())
	case *Nack:
		missing, err := appendMissing(nil, m.Missing)
		if err != nil {
			return nil, err
		}
		return appendBody(dst, kindNack, &nackRecord{
			From: uint64(m.From), Owner: uint64(m.Owner), Incarnation: uint64(m.Incarnation), Missing: missing,
		})
	case *Bye:
		return appendBody(dst, kindBye, &byeRecord{Owner: uint64(m.Owner), Incarnation: uint64(m.Incarnation), Max: uint64(m.Max)})
	case *Beacon:
		if m.Number == 0 || m.Modulus == 0 {
			return nil, fmt.Errorf("encode beacon %d of modulus %d: %w", m.Number, m.Modulus, ErrMessage)
		}
		return appendBody(dst, kindBeacon, &beaconRecord{
			Owner: uint64(m.Owner), Incarnation: uint64(m.Incarnation), Number: m.Number, Modulus: m.Modulus,
		})
	case *Echo:
		return appendBody(dst, kindEcho, &echoRecord{
			From: uint64(m.From), Owner: uint64(m.Owner), Incarnation: uint64(m.Incarnation), Number: m.Number,
		})
	default:
		return nil, fmt.Errorf("encode %T: %w", m, ErrVersion)
	}
}

// EncodeChecks returns the checkpoints as push/pull carries them. Of more than
// [MaxChecks] it takes the first.
func EncodeChecks(checks []Check) []byte {
	checks = checks[:min(len(checks), MaxChecks)]
	records := make([]checkRecord, len(checks))
	for i := range checks {
		records[i] = *checks[i].record()
	}
	b, err := appendBody(nil, kindState, records)
	if err != nil {
		panic(fmt.Sprintf("encode checkpoints: %v", err)) // numbers always encode
	}
	return b
}

func appendBody(dst []byte, kind byte, body any) ([]byte, error) {
	b, err := pack(body)
	if err != nil {
		return nil, err
	}
	dst = slices.Grow(dst, headBytes+len(b))
	return append(append(dst, magic, version, kind), b...), nil
}

func pack(v any) (b []byte, err error) {
	b = make([]byte, 0, 128) // most are shorter
	if err := codec.NewEncoderBytes(&b, handle).Encode(v); err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	return b, nil
}

func (b *Batch) record() (batchRecord, error) {
	r := batchRecord{
		Owner: uint64(b.Owner), Incarnation: uint64(b.Incarnation), Floor: uint64(b.Floor),
		Announcements: make([]announcementRecord, len(b.Announcements)),
		Releases:      []byte{},
	}
	for i := range b.Announcements {
		var err error
		if r.Announcements[i], err = b.Announcements[i].record(b.Floor); err != nil {
			return batchRecord{}, fmt.Errorf("encode announcement %d: %w", b.Announcements[i].Sequence, err)
		}
	}
	last := b.Floor
	for _, s := range b.Releases {
		if s <= last {
			return batchRecord{}, fmt.Errorf("encode release %d after %d: %w", s, last, ErrMessage)
		}
		r.Releases = binary.AppendUvarint(r.Releases, uint64(s-last))
		last = s
	}
	return r, nil
}

func (a *Announcement) record(floor id.Sequence) (r announcementRecord, err error) {
	switch {
	case a.Publication <= floor || a.Publication > a.Sequence || uint64(a.Sequence-floor) > math.MaxUint32:
		return r, fmt.Errorf("publication %d above floor %d: %w", a.Publication, floor, ErrMessage)
	}
	t, err := newTableRecord(a.Refs, a.Lists)
	if err != nil {
		return r, err
	}
	r = announcementRecord{
		Sequence: uint32(a.Sequence - floor), Publication: uint32(a.Publication - floor),
		Request: a.Request[:], Seal: a.Seal, ContentEpoch: a.ContentEpoch, TTLMillis: a.TTLMillis,
		Digest: a.Digest, Pages: a.Pages,
		Labels: t.Labels, Refs: t.Refs, Lists: t.Lists,
	}
	if a.Final {
		r.Flags |= flagFinal
	}
	return r, nil
}

func (c *Check) record() *checkRecord {
	return &checkRecord{
		Owner: uint64(c.Owner), Incarnation: uint64(c.Incarnation), Floor: uint64(c.Floor), Max: uint64(c.Max),
		Hash: c.Hash, Live: c.Live, Version: c.Version,
	}
}

// appendMissing appends ranges, each two uvarints: its distance to the end of
// the one before, and its length - 1.
func appendMissing(dst []byte, missing []id.Sequence) ([]byte, error) {
	if len(missing) == 0 || len(missing) > MaxMissing {
		return nil, fmt.Errorf("encode %d missing sequences, want 1 to %d: %w", len(missing), MaxMissing, ErrMessage)
	}
	last := id.Sequence(0)
	for i := 0; i < len(missing); {
		n := 1
		for i+n < len(missing) && missing[i+n] == missing[i]+id.Sequence(n) {
			n++
		}
		if missing[i] <= last {
			return nil, fmt.Errorf("encode missing sequence %d after %d: %w", missing[i], last, ErrMessage)
		}
		dst = binary.AppendUvarint(dst, uint64(missing[i]-last))
		dst = binary.AppendUvarint(dst, uint64(n-1))
		i += n
		last = missing[i-1]
	}
	return dst, nil
}
