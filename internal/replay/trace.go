package replay

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// Bounds of a trace. They keep every product of tokens and bytes within 63
// bits, and memory small whatever the file says.
const (
	MaxRequests  = 1 << 20
	MaxTokens    = 1 << 24 // of one request, input and output each
	MaxTimestamp = 365 * 24 * time.Hour
	maxLine      = 1 << 20 // bytes
	blockTokens  = 512     // tokens that one hash id stands for
)

// ErrTrace is wrapped by every error about the content of a trace; the text
// names the line.
var ErrTrace = errors.New("not a request trace")

// Request is one line of a trace in Mooncake's public format.
type Request struct {
	Timestamp time.Duration // from the start of the trace
	Input     int           // tokens of the prompt, at least 1
	Output    int           // tokens generated
	Hashes    []int64       // one a block of 512 input tokens; equal leading ids mean an equal prefix
}

// line is the JSON of a Request. Pointers tell what is missing.
type line struct {
	Timestamp *int64  `json:"timestamp"` // milliseconds
	Input     *int64  `json:"input_length"`
	Output    *int64  `json:"output_length"`
	Hashes    []int64 `json:"hash_ids"`
}

// ReadTraceFile is [ReadTrace] of a file.
func ReadTraceFile(path string, limit int) ([]Request, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open trace: %w", err)
	}
	defer f.Close()
	requests, err := ReadTrace(f, limit)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return requests, nil
}

// ReadTrace reads one JSON object a line, at most limit of them (0: all).
// Empty lines are skipped; anything else that is not exactly a request is an
// error with its line number.
func ReadTrace(r io.Reader, limit int) ([]Request, error) {
	in := bufio.NewScanner(r)
	in.Buffer(make([]byte, 0, 64<<10), maxLine)
	var requests []Request
	n := 0
	for (limit <= 0 || len(requests) < limit) && in.Scan() {
		n++
		text := bytes.TrimSpace(in.Bytes())
		if len(text) == 0 {
			continue
		}
		if len(requests) == MaxRequests {
			return nil, fmt.Errorf("line %d: more than %d requests: %w", n, MaxRequests, ErrTrace)
		}
		request, err := parseLine(text)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w: %w", n, err, ErrTrace)
		}
		requests = append(requests, request)
	}
	if err := in.Err(); errors.Is(err, bufio.ErrTooLong) {
		return nil, fmt.Errorf("line %d: longer than %d bytes: %w", n+1, maxLine, ErrTrace)
	} else if err != nil {
		return nil, fmt.Errorf("line %d: read trace: %w", n+1, err)
	}
	if len(requests) == 0 {
		return nil, fmt.Errorf("no request in it: %w", ErrTrace)
	}
	return requests, nil
}

func parseLine(text []byte) (Request, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	var l line
	if err := d.Decode(&l); err != nil {
		return Request{}, err
	}
	if _, err := d.Token(); err != io.EOF {
		return Request{}, errors.New("something follows the object")
	}
	for _, f := range [...]struct {
		name     string
		value    *int64
		min, max int64
	}{
		{"timestamp", l.Timestamp, 0, MaxTimestamp.Milliseconds()},
		{"input_length", l.Input, 1, MaxTokens},
		{"output_length", l.Output, 0, MaxTokens},
	} {
		if f.value == nil {
			return Request{}, fmt.Errorf("%s is missing", f.name)
		}
		if *f.value < f.min || *f.value > f.max {
			return Request{}, fmt.Errorf("%s %d is not in %d..%d", f.name, *f.value, f.min, f.max)
		}
	}
	if blocks := (*l.Input-1)/blockTokens + 1; int64(len(l.Hashes)) > blocks {
		return Request{}, fmt.Errorf("hash_ids has %d ids, %d tokens have %d blocks of %d", len(l.Hashes), *l.Input, blocks, blockTokens)
	}
	return Request{
		Timestamp: time.Duration(*l.Timestamp) * time.Millisecond,
		Input:     int(*l.Input),
		Output:    int(*l.Output),
		Hashes:    l.Hashes,
	}, nil
}
