package localcluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// errGone says that a process has ended, or that its pid is another's now.
var errGone = errors.New("process has ended")

// Process names one process for ever: a pid alone is used again.
type Process struct {
	PID int `json:"pid"`
	// Start is when the kernel started it, in clock ticks since boot.
	Start uint64 `json:"start_time"`
}

// processOf is the process that has this pid now, or had it last if it is a
// child of ours that ended.
func processOf(pid int) (Process, error) {
	_, start, err := status(pid)
	return Process{PID: pid, Start: start}, err
}

// Alive reports whether the process runs. A zombie does not; if it is a child
// of ours it is reaped, so that a long-lived parent keeps none.
func (p Process) Alive() bool {
	state, start, err := status(p.PID)
	if err != nil || start != p.Start {
		return false
	}
	if state != 'Z' && state != 'X' {
		return true
	}
	// The first thread is a zombie as soon as it has ended; until the others
	// have, all files and ports are open.
	if reaped, err := unix.Wait4(p.PID, nil, unix.WNOHANG, nil); err == nil {
		return reaped != p.PID
	}
	// Not a child of ours, or no more.
	threads, err := os.ReadDir("/proc/" + strconv.Itoa(p.PID) + "/task")
	return err == nil && len(threads) > 1
}

// Signal signals this process and no other that has its pid; the error is
// errGone when it has ended.
func (p Process) Signal(sig syscall.Signal) error {
	if p.PID <= 1 {
		return fmt.Errorf("signal pid %d: not a process of a local cluster", p.PID)
	}
	// The handle pins the process that has the pid now, so that the one whose
	// start time is compared is the one that gets the signal.
	held, err := os.FindProcess(p.PID)
	if err != nil {
		return fmt.Errorf("signal pid %d: %w", p.PID, err)
	}
	defer func() { _ = held.Release() }() // of nothing that could fail
	if !p.Alive() {
		return fmt.Errorf("signal pid %d: %w", p.PID, errGone)
	}
	if err := held.Signal(sig); errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal pid %d: %w", p.PID, errGone)
	} else if err != nil {
		return fmt.Errorf("signal pid %d: %w", p.PID, err)
	}
	return nil
}

// Wait returns when the process has ended, or ctx.
func (p Process) Wait(ctx context.Context) error {
	return WaitFor(ctx, 10*time.Millisecond, func() error {
		if p.Alive() {
			return fmt.Errorf("pid %d still runs", p.PID)
		}
		return nil
	})
}

// status reads a process's state and start time.
func status(pid int) (state byte, start uint64, err error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return 0, 0, errGone
	}
	if err != nil {
		return 0, 0, err
	}
	return parseStat(stat)
}

// parseStat finds the fields 3 and 22 of proc_pid_stat(5). Field 2, the
// program's name, may hold spaces and parentheses.
func parseStat(stat []byte) (state byte, start uint64, err error) {
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:]) // from field 3 on
	if len(fields) < 20 {
		return 0, 0, fmt.Errorf("read process status %.80q: too few fields", stat)
	}
	start, err = strconv.ParseUint(string(fields[19]), 10, 64)
	if err != nil {
		return 0, 0, fmt.Errorf("read process status: start time: %w", err)
	}
	return fields[0][0], start, nil
}
