package main

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/internal/replay"
)

// TestVerdict: wrong bytes are told whatever else there is, and only with
// --expect-failures may requests fail.
func TestVerdict(t *testing.T) {
	lost := []replay.NodeReport{{Node: "n", Losses: 1}}
	failed := []replay.Failure{{Code: replay.CodeNodeLost, Count: 1, Explained: "it died"}}
	interrupted := errors.New("interrupted")
	for name, tt := range map[string]struct {
		report         *replay.Report
		err            error
		code, expected int // without and with --expect-failures
	}{
		"all is well":              {&replay.Report{OK: true, Ready: 1, Requests: 1}, nil, 0, 0},
		"a node died":              {&replay.Report{Ready: 1, Failed: 1, Requests: 2, Nodes: lost, Failures: failed}, nil, 1, 0},
		"no node died":             {&replay.Report{Ready: 1, Failed: 1, Requests: 2, Failures: failed}, nil, 1, 1},
		"something is left":        {&replay.Report{Ready: 1, Requests: 1, Nodes: []replay.NodeReport{{Left: []string{"a page"}}}}, nil, 1, 1},
		"wrong bytes":              {&replay.Report{Ready: 1, Failed: 1, Requests: 2, Nodes: lost, Failures: failed, WrongBytes: 1}, nil, 4, 4},
		"wrong bytes, interrupted": {&replay.Report{Requests: 2, WrongBytes: 1}, interrupted, 4, 4},
		"interrupted":              {&replay.Report{Ready: 1, Requests: 2, Nodes: lost}, interrupted, 1, 1},
		"nobody there":             {nil, fmt.Errorf("dial: %w", client.ErrUnreachable), 3, 3},
	} {
		got := []int{exitCode(verdict(tt.report, tt.err, false)), exitCode(verdict(tt.report, tt.err, true))}
		if want := []int{tt.code, tt.expected}; !slices.Equal(got, want) {
			t.Errorf("%s: exit codes %v without and with --expect-failures, want %v", name, got, want)
		}
	}
}
