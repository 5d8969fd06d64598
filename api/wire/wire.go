// Package wire is the gossip format of kvferry, version 1, and the request
// reference (docs/wire.md). Only this package imports the codec.
//
// A message is a magic byte, a version, a kind, and a body in msgpack, where
// every record is an array:
//
//	0x4B ver kind body
//
// [Decode] trusts nobody. It first walks the body once, without allocating,
// and compares it with the form that the kind has: types, counts, and bounds,
// to the last byte. Only then does the codec build values, so that what is
// allocated is in proportion to what was received. Page lists are the one
// exception, since a run of a million pages has a few bytes: the caller says
// how many pages a message may unfold to.
//
// A later minor version may add fields at the end of a record; they are
// skipped. Anything else that changes takes a new version.
package wire

import (
	"errors"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

var (
	ErrMessage   = errors.New("malformed message")
	ErrVersion   = errors.New("unknown version or kind")
	ErrReference = errors.New("malformed or forged reference")
)

// Bounds.
const (
	InlineBytes = 1000    // an announcement up to this carries its pages
	ItemBytes   = 1300    // a gossiped message is never longer
	MaxMissing  = 300     // sequences of a Nack
	MaxChecks   = 16384   // checkpoints of a push/pull state
	MaxPages    = 1 << 20 // pages of one message: what encoders keep to and decoders allow

	maxLists  = 256
	maxRefs   = id.MaxRanks * id.MaxLabels
	maxTokens = 1<<31 - 1
)

// Message is what [Decode] returns and [Append] takes: [Batches], [*Check],
// [*Nack], [*Bye], [*Beacon] or [*Echo].
type Message interface{ isMessage() }

func (Batches) isMessage() {}
func (*Check) isMessage()  {}
func (*Nack) isMessage()   {}
func (*Bye) isMessage()    {}
func (*Beacon) isMessage() {}
func (*Echo) isMessage()   {}

// Batches are what several owners' logs say.
type Batches []Batch

// Batch is what one owner's log says: what it announces and what has ended.
// Everything up to Floor has ended; Releases are ascending sequences above it.
// The announcements are to be applied before the releases.
type Batch struct {
	Owner         id.NodeHash
	Incarnation   id.Incarnation
	Floor         id.Sequence
	Announcements []Announcement
	Releases      []id.Sequence
}

// Announcement is one entry of an owner's log: a publication, new, grown, or in
// another state.
type Announcement struct {
	Sequence     id.Sequence // above the batch's floor
	Publication  id.Sequence // the first announcement of the same publication; above the floor, too
	Request      id.RequestHash
	Seal         uint32 // index of the seal word
	ContentEpoch uint32
	TTLMillis    uint32 // remaining hold; 0: none
	Final        bool
	Digest       uint64 // of refs and page lists; see [Digest]
	Pages        uint32 // of all lists together
	// Refs are the streams. None, which only an announcement without lists may
	// have: they are too many to be gossiped.
	Refs []Ref
	// Lists are the page lists that refs name; nil: digest only, look the
	// table up at the owner.
	Lists [][]page.Index
}

// Ref is one stream of an announcement. It offers the tokens [0, Prefix) and
// [Start, Tokens); its list has their pages in this order, and both begin with a
// page of their own.
type Ref struct {
	Label    id.Label
	RankMask uint64 // the ranks that have it, not 0; a (label, rank) has one stream
	List     int    // index in Lists, also if the lists do not travel along
	Prefix   int    // tokens kept in front of those released; less than Start, or 0
	Start    int    // the first token after those released; 0: none were
	Tokens   int    // length, all that was released included
	State    uint8  // 0 resident, 1 offloading, 2 on host; unless resident its list is empty
}

// Check is an owner's checkpoint: what its log holds, in a few bytes.
type Check struct {
	Owner       id.NodeHash
	Incarnation id.Incarnation
	Floor, Max  id.Sequence
	Hash        uint64 // XOR of [Mix] of the live sequences
	Live        uint32 // how many they are
	// Version orders the checkpoints of one life: it grows with every
	// announcement, every release, and every checkpoint that is sent.
	Version uint64
}

// Nack asks an owner for sequences that did not arrive.
type Nack struct {
	From        id.NodeHash // who asks
	Owner       id.NodeHash
	Incarnation id.Incarnation
	Missing     []id.Sequence // ascending, 1 to MaxMissing
	// Asker is the name behind From. It does not travel: the receiver fills it
	// in from its members.
	Asker id.Node
}

// Bye is a graceful end: this life has announced its last.
type Bye struct {
	Owner       id.NodeHash
	Incarnation id.Incarnation
	Max         id.Sequence
}

// Beacon travels the way of an announcement and says nothing. Some of the
// members that it reaches answer its owner with an [Echo], which so learns how
// far gossip gets and how long it takes, by its own clock.
type Beacon struct {
	Owner       id.NodeHash
	Incarnation id.Incarnation
	Number      uint64 // from 1, growing
	Modulus     uint32 // from 1: about one member in so many answers
}

// Asks says whether this member is to answer: if the hash of owner, number, and
// member, Mix(owner XOR Mix(number XOR Mix(member))), is a multiple of the
// modulus. So the owner knows whom to expect.
func (b *Beacon) Asks(member id.NodeHash) bool {
	return Mix(uint64(b.Owner)^Mix(b.Number^Mix(uint64(member))))%uint64(b.Modulus) == 0
}

// Echo answers a beacon, to its owner alone.
type Echo struct {
	From        id.NodeHash // who answers
	Owner       id.NodeHash
	Incarnation id.Incarnation
	Number      uint64
}

// Mix is the finaliser of splitmix64, with which [Check.Hash], [Digest] and
// [Beacon.Asks] are made.
func Mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

// Digest stands for refs and page lists where the lists do not travel, and
// detects that two tables differ; it is no defence against forgery. It chains
// h = Mix(h XOR word), from 0x6b76666572727931, over these 64-bit words: the
// number of refs; for each ref the bytes of its label (their number, then
// eight a word, little endian, padded with zeros), rank mask, list, prefix,
// start, tokens, state; the number of lists; for each list its length, then
// its pages, two a word, the first in the low half.
func Digest(refs []Ref, lists [][]page.Index) uint64 {
	d := digest(0x6b76666572727931)
	d.add(uint64(len(refs)))
	for i := range refs {
		r := &refs[i]
		d.text(string(r.Label))
		d.add(r.RankMask)
		d.add(uint64(r.List))
		d.add(uint64(r.Prefix))
		d.add(uint64(r.Start))
		d.add(uint64(r.Tokens))
		d.add(uint64(r.State))
	}
	d.add(uint64(len(lists)))
	for _, l := range lists {
		d.add(uint64(len(l)))
		for len(l) >= 2 {
			d.add(uint64(l[0]) | uint64(l[1])<<32)
			l = l[2:]
		}
		if len(l) == 1 {
			d.add(uint64(l[0]))
		}
	}
	return uint64(d)
}

type digest uint64

func (d *digest) add(word uint64) { *d = digest(Mix(uint64(*d) ^ word)) }

func (d *digest) text(s string) {
	d.add(uint64(len(s)))
	for len(s) > 0 {
		var word uint64
		n := min(8, len(s))
		for i := range n {
			word |= uint64(s[i]) << (8 * i)
		}
		d.add(word)
		s = s[n:]
	}
}

// pages is how many pages the lists have together.
func pages(lists [][]page.Index) (n int) {
	for _, l := range lists {
		n += len(l)
	}
	return n
}
