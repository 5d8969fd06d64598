package localcluster_test

import (
	"context"
	"fmt"
	"syscall"

	"github.com/kvferry/kvferry/internal/localcluster"
)

// A test of another package: real processes of the program at Binary, one of
// them killed and started again where it was.
func ExampleUp() {
	ctx := context.Background()
	c, err := localcluster.Up(ctx, localcluster.Options{Name: "example", Prefill: 1, Decode: 1, Binary: "bin/kvferry"})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { fmt.Println(c.Down(ctx)) }()
	if err := c.Kill("prefill-0", syscall.SIGKILL); err != nil {
		fmt.Println(err)
	}
	if err := c.Restart(ctx, "prefill-0", true); err != nil {
		fmt.Println(err)
	}
	if err := c.Meet(ctx); err != nil {
		fmt.Println(err)
	}
}
