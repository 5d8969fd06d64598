package localcluster

import (
	"context"
	"fmt"
	"time"
)

// WaitFor calls probe every so often until it returns nil. When ctx ends first,
// the error wraps both the context's cause and what the probe said last.
func WaitFor(ctx context.Context, every time.Duration, probe func() error) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		err := probe()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
	}
}
