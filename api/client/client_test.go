package client_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/page"
)

// agent answers one call with an error.
type agent struct {
	kvferrypb.UnimplementedAdminServer
	err error
}

func (a agent) Status(context.Context, *kvferrypb.StatusRequest) (*kvferrypb.StatusResponse, error) {
	return nil, a.err
}

// socketPath is short enough for a socket.
func socketPath(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kvc")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "s")
}

func serve(t *testing.T, err error) (path string, stop func()) {
	t.Helper()
	path = socketPath(t)
	l, lerr := net.Listen("unix", path)
	if lerr != nil {
		t.Fatal(lerr)
	}
	s := grpc.NewServer()
	kvferrypb.RegisterAdminServer(s, agent{err: err})
	go s.Serve(l)
	t.Cleanup(s.Stop)
	return path, s.Stop
}

// silent takes a call and does not answer it.
type silent struct {
	kvferrypb.UnimplementedAdminServer
}

func (silent) Status(ctx context.Context, _ *kvferrypb.StatusRequest) (*kvferrypb.StatusResponse, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func serveSilence(t *testing.T) (path string) {
	t.Helper()
	path = socketPath(t)
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	kvferrypb.RegisterAdminServer(s, silent{})
	go s.Serve(l)
	t.Cleanup(s.Stop)
	return path
}

func statusOf(t *testing.T, path string) error {
	t.Helper()
	c, err := client.Dial(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_, err = c.Admin().Status(t.Context(), &kvferrypb.StatusRequest{})
	return err
}

func TestErrorCarriesTheFailure(t *testing.T) {
	st, err := status.New(codes.Aborted, "text").WithDetails(&kvferrypb.Failure{
		Code: kvferrypb.Failure_OWNER_LOST, Message: "owner is gone", Peer: "p1", PeerIncarnation: 7, Remedy: "prefill again",
	})
	if err != nil {
		t.Fatal(err)
	}
	path, _ := serve(t, st.Err())
	err = statusOf(t, path)
	e, ok := errors.AsType[*client.Error](err)
	if !ok || client.CodeOf(err) != kvferrypb.Failure_OWNER_LOST || e.Failure.GetPeer() != "p1" || e.Code != codes.Aborted {
		t.Fatalf("error %#v, want the failure that was sent", err)
	}
	if want := "Status: owner is gone (prefill again)"; err.Error() != want {
		t.Errorf("error %q, want %q", err, want)
	}
	if errors.Is(err, client.ErrUnreachable) || status.Code(err) != codes.Aborted {
		t.Errorf("error %v: an agent answered, with ABORTED", err)
	}
}

func TestNobodyAnswers(t *testing.T) {
	t.Run("no socket", func(t *testing.T) {
		if _, err := client.Dial(socketPath(t)); !errors.Is(err, client.ErrUnreachable) {
			t.Errorf("Dial = %v, want ErrUnreachable", err)
		}
	})
	t.Run("a socket that nobody serves", func(t *testing.T) {
		path := socketPath(t)
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		l.Close()
		err = statusOf(t, path)
		if !errors.Is(err, client.ErrUnreachable) || !strings.Contains(err.Error(), path) {
			t.Errorf("Status = %v, want ErrUnreachable, and the path", err)
		}
	})
	t.Run("an agent that has ended", func(t *testing.T) {
		path, stop := serve(t, nil)
		c, err := client.Dial(path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		stop()
		if _, err := c.Admin().Status(t.Context(), &kvferrypb.StatusRequest{}); !errors.Is(err, client.ErrUnreachable) {
			t.Errorf("Status = %v, want ErrUnreachable", err)
		}
	})
	t.Run("an agent whose process is stopped", func(t *testing.T) {
		path := socketPath(t)
		l, err := net.Listen("unix", path) // the kernel takes the connection, nobody else
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		c, err := client.Dial(path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, statusErr := c.Admin().Status(ctx, &kvferrypb.StatusRequest{})
		_, openErr := c.Open(ctx, client.OpenOptions{})
		for _, err := range []error{statusErr, openErr} {
			if !errors.Is(err, client.ErrUnreachable) || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("error %v, want ErrUnreachable and the context's end", err)
			}
			if text := fmt.Sprint(err); !strings.Contains(text, path) || !strings.Contains(text, "stopped") {
				t.Errorf("error %v, want the path, and that the process may be stopped", err)
			}
		}
	})
	t.Run("no answer on a connection that stands", func(t *testing.T) {
		path := serveSilence(t)
		c, err := client.Dial(path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Admin().Members(t.Context(), &kvferrypb.MembersRequest{}); status.Code(err) != codes.Unimplemented {
			t.Fatalf("Members = %v", err) // the connection stands
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err = c.Admin().Status(ctx, &kvferrypb.StatusRequest{})
		if errors.Is(err, client.ErrUnreachable) || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), path) {
			t.Errorf("Status = %v, want the context's end alone, and the path", err)
		}
	})
	t.Run("the caller gives up", func(t *testing.T) {
		path, _ := serve(t, nil)
		c, err := client.Dial(path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := c.Admin().Status(ctx, &kvferrypb.StatusRequest{}); !errors.Is(err, context.Canceled) {
			t.Errorf("Status = %v, want the context's end", err)
		}
	})
}

// engine takes sessions, whose Events streams it can break.
type engine struct {
	kvferrypb.UnimplementedEngineServer
	streams chan context.CancelCauseFunc // of each stream that stands
}

func (e *engine) Open(context.Context, *kvferrypb.OpenRequest) (*kvferrypb.OpenResponse, error) {
	return &kvferrypb.OpenResponse{Session: "s", Node: "n", Incarnation: 1, Geometry: kvferrypb.FromGeometry(page.Geometry{
		Model: "m", WorldSize: 1,
		Layout: page.Layout{Order: page.NHD, DType: page.BF16, Layers: 1, Pages: 2, PageSize: 1, Heads: 1, HeadDim: 1},
	})}, nil
}

func (e *engine) Close(context.Context, *kvferrypb.CloseRequest) (*kvferrypb.CloseResponse, error) {
	return &kvferrypb.CloseResponse{}, nil
}

func (e *engine) Events(s grpc.BidiStreamingServer[kvferrypb.EventsRequest, kvferrypb.Event]) error {
	if err := s.Send(&kvferrypb.Event{Kind: kvferrypb.Event_OPENED}); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(s.Context())
	defer cancel(nil)
	e.streams <- cancel
	<-ctx.Done()
	return context.Cause(ctx)
}

// A session knows at once that its node's process has ended; while that lives,
// a stream that broke is taken up again.
func TestSessionIsLostWithItsNode(t *testing.T) {
	path := socketPath(t)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false) // a process that was killed leaves it
	e := &engine{streams: make(chan context.CancelCauseFunc, 10)}
	s := grpc.NewServer()
	kvferrypb.RegisterEngineServer(s, e)
	go s.Serve(l)
	defer s.Stop()
	c, err := client.Dial(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	session, err := c.Open(t.Context(), client.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	(<-e.streams)(status.Error(codes.Unavailable, "the stream breaks"))
	select {
	case <-e.streams: // again
	case <-session.Lost():
		t.Fatal("lost with the stream, the node lives")
	}
	s.Stop()
	select {
	case <-session.Lost():
	case <-time.After(4 * time.Second): // not after five of trying again
		t.Fatal("not lost, and the node is gone")
	}
	if err := session.Close(); err != nil {
		t.Errorf("Close of a lost session = %v", err)
	}
}
