package localcluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// lock is held by whoever changes a cluster's directory.
type lock struct{ file *os.File }

// lockDir makes the directory and locks it. The lock's file lies inside, so
// that removing the directory leaves nothing; therefore a lock that was
// obtained on a removed file counts for nothing and is taken again.
func lockDir(ctx context.Context, dir string) (*lock, error) {
	path := filepath.Join(dir, lockFile)
	var l *lock
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	err := WaitFor(ctx, 50*time.Millisecond, func() error {
		err := os.MkdirAll(dir, 0o700)
		if err != nil {
			// Unless another command removes the directory above just now,
			// waiting would not help.
			if !errors.Is(err, fs.ErrNotExist) {
				stop(errors.New("it cannot be made"))
			}
			return err
		}
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return err
		}
		if err := holds(f, path); err != nil {
			f.Close()
			return err
		}
		l = &lock{f}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("lock local cluster: %w", err)
	}
	return l, nil
}

// holds locks f and says whether path is still that file.
func holds(f *os.File, path string) error {
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return errors.New("another command holds it")
		}
		return err
	}
	mine, err := f.Stat()
	if err != nil {
		return err
	}
	there, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !os.SameFile(mine, there) {
		return errors.New("another command removed it")
	}
	return nil
}

// Close lets go. It may be called twice.
func (l *lock) Close() error {
	err := l.file.Close()
	if errors.Is(err, fs.ErrClosed) {
		return nil
	}
	return err
}
