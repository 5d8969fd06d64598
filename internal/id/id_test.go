package id_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
)

func TestValidate(t *testing.T) {
	type validator interface{ Validate() error }
	long := func(n int) string { return strings.Repeat("x", n) }
	for name, tt := range map[string]struct {
		name validator
		ok   bool
	}{
		"node":                       {id.Node("prefill-1.Rack_7"), true},
		"node of one byte":           {id.Node("a"), true},
		"longest node":               {id.Node(long(64)), true},
		"node too long":              {id.Node(long(65)), false},
		"empty node":                 {id.Node(""), false},
		"node with a space":          {id.Node("a b"), false},
		"node with a slash":          {id.Node("a/b"), false},
		"node with a newline":        {id.Node("a\n"), false},
		"node with NUL":              {id.Node("a\x00"), false},
		"node with an umlaut":        {id.Node("knötchen"), false},
		"node that is not UTF-8":     {id.Node("\xff"), false},
		"group":                      {id.Group("rack-7"), true},
		"empty group":                {id.Group(""), false},
		"group with a colon":         {id.Group("rack:7"), false},
		"request":                    {id.Request("chatcmpl-1/ü b"), true},
		"longest request":            {id.Request(long(256)), true},
		"request too long":           {id.Request(long(257)), false},
		"longest request in runes":   {id.Request(strings.Repeat("ü", 128)), true},
		"request too long in bytes":  {id.Request(strings.Repeat("ü", 129)), false},
		"empty request":              {id.Request(""), false},
		"request with a newline":     {id.Request("a\nb"), false},
		"request with an escape":     {id.Request("\x1b[31mred"), false},
		"request with a C1 control":  {id.Request("a\u0085"), false},
		"label with NUL":             {id.Label("a\x00"), false},
		"graph node with DEL":        {id.GraphNode("a\x7f"), false},
		"walk with a tab":            {id.Walk("a\tb"), false},
		"request that is not UTF-8":  {id.Request("a\xc3"), false},
		"main":                       {id.Main, true},
		"longest label":              {id.Label(long(64)), true},
		"label too long":             {id.Label(long(65)), false},
		"empty label":                {id.Label(""), false},
		"label that is not UTF-8":    {id.Label("\x80"), false},
		"first rank":                 {id.Rank(0), true},
		"last rank":                  {id.Rank(63), true},
		"rank below":                 {id.Rank(-1), false},
		"rank above":                 {id.Rank(64), false},
		"no graph node":              {id.GraphNode(""), true},
		"longest graph node":         {id.GraphNode(long(256)), true},
		"graph node too long":        {id.GraphNode(long(257)), false},
		"no walk":                    {id.Walk(""), true},
		"walk that is not UTF-8":     {id.Walk("\xfe"), false},
		"a megabyte of request":      {id.Request(long(1 << 20)), false},
		"a megabyte of node, quoted": {id.Node(strings.Repeat("\xff", 1<<20)), false},
	} {
		t.Run(name, func(t *testing.T) {
			err := tt.name.Validate()
			if (err == nil) != tt.ok {
				t.Fatalf("Validate() = %v, want ok %v", err, tt.ok)
			}
			if err != nil && !errors.Is(err, id.ErrInvalid) {
				t.Errorf("Validate() = %v, want it to wrap ErrInvalid", err)
			}
			if err != nil && len(err.Error()) > 500 {
				t.Errorf("the error has %d bytes, it must not repeat the whole name", len(err.Error()))
			}
		})
	}
}

// The vectors come from sha256sum(1).
func TestHash(t *testing.T) {
	for name, want := range map[id.Node]id.NodeHash{
		"prefill-1": 0xdd3574eed068df0a,
		"abc":       0xba7816bf8f01cfea,
	} {
		if got := name.Hash(); got != want {
			t.Errorf("Node(%q).Hash() = %#x, want %#x", name, got, want)
		}
	}
	for name, want := range map[id.Request]string{
		"req-1": "9456bdfa12ea76959c94a3572f5d91c7",
		"abc":   "ba7816bf8f01cfea414140de5dae2223",
	} {
		if got := fmt.Sprintf("%x", name.Hash()); got != want {
			t.Errorf("Request(%q).Hash() = %s, want %s", name, got, want)
		}
	}
}

func TestSealValue(t *testing.T) {
	// Published outputs of splitmix64 with seed 1234567: its finaliser over
	// the seed and one or two times the golden gamma.
	const gamma = 0x9e3779b97f4a7c15
	for n, want := range []uint64{6457827717110365317, 3203168211198807973, 9817491932198370423} {
		state := uint64(1234567)
		for range n + 1 {
			state += gamma
		}
		if got, ok := id.SealValue(id.Incarnation(state), 0); got != want || !ok {
			t.Errorf("SealValue(%d, 0) = %d, %v, want %d, true", state, got, ok, want)
		}
		if got, ok := id.SealValue(id.Incarnation(state), 5); got != want^5 || !ok {
			t.Errorf("SealValue(%d, 5) = %d, %v, want %d, true", state, got, ok, want^5)
		}
	}
}

func TestSealValueIsNeverZero(t *testing.T) {
	for range 1000 {
		i := id.Incarnation(rand.Uint64())
		mixed, _ := id.SealValue(i, 0)
		if v, ok := id.SealValue(i, id.Sequence(mixed)); v != 0 || ok {
			t.Fatalf("SealValue(%d, %d) = %d, %v, want 0, false", i, mixed, v, ok)
		}
		if v, ok := id.SealValue(i, id.Sequence(mixed+1)); v == 0 || !ok {
			t.Fatalf("SealValue(%d, %d) = %d, %v, want a value", i, mixed+1, v, ok)
		}
	}
	if _, ok := id.SealValue(0, 0); ok {
		t.Error("SealValue(0, 0) says held")
	}
}

// A value that guards one publication must not guard another one, of any life.
func TestSealValuesDiffer(t *testing.T) {
	seen := make(map[uint64]id.Publication)
	for life := range id.Incarnation(64) {
		for sequence := id.Sequence(1); sequence <= 1024; sequence++ {
			i := 1_700_000_000_000_000 + life // neighbours, as microseconds are
			v, ok := id.SealValue(i, sequence)
			if other, taken := seen[v]; taken || !ok {
				t.Fatalf("life %d, sequence %d has value %#x, %v, which %v has", i, sequence, v, ok, other)
			}
			seen[v] = id.Publication{Owner: id.Life{Incarnation: i}, Sequence: sequence}
		}
	}
}

func ExampleNode_Validate() {
	fmt.Println(id.Node("prefill-1").Validate())
	fmt.Println(id.Node("prefill 1").Validate())
	// Output:
	// <nil>
	// node name "prefill 1": byte ' ' is not a letter, digit, '-', '_' or '.': invalid name
}

func ExamplePublication() {
	owner := id.Life{Node: "prefill-1", Incarnation: 1700}
	fmt.Println(id.Publication{Owner: owner, Sequence: 42})
	// Output: prefill-1.1700/42
}

func ExampleSealValue() {
	value, ok := id.SealValue(1700, 42)
	fmt.Println(value != 0, ok)
	// Output: true true
}
