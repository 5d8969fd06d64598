package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/kvferry/kvferry/internal/id"
)

// incarnations chooses a number for each life of the node, larger than all
// before it, and keeps it in state_dir before anybody hears of it.
type incarnations struct {
	path    string // "" keeps nothing
	atLeast id.Incarnation
}

func openIncarnations(dir string) (*incarnations, error) {
	if dir == "" {
		return &incarnations{}, nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make node.state_dir: %w", err)
	}
	return &incarnations{path: filepath.Join(dir, "incarnation")}, nil
}

// next returns max(persisted+1, unix microseconds, atLeast), persisted.
func (s *incarnations) next(now time.Time) (id.Incarnation, error) {
	i := max(id.Incarnation(max(0, now.UnixMicro())), s.atLeast)
	if s.path == "" {
		return i, nil
	}
	b, err := os.ReadFile(s.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, fmt.Errorf("read the last incarnation: %w", err)
	}
	if err == nil {
		last, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
		if err != nil || last == 1<<64-1 {
			return 0, fmt.Errorf("read the last incarnation from %s: %q is not a number that can grow; remove the file if the clock is right", s.path, b)
		}
		i = max(i, id.Incarnation(last)+1)
	}
	if err := writeSynced(s.path, []byte(strconv.FormatUint(uint64(i), 10)+"\n")); err != nil {
		return 0, fmt.Errorf("keep the incarnation, for which node.state_dir needs room and must be writable: %w", err)
	}
	return i, nil
}

// writeSynced replaces a file so that after a crash it has the old or the new
// content.
func writeSynced(path string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // gone already if all went well
	_, err = f.Write(b)
	err = errors.Join(err, f.Sync(), f.Close())
	if err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	d, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
