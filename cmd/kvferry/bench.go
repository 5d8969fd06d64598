package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/internal/bench"
	"github.com/kvferry/kvferry/internal/localcluster"
)

func newBench(t *target) *cobra.Command {
	o := bench.Options{}
	var check bool
	var output *format
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure the transports beside what the machine reaches without them",
		Long: `Measure what each transport reaches between two processes, beside what the
machine reaches without it, in interleaved rounds. Where a local cluster is up,
publish to ready is measured on its first prefill and decode node. Then
announcements are gossiped in clusters of up to 32 members that are all in this
process, which takes about two minutes.

What could not be measured is listed with the reason.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, name := range o.Parts {
				if !slices.Contains(bench.Parts(), name) {
					return usage(cmd, "--part=%s: want some of %s", name, strings.Join(bench.Parts(), ","))
				}
			}
			for _, n := range o.ChunkBytes {
				if n < bench.MinChunkBytes || n > bench.MaxChunkBytes || n%8 != 0 {
					return usage(cmd, "--chunk=%d: want a multiple of 8, %d to %d", n, bench.MinChunkBytes, bench.MaxChunkBytes)
				}
			}
			switch {
			case len(o.Parts) == 0:
				return usage(cmd, "--part is empty")
			case len(o.ChunkBytes) == 0:
				return usage(cmd, "--chunk is empty")
			case o.Concurrency < 1 || o.Concurrency > bench.MaxConcurrency:
				return usage(cmd, "--concurrency=%d: want 1 to %d", o.Concurrency, bench.MaxConcurrency)
			case o.Rounds < 1 || o.Rounds > bench.MaxRounds:
				return usage(cmd, "--rounds=%d: want 1 to %d", o.Rounds, bench.MaxRounds)
			case o.ArenaBytes < o.LeastArena() || o.ArenaBytes > bench.MaxArenaBytes:
				return usage(cmd, "--arena=%d: want %d, two of the largest chunk for each read at once, to %d", o.ArenaBytes, o.LeastArena(), int64(bench.MaxArenaBytes))
			case o.Duration <= 0 || o.Duration > bench.MaxDuration:
				return usage(cmd, "--duration=%v: want more than 0s, at most %v", o.Duration, bench.MaxDuration)
			case o.Samples < 1 || o.Samples > bench.MaxSamples:
				return usage(cmd, "--samples=%d: want 1 to %d", o.Samples, bench.MaxSamples)
			case o.Warmup < 0 || o.Warmup > bench.MaxSamples:
				return usage(cmd, "--warmup=%d: want 0 to %d", o.Warmup, bench.MaxSamples)
			case o.Warmup == 0:
				o.Warmup = -1 // none; 0 is for the default
			}
			self, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program: %w", err)
			}
			o.Owner = []string{self, "bench", "owner"}
			c, err := localcluster.Load(t.cluster)
			if err == nil {
				prefill, decode := c.Sockets("prefill"), c.Sockets("decode")
				if len(prefill) > 0 && len(decode) > 0 {
					o.Prefill, o.Decode = prefill[0], decode[0]
				}
			} else if !errors.Is(err, localcluster.ErrNotUp) {
				return err
			}
			o.Progress = cmd.ErrOrStderr()
			report, err := bench.Run(cmd.Context(), o)
			if err != nil {
				return err
			}
			if output.value == asMarkdown {
				_, err = io.WriteString(cmd.OutOrStdout(), report.Markdown())
			} else {
				err = printReport(cmd.OutOrStdout(), output, report)
			}
			if err != nil {
				return err
			}
			if check && !report.OK() {
				return errors.New("a figure missed its bound, see the report")
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&o.Parts, "part", bench.Parts(), "what to measure")
	f.Int64SliceVar(&o.ChunkBytes, "chunk", []int64{64 << 10}, "bytes of the chunks pulled, multiples of 8")
	f.IntVar(&o.Concurrency, "concurrency", 1, "reads at once on a link")
	f.IntVar(&o.Rounds, "rounds", 9, "interleaved rounds")
	f.Int64Var(&o.ArenaBytes, "arena", 512<<20, "bytes of either side's arena")
	f.DurationVar(&o.Duration, "duration", time.Second, "of one pull of one round, at least")
	f.IntVar(&o.Samples, "samples", 400, "samples of publish to ready")
	f.IntVar(&o.Warmup, "warmup", 50, "samples before that which do not count")
	f.BoolVar(&check, "check", false, "fail if a figure misses its bound")
	output = addFormat(cmd, asMarkdown)
	cmd.AddCommand(&cobra.Command{
		Use:    "owner",
		Short:  "The other process of a pull",
		Hidden: true,
		Args:   noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return bench.ServeOwner(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout())
		},
	})
	return cmd
}

// tabled is a document with a form of its own for people.
type tabled interface{ WriteTable(io.Writer) error }

func printReport(w io.Writer, output *format, r tabled) error {
	if output.value == asTable {
		return r.WriteTable(w)
	}
	return printDocument(w, output, r)
}
