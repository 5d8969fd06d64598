package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/internal/localcluster"
	"github.com/kvferry/kvferry/internal/replay"
)

func newReplay(t *target) *cobra.Command {
	o := replay.Options{}
	var limit int
	var expectFailures bool
	var output *format
	cmd := &cobra.Command{
		Use:   "replay TRACE",
		Short: "Drive a cluster from a request trace and check every byte",
		Long: `Drive the nodes of a local cluster as inference engines would, from a request
trace in Mooncake's public format (one JSON object a line: timestamp,
input_length, output_length, hash_ids), and check every byte that crosses.

Where decode nodes have a host tier more requests run than their arenas hold: the
nodes move those that are idle to the host, and they come back for their next
step. With --step-pause there is idle time for that.

Nodes may die, drain, and come back at the same socket meanwhile: their requests
end with a code, and others are given to the node as soon as it is back.

Exit code 0 only if every request was ready, every byte was right, and nothing
was left on the nodes, 4 if bytes were wrong or missing. With --expect-failures
requests may also fail, if a node was lost during the run and their codes are
such as that explains; the report says how.`,
		Example: `  kvferry replay configs/traces/demo.jsonl
  kvferry replay configs/traces/demo.jsonl --labels 2 --step-pause 20ms
  kvferry replay conversation_trace.jsonl --limit 300 -o json
  kvferry replay configs/traces/demo.jsonl --loop 10m --timeout 20s --expect-failures`,
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
			case o.StepPause < 0:
				return usage(cmd, "--step-pause=%v is negative", o.StepPause)
			case o.Timeout <= 0:
				return usage(cmd, "--timeout=%v: want more than 0s", o.Timeout)
			case o.Loop < 0:
				return usage(cmd, "--loop=%v is negative", o.Loop)
			case o.NodeWait <= 0:
				return usage(cmd, "--node-wait=%v: want more than 0s", o.NodeWait)
			case o.Settle <= 0:
				return usage(cmd, "--settle=%v: want more than 0s", o.Settle)
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
			o.Progress, o.CUDALibrary = cmd.ErrOrStderr(), cudaLibrary(o.CUDALibrary)
			report, err := replay.Run(cmd.Context(), o)
			if report != nil {
				if err := printReport(cmd.OutOrStdout(), output, report); err != nil {
					return err
				}
			}
			return verdict(report, err, expectFailures)
		},
	}
	f := cmd.Flags()
	f.IntVar(&limit, "limit", 0, "only the first so many requests (default all)")
	f.Float64Var(&o.TimeScale, "time-scale", 0, "stretch the trace's timestamps, by 100 at most: 1 is real time, 0 as fast as the nodes take them")
	f.IntVar(&o.Concurrency, "concurrency", 0, "requests started at once, at most (default 4 a node of the larger side)")
	f.IntVar(&o.Labels, "labels", 1, "streams of a request, 1 to 8: main, and others that are forks of it or written beside it")
	f.IntVar(&o.ChunkTokens, "chunk", 512, "tokens of a prefill chunk, at most")
	f.IntVar(&o.DecodeSteps, "decode-steps", 0, "tokens to decode after the prompt, at most; -1: none (default 8)")
	f.DurationVar(&o.StepPause, "step-pause", 0, "after every token that is decoded, as if others had their turn (default none)")
	f.DurationVar(&o.Timeout, "timeout", 2*time.Minute, "for one request")
	f.DurationVar(&o.Loop, "loop", 0, "replay the trace again and again for so long (default once)")
	f.BoolVar(&expectFailures, "expect-failures", false, "let requests fail for which a node that died or drained is the reason")
	f.DurationVar(&o.NodeWait, "node-wait", 30*time.Second, "for a node of either role to be up, before requests fail for want of one")
	f.DurationVar(&o.Settle, "settle", time.Minute, "at the end, for the publications of failed requests to run out")
	f.StringArrayVar(&o.Prefill, "prefill", nil, "engine socket of a prefill node, instead of the local cluster's; may be repeated")
	f.StringArrayVar(&o.Decode, "decode", nil, "engine socket of a decode node; may be repeated")
	addCUDALibrary(cmd, &o.CUDALibrary)
	cmd.MarkFlagsRequiredTogether("prefill", "decode")
	output = addFormat(cmd)
	return cmd
}

// verdict is why a run is no success.
func verdict(r *replay.Report, err error, expectFailures bool) error {
	switch {
	case r != nil && r.Corrupt(): // whatever else there is
		return errors.Join(fmt.Errorf("%w: %d of %d bytes of the ready requests verified, %d wrong, %d requests ready too early", errVerify, r.VerifiedBytes, r.ReadyBytes, r.WrongBytes, r.Early), err)
	case err != nil || r.OK:
		return err
	case !expectFailures && r.Ready < r.Requests:
		return fmt.Errorf("%d of %d requests failed", r.Requests-r.Ready, r.Requests)
	default:
		return r.Unexplained()
	}
}
