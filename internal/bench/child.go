package bench

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// child is a process of ours that answers every order on its standard input by
// one line, and ends with that input.
type child struct {
	process *exec.Cmd
	stdin   io.WriteCloser
	answers *bufio.Scanner
}

const (
	// The longest line: descriptors of every transport.
	answerBytes = 256 << 10
	quitTimeout = 10 * time.Second
)

// command is that of exec, in a process group of its own: a terminal interrupts this
// process alone, which ends the others, and theirs, by ctx.
func command(ctx context.Context, name string, args ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, name, args...)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.Cancel = func() error {
		err := syscall.Kill(-c.Process.Pid, syscall.SIGKILL)
		if errors.Is(err, syscall.ESRCH) {
			err = os.ErrProcessDone
		}
		return err
	}
	return c
}

// startChild starts a process, which has files as its descriptors from 3 on;
// they stay the caller's. ctx ends it.
func startChild(ctx context.Context, files []*os.File, argv ...string) (*child, error) {
	c := &child{process: command(ctx, argv[0], argv[1:]...)}
	c.process.Stderr = os.Stderr
	c.process.ExtraFiles = files
	c.process.WaitDelay = quitTimeout
	var err error
	if c.stdin, err = c.process.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := c.process.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.answers = bufio.NewScanner(stdout)
	c.answers.Buffer(nil, answerBytes)
	c.answers.Split(wholeLine)
	if err := c.process.Start(); err != nil {
		return nil, err
	}
	return c, nil
}

// wholeLine is bufio.ScanLines for lines that may be cut short, which are none.
func wholeLine(data []byte, atEOF bool) (advance int, line []byte, err error) {
	if i := bytes.IndexByte(data, '\n'); i >= 0 {
		return i + 1, data[:i], nil
	}
	if atEOF && len(data) > 0 {
		return 0, nil, io.ErrUnexpectedEOF
	}
	return 0, nil, nil
}

// ask writes an order and returns the line that answers it, which is valid until
// the next one. A process that is late is killed, which ends the wait.
func (c *child) ask(order []byte, within time.Duration) ([]byte, error) {
	late := time.AfterFunc(within, func() { _ = c.process.Process.Kill() })
	defer late.Stop()
	_, failed := c.stdin.Write(order)
	if c.answers.Scan() { // also if it did not hear us out: it may say why
		return c.answers.Bytes(), nil
	}
	err := c.answers.Err()
	if err == nil {
		err = fmt.Errorf("it ended, or was ended after %v, without an answer", within)
	}
	return nil, errors.Join(err, failed)
}

// close ends the process and waits for it.
func (c *child) close() error {
	_ = c.stdin.Close() // the process may be gone
	late := time.AfterFunc(quitTimeout, func() { _ = c.process.Process.Kill() })
	defer late.Stop()
	return c.process.Wait()
}
