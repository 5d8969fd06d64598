package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// Waits for iperf3.
const (
	iperfListen = 5 * time.Second
	iperfRun    = 20 * time.Second
)

// findIperf returns the program's path.
func findIperf() (string, error) {
	path, err := exec.LookPath("iperf3")
	if err != nil {
		return "", errors.New("iperf3 is not installed, so no ratio can be given (apt-get install iperf3)")
	}
	return path, nil
}

// runIperf is one second of iperf3 over loopback, server and client each a
// process, with cubic as its congestion control. It returns bytes a second as
// received.
func runIperf(ctx context.Context, path string, connections int) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, iperfRun)
	defer cancel()
	port, err := freePort(ctx)
	if err != nil {
		return 0, fmt.Errorf("run iperf3: %w", err)
	}
	server := command(ctx, path, "-s", "-1", "-p", port, "-B", "127.0.0.1", "--forceflush")
	server.WaitDelay = time.Second
	out, err := server.StdoutPipe()
	if err != nil {
		return 0, fmt.Errorf("run iperf3: %w", err)
	}
	if err := server.Start(); err != nil {
		return 0, fmt.Errorf("run iperf3: %w", err)
	}
	defer func() {
		cancel() // a server whose client never came waits for ever
		_, _ = io.Copy(io.Discard, out)
		_ = server.Wait()
	}()
	if err := awaitListening(out, server); err != nil {
		return 0, fmt.Errorf("run iperf3 -s -p %s: %w", port, err)
	}
	// A fraction of a second means "for ever" to it.
	client := command(ctx, path, "-c", "127.0.0.1", "-p", port, "-P", strconv.Itoa(connections), "-C", "cubic", "-t", "1", "-J")
	client.WaitDelay = time.Second
	text, err := client.Output()
	rate, parsed := parseIperf(text)
	if parsed == nil {
		return rate, nil
	}
	return 0, fmt.Errorf("run iperf3 -c: %w", errors.Join(parsed, err))
}

// awaitListening reads the server's output up to the line that says so.
func awaitListening(out io.Reader, server *exec.Cmd) error {
	late := time.AfterFunc(iperfListen, func() { _ = server.Process.Kill() })
	defer late.Stop()
	in := bufio.NewReader(io.LimitReader(out, 1<<16))
	for {
		line, err := in.ReadString('\n')
		if strings.Contains(line, "listening") {
			return nil
		}
		if err != nil {
			return fmt.Errorf("it does not listen: %q: %w", line, err)
		}
	}
}

func parseIperf(text []byte) (float64, error) {
	var result struct {
		Error string `json:"error"`
		End   struct {
			Received struct {
				BitsPerSecond float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	if err := json.Unmarshal(text, &result); err != nil {
		return 0, fmt.Errorf("its answer is no JSON: %w", err)
	}
	if result.Error != "" {
		return 0, errors.New(result.Error)
	}
	if result.End.Received.BitsPerSecond <= 0 {
		return 0, errors.New("it received nothing")
	}
	return result.End.Received.BitsPerSecond / 8, nil
}

// freePort is one that nobody listens on at the moment.
func freePort(ctx context.Context) (string, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, errors.Join(err, l.Close())
}
