package cluster

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"net/netip"
)

// Members speak of gossip keys in packets of their own, past memberlist, which
// encrypts under one key only: here two can talk that have any key in common.
// An envelope is
//
//	"KVFR", version 1, kind of the message, number of copies,
//	label with its length in front, copy...
//
// and a copy is a 12-byte nonce, the message, and a 16-byte tag, under
// AES-256-GCM with HKDF-SHA-256(gossip key, no salt, "kvferry keyring", 32);
// everything in front of the copies is authenticated with each. A question has
// a copy for each key of who asks, all of equal length, the answer one, for the
// key that opened the question. memberlist's own packets begin with 244, since
// all have a label.
const (
	envelopeMagic   = "KVFR"
	envelopeVersion = 1
	envelopeHeader  = len(envelopeMagic) + 4
	envelopeInfo    = "kvferry keyring"
)

// letter is an envelope that came in.
type letter struct {
	b    []byte
	from netip.AddrPort
}

// locks are what open the envelopes under a ring's keys, in the same order.
func locks(r Ring) []cipher.AEAD {
	all := make([]cipher.AEAD, len(r.Keys))
	for i, key := range r.Keys {
		sub, err := hkdf.Key(sha256.New, key, nil, envelopeInfo, KeyBytes)
		if err != nil {
			panic(err) // only of a length that SHA-256 cannot give
		}
		block, err := aes.NewCipher(sub)
		if err != nil {
			panic(err) // only of another length
		}
		if all[i], err = cipher.NewGCMWithRandomNonce(block); err != nil {
			panic(err) // only of another block size
		}
	}
	return all
}

// seal puts a message into an envelope, a copy for each lock.
func seal(label string, message []byte, locks ...cipher.AEAD) []byte {
	b := make([]byte, 0, maxPacket)
	b = append(b, envelopeMagic...)
	b = append(b, envelopeVersion, message[1], byte(len(locks)), byte(len(label)))
	b = append(b, label...)
	header := len(b)
	for _, l := range locks {
		b = l.Seal(b, nil, message, b[:header:header])
	}
	return b
}

// unseal opens an envelope with the first lock that fits, and says which it was;
// -1: it is not for us.
func unseal(label string, b []byte, locks []cipher.AEAD) (message, int) {
	header := envelopeHeader + len(label)
	if len(b) < header || len(b) > maxPacket || string(b[:len(envelopeMagic)]) != envelopeMagic ||
		b[4] != envelopeVersion || int(b[7]) != len(label) || string(b[envelopeHeader:header]) != label {
		return message{}, -1
	}
	kind, copies, rest := b[5], int(b[6]), b[header:]
	if copies == 0 || copies > MaxKeys || kind == kindRingAnswer && copies > 1 || len(rest)%copies != 0 {
		return message{}, -1
	}
	for size := len(rest) / copies; len(rest) > 0; rest = rest[size:] {
		for i, l := range locks {
			plain, err := l.Open(nil, nil, rest[:size], b[:header])
			if err != nil {
				continue // another's key
			}
			m, err := decodeMessage(plain)
			if err != nil || m.kind != kind || kind != kindRingAsk && kind != kindRingAnswer {
				return message{}, -1
			}
			return m, i
		}
	}
	return message{}, -1
}
