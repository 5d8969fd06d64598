package main

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/cobra/doc"
)

var update = flag.Bool("update", false, "write docs/cli")

// TestDocs keeps docs/cli as the commands say it; -update writes it.
func TestDocs(t *testing.T) {
	const dir = "../../docs/cli"
	root := newRoot()
	root.InitDefaultCompletionCmd()
	root.DisableAutoGenTag = true
	fresh := t.TempDir()
	if err := doc.GenMarkdownTree(root, fresh); err != nil {
		t.Fatal(err)
	}
	pages, err := filepath.Glob(filepath.Join(fresh, "*.md"))
	if err != nil || len(pages) == 0 {
		t.Fatalf("pages: %v %v", pages, err)
	}
	if *update {
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, page := range pages {
		want, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, filepath.Base(page))
		if *update {
			if err := os.WriteFile(path, want, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if have, err := os.ReadFile(path); err != nil || !bytes.Equal(have, want) {
			t.Errorf("%s is not what the command says (run go test ./cmd/kvferry -run TestDocs -update): %v", path, err)
		}
	}
	have, err := filepath.Glob(filepath.Join(dir, "*.md"))
	if err != nil || len(have) != len(pages) {
		t.Errorf("%s has %d pages, the commands have %d: %v", dir, len(have), len(pages), err)
	}
}
