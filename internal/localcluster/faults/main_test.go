package faults

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/kvferry/kvferry/internal/localcluster"
)

// The test's binary is also the guard and the engine processes.
const (
	guardCommand  = "guard"
	engineCommand = "engine"
)

var (
	soak    = flag.Duration("soak", 5*time.Second, "how long the tests that do so kill nodes at random")
	program = flag.String("binary", "", "the kvferry to test; default: built from here")
)

// built is what TestMain made for all tests.
var built struct {
	dir    string // everything that the tests write lies below it
	binary string
}

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == guardCommand {
		os.Exit(guard(os.Args[2]))
	}
	if len(os.Args) == 5 && os.Args[1] == engineCommand {
		os.Exit(engineProcess(os.Args[2], os.Args[3], os.Args[4]))
	}
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) (code int) {
	zerolog.SetGlobalLevel(zerolog.Disabled) // of the proxies
	if os.Getenv("GORACE") == "" {
		// Else every process sleeps for a second before it ends.
		if err := os.Setenv("GORACE", "atexit_sleep_ms=50"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	dir, err := os.MkdirTemp("", "kvf") // short: sockets lie below it
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	built.dir, built.binary = dir, filepath.Join(dir, "kvferry")
	end, err := startGuard(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, "start guard:", err, os.RemoveAll(dir))
		return 1
	}
	defer func() { code = max(code, end()) }()
	if *program != "" {
		built.binary = *program
	} else if err := build(built.binary); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// build makes the binary the way this test was made.
func build(to string) error {
	args := []string{"build", "-o", to}
	info, _ := debug.ReadBuildInfo()
	for _, s := range info.Settings {
		switch {
		case s.Key == "-race" && s.Value == "true":
			args = append(args, "-race")
		case s.Key == "-tags" && s.Value != "":
			args = append(args, "-tags="+s.Value)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", append(args, "github.com/kvferry/kvferry/cmd/kvferry")...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build kvferry: %w\n%s", err, out)
	}
	return nil
}

// startGuard starts the process that cleans up when this one ends, however it
// does. end lets it do so now and returns its exit code.
func startGuard(dir string) (end func() int, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, guardCommand, dir)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // an interrupt is for us
	hold, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return func() int {
		_ = hold.Close()
		if err := cmd.Wait(); err != nil {
			fmt.Fprintln(os.Stderr, "guard:", err)
			return 1
		}
		return 0
	}, nil
}

// guard waits for the end of its standard input, then kills every process that
// has a file below dir on its command line, and removes dir. Its exit code is
// 1 if there was one.
func guard(dir string) int {
	_, _ = io.Copy(io.Discard, os.Stdin)
	code := 0
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err := localcluster.WaitFor(ctx, 20*time.Millisecond, func() error {
		left := processes(dir)
		if len(left) == 0 {
			return nil
		}
		code = 1
		for _, pid := range left {
			fmt.Fprintln(os.Stderr, "guard: kills what was left behind, pid", pid)
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		return fmt.Errorf("processes %v run", left)
	})
	if err = errors.Join(err, os.RemoveAll(dir)); err != nil {
		fmt.Fprintln(os.Stderr, "guard:", err)
		code = 1
	}
	return code
}

// processes lists those that name a file below dir, but for guards.
func processes(dir string) []int {
	var pids []int
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range lines {
		line, err := os.ReadFile(path) // of a zombie it is empty
		if err != nil || !bytes.Contains(line, []byte(dir+"/")) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err == nil && pid != os.Getpid() {
			pids = append(pids, pid)
		}
	}
	return pids
}
