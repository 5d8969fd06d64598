package replay

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestReadTrace(t *testing.T) {
	requests, err := ReadTrace(strings.NewReader(`{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}

{"timestamp": 1500, "input_length": 1, "output_length": 0, "hash_ids": []}
`), 0)
	if err != nil {
		t.Fatal(err)
	}
	if len(requests) != 2 || requests[0].Input != 6758 || requests[0].Output != 500 || len(requests[0].Hashes) != 2 ||
		requests[1].Timestamp != 1500*time.Millisecond {
		t.Errorf("read %+v", requests)
	}
}

func TestReadTraceLimit(t *testing.T) {
	// What lies behind the limit is not looked at.
	requests, err := ReadTrace(strings.NewReader(`{"timestamp":0,"input_length":1,"output_length":1}`+"\ngarbage"), 1)
	if err != nil || len(requests) != 1 {
		t.Errorf("read %d requests, %v", len(requests), err)
	}
}

func TestReadTraceRefuses(t *testing.T) {
	good := `{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[1,2]}`
	for name, bad := range map[string]string{
		"not JSON":          `timestamp=0`,
		"a list":            `[1,2,3]`,
		"unknown key":       `{"timestamp":0,"input_length":1,"output_length":1,"priority":3}`,
		"no timestamp":      `{"input_length":1,"output_length":1}`,
		"no input":          `{"timestamp":0,"output_length":1}`,
		"no output":         `{"timestamp":0,"input_length":1}`,
		"null input":        `{"timestamp":0,"input_length":null,"output_length":1}`,
		"no token":          `{"timestamp":0,"input_length":0,"output_length":1}`,
		"negative input":    `{"timestamp":0,"input_length":-1,"output_length":1}`,
		"negative output":   `{"timestamp":0,"input_length":1,"output_length":-1}`,
		"negative time":     `{"timestamp":-1,"input_length":1,"output_length":1}`,
		"fraction":          `{"timestamp":0,"input_length":1.5,"output_length":1}`,
		"text for a number": `{"timestamp":0,"input_length":"1","output_length":1}`,
		"too long":          fmt.Sprintf(`{"timestamp":0,"input_length":%d,"output_length":1}`, MaxTokens+1),
		"over 63 bits":      `{"timestamp":0,"input_length":99999999999999999999,"output_length":1}`,
		"time over years":   `{"timestamp":9223372036854775807,"input_length":1,"output_length":1}`,
		"too many hashes":   `{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1,2]}`,
		"two objects":       good + good,
		"cut off":           good[:len(good)-1],
		"endless line":      `{"timestamp":` + strings.Repeat(" ", maxLine) + `0}`,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ReadTrace(strings.NewReader(good+"\n"+bad+"\n"+good+"\n"), 0)
			if !errors.Is(err, ErrTrace) || !strings.Contains(err.Error(), "line 2") {
				t.Errorf("read = %v, want ErrTrace naming line 2", err)
			}
		})
	}
	if _, err := ReadTrace(strings.NewReader("\n\n"), 0); !errors.Is(err, ErrTrace) {
		t.Errorf("empty trace: %v", err)
	}
	if _, err := ReadTraceFile("testdata/no such file", 0); err == nil {
		t.Error("a missing file was read")
	}
}

func FuzzReadTrace(f *testing.F) {
	f.Add(`{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}`)
	f.Add("{}\n[]\n")
	f.Fuzz(func(t *testing.T, text string) {
		requests, err := ReadTrace(strings.NewReader(text), 0)
		if (err == nil) != (len(requests) > 0) {
			t.Fatalf("%d requests, %v", len(requests), err)
		}
		for _, r := range requests {
			if r.Input < 1 || r.Input > MaxTokens || r.Output < 0 || r.Output > MaxTokens || r.Timestamp < 0 || r.Timestamp > MaxTimestamp {
				t.Fatalf("out of bounds: %+v", r)
			}
		}
	})
}

func ExampleReadTrace() {
	requests, err := ReadTrace(strings.NewReader(`{"timestamp": 27, "input_length": 600, "output_length": 40, "hash_ids": [0, 7]}`), 0)
	if err != nil {
		fmt.Println(err)
		return
	}
	tokens, bytes := Expected(requests, 1024, 1, 1)
	fmt.Println(requests[0].Timestamp, tokens, "tokens,", bytes, "bytes")
	// Output: 27ms 600 tokens, 614400 bytes
}
