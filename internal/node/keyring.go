package node

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/cluster"
	"github.com/kvferry/kvferry/internal/config"
)

// keyring keeps the gossip keys over the lives of the node; the zero value has none. They come from
// cluster.keyring; what members change while they run is kept in state_dir, and
// counts as long as cluster.keyring is the one that it was made from: whoever
// changes the configuration means what is there.
type keyring struct {
	path   string // "" keeps nothing
	origin string // names cluster.keyring
	first  cluster.Ring
	keys   atomic.Pointer[wire.Keys]
}

const (
	keyringTitle = "kvferry keyring 1"
	keyringMode  = 0o600
	maxKeyring   = 64 << 10 // bytes of the file
)

func (n *Node) openKeyring(context.Context) (err error) {
	n.keyring, err = openKeyring(n.config.Node.StateDir, n.config.Cluster.Keyring, n.log)
	if err == nil && n.identity != nil && len(n.keyring.first.Keys) == 0 {
		n.log.Warn("certificates do not protect gossip packets, which are plain: set cluster.keyring on all nodes")
	}
	return err
}

func openKeyring(dir string, configured []config.Key, log *slog.Logger) (*keyring, error) {
	ring := cluster.Ring{}
	hash := sha256.New()
	hash.Write([]byte(keyringTitle))
	for _, k := range configured {
		ring.Keys = append(ring.Keys, k)
		hash.Write(k)
	}
	k := &keyring{origin: hex.EncodeToString(hash.Sum(nil))}
	if dir != "" {
		k.path = filepath.Join(dir, "keyring")
		saved, origin, err := readRing(k.path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return nil, fmt.Errorf("read the keys that were kept: %w; remove %s if cluster.keyring is right: then that counts", err, k.path)
		case origin == k.origin && saved.Generation > ring.Generation:
			ring = saved
		}
		if err == nil {
			k.protect(log)
		}
	}
	k.first = ring
	k.use(ring)
	return k, nil
}

// protect keeps the file for this user alone. What was to be read before that
// may have been: that is for a person to judge.
func (k *keyring) protect(log *slog.Logger) {
	st, err := os.Stat(k.path)
	if err == nil && st.Mode().Perm() == keyringMode {
		return
	}
	if err == nil {
		err = os.Chmod(k.path, keyringMode)
	}
	log.Warn("the file of gossip keys had another mode than 0600: it is set", "path", k.path, "had", st.Mode().Perm(), "err", err)
}

// current are the keys of references: the first one signs, all are good.
func (k *keyring) current() wire.Keys {
	if keys := k.keys.Load(); keys != nil {
		return *keys
	}
	return nil
}

func (k *keyring) use(ring cluster.Ring) {
	keys := wire.Keys(ring.Keys)
	k.keys.Store(&keys)
}

// save keeps a ring that members have agreed on, and uses it.
func (k *keyring) save(ring cluster.Ring) error {
	if k.path != "" {
		if err := writeSynced(k.path, k.encode(ring)); err != nil { // with mode 0600
			return fmt.Errorf("keep the keys: %w", err)
		}
	}
	k.use(ring)
	return nil
}

// encode writes title, origin, generation, and the keys, a line each.
func (k *keyring) encode(ring cluster.Ring) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s\n%s\n%d\n", keyringTitle, k.origin, ring.Generation)
	for _, key := range ring.Keys {
		text, _ := config.Key(key).MarshalText() // never fails
		fmt.Fprintf(&b, "%s\n", text)
	}
	return b.Bytes()
}

func readRing(path string) (ring cluster.Ring, origin string, err error) {
	st, err := os.Stat(path)
	if err != nil {
		return ring, "", err
	}
	if !st.Mode().IsRegular() {
		return ring, "", errors.New("it is no file")
	}
	if st.Size() > maxKeyring {
		return ring, "", fmt.Errorf("%d bytes, want at most %d", st.Size(), maxKeyring)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return ring, "", err
	}
	return decodeRing(b)
}

// decodeRing shows nothing of what it reads: these are keys.
func decodeRing(b []byte) (ring cluster.Ring, origin string, err error) {
	text, whole := strings.CutSuffix(string(b), "\n")
	lines := strings.Split(text, "\n")
	if !whole || len(lines) < 4 || lines[0] != keyringTitle {
		return ring, "", fmt.Errorf("it is no %q", keyringTitle)
	}
	origin = lines[1]
	if sum, err := hex.DecodeString(origin); err != nil || len(sum) != sha256.Size {
		return ring, "", errors.New("line 2 does not name a configuration")
	}
	if ring.Generation, err = strconv.ParseUint(lines[2], 10, 64); err != nil || ring.Generation > cluster.MaxGeneration {
		return ring, "", fmt.Errorf("line 3 is no generation, up to %d", uint64(cluster.MaxGeneration))
	}
	if keys := len(lines) - 3; keys > cluster.MaxKeys {
		return ring, "", fmt.Errorf("%d keys, want at most %d", keys, cluster.MaxKeys)
	}
	for i, line := range lines[3:] {
		var key config.Key
		if err := key.UnmarshalText([]byte(line)); err != nil {
			return ring, "", fmt.Errorf("line %d: %w", i+4, err)
		}
		if slices.ContainsFunc(ring.Keys, func(other []byte) bool { return bytes.Equal(key, other) }) {
			return ring, "", fmt.Errorf("line %d holds a key that stands before", i+4)
		}
		ring.Keys = append(ring.Keys, key)
	}
	return ring, origin, nil
}
