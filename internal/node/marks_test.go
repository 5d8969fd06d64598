package node_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
)

// marks numbers what is written: no two steps of any test write the same bytes.
var marks atomic.Uint64

// tale is what the streams of a request have to hold: for each token the mark
// of the step that wrote it. A fork copies a list; that is all there is to it.
type tale map[string][]uint64

// book is what the requests of one engine have to hold.
type book map[string]tale

func (b book) of(r string) tale {
	if b[r] == nil {
		b[r] = tale{"main": nil}
	}
	return b[r]
}

func (t tale) clone() tale {
	c := make(tale, len(t))
	for l, list := range t {
		c[l] = slices.Clone(list)
	}
	return c
}

// fork makes the forks of one request. A stream that is not there is passed over.
func (t tale) fork(forks []*kvferrypb.Fork) {
	for _, f := range forks {
		if from, ok := t[labelOr(f.GetFrom())]; ok {
			t[f.GetTo()] = slices.Clone(from)
		}
	}
}

func labelOr(l string) string {
	if l == "" {
		return "main"
	}
	return l
}

// step is what the requests hold after a step that wrote the mark.
func (b book) step(req *kvferrypb.AdmitRequest, mark uint64) book {
	after := make(book)
	of := func(r string) tale {
		if after[r] == nil {
			after[r] = b.of(r).clone()
		}
		return after[r]
	}
	rows := req.GetRows().GetRequests()
	for _, seg := range req.GetSegments() {
		of(seg.GetRequest())
		if req.GetRows() == nil && !slices.Contains(rows, seg.GetRequest()) {
			rows = append(rows, seg.GetRequest())
		}
	}
	for _, r := range rows {
		of(r).fork(req.GetPreForks())
	}
	for _, seg := range req.GetSegments() {
		t, l := of(seg.GetRequest()), labelOr(seg.GetLabel())
		if t[l] == nil {
			t[l] = []uint64{}
		}
		if !req.GetDiscard() {
			t[l] = append(t[l], slices.Repeat([]uint64{mark}, int(seg.GetSpan()))...)
		}
	}
	for _, r := range rows {
		of(r).fork(req.GetPostForks())
	}
	return after
}

// run does one step as an engine would, and notes it.
func (b book) run(e *engine, req *kvferrypb.AdmitRequest) error {
	req.Plan = true
	step, err := e.Admit(e.ctx(), req)
	if err != nil {
		return err
	}
	return b.finish(e, req, step)
}

// finish writes and commits a step that was admitted.
func (b book) finish(e *engine, req *kvferrypb.AdmitRequest, step *kvferrypb.AdmitResponse) error {
	mark := e.mark(step.GetPlans())
	res, err := e.Commit(e.ctx(), &kvferrypb.CommitRequest{Step: step.GetStep()})
	if err != nil {
		return err
	}
	if len(res.GetMissing()) > 0 {
		return fmt.Errorf("missing: %v", res.GetMissing())
	}
	maps.Copy(b, b.step(req, mark))
	return nil
}

// must is run that succeeds.
func (b book) must(e *engine, req *kvferrypb.AdmitRequest) {
	e.t.Helper()
	if err := b.run(e, req); err != nil {
		e.t.Fatal(err)
	}
}

// stamp fills one head vector: the mark in clear, then what depends on
// everything else.
func stamp(b []byte, mark uint64, token int, rank id.Rank, layer, kv, head int) {
	x := mark
	for i := 0; i < len(b); i += 8 {
		var word [8]byte
		binary.LittleEndian.PutUint64(word[:], x)
		copy(b[i:], word[:])
		x = mix(x, token, int(rank), layer, kv, head, i)
	}
}

// mix is a number that depends on all of these.
func mix(x uint64, values ...int) uint64 {
	for _, v := range values {
		x = (x ^ uint64(v+1)) * 0x9e3779b97f4a7c15
		x ^= x >> 29
	}
	return x
}

