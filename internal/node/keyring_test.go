package node

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/cluster"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
)

// keysOf are keys of one letter each.
func keysOf(letters string) (keys []config.Key) {
	for _, l := range letters {
		keys = append(keys, config.Key(strings.Repeat(string(l), config.KeyBytes)))
	}
	return keys
}

func ringOf(generation uint64, letters string) cluster.Ring {
	r := cluster.Ring{Generation: generation}
	for _, k := range keysOf(letters) {
		r.Keys = append(r.Keys, k)
	}
	return r
}

// TestKeyringIsKept: what members agreed on counts in the next life, until the
// operator says otherwise.
func TestKeyringIsKept(t *testing.T) {
	for name, tt := range map[string]struct {
		saved      string // while the configuration was "a"; "": nothing
		configured string
		want       cluster.Ring
	}{
		"nothing kept":          {"", "a", ringOf(0, "a")},
		"kept":                  {"ba", "a", ringOf(7, "ba")},
		"another configuration": {"ba", "c", ringOf(0, "c")},
		"the same in two":       {"ba", "ba", ringOf(0, "ba")},
		"plain now":             {"ba", "", ringOf(0, "")},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if tt.saved != "" {
				k, err := openKeyring(dir, keysOf("a"), slog.New(slog.DiscardHandler))
				if err == nil {
					err = k.save(ringOf(7, tt.saved))
				}
				if err != nil {
					t.Fatal(err)
				}
				if got := k.current(); !reflect.DeepEqual([][]byte(got), ringOf(7, tt.saved).Keys) {
					t.Errorf("references are signed with %v", got)
				}
			}
			k, err := openKeyring(dir, keysOf(tt.configured), slog.New(slog.DiscardHandler))
			if err != nil || !reflect.DeepEqual(k.first, tt.want) {
				t.Fatalf("%v, %v, want %v", k, err, tt.want)
			}
			if got := k.current(); !reflect.DeepEqual(got, wire.Keys(tt.want.Keys)) {
				t.Errorf("references are signed with %v", got)
			}
		})
	}
}

func TestKeyringFile(t *testing.T) {
	dir := t.TempDir()
	k, err := openKeyring(dir, keysOf("a"), slog.New(slog.DiscardHandler))
	if err == nil {
		err = k.save(ringOf(12, "ba"))
	}
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "keyring")
	st, err := os.Stat(path)
	if err != nil || st.Mode() != 0o600 {
		t.Errorf("%v, %v, want mode 0600", st.Mode(), err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	want := "kvferry keyring 1\n" +
		"0fe23cc92d7347412b3e555e3a7f30aa5fee2ad5c6b2feb6011ac5538684f342\n" +
		"12\n" +
		"YmJiYmJiYmJiYmJiYmJiYmJiYmJiYmJiYmJiYmJiYmI=\n" +
		"YWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWE=\n"
	if string(good) != want {
		t.Errorf("it holds\n%s\nwant\n%s", good, want)
	}
	// What cannot be read is not passed over: it might have been the newer ring.
	for name, bad := range map[string][]byte{
		"empty": nil, "cut": good[:len(good)-1], "another title": bytes.Replace(good, []byte("1\n"), []byte("2\n"), 1),
		"no generation": bytes.Replace(good, []byte("\n12\n"), []byte("\n-1\n"), 1),
		"out of range":  bytes.Replace(good, []byte("\n12\n"), fmt.Appendf(nil, "\n%d\n", uint64(cluster.MaxGeneration)+1), 1),
		"a key twice":   append(bytes.Clone(good), "YmJiYmJiYmJiYmJiYmJiYmJiYmJiYmJiYmJiYmJiYmI=\n"...),
		"too many keys": append(bytes.Clone(good), bytes.Repeat([]byte("YmJiYmJiYmJiYmJiYmJiYmJiYmJiYmJiYmJiYmJiYmI=\n"), cluster.MaxKeys)...),
		"no origin":     bytes.Replace(good, []byte("0fe2"), []byte("zzzz"), 1),
		"a bad key":     append(bytes.Clone(good), "hunter2\n"...),
		"no key":        good[:bytes.Index(good, []byte("YmJ"))],
		"endless":       append(bytes.Clone(good), bytes.Repeat([]byte("x"), maxKeyring)...),
	} {
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := openKeyring(dir, keysOf("a"), slog.New(slog.DiscardHandler))
		if err == nil || !strings.Contains(err.Error(), "remove "+path) {
			t.Errorf("%s: %v, want an error that names the file", name, err)
		} else if strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "YWFh") {
			t.Errorf("%s: %v gives a key away", name, err)
		}
	}
}

// TestKeyringIsPrivate: others could read the keys; that is ended, and told.
func TestKeyringIsPrivate(t *testing.T) {
	dir := t.TempDir()
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	k, err := openKeyring(dir, keysOf("a"), logger)
	if err == nil {
		err = k.save(ringOf(12, "ba"))
	}
	if err == nil {
		_, err = openKeyring(dir, keysOf("a"), logger)
	}
	if err != nil || log.Len() > 0 {
		t.Fatalf("%v, told %q", err, log.String())
	}
	path := filepath.Join(dir, "keyring")
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := openKeyring(dir, keysOf("a"), logger); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v, want mode 0600", st.Mode(), err)
	}
	if !strings.Contains(log.String(), "level=WARN") || !strings.Contains(log.String(), path) || !strings.Contains(log.String(), "rw-r--r--") {
		t.Errorf("told %q", log.String())
	}
}

// TestKeyringFits: what is taken from the file the cluster takes, too, and what
// it would not is refused where the file is read.
func TestKeyringFits(t *testing.T) {
	for generation, fits := range map[uint64]bool{cluster.MaxGeneration: true, cluster.MaxGeneration + 1: false} {
		c, err := cluster.Start(cluster.Options{
			Life: id.Life{Node: "n", Incarnation: 1}, Meta: cluster.Meta{Peer: netip.MustParseAddrPort("127.0.0.1:1")}, Label: "t",
			Bind: netip.MustParseAddrPort("127.0.0.1:0"), Ring: ringOf(generation, "ba"), Handler: deaf{},
		})
		if err == nil {
			_ = c.Close()
		}
		_, _, kept := decodeRing((&keyring{origin: strings.Repeat("0a", 32)}).encode(ringOf(generation, "ba")))
		if (err == nil) != fits || (kept == nil) != fits {
			t.Errorf("generation %d: the cluster says %v, the file %v", generation, err, kept)
		}
	}
}

// deaf is told nothing.
type deaf struct{ cluster.Handler }

// TestKeyringCannotBeKept: then it is not used either.
func TestKeyringCannotBeKept(t *testing.T) {
	k, err := openKeyring(filepath.Join(t.TempDir(), "nowhere"), keysOf("a"), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := k.save(ringOf(1, "ba")); err == nil {
		t.Error("it was kept nowhere")
	}
	if got := k.current(); len(got) != 1 {
		t.Errorf("%d keys are used", len(got))
	}
}

func FuzzDecodeRing(f *testing.F) {
	k := &keyring{origin: strings.Repeat("0a", 32)}
	f.Add(k.encode(ringOf(3, "abc")))
	f.Add([]byte("kvferry keyring 1\n\n\n\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		ring, origin, err := decodeRing(b)
		if err != nil {
			return
		}
		again, sameOrigin, err := decodeRing((&keyring{origin: origin}).encode(ring))
		if err != nil || origin != sameOrigin || !reflect.DeepEqual(ring, again) {
			t.Errorf("%v, %v of what was %v", again, err, ring)
		}
	})
}
