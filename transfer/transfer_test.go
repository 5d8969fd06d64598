package transfer_test

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
)

func TestLimitsTotal(t *testing.T) {
	const century = 100 * 365 * 24 * time.Hour
	for name, tt := range map[string]struct {
		limits transfer.Limits
		bytes  int64
		want   time.Duration
	}{
		"defaults":        {transfer.Limits{}, 1_000_000_000, 160 * time.Second},
		"nothing":         {transfer.Limits{}, 0, 60 * time.Second},
		"own":             {transfer.Limits{Base: time.Second, Rate: 1 << 20}, 3 << 20, 4 * time.Second},
		"a slow rate":     {transfer.Limits{Rate: 1}, math.MaxInt64, century},
		"an endless hold": {transfer.Limits{Base: math.MaxInt64}, 1, century},
		"both are long":   {transfer.Limits{Base: century - 1, Rate: 1}, 60, century},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tt.limits.Total(tt.bytes); got != tt.want {
				t.Errorf("Total(%d) = %v, want %v", tt.bytes, got, tt.want)
			}
		})
	}
}

func TestError(t *testing.T) {
	err := error(&transfer.Error{
		Transport: "tcp", Peer: id.Life{Node: "prefill-1", Incarnation: 17}, Address: "10.0.0.1:7902",
		Done: 5, Total: 10, Took: 2 * time.Second, Err: fmt.Errorf("lane 0: %w", transfer.ErrStalled),
	})
	if !errors.Is(err, transfer.ErrStalled) {
		t.Errorf("%v does not wrap ErrStalled", err)
	}
	const want = "read by tcp from prefill-1.17 at 10.0.0.1:7902: 5 of 10 bytes after 2s: lane 0: no progress"
	if err.Error() != want {
		t.Errorf("error is %q, want %q", err, want)
	}
}
