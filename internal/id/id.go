// Package id holds the identities that every other package speaks of: nodes
// and their lives, requests, labels, ranks, and what names a publication.
//
// It is the ground: it imports nothing of this module, and everything may
// import it. Identities are types, so that none can be taken for another.
package id

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Bounds of names, in bytes.
const (
	MaxNode    = 64 // of a group, too
	MaxRequest = 256
	MaxLabel   = 64
	MaxGraph   = 256 // of a graph node or a walk
)

// Bounds of one publication.
const (
	MaxRanks  = 64 // a rank mask is 64 bits wide
	MaxLabels = 255
)

// ErrInvalid is wrapped by every Validate error of this package.
var ErrInvalid = errors.New("invalid name")

// Node is the stable name of one machine's daemon, unique in a cluster.
type Node string

// Validate checks length and alphabet: letters, digits, '-', '_' and '.'.
func (n Node) Validate() error { return word("node", string(n)) }

func word(kind, name string) error {
	if name == "" || len(name) > MaxNode {
		return fmt.Errorf("%s name %.80q has %d bytes, want 1 to %d: %w", kind, name, len(name), MaxNode, ErrInvalid)
	}
	for _, c := range []byte(name) {
		if !strings.ContainsRune("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.", rune(c)) {
			return fmt.Errorf("%s name %q: byte %q is not a letter, digit, '-', '_' or '.': %w", kind, name, c, ErrInvalid)
		}
	}
	return nil
}

// Hash is what stands for the name on the wire: the first 64 bits of its
// SHA-256. Two names with one hash are refused when the second joins.
func (n Node) Hash() NodeHash {
	sum := sha256.Sum256([]byte(n))
	return NodeHash(binary.BigEndian.Uint64(sum[:8]))
}

// NodeHash is [Node.Hash].
type NodeHash uint64

// Group names the nodes over which the ranks of one engine are spread.
type Group string

// Validate checks what [Node.Validate] checks: a node's name is a group.
func (g Group) Validate() error { return word("group", string(g)) }

// Incarnation names one life of one node. It is larger than every earlier one
// of that node. Compare by equality to decide whether a read, a lease, or a
// link is valid, by order only to decide which life of one node is the newer;
// never compare the incarnations of two nodes.
type Incarnation uint64

// Life is one life of one node.
type Life struct {
	Node        Node
	Incarnation Incarnation
}

func (l Life) String() string { return fmt.Sprintf("%s.%d", l.Node, uint64(l.Incarnation)) }

// Sequence numbers the announcements of one owner's log, from 1. A publication
// is named by the sequence of its first announcement.
type Sequence uint64

// Publication names a publication in the whole cluster, for ever.
type Publication struct {
	Owner    Life
	Sequence Sequence
}

func (p Publication) String() string { return fmt.Sprintf("%s/%d", p.Owner, uint64(p.Sequence)) }

// Request is the name that engine or router gave to a request: 1 to
// [MaxRequest] bytes of UTF-8, unique among the live requests of a node.
type Request string

// Validate checks length and encoding, and that there are no control characters.
func (r Request) Validate() error { return text("request id", string(r), MaxRequest) }

func text(kind, s string, most int) error {
	if s == "" || len(s) > most || !utf8.ValidString(s) {
		return fmt.Errorf("%s %.80q has %d bytes, want 1 to %d of UTF-8: %w", kind, s, len(s), most, ErrInvalid)
	}
	// They would end up in logs and terminals.
	if at := strings.IndexFunc(s, unicode.IsControl); at >= 0 {
		return fmt.Errorf("%s %.80q has a control character at byte %d: %w", kind, s, at, ErrInvalid)
	}
	return nil
}

// Hash is what stands for the request in gossip: the first 128 bits of its
// SHA-256.
func (r Request) Hash() RequestHash {
	sum := sha256.Sum256([]byte(r))
	return RequestHash(sum[:16])
}

// RequestHash is [Request.Hash].
type RequestHash [16]byte

// Label names one independent cache stream of a request.
type Label string

// Main is the label that every ingested request has.
const Main Label = "main"

// Validate checks what [Request.Validate] checks.
func (l Label) Validate() error { return text("label", string(l), MaxLabel) }

// Rank is one GPU's share of a tensor-parallel engine, from 0.
type Rank int

// Validate checks 0 <= r < MaxRanks.
func (r Rank) Validate() error {
	if r < 0 || r >= MaxRanks {
		return fmt.Errorf("rank %d is not in 0..%d: %w", int(r), MaxRanks-1, ErrInvalid)
	}
	return nil
}

// GraphNode names a node of the model's graph: what M* calls node_name.
type GraphNode string

// Validate checks what [Request.Validate] checks; "" is none, and valid.
func (g GraphNode) Validate() error {
	if g == "" {
		return nil
	}
	return text("graph node", string(g), MaxGraph)
}

// Walk names a traversal of the model's graph, such as "prefill".
type Walk string

// Validate checks what [Request.Validate] checks; "" is none, and valid.
func (w Walk) Validate() error {
	if w == "" {
		return nil
	}
	return text("walk", string(w), MaxGraph)
}

// SealValue is what a seal word holds while the pages of the publication
// (incarnation, sequence) are held: mix64(incarnation) XOR sequence. It
// reports false for the one sequence that would give 0, which means "not
// held"; an owner skips that sequence.
func SealValue(i Incarnation, s Sequence) (value uint64, ok bool) {
	v := mix64(uint64(i)) ^ uint64(s)
	return v, v != 0
}

// mix64 is the finaliser of splitmix64.
func mix64(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
