// Package memory holds the memory that peers read: mapped regions, never the
// Go heap, and the seal table that guards them.
//
// A [Region] is a memfd: its descriptor can be handed to another process
// ([SendFile]), which maps the same bytes ([Map]). It is sealed, so that
// nobody can make it shorter under a reader, and every byte of it is allocated
// before New returns, so that a later touch cannot end the process. What the
// machine can't give is refused before it is asked for, with [ErrLimit].
//
// A [SealTable] is a region of 64-bit words. The barriers that make a word
// speak for the bytes of other regions are assembly, one file a processor.
//
// The package decides nothing about who writes where. It imports no network:
// descriptors are handed over through syscall.Conn.
package memory

import "errors"

// ErrLimit is wrapped when a limit of the machine is too low; the text says
// what was wanted, what there is, and what to set.
var ErrLimit = errors.New("limit of this machine")
