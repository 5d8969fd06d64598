package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/page"
)

func newCompat(t *target) *cobra.Command {
	var output *format
	cmd := &cobra.Command{
		Use:   "compat A B",
		Short: "Say whether two nodes would exchange KV, and every field that differs",
		Long: `Say whether two nodes would exchange KV, and show every field that differs. Exit
code 1 if they would not.

Each of A and B is a configuration file (a path that exists, has a slash, or
ends in .yaml or .yml), read without the environment, or the name of a node: the
one that is asked, or one that it knows. Of one that it knows it has the geometry,
and the transport that it reads it by. Cluster, keyring, and certificates
are compared between files alone: nodes that know each other have them in common,
and of a file and a node the output says that they were not compared.`,
		Example: `  kvferry compat prefill.yaml decode.yaml
  kvferry compat prefill-0 decode-1
  kvferry compat new.yaml prefill-0`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 2 {
				return fmt.Errorf("%d arguments, want: %s", len(args), cmd.Use)
			}
			return nil
		},
		ValidArgsFunction: t.completeCompat,
		RunE: func(cmd *cobra.Command, args []string) error {
			var known nodes
			var sides [2]side
			for i, arg := range args {
				var err error
				if isConfig(arg) {
					sides[i], err = readSide(arg)
				} else {
					if known == nil {
						if known, err = askNodes(cmd.Context(), t); err != nil {
							return err
						}
					}
					sides[i], err = known.side(arg)
				}
				if err != nil {
					return err
				}
			}
			c := compare(sides[0], sides[1])
			if err := c.print(cmd.OutOrStdout(), output); err != nil {
				return err
			}
			if why := c.blocks(); len(why) > 0 {
				return fmt.Errorf("%s and %s would not exchange KV: %s", c.A, c.B, strings.Join(why, ", "))
			}
			return nil
		},
	}
	output = addFormat(cmd)
	return cmd
}

// maxConfig bounds what is read of a file: more than any configuration has.
const maxConfig = 1 << 20

// side is what is known of one node.
type side struct {
	name       string
	geometry   page.Geometry
	ranks      []int          // nil: not known
	transports []string       // that can be used; nil: not known
	inUse      bool           // of these only the one that is in use is known
	config     *config.Config // nil: it is a node that runs
}

// isConfig tells the path of a configuration from the name of a node.
func isConfig(arg string) bool {
	if strings.Contains(arg, "/") || strings.HasSuffix(arg, ".yaml") || strings.HasSuffix(arg, ".yml") {
		return true
	}
	i, err := os.Stat(arg)
	return err == nil && !i.IsDir()
}

// readSide reads a configuration and nothing else: what the environment sets
// here says nothing about where the node runs.
func readSide(path string) (side, error) {
	f, err := os.Open(path)
	if err != nil {
		return side{}, fmt.Errorf("read configuration: %w", err)
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxConfig))
	if err != nil {
		return side{}, fmt.Errorf("read configuration: %w", err)
	}
	conf, err := config.Parse(path, raw)
	if err != nil {
		return side{}, err
	}
	if err := conf.Validate(); err != nil {
		return side{}, fmt.Errorf("%s: %w", path, err)
	}
	s := side{name: path, geometry: conf.Geometry(), ranks: conf.Arena.Ranks, transports: slices.Clone(conf.Transfer.Transports), config: conf}
	if conf.Arena.Memory == config.HostMemory {
		s.transports = slices.DeleteFunc(s.transports, func(t string) bool { return t == "cudaipc" })
	}
	if one := conf.Transfer.Require; one != "" {
		s.transports = []string{one}
	}
	return s, nil
}

// nodes are those that one node knows, itself the first.
type nodes []knownNode

type knownNode struct {
	side
	err error // why its geometry is not known
}

// askNodes asks one node for all that it knows.
func askNodes(ctx context.Context, t *target) (nodes, error) {
	c, err := t.dial()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	ctx, cancel := soon(ctx)
	defer cancel()
	self, err := c.Admin().Status(ctx, &kvferrypb.StatusRequest{})
	if err != nil {
		return nil, err
	}
	peers, err := c.Admin().Peers(ctx, &kvferrypb.PeersRequest{})
	if err != nil {
		return nil, err
	}
	return knownTo(self, peers), nil
}

