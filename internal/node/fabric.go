package node

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer/rdmaread"
)

// fabric is what a machine has for rdma.
type fabric struct {
	wanted  bool // by the configuration, or as far as is known
	devices []rdma.Info
	usable  bool // by this process
	locks   int  // devices that would lock the memory, each all of it
	checks  []Check
}

// maxGIDs are shown of one port.
const maxGIDs = 16

// fabric looks at devices, their nodes, ports, and addresses, and at the library.
// What is not there is absent; what is there and cannot be used is a warning,
// since the next transport is used, and a failure where the configuration asks
// for it by name.
func (m machine) fabric(c *config.Config) fabric {
	f := fabric{wanted: c == nil || uses(c, rdmaread.Name)}
	if !f.wanted {
		f.checks = []Check{{Name: "rdma", State: StateAbsent, Found: "not wanted: transfer.transports and transfer.require"}}
		return f
	}
	settings := config.Default().Transfer.RDMA
	bad, none := StateWarn, StateAbsent
	if c != nil {
		settings = c.Transfer.RDMA
		if c.Transfer.Require == rdmaread.Name || len(settings.Devices) > 0 {
			bad, none = StateFail, StateFail
		}
	}
	var err error
	f.devices, err = rdma.Probe(m.files, m.libraryPath)
	summary := Check{Name: "rdma", State: StateOK}
	names := make([]string, len(f.devices))
	for i, d := range f.devices {
		names[i] = d.Name
	}
	switch {
	case len(f.devices) == 0:
		summary.State, summary.Found = none, err.Error()
		if none == StateFail {
			summary.Remedy = "the card's driver; or no transfer.rdma.devices, and another transfer.require"
		}
		f.checks = []Check{summary}
		if settings.Library != "" { // the agent loads it all the same
			f.checks = append(f.checks, m.verbs(settings.Library, StateFail))
		}
		return f
	case err != nil && (settings.Library == "" || !active(f.devices)): // another library may be elsewhere
		summary.State, summary.Found, summary.Remedy = bad, err.Error(), "mend what is not ok below"
	default:
		summary.Found = strings.Join(names, ", ")
	}
	used, missing := chosen(f.devices, settings.Devices)
	if len(missing) > 0 {
		summary.State, summary.Found = StateFail, "transfer.rdma.devices names "+strings.Join(missing, "; ")
		summary.Remedy = "mend transfer.rdma.devices"
	}
	broken := bad
	if settings.Library != "" { // named, too
		broken = StateFail
	}
	verbs := m.verbs(settings.Library, broken)
	f.checks = append(f.checks, summary, verbs)
	for _, d := range used {
		down := StateWarn
		switch {
		case active([]rdma.Info{d}):
			f.locks++
		case len(settings.Devices) > 0:
			down = StateFail
		}
		f.checks = append(f.checks, m.deviceNode(d, bad))
		for _, p := range d.Ports {
			if slices.Contains(settings.Devices, portName(d, p)) {
				down = StateFail
			}
			f.checks = append(f.checks, m.port(d, p, settings, bad, down)...)
		}
	}
	f.usable = summary.State == StateOK && verbs.State == StateOK && f.locks > 0
	return f
}

func portName(d rdma.Info, p rdma.PortInfo) string { return fmt.Sprintf("%s:%d", d.Name, p.Number) }

// chosen are the devices that are named, with those of their ports, or all if
// none is named; and what is named and not there, with what there is.
func chosen(all []rdma.Info, named []string) (list []rdma.Info, missing []string) {
	if len(named) == 0 {
		return all, nil
	}
	left := slices.Clone(named)
	take := func(name string) bool {
		before := len(left)
		left = slices.DeleteFunc(left, func(n string) bool { return n == name })
		return len(left) < before
	}
	var devices []string
	ports := make(map[string][]string)
	for _, d := range all {
		devices = append(devices, d.Name)
		whole, some := take(d.Name), []rdma.PortInfo(nil)
		for _, p := range d.Ports {
			ports[d.Name] = append(ports[d.Name], strconv.Itoa(p.Number))
			if take(portName(d, p)) || whole {
				some = append(some, p)
			}
		}
		if whole || len(some) > 0 {
			d.Ports = some
			list = append(list, d)
		}
	}
	for _, n := range left {
		device, _, _ := strings.Cut(n, ":")
		if slices.Contains(devices, device) {
			missing = append(missing, fmt.Sprintf("%s, and the ports of %s are %s", n, device, cmp.Or(strings.Join(ports[device], ", "), "none")))
		} else {
			missing = append(missing, fmt.Sprintf("%s, and there is %s", n, strings.Join(devices, ", ")))
		}
	}
	return list, missing
}

func active(devices []rdma.Info) bool {
	return slices.ContainsFunc(devices, func(d rdma.Info) bool {
		return slices.ContainsFunc(d.Ports, func(p rdma.PortInfo) bool { return p.State == "ACTIVE" })
	})
}

