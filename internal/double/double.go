// Package double is what emulated libraries have in common: libraries in C that
// stand in for those of a driver in tests, in any number of processes, with faults
// that are set from Go.
//
// [Source.Build] compiles one, once for all processes of a machine. A [Control] is
// the file that all processes of a test map. What is in it is written down in Go
// alone: the library's header is made of those types ([Header]), so that the two
// sides cannot differ. What a library does, which faults it knows, and what it
// counts is its own.
package double

import "errors"

// ErrUnavailable is wrapped when this machine cannot build a library, or cannot run
// it; the text says what is missing.
var ErrUnavailable = errors.New("an emulated library is not available")
