package node

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/config"
)

// gpu is a device as its driver shows it.
type gpu struct {
	cuda.GPU
	can cuda.Capabilities
	err error // why it is not known what it can
}

// openGPUs asks the driver, and closes it again.
func openGPUs(library string) ([]gpu, error) {
	r, err := cuda.Open(cuda.Options{Library: library})
	if err != nil {
		return nil, err
	}
	return gpusOf(r), r.Close()
}

// gpusOf looks, and uses none: a context takes hundreds of megabytes, and stays.
func gpusOf(r *cuda.Runtime) []gpu {
	var list []gpu
	for _, g := range r.GPUs() {
		can, err := r.Look(g.UUID)
		list = append(list, gpu{g, can, err})
	}
	return list
}

// errNoGPU is why a node's check does not ask the driver.
var errNoGPU = errors.New("the node does without: its arenas are in host memory")

// gpus are those that the node has opened the driver for.
func (n *Node) gpus(string) ([]gpu, error) {
	if n.cuda == nil {
		return nil, errNoGPU
	}
	return gpusOf(n.cuda), nil
}

// devices are those that arenas lie on.
func (n *Node) devices() []*kvferrypb.Device {
	var list []*kvferrypb.Device
	seen := make(map[cuda.UUID]bool)
	for _, r := range n.ranks {
		a, ok := n.arenas[r].(*cuda.Arena)
		if !ok || seen[a.GPU().UUID] {
			continue
		}
		g := a.GPU()
		seen[g.UUID] = true
		d := &kvferrypb.Device{Uuid: g.UUID.String(), Ordinal: uint32(g.Ordinal), Name: g.Name, Bus: g.Bus, Bytes: uint64(g.Bytes)}
		can, err := n.cuda.Look(g.UUID)
		if err != nil {
			d.Failed = err.Error()
		}
		d.Driver, d.Batch, d.Dmabuf, d.Peermem = uint32(can.Driver), can.Batch, can.DMABuf, can.PeerMem
		list = append(list, d)
	}
	return list
}

// memories are where the arenas lie, by rank.
func (n *Node) memories() []*kvferrypb.Memory {
	list := make([]*kvferrypb.Memory, len(n.ranks))
	for i, r := range n.ranks {
		list[i] = &kvferrypb.Memory{Rank: uint32(r), Place: n.memoryOf(r)}
	}
	return list
}

// gpu looks for what arenas in the memory of a GPU need. What is not there is
// absent, unless the configuration wants it.
func (m machine) gpu(c *config.Config, f fabric) []Check {
	bad, none, library := StateWarn, StateAbsent, ""
	var named []string
	if c != nil {
		library, named = c.Arena.CUDALibrary, c.Arena.Devices()
		switch {
		case len(named) > 0:
			bad, none = StateFail, StateFail
		case c.Arena.Memory == config.EngineMemory && (!m.running || m.arenaPage == 0):
			none = StateWarn
		}
	}
	found, err := cuda.Probe(m.files, m.libraryPath)
	summary := Check{Name: "gpu", State: StateOK}
	names := make([]string, len(found.Devices))
	for i, d := range found.Devices {
		names[i] = cmp.Or(d.Name, "unnamed")
	}
	summary.Found = fmt.Sprintf("driver %s: %s", cmp.Or(found.Driver, "of unknown version"), strings.Join(names, ", "))
	if err != nil {
		summary.State, summary.Found = none, err.Error()
		switch {
		case none == StateFail:
			summary.Remedy = "mend that, or set arena.memory: host"
		case none == StateWarn:
			summary.Remedy = "mend that, if the engine lends memory of a GPU; host memory needs none"
		case !errors.Is(err, cuda.ErrUnavailable):
			summary.State = StateWarn
		}
	}
	checks := []Check{summary}
	var shown []gpu
	if err == nil || library != "" || none != StateAbsent { // else there is nothing to load
		var loaded error
		checks, shown, loaded = m.driver(checks, library, bad)
		if loaded == nil && err != nil { // the driver knows better than the files
			checks[0] = Check{Name: "gpu", State: StateOK, Found: fmt.Sprintf("%d of the driver's; not in /proc: %v", len(shown), err)}
		}
		if loaded == nil {
			for _, name := range slices.Compact(slices.Sorted(slices.Values(named))) {
				if !slices.ContainsFunc(shown, func(g gpu) bool { return name == fmt.Sprint(g.Ordinal) || strings.EqualFold(name, g.UUID.String()) }) {
					checks = append(checks, Check{
						Name: "arena on cuda:" + name, State: StateFail, Found: "arena.memory names it, and the driver does not show it to this process",
						Remedy: "name one of the above; CUDA_VISIBLE_DEVICES, or the container, may hide it",
					})
				}
			}
		}
	}
	return append(checks, m.direct(f, len(found.Devices) > 0 || len(shown) > 0)...)
}

