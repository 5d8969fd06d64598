package main

import (
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

func newRevoke(t *target) *cobra.Command {
	return &cobra.Command{
		Use:   "revoke PUBLICATION",
		Short: "End a publication at once; its readers see REVOKED",
		Long: `End a publication of a node at once. PUBLICATION is its number, as
"kvferry publications" shows it. Its pages are free again when the command
returns; readers of it see REVOKED or STALE, never wrong bytes.`,
		Args: oneArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			n, err := strconv.ParseUint(args[0], 10, 64)
			if err != nil || n == 0 {
				return usage(cmd, "publication %q: want a number from 1", args[0])
			}
			c, err := t.dial()
			if err != nil {
				return err
			}
			defer c.Close()
			ctx, cancel := soon(cmd.Context())
			defer cancel()
			if _, err := c.Admin().Revoke(ctx, &kvferrypb.RevokeRequest{Publication: n}); err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "revoked publication %d\n", n)
			return err
		},
	}
}
