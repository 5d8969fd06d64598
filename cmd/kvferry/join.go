package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
)

func newJoin(t *target) *cobra.Command {
	var timeout time.Duration
	var output *format
	cmd := &cobra.Command{
		Use:   "join HOST:PORT...",
		Short: "Let a node call further members of its cluster",
		Long: `Let a node that runs call further members: HOST:PORT is where their gossip
listens, as "kvferry status" shows it there. Done when one of them lists the
node. It is for the moment: a restart joins what cluster.join names.`,
		Example: `  kvferry --node decode-0 join 192.0.2.7:7900 192.0.2.8:7900`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return fmt.Errorf("no argument, want: %s", cmd.Use)
			}
			for _, seed := range args {
				if !config.HostPort(seed) {
					return fmt.Errorf("%.80q is not HOST:PORT, such as 192.0.2.7:7900 or [fd00::7]:7900", seed)
				}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if timeout <= 0 {
				return usage(cmd, "--timeout=%v: want more than 0s", timeout)
			}
			c, err := t.dial()
			if err != nil {
				return err
			}
			defer c.Close()
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			m, err := c.Admin().Join(ctx, &kvferrypb.JoinRequest{Seeds: args})
			if err != nil {
				err = late(err, fmt.Errorf("none of them lists the node after %v: it goes on calling them, and its log says why not", timeout))
				return fmt.Errorf("join %s: %w", strings.Join(args, " "), err)
			}
			if output.value != asTable {
				return printMessage(cmd.OutOrStdout(), output, m)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "joined, %s known\n", count(m.GetMembers(), "member"))
			return err
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 30*time.Second, "for one of them to list the node")
	output = addFormat(cmd)
	return cmd
}
