package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/localcluster"
)

func newLocal(t *target) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "local",
		Short: "Run a cluster of real processes on this machine",
		Args:  onlyCommands,
		RunE:  help,
	}
	cmd.AddCommand(newLocalUp(t), newLocalDown(t), newLocalStatus(t), newLocalKill(t), newLocalRestart(t))
	return cmd
}

func newLocalUp(t *target) *cobra.Command {
	o := localcluster.Options{}
	var layers int
	var pages, hostPages, evict string
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start a cluster and return when every node is ready",
		Long: `Start prefill and decode nodes as processes of their own on loopback, each on
free ports, and return when every node is ready and sees all others. If that
fails, nothing stays behind.

The nodes run until "kvferry local down". Their configurations, logs, and
cluster.json (pid, start time, addresses, socket of each) lie in
$XDG_RUNTIME_DIR/kvferry/local/NAME, else in /run/kvferry/local/NAME, or where
that may not be written, in /tmp/kvferry-UID/local/NAME.

A node's name, addresses, and paths are its own: --set does not set them. What
--set-prefill and --set-decode say is for the nodes of that role, and goes over
--set. Once it is up, its configuration has its ports, and all others to join: a node that died
comes back by "kvferry local restart NODE".

The nodes read each other by shared memory, as nodes of one host do. As if they
were on different machines: --set transfer.transports=tcp.

With --secure every node has a certificate, and gossip a key, made for this
cluster alone: certificate and key lie in the node's directory, what signed them
is kept nowhere.`,
		Example: `  kvferry local up --prefill 2 --decode 2 --layers 2
  kvferry local up --prefill 1 --decode 1 --pages 33 --host-pages 64
  kvferry local up --set transfer.transports=tcp
  kvferry local up --set-prefill transfer.rdma.devices=mlx5_0 --set-decode transfer.rdma.devices=mlx5_1
  kvferry local up --name big -c mine.yaml --set arena.pages=4GiB`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Name = t.cluster
			switch most := localcluster.MaxNodes; {
			case o.Prefill < 0 || o.Prefill > most || o.Decode < 0 || o.Decode > most || o.Prefill+o.Decode < 1 || o.Prefill+o.Decode > most:
				return usage(cmd, "--prefill=%d --decode=%d: want at least one node, at most %d in all", o.Prefill, o.Decode, most)
			case o.Timeout <= 0:
				return usage(cmd, "--timeout=%v: want more than 0s", o.Timeout)
			}
			if cmd.Flags().Changed("layers") {
				if layers < 1 {
					return usage(cmd, "--layers=%d: want 1 or more", layers)
				}
				o.Set = append(o.Set, "arena.layers="+strconv.Itoa(layers))
			}
			if cmd.Flags().Changed("pages") {
				o.Set = append(o.Set, "arena.pages="+pages)
			}
			if cmd.Flags().Changed("host-pages") {
				o.Set = append(o.Set, "arena.host_pages="+hostPages)
			}
			if cmd.Flags().Changed("evict") {
				o.Set = append(o.Set, "arena.evict="+evict)
			}
			begin := time.Now()
			c, err := localcluster.Up(cmd.Context(), o)
			if errors.Is(err, localcluster.ErrOptions) {
				return usage(cmd, "%w", err)
			}
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			rows := newTable(out, "node", "role", "pid", "gossip", "peer", "data", "http", "engine")
			for _, n := range c.Nodes() {
				data := "-" // without tcp
				if n.Data.IsValid() {
					data = n.Data.String()
				}
				rows.AppendRow([]any{n.Node, n.Role, n.PID, n.Gossip, n.Peer, data, n.HTTP, n.Engine})
			}
			rows.Render()
			_, err = fmt.Fprintf(out, "%s ready in %v\n", countNodes(len(c.Nodes())), time.Since(begin).Round(time.Millisecond))
			return err
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.Prefill, "prefill", 2, "prefill nodes")
	f.IntVar(&o.Decode, "decode", 2, "decode nodes")
	f.IntVar(&layers, "layers", 0, "layers of the KV (default the configuration's)")
	f.StringVar(&pages, "pages", "", "pages of each rank's arena, such as 1024 or 2GiB (default the configuration's)")
	f.StringVar(&hostPages, "host-pages", "", "pages of each rank's host tier, such as 1024 or 2GiB (default the configuration's)")
	f.StringVar(&evict, "evict", "", "what a node that is short of pages moves to its host: recent, the request that was active least recently; pages, the one with the most; never (default the configuration's)")
	must(cmd.RegisterFlagCompletionFunc("evict", cobra.FixedCompletions([]cobra.Completion{"recent", "pages", "never"}, cobra.ShellCompDirectiveNoFileComp)))
	f.StringVarP(&o.Config, "config", "c", "", "what all nodes share (default configs/local.yaml, built in)")
	f.StringArrayVar(&o.Set, "set", nil, "a key over the configuration's; may be repeated")
	f.StringArrayVar(&o.SetPrefill, "set-prefill", nil, "a key of the prefill nodes alone, over --set; may be repeated")
	f.StringArrayVar(&o.SetDecode, "set-decode", nil, "a key of the decode nodes alone, over --set; may be repeated")
	f.BoolVar(&o.Secure, "secure", false, "certificates for all nodes, and a key for gossip")
	f.DurationVar(&o.Timeout, "timeout", 30*time.Second, "for the whole start")
	return cmd
}

func countNodes(n int) string {
	if n == 1 {
		return "1 node"
	}
	return fmt.Sprintf("%d nodes", n)
}

