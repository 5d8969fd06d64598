package node_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
	"github.com/kvferry/kvferry/internal/node"
	"github.com/kvferry/kvferry/transfer"
)

// toy is a transport of which there are links, and no bytes. The first word of a
// hello says what is to be done with it.
type toy struct {
	standing chan standing // links that have been answered
	ended    chan error    // why each of them has ended
}

type standing struct {
	reader id.Life
	hang   context.CancelFunc // ends it from the owner's side
}

func serveToy(n *member) *toy {
	y := &toy{standing: make(chan standing, 16), ended: make(chan error, 16)}
	n.ServeLinks("toy", y.serve)
	return y
}

func (y *toy) serve(ctx context.Context, reader id.Life, hello []byte, asked <-chan []byte, answer func([]byte) error) error {
	switch word, _, _ := strings.Cut(string(hello), " "); word {
	case "unavailable":
		return fmt.Errorf("another fabric: %w", transfer.ErrUnavailable)
	case "identity":
		return fmt.Errorf("hello is for another life: %w", transfer.ErrIdentity)
	case "garbage":
		return errors.New("hello is garbage")
	case "silent":
		y.standing <- standing{reader: reader}
		<-ctx.Done()
		y.ended <- context.Cause(ctx)
		return context.Cause(ctx)
	}
	ctx, hang := context.WithCancel(ctx)
	defer hang()
	if err := answer(append([]byte("answer to "), hello...)); err != nil {
		return err
	}
	y.standing <- standing{reader, hang}
	for {
		select {
		case ask := <-asked:
			if err := answer(append([]byte("answer to "), ask...)); err != nil {
				return err
			}
		case <-ctx.Done():
			y.ended <- context.Cause(ctx)
			return nil
		}
	}
}

// linkStream is what an owner has of a link.
type linkStream = grpc.BidiStreamingServer[kvferrypb.LinkRequest, kvferrypb.LinkResponse]

// askLink says a first message, and returns the error of the answer.
func askLink(t testing.TB, peer kvferrypb.PeerClient, req *kvferrypb.LinkRequest) error {
	t.Helper()
	stream, err := peer.Link(t.Context())
	if err == nil {
		_ = stream.Send(req) // Recv says why it was refused
		_, err = stream.Recv()
	}
	return err
}

// arrives receives, or fails the test.
func arrives[T any](t testing.TB, what string, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(deadline):
		t.Fatalf("waited %v for %s", deadline, what)
	}
	return v
}

func stands(t testing.TB, c node.Call) {
	t.Helper()
	select {
	case <-c.Ended():
		t.Error("the link has ended")
	default:
	}
}

// TestLink: a hello is answered, and then the link stands until one of its sides,
// or the life of one, ends it; the other one hears of that.
func TestLink(t *testing.T) {
	for name, secure := range map[string]bool{"plain": false, "secure": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testLink(t, secure)
		})
	}
}

