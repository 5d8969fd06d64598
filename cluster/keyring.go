package cluster

import (
	"bytes"
	"context"
	"crypto/cipher"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"

	"github.com/hashicorp/memberlist"

	"github.com/kvferry/kvferry/internal/id"
)

const (
	// KeyBytes is the length of a gossip key: AES-256.
	KeyBytes = 32
	// MaxKeys is how many a ring holds at most.
	MaxKeys = 8
	// MaxGeneration is the highest of a ring: it leaves room for changes whatever a
	// member claims.
	MaxGeneration = 1 << 48
	// maxLeap is how many changes a member may have missed: nobody is to use up
	// the generations.
	maxLeap = 1 << 20
	// maxQuestions bounds those that wait for answers.
	maxQuestions = 256
)

// KeyID names a gossip key without giving it away: the first 8 bytes of the
// SHA-256 of "kvferry gossip key" and the key.
type KeyID [8]byte

// IDOf is the id of a key.
func IDOf(key []byte) KeyID {
	sum := sha256.Sum256(append([]byte("kvferry gossip key"), key...))
	return KeyID(sum[:8])
}

// ParseKeyID reads what String writes.
func ParseKeyID(s string) (KeyID, error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(KeyID{}) {
		return KeyID{}, fmt.Errorf("key id %.80q: want %d hex digits", s, 2*len(KeyID{}))
	}
	return KeyID(b), nil
}

// String is 16 hex digits.
func (k KeyID) String() string { return hex.EncodeToString(k[:]) }

// Ring is the gossip keys at one time. It is a value: nobody changes the keys of
// one, every change makes the ring of the next generation, and members give each
// other the whole of it. It never prints a key.
type Ring struct {
	Generation uint64   // 0: from the configuration
	Keys       [][]byte // the first encrypts, all decrypt; none: gossip is plain
}

// IDs are the ids of the keys, in their order.
func (r Ring) IDs() []KeyID {
	ids := make([]KeyID, len(r.Keys))
	for i, key := range r.Keys {
		ids[i] = IDOf(key)
	}
	return ids
}

func (r Ring) String() string { return r.edition().String() }

// GoString is String: %#v would print the keys.
func (r Ring) GoString() string { return r.String() }

// LogValue is String.
func (r Ring) LogValue() slog.Value { return slog.StringValue(r.String()) }

func (r Ring) clone() Ring {
	c := Ring{Generation: r.Generation}
	for _, key := range r.Keys {
		c.Keys = append(c.Keys, bytes.Clone(key))
	}
	return c
}

// check refuses what cannot be a ring, or plain.
func (r Ring) check() error {
	if len(r.Keys) > MaxKeys {
		return fmt.Errorf("%d gossip keys, want at most %d", len(r.Keys), MaxKeys)
	}
	if r.Generation > MaxGeneration || r.Generation > 0 && len(r.Keys) == 0 {
		return fmt.Errorf("generation %d of %d gossip keys", r.Generation, len(r.Keys))
	}
	for i, key := range r.Keys {
		if len(key) != KeyBytes {
			return fmt.Errorf("gossip key %d has %d bytes, want %d", i, len(key), KeyBytes)
		}
		if slices.ContainsFunc(r.Keys[:i], func(other []byte) bool { return bytes.Equal(key, other) }) {
			return fmt.Errorf("gossip key %d, with the id %s, stands twice", i, IDOf(key))
		}
	}
	return nil
}

func (r Ring) edition() edition { return edition{r.Generation, r.IDs()} }

// edition tells two rings apart and which is the newer, without their keys.
type edition struct {
	generation uint64
	ids        []KeyID
}

func (e edition) same(o edition) bool {
	return e.generation == o.generation && slices.Equal(e.ids, o.ids)
}

// newer says that e takes the place of o. Of two changes that were made at the
// same time one is the newer for everybody. Rings from configurations never take
// each other's place: nobody meant them to.
func (e edition) newer(o edition) bool {
	if e.generation != o.generation {
		return e.generation > o.generation
	}
	return e.generation > 0 && slices.CompareFunc(e.ids, o.ids, func(a, b KeyID) int { return bytes.Compare(a[:], b[:]) }) > 0
}

func (e edition) String() string {
	if len(e.ids) == 0 {
		return "no gossip keys"
	}
	return fmt.Sprintf("generation %d: %s", e.generation, listKeys(e.ids))
}

func listKeys(ids []KeyID) string {
	text := make([]string, len(ids))
	for i, k := range ids {
		text[i] = k.String()
	}
	return strings.Join(text, ", ")
}

// keyring is the ring that is in use, here and in memberlist.
type keyring struct {
	label string
	save  func(Ring) error
	count *counters
	list  *memberlist.Keyring // nil: gossip is plain, for ever
	turn  chan struct{}       // a token: who holds it changes the ring, and may save it
	hint  chan struct{}       // one token: somebody may have another ring
	idle  uint64              // nonce of questions whose answers nobody waits for

	mu        sync.Mutex
	ring      Ring
	edition   edition       // of ring
	locks     []cipher.AEAD // of its keys, in their order
	trouble   string        // why a newer one was not taken; "" if the last one was
	questions map[uint64]*question
}

// question waits for answers. The keyring's mutex guards it.
type question struct {
	nonce   uint64
	news    chan struct{}      // one token: there is another answer
	answers map[id.Life]answer // the last of each
	seen    map[KeyID]struct{} // in any of them
}

// answer is what a member has said of its ring.
type answer struct {
	edition edition
	trouble string
}

