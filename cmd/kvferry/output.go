package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
)

// Formats of -o.
const (
	asTable    = "table"
	asJSON     = "json"
	asYAML     = "yaml"
	asMarkdown = "markdown"
)

// format is the value of -o: the first of those allowed until it is set.
type format struct {
	value   string
	allowed []string
}

func (f *format) String() string { return f.value }
func (f *format) Type() string   { return "format" }

// Set takes one of those allowed; pflag calls it.
func (f *format) Set(s string) error {
	if !slices.Contains(f.allowed, s) {
		return fmt.Errorf("want %s", strings.Join(f.allowed, ", "))
	}
	f.value = s
	return nil
}

// addFormat adds -o to a command: table, json, yaml, and what else is given.
func addFormat(cmd *cobra.Command, also ...string) *format {
	f := &format{value: asTable, allowed: append([]string{asTable, asJSON, asYAML}, also...)}
	cmd.Flags().VarP(f, "output", "o", strings.Join(f.allowed, ", "))
	must(cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(f.allowed, cobra.ShellCompDirectiveNoFileComp)))
	return f
}

// look is a command that shows one answer of the admin service, once or again
// and again.
type look[M proto.Message] struct {
	target *target
	take   func(cmd *cobra.Command, arg string) error // its one argument; nil: it has none
	ask    func(context.Context, kvferrypb.AdminClient) (M, error)
	show   func(io.Writer, M) // as tables

	output *format
	watch  time.Duration
}

// command completes a command with the flags and the body that all looks share.
func (l *look[M]) command(cmd *cobra.Command) *cobra.Command {
	cmd.Args = noArguments
	if l.take != nil {
		cmd.Args = oneArgument
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		for _, a := range args {
			if err := l.take(cmd, a); err != nil {
				return err
			}
		}
		return l.run(cmd)
	}
	l.output = addFormat(cmd)
	cmd.Flags().DurationVar(&l.watch, "watch", 0, "look again and again, with this pause")
	cmd.Flags().Lookup("watch").NoOptDefVal = "1s"
	return cmd
}

func (l *look[M]) run(cmd *cobra.Command) error {
	if l.watch < 0 {
		return usage(cmd, "--watch=%v is negative", l.watch)
	}
	c, err := l.target.dial()
	if err != nil {
		return err
	}
	defer c.Close()
	for {
		err := l.once(cmd, c)
		if l.watch == 0 {
			return err
		}
		select {
		case <-cmd.Context().Done():
			return nil // the way to end a watch, also in the middle of a call
		default:
		}
		if err != nil {
			return err
		}
		select {
		case <-time.After(l.watch):
		case <-cmd.Context().Done():
		}
	}
}

func (l *look[M]) once(cmd *cobra.Command, c *client.Client) error {
	ctx, cancel := soon(cmd.Context())
	defer cancel()
	m, err := l.ask(ctx, c.Admin())
	if err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	if l.watch > 0 && l.output.value == asTable && isTerminal(out) {
		fmt.Fprint(out, "\x1b[H\x1b[2J") // from the top of an empty screen
	}
	if l.output.value == asTable {
		l.show(out, m)
		return nil
	}
	return printMessage(out, l.output, m)
}

// printMessage prints the message by protojson: 64-bit numbers are strings,
// zero values are there.
func printMessage(w io.Writer, f *format, m proto.Message) error {
	raw, err := protojson.MarshalOptions{EmitDefaultValues: true}.Marshal(m)
	if err != nil {
		return fmt.Errorf("print %s: %w", f, err)
	}
	return printJSON(w, f, raw)
}

// printDocument prints a document of ours.
func printDocument(w io.Writer, f *format, doc any) error {
	raw, err := json.Marshal(doc)
	if err != nil {
		return fmt.Errorf("print %s: %w", f, err)
	}
	return printJSON(w, f, raw)
}

func printJSON(w io.Writer, f *format, raw []byte) error {
	if f.value == asYAML {
		out, err := yaml.JSONToYAML(raw)
		if err != nil {
			return fmt.Errorf("print yaml: %w", err)
		}
		// A document of a stream, when watched.
		_, err = fmt.Fprintf(w, "---\n%s", out)
		return err
	}
	// protojson varies its spaces on purpose.
	var out bytes.Buffer
	if err := json.Indent(&out, raw, "", "  "); err != nil {
		return fmt.Errorf("print json: %w", err)
	}
	out.WriteByte('\n')
	_, err := w.Write(out.Bytes())
	return err
}

// newTable is a table without lines, easy to cut and to grep.
// Names in it come from elsewhere, so that no cell gets to the terminal as it is.
func newTable(w io.Writer, header ...any) tableWriter {
	t := table.NewWriter()
	t.SetOutputMirror(w)
	style := table.StyleDefault
	style.Options = table.OptionsNoBordersAndSeparators
	style.Format.Header = text.FormatUpper
	style.Box.PaddingLeft = ""
	style.Box.PaddingRight = "  "
	t.SetStyle(style)
	t.SuppressTrailingSpaces()
	if len(header) > 0 {
		t.AppendHeader(header)
	}
	return tableWriter{t}
}

// tableWriter is a table whose cells are printable.
type tableWriter struct{ table.Writer }

// AppendRow adds a row; numbers stay numbers, and so to the right.
func (t tableWriter) AppendRow(row table.Row, config ...table.RowConfig) {
	safe := slices.Clone(row)
	for i, cell := range safe {
		if text := fmt.Sprint(cell); printable(text) != text {
			safe[i] = printable(text)
		}
	}
	t.Writer.AppendRow(safe, config...)
}

// printable writes what a terminal would obey, and what is no text, as Go does:
// \x1b, \n, \xff.
func printable(s string) string {
	var out strings.Builder
	for i, r := range s {
		switch _, size := utf8.DecodeRuneInString(s[i:]); {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&out, `\x%02x`, s[i])
		case unicode.IsPrint(r):
			out.WriteRune(r)
		default:
			out.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
	}
	return out.String()
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	i, err := f.Stat()
	return err == nil && i.Mode()&os.ModeCharDevice != 0
}

// formatBytes is a size for people.
func formatBytes(n uint64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	value, prefix := float64(n)/unit, 0
	for value >= unit && prefix < 5 {
		value /= unit
		prefix++
	}
	return fmt.Sprintf("%.1f %ciB", value, "KMGTPE"[prefix])
}

// formatDuration is a duration for people; none is a dash.
func formatDuration(d *durationpb.Duration) string {
	if d == nil {
		return "-"
	}
	v := d.AsDuration()
	switch {
	case v < time.Millisecond:
		return v.String()
	case v < time.Second:
		return v.Round(10 * time.Microsecond).String()
	default:
		return v.Round(100 * time.Millisecond).String()
	}
}

// orDash makes an empty cell visible.
func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// wrapped breaks what people read as sentences into lines, in the columns of these
// names.
func (t tableWriter) wrapped(columns ...string) {
	const width = 72
	var configs []table.ColumnConfig
	for _, c := range columns {
		configs = append(configs, table.ColumnConfig{Name: c, WidthMax: width, WidthMaxEnforcer: text.WrapSoft})
	}
	t.SetColumnConfigs(configs)
}
