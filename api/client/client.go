// Package client is the Go client of a node: it dials the daemon's unix socket,
// opens an engine session, receives the arena's descriptor and maps it.
//
// The calls themselves are the generated ones: [Client.Admin] and [Session]
// are clients of the services in api/kvferrypb whose errors are [*Error].
package client

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

// ErrUnreachable is wrapped when no daemon answers on the socket.
var ErrUnreachable = errors.New("node is not reachable")

// Error is a call's failure: what the node said.
type Error struct {
	Method  string // the last part of the gRPC method, such as "Publish"
	Code    codes.Code
	Failure *kvferrypb.Failure // never nil

	unanswered bool // no daemon did, or none within the deadline
}

func (e *Error) Error() string {
	text := fmt.Sprintf("%s: %s", e.Method, e.Failure.GetMessage())
	if r := e.Failure.GetRemedy(); r != "" {
		text += " (" + r + ")"
	}
	return text
}

// GRPCStatus lets status.Code and status.FromError read the error.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code, e.Failure.GetMessage()) }

// Unwrap is ErrUnreachable where no daemon answered, and the context's error.
func (e *Error) Unwrap() []error {
	var errs []error
	if e.unanswered {
		errs = append(errs, ErrUnreachable)
	}
	switch e.Code {
	case codes.Canceled:
		errs = append(errs, context.Canceled)
	case codes.DeadlineExceeded:
		errs = append(errs, context.DeadlineExceeded)
	default:
	}
	return errs
}

// CodeOf returns the failure code of an error of this package, UNSPECIFIED of
// any other.
func CodeOf(err error) kvferrypb.Failure_Code {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Failure.GetCode()
	}
	return kvferrypb.Failure_UNSPECIFIED
}

// Client is a connection to one node's engine socket. It is safe for
// concurrent use.
type Client struct {
	socket string
	conn   *grpc.ClientConn
}

// Dial prepares a connection to the unix socket at path; it is made with the
// first call. A path with no socket fails at once with ErrUnreachable.
func Dial(path string) (*Client, error) {
	if path == "" {
		return nil, fmt.Errorf("dial: %w: no socket is named", ErrUnreachable)
	}
	if _, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("dial %s: %w: %w (is the agent running? name it with --node or --socket)", path, ErrUnreachable, err)
	}
	c := &Client{socket: path}
	var err error
	c.conn, err = grpc.NewClient("passthrough:///"+path,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(dialUnix),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: connectTimeout}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(kvferrypb.MaxMessage), grpc.MaxCallSendMsgSize(kvferrypb.MaxMessage)),
		grpc.WithUnaryInterceptor(c.unary),
		grpc.WithStreamInterceptor(c.stream),
	)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", path, err)
	}
	return c, nil
}

func dialUnix(ctx context.Context, path string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "unix", path)
}

// unserved says that no process has the socket open: the kernel refuses at
// once, which it does for no process that lives, however busy it is.
func (c *Client) unserved(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	conn, err := dialUnix(ctx, c.socket)
	if err == nil {
		_ = conn.Close()
		return false
	}
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist)
}

// Admin is the admin service.
func (c *Client) Admin() kvferrypb.AdminClient { return kvferrypb.NewAdminClient(c.conn) }

// Close ends the connection. Sessions that are open end after their grace.
func (c *Client) Close() error { return c.conn.Close() }

func (c *Client) unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	return c.convert(method, invoke(ctx, method, req, reply, cc, opts...))
}

func (c *Client) stream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	s, err := streamer(ctx, desc, cc, method, opts...)
	if err != nil {
		return nil, c.convert(method, err)
	}
	return &stream{s, c, method}, nil
}

type stream struct {
	grpc.ClientStream
	client *Client
	method string
}

func (s *stream) RecvMsg(m any) error { return s.client.convert(s.method, s.ClientStream.RecvMsg(m)) }

// convert makes an *Error of a status; io.EOF and nil stay.
func (c *Client) convert(method string, err error) error {
	st, ok := status.FromError(err)
	if err == nil || !ok {
		return err
	}
	e := &Error{Method: lastPart(method), Code: st.Code(), Failure: &kvferrypb.Failure{Message: st.Message()}}
	for _, d := range st.Details() {
		if f, ok := d.(*kvferrypb.Failure); ok {
			e.Failure = f
			return e
		}
	}
	switch { // nobody was there to say more
	case st.Code() == codes.Unavailable,
		// The kernel takes connections for a process that does not.
		st.Code() == codes.DeadlineExceeded && c.conn.GetState() != connectivity.Ready:
		e.unanswered = true
		e.Failure.Message = fmt.Sprintf("no agent answers on %s: %s", c.socket, st.Message())
		e.Failure.Remedy = silentRemedy
	case st.Code() == codes.DeadlineExceeded:
		e.Failure.Message = fmt.Sprintf("no answer in time on %s: %s", c.socket, st.Message())
	}
	return e
}

func lastPart(method string) string {
	for i := len(method) - 1; i >= 0; i-- {
		if method[i] == '/' {
			return method[i+1:]
		}
	}
	return method
}

// silentRemedy is for a node that says nothing.
const silentRemedy = "does the agent run? its process may be stopped (kill -CONT goes on with it), or have ended (its log says why)"

// connectTimeout is how long a process may take to greet a connection that the
// kernel has taken for it.
const connectTimeout = 5 * time.Second

// closeTimeout bounds what Close says to a node that may be gone.
const closeTimeout = 2 * time.Second
