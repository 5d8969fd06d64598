package rendezvous

import (
	"context"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long a test waits for what must come.
const patience = time.Minute

var (
	ownerLife  = id.Life{Node: "owner", Incarnation: 0x1122334455667788}
	readerLife = id.Life{Node: "reader", Incarnation: 0x99}

	testProtocol = Protocol{Name: "test", Magic: "tst", Version: 3}
)

// stand is the owner's side of a protocol without files.
func stand(c *Conn) error {
	if err := c.Welcome([]byte("says")); err != nil {
		return err
	}
	if err := c.Settle(); err != nil {
		return err
	}
	return c.Stand()
}

// plain is the reader's side of it.
type plain struct {
	attach func(ctx context.Context, c *Conn) error // nil: only settles
	let    chan struct{}                            // closed by Release, if there is one
}

func (p plain) Attach(ctx context.Context, c *Conn) error {
	if p.attach != nil {
		return p.attach(ctx, c)
	}
	return c.Settle()
}

func (plain) Watch(c *Conn) error { return c.Stand() }

func (p plain) Release() {
	if p.let != nil {
		close(p.let)
	}
}

// options of a node of a life, with limits that none meets on a busy machine; a test
// adds to them.
func options(dir string, life id.Life) Options {
	return Options{Protocol: testProtocol, Dir: dir, Life: life, Serve: stand, Limits: transfertest.Calm(transfer.Limits{})}
}

func listen(t testing.TB, o Options) *Server {
	t.Helper()
	s, err := Listen(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// newPair is an owner and a reader that meet in dir.
func newPair(t testing.TB, dir string) (owner, reader *Server) {
	t.Helper()
	return listen(t, options(dir, ownerLife)), listen(t, options(dir, readerLife))
}

func peerOf(s *Server) transfer.Peer {
	return transfer.Peer{Life: s.o.Life, Descriptor: s.Descriptor()}
}

func open(t testing.TB, from *Server, peer transfer.Peer) *Hold {
	t.Helper()
	h, err := from.Open(short(t), peer, plain{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	return h
}

// short is a context that only a hang meets.
func short(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// closedDir is a directory that will do.
func closedDir(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	chmod(t, dir, 0o700)
	return dir
}

func chmod(t testing.TB, path string, mode os.FileMode) {
	t.Helper()
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

// names are those of the files in a directory.
func names(t testing.TB, dir string) (names []string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

func openFiles(t testing.TB) int { return len(names(t, "/proc/self/fd")) }

// eventually polls until done, and fails with what after patience.
func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !done(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: still not after %v", what, patience)
		}
	}
}
