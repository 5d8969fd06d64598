package node

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// Page says who holds a page, and why.
func (a adminService) Page(_ context.Context, req *kvferrypb.PageRequest) (*kvferrypb.PageResponse, error) {
	n, now := a.node, time.Now()
	s, err := n.manager.Page(page.Index(req.GetPage()))
	if err != nil {
		return nil, err
	}
	res := &kvferrypb.PageResponse{
		Page: uint32(s.Page), Place: s.Place, Request: string(s.Request), Label: string(s.Label),
		FirstToken: uint32(s.First), Tokens: uint32(s.Tokens),
		Step: uint64(s.Step), Retrieval: uint64(s.Retrieval), Move: uint64(s.Move),
	}
	for _, p := range n.owner.live() {
		if !slices.Contains(s.Publications, p.id) {
			continue
		}
		reference, err := p.reference(n.keyring.current())
		if err != nil {
			return nil, err
		}
		i := &kvferrypb.PageResponse_Publication{
			Reference: reference, Publication: uint64(p.name.Sequence), Request: string(p.value.Request), Final: p.value.Final,
		}
		if v, ok := n.owner.holds.look(now, p.name.Sequence); ok {
			i.Leases, i.Age, i.ExpiresIn = uint32(len(v.leases)), durationpb.New(v.age), durationpb.New(v.ends)
		}
		res.Publications = append(res.Publications, i)
	}
	res.Why = why(s, n.keptFor(s.Kept))
	return res, nil
}

// keptFor says for people why a request is there that was removed; "" if it was not.
func (n *Node) keptFor(kept id.Request) string {
	state, err := n.manager.Request(kept)
	if err != nil || kept == "" {
		return ""
	}
	return fmt.Sprintf("removed, kept for publication %d", n.owner.sequence(state.Published))
}

// why is a page's state in one line for people. kept is of its request.
func why(s manager.PageState, kept string) string {
	var parts []string
	add := func(is bool, format string, args ...any) {
		if is {
			parts = append(parts, fmt.Sprintf(format, args...))
		}
	}
	publications := "a live publication names it"
	if n := len(s.Publications); n > 1 {
		publications = fmt.Sprintf("%d live publications name it", n)
	}
	owned := s.Place == "owned"
	add(s.Place == "free", "nobody holds it")
	add(s.Place == "engine", "the engine keeps it, which chooses the pages")
	add(s.Place == "sink", "it takes the padding of captured steps, and is never given to a request")
	add(s.Place == "limbo", "it has left its request, and is kept because %s", publications)
	add(s.Place == "quarantine" && s.Retrieval != 0, "a read that was given up may still write it")
	add(s.Place == "quarantine" && s.Move != 0, "its request is gone, and a move still copies it")
	add(s.Place == "quarantine" && s.Step != 0, "its request is gone, and a step may still copy it")
	add(s.Place == "quarantine" && s.Retrieval == 0 && s.Move == 0 && s.Step == 0, "something may still write it")
	add(owned && s.Tokens > 0, "request %q has tokens %d to %d of %q in it", s.Request, s.First, s.First+s.Tokens-1, s.Label)
	add(owned && s.Tokens == 0 && s.Request != "", "request %q keeps it in reserve for %q", s.Request, s.Label)
	add(owned && kept != "", "it was %s", kept)
	add(owned && s.Request == "", "a request that is gone had it reserved")
	add(owned && len(s.Publications) > 0, "%s", publications)
	add(owned && s.Retrieval != 0, "a retrieval reads into it")
	add(owned && s.Step != 0, "a step in flight has reserved it")
	add(owned && s.Move != 0, "it is on its way to or from the host")
	return strings.Join(parts, "; ")
}
