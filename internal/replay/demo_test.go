package replay

import (
	"bytes"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write configs/traces/demo.jsonl anew")

// Of configs/local.yaml, for which the demo is made.
const (
	demoTokenBytes = 1 << 10
	demoMostBytes  = 256 << 20
)

// TestDemoTrace holds the shipped trace to what makes it, and to its bounds.
func TestDemoTrace(t *testing.T) {
	path := filepath.Join("..", "..", "configs", "traces", "demo.jsonl")
	want := demoTrace()
	if *update {
		if err := os.WriteFile(path, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(have, want) {
		t.Errorf("%s is not what demoTrace makes: go test ./internal/replay -run TestDemoTrace -update", path)
	}
	requests, err := ReadTraceFile(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	var all, shared int
	prefix := make(map[int64]bool)
	for _, r := range requests {
		all += r.Input + r.Output
		if prefix[r.Hashes[0]] {
			shared++
		}
		prefix[r.Hashes[0]] = true
	}
	if n := int64(all) * demoTokenBytes; n > demoMostBytes || n < demoMostBytes/2 {
		t.Errorf("demo has %d bytes of KV, want at most %d and at least half of it", n, demoMostBytes)
	}
	if shared < len(requests)/2 {
		t.Errorf("%d of %d requests share a prefix with an earlier one, want half", shared, len(requests))
	}
}

// demoTrace is a handful of conversations in Mooncake's public format: every
// turn has all earlier ones in front, and all begin with one system prompt.
func demoTrace() []byte {
	const (
		requests      = 64
		conversations = 10
		system        = 1 // leading blocks that all have
		longest       = 8000
	)
	r := rand.New(rand.NewPCG(20, 26))
	between := func(low, high float64) int { // evenly on a logarithmic scale
		return int(low * math.Pow(high/low, r.Float64()))
	}
	type conversation struct {
		tokens int
		blocks []int64
	}
	next := int64(system)
	fresh := func() conversation {
		c := conversation{tokens: between(100, 5000)}
		for id := range int64(system) {
			c.blocks = append(c.blocks, id)
		}
		return c
	}
	var open []conversation
	for range conversations {
		open = append(open, fresh())
	}
	var out bytes.Buffer
	timestamp := 0
	for range requests {
		i := r.IntN(len(open))
		c := &open[i]
		blocks := (c.tokens-1)/blockTokens + 1
		ids := append([]int64(nil), c.blocks[:min(blocks, len(c.blocks))]...)
		for len(ids) < blocks {
			ids = append(ids, next)
			next++
		}
		output := between(8, 300)
		text := strings.ReplaceAll(fmt.Sprint(ids), " ", ", ")
		fmt.Fprintf(&out, `{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": %s}`+"\n", timestamp, c.tokens, output, text)
		timestamp += between(20, 900)
		// The next turn keeps the whole blocks of this one.
		c.blocks = ids[:max(system, c.tokens/blockTokens)]
		if c.tokens += output + between(50, 2400); c.tokens > longest {
			*c = fresh()
		}
	}
	return out.Bytes()
}
