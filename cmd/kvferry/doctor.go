package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/node"
)

// Timeouts of doctor.
const (
	besideTimeout = 2 * time.Second // of a node that nobody has asked for
	probeTimeout  = time.Minute     // several transports may have to be waited for
)

func newDoctor(t *target) *cobra.Command {
	d := &doctor{target: t}
	cmd := &cobra.Command{
		Use:   "doctor [PEER]",
		Short: "Say what this machine has and lacks, or by which transports a peer can be read",
		Long: `Without PEER, look at this machine as this shell may use it: memory that may be
locked, files, huge pages, ports, RDMA devices with their ports and addresses,
the GPU. It needs no node. With -c it is for the node of that configuration; a
node that runs here is asked, too, since its process may have other limits than
the shell, and what it finds otherwise is shown below. With --node or --socket
that node alone is asked.

A thing is ok, warn (it works, and could be better), fail (it should work, and
does not), or absent (there is none, and none is needed).

With PEER, the name of another node, have the node read a page of it by each
transport that either has, twice, over links of their own. The page is the sink,
which nobody uses on either side; what is read otherwise is not disturbed.

Exit code 1 if anything fails.`,
		Example: `  kvferry doctor -c node.yaml
  kvferry doctor --node prefill-0
  kvferry --node prefill-0 doctor decode-0`,
		Args:              atMostOneArgument,
		ValidArgsFunction: d.complete,
		RunE: func(cmd *cobra.Command, args []string) error {
			local := cmd.Flags().Changed("config") || cmd.Flags().Changed("set")
			switch {
			case len(args) == 1 && local:
				return usage(cmd, "-c and --set: a node that runs reads %s, by its own configuration", args[0])
			case cmd.Flags().Changed("set") && d.file == "":
				return usage(cmd, "--set changes keys of a configuration: want -c FILE, too")
			case len(args) == 1:
				return d.probe(cmd, args[0])
			case cmd.Flags().Changed("timeout"):
				return usage(cmd, "--timeout: want PEER")
			case t.node != "" || t.socket != "":
				if local {
					return usage(cmd, "-c and --set: a node that runs has its own configuration")
				}
				return d.ask(cmd)
			default:
				return d.look(cmd)
			}
		},
	}
	f := cmd.Flags()
	f.StringVarP(&d.file, "config", "c", "", "look at the machine for the node of this configuration")
	addSet(cmd, &d.sets)
	f.DurationVar(&d.timeout, "timeout", probeTimeout, "with PEER, for all transports together")
	d.output = addFormat(cmd)
	return cmd
}

type doctor struct {
	target  *target
	file    string
	sets    []string
	timeout time.Duration
	output  *format
}

// diagnosis is the document of the command without PEER.
type diagnosis struct {
	Items []node.Check `json:"items"` // as this process finds them
	Node  *finding     `json:"node"`  // null: none answers
}

// finding is what a node finds.
type finding struct {
	Node  string       `json:"node"`
	Items []node.Check `json:"items"`
}

// ask has a node look.
func (d *doctor) ask(cmd *cobra.Command) error {
	c, err := d.target.dial()
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := soon(cmd.Context())
	defer cancel()
	found, err := findingOf(ctx, c)
	if err != nil {
		return err
	}
	return d.print(cmd.OutOrStdout(), diagnosis{Items: []node.Check{}, Node: found})
}

// look looks here, and has a node look that happens to run.
func (d *doctor) look(cmd *cobra.Command) error {
	var e node.Examination
	if d.file != "" {
		var err error
		if e.Config, err = config.Load(d.file, d.sets...); err != nil {
			return err
		}
	}
	beside := node.Check{Name: "node", State: node.StateAbsent}
	found, serving, at, err := d.beside(cmd.Context(), e.Config)
	if err != nil {
		beside.Found = "none answers: " + err.Error()
	} else {
		beside.State, beside.Found = node.StateOK, fmt.Sprintf("%s runs here, at %s", found.Node, at)
		e.Serving = serving
	}
	return d.print(cmd.OutOrStdout(), diagnosis{Items: append([]node.Check{beside}, node.Examine(e)...), Node: found})
}

