package shm

import (
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
		"below a file":          {filepath.Join(file, "below"), "transfer.rendezvous"},
	}
	if err := os.Chown(foreign, 4242, 4242); err == nil {
		tests["another user's"] = struct{ path, says string }{foreign, "4242"}
	} else {
		t.Logf("a directory of another user is not tested: %v", err)
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
	l, name, err := d.listen()
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
