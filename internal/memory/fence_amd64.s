#include "textflag.h"

// func fenceStore()
//
// The swap is XCHG, a full barrier for every kind of store.
TEXT ·fenceStore(SB), NOSPLIT, $0-0
	RET

// func fenceLoad()
//
// Plain loads are in order by themselves. LFENCE is for those that need not
// be: string moves and streaming loads. SFENCE drains the non-temporal stores
// of a copy before whoever is told of it can look. MFENCE would also wait for
// plain stores, which nobody needs.
TEXT ·fenceLoad(SB), NOSPLIT, $0-0
	SFENCE
	LFENCE
	RET
