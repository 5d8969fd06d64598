package rendezvous

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/transfer"
)

const (
	servedMark = "-"     // between the protocol's name and the rest, of a socket that is served
	boundMark  = ".new-" // of one that is about to be
	// unservedAge is from when on a socket that was never served is a leftover.
	unservedAge = time.Minute
	// randomNameBytes is what follows a prefix, of base 32: 130 bits.
	randomNameBytes = 26
)

// isSocketName reports whether a name is that of a socket of a protocol.
func isSocketName(name, protocol, mark string) bool {
	rest, ok := strings.CutPrefix(name, protocol+mark)
	return ok && len(rest) == randomNameBytes && strings.Trim(rest, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567") == ""
}

// directory is the rendezvous directory, as one protocol uses it. It is used by its descriptor, so that
// a long path does not matter to a unix socket, whose address has 108 bytes, and
// what was checked is what is used. Safe for concurrent use but for close.
type directory struct {
	path     string
	protocol string // its name
	file     *os.File
}

// openDirectory opens the directory, and makes it if it is missing. One in
// which others than our user could put something is refused.
func openDirectory(path, protocol string) (*directory, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("make the rendezvous directory; set transfer.rendezvous to a directory of this user, or to where this user may make one: %w: %w", transfer.ErrUnavailable, err)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("open the rendezvous directory; set transfer.rendezvous to a directory that this user may read: %w: %w", transfer.ErrUnavailable, err)
	}
	d := &directory{path: path, protocol: protocol, file: f}
	if err := d.check(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return d, nil
}

func (d *directory) check() error {
	info, err := d.file.Stat()
	if err != nil {
		return fmt.Errorf("rendezvous directory: %w", err)
	}
	if stat, ok := info.Sys().(*syscall.Stat_t); ok && int(stat.Uid) != os.Getuid() {
		return fmt.Errorf("rendezvous directory %s belongs to user %d, we are user %d; set transfer.rendezvous to a directory of this user: %w", d.path, stat.Uid, os.Getuid(), transfer.ErrUnavailable)
	}
	if mode := info.Mode().Perm(); mode&0o022 != 0 {
		return fmt.Errorf("rendezvous directory %s is writable by others (mode %#o); chmod it to 0700, or set transfer.rendezvous to another: %w", d.path, mode, transfer.ErrUnavailable)
	}
	// Without /proc of our own PID namespace there is no way to a socket in it.
	if _, err := os.Stat(d.at(".")); err != nil {
		return fmt.Errorf("rendezvous directory: /proc does not show this process; mount proc in its PID namespace: %w: %w", transfer.ErrUnavailable, err)
	}
	return nil
}

// at is a short path of a file in the directory.
func (d *directory) at(name string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", d.file.Fd(), name)
}

// address is the path as people write it.
func (d *directory) address(name string) string { return filepath.Join(d.path, name) }

// close may be called twice.
func (d *directory) close() error {
	if err := d.file.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// reopen looks for the directory by its path again. The descriptor keeps its
// number: who uses it meanwhile uses what was there, or what is there now.
func (d *directory) reopen() error {
	now, err := openDirectory(d.path, d.protocol)
	if err != nil {
		return err
	}
	err = unix.Dup3(int(now.file.Fd()), int(d.file.Fd()), unix.O_CLOEXEC)
	return errors.Join(err, now.close())
}

// newName draws the name of a socket that is served.
func (d *directory) newName() string {
	return d.protocol + servedMark + rand.Text()[:randomNameBytes]
}

// listen binds a socket. It gets its name only when it is served: so one that has
// such a name and is not served is a leftover.
func (d *directory) listen(name string) (*net.UnixListener, error) {
	bound := d.protocol + boundMark + strings.TrimPrefix(name, d.protocol+servedMark)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: d.at(bound), Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("bind a socket in the rendezvous directory %s; set transfer.rendezvous to a directory in which this user may make sockets: %w: %w", d.path, transfer.ErrUnavailable, err)
	}
	l.SetUnlinkOnClose(false) // it would look for the first name
	fd := int(d.file.Fd())
	if err := unix.Renameat(fd, bound, fd, name); err != nil {
		return nil, errors.Join(fmt.Errorf("name the socket in the rendezvous directory %s: %w", d.path, err), l.Close(), d.remove(bound))
	}
	return l, nil
}

// inode is one file, whatever its name.
type inode struct{ device, number uint64 }

// found is what stands under a name where the path of the directory leads now.
func (d *directory) found(name string) (inode, error) {
	var s unix.Stat_t
	if err := unix.Lstat(d.address(name), &s); err != nil {
		return inode{}, err
	}
	return inode{s.Dev, s.Ino}, nil
}

// remove deletes a file of the directory.
func (d *directory) remove(name string) error { return unix.Unlinkat(int(d.file.Fd()), name, 0) }

// sweep removes the sockets that processes left behind. It never waits, and
// touches nothing that does not have our names.
func (d *directory) sweep(log *slog.Logger) {
	list, err := os.ReadDir(d.at("."))
	if err != nil {
		log.Warn("look for old sockets", "path", d.path, "err", err)
		return
	}
	for _, entry := range list {
		name := entry.Name()
		if !d.abandoned(name, entry) {
			continue
		}
		if err := d.remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			log.Warn("remove an old socket", "path", d.address(name), "err", err)
			continue
		}
		log.Info("removed a socket that nobody serves", "path", d.address(name))
	}
}

// abandoned reports whether an entry is a socket of ours that nobody serves.
func (d *directory) abandoned(name string, entry fs.DirEntry) bool {
	if entry.Type() != fs.ModeSocket {
		return false
	}
	switch {
	case isSocketName(name, d.protocol, servedMark):
	case isSocketName(name, d.protocol, boundMark):
		// Its process may be between binding and serving it.
		if info, err := entry.Info(); err != nil || time.Since(info.ModTime()) < unservedAge {
			return false
		}
	default:
		return false
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer func() { _ = unix.Close(fd) }() // nothing was said
	return errors.Is(unix.Connect(fd, &unix.SockaddrUnix{Name: d.at(name)}), unix.ECONNREFUSED)
}
