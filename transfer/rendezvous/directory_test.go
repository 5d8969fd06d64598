package rendezvous

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
	base := closedDir(t)
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
	for name, tt := range tests {
		s, err := Listen(options(tt.path, ownerLife))
		if !errors.Is(err, transfer.ErrUnavailable) || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v, want ErrUnavailable and what to do", name, err)
		}
		if err == nil {
			_ = s.Close()
		}
	}
	if list := names(t, shared); len(list) != 0 {
		t.Errorf("%v in a directory that was refused", list)
	}
}

// The directory is made, closed to others, and may have a path that no unix
// socket could have.
func TestListenMakesTheDirectory(t *testing.T) {
	dir := filepath.Join(closedDir(t), strings.Repeat("d", 120), "of", "peers")
	owner, reader := newPair(t, dir)
	info, err := os.Stat(dir)
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the directory has mode %v, %v", info.Mode(), err)
	}
	if h := open(t, reader, peerOf(owner)); h.Address() != filepath.Join(dir, owner.socket) {
		t.Errorf("address %s", h.Address())
	}
	if err := owner.Close(); err != nil {
		t.Error(err)
	}
	if got := names(t, dir); !slices.Equal(got, []string{reader.socket}) {
		t.Errorf("after Close of one of two: %v", got)
	}
}

// Whoever removes a socket, its directory, or puts something in their place cuts
// nobody off for good: links stand, and new ones open within some looks.
func TestRemovedSocketComesBack(t *testing.T) {
	dir := filepath.Join(closedDir(t), "of", "peers")
	often := func(o Options) Options { o.lookEvery = 2 * time.Millisecond; return o }
	owner, reader := listen(t, often(options(dir, ownerLife))), listen(t, often(options(dir, readerLife)))
	first := open(t, reader, peerOf(owner))
	files := openFiles(t)
	path := owner.Address()
	remove := func(path string) func() error {
		return func() error { // also if a socket comes back meanwhile
			eventually(t, path+" cannot be removed", func() bool { return os.RemoveAll(path) == nil })
			return nil
		}
	}
	for name, harm := range map[string]func() error{
		"the socket":              func() error { return os.Remove(path) },
		"the directory":           remove(dir),
		"the directory and above": remove(filepath.Dir(dir)),
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
			err = unix.Bind(fd, &unix.SockaddrUnix{Name: owner.dir.at(owner.socket)})
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
			h, err := reader.Open(ctx, peerOf(owner), plain{})
			if err != nil {
				return false
			}
			h.Close()
			return true
		})
		eventually(t, name+": the socket is not there", func() bool {
			now, err := os.Lstat(path)
			return err == nil && now.Mode().Type() == os.ModeSocket && !os.SameFile(before, now)
		})
		if err := first.Reason(); err != nil {
			t.Errorf("%s: the link that stood: %v", name, err)
		}
	}
	_ = os.RemoveAll(dir + ".old")
	both := []string{owner.socket, reader.socket}
	slices.Sort(both)
	eventually(t, "the sockets are not both there", func() bool { return slices.Equal(names(t, dir), both) })
	eventually(t, "files are left open", func() bool { return openFiles(t) <= files })
	if err := errors.Join(owner.Close(), reader.Close()); err != nil {
		t.Error(err)
	}
	if left := names(t, dir); len(left) > 0 {
		t.Errorf("%v is left", left)
	}
}

