package transfer_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
)

// fakeTransport opens nothing: it answers with err, and keeps what it was
// asked for.
type fakeTransport struct {
	name   string
	err    error
	opened []transfer.Peer
	during func()
}

func (f *fakeTransport) Name() string       { return f.name }
func (f *fakeTransport) Descriptor() []byte { return []byte(f.name) }
func (f *fakeTransport) Close() error       { return nil }
func (f *fakeTransport) Open(_ context.Context, peer transfer.Peer) (transfer.Link, error) {
	f.opened = append(f.opened, peer)
	if f.during != nil {
		f.during()
	}
	if f.err != nil {
		return nil, f.err
	}
	return fakeLink{f.name}, nil
}

type fakeLink struct{ by string }

func (fakeLink) Read(context.Context, []transfer.Seal, []transfer.Copy) error { return nil }
func (fakeLink) Close() error                                                 { return nil }

func TestChoose(t *testing.T) {
	unavailable := fmt.Errorf("no device on this machine: %w", transfer.ErrUnavailable)
	broken := errors.New("device is wedged")
	peer := transfer.Peer{Life: id.Life{Node: "prefill-1", Incarnation: 17}}
	all := map[string][]byte{"shm": []byte("s"), "rdma": {}, "tcp": []byte("t")}

	for name, tt := range map[string]struct {
		ours        []*fakeTransport
		descriptors map[string][]byte
		want        string // "" if none
		opened      []string
		refused     []string
		err         error
		text        []string // of the error
	}{
		"the first": {
			ours: []*fakeTransport{{name: "shm"}, {name: "tcp"}}, descriptors: all,
			want: "shm", opened: []string{"shm"},
		},
		"ours decides the order": {
			ours: []*fakeTransport{{name: "tcp"}, {name: "shm"}}, descriptors: all,
			want: "tcp", opened: []string{"tcp"},
		},
		"an empty descriptor is one": {
			ours: []*fakeTransport{{name: "rdma"}}, descriptors: all,
			want: "rdma", opened: []string{"rdma"},
		},
		"passes what cannot be used": {
			ours: []*fakeTransport{{name: "cudaipc"}, {name: "rdma", err: unavailable}, {name: "tcp"}}, descriptors: all,
			want: "tcp", opened: []string{"rdma", "tcp"},
			refused: []string{"cudaipc: the peer does not have it", "rdma: no device on this machine: transport not available"},
		},
		"does not pass what is broken": {
			ours: []*fakeTransport{{name: "cudaipc"}, {name: "rdma", err: broken}, {name: "tcp"}}, descriptors: all,
			opened: []string{"rdma"}, refused: []string{"cudaipc: the peer does not have it"},
			err: broken, text: []string{"prefill-1.17", "by rdma"},
		},
		"does not pass another life": {
			ours: []*fakeTransport{{name: "shm", err: transfer.ErrIdentity}, {name: "tcp"}}, descriptors: all,
			opened: []string{"shm"}, err: transfer.ErrIdentity,
		},
		"none is left": {
			ours: []*fakeTransport{{name: "cudaipc"}, {name: "shm", err: unavailable}}, descriptors: all,
			opened: []string{"shm"}, refused: []string{"cudaipc: the peer does not have it", "shm: no device on this machine: transport not available"},
			err: transfer.ErrUnavailable, text: []string{"prefill-1.17", "cudaipc: the peer does not have it", "shm: no device"},
		},
		"the peer has none": {
			ours: []*fakeTransport{{name: "tcp"}}, refused: []string{"tcp: the peer does not have it"},
			err: transfer.ErrUnavailable, text: []string{"tcp: the peer does not have it"},
		},
		"we have none": {
			descriptors: all, err: transfer.ErrUnavailable, text: []string{"no transport is configured"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var ours []transfer.Transport
			for _, f := range tt.ours {
				ours = append(ours, f)
			}
			chosen, link, refusals, err := transfer.Choose(t.Context(), ours, peer, tt.descriptors)

			if tt.want == "" && (chosen != nil || link != nil || err == nil || !errors.Is(err, tt.err)) {
				t.Errorf("Choose = %v, %v, %v, want an error that wraps %v", chosen, link, err, tt.err)
			}
			if tt.want != "" && (err != nil || chosen.Name() != tt.want || link != fakeLink{tt.want}) {
				t.Errorf("Choose = %v, %v, %v, want %s", chosen, link, err, tt.want)
			}
			for _, text := range tt.text {
				if err == nil || !strings.Contains(err.Error(), text) {
					t.Errorf("error %v does not say %q", err, text)
				}
			}
			var opened, refused []string
			for _, f := range tt.ours {
				for _, p := range f.opened {
					opened = append(opened, f.name)
					if p.Life != peer.Life || string(p.Descriptor) != string(tt.descriptors[f.name]) {
						t.Errorf("%s was opened for %v, %q", f.name, p.Life, p.Descriptor)
					}
				}
			}
			for _, r := range refusals {
				refused = append(refused, r.String())
			}
			if !slices.Equal(opened, tt.opened) {
				t.Errorf("opened %v, want %v", opened, tt.opened)
			}
			if !slices.Equal(refused, tt.refused) {
				t.Errorf("refused %q, want %q", refused, tt.refused)
			}
		})
	}
}

func TestChooseEndsWithTheContext(t *testing.T) {
	cause := errors.New("request was cancelled")
	ctx, cancel := context.WithCancelCause(t.Context())
	first := &fakeTransport{name: "shm", err: transfer.ErrUnavailable, during: func() { cancel(cause) }}
	second := &fakeTransport{name: "tcp"}
	_, link, refusals, err := transfer.Choose(ctx, []transfer.Transport{first, second}, transfer.Peer{}, map[string][]byte{"shm": nil, "tcp": nil})
	if !errors.Is(err, cause) || link != nil || len(refusals) != 1 || len(second.opened) != 0 {
		t.Errorf("Choose = %v, %v, %v, want the cause and one refusal", link, refusals, err)
	}
}

func ExampleChoose() {
	ours := []transfer.Transport{&fakeTransport{name: "rdma"}, &fakeTransport{name: "tcp"}}
	peer := transfer.Peer{Life: id.Life{Node: "prefill-1", Incarnation: 17}}
	chosen, link, refusals, err := transfer.Choose(context.Background(), ours, peer, map[string][]byte{"tcp": []byte("10.0.0.1:7902")})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer link.Close()
	fmt.Println(chosen.Name(), refusals)
	// Output: tcp [rdma: the peer does not have it]
}
