package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

// Connections that a service holds at once; those beyond are closed.
const (
	maxPeerConns   = 2 * maxPeers
	maxEngineConns = 1024
	maxHTTPConns   = 256
)

const (
	connectTime = 5 * time.Second // for a caller to shake hands
	stopTime    = time.Second     // for calls to end when a service closes
)

// errPort is a taken port; the text names it and what to set.
func errPort(what, key string, bind netip.AddrPort, err error) error {
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%s port %d is taken on %s: stop who has it (ss -ltnp 'sport = :%d') or set %s: %w", what, bind.Port(), bind.Addr(), bind.Port(), key, err)
	}
	return fmt.Errorf("open the %s port %s: %w", what, bind, err)
}

func (n *Node) bind(port int) netip.AddrPort {
	return netip.AddrPortFrom(n.config.Node.Bind, uint16(port))
}

// advertised is the address that peers use for a port bound here.
func (n *Node) advertised(bound net.Addr) (netip.AddrPort, error) {
	a, err := netip.ParseAddrPort(bound.String())
	if err != nil {
		return a, err
	}
	ip := a.Addr().Unmap()
	if adv := n.config.Node.Advertise; adv.IsValid() {
		ip = adv
	}
	return netip.AddrPortFrom(ip, a.Port()), nil
}

// openPeerService opens the port that peers call.
func (n *Node) openPeerService(ctx context.Context) error {
	bind := n.bind(n.config.Ports.Peer)
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", bind.String())
	if err != nil {
		return errPort("peer", "ports.peer", bind, err)
	}
	if n.addresses.Peer, err = n.advertised(l.Addr()); err != nil {
		return errors.Join(err, l.Close())
	}
	s := grpc.NewServer(append(limits(), grpc.Creds(n.peerServerCredentials()),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}))...)
	kvferrypb.RegisterPeerServer(s, peerService{node: n})
	grpc_health_v1.RegisterHealthServer(s, healthService{node: n})
	n.serve(s, bounded(l, maxPeerConns))
	return nil
}

// openEngineService opens the sockets of engines and operators.
func (n *Node) openEngineService(ctx context.Context) error {
	path := n.config.Node.Socket
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("make the folder of node.socket: %w", err)
	}
	l, err := listenUnix(ctx, path)
	if err != nil {
		return err
	}
	h, err := n.openHandover(ctx, path+".fd")
	if err != nil {
		return errors.Join(err, l.Close())
	}
	n.handover = h
	n.closers = append(n.closers, h.close)
	n.addresses.Engine = path
	s := grpc.NewServer(limits()...)
	kvferrypb.RegisterEngineServer(s, engineService{node: n})
	kvferrypb.RegisterAdminServer(s, adminService{node: n})
	grpc_health_v1.RegisterHealthServer(s, healthService{node: n})
	n.serve(s, bounded(&userListener{UnixListener: l, node: n}, maxEngineConns))
	n.closers = append(n.closers, func() error {
		n.sessions.endAll("the node closes")
		return nil
	})
	return nil
}

// limits bound what one caller can make a service hold.
func limits() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(kvferrypb.MaxMessage), grpc.MaxSendMsgSize(kvferrypb.MaxMessage),
		grpc.MaxConcurrentStreams(4096), grpc.ConnectionTimeout(connectTime), grpc.MaxHeaderListSize(16 << 10),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
		grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			res, err := handle(ctx, req)
			return res, statusOf(err)
		}),
		grpc.StreamInterceptor(func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
			return statusOf(handle(srv, ss))
		}),
	}
}

// serve lets a gRPC server serve l from the end of the start on; the closer ends
// it and waits for its calls.
func (n *Node) serve(s *grpc.Server, l *boundedListener) {
	var work sync.WaitGroup
	n.begin = append(n.begin, func() {
		work.Go(func() {
			if err := s.Serve(l); err != nil {
				n.log.Error("service ended", "address", l.Addr().String(), "err", err)
			}
		})
	})
	n.closers = append(n.closers, func() error {
		stopped := time.AfterFunc(stopTime, func() { // calls that do not end by themselves
			l.cut() // gRPC waits for handshakes
			s.Stop()
		})
		s.GracefulStop()
		stopped.Stop()
		_ = l.Close() // it was never served, if the start failed
		work.Wait()
		return nil
	})
}

