package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

func newLeave(t *target) *cobra.Command {
	return &cobra.Command{
		Use:   "leave",
		Short: "Take a node out of the cluster at once: what runs is cut",
		Long: `Take a node out of the cluster at once. It says goodbye to the others and ends.
Reads of it and by it that run fail with an error, what it published is gone.
It also ends a drain that takes too long. "kvferry drain" lets what runs finish.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := t.dial()
			if err != nil {
				return err
			}
			defer c.Close()
			node, err := nameOf(cmd.Context(), c)
			if err != nil {
				return err
			}
			ctx, cancel := soon(cmd.Context())
			defer cancel()
			if _, err := c.Admin().Leave(ctx, &kvferrypb.LeaveRequest{}); err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s has left the cluster, what ran was cut\n", node)
			return err
		},
	}
}
