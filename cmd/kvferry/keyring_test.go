package main

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
)

func TestFindKey(t *testing.T) {
	ids := []string{"0123456789abcdef", "0123ffff00000000"}
	for begin, want := range map[string]string{
		"01234":            "0123456789abcdef",
		"0123F":            "0123ffff00000000",
		"0123456789abcdef": "0123456789abcdef",
		"9999999999999999": "9999999999999999", // another node may still have it
	} {
		if got, err := findKey(ids, begin); err != nil || got != want {
			t.Errorf("findKey(%s) = %s, %v; want %s", begin, got, err, want)
		}
	}
	for begin, want := range map[string]string{
		"9999":              "none of the node's: 0123456789abcdef, ",
		"0123456789abcde0f": "none of",
		"0123":              "could be 0123456789abcdef or 0123ffff00000000: give more digits",
	} {
		if got, err := findKey(ids, begin); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("findKey(%s) = %q, %v; want an error with %q", begin, got, err, want)
		}
	}
	if _, err := findKey(nil, "0123"); err == nil || !strings.Contains(err.Error(), "no keyring") {
		t.Errorf("without a keyring: %v", err)
	}
}

const (
	testKey  = "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2U="
	shortKey = "c2VjcmV0c2VjcmV0c2VjcmV0"
)

func TestKeysAreReadAndNeverShown(t *testing.T) {
	want := config.Key("secretsecretsecretsecretsecretse")
	for arg, stdin := range map[string]string{testKey: "", "-": "\n  " + testKey + "\r\n"} {
		if got, err := readKey(arg, strings.NewReader(stdin)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("readKey(%q, %q): %d bytes, %v", arg, stdin, len(got), err)
		}
	}
	for _, bad := range []string{"", shortKey, testKey + testKey, testKey[1:], strings.Repeat("A", 1<<20), want.ID()} {
		if _, err := readKey("-", strings.NewReader(bad)); err == nil || bad != "" && strings.Contains(err.Error(), bad) {
			t.Errorf("readKey of %.80q: %v", bad, err)
		}
	}
	broken := errors.New("broken")
	if _, err := readKey("-", iotest.ErrReader(broken)); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}

	var seen [][]byte
	ring := &kvferrypb.KeyringResponse{}
	socket := serveAdmin(t, admin{keyring: func(req *kvferrypb.KeyringRequest) (*kvferrypb.KeyringResponse, error) {
		before := ring
		if req.GetOperation() == kvferrypb.KeyringRequest_ADD {
			seen = append(seen, req.GetKey())
			ring = &kvferrypb.KeyringResponse{Keys: []*kvferrypb.KeyringResponse_Key{{Id: want.ID(), Primary: true}}, Generation: 1}
			return ring, nil
		}
		return before, nil
	}})
	for _, text := range []string{"added key " + want.ID(), "key " + want.ID() + " was there before"} {
		var out, errs bytes.Buffer
		code := run([]string{"--socket", socket, "keyring", "add", testKey}, &out, &errs)
		if code != exitDone || !strings.Contains(out.String(), text) || strings.Contains(out.String()+errs.String(), testKey) {
			t.Errorf("exit code %d, want %q: %s%s", code, text, &out, &errs)
		}
	}
	if len(seen) != 2 || !bytes.Equal(seen[0], want) {
		t.Errorf("the node got %d keys", len(seen))
	}
	var out, errs bytes.Buffer
	if code := run([]string{"keyring", "add", shortKey}, &out, &errs); code != exitUsage || strings.Contains(errs.String(), shortKey) {
		t.Errorf("exit code %d: %s", code, &errs)
	}
}

func TestNewKeysDiffer(t *testing.T) {
	seen := map[string]bool{}
	for range 3 {
		var out, errs bytes.Buffer
		if code := run([]string{"keyring", "new"}, &out, &errs); code != exitDone {
			t.Fatalf("exit code %d: %s", code, &errs)
		}
		key, err := readKey("-", &out)
		if err != nil || len(key) != config.KeyBytes || seen[key.ID()] {
			t.Errorf("key %s of %d bytes: %v", key.ID(), len(key), err)
		}
		seen[key.ID()] = true
	}
}

func TestKeyringIsShownWithItsMembers(t *testing.T) {
	var out bytes.Buffer
	printKeyring(&out, &kvferrypb.KeyringResponse{
		Keys:       []*kvferrypb.KeyringResponse_Key{{Id: "aaaa", Primary: true}, {Id: "bbbb"}},
		Generation: 7,
		Members:    []*kvferrypb.KeyringResponse_Member{{Node: "b", Generation: 7, Same: true}, {Node: "c", Error: "no \x1b answer"}},
	})
	const want = `KEY   PRIMARY
aaaa  encrypts
bbbb  -
generation 7

MEMBER  GENERATION  SAME   ERROR
b                7  true   -
c                0  false  no \x1b answer
`
	if out.String() != want {
		t.Errorf("got\n%swant\n%s", &out, want)
	}
	out.Reset()
	printKeyring(&out, &kvferrypb.KeyringResponse{})
	if !strings.HasPrefix(out.String(), "no keys: gossip is plain") {
		t.Errorf("got\n%s", &out)
	}
}
