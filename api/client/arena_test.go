package client_test

import (
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/memory"
)

// hands is an engine service whose arenas lie in some memory, and are handed over
// as say does it.
type hands struct {
	engine

	memory string
	fds    *net.UnixListener
	bytes  uint64
}

func (h *hands) OpenArena(context.Context, *kvferrypb.OpenArenaRequest) (*kvferrypb.OpenArenaResponse, error) {
	return &kvferrypb.OpenArenaResponse{Token: make([]byte, 32), FdSocket: h.fds.Addr().String(), Bytes: h.bytes, Memory: h.memory}, nil
}

// handing opens a session at a node that hands one arena over.
func handing(t *testing.T, h *hands, say func(*net.UnixConn)) *client.Session {
	t.Helper()
	path := socketPath(t)
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	if h.fds, err = net.ListenUnix("unix", &net.UnixAddr{Name: path + ".fd", Net: "unix"}); err != nil {
		t.Fatal(err)
	}
	h.streams = make(chan context.CancelCauseFunc, 10)
	s := grpc.NewServer()
	kvferrypb.RegisterEngineServer(s, h)
	go s.Serve(l)
	over := make(chan struct{})
	go func() {
		defer close(over)
		c, err := h.fds.AcceptUnix()
		if err != nil {
			return
		}
		defer c.Close()
		if _, err := io.CopyN(io.Discard, c, 32); err == nil {
			say(c)
		}
	}()
	t.Cleanup(func() { h.fds.Close(); <-over; s.Stop() })
	c, err := client.Dial(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	session, err := c.Open(t.Context(), client.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { session.Close() })
	return session
}

// open counts the descriptors and mappings of this process that are of a file.
func open(t *testing.T, name string) (count int) {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		if to, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil && strings.Contains(to, name) {
			count++
		}
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return count + strings.Count(string(maps), name)
}

// TestWhatIsHandedOverIsChecked: a node that hands over something else than it has
// announced is told from one that does not, and nothing of it is kept.
func TestWhatIsHandedOverIsChecked(t *testing.T) {
	const name = "kvferry-handed"
	region, err := memory.NewPlain(name, 1<<16)
	if err != nil {
		t.Fatal(err)
	}
	defer region.Close()
	handle := func(of []byte) []byte {
		b, err := kvferrypb.HandleFrame(of)
		if err != nil {
			t.Error(err)
		}
		return b
	}
	chunks := cuda.Handle{Kind: cuda.Files, Bytes: 2, Chunks: []int64{1, 1}}.Append(nil)
	write := func(b []byte) func(*net.UnixConn) { return func(c *net.UnixConn) { _, _ = c.Write(b) } }
	file := func(c *net.UnixConn, b byte) { _ = memory.SendFile(c, []byte{b}, region.File()) }
	const host, device = "host", "cuda:GPU-0"
	for what, tt := range map[string]struct {
		memory, says string // says: "" if it is good
		say          func(*net.UnixConn)
	}{
		"host memory":              {host, "", func(c *net.UnixConn) { file(c, kvferrypb.HandedFile) }},
		"host memory, an old node": {"", "", func(c *net.UnixConn) { file(c, kvferrypb.HandedFile) }},
		"another byte":             {host, "of kind 9", func(c *net.UnixConn) { file(c, 9) }},
		"a handle's file":          {host, "memory of a device was handed over", func(c *net.UnixConn) { file(c, kvferrypb.HandedHandle) }},
		"no file":                  {host, "no descriptor", write([]byte{kvferrypb.HandedFile})},
		"nothing":                  {host, "EOF", func(*net.UnixConn) {}},
		"host for a device":        {device, "a file of host memory was handed over", func(c *net.UnixConn) { file(c, kvferrypb.HandedFile) }},
		"no handle":                {device, "EOF", func(*net.UnixConn) {}},
		"half a handle":            {device, "unexpected EOF", write(handle(chunks)[:20])},
		"a long handle":            {device, "at most", write([]byte{kvferrypb.HandedHandle, 0, 0, 0, 0xff})},
		"no handle of cuda":        {device, "handle of an arena", write(handle([]byte("x")))},
		"too few files": {device, "EOF", func(c *net.UnixConn) {
			write(handle(chunks))(c)
			file(c, kvferrypb.HandedHandle)
		}},
		"a file that is none of the handle's": {device, "a file of host memory was handed over", func(c *net.UnixConn) {
			write(handle(chunks))(c)
			file(c, kvferrypb.HandedHandle)
			file(c, kvferrypb.HandedFile)
		}},
	} {
		t.Run(what, func(t *testing.T) {
			before := open(t, name)
			s := handing(t, &hands{memory: tt.memory, bytes: 1 << 16}, tt.say)
			a, err := s.AnyArena(t.Context(), 0, new(cuda.Runtime)) // which is never asked
			switch {
			case tt.says == "" && err != nil:
				t.Error(err)
			case tt.says == "":
				if err := a.Close(); err != nil {
					t.Error(err)
				}
			case err == nil || !strings.Contains(err.Error(), tt.says):
				t.Errorf("AnyArena = %v, %v, want %q", a, err, tt.says)
			}
			if n := open(t, name); n != before {
				t.Errorf("%d descriptors and mappings of it are there, %d were before", n, before)
			}
		})
	}
}