func newKeyring(o Options, count *counters) *keyring {
	k := &keyring{
		label: o.Label, save: o.SaveRing, count: count,
		turn: make(chan struct{}, 1), hint: make(chan struct{}, 1), idle: rand.Uint64(), questions: map[uint64]*question{},
	}
	k.set(o.Ring.clone())
	if len(k.ring.Keys) > 0 {
		// check has looked at their lengths, all that could be wrong with them
		k.list, _ = memberlist.NewKeyring(k.ring.Keys, k.ring.Keys[0])
	}
	return k
}

// plain says that there are no keys, and never will be.
func (k *keyring) plain() bool { return k.list == nil }

func (k *keyring) set(r Ring) {
	k.ring, k.edition, k.locks = r, r.edition(), locks(r)
}

func (k *keyring) now() (Ring, edition) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.ring, k.edition
}

// open opens an envelope, and says with which key.
func (k *keyring) open(b []byte) (message, KeyID, bool) {
	k.mu.Lock()
	locks, ids := k.locks, k.edition.ids
	k.mu.Unlock()
	m, at := unseal(k.label, b, locks)
	if at < 0 {
		return message{}, KeyID{}, false
	}
	return m, ids[at], true
}

// replace makes next the ring in use if it is newer than what is. With a base it
// is wanted only in place of that one; the error wraps [ErrOvertaken] if there
// is another by now.
func (k *keyring) replace(ctx context.Context, next Ring, base *edition) (changed bool, err error) {
	select {
	case k.turn <- struct{}{}:
		defer func() { <-k.turn }()
	case <-ctx.Done():
		return false, context.Cause(ctx)
	}
	was, is := k.now()
	switch {
	case base != nil && !is.same(*base):
		return false, fmt.Errorf("%s is in use: %w", is, ErrOvertaken)
	case !next.edition().newer(is):
		return false, nil
	case next.Generation-is.generation > maxLeap:
		return false, fmt.Errorf("generation %d of the ring of gossip keys is too far from %d, which is in use", next.Generation, is.generation)
	}
	next = next.clone()
	if k.save != nil {
		if err := k.save(next.clone()); err != nil {
			k.count.keySaves.Add(1)
			k.mu.Lock()
			k.trouble = "cannot keep the ring: " + err.Error()
			k.mu.Unlock()
			return false, fmt.Errorf("keep the ring: %w", err)
		}
	}
	// Before anybody is told that we have it.
	install(k.list, next)
	if !bytes.Equal(was.Keys[0], next.Keys[0]) {
		k.count.keyPackets.Store(0)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.trouble = ""
	k.set(next)
	return true, nil
}

// install brings memberlist's keyring to a ring while memberlist reads from it.
// Its RemoveKey moves the keys behind the removed one in place, under the
// readers' eyes, so those are taken off first, from the end, and put back. None
// of them is the first, which encrypts.
func install(list *memberlist.Keyring, r Ring) {
	wanted := func(key []byte) bool {
		return slices.ContainsFunc(r.Keys, func(k []byte) bool { return bytes.Equal(k, key) })
	}
	add := func() {
		for _, key := range r.Keys {
			_ = list.AddKey(key) // its length was checked
		}
	}
	add()
	_ = list.UseKey(r.Keys[0]) // it is there
	has := list.GetKeys()
	gone := slices.IndexFunc(has, func(key []byte) bool { return !wanted(key) })
	if gone < 0 {
		return
	}
	for i := len(has) - 1; i >= gone; i-- {
		_ = list.RemoveKey(has[i]) // it is not the first
	}
	add()
}

// ask makes a question; nil if too many wait already.
func (k *keyring) ask() *question {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.questions) >= maxQuestions {
		return nil
	}
	q := &question{nonce: rand.Uint64(), news: make(chan struct{}, 1), answers: map[id.Life]answer{}, seen: map[KeyID]struct{}{}}
	k.questions[q.nonce] = q
	return q
}

func (k *keyring) forget(q *question) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.questions, q.nonce)
}

// envelope is a question, for whoever has one of our keys.
func (k *keyring) envelope(nonce uint64) []byte {
	k.mu.Lock()
	defer k.mu.Unlock()
	return seal(k.label, encodeRingAsk(nonce, k.edition), k.locks...)
}

// reply is the answer to a question that a key has opened, with our keys if they
// are news to who asks, and wanted; nil if the key has been removed meanwhile.
func (k *keyring) reply(self id.Life, question message, key KeyID, withKeys bool) []byte {
	k.mu.Lock()
	defer k.mu.Unlock()
	at := slices.Index(k.edition.ids, key)
	if at < 0 {
		return nil
	}
	var keys [][]byte
	if withKeys && k.edition.newer(question.edition) {
		keys = k.ring.Keys
	}
	return seal(k.label, encodeRingAnswer(question.nonce, self, k.edition, keys, k.trouble), k.locks[at])
}

// asked says whether a nonce is of one of our questions.
func (k *keyring) asked(nonce uint64) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return nonce == k.idle || k.questions[nonce] != nil
}

// heard notes an answer for who waits for it.
func (k *keyring) heard(m message) {
	k.mu.Lock()
	defer k.mu.Unlock()
	q := k.questions[m.nonce]
	if q == nil || len(q.answers) >= maxNodes {
		return
	}
	q.answers[m.life] = answer{m.edition, m.trouble}
	for _, key := range m.edition.ids {
		if len(q.seen) < maxNodes {
			q.seen[key] = struct{}{}
		}
	}
	poke(q.news)
}

// seen says whether any answer had the key.
func (k *keyring) seen(q *question, key KeyID) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	_, ok := q.seen[key]
	return ok
}

// said returns the answers so far.
func (k *keyring) said(q *question) map[id.Life]answer {
	k.mu.Lock()
	defer k.mu.Unlock()
	return maps.Clone(q.answers)
}
