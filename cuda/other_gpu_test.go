//go:build linux && cgo && cuda && (amd64 || arm64)

package cuda_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/cuda/internal/driver"
	"github.com/kvferry/kvferry/internal/memory"
)

// other is another process on the device, which may crash or hang. It says lines
// that begin with its name.
type other struct {
	name  string
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Scanner
}

// ourselves is a test of this program in a process of its own.
func ourselves(t *testing.T, test, env string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, "-test.run=^"+test+"$", "-test.v")
	cmd.Env = append(os.Environ(), env)
	return cmd
}

// spawn has a program begin.
func spawn(t *testing.T, name string, cmd *exec.Cmd) *other {
	t.Helper()
	o := &other{name: name, cmd: cmd}
	var err error
	if o.in, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	o.lines = bufio.NewScanner(out)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { o.end() })
	return o
}

// patience is for a process that loads PyTorch, too.
const patience = 20 * time.Second

// next is what it says next, or that it has ended, as it does if it says nothing
// for long.
func (o *other) next() (string, bool) {
	hangs := time.AfterFunc(patience, func() { o.cmd.Process.Kill() })
	defer hangs.Stop()
	for o.lines.Scan() {
		if said, ok := strings.CutPrefix(o.lines.Text(), o.name+": "); ok {
			return said, true
		}
	}
	return fmt.Sprintf("the other process has ended: %v", o.cmd.Wait()), false
}

func (o *other) tell(line string) { fmt.Fprintln(o.in, line) }

// end lets it end.
func (o *other) end() error {
	o.in.Close()
	hangs := time.AfterFunc(patience, func() { o.cmd.Process.Kill() })
	defer hangs.Stop()
	for o.lines.Scan() { // else it could not
	}
	return o.cmd.Wait()
}

// part is what TestGPUOther plays, and role names it.
type part string

const role = "KVFERRY_CUDA_PROBE"

func (as part) say(format string, args ...any) {
	fmt.Printf(string(as)+": "+format+"\n", args...)
}

// TestGPUOther is the other process of the probes that need one.
func TestGPUOther(t *testing.T) {
	p := part(os.Getenv(role))
	if p == "" {
		t.Skip("the other process of TestGPUProbe and of TestGPUBeside")
	}
	begin := time.Now()
	r, g := gpu(t, cuda.Options{Scatter: -1})
	opened := time.Since(begin)
	switch p {
	case "context":
		begin = time.Now()
		onGPU(t, r, g, 1)
		p.say("%v, %v", opened.Round(time.Millisecond), time.Since(begin).Round(time.Millisecond))
		io.Copy(io.Discard, os.Stdin)
	case "destroy":
		p.destroy(t, g)
	case "batch":
		p.batches(t, g)
	case "busy":
		p.busy(t, onGPU(t, r, g, 64<<20))
	}
}