func testLink(t *testing.T, secure bool) {
	var prefill, decode *member
	if secure {
		prefill, decode = startSecure(t, newAuthority(t, year), [2]string{"cluster.keyring", testKey})
	} else {
		prefill, decode = startPair(t, overTCP)
	}
	y := serveToy(prefill)
	open := func() (node.Call, standing) {
		t.Helper()
		handshake, done := context.WithCancel(t.Context())
		defer done() // what stands is not of it
		answer, c, err := decode.CallPeer(handshake, "toy", prefill.Life(), []byte("hello"))
		if err != nil || string(answer) != "answer to hello" {
			t.Fatalf("%q, %v", answer, err)
		}
		return c, arrives(t, "the owner to hear of it", y.standing)
	}
	first, s := open()
	for i := range 3 * node.MaxAsked { // in order, and as many as are answered
		ask := fmt.Appendf(nil, "question %d", i)
		if err := first.Send(t.Context(), ask); err != nil {
			t.Fatal(err)
		}
		if i >= 4 { // some are under way at any time
			if a, want := arrives(t, "an answer", first.Answers()), fmt.Sprintf("answer to question %d", i-4); string(a) != want {
				t.Fatalf("%q, want %q", a, want)
			}
		}
	}
	if s.reader != decode.Life() {
		t.Errorf("the owner was told that %s reads, which is %s", s.reader, decode.Life())
	}
	second, s2 := open()
	third, _ := open()

	if err := first.Close(); err != nil {
		t.Error(err)
	}
	arrives(t, "the owner to end the link that its reader has closed", y.ended)
	if err := first.Close(); err != nil {
		t.Error(err)
	}
	stands(t, second)
	s2.hang()
	arrives(t, "the reader to hear of the end", second.Ended())
	if err := second.Close(); err != nil {
		t.Error(err)
	}
	<-y.ended
	stands(t, third)

	// Nothing is left of a member that has gone.
	fourth, _ := open()
	decode.close()
	for range 2 {
		arrives(t, "the owner to end the links of one that left", y.ended)
	}
	for _, c := range []node.Call{third, fourth} {
		arrives(t, "a link of a closed node to end", c.Ended())
	}
	if _, _, err := decode.CallPeer(t.Context(), "toy", prefill.Life(), nil); err == nil {
		t.Error("a closed node opens links")
	}
}

// TestLinkOfAnOwnerThatCloses: its links end, and a reader that holds some does not
// keep it.
func TestLinkOfAnOwnerThatCloses(t *testing.T) {
	prefill, decode := startPair(t)
	y := serveToy(prefill)
	_, c, err := decode.CallPeer(t.Context(), "toy", prefill.Life(), []byte("hello"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	<-y.standing
	begin := time.Now()
	prefill.close()
	if took := time.Since(begin); took > deadline/2 {
		t.Errorf("closing took %v", took)
	}
	arrives(t, "the link to end", c.Ended())
	if why := arrives(t, "the owner's side to end", y.ended); why == nil {
		t.Error("without a reason")
	}
	_, _, err = decode.CallPeer(t.Context(), "toy", prefill.Life(), nil)
	if err == nil {
		t.Error("a link to one that is gone")
	}
}

// TestLinkRefusals: why a link is refused decides whose fault that is.
func TestLinkRefusals(t *testing.T) {
	prefill, decode := startPair(t)
	y := serveToy(prefill)
	life := prefill.Life()
	later := id.Life{Node: life.Node, Incarnation: life.Incarnation + 1}
	for name, tt := range map[string]struct {
		transport, hello string
		life             id.Life
		is               error
		says             string
	}{
		"a transport without links": {"tcp", "", life, transfer.ErrUnavailable, "tcp"},
		"none of that name":         {"xxx", "", life, transfer.ErrUnavailable, "xxx"},
		"no way to it":              {"toy", "unavailable", life, transfer.ErrUnavailable, "another fabric"},
		"another life answers":      {"toy", "identity", life, transfer.ErrIdentity, "another life"},
		"a life to come":            {"toy", "hello", later, transfer.ErrIdentity, ""},
		"a stranger":                {"toy", "hello", id.Life{Node: "nobody", Incarnation: 1}, transfer.ErrIdentity, "no such node"},
		"garbage":                   {"toy", "garbage", life, nil, "hello is garbage"},
		"a long hello":              {"toy", "hello " + strings.Repeat("x", node.MaxHello), life, nil, "at most 65536"},
	} {
		t.Run(name, func(t *testing.T) {
			_, c, err := decode.CallPeer(t.Context(), tt.transport, tt.life, []byte(tt.hello))
			if err == nil {
				c.Close()
				t.Fatal("it stands")
			}
			for _, is := range []error{transfer.ErrUnavailable, transfer.ErrIdentity, context.Canceled} {
				if errors.Is(err, is) != (is == tt.is) { //nolint:errorlint // of the table
					t.Errorf("%v: is %v?", err, is)
				}
			}
			if !strings.Contains(err.Error(), tt.says) || len(err.Error()) > 1000 {
				t.Errorf("%v, want %q", err, tt.says)
			}
		})
	}
	t.Run("no answer", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), deadline)
		defer cancel()
		go func() {
			select {
			case <-y.standing: // it is asked
				cancel()
			case <-ctx.Done():
			}
		}()
		if _, _, err := decode.CallPeer(ctx, "toy", life, []byte("silent")); !errors.Is(err, context.Canceled) {
			t.Errorf("%v, want that nobody waits any more", err)
		}
		arrives(t, "the owner to hear that nobody waits", y.ended)
	})
	t.Run("bounded", func(t *testing.T) {
		var open []node.Call
		for range node.MaxPeerLinks {
			_, c, err := decode.CallPeer(t.Context(), "toy", life, []byte("hello"))
			if err != nil {
				t.Fatal(err)
			}
			open = append(open, c)
			<-y.standing
		}
		if _, _, err := decode.CallPeer(t.Context(), "toy", life, []byte("hello")); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("%v, want that there are too many", err)
		}
		for _, c := range open {
			c.Close()
			<-y.ended
		}
		await(t, "room for another link", func(context.Context) error {
			_, c, err := decode.CallPeer(t.Context(), "toy", life, []byte("hello"))
			if err == nil {
				<-y.standing
				c.Close()
				<-y.ended
			}
			return err
		})
	})
}

