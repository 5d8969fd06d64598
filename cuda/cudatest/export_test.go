package cudatest

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// Driver compiles testdata/driver.c with the library's sources into a program in dir.
func Driver(tb testing.TB, dir string, flags ...string) string {
	tb.Helper()
	compiler, err := compiler()
	if err != nil {
		tb.Skip(err)
	}
	files, err := sources(nil)
	if err != nil {
		tb.Fatal(err)
	}
	if err := write(dir, files); err != nil {
		tb.Fatal(err)
	}
	driver, err := filepath.Abs("testdata/driver.c")
	if err != nil {
		tb.Fatal(err)
	}
	args := append([]string{"-std=gnu11", "-g", "-Wall", "-I.", "-o", "driver", driver}, flags...)
	for name := range files {
		if filepath.Ext(name) == ".c" {
			args = append(args, name)
		}
	}
	cmd := exec.CommandContext(tb.Context(), compiler, append(args, "-pthread", "-ldl")...)
	cmd.Dir = dir
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		tb.Fatal(err)
	}
	return filepath.Join(dir, "driver")
}

// Variants and Choose are what KVFERRY_CUDA_VARIANT can name, and does.
var (
	Variants = variants
	Choose   = choose
)
