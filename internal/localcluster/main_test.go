package localcluster

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
)

// TestMain lets the test's binary be the agent that Up starts, and a process
// without its first thread.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "headless" {
		headless()
		os.Exit(0)
	}
	if len(os.Args) == 4 && os.Args[1] == "agent" {
		if err := fakeAgent(os.Args[3]); err != nil {
			fmt.Fprintln(os.Stderr, "fake agent:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv("GORACE") == "" {
		// Else every process sleeps for a second before it ends.
		_ = os.Setenv("GORACE", "atexit_sleep_ms=50") // it cannot fail
	}
	os.Exit(m.Run())
}

// headless ends the first thread of this process, and returns when its standard
// input ends.
func headless() {
	for found := false; !found; {
		told := make(chan bool)
		go func() {
			runtime.LockOSThread() // the next one gets another thread
			first := unix.Gettid() == os.Getpid()
			told <- first
			if first {
				_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0)
			}
			select {}
		}()
		found = <-told
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// fakeAgent is a node as this package sees one: a ready line, the members by
// the admin service, and /readyz. It knows its neighbours from cluster.json.
// The model's name chooses its faults, "FAULT NODE".
func fakeAgent(file string) error {
	c, err := config.Load(file)
	if err != nil {
		return err
	}
	if s := c.Security; s.On() {
		if _, err := identity.Load(identity.Options{Node: id.Node(c.Node.Name), Certificate: s.Certificate, Key: s.Key, CA: s.CA, Peers: s.Peers}); err != nil {
			return err
		}
	}
	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer cancel()
	fmt.Fprintln(os.Stderr, "hello from", c.Node.Name)
	if fault, node, _ := strings.Cut(c.Arena.Model, " "); node == c.Node.Name {
		switch fault {
		case "die":
			return fmt.Errorf("%s has no wish to live", node)
		case "mute":
			<-stop.Done()
			return nil
		case "garbage":
			fmt.Println("good morning")
		case "stubborn":
			signal.Ignore(syscall.SIGTERM)
			stop = context.Background()
		}
	}
	_ = os.Remove(c.Node.Socket) // of a life that was killed
	engine, err := net.Listen("unix", c.Node.Socket)
	if err != nil {
		return err
	}
	defer os.Remove(c.Node.Socket)
	var listeners []net.Listener // gossip, peer, data, http
	for _, port := range []int{c.Ports.Gossip, c.Ports.Peer, c.Ports.Data, c.Ports.HTTP} {
		l, err := net.Listen("tcp", netip.AddrPortFrom(c.Node.Bind, uint16(port)).String())
		if err != nil {
			return err
		}
		defer l.Close()
		listeners = append(listeners, l)
	}
	a := &fakeAdmin{conf: c, incarnation: uint64(os.Getpid())}
	services := grpc.NewServer()
	defer services.Stop()
	kvferrypb.RegisterAdminServer(services, a)
	go func() { _ = services.Serve(engine) }()
	go func() {
		_ = http.Serve(listeners[3], http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/readyz" {
				http.NotFound(w, r)
			}
		}))
	}()
	address := func(i int) netip.AddrPort { return netip.MustParseAddrPort(listeners[i].Addr().String()) }
	line, err := json.Marshal(Ready{
		Node: c.Node.Name, Incarnation: a.incarnation, Engine: c.Node.Socket,
		Gossip: address(0), Peer: address(1), Data: address(2), HTTP: address(3),
	})
	if err != nil {
		return err
	}
	fmt.Printf("%s\n", line)
	<-stop.Done()
	return nil
}

type fakeAdmin struct {
	kvferrypb.UnimplementedAdminServer
	conf        *config.Config
	incarnation uint64
}

func (a *fakeAdmin) Members(context.Context, *kvferrypb.MembersRequest) (*kvferrypb.MembersResponse, error) {
	r, err := readRecord(filepath.Dir(filepath.Dir(a.conf.Node.Socket)))
	if err != nil {
		return nil, err
	}
	m := &kvferrypb.MembersResponse{}
	for _, n := range r.Nodes {
		m.Items = append(m.Items, &kvferrypb.Member{Node: n.Node, Incarnation: n.Incarnation})
	}
	return m, nil
}

func (a *fakeAdmin) Status(context.Context, *kvferrypb.StatusRequest) (*kvferrypb.StatusResponse, error) {
	return &kvferrypb.StatusResponse{Node: a.conf.Node.Name, Incarnation: a.incarnation, Ready: true}, nil
}
