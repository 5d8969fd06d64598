package rdma

import (
	"os"
	"strings"
	"testing"
)

// Whoever looks for what an error says finds it in the page for operators.
func TestStatusesAreExplained(t *testing.T) {
	page, err := os.ReadFile("../docs/rdma.md") // scripts/test-binaries.sh takes it along
	if err != nil {
		t.Fatal(err)
	}
	_, table, ok := strings.Cut(string(page), "## What errors mean")
	if !ok {
		t.Fatal("the page has no such section")
	}
	for s := StatusSuccess + 1; s <= StatusGeneralErr; s++ {
		if s.hint() != "" && !strings.Contains(table, s.String()) {
			t.Errorf("status %d, %q, is not explained", int(s), s)
		}
	}
}