// driver opens the library, and shows each device.
func (m machine) driver(checks []Check, library, bad string) ([]Check, []gpu, error) {
	check := Check{Name: "cuda library", State: StateOK, Found: cmp.Or(library, "found by the loader")}
	all, err := m.gpus(library)
	switch {
	case errors.Is(err, errNoGPU):
		check.State, check.Found = StateAbsent, err.Error()
	case err != nil:
		check.State, check.Found = bad, err.Error()
		check.Remedy = "the driver's packages (in a container: NVIDIA_DRIVER_CAPABILITIES=compute), or arena.cuda_library; kvferry version: was it built with the tag cuda"
	}
	checks = append(checks, check)
	for _, g := range all {
		check := Check{Name: fmt.Sprintf("gpu %d", g.Ordinal), State: StateOK, Found: fmt.Sprintf("%s, %s, %s, %s", g.Name, g.UUID, g.Bus, sizeText(uint64(g.Bytes)))}
		if g.NUMANode >= 0 {
			check.Found += fmt.Sprintf(", near NUMA node %d", g.NUMANode)
		}
		if g.err != nil {
			check.State, check.Found, check.Remedy = bad, check.Found+"; "+g.err.Error(), "nvidia-smi, and the kernel's log"
		} else {
			check.Found += "; " + abilities(g.can.Driver, g.can.Batch, g.can.DMABuf, g.can.PeerMem)
		}
		checks = append(checks, check)
	}
	return checks, all, err
}

// abilities are what a device and its driver can, for people.
func abilities(driver int, batch, dmabuf, peermem bool) string {
	said := []string{fmt.Sprintf("CUDA %d.%d", driver/1000, driver%1000/10)}
	for _, can := range []struct {
		is   bool
		what string
	}{{batch, "copies in batches"}, {dmabuf, "dma-buf"}, {peermem, "peermem"}} {
		if !can.is {
			can.what = "no " + can.what
		}
		said = append(said, can.what)
	}
	return strings.Join(said, ", ")
}

// direct looks for what lets cards reach the memory of GPUs by themselves.
func (m machine) direct(f fabric, gpus bool) []Check {
	const purpose = "for arenas in GPU memory: a card reads them by it"
	both := gpus && len(f.devices) > 0
	peermem := Check{Name: "nvidia-peermem", State: StateAbsent, Found: "not loaded; " + purpose + ", where there is no dma-buf"}
	if _, err := fs.Stat(m.files, "sys/module/nvidia_peermem"); err == nil {
		peermem.State, peermem.Found = StateOK, "loaded; "+purpose+", where there is no dma-buf"
	}
	buf := Check{Name: "dma-buf", State: StateOK}
	release := m.text("proc/sys/kernel/osrelease")
	kernel, library := atLeast(release, 5, 12), m.exports("ibv_reg_dmabuf_mr")
	buf.Found = fmt.Sprintf("kernel %s, %s; %s", cmp.Or(release, "of unknown version"), library, purpose)
	if !kernel || library != exported {
		buf.State = StateAbsent
		if both && peermem.State != StateOK {
			buf.State, buf.Remedy = StateWarn, "a kernel from 5.12 on and rdma-core from 34 on, or modprobe nvidia-peermem; arenas in host memory need neither, and those of GPUs are read through host memory"
		}
	}
	return []Check{peermem, buf}
}
