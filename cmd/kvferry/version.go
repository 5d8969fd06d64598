package main

import (
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// build is what went into this binary.
type build struct {
	Version string `json:"version"`
	Go      string `json:"go"`
	System  string `json:"system"`
	Tags    string `json:"tags"` // "" none
	Cgo     bool   `json:"cgo"`
	Commit  string `json:"commit"`
}

func readBuild() build {
	b := build{Version: "unknown", Go: runtime.Version(), System: runtime.GOOS + "/" + runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	if v := info.Main.Version; v != "" {
		b.Version = v
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "-tags":
			b.Tags = s.Value
		case "CGO_ENABLED":
			b.Cgo = s.Value == "1"
		case "vcs.revision":
			b.Commit = s.Value + b.Commit
		case "vcs.modified":
			if s.Value == "true" {
				b.Commit += " and changes"
			}
		}
	}
	return b
}

func newVersion() *cobra.Command {
	var output *format
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Show the version, and what went into this binary",
		Args:  noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			b := readBuild()
			if output.value != asTable {
				return printDocument(cmd.OutOrStdout(), output, b)
			}
			list := newTable(cmd.OutOrStdout())
			for _, row := range [][]any{
				{"kvferry", b.Version},
				{"go", b.Go},
				{"system", b.System},
				{"tags", orDash(b.Tags)},
				{"cgo", b.Cgo},
				{"commit", orDash(b.Commit)},
			} {
				list.AppendRow(row)
			}
			list.Render()
			return nil
		},
	}
	output = addFormat(cmd)
	return cmd
}
