package main

import (
	"bytes"
	"context"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
)

// admin is a node that says what a test wants it to say.
type admin struct {
	kvferrypb.UnimplementedAdminServer
	drain   func(kvferrypb.Admin_DrainServer) error
	keyring func(*kvferrypb.KeyringRequest) (*kvferrypb.KeyringResponse, error)
}

func (a admin) Status(context.Context, *kvferrypb.StatusRequest) (*kvferrypb.StatusResponse, error) {
	return &kvferrypb.StatusResponse{Node: "a"}, nil
}

func (a admin) Drain(_ *kvferrypb.DrainRequest, s kvferrypb.Admin_DrainServer) error {
	return a.drain(s)
}

func (a admin) Keyring(_ context.Context, req *kvferrypb.KeyringRequest) (*kvferrypb.KeyringResponse, error) {
	return a.keyring(req)
}

// serveAdmin serves it until the test ends and returns the socket.
func serveAdmin(t *testing.T, a admin) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	kvferrypb.RegisterAdminServer(s, a)
	var work sync.WaitGroup
	work.Go(func() { _ = s.Serve(l) })
	t.Cleanup(func() {
		s.Stop()
		work.Wait()
	})
	return path
}

func dialAdmin(t *testing.T, a admin) *client.Client {
	t.Helper()
	c, err := client.Dial(serveAdmin(t, a))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestDrainShowsEveryChangeAndTheEnd(t *testing.T) {
	said := []*kvferrypb.DrainResponse{
		{Publications: 2, Leases: 1, Remaining: durationpb.New(3 * time.Second)},
		{Publications: 2, Leases: 1, Remaining: durationpb.New(2 * time.Second)},
		{Publications: 1, Retrievals: 3, Remaining: durationpb.New(1500 * time.Millisecond)},
		{Left: true},
	}
	socket := serveAdmin(t, admin{drain: func(s kvferrypb.Admin_DrainServer) error {
		for _, m := range said {
			if err := s.Send(m); err != nil {
				return err
			}
		}
		return nil
	}})
	var out, errs bytes.Buffer
	code := run([]string{"--socket", socket, "drain"}, &out, &errs)
	const progress = "draining: 2 publications, 1 lease, 0 retrievals, 3s left\n" +
		"draining: 1 publication, 0 leases, 3 retrievals, 1.5s left\n"
	if code != exitDone || out.String() != "a has left the cluster\n" || errs.String() != progress {
		t.Errorf("exit code %d\n%s%s", code, &out, &errs)
	}
	out.Reset()
	if code := run([]string{"--socket", socket, "drain", "-o", "json"}, &out, &errs); code != exitDone || !strings.Contains(out.String(), `"left": true`) {
		t.Errorf("exit code %d\n%s", code, &out)
	}

	var screen bytes.Buffer
	p := drainProgress{out: &screen, terminal: true}
	for _, m := range said[:3] {
		p.show(m)
	}
	p.end()
	if got := screen.String(); strings.Contains(got, "\n") || strings.Count(got, "\r\x1b[K") != 4 || !strings.HasSuffix(got, "\r\x1b[K") {
		t.Errorf("a terminal gets %q", got)
	}
}

func TestADrainGoesOnWithoutTheCommand(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	c := dialAdmin(t, admin{drain: func(s kvferrypb.Admin_DrainServer) error {
		err := s.Send(&kvferrypb.DrainResponse{Publications: 1})
		interrupt()
		<-s.Context().Done()
		return err
	}})
	var progress bytes.Buffer
	if _, err := drain(ctx, c, time.Minute, time.Minute, &progress); !errors.Is(err, errDrainGoesOn) {
		t.Errorf("got %v", err)
	}
}

func TestDrainOfANodeThatSaysNoMore(t *testing.T) {
	for name, tt := range map[string]struct {
		drain    func(kvferrypb.Admin_DrainServer) error
		patience time.Duration
		want     string
	}{
		"silent": {func(s kvferrypb.Admin_DrainServer) error {
			<-s.Context().Done()
			return nil
		}, 50 * time.Millisecond, "no word from it for 50ms"},
		"ended": {func(kvferrypb.Admin_DrainServer) error { return nil }, time.Minute, "ended before it had left"},
	} {
		t.Run(name, func(t *testing.T) {
			c := dialAdmin(t, admin{drain: tt.drain})
			_, err := drain(t.Context(), c, 0, tt.patience, &bytes.Buffer{})
			if !errors.Is(err, client.ErrUnreachable) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v", err)
			}
		})
	}
}
