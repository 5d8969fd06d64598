package kv

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/kvferry/kvferry/internal/page"
)

// Convert turns the elements in src, of type from, into elements of type to at
// the beginning of dst. Elements lie as little-endian bytes, one after the
// other. Between equal types it copies bytes. Else it goes through fp32 and
// rounds to nearest, ties to even:
//
//   - bf16, fp16 and fp8_e5m2 follow IEEE 754: what rounds to more than the
//     largest finite number becomes an infinity, and subnormals are kept.
//   - fp8_e4m3 is the OCP format, known as e4m3fn. It has no infinities: an
//     infinity, and what rounds to more than 448, becomes NaN. It does not
//     saturate. This is what a cast in PyTorch gives.
//   - NaN stays NaN and keeps its sign. Its payload is kept in fp32; every other
//     type has one NaN of each sign.
//
// dst and src must not overlap unless the types are equal.
func Convert(dst []byte, to page.DType, src []byte, from page.DType) error {
	for _, t := range [...]page.DType{to, from} {
		if t.Bytes() == 0 {
			return fmt.Errorf("convert: %v is unknown: %w", t, ErrInvalid)
		}
	}
	n := len(src) / int(from.Bytes())
	if n*int(from.Bytes()) != len(src) {
		return fmt.Errorf("convert: %d bytes are not whole elements of %v: %w", len(src), from, ErrInvalid)
	}
	want := n * int(to.Bytes())
	if len(dst) < want {
		return fmt.Errorf("convert %d elements of %v to %v: room for %d bytes, want %d: %w", n, from, to, len(dst), want, ErrInvalid)
	}
	convert(dst[:want], to, src, from)
	return nil
}

// convert is [Convert] of known types and exactly as many elements in dst as in
// src.
func convert(dst []byte, to page.DType, src []byte, from page.DType) {
	if to == from {
		copy(dst, src)
		return
	}
	var bits [256]uint32 // of fp32; as integers, lest a signaling NaN be touched
	for len(src) > 0 {
		n := min(len(bits), len(src)/int(from.Bytes()))
		decode(bits[:n], src, from)
		encode(dst, to, bits[:n])
		src, dst = src[n*int(from.Bytes()):], dst[n*int(to.Bytes()):]
	}
}

// decode fills bits from the beginning of src.
func decode(bits []uint32, src []byte, from page.DType) {
	switch from {
	case page.FP32:
		for i := range bits {
			bits[i] = binary.LittleEndian.Uint32(src[4*i:])
		}
	case page.BF16:
		for i := range bits {
			bits[i] = uint32(binary.LittleEndian.Uint16(src[2*i:])) << 16
		}
	case page.FP16:
		f := fp16()
		for i := range bits {
			bits[i] = f.decode(uint32(binary.LittleEndian.Uint16(src[2*i:])))
		}
	case page.FP8E4M3:
		f := fp8e4m3()
		for i := range bits {
			bits[i] = f.decode(uint32(src[i]))
		}
	case page.FP8E5M2:
		f := fp8e5m2()
		for i := range bits {
			bits[i] = f.decode(uint32(src[i]))
		}
	}
}

// encode writes bits to the beginning of dst.
func encode(dst []byte, to page.DType, bits []uint32) {
	switch to {
	case page.FP32:
		for i, b := range bits {
			binary.LittleEndian.PutUint32(dst[4*i:], b)
		}
	case page.BF16:
		for i, b := range bits {
			binary.LittleEndian.PutUint16(dst[2*i:], bf16(b))
		}
	case page.FP16:
		f := fp16()
		for i, b := range bits {
			binary.LittleEndian.PutUint16(dst[2*i:], uint16(f.encode(b)))
		}
	case page.FP8E4M3:
		f := fp8e4m3()
		for i, b := range bits {
			dst[i] = byte(f.encode(b))
		}
	case page.FP8E5M2:
		f := fp8e5m2()
		for i, b := range bits {
			dst[i] = byte(f.encode(b))
		}
	}
}

// Of fp32.
const (
	signBit  = 1 << 31
	infinity = 0x7f800000
	fraction = 23 // bits
	bias     = 127
)

// bf16 is the upper half of an fp32, so a carry out of the rounding does what
// it should everywhere: to the next exponent, from subnormal to normal, and to
// infinity.
func bf16(bits uint32) uint16 {
	if bits&^signBit > infinity {
		return uint16(bits>>16)&0x8000 | 0x7fc0
	}
	return uint16((bits + 0x7fff + bits>>16&1) >> 16)
}

// format is a float of at most 16 bits with a smaller exponent than fp32.
type format struct {
	width    uint32 // bits
	fraction uint32 // bits
	bias     uint32 // of the exponent
	top      uint32 // the first code above the finite ones: infinity, or the only NaN
	nan      uint32 // the code that every NaN becomes
}

func fp16() format    { return format{width: 16, fraction: 10, bias: 15, top: 0x7c00, nan: 0x7e00} }
func fp8e5m2() format { return format{width: 8, fraction: 2, bias: 15, top: 0x7c, nan: 0x7f} }
func fp8e4m3() format { return format{width: 8, fraction: 3, bias: 7, top: 0x7f, nan: 0x7f} }

// decode gives the same number in fp32.
func (f format) decode(code uint32) uint32 {
	sign := code >> (f.width - 1) << 31
	code &^= 1 << (f.width - 1)
	up := fraction - f.fraction
	switch {
	case code >= f.top:
		return sign | infinity | code<<up
	case code >= 1<<f.fraction:
		return sign | (code<<up + (bias-f.bias)<<fraction)
	}
	// Subnormal: a multiple of the smallest number. Nothing here is subnormal in
	// fp32, so that no mode of the processor can flush it to zero.
	smallest := math.Float32frombits((bias - f.bias + 1 - f.fraction) << fraction)
	return sign | math.Float32bits(float32(code)*smallest)
}

// encode rounds fp32 to the nearest code, ties to even.
func (f format) encode(bits uint32) uint32 {
	sign := bits >> 31 << (f.width - 1)
	bits &^= signBit
	down := fraction - f.fraction
	lowest := bias + 1 - f.bias // exponent of the smallest normal number, as fp32 has it
	switch exponent := bits >> fraction; {
	case bits > infinity:
		return sign | f.nan
	case exponent >= lowest:
		bits -= (lowest - 1) << fraction
	default:
		// Subnormal: as many bits are lost more as the exponent is lower. The
		// subnormal numbers of fp32 are so low that nothing is left of them.
		down += lowest - exponent
		bits = bits&(1<<fraction-1) | 1<<fraction
	}
	return sign | min(f.top, (bits+1<<(down-1)-1+bits>>down&1)>>down)
}
