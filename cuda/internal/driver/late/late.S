/* One entry point a name of names.def: a slot, at first of late_unbound, and a
 * jump through it, which leaves every argument where it is. */
	.macro entry name
	.globl \name
	.type \name, %function
	.globl late_slot_\name
	.hidden late_slot_\name
	.text
	.p2align 4
\name:
#if defined(__x86_64__)
	endbr64
	jmp *late_slot_\name(%rip)
#elif defined(__aarch64__)
	hint #34 /* bti c */
	adrp x16, late_slot_\name
	ldr x16, [x16, :lo12:late_slot_\name]
	br x16
#else
#error "entry points are written for x86_64 and aarch64"
#endif
	.size \name, .-\name
	.data
	.p2align 3
late_slot_\name:
	.quad late_unbound
	.endm

#define X(name) entry name
#include "names.def"

	.section .note.GNU-stack,"",%progbits
