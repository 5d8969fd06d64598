package shm

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/transfer"
)

func TestListenRefusesADirectory(t *testing.T) {
	base := rendezvous(t)
	file := filepath.Join(base, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	shared, group, foreign := filepath.Join(base, "shared"), filepath.Join(base, "group"), filepath.Join(base, "foreign")
	for path, mode := range map[string]os.FileMode{shared: 0o777 | os.ModeSticky, group: 0o770, foreign: 0o700} {
		if err := os.Mkdir(path, 0o700); err != nil {
			t.Fatal(err)
		}
		chmod(t, path, mode)
	}
	tests := map[string]struct{ path, says string }{
		"writable by all":       {shared, "chmod"},
		"writable by the group": {group, "chmod"},
		"a file":                {file, "not a directory"},
		"a file, what to do":    {file, "set transfer.rendezvous"},
		"below a file":          {filepath.Join(file, "below"), "transfer.rendezvous"},
	}
	if err := os.Chown(foreign, 4242, 4242); err == nil {
		tests["another user's"] = struct{ path, says string }{foreign, "4242"}
	} else {
		t.Logf("a directory of another user is not tested: %v", err)
	}
	if os.Getuid() == 0 {
		tests["where no socket can be"] = struct{ path, says string }{"/proc/1", "set transfer.rendezvous"}
	}
	n := newNode(t, ownerLife, 4096)
	for name, tt := range tests {
		tr, err := Listen(Options{Local: n.local, Dir: tt.path})
		if !errors.Is(err, transfer.ErrUnavailable) || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v, want ErrUnavailable and what to do", name, err)
		}
		if err == nil {
			_ = tr.Close()
		}
	}
	if list := sockets(t, shared); len(list) != 0 {
		t.Errorf("%v in a directory that was refused", list)
	}
}

// The directory is made, closed to others, and may have a path that no unix
// socket could have.
func TestListenMakesTheDirectory(t *testing.T) {
	dir := filepath.Join(rendezvous(t), strings.Repeat("d", 120), "of", "peers")
	owner, reader := newPair(t, 4096, Options{Dir: dir})
	info, err := os.Stat(dir)
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the directory has mode %v, %v", info.Mode(), err)
	}
	l := open(t, reader, owner.peer())
	if l.address != filepath.Join(dir, owner.t.server.socket) {
		t.Errorf("address %s", l.address)
	}
	if err := l.Read(short(t), []transfer.Seal{owner.hold(1, 1)}, []transfer.Copy{{Bytes: 4096}}); err != nil {
		t.Error(err)
	}
	if err := owner.t.Close(); err != nil {
		t.Error(err)
	}
	if got := sockets(t, dir); !slices.Equal(got, []string{reader.t.server.socket}) {
		t.Errorf("after Close of one of two: %v", got)
	}
}

// Whoever removes a socket, its directory, or puts something in their place cuts
// nobody off for good: links stand, and new ones open within some looks.
func TestRemovedSocketComesBack(t *testing.T) {
	dir := filepath.Join(rendezvous(t), "of", "peers")
	owner, reader := newPair(t, 4096, Options{Dir: dir, lookEvery: 2 * time.Millisecond})
	seal := owner.hold(1, 1)
	first := open(t, reader, owner.peer())
	files := openFiles(t)
	path := owner.t.dir.address(owner.t.server.socket)
	read := func(l transfer.Link) error {
		return l.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: 4096}})
	}
	for name, harm := range map[string]func() error{
		"the socket":              func() error { return os.Remove(path) },
		"the directory":           func() error { return os.RemoveAll(dir) },
		"the directory and above": func() error { return os.RemoveAll(filepath.Dir(dir)) },
		"the directory is moved":  func() error { return os.Rename(dir, dir+".old") },
		"a file in its place": func() error {
			return errors.Join(os.WriteFile(path+".new", nil, 0o600), os.Rename(path+".new", path))
		},
		"a mute listener in its place": func() error {
			if err := os.Remove(path); err != nil {
				return err
			}
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			t.Cleanup(func() { _ = unix.Close(fd) })
			files++
			err = unix.Bind(fd, &unix.SockaddrUnix{Name: owner.t.dir.at(owner.t.server.socket)})
			if errors.Is(err, unix.EADDRINUSE) { // it is back already
				return nil
			}
			return errors.Join(err, unix.Listen(fd, 1))
		},
	} {
		before, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := harm(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		eventually(t, name+": no link can be opened", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			l, err := reader.t.Open(ctx, owner.peer())
			if err != nil {
				return false
			}
			err = errors.Join(read(l), l.Close())
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			return true
		})
		eventually(t, name+": the socket is not there", func() bool {
			now, err := os.Lstat(path)
			return err == nil && now.Mode().Type() == os.ModeSocket && !os.SameFile(before, now)
		})
		if err := read(first); err != nil {
			t.Errorf("%s: the link that stood: %v", name, err)
		}
	}
	_ = os.RemoveAll(dir + ".old")
	both := []string{owner.t.server.socket, reader.t.server.socket}
	slices.Sort(both)
	eventually(t, "the sockets are not both there", func() bool { return slices.Equal(sockets(t, dir), both) })
	eventually(t, "files are left open", func() bool { return openFiles(t) <= files })
	if err := errors.Join(owner.t.Close(), reader.t.Close()); err != nil {
		t.Error(err)
	}
	if left := sockets(t, dir); len(left) > 0 {
		t.Errorf("%v is left", left)
	}
}

