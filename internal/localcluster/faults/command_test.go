package faults

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// command is a command line that runs, of the binary that is tested.
type command struct {
	cmd            *exec.Cmd
	stdout, stderr bytes.Buffer  // valid when it has ended
	err            error         // of its end; valid then
	ended          chan struct{} // closed when it has
}

// begin starts a command line, which has so long, and is killed at the end of the
// test.
func begin(t *testing.T, limit time.Duration, stdin string, args ...string) *command {
	t.Helper()
	return beginIn(t, nil, limit, stdin, args...)
}

// beginIn is begin with more in the environment.
func beginIn(t *testing.T, env []string, limit time.Duration, stdin string, args ...string) *command {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), limit)
	c := &command{cmd: exec.CommandContext(ctx, built.binary, args...), ended: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), env...)
	c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = strings.NewReader(stdin), &c.stdout, &c.stderr
	if err := c.cmd.Start(); err != nil {
		stop()
		t.Fatal(err)
	}
	go c.wait()
	t.Cleanup(func() {
		stop()
		<-c.ended
	})
	return c
}

func (c *command) wait() {
	defer close(c.ended)
	c.err = c.cmd.Wait()
}

// code waits for the end and returns the exit code; -1 of a command that had to
// be killed.
func (c *command) code(t *testing.T) int {
	t.Helper()
	<-c.ended
	if _, exit := errors.AsType[*exec.ExitError](c.err); c.err != nil && !exit {
		t.Errorf("command: %v", c.err)
		return -1
	}
	return c.cmd.ProcessState.ExitCode()
}

// kvferry runs one command line on the node of a socket, and returns its exit
// code and all that it has said.
func kvferry(t *testing.T, socket, stdin string, args ...string) (code int, said string) {
	t.Helper()
	c := begin(t, 2*patience, stdin, append([]string{"--socket", socket}, args...)...)
	code = c.code(t)
	return code, c.stdout.String() + c.stderr.String()
}

// wantDone runs a command line that must be done, and returns its standard output.
func wantDone(t *testing.T, socket, stdin string, args ...string) string {
	t.Helper()
	c := begin(t, 2*patience, stdin, append([]string{"--socket", socket}, args...)...)
	if code := c.code(t); code != 0 {
		t.Fatalf("kvferry %s: exit code %d\n%s%s", strings.Join(args, " "), code, c.stdout.String(), c.stderr.String())
	}
	return c.stdout.String()
}

// wantRefused runs a command line that must fail with exit code 1 and say the
// words.
func wantRefused(t *testing.T, socket string, words []string, args ...string) {
	t.Helper()
	code, said := kvferry(t, socket, "", args...)
	if code != 1 {
		t.Errorf("kvferry %s: exit code %d, want 1\n%s", strings.Join(args, " "), code, said)
	}
	for _, w := range words {
		if !strings.Contains(said, w) {
			t.Errorf("kvferry %s says not %q:\n%s", strings.Join(args, " "), w, said)
		}
	}
}
