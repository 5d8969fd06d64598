package localcluster_test

import (
	"context"
	"fmt"
	"os"
	"syscall"

	"github.com/kvferry/kvferry/internal/localcluster"
)

// A test of another package: real processes, one of them killed and started again
// where it was. Binary is the program; without it the nodes run this one.
func ExampleUp() {
	ctx := context.Background()
	root, err := os.MkdirTemp("", "lc")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(root)
	c, err := localcluster.Up(ctx, localcluster.Options{Root: root, Prefill: 1, Decode: 1, Set: []string{"arena.pages=4"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { fmt.Println("down:", c.Down(ctx)) }()
	fmt.Println("kill:", c.Kill("prefill-0", syscall.SIGKILL))
	fmt.Println("restart:", c.Restart(ctx, "prefill-0", true))
	fmt.Println("meet:", c.Meet(ctx))
	// Output:
	// kill: <nil>
	// restart: <nil>
	// meet: <nil>
	// down: <nil>
}
