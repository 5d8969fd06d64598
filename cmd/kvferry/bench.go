package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
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
	var plot string
	var percent []int
	var output *format
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure the transports beside what the machine reaches without them",
		Long: `Measure what each transport reaches between two processes, beside what the
machine reaches without it, in interleaved rounds: memcpy of the C library (which
takes a C compiler) beside shm, ib_read_bw beside rdma, iperf3 beside tcp. Where a local cluster is up,
publish to ready is measured on its first prefill and decode node. Then
announcements are gossiped in clusters of up to 32 members that are all in this
process, which takes about two minutes, as long as all the rest.

What could not be measured is listed with the reason.`,
		Example: `  kvferry bench --part pull --transport shm --rounds 3
  kvferry bench --part pull --chunk 16384,65536 --contiguity 0,100 --concurrency 2
  kvferry bench --part pull --transport rdma --device mlx5_0,mlx5_1
  scripts/with-cluster.sh --prefill 1 --decode 1 -- bench -o markdown --plot bench.svg`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, name := range o.Parts {
				if !slices.Contains(bench.Parts(), name) {
					return usage(cmd, "--part=%s: want some of %s", name, strings.Join(bench.Parts(), ","))
				}
			}
			for _, name := range o.Transports {
				if !slices.Contains(bench.Transports(), name) {
					return usage(cmd, "--transport=%s: want some of %s", name, strings.Join(bench.Transports(), ","))
				}
			}
			for _, n := range percent {
				if n < 0 || n > 100 {
					return usage(cmd, "--contiguity=%d: want 0 to 100", n)
				}
				o.Contiguity = append(o.Contiguity, float64(n)/100)
			}
			for _, n := range o.ChunkBytes {
				if n < bench.MinChunkBytes || n > bench.MaxChunkBytes || n%8 != 0 {
					return usage(cmd, "--chunk=%d: want a multiple of 8, %d to %d", n, bench.MinChunkBytes, bench.MaxChunkBytes)
				}
			}
			switch {
			case len(o.Parts) == 0:
				return usage(cmd, "--part is empty")
			case len(o.Transports) == 0:
				return usage(cmd, "--transport is empty")
			case plot != "" && !slices.Contains(bench.PlotFormats(), plotFormat(plot)):
				return usage(cmd, "--plot=%s: want a name that ends in one of .%s", plot, strings.Join(bench.PlotFormats(), " ."))
			case plot != "" && !slices.Contains(o.Parts, "pull"):
				return usage(cmd, "--plot=%s: want pull among the parts", plot)
			case plot != "" && len(percent) > 0 && !slices.Contains(percent, 0):
				return usage(cmd, "--plot=%s: want 0 among the contiguities", plot)
			case len(o.Devices) > 2:
				return usage(cmd, "--device=%s: want two at most, the reader's and the owner's", strings.Join(o.Devices, ","))
			case len(o.ChunkBytes) == 0:
				return usage(cmd, "--chunk is empty")
			case o.Concurrency < 1 || o.Concurrency > bench.MaxConcurrency:
				return usage(cmd, "--concurrency=%d: want 1 to %d", o.Concurrency, bench.MaxConcurrency)
			case o.Lanes < 1 || o.Lanes > bench.MaxLanes || o.Concurrency*o.Lanes > bench.MaxConnections:
				return usage(cmd, "--lanes=%d: want 1 to %d, and for all reads at once at most %d", o.Lanes, bench.MaxLanes, bench.MaxConnections)
			case o.Workers < 1 || o.Workers > bench.MaxWorkers:
				return usage(cmd, "--workers=%d: want 1 to %d", o.Workers, bench.MaxWorkers)
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
			if _, err := os.Stat(filepath.Dir(plot)); err != nil {
				return usage(cmd, "--plot=%s: %w", plot, err)
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
			} else if !errors.Is(err, localcluster.ErrNotUp) || cmd.Flags().Changed("name") {
				return err // no cluster is fine but for one that was named
			}
			o.Progress = cmd.ErrOrStderr()
			report, err := bench.Run(cmd.Context(), o)
			if err != nil {
				return err
			}
			if output.value == asMarkdown {
				beside := "" // the page is expected where the plot is
				if plot != "" {
					beside = filepath.Base(plot)
				}
				_, err = io.WriteString(cmd.OutOrStdout(), report.Markdown(beside))
			} else {
				err = printReport(cmd.OutOrStdout(), output, report)
			}
			if err != nil {
				return err
			}
			if plot != "" {
				var picture bytes.Buffer
				if err := report.Plot(&picture, plotFormat(plot)); err != nil {
					return err
				}
				if err := os.WriteFile(plot, picture.Bytes(), 0o644); err != nil {
					return fmt.Errorf("write plot: %w", err)
				}
			}
			if err := report.Check(); check && err != nil {
				return err
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&o.Parts, "part", bench.Parts(), "what to measure")
	f.StringSliceVar(&o.Transports, "transport", bench.Transports(), "those of pull and submit")
	f.StringSliceVar(&o.Devices, "device", nil, "RDMA devices of the reader and of the owner, or one for both, such as mlx5_0 or mlx5_0:1 (default all)")
	f.Int64SliceVar(&o.ChunkBytes, "chunk", bench.ChunkSizes(), "bytes of the chunks pulled, multiples of 8")
	f.IntSliceVar(&percent, "contiguity", nil, "percent of the chunks that follow their neighbour on both sides (default 0, and 50 and 100 at 65536 bytes)")
	f.IntVar(&o.Concurrency, "concurrency", 1, "reads at once on a link")
	f.IntVar(&o.Lanes, "lanes", bench.DefaultLanes, "connections of a read by tcp; iperf3 has as many for all reads")
	f.IntVar(&o.Workers, "workers", 1, "threads that copy for shm, and for memcpy beside it")
	f.IntVar(&o.Rounds, "rounds", 9, "interleaved rounds")
	f.Int64Var(&o.ArenaBytes, "arena", 512<<20, "bytes of either side's arena")
	f.DurationVar(&o.Duration, "duration", 400*time.Millisecond, "of one pull of one round, at least")
	f.IntVar(&o.Samples, "samples", 400, "samples of publish to ready")
	f.IntVar(&o.Warmup, "warmup", 50, "samples before that which do not count")
	f.StringVar(&plot, "plot", "", "a file to write (.svg, .png, or .pdf), of the throughput of scattered chunks by size")
	f.BoolVar(&check, "check", false, "fail if a figure misses its bound, or something is not measured")
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

// plotFormat is that of a file by its name; "" if the name has no suffix.
func plotFormat(path string) string { return strings.TrimPrefix(filepath.Ext(path), ".") }

// tabled is a document with a form of its own for people.
type tabled interface{ WriteTable(io.Writer) error }

func printReport(w io.Writer, output *format, r tabled) error {
	if output.value == asTable {
		return r.WriteTable(w)
	}
	return printDocument(w, output, r)
}