// beside asks the node of a configuration, or else the one that any command
// would ask, what it finds, and which addresses it has.
func (d *doctor) beside(ctx context.Context, conf *config.Config) (found *finding, serving map[string]string, at string, err error) {
	if conf != nil {
		at = conf.Node.Socket
	} else if at, err = d.target.path(); err != nil {
		return nil, nil, "", err
	}
	c, err := client.Dial(at)
	if err != nil {
		return nil, nil, "", err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeoutCause(ctx, besideTimeout, fmt.Errorf("no answer for %v", besideTimeout))
	defer cancel()
	s, err := c.Admin().Status(ctx, &kvferrypb.StatusRequest{})
	if err != nil {
		return nil, nil, "", err
	}
	serving = make(map[string]string)
	for _, a := range s.GetAddresses() {
		serving[a.GetName()] = a.GetAddress()
	}
	found, err = findingOf(ctx, c)
	return found, serving, at, err
}

func findingOf(ctx context.Context, c *client.Client) (*finding, error) {
	r, err := c.Admin().Doctor(ctx, &kvferrypb.DoctorRequest{})
	if err != nil {
		return nil, err
	}
	f := &finding{Node: r.GetNode(), Items: []node.Check{}}
	for _, i := range r.GetItems() {
		f.Items = append(f.Items, node.Check{Name: i.GetName(), State: i.GetState(), Found: i.GetFound(), Remedy: i.GetRemedy()})
	}
	return f, nil
}

func (d *doctor) print(w io.Writer, all diagnosis) error {
	if d.output.value != asTable {
		if err := printDocument(w, d.output, all); err != nil {
			return err
		}
		return all.failure()
	}
	if len(all.Items) > 0 {
		showChecks(w, all.Items)
	}
	if all.Node == nil {
		return all.failure()
	}
	items := all.Node.Items
	if len(all.Items) > 0 {
		items = slices.DeleteFunc(slices.Clone(items), func(c node.Check) bool { return slices.Contains(all.Items, c) })
		fmt.Fprintf(w, "\n%s finds the same, but for:\n", printable(all.Node.Node))
	}
	showChecks(w, items)
	return all.failure()
}

// failure names what fails.
func (all diagnosis) failure() error {
	var names []string
	for _, c := range all.Items {
		if c.State == node.StateFail {
			names = append(names, c.Name)
		}
	}
	if all.Node != nil {
		for _, c := range all.Node.Items {
			if c.State == node.StateFail {
				names = append(names, c.Name+" of "+all.Node.Node)
			}
		}
	}
	if len(names) > 0 {
		return fmt.Errorf("not as it should be: %s", strings.Join(names, ", "))
	}
	return nil
}

func showChecks(w io.Writer, checks []node.Check) {
	rows := newTable(w, "check", "state", "found", "what to do")
	wrap(rows, 0, 0, 44, 26)
	for _, c := range checks {
		rows.AppendRow([]any{c.Name, c.State, c.Found, orDash(c.Remedy)})
	}
	rows.Render()
}

// wrap bounds the width of columns; 0: as wide as it is.
func wrap(rows tableWriter, widths ...int) {
	var columns []table.ColumnConfig
	for i, width := range widths {
		if width > 0 {
			columns = append(columns, table.ColumnConfig{Number: i + 1, WidthMax: width, WidthMaxEnforcer: text.WrapSoft})
		}
	}
	rows.SetColumnConfigs(columns)
}

// probe has the node read a peer.
func (d *doctor) probe(cmd *cobra.Command, peer string) error {
	if d.timeout <= 0 {
		return usage(cmd, "--timeout=%v: want more than nothing", d.timeout)
	}
	c, err := d.target.dial()
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeoutCause(cmd.Context(), d.timeout, fmt.Errorf("no answer for %v", d.timeout))
	defer cancel()
	r, err := c.Admin().Probe(ctx, &kvferrypb.ProbeRequest{Node: peer})
	if err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	if d.output.value == asTable {
		showProbe(out, r)
	} else if err := printMessage(out, d.output, r); err != nil {
		return err
	}
	return probeFailure(r)
}

func showProbe(w io.Writer, r *kvferrypb.ProbeResponse) {
	list := newTable(w)
	wrap(list, 0, 86)
	add := func(name string, value any) { list.AppendRow([]any{name, value}) }
	add("peer", fmt.Sprintf("%s.%d at %s", r.GetNode(), r.GetIncarnation(), r.GetAddress()))
	add("hello", cmp.Or(r.GetHelloError(), "answered after "+formatDuration(r.GetHello())))
	if ds := r.GetDifferences(); len(ds) > 0 {
		fields := make([]string, len(ds))
		for i, d := range ds {
			fields[i] = fmt.Sprintf("%s (%s here, %s there)", d.GetField(), d.GetOurs(), d.GetTheirs())
		}
		add("KV", "they would exchange none, see kvferry compat: "+strings.Join(fields, ", "))
	}
	list.Render()
	fmt.Fprintln(w)
	rows := newTable(w, "transport", "state", "in use", "bytes", "open", "first", "second", "path")
	reasons := newTable(w, "transport", "reason", "what to do")
	wrap(reasons, 0, 52, 34)
	for _, i := range r.GetItems() {
		rows.AppendRow([]any{
			i.GetTransport(), i.GetState(), yesNo(i.GetInUse()), formatBytes(i.GetBytes()),
			formatDuration(i.GetOpen()), formatDuration(i.GetFirst()), formatDuration(i.GetSecond()), orDash(i.GetPath()),
		})
		if i.GetReason() != "" {
			reasons.AppendRow([]any{i.GetTransport(), i.GetReason(), orDash(i.GetRemedy())})
		}
	}
	rows.Render()
	if reasons.Length() > 0 {
		fmt.Fprintln(w)
		reasons.Render()
	}
}

// probeFailure says what fails of a peer.
func probeFailure(r *kvferrypb.ProbeResponse) error {
	var failed []string
	read := false
	if r.GetHelloError() != "" {
		failed = append(failed, "the peer service")
	}
	for _, i := range r.GetItems() {
		read = read || i.GetState() == node.StateOK
		if i.GetState() == node.StateFail {
			failed = append(failed, i.GetTransport())
		}
	}
	switch {
	case len(failed) > 0:
		return fmt.Errorf("%s: not as it should be: %s", r.GetNode(), strings.Join(failed, ", "))
	case !read:
		return fmt.Errorf("%s can be read by no transport", r.GetNode())
	default:
		return nil
	}
}

// complete offers the other members to the shell.
func (d *doctor) complete(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return d.target.completeFrom(cmd.Context(), func(ctx context.Context, a kvferrypb.AdminClient) []cobra.Completion {
		m, err := a.Members(ctx, &kvferrypb.MembersRequest{})
		if err != nil {
			return nil
		}
		var names []cobra.Completion
		for _, i := range m.GetItems() {
			if !i.GetSelf() {
				names = append(names, cobra.CompletionWithDesc(i.GetNode(), i.GetRole()))
			}
		}
		return names
	}), cobra.ShellCompDirectiveNoFileComp
}
