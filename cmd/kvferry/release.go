package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/api/wire"
)

func newRelease(t *target) *cobra.Command {
	return &cobra.Command{
		Use:   "release REFERENCE",
		Short: "Say that a node will not read a publication",
		Long: `Say, as a decode node, that this reference will not be read. Its owner counts
the node among the readers, as "declined", and need not hold the pages for it.`,
		Args: oneArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := wire.Peek(args[0]); err != nil {
				return usage(cmd, "%w", err)
			}
			c, err := t.dial()
			if err != nil {
				return err
			}
			defer c.Close()
			ctx, cancel := soon(cmd.Context())
			defer cancel()
			s, err := c.Open(ctx, client.OpenOptions{Engine: "kvferry release"})
			if err != nil {
				return err
			}
			defer s.Close()
			if _, err := s.Release(ctx, &kvferrypb.ReleaseRequest{Reference: args[0]}); err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), "released")
			return err
		},
	}
}
