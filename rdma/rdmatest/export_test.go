package rdmatest

import "testing"

// Driver compiles testdata/driver.c with the library's sources into a program.
func Driver(tb testing.TB, flags ...string) string {
	tb.Helper()
	if _, err := Build(); err != nil {
		tb.Skip(err)
	}
	s, err := source()
	if err != nil {
		tb.Fatal(err)
	}
	program, err := s.Program(tb.TempDir(), "testdata/driver.c", flags...)
	if err != nil {
		tb.Fatal(err)
	}
	return program
}