// verbs looks for the library, and loads it where that is asked for.
func (m machine) verbs(library, bad string) Check {
	check := Check{Name: "verbs library", State: StateOK, Found: "found by the loader"}
	if at := cmp.Or(library, rdma.Library(m.files, m.libraryPath)); at != "" {
		check.Found = "/" + rooted(at)
	}
	switch err := m.load(library); {
	case errors.Is(err, errNotOpen):
		check.State, check.Found = StateAbsent, err.Error()
	case err != nil:
		check.State, check.Found = bad, err.Error()
		check.Remedy = "apt-get install libibverbs1 ibverbs-providers, or the card maker's packages; kvferry version: was it built with the tag rdma"
	}
	return check
}

// deviceNode opens the file by which a process reaches a device.
func (m machine) deviceNode(d rdma.Info, bad string) Check {
	check := Check{Name: "rdma " + d.Name, State: StateOK}
	nodes, _ := fs.Glob(m.files, "sys/class/infiniband_verbs/uverbs*")
	at := ""
	for _, n := range nodes {
		if m.text(path.Join(n, "ibdev")) == d.Name {
			at = "/dev/infiniband/" + path.Base(n)
		}
	}
	if at == "" {
		check.State, check.Found, check.Remedy = bad, "the kernel offers no uverbs node for it", "modprobe ib_uverbs"
		return check
	}
	err := m.open(at)
	check.Found = at + " can be opened"
	if d.NUMANode >= 0 {
		check.Found += fmt.Sprintf("; it is near NUMA node %d", d.NUMANode)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		check.State, check.Found, check.Remedy = bad, at+" is not here", "in a container: --device /dev/infiniband, or a device plugin; else modprobe ib_uverbs"
	case err != nil:
		check.State, check.Found, check.Remedy = bad, err.Error(), "let the agent's user open it: its mode and group; in a container --device /dev/infiniband"
	}
	return check
}

// port tells of one port, and where that is active of its addresses. bad is the
// state of what should work and does not, down that of a port that is not active.
func (m machine) port(d rdma.Info, p rdma.PortInfo, settings config.RDMA, bad, down string) []Check {
	name := portName(d, p)
	check := Check{Name: "rdma " + name, State: StateOK, Found: fmt.Sprintf("%s, %s, %s", p.State, p.LinkLayer, p.Rate)}
	class := "sys/class/infiniband/" + d.Name
	infiniband := p.LinkLayer == rdma.LinkInfiniBand.String()
	if infiniband {
		check.Found += ", LID " + cmp.Or(m.text(path.Join(class, "ports", strconv.Itoa(p.Number), "lid")), "unknown")
	}
	if p.State != "ACTIVE" {
		check.State, check.Remedy = down, "cable and switch; ip link: is the port's network device up"
		if infiniband {
			check.Remedy = "cable and switch; a port that stays INIT or ARMED has no subnet manager (sminfo)"
		}
		return []Check{check}
	}
	return []Check{check, m.addresses(class, name, p, settings.GIDIndex, bad)}
}

// addresses shows the table of a port, and which entry would be chosen.
func (m machine) addresses(class, name string, p rdma.PortInfo, index int, bad string) Check {
	check := Check{Name: "GIDs " + name, State: StateOK}
	device, err := fs.Sub(m.files, class)
	var gids []rdma.GID
	if err == nil {
		gids, err = rdma.ReadGIDs(device, p.Number)
	}
	if err != nil {
		check.State, check.Found, check.Remedy = bad, err.Error(), "mount sysfs of the card's network namespace"
		return check
	}
	link := rdma.LinkEthernet
	if p.LinkLayer == rdma.LinkInfiniBand.String() {
		link = rdma.LinkInfiniBand
	}
	chosen, err := rdma.ChooseGID(gids, link, netip.Addr{})
	how := "chosen"
	if at := slices.IndexFunc(gids, func(g rdma.GID) bool { return g.Index == index }); index >= 0 && len(gids) > 0 {
		how = "transfer.rdma.gid_index"
		if at < 0 {
			check.State, check.Remedy = StateFail, "set transfer.rdma.gid_index to an entry that there is, or to -1"
			check.Found = fmt.Sprintf("entry %d of transfer.rdma.gid_index is empty; ", index)
		} else {
			chosen = gids[at]
		}
	}
	if err != nil {
		check.State, check.Found = bad, err.Error()
		check.Remedy = "give the port's network device an address; in a container: host network, or a network attachment that has the device"
		return check
	}
	var shown []string
	for _, g := range gids[:min(len(gids), maxGIDs)] {
		text := g.String()
		if g.Index == chosen.Index && check.State == StateOK {
			text += " (" + how + ")"
		}
		shown = append(shown, text)
	}
	if more := len(gids) - len(shown); more > 0 {
		shown = append(shown, fmt.Sprintf("and %d more", more))
	}
	check.Found += strings.Join(shown, ", ")
	if link == rdma.LinkInfiniBand || check.State != StateOK {
		return check
	}
	switch {
	case chosen.Addr.IsLinkLocalUnicast():
		check.State, check.Remedy = StateWarn, "give the network device a routable address: a link-local one ends at the next router"
	case chosen.Type != rdma.GIDRoCEv2:
		check.State, check.Remedy = StateWarn, "RoCE v1 ends at the next router: let the card do RoCE v2, or choose an entry by transfer.rdma.gid_index"
	}
	return check
}
