package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/internal/config"
)

func newConfig() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Check configurations",
		Args:  onlyCommands,
		RunE:  help,
	}
	cmd.AddCommand(newConfigValidate())
	return cmd
}

func newConfigValidate() *cobra.Command {
	var sets []string
	cmd := &cobra.Command{
		Use:   "validate FILE",
		Short: "Check a configuration as an agent would, and say what it amounts to",
		Long: `Check a configuration as "kvferry agent" would, the environment and --set
included. Every mistake in any of them is listed, with line and column where it is
of the file; a file that is no YAML at all has only the first. Exit code 1 if there is one.`,
		Args: oneArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := config.Load(args[0], sets...)
			if err != nil {
				return err
			}
			l := c.Geometry().Layout
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s is valid: node %s, %s, ranks %v of %d, %d pages of %d tokens, %s a rank\n",
				args[0], c.Node.Name, c.Node.Role, c.Arena.Ranks, c.Arena.WorldSize, l.Pages, l.PageSize, config.Size(l.Bytes()))
			return err
		},
	}
	cmd.Flags().StringArrayVar(&sets, "set", nil, "a key over the file's; may be repeated")
	return cmd
}
