package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sync"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rdmaread"
)

// The two processes of a pull say by a connection a queue pair what RDMA cannot:
// a greeting, its answer, a JSON document each, and then nothing. The connection's
// end is that of the queue pairs on both sides. It is a socket in the directory
// where peers of one host meet, which none but this user can enter.
type (
	greeting struct {
		Reader id.Life `json:"reader"`
		Hello  []byte  `json:"hello"` // which says whom it is for
	}
	reply struct {
		Answer []byte `json:"answer"`
	}
)

const (
	callSocket  = "calls"
	callBytes   = 64 << 10 // of a document
	callTimeout = 10 * time.Second
	maxCalls    = 1024 // at once
)

// callServer is the owner's side: it gives the transport what readers say.
type callServer struct {
	transport *rdmaread.Transport
	listener  *net.UnixListener
	end       context.CancelFunc
	work      sync.WaitGroup
	room      chan struct{}
}

func startCallServer(ctx context.Context, dir string, t *rdmaread.Transport) (*callServer, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, callSocket)})
	if err != nil {
		return nil, err
	}
	s := &callServer{transport: t, listener: l, room: make(chan struct{}, maxCalls)}
	ctx, s.end = context.WithCancel(ctx)
	s.work.Go(func() { s.accept(ctx) })
	return s, nil
}

// accept ends with the listener.
func (s *callServer) accept(ctx context.Context) {
	for {
		c, err := s.listener.AcceptUnix()
		if err != nil {
			return
		}
		select {
		case s.room <- struct{}{}:
			s.work.Go(func() { s.serve(ctx, c) })
		default:
			_ = c.Close() // the reader is told by that
		}
	}
}

// serve is one call; it returns when the reader has ended it, or ctx ends.
func (s *callServer) serve(ctx context.Context, c *net.UnixConn) {
	defer func() { <-s.room }()
	var watch sync.WaitGroup
	defer watch.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	defer c.Close()
	var g greeting
	_ = c.SetDeadline(time.Now().Add(callTimeout))
	if err := json.NewDecoder(io.LimitReader(c, callBytes)).Decode(&g); err != nil {
		return
	}
	// Why a call was refused is told to the reader by the answer, or by the end.
	_ = s.transport.Serve(ctx, g.Reader, g.Hello, func(answer []byte) error {
		if err := json.NewEncoder(c).Encode(reply{answer}); err != nil {
			return err
		}
		_ = c.SetDeadline(time.Time{})
		watch.Go(func() { hear(c, cancel) })
		return nil
	})
}

// hear calls ended when the other side has ended the call, or has broken its
// silence, or c is closed.
func hear(c net.Conn, ended func()) {
	var b [1]byte
	_, _ = c.Read(b[:])
	ended()
}

// close ends every call, and waits.
func (s *callServer) close() {
	_ = s.listener.Close()
	s.end()
	s.work.Wait()
}

// call is the reader's side of one call.
type call struct {
	conn  net.Conn
	ended chan struct{}
}

// dialCall is [rdmaread.Options.Call] of a reader whose peer is met in dir.
func dialCall(ctx context.Context, dir string, reader id.Life, peer transfer.Peer, hello []byte) (_ []byte, _ rdmaread.Call, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", filepath.Join(dir, callSocket))
	if err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	answer, err := greet(c, greeting{Reader: reader, Hello: hello})
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("call %s: %w", peer.Life, err), c.Close())
	}
	k := &call{conn: c, ended: make(chan struct{})}
	go k.watch()
	return answer, k, nil
}

// greet returns the answer.
func greet(c net.Conn, g greeting) ([]byte, error) {
	if err := json.NewEncoder(c).Encode(g); err != nil {
		return nil, err
	}
	var r reply
	if err := json.NewDecoder(io.LimitReader(c, callBytes)).Decode(&r); err != nil {
		return nil, err
	}
	return r.Answer, nil
}

// watch ends with the connection, for which Close waits.
func (k *call) watch() { hear(k.conn, func() { close(k.ended) }) }

// Ended implements [rdmaread.Call].
func (k *call) Ended() <-chan struct{} { return k.ended }

// Close implements [rdmaread.Call].
func (k *call) Close() error {
	_ = k.conn.Close() // which is all that it does
	<-k.ended
	return nil
}
