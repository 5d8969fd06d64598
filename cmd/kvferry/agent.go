package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/localcluster"
	"github.com/kvferry/kvferry/internal/node"
)

func newAgent() *cobra.Command {
	var file string
	var sets []string
	var level slog.Level
	cmd := &cobra.Command{
		Use:   "agent -c FILE",
		Short: "Run a node",
		Long: `Run a node until SIGTERM or SIGINT, which let it drain and leave the cluster. A
second signal ends it at once.

The configuration is read from FILE; environment variables such as
KVFERRY_ARENA_PAGES go over it, and --set over both. Logs go to standard error.
Once the node serves, one line of JSON with all its addresses goes to
standard output, and nothing else ever does.`,
		Example: `  kvferry agent -c configs/prefill.yaml
  kvferry agent -c configs/decode.yaml --set arena.pages=2GiB`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			conf, err := config.Load(file, sets...)
			if err != nil {
				return err
			}
			return serve(cmd, conf, newLogger(cmd.ErrOrStderr(), level))
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "the configuration")
	cmd.Flags().StringArrayVar(&sets, "set", nil, "a key over the file's, such as arena.pages=1024; may be repeated")
	cmd.Flags().TextVar(&level, "log-level", slog.LevelInfo, "debug, info, warn, or error")
	must(cmd.MarkFlagRequired("config"))
	return cmd
}

func serve(cmd *cobra.Command, conf *config.Config, logger *slog.Logger) error {
	ctx := cmd.Context()
	n, err := node.Start(ctx, node.Options{Config: conf, Logger: logger, Version: readBuild().Version})
	if errors.Is(err, fs.ErrPermission) && conf.Node.Socket == config.DefaultSocket(conf.Node.Name) && os.Getenv("XDG_RUNTIME_DIR") == "" {
		return fmt.Errorf("%w (the engine socket lies in /run/kvferry by default: set XDG_RUNTIME_DIR or node.socket to where this user may write)", err)
	}
	if errors.Is(err, node.ErrUnadopted) && ctx.Err() != nil {
		return nil //nolint:nilerr // it was told to end while it waited
	}
	if err != nil {
		return err
	}
	a := n.Addresses()
	line, err := json.Marshal(localcluster.Ready{
		Node: conf.Node.Name, Incarnation: uint64(n.Life().Incarnation),
		Gossip: a.Gossip, Peer: a.Peer, Data: a.Data, HTTP: a.HTTP, Engine: a.Engine,
	})
	if err == nil {
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s\n", line)
	}
	if err == nil {
		select {
		case <-ctx.Done():
		case <-n.Done():
			err = n.Err()
		}
	}
	// The signal has ended ctx; what follows is bounded by timers.drain.
	if closeErr := n.Close(context.WithoutCancel(ctx)); err == nil {
		err = closeErr
	}
	return err
}
