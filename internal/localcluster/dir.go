package localcluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Files of a cluster's directory and of each node's below it.
const (
	lockFile   = "lock"
	recordFile = "cluster.json"
	configFile = "config.yaml"
	logFile    = "log"
	stateDir   = "state"

	rendezvousDir = "rendezvous" // of all nodes
)

// Root is the directory that holds the local clusters of this user:
// kvferry/local in $XDG_RUNTIME_DIR, else in /run where that may be written,
// else below the directory of temporary files.
func Root() (string, error) {
	if run := os.Getenv("XDG_RUNTIME_DIR"); run != "" {
		return filepath.Join(run, "kvferry", "local"), nil
	}
	if unix.Access("/run/kvferry", unix.W_OK) == nil || unix.Access("/run", unix.W_OK) == nil {
		return "/run/kvferry/local", nil
	}
	return sharedRoot()
}

// sharedRoot lies where everybody may write, so that the directory may be a
// trap of another user.
func sharedRoot() (string, error) {
	dir := filepath.Join(os.TempDir(), fmt.Sprintf("kvferry-%d", os.Getuid()))
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("make the directory of local clusters: %w (set XDG_RUNTIME_DIR)", err)
	}
	i, err := os.Lstat(dir)
	if err != nil {
		return "", fmt.Errorf("make the directory of local clusters: %w (set XDG_RUNTIME_DIR)", err)
	}
	if owner, ok := i.Sys().(*syscall.Stat_t); !ok || !i.IsDir() || int(owner.Uid) != os.Getuid() || i.Mode().Perm() != 0o700 {
		return "", fmt.Errorf("%s is not a directory of mode 0700 of this user's own: remove it, or set XDG_RUNTIME_DIR", dir)
	}
	return filepath.Join(dir, "local"), nil
}

// record is cluster.json.
type record struct {
	Name   string   `json:"name"`
	Binary string   `json:"binary"` // that the nodes run
	Env    []string `json:"env,omitempty"`
	Nodes  []Node   `json:"nodes"`
}

func readRecord(dir string) (record, error) {
	path := filepath.Join(dir, recordFile)
	raw, err := os.ReadFile(path)
	if err != nil {
		return record{}, err
	}
	var r record
	if err := json.Unmarshal(raw, &r); err != nil {
		return record{}, fmt.Errorf("read %s: %w (if none of its nodes runs, remove %s)", path, err, dir)
	}
	return r, nil
}

// write replaces cluster.json as a whole: whoever reads it sees the old one or the new one.
func (r record) write(dir string) error {
	raw, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("write %s: %w", recordFile, err)
	}
	next := filepath.Join(dir, recordFile+".next")
	if err := os.WriteFile(next, append(raw, '\n'), 0o600); err != nil {
		return fmt.Errorf("write %s: %w", recordFile, err)
	}
	if err := os.Rename(next, filepath.Join(dir, recordFile)); err != nil {
		return fmt.Errorf("write %s: %w", recordFile, err)
	}
	return nil
}

// removeDir removes a cluster's directory and those above that are empty then.
func removeDir(dir string) error {
	err := os.RemoveAll(dir)
	if err != nil {
		err = fmt.Errorf("remove local cluster: %w", err)
	}
	for _, name := range []string{"local", "kvferry"} {
		dir = filepath.Dir(dir)
		if !strings.HasPrefix(filepath.Base(dir), name) || os.Remove(dir) != nil {
			break // not one that Root named, or not empty
		}
	}
	return err
}
