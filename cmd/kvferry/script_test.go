package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/localcluster"
)

// TestMain lets the test's binary be kvferry, in scripts and for the nodes
// that `kvferry local up` starts in them.
func TestMain(m *testing.M) {
	if os.Getenv(raceOptions) == "" {
		// Else every command sleeps for a second before it ends.
		_ = os.Setenv(raceOptions, "atexit_sleep_ms=50") // it cannot fail
	}
	testscript.Main(m, map[string]func(){"kvferry": main})
}

// raceOptions are the variable that the race detector reads.
const raceOptions = "GORACE"

// TestScripts runs testdata/script: the command line as its users see it, with
// real processes. Each script has a directory of its own for clusters and
// sockets, which must be empty at its end.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			// A short path: sockets lie below it.
			run, err := os.MkdirTemp("", "kvf")
			if err != nil {
				return err
			}
			env.Setenv("XDG_RUNTIME_DIR", run)
			env.Setenv(raceOptions, os.Getenv(raceOptions))
			env.Defer(func() { downAll(run) })
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits, "await": await, "listen": listen, "save": save, "gone": gone, "zeros": zeros, "keep": keep, "terminate": terminate, "interrupted": interrupted,
		},
	})
}

// downAll ends what a script that failed has left.
func downAll(run string) {
	names, _ := filepath.Glob(filepath.Join(run, "kvferry", "local", "*"))
	for _, name := range names {
		down := exec.Command("kvferry", "local", "down", "--name", filepath.Base(name))
		down.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+run)
		_ = down.Run()
	}
	_ = os.RemoveAll(run)
}

// exits CODE COMMAND... runs a command that ends with exactly this code.
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE COMMAND [ARG...]")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	code := 0
	if err := ts.Exec(args[1], args[2:]...); err != nil {
		exit, ok := errors.AsType[*exec.ExitError](err)
		if !ok {
			ts.Fatalf("%v", err)
		}
		code = exit.ExitCode()
	}
	if code != want {
		ts.Fatalf("exit code %d, want %d", code, want)
	}
}

// await PATTERN COMMAND... runs a command again until it succeeds and its
// standard output matches, or with ! until it fails, for a minute at most.
func await(ts *testscript.TestScript, neg bool, args []string) {
	pattern, err := regexp.Compile("(?m)" + args[0])
	ts.Check(err)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ts.Check(localcluster.WaitFor(ctx, 100*time.Millisecond, func() error {
		err := ts.Exec(args[1], args[2:]...)
		switch {
		case neg && err == nil:
			return errors.New("it succeeds")
		case !neg && err != nil:
			return err
		case !neg && !pattern.MatchString(ts.ReadFile("stdout")):
			return fmt.Errorf("its output does not match %s", pattern)
		}
		return nil
	}))
}

// listen VAR takes a port and puts its number into a variable.
func listen(ts *testscript.TestScript, _ bool, args []string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ts.Check(err)
	ts.Defer(func() { _ = l.Close() })
	_, port, err := net.SplitHostPort(l.Addr().String())
	ts.Check(err)
	ts.Setenv(args[0], port)
}

// save VAR [PATTERN] puts the last command's standard output into a variable,
// or what the pattern's group matches of it.
func save(ts *testscript.TestScript, _ bool, args []string) {
	out := strings.TrimSpace(ts.ReadFile("stdout"))
	if len(args) > 1 {
		m := regexp.MustCompile(args[1]).FindStringSubmatch(out)
		if len(m) != 2 {
			ts.Fatalf("%q does not match %q", out, args[1])
		}
		out = m[1]
	}
	ts.Setenv(args[0], out)
}

// gone fails if a process runs that was started for this script, or if its
// directory for clusters and sockets is not empty.
func gone(ts *testscript.TestScript, _ bool, _ []string) {
	run := ts.Getenv("XDG_RUNTIME_DIR")
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	ts.Check(err)
	for _, path := range lines {
		line, err := os.ReadFile(path) // of a zombie it is empty
		if err == nil && strings.Contains(string(line), run) {
			ts.Fatalf("still runs: %s: %q", path, line)
		}
	}
	left, err := filepath.Glob(filepath.Join(run, "*"))
	ts.Check(err)
	if len(left) > 0 {
		ts.Fatalf("left behind: %v", left)
	}
}

// terminate sends SIGTERM to what runs in the background.
func terminate(ts *testscript.TestScript, _ bool, _ []string) {
	for _, c := range ts.BackgroundCmds() {
		ts.Check(c.Process.Signal(syscall.SIGTERM))
	}
}

// interrupted PATTERN COMMAND... runs a command until its standard output has
// matched twice, and sends it SIGINT, which must end it with code 0.
func interrupted(ts *testscript.TestScript, _ bool, args []string) {
	pattern := regexp.MustCompile(args[0])
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, args[1], args[2:]...)
	c.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+ts.Getenv("XDG_RUNTIME_DIR"))
	out, err := c.StdoutPipe()
	ts.Check(err)
	ts.Check(c.Start())
	matches := 0
	for lines := bufio.NewScanner(out); matches < 2 && lines.Scan(); {
		if pattern.Match(lines.Bytes()) {
			matches++
		}
	}
	ts.Check(c.Process.Signal(os.Interrupt))
	_, err = io.Copy(io.Discard, out)
	if err = errors.Join(err, c.Wait()); err != nil || matches < 2 {
		ts.Fatalf("%d matches, then %v", matches, err)
	}
}

// zeros SOCKET REQUEST publishes a request whose KV nobody has written: what
// retrieve --verify has to refuse.
func zeros(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(publishZeros(args[0], args[1]))
}

// keep SOCKET REQUEST begins a request of 300 tokens, which is there until the
// script ends.
func keep(ts *testscript.TestScript, _ bool, args []string) {
	ctx, cancel := soon(context.Background())
	defer cancel()
	c, err := client.Dial(args[0])
	ts.Check(err)
	ts.Defer(func() { _ = c.Close() })
	s, err := c.Open(ctx, client.OpenOptions{Engine: "keep"})
	ts.Check(err)
	ts.Defer(func() { _ = s.Close() }) // its node may be gone
	_, err = s.Ingest(ctx, &kvferrypb.IngestRequest{Request: args[1]})
	ts.Check(err)
	step, err := s.Admit(ctx, &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{{Request: args[1], Span: 300}}})
	ts.Check(err)
	_, err = s.Commit(ctx, &kvferrypb.CommitRequest{Step: step.GetStep()})
	ts.Check(err)
}

func publishZeros(socket, request string) (err error) {
	ctx, cancel := soon(context.Background())
	defer cancel()
	c, err := client.Dial(socket)
	if err != nil {
		return err
	}
	defer c.Close()
	s, err := c.Open(ctx, client.OpenOptions{Engine: "zeros"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if _, err := s.Ingest(ctx, &kvferrypb.IngestRequest{Request: request}); err != nil {
		return err
	}
	step, err := s.Admit(ctx, &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{{Request: request, Span: 300}}})
	if err != nil {
		return err
	}
	done, err := s.Commit(ctx, &kvferrypb.CommitRequest{Step: step.GetStep(), Publish: []*kvferrypb.PublishRequest{{Request: request, Final: true}}})
	if err != nil {
		return err
	}
	for _, p := range done.GetPublished() {
		if f := p.GetFailure(); f != nil {
			return fmt.Errorf("publish: %s", f.GetMessage())
		}
	}
	_, err = s.Remove(ctx, &kvferrypb.RemoveRequest{Request: request})
	return err
}
