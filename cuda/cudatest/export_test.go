package cudatest

import "testing"

// Driver compiles testdata/driver.c with the library's sources into a program in dir.
func Driver(tb testing.TB, dir string, flags ...string) string {
	tb.Helper()
	if _, err := Build(); err != nil {
		tb.Skip(err)
	}
	s, err := source(nil)
	if err != nil {
		tb.Fatal(err)
	}
	program, err := s.Program(dir, "testdata/driver.c", flags...)
	if err != nil {
		tb.Fatal(err)
	}
	return program
}

// Variants and Choose are what KVFERRY_CUDA_VARIANT can name, and does.
var (
	Variants = variants
	Choose   = choose
)