// What a process costs that opens the device too.
func probeSecondContext(t *testing.T, g cuda.GPU) {
	const what = "another process: driver, context, memory"
	ctx, err := driver.Retain(driver.Device(g.Ordinal))
	if err != nil {
		t.Fatal(err)
	}
	defer ctx.Release()
	free := func() (n int64) {
		if err := ctx.Do(func() (err error) { n, _, err = cu.MemInfo(); return err }); err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := free()
	o := spawn(t, "context", ourselves(t, "TestGPUOther", role+"=context"))
	said, ok := o.next()
	if ok {
		said += fmt.Sprintf(", %d MiB", (before-free())>>20)
	}
	row(what, said)
	if err := o.end(); ok && err != nil {
		row(what, answer(err))
	}
}

// Whether somebody else of the process can destroy the context under us.
func probeDestroy(t *testing.T) {
	o := spawn(t, "destroy", ourselves(t, "TestGPUOther", role+"=destroy"))
	for _, what := range []string{"destroy the primary context", "memory of it after that"} {
		said, ok := o.next()
		row(what, said)
		if !ok {
			return
		}
	}
}

func (as part) destroy(t *testing.T, g cuda.GPU) {
	c, err := cu.Device(g.Ordinal).RetainPrimaryCtx()
	if err != nil {
		t.Fatal(err)
	}
	ctx, err := driver.Retain(driver.Device(g.Ordinal))
	if err != nil {
		t.Fatal(err)
	}
	alloc := func() error {
		return ctx.Do(func() error {
			p, err := driver.Alloc(1 << 20)
			return errors.Join(err, driver.Free(p))
		})
	}
	if err := alloc(); err != nil {
		t.Fatal(err)
	}
	as.say("%s", answer(c.Destroy()))
	as.say("%s", answer(alloc()))
}

// batchSizes are numbers of copies in one call; 51,828 have crashed a driver of
// 580.159.04.
func batchSizes() []int { return []int{driver.Most, 8192, 16384, 32768, 51828, 65536, 131072} }

// How many copies one call takes.
func probeBatch(t *testing.T) {
	if driver.Forms() == driver.OneByOne {
		row("many copies in one call", "the driver has no such call")
		return
	}
	o := spawn(t, "batch", ourselves(t, "TestGPUOther", role+"=batch"))
	for _, n := range batchSizes() {
		said, ok := o.next()
		row(fmt.Sprintf("%d copies in one call, to and from", n), said)
		if !ok {
			return
		}
	}
}

func (as part) batches(t *testing.T, g cuda.GPU) {
	const piece = 1 << 10
	ctx, err := driver.Retain(driver.Device(g.Ordinal))
	if err != nil {
		t.Fatal(err)
	}
	defer ctx.Release()
	for _, n := range batchSizes() {
		err := ctx.Do(func() error {
			p, err := driver.Alloc(int64(2 * n * piece))
			if err != nil {
				return err
			}
			host, err := driver.HostAlloc(n * piece)
			if err != nil {
				return errors.Join(err, driver.Free(p))
			}
			fill(host, uint64(n))
			want := bytes.Clone(host)
			var took [2]time.Duration
			for direction := range took {
				if took[direction], err = batch(direction, n, piece, p, host); err != nil {
					break
				}
				if direction == 0 {
					clear(host)
				}
			}
			if err == nil && !bytes.Equal(host, want) {
				err = errWrongBytes
			}
			if err == nil {
				as.say("%v, %v", took[0].Round(time.Microsecond), took[1].Round(time.Microsecond))
			}
			return errors.Join(err, driver.HostFree(host), driver.Free(p))
		})
		if err != nil {
			as.say("%v", err)
		}
	}
}

// batch copies pieces that have no neighbours on the device in one call, and
// waits for them.
func batch(direction, n, piece int, p driver.Addr, host []byte) (time.Duration, error) {
	l, err := driver.NewList(n)
	if err != nil {
		return 0, err
	}
	defer l.Free()
	s, err := driver.NewStream()
	if err != nil {
		return 0, err
	}
	defer s.Destroy()
	for i := range n {
		there, here := p+uint64(2*(n-1-i)*piece), uint64(uintptr(unsafe.Pointer(unsafe.SliceData(host))))+uint64(i*piece)
		if direction == int(cuda.HostToDevice) {
			l.Add(there, here, int64(piece))
		} else {
			l.Add(here, there, int64(piece))
		}
	}
	b := l.End()
	begin := time.Now()
	l.Submit(direction, driver.Forms(), s)
	err = errors.Join(l.Result(b), s.Synchronize())
	return time.Since(begin), err
}

// busy works for half a second for every line that it is told, and says how many
// rounds a second that were.
func (as part) busy(t *testing.T, a *cuda.Arena) {
	half := a.Size() / 2
	as.say("copies of %d MiB within the device", half>>20)
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		n, begin := 0, time.Now()
		for ; time.Since(begin) < 500*time.Millisecond; n++ {
			wait(t, a.Move([]memory.Segment{{Arena: half, Bytes: half}}))
		}
		as.say("%f", float64(n)/time.Since(begin).Seconds())
	}
}
