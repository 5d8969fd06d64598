package node

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rdmaread"
	"github.com/kvferry/kvferry/transfer/shm"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// ErrDevice is wrapped by Err of a node that gave itself up because a device of
// its arenas has died.
var ErrDevice = errors.New("a GPU of this node's arenas is dead")

// openCUDA binds the driver, at its first call, and ends the node when a device
// dies. Nothing of it is looked for unless an arena is to be in device memory.
func (n *Node) openCUDA() (*cuda.Runtime, error) {
	if n.cuda != nil {
		return n.cuda, nil
	}
	a := n.config.Arena
	r, err := cuda.Open(cuda.Options{Library: a.CUDALibrary, Logger: n.log})
	if err != nil {
		err = fmt.Errorf("open the GPU for arena.memory: %s: %w", a.Memory, err)
		if _, machine := cuda.Probe(os.DirFS("/"), os.Getenv("LD_LIBRARY_PATH")); machine != nil && a.CUDALibrary == "" {
			err = fmt.Errorf("%w; this machine: %w", err, machine)
		}
		return nil, fmt.Errorf("%w (kvferry doctor says what it has; arena.memory: host needs no GPU)", err)
	}
	n.cuda = r
	n.closers = append(n.closers, r.Close)
	n.begin = append(n.begin, func() { n.spawn(n.watchDevices) })
	return r, nil
}

// watchDevices gives the node up when a device has died: its memory cannot be
// reached any more, and only a new process gets it again.
func (n *Node) watchDevices() {
	select {
	case <-n.cuda.Dead():
		err := fmt.Errorf("%w: %w; only a new process can use it again: start the agent anew", ErrDevice, n.cuda.Reason())
		n.log.Error("the node gives itself up", "err", err)
		n.stop(err)
	case <-n.ctx.Done():
	}
}

// openDeviceArenas makes the arenas of all local ranks on the devices that
// arena.memory names.
func (n *Node) openDeviceArenas() error {
	runtime, err := n.openCUDA()
	if err != nil {
		return err
	}
	layout := n.geometry.Layout
	for i, name := range n.config.Arena.Devices() {
		rank := n.ranks[i]
		gpu, err := runtime.Find(name)
		if err != nil {
			return fmt.Errorf("open the arena of rank %d: arena.memory: cuda:%s: %w", rank, name, err)
		}
		a, err := runtime.Alloc(gpu.UUID, layout.Bytes())
		if err != nil {
			return fmt.Errorf("open the arena of rank %d on cuda:%d, %s (%d pages of %d bytes; arena.pages sets its size): %w",
				rank, gpu.Ordinal, gpu.Name, layout.Pages, layout.PageBytes(), err)
		}
		n.arenas[rank] = a
		n.closers = append(n.closers, a.Close)
		n.log.Info("arena on a GPU", "rank", int(rank), "device", gpu.UUID.String(), "name", gpu.Name, "bus", gpu.Bus)
	}
	return nil
}

// filesOfLent are the descriptors that memory takes which an engine lends by so
// many: each is kept, and once more by cudaipc, which hands it on.
func filesOfLent(lent int) uint64 { return 2 * uint64(max(0, lent)) }

// spareFiles are for all else of a node with a few peers.
const spareFiles = 256

// roomForFiles refuses memory that comes in more descriptors than this process may
// have open.
func roomForFiles(lent int) error {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return fmt.Errorf("limit of open files: %w", err)
	}
	if need := filesOfLent(lent) + spareFiles; need > r.Cur {
		return fmt.Errorf("the engine lends its memory by %d descriptors, for which the node may have to open %d files, and this process may open %d: "+
			"ulimit -n %d (systemd: LimitNOFILE=), or an engine whose memory is in fewer pieces (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False)", lent, need, r.Cur, need)
	}
	return nil
}

// memoryOf says where the arena of a local rank lies: "host", or the device, as
// arena.memory may name it.
func (n *Node) memoryOf(r id.Rank) string {
	switch a := n.arenas[r].(type) {
	case *memory.Region:
		return config.HostMemory
	case *cuda.Arena:
		return "cuda:" + a.GPU().UUID.String()
	default:
		return fmt.Sprintf("%T", a)
	}
}

// stagingShare is what each of those that stage has of transfer.staging, in bytes:
// the node itself, and the transports that it may use.
func stagingShare(c *config.Config) int64 {
	parts := int64(1)
	for _, name := range []string{shm.Name, rdmaread.Name, tcp.Name} {
		if uses(c, name) {
			parts++
		}
	}
	return int64(c.Transfer.Staging) / parts
}

// stagingBuffers are those of the node's own pool: two for a call, so that one is
// copied while the other is used.
const stagingBuffers = 4

// openStaging makes the pinned memory through which the node itself reads and
// writes device memory.
func (n *Node) openStaging() error {
	if !transfer.Staged(n.arenas) {
		return nil
	}
	const unit = 64 << 10
	size := stagingShare(n.config) / stagingBuffers / unit * unit
	pool, slow, err := transfer.NewPool(fmt.Sprintf("kvferry-%s-staging", n.life.Node), n.arenas, int(size), stagingBuffers)
	if err != nil {
		return fmt.Errorf("%w (transfer.staging sets its size)", err)
	}
	if slow != nil {
		n.log.Warn("memory is not pinned: copies from and to the GPU are slow", "what", "staging", "err", slow)
	}
	n.staging = pool
	n.closers = append(n.closers, pool.Close)
	return nil
}

// pin makes host memory fast to copy to and from for the device of a rank.
func (n *Node) pin(r id.Rank, what string, host *memory.Region) {
	device, ok := n.arenas[r].(memory.Stager)
	if !ok {
		return
	}
	unpin, err := device.Pin(host.Bytes())
	if err != nil {
		n.log.Warn("memory is not pinned: copies from and to the GPU are slow", "what", what, "rank", int(r), "err", err)
		return
	}
	n.closers = append(n.closers, unpin)
}

// errCopy: a device could not copy to or from an arena.
var errCopy = errors.New("the GPU could not copy")

// copied says what a copy was of that went wrong. nil stays nil.
func copied(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w: %w", what, errCopy, err)
}
