package kv

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"sort"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/page"
)

// definition is a type as its standard defines it, and nothing of the code
// under test.
type definition struct {
	dtype              page.DType
	exponent, fraction int // bits
	infinities         bool
}

func definitions() []definition {
	return []definition{
		{page.BF16, 8, 7, true},
		{page.FP16, 5, 10, true},
		{page.FP8E4M3, 4, 3, false},
		{page.FP8E5M2, 5, 2, true},
	}
}

func (d definition) codes() uint32 { return 1 << (1 + d.exponent + d.fraction) }

// value is the number that a code stands for.
func (d definition) value(code uint32) float64 {
	sign := 1.0
	if code >= d.codes()/2 {
		sign = -1
		code -= d.codes() / 2
	}
	e, m := int(code)>>d.fraction, float64(int(code)&(1<<d.fraction-1))
	bias := 1<<(d.exponent-1) - 1
	switch largest := 1<<d.exponent - 1; {
	case d.infinities && e == largest && m == 0:
		return math.Inf(int(sign))
	case d.infinities && e == largest, !d.infinities && code == d.codes()/2-1:
		return math.NaN()
	case e == 0:
		return sign * math.Ldexp(m, 1-bias-d.fraction)
	}
	return sign * math.Ldexp(1+math.Ldexp(m, -d.fraction), e-bias)
}

// nearest is the code of x by search: of the two neighbours the nearer one, of
// two equally near ones the even one. What rounds above the finite numbers is
// the code behind them. Not for NaN.
type nearest struct {
	definition
	values []float64 // of the codes from 0 up, and the number that would follow
}

func (d definition) nearest() nearest {
	n := nearest{definition: d}
	for code := uint32(0); !math.IsInf(d.value(code), 0) && !math.IsNaN(d.value(code)); code++ {
		n.values = append(n.values, d.value(code))
	}
	last := n.values[len(n.values)-1]
	n.values = append(n.values, last+(last-n.values[len(n.values)-2]))
	return n
}

func (n nearest) code(x float64) uint32 {
	sign := uint32(0)
	if math.Signbit(x) {
		sign, x = n.codes()/2, -x
	}
	above := sort.SearchFloat64s(n.values, x)
	if above == len(n.values) {
		return sign | uint32(above-1)
	}
	if n.values[above] == x {
		return sign | uint32(above)
	}
	middle := (n.values[above-1] + n.values[above]) / 2 // exact: few bits
	if x < middle || x == middle && (above-1)%2 == 0 {
		above--
	}
	return sign | uint32(above)
}

// bytesOf and codesOf are a type's codes in memory.
func bytesOf(size int64, codes ...uint32) []byte {
	var b []byte
	for _, c := range codes {
		b = append(b, binary.LittleEndian.AppendUint32(nil, c)[:size]...)
	}
	return b
}

func codesOf(size int64, b []byte) []uint32 {
	var codes []uint32
	for ; len(b) > 0; b = b[size:] {
		codes = append(codes, binary.LittleEndian.Uint32(append(bytes.Clone(b[:size]), 0, 0, 0)))
	}
	return codes
}

func convertCodes(t interface {
	Helper()
	Fatal(...any)
}, to, from page.DType, codes []uint32,
) []uint32 {
	t.Helper()
	src := bytesOf(from.Bytes(), codes...)
	dst := make([]byte, int64(len(codes))*to.Bytes())
	if err := Convert(dst, to, src, from); err != nil {
		t.Fatal(err)
	}
	return codesOf(to.Bytes(), dst)
}

func all(n uint32) []uint32 {
	list := make([]uint32, n)
	for i := range list {
		list[i] = uint32(i)
	}
	return list
}

// Every code of every type below fp32 is the number that its standard says, and
// comes back as the same code, NaN as some NaN of its sign.
func TestEveryCode(t *testing.T) {
	for _, d := range definitions() {
		t.Run(d.dtype.String(), func(t *testing.T) {
			wide := convertCodes(t, page.FP32, d.dtype, all(d.codes()))
			back := convertCodes(t, d.dtype, page.FP32, wide)
			for code, bits := range wide {
				want, got := d.value(uint32(code)), float64(math.Float32frombits(bits))
				negative := uint32(code) >= d.codes()/2
				if math.IsNaN(want) {
					if !math.IsNaN(got) || math.Signbit(got) != negative {
						t.Fatalf("%#x is %v, want NaN", code, got)
					}
					again := d.value(back[code])
					if !math.IsNaN(again) || (back[code] >= d.codes()/2) != negative {
						t.Fatalf("NaN %#x comes back as %#x", code, back[code])
					}
					continue
				}
				if got != want || math.Signbit(got) != math.Signbit(want) {
					t.Fatalf("%#x is %v, want %v", code, got, want)
				}
				if back[code] != uint32(code) {
					t.Fatalf("%#x comes back as %#x", code, back[code])
				}
			}
		})
	}
}

