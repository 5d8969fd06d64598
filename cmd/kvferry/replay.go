package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/internal/localcluster"
	"github.com/kvferry/kvferry/internal/replay"
)

func newReplay(t *target) *cobra.Command {
	o := replay.Options{}
	var limit int
	var output *format
	cmd := &cobra.Command{
		Use:   "replay TRACE",
		Short: "Drive a cluster from a request trace and check every byte",
		Long: `Drive the nodes of a local cluster as inference engines would, from a request
trace in Mooncake's public format (one JSON object a line: timestamp,
input_length, output_length, hash_ids), and check every byte that crosses.

Exit code 0 only if every request was ready and every byte was right, 4 if
bytes were wrong or missing.`,
		Example: `  kvferry replay configs/traces/demo.jsonl
  kvferry replay conversation_trace.jsonl --limit 300 -o json`,
		Args: oneArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case limit < 0:
				return usage(cmd, "--limit=%d is negative", limit)
			case !(o.TimeScale >= 0 && o.TimeScale <= replay.MaxTimeScale):
				return usage(cmd, "--time-scale=%v: want 0 to %v", o.TimeScale, replay.MaxTimeScale)
			case o.Concurrency < 0:
				return usage(cmd, "--concurrency=%d is negative", o.Concurrency)
			case o.Labels < 1 || o.Labels > replay.MaxReplayLabels:
				return usage(cmd, "--labels=%d: want 1 to %d", o.Labels, replay.MaxReplayLabels)
			case o.ChunkTokens < 1:
				return usage(cmd, "--chunk=%d: want 1 or more", o.ChunkTokens)
			case o.DecodeSteps < -1 || o.DecodeSteps > replay.MaxTokens:
				return usage(cmd, "--decode-steps=%d: want -1 to %d", o.DecodeSteps, replay.MaxTokens)
			case o.Timeout <= 0:
				return usage(cmd, "--timeout=%v: want more than 0s", o.Timeout)
			}
			requests, err := replay.ReadTraceFile(args[0], limit)
			if err != nil {
				return err
			}
			o.Requests = requests
			if len(o.Prefill) == 0 && len(o.Decode) == 0 {
				c, err := localcluster.Load(t.cluster)
				if err != nil {
					return err
				}
				o.Prefill, o.Decode = c.Sockets("prefill"), c.Sockets("decode")
			}
			o.Progress = cmd.ErrOrStderr()
			report, err := replay.Run(cmd.Context(), o)
			if report != nil {
				if err := printReport(cmd.OutOrStdout(), output, report); err != nil {
					return err
				}
			}
			switch {
			case err != nil:
				return err
			case report.Corrupt():
				return fmt.Errorf("%w: %d of %d bytes verified, %d wrong, %d requests ready too early", errVerify, report.VerifiedBytes, report.Bytes, report.WrongBytes, report.Early)
			case !report.OK:
				return fmt.Errorf("%d of %d requests failed", report.Requests-report.Ready, report.Requests)
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.IntVar(&limit, "limit", 0, "only the first so many requests (default all)")
	f.Float64Var(&o.TimeScale, "time-scale", 0, "stretch the trace's timestamps, by 100 at most: 1 is real time, 0 as fast as the nodes take them")
	f.IntVar(&o.Concurrency, "concurrency", 0, "requests started at once, at most (default 4 a node of the larger side)")
	f.IntVar(&o.Labels, "labels", 1, "streams of a request, 1 to 8")
	f.IntVar(&o.ChunkTokens, "chunk", 512, "tokens of a prefill chunk, at most")
	f.IntVar(&o.DecodeSteps, "decode-steps", 0, "tokens to decode after the prompt, at most; -1: none (default 8)")
	f.DurationVar(&o.Timeout, "timeout", 2*time.Minute, "for one request")
	f.StringArrayVar(&o.Prefill, "prefill", nil, "engine socket of a prefill node, instead of the local cluster's; may be repeated")
	f.StringArrayVar(&o.Decode, "decode", nil, "engine socket of a decode node; may be repeated")
	cmd.MarkFlagsRequiredTogether("prefill", "decode")
	output = addFormat(cmd)
	return cmd
}