// TestHostileLinkRequests: a request that is not of a member, or not for this
// life, reaches no transport, and it shows.
func TestHostileLinkRequests(t *testing.T) {
	prefill, decode := startPair(t)
	served := make(chan id.Life, 16)
	prefill.ServeLinks("toy", func(_ context.Context, reader id.Life, _ []byte, _ <-chan []byte, _ func([]byte) error) error {
		served <- reader
		return nil
	})
	life := func(l id.Life) *kvferrypb.Life {
		return &kvferrypb.Life{Node: string(l.Node), Incarnation: uint64(l.Incarnation)}
	}
	self := prefill.Life()
	good := func() *kvferrypb.LinkRequest {
		return &kvferrypb.LinkRequest{From: life(decode.Life()), To: "prefill", ToIncarnation: uint64(self.Incarnation), Transport: "toy"}
	}
	const bad = `kvferry_bad_messages_total{surface="link"}`
	peer := dialPeer(t, prefill, insecure.NewCredentials())
	for name, tt := range map[string]struct {
		change func(*kvferrypb.LinkRequest)
		code   codes.Code
		counts bool
	}{
		"for another node":      {func(r *kvferrypb.LinkRequest) { r.To = "decode" }, codes.Aborted, true},
		"for nobody":            {func(r *kvferrypb.LinkRequest) { r.To = "" }, codes.Aborted, true},
		"for another life":      {func(r *kvferrypb.LinkRequest) { r.ToIncarnation++ }, codes.Aborted, true},
		"for any life":          {func(r *kvferrypb.LinkRequest) { r.ToIncarnation = 0 }, codes.Aborted, true},
		"of nobody":             {func(r *kvferrypb.LinkRequest) { r.From = nil }, codes.InvalidArgument, true},
		"of no name":            {func(r *kvferrypb.LinkRequest) { r.From.Node = "a/b" }, codes.InvalidArgument, true},
		"of an earlier life":    {func(r *kvferrypb.LinkRequest) { r.From.Incarnation-- }, codes.Unavailable, false},
		"by no transport":       {func(r *kvferrypb.LinkRequest) { r.Transport = "" }, codes.Unimplemented, true},
		"by one that has none":  {func(r *kvferrypb.LinkRequest) { r.Transport = "tcp" }, codes.Unimplemented, true},
		"with a hello too long": {func(r *kvferrypb.LinkRequest) { r.Hello = make([]byte, node.MaxHello+1) }, codes.InvalidArgument, true},
	} {
		t.Run(name, func(t *testing.T) {
			before := metric(t, prefill, bad)
			req := good()
			tt.change(req)
			err := askLink(t, peer, req)
			if status.Code(err) != tt.code {
				t.Errorf("%v, want %v", err, tt.code)
			}
			if counted := metric(t, prefill, bad) > before; counted != tt.counts {
				t.Errorf("counted as a bad message: %v", counted)
			}
		})
	}
	// These may be members that we have yet to hear of, and are waited for.
	var work sync.WaitGroup
	for _, of := range []id.Life{{Node: "mallory", Incarnation: 1}, {Node: "decode", Incarnation: decode.Life().Incarnation + 1}, self} {
		work.Go(func() {
			req := good()
			req.From = life(of)
			err := askLink(t, peer, req)
			if status.Code(err) != codes.Unavailable {
				t.Errorf("of %s: %v, want that it may try again", of, err)
			}
		})
	}
	work.Wait()
	if len(served) > 0 {
		t.Errorf("%s was served", <-served)
	}
	if err := askLink(t, peer, good()); len(served) != 1 {
		t.Errorf("the honest request: %v", err)
	}
}

