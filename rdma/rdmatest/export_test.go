package rdmatest

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// Driver compiles testdata/driver.c with the library's sources into a program.
func Driver(tb testing.TB, flags ...string) string {
	tb.Helper()
	compiler, err := compiler()
	if err != nil {
		tb.Skip(err)
	}
	dir := tb.TempDir()
	sources, err := writeSources(dir)
	if err != nil {
		tb.Fatal(err)
	}
	driver, err := filepath.Abs("testdata/driver.c")
	if err != nil {
		tb.Fatal(err)
	}
	program := filepath.Join(dir, "driver")
	cmd := exec.CommandContext(tb.Context(), compiler, append(append([]string{"-std=gnu11", "-g", "-Wall", "-Wno-unused-result", "-o", program, driver}, flags...), sources...)...)
	cmd.Dir = dir
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		tb.Fatal(err)
	}
	return program
}