// A directory that will not do any more is not used, and is when it was mended.
func TestRemovedSocketWaitsForItsDirectory(t *testing.T) {
	dir := filepath.Join(closedDir(t), "of")
	log := make(chan string, 64)
	o := options(dir, ownerLife)
	o.lookEvery, o.Logger = time.Millisecond, slog.New(slog.NewTextHandler(lines(log), nil))
	path := listen(t, o).Address()
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
	dir := closedDir(t)
	const served, bound = "test" + servedMark, "test" + boundMark
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
	dead := []string{left(name(served, "A")), left(name(bound, "B"))}
	if err := os.Chtimes(dead[1], old, old); err != nil {
		t.Fatal(err)
	}
	kept := []string{
		left(name(bound, "C")), // being started
		left(filepath.Join(dir, "node.sock")),
		left(name("other"+servedMark, "A")), // another transport's
		left(name(served, "D") + "x"),
		name(served, "E"), name(served, "F"), name(served, "G"), name(served, "H"),
	}
	target := filepath.Join(t.TempDir(), "target")
	for _, path := range []string{kept[4], target} {
		if err := os.WriteFile(path, []byte("theirs"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(target, kept[5]); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(dir, "node.sock"), kept[6]); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(kept[7], 0o700); err != nil {
		t.Fatal(err)
	}
	owner, reader := newPair(t, dir) // the second start leaves the first one's alone
	open(t, reader, peerOf(owner))
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
	dir := closedDir(t)
	d, err := openDirectory(dir, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	name := d.newName()
	l, err := d.listen(name)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	d.sweep(slog.New(slog.DiscardHandler))
	if got := names(t, dir); !slices.Equal(got, []string{name}) {
		t.Errorf("%v is in the directory, want %s", got, name)
	}
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: d.at(name), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}

func TestOpenSaysWhyThereIsNoPeer(t *testing.T) {
	owner, reader := newPair(t, closedDir(t))
	elsewhere := listen(t, options(closedDir(t), readerLife))
	own := peerOf(owner)
	other := func(change func(d *descriptor)) transfer.Peer {
		d, err := parseDescriptor(testProtocol, own.Descriptor)
		if err != nil {
			t.Fatal(err)
		}
		change(&d)
		p := own
		p.Descriptor = d.encode(testProtocol)
		return p
	}
	versioned, none := own, own
	versioned.Descriptor = append([]byte("2"), own.Descriptor[1:]...)
	none.Descriptor = nil
	for name, tt := range map[string]struct {
		from *Server
		peer transfer.Peer
		says string
	}{
		"another host":      {reader, other(func(d *descriptor) { d.host = strings.Repeat("0", 36) }), "another host"},
		"another directory": {elsewhere, own, "transfer.rendezvous"},
		"another version":   {reader, versioned, "version 2"},
		"no descriptor":     {reader, none, "no test"},
	} {
		_, err := tt.from.Open(short(t), tt.peer, plain{})
		if !errors.Is(err, transfer.ErrUnavailable) || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if s := reader.Stats(); s.Holds != 0 {
		t.Errorf("stats %+v", s)
	}
	// A process that has died leaves its socket: that is broken, not unavailable.
	dead := "test" + servedMark + strings.Repeat("Z", randomNameBytes)
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: owner.dir.at(dead), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	left.SetUnlinkOnClose(false)
	_ = left.Close()
	_, err = reader.Open(short(t), other(func(d *descriptor) { d.socket = dead }), plain{})
	if err == nil || errors.Is(err, transfer.ErrUnavailable) || !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a socket that nobody serves: %v", err)
	}
}

// Several transports of several nodes share a directory, and nobody meets whom it
// does not mean.
func TestTransportsShareADirectory(t *testing.T) {
	dir := closedDir(t)
	owner, reader := newPair(t, dir)
	another := Protocol{Name: "another", Magic: "ano", Version: 3}
	o, r := options(dir, ownerLife), options(dir, readerLife)
	o.Protocol, r.Protocol = another, another
	anotherOwner, anotherReader := listen(t, o), listen(t, r)
	open(t, reader, peerOf(owner))
	open(t, anotherReader, peerOf(anotherOwner))
	if list := names(t, dir); len(list) != 4 {
		t.Errorf("%v is in the directory, want four sockets", list)
	}
	if _, err := reader.Open(short(t), peerOf(anotherOwner), plain{}); err == nil {
		t.Error("a descriptor of another transport was taken")
	}
	if err := anotherOwner.Close(); err != nil {
		t.Error(err)
	}
	open(t, reader, peerOf(owner))
}