// inputs are fp32 numbers of all kinds: ties between any two codes and what is
// next to them, the borders of the type, random bits, random numbers of the
// size that the type holds.
func (n nearest) inputs() []uint32 {
	r := rand.New(rand.NewPCG(4, 0))
	numbers := []float32{0, math.SmallestNonzeroFloat32, math.MaxFloat32, float32(math.Inf(1)), 0x1p-126, 0x1p-149, 0x0.fffffep-126}
	step := max(1, len(n.values)/4096)
	for i := 0; i+1 < len(n.values); i++ {
		if i%step != 0 && i > 512 && i < len(n.values)-512 {
			continue
		}
		numbers = append(numbers, float32(n.values[i]), float32((n.values[i]+n.values[i+1])/2))
	}
	var bits []uint32
	for _, f := range numbers {
		b := math.Float32bits(f)
		for _, near := range []uint32{b - 1, b, b + 1} {
			if near < 1<<31 {
				bits = append(bits, near, near|1<<31)
			}
		}
	}
	largest := n.values[len(n.values)-1]
	for range 200_000 {
		bits = append(bits, r.Uint32(), math.Float32bits(float32(r.NormFloat64())), math.Float32bits(float32(r.NormFloat64()*largest/2)),
			math.Float32bits(float32(r.NormFloat64()*n.values[1]*4)))
	}
	return bits
}

func TestRoundsToTheNearest(t *testing.T) {
	for _, d := range definitions() {
		t.Run(d.dtype.String(), func(t *testing.T) {
			n := d.nearest()
			in := n.inputs()
			for i, got := range convertCodes(t, d.dtype, page.FP32, in) {
				x := float64(math.Float32frombits(in[i]))
				if math.IsNaN(x) {
					if !math.IsNaN(d.value(got)) || got>>(d.exponent+d.fraction) != in[i]>>31 {
						t.Fatalf("NaN %#x becomes %#x", in[i], got)
					}
					continue
				}
				if want := n.code(x); got != want {
					t.Fatalf("%v (%#x) becomes %#x, want %#x", x, in[i], got, want)
				}
			}
		})
	}
}

// What others publish of these types, so that no error is made twice, here and
// in the definitions above.
func TestKnownNumbers(t *testing.T) {
	inf := float32(math.Inf(1))
	for _, tt := range []struct {
		dtype page.DType
		in    float32
		want  uint32
	}{
		{page.BF16, 1, 0x3f80},
		{page.BF16, 3.140625, 0x4049},
		{page.BF16, math.MaxFloat32, 0x7f80},
		{page.BF16, -inf, 0xff80},
		{page.FP16, 1, 0x3c00},
		{page.FP16, -2, 0xc000},
		{page.FP16, 65504, 0x7bff},
		{page.FP16, 65519.996, 0x7bff},
		{page.FP16, 65520, 0x7c00},
		{page.FP16, 0x1p-14, 0x0400},
		{page.FP16, 0x1p-24, 0x0001},
		{page.FP16, 0x1p-25, 0x0000},
		{page.FP16, 0x1.000002p-25, 0x0001},
		{page.FP8E4M3, 1, 0x38},
		{page.FP8E4M3, 448, 0x7e},
		{page.FP8E4M3, 464, 0x7e}, // halfway to 480, which is not there, and even
		{page.FP8E4M3, 464.00003, 0x7f},
		{page.FP8E4M3, 480, 0x7f},
		{page.FP8E4M3, inf, 0x7f},
		{page.FP8E4M3, -inf, 0xff},
		{page.FP8E4M3, 0x1p-6, 0x08},
		{page.FP8E4M3, 0x1p-9, 0x01},
		{page.FP8E4M3, 0x1p-10, 0x00},
		{page.FP8E4M3, float32(math.Copysign(0, -1)), 0x80},
		{page.FP8E5M2, 1, 0x3c},
		{page.FP8E5M2, 57344, 0x7b},
		{page.FP8E5M2, 61439.996, 0x7b},
		{page.FP8E5M2, 61440, 0x7c},
		{page.FP8E5M2, -inf, 0xfc},
		{page.FP8E5M2, 0x1p-14, 0x04},
		{page.FP8E5M2, 0x1p-16, 0x01},
	} {
		if got := convertCodes(t, tt.dtype, page.FP32, []uint32{math.Float32bits(tt.in)})[0]; got != tt.want {
			t.Errorf("%v as %v is %#x, want %#x", tt.in, tt.dtype, got, tt.want)
		}
	}
}