func knownTo(self *kvferrypb.StatusResponse, peers *kvferrypb.PeersResponse) nodes {
	first := knownNode{side: side{name: self.GetNode()}}
	first.geometry, first.err = kvferrypb.ToGeometry(self.GetGeometry())
	for _, r := range self.GetRanks() {
		first.ranks = append(first.ranks, int(r))
	}
	first.transports = []string{}
	for _, t := range self.GetTransports() {
		if t.GetAvailable() {
			first.transports = append(first.transports, t.GetName())
		}
	}
	all := nodes{first}
	for _, p := range peers.GetItems() {
		n := knownNode{side: side{name: p.GetNode()}}
		if p.GetGeometry() == nil {
			n.err = fmt.Errorf("%s has not told it yet, %s is %s: %s", p.GetNode(), p.GetAddress(), p.GetState(), cmp.Or(p.GetLastError(), "no error so far"))
		} else {
			n.geometry, n.err = kvferrypb.ToGeometry(p.GetGeometry())
		}
		if p.GetTransport() != "" {
			n.transports, n.inUse = []string{p.GetTransport()}, true
		}
		all = append(all, n)
	}
	return all
}

// side finds a node by its name.
func (all nodes) side(name string) (side, error) {
	var names []string
	for _, n := range all {
		if n.name != name {
			names = append(names, n.name)
			continue
		}
		if n.err != nil {
			return side{}, fmt.Errorf("geometry of node %s: %w", name, n.err)
		}
		return n.side, nil
	}
	return side{}, fmt.Errorf("unknown node %.80q: %s knows %s (a configuration file that is meant has a slash, or ends in .yaml)", name, all[0].name, strings.Join(names, ", "))
}

// comparison is the document of the command.
type comparison struct {
	A          string       `json:"a"`
	B          string       `json:"b"`
	Compatible bool         `json:"compatible"`
	Items      []difference `json:"items"`
	Transports []string     `json:"transports"` // that both can use; null: not known
	// NotCompared are keys of a file that a node does not tell of itself.
	NotCompared []string `json:"not_compared"`

	only []string // what it takes besides to use some of them
}

// difference is a field in which two nodes differ.
type difference struct {
	Field  string `json:"field"`
	A      string `json:"a"`
	B      string `json:"b"`
	Blocks bool   `json:"blocks"` // they exchange nothing
	Note   string `json:"note"`
}

// compare lists what keeps two nodes from exchanging KV, and in what else they differ.
func compare(a, b side) comparison {
	c := comparison{A: a.name, B: b.name, Items: []difference{}, NotCompared: []string{}}
	add := func(field, ours, theirs string, blocks bool, note string) {
		if ours != theirs {
			c.Items = append(c.Items, difference{field, ours, theirs, blocks, note})
		}
	}
	const equal = "must be equal"
	for _, d := range a.geometry.Differences(b.geometry) {
		add(d.Field, d.Ours, d.Theirs, true, equal)
	}
	add("pages", strconv.Itoa(a.geometry.Layout.Pages), strconv.Itoa(b.geometry.Layout.Pages), false, "may differ")
	if a.ranks != nil && b.ranks != nil {
		blocks, note := compareRanks(a.ranks, b.ranks)
		add("ranks", fmt.Sprint(a.ranks), fmt.Sprint(b.ranks), blocks, note)
	}
	if a.transports != nil && b.transports != nil {
		c.Transports = slices.DeleteFunc(slices.Clone(a.transports), func(t string) bool { return !slices.Contains(b.transports, t) })
		for _, t := range []struct{ name, takes string }{
			{"cudaipc", "cudaipc if they share a host, its GPUs, and transfer.rendezvous"},
			{"shm", "shm if they share a host and transfer.rendezvous"},
			{"rdma", "rdma if they have devices of one fabric"},
		} {
			if slices.Contains(c.Transports, t.name) && !a.inUse && !b.inUse {
				c.only = append(c.only, t.takes)
			}
		}
		none := len(c.Transports) == 0
		note := "those in common are used"
		if none {
			note = "must have one in common"
		}
		if none || !a.inUse && !b.inUse {
			add("transports", strings.Join(a.transports, " "), strings.Join(b.transports, " "), none, note)
		}
	}
	switch {
	case (a.config == nil) != (b.config == nil):
		c.NotCompared = []string{"cluster.name", "cluster.keyring", "cluster.preset", "security"}
	case a.config != nil:
		add("cluster.name", a.config.Cluster.Name, b.config.Cluster.Name, true, equal)
		ours, theirs := a.config.Cluster.Keyring, b.config.Cluster.Keyring
		blocks, note := compareKeyrings(ours, theirs)
		add("cluster.keyring", formatKeyring(ours), formatKeyring(theirs), blocks, note)
		add("cluster.preset", a.config.Cluster.Preset, b.config.Cluster.Preset, false, "should be equal: one takes the other for dead too soon, or too late")
		add("security", formatSecurity(a.config.Security), formatSecurity(b.config.Security), true, "certificates on both, or on none")
	}
	c.Compatible = len(c.blocks()) == 0
	return c
}

