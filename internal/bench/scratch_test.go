package bench

import (
	"os"
	"path/filepath"
	"testing"
)

func TestScratchOfTheDeadIsSwept(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	dead := filepath.Join(tmp, scratchPrefix+"-dead")
	if err := os.MkdirAll(filepath.Join(dead, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dead, "memcpy.c"), memcpySource, 0o600); err != nil {
		t.Fatal(err)
	}
	// Neither a file, nor what a link names, nor the directory of another program.
	elsewhere := t.TempDir()
	if err := os.Symlink(elsewhere, filepath.Join(tmp, scratchPrefix+"-link")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(tmp, scratchPrefix+".svg"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(tmp, "other"), 0o700); err != nil {
		t.Fatal(err)
	}

	first, err := newScratch()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(first.path, "in use"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	second, err := newScratch() // a lock is of an open file, so this could be another process
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dead); !os.IsNotExist(err) {
		t.Errorf("that of the dead: %v", err)
	}
	for _, kept := range []string{
		filepath.Join(first.path, "in use"), second.path, elsewhere,
		filepath.Join(tmp, scratchPrefix+"-link"), filepath.Join(tmp, scratchPrefix+".svg"), filepath.Join(tmp, "other"),
	} {
		if _, err := os.Lstat(kept); err != nil {
			t.Error(err)
		}
	}
	for _, s := range []*scratch{first, second, nil} {
		if err := s.close(); err != nil {
			t.Error(err)
		}
	}
	if left, err := filepath.Glob(filepath.Join(tmp, scratchPrefix+"*")); err != nil || len(left) != 2 {
		t.Errorf("left: %v, %v", left, err)
	}
}
