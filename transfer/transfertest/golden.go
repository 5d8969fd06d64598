package transfertest

import (
	"encoding/hex"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Golden compares b with testdata/NAME.golden, which has it as hexadecimal, 32
// bytes a line; with update it writes that file anew.
func Golden(t testing.TB, name string, b []byte, update bool) {
	t.Helper()
	var text strings.Builder
	for line := range slices.Chunk(b, 32) {
		text.WriteString(hex.EncodeToString(line) + "\n")
	}
	path := filepath.Join("testdata", name+".golden")
	if update {
		if err := os.WriteFile(path, []byte(text.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if text.String() != string(want) {
		t.Errorf("%s is\n%swant\n%s", name, &text, want)
	}
}
