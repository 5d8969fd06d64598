package node_test

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
)

// rows are K or V of n tokens as [token, head, element] of fp32, numbers that
// every type but fp8 holds exactly.
func (e *engine) rows(n, salt int) (numbers []float32) {
	l := e.Geometry().Layout
	for i := range n * l.Heads * l.HeadDim {
		numbers = append(numbers, float32((i*7+salt)%256-128))
	}
	return numbers
}

// encode is the numbers as one type stores them, by the definition of the type.
func encode(t testing.TB, numbers []float32, dtype string) (b []byte) {
	t.Helper()
	for _, x := range numbers {
		bits := math.Float32bits(x)
		switch dtype {
		case "fp32":
			b = binary.LittleEndian.AppendUint32(b, bits)
		case "bf16":
			b = binary.LittleEndian.AppendUint16(b, uint16(bits>>16))
		case "fp16": // none of them is subnormal, or needs rounding
			half := uint16(bits >> 16 & 0x8000)
			if x != 0 {
				half |= uint16((bits>>23&0xff-112)<<10 | bits>>13&0x3ff)
			}
			b = binary.LittleEndian.AppendUint16(b, half)
		default:
			t.Fatalf("type %s", dtype)
		}
	}
	return b
}

// TestKVRoundTrip: what is written through the service lies in the arena where
// the layout says, and comes back, in any type.
func TestKVRoundTrip(t *testing.T) {
	for name, tt := range map[string]struct {
		arena string
		set   [][2]string
	}{
		"NHD of bf16":                  {"bf16", nil},
		"HND of bf16":                  {"bf16", [][2]string{{"arena.layout", "HND"}}},
		"HND of fp32, two":             {"fp32", [][2]string{{"arena.layout", "HND"}, {"arena.dtype", "fp32"}, {"arena.ranks", "0,1"}}},
		"NHD of fp16":                  {"fp16", [][2]string{{"arena.dtype", "fp16"}}},
		"on a device":                  {"bf16", [][2]string{onDevice}},
		"HND of fp32 on a device, two": {"fp32", [][2]string{onDevice, {"arena.layout", "HND"}, {"arena.dtype", "fp32"}, {"arena.ranks", "0,1"}}},
	} {
		t.Run(name, func(t *testing.T) {
			n := startNode(t, "one", nil, tt.set...)
			e := openEngine(t, n)
			l := e.Geometry().Layout
			e.ingest("a")
			e.ingest("b")
			e.write("a", 5)
			step, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{
				Plan: true, Lease: &kvferrypb.AdmitRequest_Lease{Tokens: 40},
				Segments: []*kvferrypb.Segment{segment("a", "", 11), segment("b", "cfg", 6), segment("b", "", 9)},
			})
			if err != nil {
				t.Fatal(err)
			}
			for at, dtype := range []string{"", "fp32", "bf16", "fp16"} {
				as := dtype
				if as == "" {
					as = tt.arena
				}
				for _, p := range step.GetPlans() {
					tokens := int(p.GetTotalTokens())
					for _, rank := range e.Ranks() {
						for layer := range l.Layers {
							salt := at*31 + int(rank)*5 + layer*3 + len(p.GetLabel())
							k, v := e.rows(tokens, salt), e.rows(tokens+2, salt+1) // trimmed: two too many
							req := &kvferrypb.WriteKVRequest{
								Step: step.GetStep(), Label: p.GetLabel(), Layer: uint32(layer), Rank: uint32(rank), Dtype: dtype,
								K: encode(t, slices.Concat(k, v[:2*l.Heads*l.HeadDim]), as), V: encode(t, v, as),
							}
							v = v[:len(k)]
							if _, err := e.WriteKV(e.ctx(), req); err != nil {
								t.Fatal(err)
							}
							e.compareRows(p, rank, layer, [2][]byte{encode(t, k, tt.arena), encode(t, v, tt.arena)})
							for _, other := range []string{"", "fp32", "bf16", "fp16"} {
								back, err := e.ReadKV(e.ctx(), &kvferrypb.ReadKVRequest{
									Step: step.GetStep(), Label: p.GetLabel(), Layer: uint32(layer), Rank: uint32(rank), Dtype: other,
								})
								if err != nil {
									t.Fatal(err)
								}
								if other == "" {
									other = tt.arena
								}
								if !bytes.Equal(back.GetK(), encode(t, k, other)) || !bytes.Equal(back.GetV(), encode(t, v, other)) {
									t.Fatalf("written as %s, read as %s: other bytes", as, other)
								}
							}
						}
					}
				}
			}
			// Where nothing was to be written nothing was.
			if got := e.compare("a", "main", &kvferrypb.PlanOutput{
				Views: []*kvferrypb.View{{Length: 5}}, PagedKvIndices: step.GetPlans()[0].GetPagedKvIndices(),
			}); got != 5 {
				t.Errorf("%d tokens compared", got)
			}
			for _, x := range e.Ranks() {
				sink := make([]byte, int(l.PageBytes())/l.Layers)
				if !bytes.Equal(e.whole(x)[:len(sink)], sink) {
					t.Errorf("rank %d: padding was written", x)
				}
			}
		})
	}
}

