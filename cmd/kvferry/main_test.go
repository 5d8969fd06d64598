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

// Nothing begins with a value that cannot be, and the flag is named.
func TestWrongValues(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	for _, tt := range []struct{ line, want string }{
		{"local up --prefill 1000", "--prefill"},
		{"local up --layers 0", "--layers"},
		{"local up --timeout 0s", "--timeout"},
		{"local up --set ports.http=80", "--set"},
		{"local up --set cluster.join=127.0.0.1:1", "--set"},
		{"publish r1 --readers 999999999", "--readers"},
		{"publish r1 --timeout 0s", "--timeout"},
		{"release kvf1.AAA", "reference"},
		{"release r1", "reference"},
		{"retrieve kvf1.AAAA", "reference"},
		{"replay trace.jsonl --labels=-1", "--labels"},
		{"replay trace.jsonl --labels 0", "--labels"},
		{"replay trace.jsonl --labels 300", "--labels"},
		{"replay trace.jsonl --concurrency=-3", "--concurrency"},
		{"replay trace.jsonl --time-scale=-1", "--time-scale"},
		{"replay trace.jsonl --time-scale NaN", "--time-scale"},
		{"replay trace.jsonl --time-scale 1e300", "--time-scale"},
		{"replay trace.jsonl --limit=-1", "--limit"},
		{"replay trace.jsonl --decode-steps=-2", "--decode-steps"},
		{"replay trace.jsonl --timeout 0s", "--timeout"},
		{"replay trace.jsonl --timeout=-1s", "--timeout"},
		{"replay trace.jsonl --chunk 0", "--chunk"},
		{"replay trace.jsonl --step-pause=-1s", "--step-pause"},
		{"offload r1 r2", "2 arguments, want: offload [REQUEST]"},
		{"reload", "0 arguments, want: reload REQUEST"},
		{"page", "0 arguments, want: page N"},
		{"page main", `"main"`},
		{"page 4294967296", `"4294967296"`},
		{"drain --timeout=-1s", "--timeout"},
		{"join", "HOST:PORT"},
		{"join 192.0.2.7", "HOST:PORT"},
		{"join 192.0.2.7:0", "HOST:PORT"},
		{"join 192.0.2.7:7900 :7900", `":7900"`},
		{"join --timeout 0s 192.0.2.7:7900", "--timeout"},
		{"keyring nosuch", `"nosuch"`},
		{"keyring add", "KEY|-"},
		{"keyring add AAAA", "3 bytes, want 32"},
		{"keyring add not/base64", "not base64"},
		{"keyring use", "ID"},
		{"keyring use 012", `"012"`},
		{"keyring remove 0123 --timeout=-1s", "--timeout"},
		{"compat a.yaml", "1 arguments, want: compat A B"},
		{"bench --part speed", "--part=speed"},
		{"bench --part=", "--part"},
		{"bench --rounds=-1", "--rounds"},
		{"bench --rounds 0", "--rounds"},
		{"bench --samples 0", "--samples"},
		{"bench --warmup=-1", "--warmup"},
		{"bench --chunk 0", "--chunk"},
		{"bench --chunk=-5", "--chunk"},
		{"bench --chunk 64,3", "--chunk"},
		{"bench --duration=-1s", "--duration"},
		{"bench --arena=-1", "--arena"},
		{"bench --concurrency 0", "--concurrency"},
	} {
		var out, errs bytes.Buffer
		code := run(strings.Fields(tt.line), &out, &errs)
		if code != exitUsage || !strings.Contains(errs.String(), tt.want) || strings.Count(errs.String(), "\n") != 1 || out.Len() > 0 {
			t.Errorf("kvferry %s: exit code %d, want %d, and %q in one line: %s", tt.line, code, exitUsage, tt.want, &errs)
		}
	}
}

// What others have named does not get to the terminal as it is.
func TestTablesArePrintable(t *testing.T) {
	for in, want := range map[string]string{
		"plain-1.a": "plain-1.a", "日本": "日本", `a\b`: `a\b`, "": "",
		"\x1b[2Jgone": `\x1b[2Jgone`, "a\nb\tc\r": `a\nb\tc\r`, "\xff\u202e\u009b": `\xff\u202e\u009b`, "\ufffd": "\ufffd",
	} {
		if got := printable(in); got != want {
			t.Errorf("printable(%q) = %q, want %q", in, got, want)
		}
	}
	var out, errs bytes.Buffer
	rows := newTable(&out, "name", "n")
	rows.AppendRow([]any{"evil\x1b[31m\nnode-2", 5})
	rows.Render()
	if got := out.String(); strings.Contains(got, "\x1b") || strings.Count(got, "\n") != 2 || !strings.Contains(got, `\x1b[31m\nnode-2  5`) {
		t.Errorf("table %q has what a terminal would obey", got)
	}
	if code := run([]string{"nosuch\x1b[2J"}, &out, &errs); code != exitUsage || strings.Contains(errs.String(), "\x1b") {
		t.Errorf("exit code %d, error %q", code, &errs)
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
