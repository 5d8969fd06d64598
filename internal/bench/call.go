package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"sync"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rdmaread"
)

// The two processes of a pull say by a connection a queue pair what RDMA cannot:
// a greeting and its answer, questions and theirs, a JSON document each. The
// connection's end is that of the queue pairs on both sides. It is a socket in the
// directory where peers of one host meet, which none but this user can enter.
type (
	greeting struct {
		Reader id.Life `json:"reader"`
		Hello  []byte  `json:"hello"` // which says whom it is for
	}
	ask struct {
		Ask []byte `json:"ask"`
	}
	reply struct {
		Answer []byte `json:"answer"`
	}
)

const (
	callSocket  = "calls"
	maxAsked    = 16 // answers that nobody has taken
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
	in := json.NewDecoder(c) // of a process of this user
	if err := in.Decode(&g); err != nil {
		return
	}
	_ = c.SetDeadline(time.Time{})
	asked := make(chan []byte)
	watch.Go(func() { hear(ctx, in, asked); cancel() })
	// Why a call was refused is told to the reader by the answer, or by the end.
	_ = s.transport.Serve(ctx, g.Reader, g.Hello, asked, func(answer []byte) error {
		_ = c.SetWriteDeadline(time.Now().Add(callTimeout))
		return json.NewEncoder(c).Encode(reply{answer})
	})
}

// hear gives on what a reader asks, until it has ended the call, or ctx ends,
// which closes what in reads.
func hear(ctx context.Context, in *json.Decoder, asked chan<- []byte) {
	for {
		var q ask
		if in.Decode(&q) != nil {
			return
		}
		select {
		case asked <- q.Ask:
		case <-ctx.Done():
			return
		}
	}
}

// close ends every call, and waits.
func (s *callServer) close() {
	_ = s.listener.Close()
	s.end()
	s.work.Wait()
}

// call is the reader's side of one call.
type call struct {
	conn    net.Conn
	in      *json.Decoder
	answers chan []byte
	ended   chan struct{}
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
	in := json.NewDecoder(c)
	answer, err := greet(c, in, greeting{Reader: reader, Hello: hello})
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("call %s: %w", peer.Life, err), c.Close())
	}
	k := &call{conn: c, in: in, answers: make(chan []byte, maxAsked), ended: make(chan struct{})}
	go k.watch()
	return answer, k, nil
}

// greet returns the answer.
func greet(c net.Conn, in *json.Decoder, g greeting) ([]byte, error) {
	if err := json.NewEncoder(c).Encode(g); err != nil {
		return nil, err
	}
	var r reply
	if err := in.Decode(&r); err != nil {
		return nil, err
	}
	return r.Answer, nil
}

// watch ends with the connection, for which Close waits.
func (k *call) watch() {
	defer close(k.ended)
	for {
		var r reply
		if k.in.Decode(&r) != nil {
			return
		}
		select {
		case k.answers <- r.Answer:
		default: // nobody has asked
			return
		}
	}
}

// Send implements [rdmaread.Call].
func (k *call) Send(ctx context.Context, question []byte) error {
	end, _ := ctx.Deadline() // none: the zero time
	if err := k.conn.SetWriteDeadline(end); err != nil {
		return err
	}
	return json.NewEncoder(k.conn).Encode(ask{question})
}

// Answers implements [rdmaread.Call].
func (k *call) Answers() <-chan []byte { return k.answers }

// Ended implements [rdmaread.Call].
func (k *call) Ended() <-chan struct{} { return k.ended }

// Close implements [rdmaread.Call].
func (k *call) Close() error {
	_ = k.conn.Close() // which is all that it does
	<-k.ended
	return nil
}
