package bench

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// scratch is a directory for files that last as long as what needs them. Its lock
// ends with this process, however that ends, and what is left then is removed by the
// next one that makes such a directory.
type scratch struct {
	path string
	dir  *os.File // locked
}

// scratchPrefix begins the name of each.
const scratchPrefix = "kvferry-bench"

// newScratch makes a directory, and removes those whose processes are gone.
func newScratch() (*scratch, error) {
	sweepScratch()
	for range 100 {
		path, err := os.MkdirTemp("", scratchPrefix)
		if err != nil {
			return nil, err
		}
		dir, err := lockScratch(path)
		switch {
		case err == nil:
			return &scratch{path, dir}, nil
		case errors.Is(err, unix.EWOULDBLOCK), errors.Is(err, fs.ErrNotExist):
			// Another process has found it without a lock, and removes it.
		default:
			return nil, errors.Join(err, os.Remove(path))
		}
	}
	return nil, fmt.Errorf("directory %s* is removed again and again", filepath.Join(os.TempDir(), scratchPrefix))
}

// lockScratch fails if the directory is gone, or is no one of this user.
func lockScratch(path string) (_ *os.File, err error) {
	dir, err := os.OpenFile(path, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = dir.Close() // the first error tells
		}
	}()
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	var have, there unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &have); err != nil {
		return nil, fmt.Errorf("stat %s: %w", path, err)
	}
	if err := unix.Lstat(path, &there); err != nil {
		return nil, fmt.Errorf("stat %s: %w", path, err)
	}
	if have.Dev != there.Dev || have.Ino != there.Ino || int(have.Uid) != os.Geteuid() {
		return nil, fmt.Errorf("directory %s is another one: %w", path, fs.ErrNotExist)
	}
	return dir, nil
}

// sweepScratch removes what it can.
func sweepScratch() {
	left, _ := filepath.Glob(filepath.Join(os.TempDir(), scratchPrefix+"*")) // of this pattern there is no error
	for _, path := range left {
		dir, err := lockScratch(path)
		if err != nil {
			continue // it is used, or not ours
		}
		_ = os.RemoveAll(path) // the next one tries again
		_ = dir.Close()
	}
}

// close removes the directory; s may be nil.
func (s *scratch) close() error {
	if s == nil {
		return nil
	}
	return errors.Join(os.RemoveAll(s.path), s.dir.Close())
}