// A directory that will not do any more is not used, and is when it was mended.
func TestRemovedSocketWaitsForItsDirectory(t *testing.T) {
	dir := filepath.Join(rendezvous(t), "of")
	log := make(chan string, 64)
	owner := newNode(t, ownerLife, 4096)
	owner.listen(t, Options{Dir: dir, lookEvery: time.Millisecond, Logger: slog.New(slog.NewTextHandler(lines(log), nil))})
	path := owner.t.dir.address(owner.t.server.socket)
	chmod(t, dir, 0o777)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if line := <-log; !strings.Contains(line, "level=WARN") || !strings.Contains(line, "chmod") || !strings.Contains(line, path) {
		t.Errorf("the log says %q, want what to do", line)
	}
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("a directory that is open to all is used: %v", err)
	}
	chmod(t, dir, 0o700)
	eventually(t, "the socket is not there", func() bool { _, err := os.Lstat(path); return err == nil })
	if line := <-log; !strings.Contains(line, "there again") {
		t.Errorf("the log says %q, and once what is wrong", line)
	}
}

// lines takes what a logger writes.
type lines chan string

func (l lines) Write(b []byte) (int, error) {
	l <- string(b)
	return len(b), nil
}

// Only what has our name, is a socket, and is served by nobody is removed.
func TestStaleSocketsAreRemovedAndNothingElse(t *testing.T) {
	dir := rendezvous(t)
	name := func(prefix, letter string) string {
		return filepath.Join(dir, prefix+strings.Repeat(letter, randomNameBytes))
	}
	left := func(path string) string { // a socket that nobody serves
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		short, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		d := directory{path: dir, file: short}
		if err := unix.Bind(fd, &unix.SockaddrUnix{Name: d.at(filepath.Base(path))}); err != nil {
			t.Fatal(err)
		}
		_ = d.close()
		_ = unix.Close(fd)
		return path
	}
	old := time.Now().Add(-2 * unservedAge)
	dead := []string{left(name(servedPrefix, "A")), left(name(boundPrefix, "B"))}
	if err := os.Chtimes(dead[1], old, old); err != nil {
		t.Fatal(err)
	}
	kept := []string{
		left(name(boundPrefix, "C")), // being started
		left(filepath.Join(dir, "node.sock")),
		left(name(servedPrefix, "D") + "x"),
		name(servedPrefix, "E"), name(servedPrefix, "F"), name(servedPrefix, "G"), name(servedPrefix, "H"),
	}
	target := filepath.Join(t.TempDir(), "target")
	for _, path := range []string{kept[3], target} {
		if err := os.WriteFile(path, []byte("theirs"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(target, kept[4]); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(dir, "node.sock"), kept[5]); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(kept[6], 0o700); err != nil {
		t.Fatal(err)
	}
	owner, reader := newPair(t, 4096, Options{Dir: dir}) // the second start leaves the first one's alone
	open(t, reader, owner.peer())
	for _, path := range dead {
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("%s is still there: %v", path, err)
		}
	}
	for _, path := range append(kept, target) {
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("%s is gone: %v", path, err)
		}
	}
}

// A socket that is served is kept even if its process does not answer.
func TestMuteSocketIsKept(t *testing.T) {
	dir := rendezvous(t)
	d, err := openDirectory(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	name := newName()
	l, err := d.listen(name)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	d.sweep(slog.New(slog.DiscardHandler))
	if got := sockets(t, dir); !slices.Equal(got, []string{name}) {
		t.Errorf("%v is in the directory, want %s", got, name)
	}
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: d.at(name), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}

func TestOpenSaysWhyThereIsNoPeer(t *testing.T) {
	owner, reader := newPair(t, 4096, Options{})
	elsewhere := newNode(t, readerLife, 4096)
	elsewhere.listen(t, Options{Dir: rendezvous(t)})
	own := owner.peer()
	other := func(change func(d *descriptor)) transfer.Peer {
		d, err := parseDescriptor(own.Descriptor)
		if err != nil {
			t.Fatal(err)
		}
		change(&d)
		p := own
		p.Descriptor = d.encode()
		return p
	}
	versioned := own
	versioned.Descriptor = append([]byte("2"), own.Descriptor[1:]...)
	for name, tt := range map[string]struct {
		from *node
		peer transfer.Peer
		says string
	}{
		"another host":      {reader, other(func(d *descriptor) { d.host = strings.Repeat("0", 36) }), "another host"},
		"another directory": {elsewhere, own, "transfer.rendezvous"},
		"another version":   {reader, versioned, "version 2"},
	} {
		_, err := tt.from.t.Open(short(t), tt.peer)
		if !errors.Is(err, transfer.ErrUnavailable) || !strings.Contains(err.Error(), tt.says) || !strings.Contains(err.Error(), ownerLife.String()) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if s := reader.t.Stats(); s.Links != 0 {
		t.Errorf("stats %+v", s)
	}
	// A process that has died leaves its socket: that is broken, not unavailable.
	d := owner.t.dir
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: d.at(servedPrefix + strings.Repeat("Z", randomNameBytes)), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	left.SetUnlinkOnClose(false)
	_ = left.Close()
	_, err = reader.t.Open(short(t), other(func(d *descriptor) { d.socket = servedPrefix + strings.Repeat("Z", randomNameBytes) }))
	if err == nil || errors.Is(err, transfer.ErrUnavailable) || !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a socket that nobody serves: %v", err)
	}
}
