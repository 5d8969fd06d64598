#include "textflag.h"

// func fenceStore()
//
// DMB ISH: the swap releases and acquires, but a later plain store may still
// pass its store half.
TEXT ·fenceStore(SB), NOSPLIT, $0-0
	DMB $0xb
	RET

// func fenceLoad()
//
// DMB ISHLD: a load-acquire of the word orders what follows it, not the loads
// of the copy before it. It orders the copy's loads before later stores too;
// DMB ISHST orders its stores, STNP included, before later ones.
TEXT ·fenceLoad(SB), NOSPLIT, $0-0
	DMB $0x9
	DMB $0xa
	RET
