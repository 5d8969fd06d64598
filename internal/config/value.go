package config

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Size is a number of bytes. As text it is a whole number and a unit, such as
// 2GiB or 10MB; without a unit it is bytes.
type Size int64

type unit struct {
	name  string
	bytes int64
}

// units by falling size, so that the first one that fits is the one to print.
func units() []unit {
	return []unit{
		{"TiB", 1 << 40},
		{"TB", 1e12},
		{"GiB", 1 << 30},
		{"GB", 1e9},
		{"MiB", 1 << 20},
		{"MB", 1e6},
		{"KiB", 1 << 10},
		{"KB", 1e3},
		{"B", 1},
	}
}

// UnmarshalText reads what MarshalText writes.
func (s *Size) UnmarshalText(b []byte) error {
	text := strings.TrimSpace(string(b))
	digits := strings.TrimRight(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz ")
	unit := strings.TrimSpace(text[len(digits):])
	n, err := strconv.ParseInt(digits, 10, 64)
	switch {
	case errors.Is(err, strconv.ErrRange):
		return errors.New("is larger than any memory")
	case err != nil || n < 0 || digits[0] == '+':
		return errors.New("is not a size; want a whole number and a unit, such as 2GiB or 512MiB")
	case unit == "":
		*s = Size(n)
		return nil
	}
	for _, u := range units() {
		if strings.EqualFold(unit, u.name) {
			if n > math.MaxInt64/u.bytes {
				return errors.New("is larger than any memory")
			}
			*s = Size(n * u.bytes)
			return nil
		}
	}
	return fmt.Errorf("has the unknown unit %q; want KiB, MiB, GiB, TiB, KB, MB, GB, or TB", unit)
}

// MarshalText writes the size in the largest unit that needs no fraction.
func (s Size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

func (s Size) String() string {
	for _, u := range units() {
		if s != 0 && int64(s)%u.bytes == 0 {
			return strconv.FormatInt(int64(s)/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

// Pages is how many pages an arena has: Count of them or, where that is 0, as
// many as Size holds.
type Pages struct {
	Count int
	Size  Size
}

// UnmarshalText reads a count (1024) or a size (2GiB).
func (p *Pages) UnmarshalText(b []byte) error {
	text := strings.TrimSpace(string(b))
	n, err := strconv.Atoi(text)
	if err == nil && n >= 0 && text[0] != '+' {
		*p = Pages{Count: n}
		return nil
	}
	var s Size
	if s.UnmarshalText(b) != nil || err == nil {
		return errors.New("is neither a number of pages, such as 1024, nor a size, such as 2GiB")
	}
	*p = Pages{Size: s}
	return nil
}

// MarshalText writes what UnmarshalText reads.
func (p Pages) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

func (p Pages) String() string {
	if p.Size != 0 {
		return p.Size.String()
	}
	return strconv.Itoa(p.Count)
}

// KeyBytes is the length of a [Key].
const KeyBytes = 32

// Key is a key of the gossip keyring, for AES-256. As text it is base64. It
// prints as "key", so that it does not end in a log.
type Key []byte

// UnmarshalText reads base64.
func (k *Key) UnmarshalText(b []byte) error {
	raw, err := base64.StdEncoding.DecodeString(string(b))
	_, notHex := hex.DecodeString(string(b))
	switch {
	case len(b) == 2*idBytes && notHex == nil:
		return errors.New("is the id of a key; want the key itself, 32 bytes in base64")
	case err != nil:
		return errors.New("key is not base64; make one with: head -c 32 /dev/urandom | base64")
	case len(raw) != KeyBytes:
		return fmt.Errorf("key has %d bytes, want %d; make one with: head -c 32 /dev/urandom | base64", len(raw), KeyBytes)
	}
	*k = raw
	return nil
}

// idBytes is how much of a hash names a key.
const idBytes = 8

// ID names the key without giving it away: the first 8 bytes, as hex digits, of
// the SHA-256 of "kvferry gossip key" and the key.
func (k Key) ID() string {
	sum := sha256.Sum256(append([]byte("kvferry gossip key"), k...))
	return hex.EncodeToString(sum[:idBytes])
}

// MarshalText writes base64: the key in the clear.
func (k Key) MarshalText() ([]byte, error) {
	return []byte(base64.StdEncoding.EncodeToString(k)), nil
}

// Format writes "key", whatever the verb.
func (Key) Format(f fmt.State, _ rune) { fmt.Fprint(f, "key") }
