#include "textflag.h"

// func copyLines512(dst, src *byte, ahead uintptr, n int)
TEXT ·copyLines512(SB), NOSPLIT, $0-32
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ ahead+16(FP), DX
	MOVQ n+24(FP), CX

line:
	PREFETCHT1 (DX)
	VMOVDQU64  (SI), Z0
	VMOVNTDQ   Z0, (DI)
	ADDQ       $64, SI
	ADDQ       $64, DX
	ADDQ       $64, DI
	DECQ       CX
	JNZ        line
	VZEROUPPER
	RET

// func copyLines256(dst, src *byte, ahead uintptr, n int)
TEXT ·copyLines256(SB), NOSPLIT, $0-32
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ ahead+16(FP), DX
	MOVQ n+24(FP), CX

line:
	PREFETCHT1 (DX)
	VMOVDQU    (SI), Y0
	VMOVDQU    32(SI), Y1
	VMOVNTDQ   Y0, (DI)
	VMOVNTDQ   Y1, 32(DI)
	ADDQ       $64, SI
	ADDQ       $64, DX
	ADDQ       $64, DI
	DECQ       CX
	JNZ        line
	VZEROUPPER
	RET

// func storeFence()
TEXT ·storeFence(SB), NOSPLIT, $0-0
	SFENCE
	RET