// TestLinkOfALateMember: who asks before the owner has heard of it is waited for,
// and if that takes too long told to try again, not that there are no links.
func TestLinkOfALateMember(t *testing.T) {
	prefill := startNode(t, "prefill", nil, overTCP)
	y := serveToy(prefill)
	c := configure(t, "late", prefill, overTCP)
	if err := os.MkdirAll(c.Node.StateDir, 0o700); err != nil {
		t.Fatal(err)
	}
	late := id.Life{Node: "late", Incarnation: 1 << 60}
	if err := os.WriteFile(filepath.Join(c.Node.StateDir, "incarnation"), fmt.Appendf(nil, "%d\n", late.Incarnation-1), 0o600); err != nil {
		t.Fatal(err)
	}
	ask := func() error {
		return askLink(t, dialPeer(t, prefill, insecure.NewCredentials()), &kvferrypb.LinkRequest{
			From: &kvferrypb.Life{Node: "late", Incarnation: uint64(late.Incarnation)},
			To:   "prefill", ToIncarnation: uint64(prefill.Life().Incarnation), Transport: "toy", Hello: []byte("hello"),
		})
	}
	if err := ask(); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "not a member here") {
		t.Errorf("%v, want that it is not a member yet", err)
	}
	answered := make(chan error, 1)
	var asking sync.WaitGroup
	defer asking.Wait()
	asking.Go(func() {
		for {
			begin := time.Now()
			if err := ask(); status.Code(err) != codes.Unavailable || time.Since(begin) < time.Second {
				answered <- err
				return
			} // it has taken so long to start
		}
	})
	decode := startLogging(t, c, logger(t), nil)
	if decode.Life() != late {
		t.Fatalf("it is %s", decode.Life())
	}
	if err := arrives(t, "an answer", answered); err != nil {
		t.Error(err)
	}
	if s := arrives(t, "the link", y.standing); s.reader != late {
		t.Errorf("the owner was told that %s reads", s.reader)
	}
}

