package main

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/localcluster"
)

func TestExitCode(t *testing.T) {
	for name, tt := range map[string]struct {
		err  error
		want int
	}{
		"done":         {nil, exitDone},
		"failed":       {errors.New("no"), exitFailed},
		"usage":        {fmt.Errorf("a: %w", &usageError{"kvferry", errors.New("no")}), exitUsage},
		"unreachable":  {fmt.Errorf("a: %w", client.ErrUnreachable), exitUnreachable},
		"not up":       {fmt.Errorf("a: %w", localcluster.ErrNotUp), exitUnreachable},
		"verification": {errors.Join(fmt.Errorf("a: %w", errVerify), client.ErrUnreachable), exitVerify},
	} {
		t.Run(name, func(t *testing.T) {
			if got := exitCode(tt.err); got != tt.want {
				t.Errorf("exitCode(%v) = %d, want %d", tt.err, got, tt.want)
			}
		})
	}
}

func TestMessagesAsDocuments(t *testing.T) {
	m := &kvferrypb.MembersResponse{Items: []*kvferrypb.Member{{Node: "a", Incarnation: 1 << 60, Role: "yes"}}}
	for form, want := range map[string][]string{
		asJSON: {"{\n  \"items\": [\n", `"incarnation": "1152921504606846976"`, `"self": false`},
		asYAML: {"---\nitems:\n", `incarnation: "1152921504606846976"`, "self: false"},
	} {
		var out bytes.Buffer
		if err := printMessage(&out, &format{value: form}, m); err != nil {
			t.Fatal(err)
		}
		for _, w := range want {
			if !strings.Contains(out.String(), w) {
				t.Errorf("%s:\n%s\ndoes not have %q", form, &out, w)
			}
		}
	}
	var out bytes.Buffer
	if err := printMessage(&out, &format{value: asJSON}, &kvferrypb.MembersResponse{}); err != nil || !strings.Contains(out.String(), `"items": []`) {
		t.Errorf("no members are %q %v", &out, err)
	}
}

func TestForPeople(t *testing.T) {
	for want, got := range map[string]string{
		"0 B":      formatBytes(0),
		"1023 B":   formatBytes(1023),
		"1.0 KiB":  formatBytes(1024),
		"1.5 MiB":  formatBytes(3 << 19),
		"16.0 EiB": formatBytes(1<<64 - 1),
		"-":        formatDuration(nil),
		"1.23ms":   formatDuration(durationpb.New(1234567)),
		"1m1.5s":   formatDuration(durationpb.New(61*time.Second + 512*time.Millisecond)),
		"250µs":    formatDuration(durationpb.New(250 * time.Microsecond)),
	} {
		if got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
