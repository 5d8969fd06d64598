package wire

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"

	"github.com/kvferry/kvferry/internal/id"
)

// Bounds of a reference. With the longest names it has 367 bytes of msgpack
// and 495 in all.
const (
	MaxReference = 512

	referencePrefix = "kvf1."
	referenceInfo   = "kvferry reference"
	macBytes        = 16
)

// IsReference tells a reference from a request id by how it begins.
func IsReference(s string) bool { return strings.HasPrefix(s, referencePrefix) }

// Reference names a publication on its way through routers.
type Reference struct {
	Publication id.Publication
	Request     id.Request
	Seal        uint32 // index of the seal word
}

// Keys are the gossip keys of the ring, the first one the one that signs. With
// none the MAC is empty and anybody can make a reference.
type Keys [][]byte

// signedRecord is what the MAC is made of, referenceRecord what travels.
type (
	signedRecord struct {
		_struct     struct{} `codec:",toarray"`
		Node        string
		Incarnation uint64
		Sequence    uint64
		Request     string
		Seal        uint32
	}
	referenceRecord struct {
		_struct     struct{} `codec:",toarray"`
		Node        string
		Incarnation uint64
		Sequence    uint64
		Request     string
		Seal        uint32
		MAC         []byte
	}
)

// Encode returns "kvf1." and the base64url of the msgpack of r, at most
// [MaxReference] bytes. It refuses invalid names; the error wraps
// [ErrReference].
func (k Keys) Encode(r Reference) (string, error) {
	if err := r.validate(); err != nil {
		return "", fmt.Errorf("encode reference: %w", err)
	}
	mac := []byte{}
	if len(k) > 0 {
		var err error
		if mac, err = r.mac(k[0]); err != nil {
			return "", err
		}
	}
	return r.text(mac)
}

// Decode checks form, names and MAC. A MAC by any key of the ring will do; with
// keys there must be one, and without keys there must be none, since nobody
// could check it. The error wraps [ErrReference].
func (k Keys) Decode(s string) (Reference, error) {
	r, mac, err := parse(s)
	if err != nil {
		return Reference{}, fmt.Errorf("decode reference: %w", err)
	}
	switch {
	case len(k) == 0 && len(mac) == 0:
		return r, nil
	case len(k) == 0:
		return Reference{}, fmt.Errorf("decode reference: it is signed, and this node has no gossip keys: %w", ErrReference)
	case len(mac) == 0:
		return Reference{}, fmt.Errorf("decode reference: it is not signed, and this node has gossip keys: %w", ErrReference)
	}
	for _, key := range k {
		want, err := r.mac(key)
		if err != nil {
			return Reference{}, err
		}
		if hmac.Equal(mac, want) {
			return r, nil
		}
	}
	return Reference{}, fmt.Errorf("decode reference: no key of %d has signed it: %w", len(k), ErrReference)
}

// Peek is what a reference says, true or not: it checks form and names, and
// not the MAC. It is for tools; only Decode says that a key of the ring has
// signed it.
func Peek(s string) (Reference, error) {
	r, _, err := parse(s)
	if err != nil {
		return Reference{}, fmt.Errorf("decode reference: %w", err)
	}
	return r, nil
}

func parse(s string) (r Reference, mac []byte, err error) {
	body, ok := strings.CutPrefix(s, referencePrefix)
	if !ok || len(s) > MaxReference {
		return r, nil, fmt.Errorf("%.20q with %d bytes is none: %w", s, len(s), ErrReference)
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(body)
	if err != nil {
		return r, nil, fmt.Errorf("%w: %w", ErrReference, err)
	}
	var record referenceRecord
	if err := unpack(b, &referenceForm, &record); err != nil {
		return r, nil, fmt.Errorf("%w: %w", ErrReference, err)
	}
	r = Reference{
		Publication: id.Publication{
			Owner:    id.Life{Node: id.Node(record.Node), Incarnation: id.Incarnation(record.Incarnation)},
			Sequence: id.Sequence(record.Sequence),
		},
		Request: id.Request(record.Request),
		Seal:    record.Seal,
	}
	if err := r.validate(); err != nil {
		return r, nil, err
	}
	if n := len(record.MAC); n != 0 && n != macBytes {
		return r, nil, fmt.Errorf("MAC with %d bytes: %w", n, ErrReference)
	}
	// The same reference is always the same text, so that routers may compare it.
	if again, err := r.text(record.MAC); err != nil || again != s {
		return r, nil, fmt.Errorf("not written as it should be: %w", errors.Join(ErrReference, err))
	}
	return r, record.MAC, nil
}

func (r Reference) validate() error {
	if err := errors.Join(r.Publication.Owner.Node.Validate(), r.Request.Validate()); err != nil {
		return fmt.Errorf("%w: %w", ErrReference, err)
	}
	if r.Publication.Owner.Incarnation == 0 || r.Publication.Sequence == 0 {
		return fmt.Errorf("%s names nothing: %w", r.Publication, ErrReference)
	}
	return nil
}

func (r Reference) text(mac []byte) (string, error) {
	b, err := pack(&referenceRecord{
		Node: string(r.Publication.Owner.Node), Incarnation: uint64(r.Publication.Owner.Incarnation),
		Sequence: uint64(r.Publication.Sequence), Request: string(r.Request), Seal: r.Seal, MAC: mac,
	})
	if err != nil {
		return "", err
	}
	return referencePrefix + base64.RawURLEncoding.EncodeToString(b), nil
}

// mac is HMAC-SHA-256 of the msgpack of everything before it, cut to 128 bits.
func (r Reference) mac(key []byte) ([]byte, error) {
	b, err := pack(&signedRecord{
		Node: string(r.Publication.Owner.Node), Incarnation: uint64(r.Publication.Owner.Incarnation),
		Sequence: uint64(r.Publication.Sequence), Request: string(r.Request), Seal: r.Seal,
	})
	if err != nil {
		return nil, err
	}
	derived, err := hkdf.Key(sha256.New, key, nil, referenceInfo, sha256.Size)
	if err != nil {
		return nil, fmt.Errorf("derive reference key: %w", err)
	}
	h := hmac.New(sha256.New, derived)
	h.Write(b)
	return h.Sum(nil)[:macBytes], nil
}