// Between any two types, for all codes: as if by way of fp32, and bit for bit
// if the types are equal.
func TestBetweenTypes(t *testing.T) {
	for _, from := range definitions() {
		codes := all(from.codes())
		wide := convertCodes(t, page.FP32, from.dtype, codes)
		for _, to := range dtypes() {
			want := convertCodes(t, to, page.FP32, wide)
			if to == from.dtype {
				want = codes
			}
			for i, got := range convertCodes(t, to, from.dtype, codes) {
				if got != want[i] {
					t.Fatalf("%v %#x to %v: %#x, want %#x", from.dtype, i, to, got, want[i])
				}
			}
		}
	}
	nans := []uint32{0x7f800001, 0xff812345, 0x7fffffff, 0x7fc00000}
	for i, got := range convertCodes(t, page.FP32, page.FP32, nans) {
		if got != nans[i] {
			t.Errorf("fp32 NaN %#x is copied as %#x", nans[i], got)
		}
	}
}

// The payload of a NaN is kept in fp32, also that of a signaling one; every
// other type is given one NaN of each sign.
func TestPayloadsOfNaN(t *testing.T) {
	for _, tt := range []struct {
		from       page.DType
		code, want uint32
	}{
		{page.BF16, 0x7f81, 0x7f810000},
		{page.BF16, 0xffc5, 0xffc50000},
		{page.FP16, 0x7c01, 0x7f802000},
		{page.FP16, 0xfe01, 0xffc02000},
		{page.FP8E5M2, 0x7d, 0x7fa00000},
		{page.FP8E4M3, 0x7f, 0x7ff00000},
	} {
		if got := convertCodes(t, page.FP32, tt.from, []uint32{tt.code})[0]; got != tt.want {
			t.Errorf("%v %#x is %#x, want %#x", tt.from, tt.code, got, tt.want)
		}
	}
	for to, want := range map[page.DType]uint32{page.BF16: 0x7fc0, page.FP16: 0x7e00, page.FP8E4M3: 0x7f, page.FP8E5M2: 0x7f} {
		sign := uint32(1) << (8*to.Bytes() - 1)
		got := convertCodes(t, to, page.FP32, []uint32{0x7f800001, 0x7fabcdef, 0xffffffff})
		if got[0] != want || got[1] != want || got[2] != want|sign {
			t.Errorf("NaN of fp32 in %v: %#x, want %#x", to, got, want)
		}
	}
}

func TestConvertOfManyIsOneByOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		from, to := rapid.SampledFrom(dtypes()).Draw(t, "from"), rapid.SampledFrom(dtypes()).Draw(t, "to")
		n := rapid.SampledFrom([]int64{0, 1, 2, 255, 256, 257, 512, 1000}).Draw(t, "elements")
		src := noise(n*from.Bytes(), rapid.Uint64().Draw(t, "numbers"))
		dst := noise(n*to.Bytes()+3, 1)
		want := bytes.Clone(dst)
		for i := range n {
			if err := Convert(want[i*to.Bytes():], to, src[i*from.Bytes():][:from.Bytes()], from); err != nil {
				t.Fatal(err)
			}
		}
		if err := Convert(dst, to, src, from); err != nil || !bytes.Equal(dst, want) {
			t.Fatalf("%d of %v to %v: other bytes than one by one, error %v", n, from, to, err)
		}
	})
}

func TestConvertRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		to, from page.DType
		dst, src int
		want     error
	}{
		"fits":              {page.FP32, page.BF16, 8, 4, nil},
		"nothing":           {page.FP32, page.BF16, 0, 0, nil},
		"no room":           {page.FP32, page.BF16, 7, 4, ErrInvalid},
		"no room to copy":   {page.BF16, page.BF16, 3, 4, ErrInvalid},
		"half an element":   {page.FP32, page.BF16, 8, 3, ErrInvalid},
		"half, equal types": {page.FP32, page.FP32, 8, 6, ErrInvalid},
		"unknown target":    {0, page.BF16, 8, 4, ErrInvalid},
		"unknown source":    {page.BF16, 6, 8, 4, ErrInvalid},
		"twice unknown":     {9, 9, 8, 4, ErrInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			dst := noise(int64(tt.dst), 1)
			before := bytes.Clone(dst)
			if err := Convert(dst, tt.to, make([]byte, tt.src), tt.from); !errors.Is(err, tt.want) {
				t.Errorf("error is %v, want %v", err, tt.want)
			}
			if tt.want != nil && !bytes.Equal(dst, before) {
				t.Error("a refused conversion changed the target")
			}
		})
	}
}

func BenchmarkConvert(b *testing.B) {
	const elements = 1 << 20
	r := rand.New(rand.NewPCG(1, 0))
	plain := make([]uint32, elements)
	for i := range plain {
		plain[i] = math.Float32bits(float32(r.NormFloat64()))
	}
	for _, from := range dtypes() {
		src := bytesOf(from.Bytes(), convertCodes(b, from, page.FP32, plain)...)
		for _, to := range dtypes() {
			dst := make([]byte, elements*to.Bytes())
			b.Run(from.String()+"/"+to.String(), func(b *testing.B) {
				b.SetBytes(int64(len(src)))
				for b.Loop() {
					if err := Convert(dst, to, src, from); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/elements, "ns/element")
			})
		}
	}
}