func newLocalDown(t *target) *cobra.Command {
	return &cobra.Command{
		Use:   "down",
		Short: "Stop a cluster and remove everything it left",
		Long: `Stop every node by SIGTERM (one that is stopped goes on for that), after 15 s by
SIGKILL, and remove the cluster's directory. A process is signalled only if it is the one that was started.
Without a cluster there is nothing to do, and that is no failure.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := localcluster.Load(t.cluster)
			if errors.Is(err, localcluster.ErrNotUp) {
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "local cluster %s is not up\n", t.cluster)
				return err
			}
			if err != nil {
				return err
			}
			n := len(c.Nodes())
			if err := c.Down(cmd.Context()); err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "stopped %s\n", countNodes(n))
			return err
		},
	}
}

// localNode is a row of `local status -o json`.
type localNode struct {
	localcluster.Node
	State  string          `json:"state"` // ready, not ready, silent, or down
	Reason string          `json:"reason,omitempty"`
	Status json.RawMessage `json:"status,omitempty"` // as of `kvferry status`
}

func newLocalStatus(t *target) *cobra.Command {
	var output *format
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the nodes of a cluster and whether they are ready",
		Long:  `Show the nodes of a cluster. Exit code 1 if one of them is not ready.`,
		Args:  noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := localcluster.Load(t.cluster)
			if err != nil {
				return err
			}
			all := c.Status(cmd.Context())
			if err := printLocal(cmd.OutOrStdout(), output, c.Name(), all); err != nil {
				return err
			}
			for _, s := range all {
				if s.State() != localcluster.StateReady {
					return fmt.Errorf("node %s is %s (its log: %s)", s.Node.Node, s.State(), s.Node.Log())
				}
			}
			return nil
		},
	}
	output = addFormat(cmd)
	return cmd
}

func printLocal(w io.Writer, output *format, name string, all []localcluster.NodeStatus) error {
	items := make([]localNode, 0, len(all))
	for _, s := range all {
		i := localNode{Node: s.Node, State: s.State(), Reason: strings.Join(s.Status.GetNotReady(), "; ")}
		if s.Err != nil {
			i.Reason = s.Err.Error()
		}
		if s.Status != nil {
			raw, err := protojson.MarshalOptions{EmitDefaultValues: true}.Marshal(s.Status)
			if err != nil {
				return fmt.Errorf("print status of %s: %w", s.Node.Node, err)
			}
			i.Status = raw
		}
		items = append(items, i)
	}
	if output.value != asTable {
		return printDocument(w, output, struct {
			Name  string      `json:"name"`
			Items []localNode `json:"items"`
		}{name, items})
	}
	rows := newTable(w, "node", "role", "pid", "state", "members", "free pages", "free on host", "publications", "retrievals", "reason")
	for i, s := range all {
		row := []any{s.Node.Node, s.Node.Role, s.Node.PID, s.State(), "-", "-", "-", "-", "-", items[i].Reason}
		if st := s.Status; st != nil {
			row = []any{s.Node.Node, s.Node.Role, s.Node.PID, s.State(), st.GetMembers(), st.GetPages().GetFree(), freeOnHost(st.GetPages()), st.GetPublications(), st.GetRetrievals(), items[i].Reason}
		}
		rows.AppendRow(row)
	}
	rows.Render()
	return nil
}

// freeOnHost is a dash for a node without a host tier.
func freeOnHost(p *kvferrypb.PageCounts) any {
	if p.GetHostTotal() == 0 {
		return "-"
	}
	return p.GetHostFree()
}

func newLocalKill(t *target) *cobra.Command {
	var signal string
	cmd := &cobra.Command{
		Use:     "kill NODE",
		Short:   "Signal one node's process, to see what the others do",
		Long:    "Signal one node's process, to see what the others do. After KILL the node is\ngone when the command returns.",
		Example: "  kvferry local kill decode-1\n  kvferry local kill prefill-0 --signal STOP",
		Args:    oneArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			sig := unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(signal), "SIG"))
			if n, err := strconv.Atoi(signal); err == nil {
				sig = syscall.Signal(n)
			}
			if unix.SignalName(sig) == "" {
				return usage(cmd, "--signal=%q: want a name such as KILL, TERM, or STOP, or a number", signal)
			}
			c, err := localcluster.Load(t.cluster)
			if err != nil {
				return err
			}
			if err := c.Kill(args[0], sig); err != nil || sig != syscall.SIGKILL {
				return err
			}
			// Gone takes a moment: the kernel gives the arena back first.
			ctx, cancel := soon(cmd.Context())
			defer cancel()
			n, _ := c.Node(args[0])
			return n.Wait(ctx)
		},
		ValidArgsFunction: t.completeNode,
	}
	cmd.Flags().StringVarP(&signal, "signal", "s", "KILL", "the signal")
	return cmd
}

// meetTimeout is how long a node that was started again may take to be in its
// cluster.
const meetTimeout = 30 * time.Second

func newLocalRestart(t *target) *cobra.Command {
	return &cobra.Command{
		Use:   "restart NODE",
		Short: "Start a node again where it was",
		Long: `Start a node again from its files, at the same ports and socket, after SIGKILL if
it still runs, and return when it is ready and all nodes that run see each other,
for which they have 30 s. Its log goes on in the same file.`,
		Example: "  kvferry local kill prefill-0\n  kvferry local restart prefill-0",
		Args:    oneArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := localcluster.Load(t.cluster)
			if err != nil {
				return err
			}
			begin := time.Now()
			if err := c.Restart(cmd.Context(), args[0], true); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeoutCause(cmd.Context(), meetTimeout, fmt.Errorf("not together within %v", meetTimeout))
			defer cancel()
			if err := c.Meet(ctx); err != nil {
				return err
			}
			n, _ := c.Node(args[0])
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s ready in %v with pid %d\n", n.Node, time.Since(begin).Round(time.Millisecond), n.PID)
			return err
		},
		ValidArgsFunction: t.completeNode,
	}
}