// TestQuestionsOfALinkAreBounded: who asks without end is ended, who is answered
// nothing is told, and what nobody can answer is refused.
func TestQuestionsOfALinkAreBounded(t *testing.T) {
	prefill, decode := startPair(t)
	ended := make(chan error, 4)
	prefill.ServeLinks("mute", func(ctx context.Context, _ id.Life, _ []byte, asked <-chan []byte, answer func([]byte) error) error {
		defer func() { ended <- context.Cause(ctx) }()
		if err := answer([]byte("yes")); err != nil {
			return err
		}
		for {
			select {
			case <-asked: // and says nothing
			case <-ctx.Done():
				return nil
			}
		}
	})
	open := func() node.Call {
		t.Helper()
		_, c, err := decode.CallPeer(t.Context(), "mute", prefill.Life(), nil)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	c := open()
	for range node.MaxAsked {
		if err := c.Send(t.Context(), []byte("?")); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Send(t.Context(), []byte("?")); err == nil {
		t.Errorf("%d questions without an answer are asked", node.MaxAsked+1)
	}
	c.Close()
	arrives(t, "the owner's side to end", ended)
	if err := c.Send(t.Context(), []byte("?")); err == nil {
		t.Error("a link that has ended is asked")
	}
	for name, ask := range map[string][]byte{"nothing": nil, "too much": make([]byte, node.MaxHello+1)} {
		c := open()
		if err := c.Send(t.Context(), ask); err != nil {
			t.Fatal(err)
		}
		arrives(t, "the link to end that asks "+name, c.Ended())
		arrives(t, "the owner's side to end", ended)
		c.Close()
	}
}

// TestLinkNeedsAName: with certificates a link is of whoever has proved it, and who
// is not let in hears why.
func TestLinkNeedsAName(t *testing.T) {
	a := newAuthority(t, year)
	prefill, decode := startSecure(t, a, [2]string{"cluster.keyring", testKey})
	y := serveToy(prefill)
	mallory := identityOf(t, a, "mallory")
	peer := dialPeer(t, prefill, credentials.NewTLS(mallory.Client(identity.Peer, "prefill")))
	before := metric(t, prefill, peerRefusals)
	err := askLink(t, peer, &kvferrypb.LinkRequest{
		From: &kvferrypb.Life{Node: "decode", Incarnation: uint64(decode.Life().Incarnation)},
		To:   "prefill", ToIncarnation: uint64(prefill.Life().Incarnation), Transport: "toy", Hello: []byte("hello"),
	})
	if status.Code(err) != codes.PermissionDenied || len(y.standing) > 0 {
		t.Errorf("mallory speaks for decode: %v", err)
	}
	if metric(t, prefill, peerRefusals) <= before {
		t.Error("it was not counted")
	}
}

// TestHostileLinkAnswers: what answers in a peer's place is believed nothing.
func TestHostileLinkAnswers(t *testing.T) {
	decode := startNode(t, "decode", nil, overTCP)
	imp := startImpostor(t, decode, nil)
	truth := imp.truth.GetLife()
	for name, tt := range map[string]struct {
		link func(linkStream) error
		is   error // nil: any
		ends bool  // it stands, and ends
	}{
		"nothing":          {func(linkStream) error { return nil }, nil, false},
		"another life":     {answers(&kvferrypb.LinkResponse{Life: &kvferrypb.Life{Node: "impostor", Incarnation: 1}}), transfer.ErrIdentity, false},
		"nobody":           {answers(&kvferrypb.LinkResponse{}), transfer.ErrIdentity, false},
		"more than it may": {answers(&kvferrypb.LinkResponse{Life: truth, Answer: make([]byte, node.MaxHello+1)}), nil, false},
		"not a member yet": {func(linkStream) error {
			return status.Error(codes.Unavailable, "not a member here")
		}, nil, false},
		"two answers": {answers(&kvferrypb.LinkResponse{Life: truth}, &kvferrypb.LinkResponse{Life: truth}), nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			imp.link = tt.link
			_, c, err := decode.CallPeer(t.Context(), "toy", imp.life, []byte("hello"))
			switch {
			case tt.ends && err != nil:
				t.Error(err)
			case tt.ends:
				arrives(t, "the link to end", c.Ended())
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			case err == nil:
				t.Error("it stands")
			case tt.is != nil && !errors.Is(err, tt.is):
				t.Errorf("%v, want %v", err, tt.is)
			case errors.Is(err, transfer.ErrUnavailable): // for which the transport would rest
				t.Errorf("%v, want an error to try again after", err)
			}
		})
	}
}

// answers says these, and then stays silent.
func answers(all ...*kvferrypb.LinkResponse) func(linkStream) error {
	return func(s linkStream) error {
		for _, a := range all {
			if err := s.Send(a); err != nil {
				return err
			}
		}
		<-s.Context().Done()
		return nil
	}
}