// bounded is l with at most so many connections at once.
func bounded(l net.Listener, most int) *boundedListener {
	return &boundedListener{Listener: l, most: most, open: make(map[*boundedConn]struct{})}
}

type boundedListener struct {
	net.Listener
	most int

	mu   sync.Mutex
	open map[*boundedConn]struct{}
	over bool // cut was called
}

func (l *boundedListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if b := l.admit(c); b != nil {
			return b, nil
		}
		_ = c.Close()
	}
}

// admit returns nil if there is no room.
func (l *boundedListener) admit(c net.Conn) *boundedConn {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over || len(l.open) >= l.most {
		return nil
	}
	b := &boundedConn{Conn: c, listener: l}
	l.open[b] = struct{}{}
	return b
}

// cut closes every connection.
func (l *boundedListener) cut() {
	l.mu.Lock()
	l.over = true
	open := slices.Collect(maps.Keys(l.open))
	l.mu.Unlock()
	for _, c := range open {
		_ = c.Close()
	}
}

type boundedConn struct {
	net.Conn
	listener *boundedListener
}

func (c *boundedConn) Close() error {
	defer func() {
		c.listener.mu.Lock()
		defer c.listener.mu.Unlock()
		delete(c.listener.open, c)
	}()
	return c.Conn.Close()
}

var errUnknownService = errors.New("unknown service")

// healthService answers what /readyz answers, for every service alike.
type healthService struct {
	grpc_health_v1.UnimplementedHealthServer
	node *Node
}

func (h healthService) state() grpc_health_v1.HealthCheckResponse_ServingStatus {
	if len(h.node.notReady()) > 0 {
		return grpc_health_v1.HealthCheckResponse_NOT_SERVING
	}
	return grpc_health_v1.HealthCheckResponse_SERVING
}

func knownService(name string) bool {
	switch name {
	case "", kvferrypb.Engine_ServiceDesc.ServiceName, kvferrypb.Admin_ServiceDesc.ServiceName, kvferrypb.Peer_ServiceDesc.ServiceName:
		return true
	default:
		return false
	}
}

func (h healthService) Check(_ context.Context, req *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	if !knownService(req.GetService()) {
		return nil, fmt.Errorf("%w %.80q", errUnknownService, req.GetService())
	}
	return &grpc_health_v1.HealthCheckResponse{Status: h.state()}, nil
}

// watchInterval is how often the state is looked at for those who watch it.
const watchInterval = 100 * time.Millisecond

func (h healthService) Watch(req *grpc_health_v1.HealthCheckRequest, stream grpc.ServerStreamingServer[grpc_health_v1.HealthCheckResponse]) error {
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	last := grpc_health_v1.HealthCheckResponse_UNKNOWN
	for {
		state := grpc_health_v1.HealthCheckResponse_SERVICE_UNKNOWN
		if knownService(req.GetService()) {
			state = h.state()
		}
		if state != last {
			last = state
			if err := stream.Send(&grpc_health_v1.HealthCheckResponse{Status: state}); err != nil {
				return err
			}
		}
		select {
		case <-tick.C:
		case <-stream.Context().Done():
			return context.Cause(stream.Context())
		case <-h.node.ctx.Done():
			return errDraining
		}
	}
}

// userListener takes connections of this process's user and root only.
type userListener struct {
	*net.UnixListener
	node *Node
}

func (l *userListener) Accept() (net.Conn, error) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		if err := checkPeerUser(c); err != nil {
			l.node.metrics.authFailures.WithLabelValues("engine").Inc()
			l.node.log.Warn("connection refused", "err", err)
			_ = c.Close()
			continue
		}
		return c, nil
	}
}

// checkPeerUser refuses other users than ours and root.
func checkPeerUser(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	ctlErr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err = errors.Join(ctlErr, err); err != nil {
		return fmt.Errorf("read the caller's user: %w", err)
	}
	if cred.Uid != 0 && int(cred.Uid) != os.Getuid() {
		return fmt.Errorf("process %d of user %s called, user %d is served", cred.Pid, strconv.Itoa(int(cred.Uid)), os.Getuid())
	}
	return nil
}