// compareRows compares what the arena holds, in one layer of one rank, where
// the plan writes.
func (e *engine) compareRows(p *kvferrypb.PlanOutput, rank id.Rank, layer int, want [2][]byte) {
	e.t.Helper()
	l := e.Geometry().Layout
	for j := range int(p.GetTotalTokens()) {
		e.slot(int(p.GetTokenToPage()[j]), int(p.GetTokenToSlot()[j]), func(r id.Rank, y, kv, head int, b []byte) {
			if r != rank || y != layer {
				return
			}
			at := (j*l.Heads + head) * len(b)
			if !bytes.Equal(b, want[kv][at:at+len(b)]) {
				e.t.Errorf("label %s token %d rank %d layer %d kv %d head %d: wrong bytes", p.GetLabel(), j, r, y, kv, head)
			}
		})
	}
}

// TestHostileKV: what does not fit is refused by name, and writes nothing.
func TestHostileKV(t *testing.T) {
	n := startNode(t, "one", nil, [2]string{"arena.heads", "64"}, [2]string{"arena.head_dim", "128"})
	e, other := openEngine(t, n), openEngine(t, n)
	e.ingest("a")
	admit := func(span int) *kvferrypb.AdmitResponse {
		step, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{Plan: true, Segments: []*kvferrypb.Segment{segment("a", "", span)}})
		if err != nil {
			t.Fatal(err)
		}
		return step
	}
	step := admit(2)
	row := 64 * 128 * 2
	fits := make([]byte, 2*row)
	for i := range fits {
		fits[i] = 0xff
	}
	good := func() *kvferrypb.WriteKVRequest {
		return &kvferrypb.WriteKVRequest{Step: step.GetStep(), K: fits, V: fits}
	}
	for name, tt := range map[string]struct {
		change func(*kvferrypb.WriteKVRequest)
		want   kvferrypb.Failure_Code
		text   string
		read   bool // also when it is read
	}{
		"no step":          {func(r *kvferrypb.WriteKVRequest) { r.Step = 99 }, kvferrypb.Failure_NOT_FOUND, "step 99", true},
		"no such label":    {func(r *kvferrypb.WriteKVRequest) { r.Label = "cfg" }, kvferrypb.Failure_NOT_FOUND, "cfg", true},
		"no such layer":    {func(r *kvferrypb.WriteKVRequest) { r.Layer = 2 }, kvferrypb.Failure_INVALID, "layer 2", true},
		"a huge layer":     {func(r *kvferrypb.WriteKVRequest) { r.Layer = 1<<32 - 1 }, kvferrypb.Failure_INVALID, "layer", true},
		"a rank elsewhere": {func(r *kvferrypb.WriteKVRequest) { r.Rank = 1 }, kvferrypb.Failure_INVALID, "rank 1", true},
		"a huge rank":      {func(r *kvferrypb.WriteKVRequest) { r.Rank = 1<<32 - 1 }, kvferrypb.Failure_INVALID, "rank", true},
		"no such type":     {func(r *kvferrypb.WriteKVRequest) { r.Dtype = "int4" }, kvferrypb.Failure_INVALID, "int4", true},
		"too few tokens":   {func(r *kvferrypb.WriteKVRequest) { r.K, r.V = fits[:row], fits[:row] }, kvferrypb.Failure_INVALID, "16384 bytes", false},
		"half a token":     {func(r *kvferrypb.WriteKVRequest) { r.K, r.V = fits[:row+2], fits[:row+2] }, kvferrypb.Failure_INVALID, "a token", false},
		"V is shorter":     {func(r *kvferrypb.WriteKVRequest) { r.V = fits[:row] }, kvferrypb.Failure_INVALID, "as many of each", false},
		"another type":     {func(r *kvferrypb.WriteKVRequest) { r.Dtype = "fp32" }, kvferrypb.Failure_INVALID, "bytes", false},
	} {
		t.Run(name, func(t *testing.T) {
			req := good()
			tt.change(req)
			_, err := e.WriteKV(e.ctx(), req)
			if f := failureOf(t, err); f.GetCode() != tt.want || !strings.Contains(f.GetMessage(), tt.text) {
				t.Errorf("write: %v %q, want %v with %q", f.GetCode(), f.GetMessage(), tt.want, tt.text)
			}
			_, err = e.ReadKV(e.ctx(), &kvferrypb.ReadKVRequest{Step: req.GetStep(), Label: req.GetLabel(), Layer: req.GetLayer(), Rank: req.GetRank(), Dtype: req.GetDtype()})
			switch f := err; {
			case !tt.read && f != nil:
				t.Errorf("read: %v", err)
			case tt.read:
				code(t, "read", err, tt.want)
			}
		})
	}
	_, err := other.WriteKV(other.ctx(), good())
	code(t, "write of another session's step", err, kvferrypb.Failure_NOT_FOUND)
	for i, b := range e.arenas[0].Bytes() {
		if b != 0 {
			t.Fatalf("byte %d was written", i)
		}
	}
	if _, err := e.WriteKV(e.ctx(), good()); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Abort(e.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()}); err != nil {
		t.Fatal(err)
	}
	// 4 MiB are 128 tokens of K and V: one less goes into a message.
	step = admit(128)
	_, err = e.ReadKV(e.ctx(), &kvferrypb.ReadKVRequest{Step: step.GetStep()})
	if f := failureOf(t, err); f.GetCode() != kvferrypb.Failure_INVALID || !strings.Contains(f.GetMessage(), "4 MiB") {
		t.Errorf("%v", f)
	}
	step = admit(127)
	big := make([]byte, 127*row)
	if _, err := e.WriteKV(e.ctx(), &kvferrypb.WriteKVRequest{Step: step.GetStep(), K: big, V: big}); err != nil {
		t.Error(err)
	}
	if res, err := e.ReadKV(e.ctx(), &kvferrypb.ReadKVRequest{Step: step.GetStep()}); err != nil || len(res.GetK()) != len(big) {
		t.Error(err)
	}
}

// TestKVAfterRemove: the slots of a request that is gone are nobody's any more.
func TestKVAfterRemove(t *testing.T) {
	n := startNode(t, "one", nil)
	e := openEngine(t, n)
	e.ingest("a")
	step, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("a", "", 2)}})
	if err != nil {
		t.Fatal(err)
	}
	e.remove("a")
	b := make([]byte, 2*2*8*2)
	_, err = e.WriteKV(e.ctx(), &kvferrypb.WriteKVRequest{Step: step.GetStep(), K: b, V: b})
	code(t, "write", err, kvferrypb.Failure_NOT_FOUND)
	_, err = e.ReadKV(e.ctx(), &kvferrypb.ReadKVRequest{Step: step.GetStep()})
	code(t, "read", err, kvferrypb.Failure_NOT_FOUND)
	res, err := e.Commit(e.ctx(), &kvferrypb.CommitRequest{Step: step.GetStep()})
	if err != nil || len(res.GetMissing()) != 1 {
		t.Errorf("%v, %v", res, err)
	}
}
