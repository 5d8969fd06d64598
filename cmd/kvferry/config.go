package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/configs"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
)

func newConfig(t *target) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Begin, check, and show configurations",
		Args:  onlyCommands,
		RunE:  help,
	}
	cmd.AddCommand(newConfigInit(), newConfigValidate(), newConfigShow(t))
	return cmd
}

func newConfigInit() *cobra.Command {
	roles := []string{"prefill", "decode", "both"}
	var role string
	var force bool
	cmd := &cobra.Command{
		Use:   "init [FILE]",
		Short: "Write a configuration to start from",
		Long: `Write a configuration that runs as it stands, with comments on what a node of a
real cluster wants besides: to FILE, which must not exist, or without FILE to
standard output. A new FILE can be read by its owner alone, since keys will go
into it.`,
		Example: `  kvferry config init --role prefill node.yaml
  kvferry config init | less`,
		Args: upToOneArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case !slices.Contains(roles, role):
				return usage(cmd, "--role=%q: want %s", role, strings.Join(roles, ", "))
			case force && len(args) == 0:
				return usage(cmd, "--force: want FILE")
			}
			text := configs.Node(role)
			if len(args) == 0 {
				_, err := cmd.OutOrStdout().Write(text)
				return err
			}
			err := writeNew(args[0], text, force)
			if errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("%s exists; --force writes over it", args[0])
			}
			if err != nil {
				return fmt.Errorf("write configuration: %w", err)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "wrote %s; edit it, then: kvferry config validate %s\n", args[0], args[0])
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&role, "role", "both", strings.Join(roles, ", "))
	f.BoolVar(&force, "force", false, "write over FILE")
	must(cmd.RegisterFlagCompletionFunc("role", cobra.FixedCompletions(roles, cobra.ShellCompDirectiveNoFileComp)))
	return cmd
}

// writeNew writes a file that its owner can read, and one that is there only
// with force.
func writeNew(path string, b []byte, force bool) error {
	mode := os.O_WRONLY | os.O_CREATE | os.O_EXCL
	if force {
		mode = os.O_WRONLY | os.O_CREATE | os.O_TRUNC
	}
	f, err := os.OpenFile(path, mode, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Close())
}

func newConfigValidate() *cobra.Command {
	var sets []string
	cmd := &cobra.Command{
		Use:   "validate FILE",
		Short: "Check a configuration as an agent would, and say what it amounts to",
		Long: `Check a configuration as "kvferry agent" would, the environment and --set
included. Every mistake in any of them is listed, with line and column where it is
of the file; a file that is no YAML at all has only the first. Then the files of
certificates are read, if it names any. Exit code 1 if there is a mistake.`,
		Args: oneArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := config.Load(args[0], sets...)
			if err != nil {
				return err
			}
			if s := c.Security; s.On() {
				if _, err := identity.Load(identity.Options{
					Node: id.Node(c.Node.Name), Certificate: s.Certificate, Key: s.Key, CA: s.CA, Peers: s.Peers,
				}); err != nil {
					return fmt.Errorf("%s: security: %w", args[0], err)
				}
			}
			l := c.Geometry().Layout
			memory := fmt.Sprintf("%d pages of %d tokens, %s a rank", l.Pages, l.PageSize, config.Size(l.Bytes()))
			inHost := l.Bytes() // of one rank
			switch c.Arena.Memory {
			case config.HostMemory:
			case config.EngineMemory:
				memory, inHost = memory+" in the engine's memory", 0
			default:
				memory, inHost = memory+" in the memory of "+c.Arena.Memory, 0
			}
			if host, ok := c.HostLayout(); ok {
				memory += fmt.Sprintf(", and %d on the host, %s a rank: %s of host memory in all",
					host.Pages, config.Size(host.Bytes()), config.Size(int64(len(c.Arena.Ranks))*(inHost+host.Bytes())))
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s is valid: node %s, %s, ranks %v of %d, %s\n",
				args[0], c.Node.Name, c.Node.Role, c.Arena.Ranks, c.Arena.WorldSize, memory)
			return err
		},
	}
	addSet(cmd, &sets)
	return cmd
}

func newConfigShow(t *target) *cobra.Command {
	var sets []string
	output := &format{value: asYAML, allowed: []string{asYAML, asJSON}}
	cmd := &cobra.Command{
		Use:   "show [FILE]",
		Short: "Show what a node runs with, or would with a file",
		Long: `Show every key and its value: without FILE as a node runs with them, with FILE as
an agent would that is started with it here, the environment and --set included.
Each key of the keyring shows as its id (see kvferry keyring), certificates and
their keys as the paths of their files.`,
		Example: `  kvferry config show --node decode-0
  kvferry config show node.yaml --set arena.pages=4GiB`,
		Args: upToOneArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			var text []byte
			switch {
			case len(args) == 1:
				c, err := config.Load(args[0], sets...)
				if err != nil {
					return err
				}
				if text, err = c.Redacted(); err != nil {
					return err
				}
			case len(sets) > 0:
				return usage(cmd, "--set: want FILE; a node that runs is not set")
			default:
				var err error
				if text, err = t.configuration(cmd); err != nil {
					return err
				}
			}
			if output.value == asYAML {
				_, err := cmd.OutOrStdout().Write(text)
				return err
			}
			raw, err := yaml.YAMLToJSON(text)
			if err != nil {
				return fmt.Errorf("print json: %w", err)
			}
			return printJSON(cmd.OutOrStdout(), output, raw)
		},
	}
	addSet(cmd, &sets)
	cmd.Flags().VarP(output, "output", "o", strings.Join(output.allowed, ", "))
	must(cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(output.allowed, cobra.ShellCompDirectiveNoFileComp)))
	return cmd
}

// configuration asks the node.
func (t *target) configuration(cmd *cobra.Command) ([]byte, error) {
	c, err := t.dial()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	ctx, cancel := soon(cmd.Context())
	defer cancel()
	r, err := c.Admin().Configuration(ctx, &kvferrypb.ConfigurationRequest{})
	return []byte(r.GetYaml()), err
}

// addSet adds --set to a command that takes a file.
func addSet(cmd *cobra.Command, sets *[]string) {
	cmd.Flags().StringArrayVar(sets, "set", nil, "a key over the file's; may be repeated")
}

// upToOneArgument are the arguments of a command that works without, too.
func upToOneArgument(cmd *cobra.Command, args []string) error {
	if len(args) > 1 {
		return fmt.Errorf("%d arguments, want: %s", len(args), cmd.Use)
	}
	return nil
}