// mark writes a new mark into all that plans say is to be written.
func (e *engine) mark(plans []*kvferrypb.PlanOutput) uint64 {
	mark := marks.Add(1)
	for _, p := range plans {
		for i, v := range p.GetViews() {
			for j := p.GetQoIndptr()[i]; j < p.GetQoIndptr()[i+1]; j++ {
				token := int(v.GetLength()-v.GetCompute()) + int(j-p.GetQoIndptr()[i])
				e.slot(int(p.GetTokenToPage()[j]), int(p.GetTokenToSlot()[j]), func(rank id.Rank, layer, kv, head int, b []byte) {
					stamp(b, mark, token, rank, layer, kv, head)
				})
			}
		}
	}
	return mark
}

// released stands for a token that a stream has let go.
const released = 0

// view reads every byte of the i-th view of a plan, and returns the marks.
func (e *engine) view(p *kvferrypb.PlanOutput, i int) []uint64 {
	e.t.Helper()
	v, size := p.GetViews()[i], e.Geometry().Layout.PageSize
	pages := p.GetPagedKvIndices()[p.GetPagedKvIndptr()[i]:p.GetPagedKvIndptr()[i+1]]
	list := make([]uint64, v.GetLength())
	for token := range list {
		at := token
		switch gone, prefix := int(v.GetReleased()), int(v.GetPrefix()); {
		case token >= prefix+gone:
			at -= gone
		case token >= prefix:
			list[token] = released
			continue
		}
		var mark uint64
		e.slot(int(pages[at/size]), at%size, func(rank id.Rank, layer, kv, head int, b []byte) {
			if mark == 0 {
				mark = binary.LittleEndian.Uint64(b)
			}
			want := make([]byte, len(b))
			stamp(want, mark, token, rank, layer, kv, head)
			if !bytes.Equal(b, want) {
				e.t.Errorf("request %s label %s token %d of mark %d, rank %d layer %d kv %d head %d: wrong bytes",
					v.GetRequest(), v.GetLabel(), token, mark, rank, layer, kv, head)
			}
		})
		list[token] = mark
	}
	return list
}

// read reads streams of a request as they are at one moment.
func (e *engine) read(r string, labels ...string) (tale, error) {
	e.t.Helper()
	req := &kvferrypb.AdmitRequest{Plan: true}
	for _, l := range labels {
		req.Segments = append(req.Segments, &kvferrypb.Segment{Request: r, Label: l})
	}
	step, err := e.Admit(e.ctx(), req)
	if err != nil {
		return nil, err
	}
	t := make(tale)
	for _, p := range step.GetPlans() {
		t[p.GetLabel()] = e.view(p, 0)
	}
	_, err = e.Abort(e.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()})
	return t, err
}

// differs says where streams that were read are not as told; "" if nowhere.
// What was released is not there to differ.
func (t tale) differs(got tale) string {
	for l, list := range got {
		want := t[l]
		if len(list) != len(want) {
			return fmt.Sprintf("label %s has %d tokens, want %d", l, len(list), len(want))
		}
		for i := range list {
			if list[i] != released && list[i] != want[i] {
				return fmt.Sprintf("label %s token %d has mark %d, want %d", l, i, list[i], want[i])
			}
		}
	}
	return ""
}

// verify checks every byte of streams of a request.
func (b book) verify(e *engine, r string, labels ...string) {
	e.t.Helper()
	got, err := e.read(r, labels...)
	if err != nil {
		e.t.Fatal(err)
	}
	if d := b.of(r).differs(got); d != "" {
		e.t.Errorf("request %s: %s", r, d)
	}
}

func segment(r, label string, span int) *kvferrypb.Segment {
	return &kvferrypb.Segment{Request: r, Label: label, Span: uint32(span)}
}

func forks(pairs ...string) (list []*kvferrypb.Fork) {
	for i := 0; i < len(pairs); i += 2 {
		list = append(list, &kvferrypb.Fork{From: pairs[i], To: pairs[i+1]})
	}
	return list
}
