package cudatest

import (
	"embed"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/kvferry/kvferry/cuda/internal/driver"
	"github.com/kvferry/kvferry/internal/double"
)

//go:embed library
var library embed.FS

// Build compiles the emulated driver as [double.Source.Build] does, and returns the
// path of its libcuda.so.1. A program that opens it without a [World] finds one
// device of 1 GiB and no faults. The error wraps [double.ErrUnavailable] if this
// machine has no C compiler.
func Build() (path string, err error) { return build(nil) }

// build builds the library without the entry points that are hidden.
func build(hide []string) (string, error) {
	s, err := source(hide)
	if err != nil {
		return "", err
	}
	return s.Build()
}

var prototype = regexp.MustCompile(`(?m)^CUresult (cu[A-Z]\w*)\(`)

// calls are the entry points of the header, in its order.
//
//nolint:gochecknoglobals // read out of the header once
var calls = sync.OnceValue(func() []string {
	var names []string
	for _, m := range prototype.FindAllStringSubmatch(driver.Header, -1) {
		names = append(names, m[1])
	}
	return names
})

// source is all that the library is made of: its own files, the header, and what is
// made here: the layout of a world, the names of all calls, a weak function for each
// that says "not supported", and what is exported.
func source(hide []string) (double.Source, error) {
	for _, name := range hide {
		if !slices.Contains(calls(), name) {
			return double.Source{}, fmt.Errorf("build the emulated driver: hide %q: the header has no such call", name)
		}
	}
	var names, stubs, exports strings.Builder
	stubs.WriteString("int unsupported(int *call, const char *name);\n")
	exports.WriteString("{\nglobal:\n")
	for _, name := range calls() {
		fmt.Fprintf(&names, "CALL(%s)\n", name)
		fmt.Fprintf(&stubs, "__attribute__((weak)) int %[1]s(void) { static int call; return unsupported(&call, \"%[1]s\"); }\n", name)
		if !slices.Contains(hide, name) {
			fmt.Fprintf(&exports, "\t%s;\n", name)
		}
	}
	exports.WriteString("local:\n\t*;\n};\n")
	s := double.Source{Name: "cuda-double", Soname: "libcuda.so.1", Packages: "gcc libc6-dev", Files: map[string]string{
		"cuda.h":      driver.Header,
		"control.h":   header(),
		"calls.h":     names.String(),
		"stubs.c":     stubs.String(),
		"exports.map": exports.String(),
	}}
	return s, s.Add(library, "library")
}
