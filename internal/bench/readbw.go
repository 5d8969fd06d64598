package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// rdmaReads are under way at once on a queue pair: of rdma, and of ib_read_bw.
const rdmaReads = 16

// Waits for ib_read_bw.
const (
	readBWListen = 10 * time.Second
	readBWRun    = 30 * time.Second
)

// readBWBytes are the messages of ib_read_bw: those of one size may suit a device
// better than others, and the fastest are the limit. A pull of chunks of one of
// these sizes is compared with that one too.
func readBWBytes() []int64 { return []int64{16 << 10, 64 << 10, 1 << 20} }

// rdmaPort is a port of a device.
type rdmaPort struct {
	Device string `json:"device"` // "": none, or no single one
	Port   int    `json:"port"`
}

// readBW is ib_read_bw between two ports of this host, each in a process, and as
// many queue pairs.
type readBW struct {
	path          string
	reader, owner rdmaPort
	pairs         int
}

// findReadBW says why there is no limit.
func findReadBW(reader, owner rdmaPort, pairs int) (*readBW, error) {
	if reader.Device == "" || owner.Device == "" {
		return nil, errors.New("it uses several ports, and ib_read_bw one on each side (name them: --device)")
	}
	path, err := exec.LookPath("ib_read_bw")
	if err != nil {
		return nil, errors.New("ib_read_bw is not installed, so no ratio can be given (apt-get install perftest)")
	}
	return &readBW{path, reader, owner, pairs}, nil
}

func (b *readBW) String() string { return fmt.Sprintf("ib_read_bw -q %d -o %d", b.pairs, rdmaReads) }

// readBWSizes is for people.
func readBWSizes() string {
	var sizes []string
	for _, n := range readBWBytes() {
		sizes = append(sizes, bytesText(n))
	}
	return strings.Join(sizes, ", of ")
}

// run is one second of messages of so many bytes. It returns bytes a second.
func (b *readBW) run(ctx context.Context, messageBytes int64) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, readBWRun)
	defer cancel()
	rate, err := b.measure(ctx, messageBytes)
	if err != nil && ctx.Err() != nil {
		err = errors.Join(err, context.Cause(ctx))
	}
	if err != nil {
		return 0, fmt.Errorf("run ib_read_bw: %w", err)
	}
	return rate, nil
}

func (b *readBW) measure(ctx context.Context, messageBytes int64) (float64, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	port, err := freePort(ctx)
	if err != nil {
		return 0, err
	}
	process := func(p rdmaPort, more ...string) *exec.Cmd {
		c := command(ctx, b.path, append([]string{
			"-d", p.Device, "-i", strconv.Itoa(p.Port), "-p", port, "-s", strconv.FormatInt(messageBytes, 10),
			"-q", strconv.Itoa(b.pairs), "-o", strconv.Itoa(rdmaReads), "-D", "1", "-f", "0", "-F", "--report_gbits", "--output=bandwidth",
		}, more...)...)
		c.WaitDelay = time.Second
		return c
	}
	server := process(b.owner)
	var said bytes.Buffer
	server.Stdout, server.Stderr = &said, &said
	if err := server.Start(); err != nil {
		return 0, err
	}
	ended := make(chan struct{})
	go func() { // ends with the process, which ctx ends, and is waited for
		_ = server.Wait()
		close(ended)
	}()
	defer func() {
		cancel() // a server whose client never came waits for ever
		<-ended
	}()
	if err := awaitPort(ctx, port, ended); err != nil {
		return 0, err
	}
	text, err := process(b.reader, "127.0.0.1").CombinedOutput()
	rate, parsed := parseReadBW(text)
	if err == nil && parsed == nil {
		select { // so that what it holds is free for what comes next
		case <-ended:
		case <-time.After(time.Second):
		}
		return rate, nil
	}
	cancel()
	<-ended
	return 0, errors.Join(parsed, err, fmt.Errorf("the other side: %.300q", said.Bytes()))
}

// awaitPort waits until a process listens on the port, without a connection, of
// which it takes only one.
func awaitPort(ctx context.Context, port string, ended <-chan struct{}) error {
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return err
	}
	listens := false
	err = within(ctx, readBWListen, func() bool {
		listens = listening(contentOf("/proc/net/tcp"), n) || listening(contentOf("/proc/net/tcp6"), n)
		select {
		case <-ended:
			return true
		default:
			return listens
		}
	})
	if err == nil && !listens {
		err = errors.New("it does not listen")
	}
	return err
}

// listening says whether a socket of the table, one of /proc/net, listens on the port.
func listening(table string, port uint64) bool {
	suffix := fmt.Sprintf(":%04X", port)
	for line := range strings.Lines(table) {
		// The columns are number, local address, remote address, state.
		if f := strings.Fields(line); len(f) > 3 && f[3] == "0A" && strings.HasSuffix(f[1], suffix) {
			return true
		}
	}
	return false
}

// parseReadBW takes what ib_read_bw prints: its last line is in 1e9 bits a second.
func parseReadBW(text []byte) (float64, error) {
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	rate, err := strconv.ParseFloat(strings.TrimSpace(lines[len(lines)-1]), 64)
	if err != nil || !(rate > 0) {
		return 0, fmt.Errorf("it prints %.300q", text)
	}
	return rate * 1e9 / 8, nil
}