// compareRanks: a reader reads each of its ranks from the same rank of the owner.
func compareRanks(a, b []int) (blocks bool, note string) {
	within := func(x, y []int) bool {
		return !slices.ContainsFunc(x, func(r int) bool { return !slices.Contains(y, r) })
	}
	switch {
	case within(b, a):
		return false, "B can read from A, A not from B"
	case within(a, b):
		return false, "A can read from B, B not from A"
	default:
		return true, "one must have all that the other has"
	}
}

// compareKeyrings: each must be able to read what the other encrypts.
func compareKeyrings(a, b []config.Key) (blocks bool, note string) {
	ids := func(ring []config.Key) []string {
		out := make([]string, len(ring))
		for i, k := range ring {
			out[i] = k.ID()
		}
		return out
	}
	if len(a) > 0 && len(b) > 0 && slices.Contains(ids(b), a[0].ID()) && slices.Contains(ids(a), b[0].ID()) {
		return false, "each can read the other; finish the rotation"
	}
	return true, "each needs the key that the other encrypts with, its first"
}

func formatKeyring(ring []config.Key) string {
	if len(ring) == 0 {
		return ""
	}
	text := make([]string, len(ring))
	for i, k := range ring {
		text[i] = k.ID()
	}
	return strings.Join(text, " ")
}

func formatSecurity(s config.Security) string {
	if s.On() {
		return "certificates"
	}
	return ""
}

// blocks names the fields that keep the two from exchanging KV.
func (c comparison) blocks() []string {
	var fields []string
	for _, d := range c.Items {
		if d.Blocks {
			fields = append(fields, d.Field)
		}
	}
	return fields
}

func (c comparison) print(w io.Writer, output *format) error {
	if output.value != asTable {
		return printDocument(w, output, c)
	}
	rows := newTable(w, "field", "a", "b", "note")
	rows.AppendRow([]any{"of", c.A, c.B, ""})
	for _, d := range c.Items {
		rows.AppendRow([]any{d.Field, orDash(d.A), orDash(d.B), d.Note})
	}
	rows.Render()
	common := strings.Join(c.Transports, " ")
	switch {
	case c.Transports == nil:
		common = "not known, they have not connected yet"
	case common == "":
		common = "none"
	}
	fmt.Fprintf(w, "transports in common: %s\n", printable(strings.Join(append([]string{common}, c.only...), "; ")))
	if len(c.NotCompared) > 0 {
		fmt.Fprintf(w, "not compared: %s; a node does not tell them: compare the files\n", strings.Join(c.NotCompared, ", "))
	}
	switch {
	case c.Compatible && len(c.NotCompared) > 0:
		fmt.Fprintln(w, "compatible in what was compared")
	case c.Compatible:
		fmt.Fprintln(w, "compatible: they would exchange KV")
	}
	return nil
}

// completeCompat offers the nodes that one knows, and files.
func (t *target) completeCompat(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 1 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return t.completeFrom(cmd.Context(), func(ctx context.Context, a kvferrypb.AdminClient) []cobra.Completion {
		m, err := a.Members(ctx, &kvferrypb.MembersRequest{})
		if err != nil {
			return nil
		}
		var names []cobra.Completion
		for _, i := range m.GetItems() {
			names = append(names, cobra.CompletionWithDesc(i.GetNode(), i.GetRole()))
		}
		return names
	}), cobra.ShellCompDirectiveDefault
}
