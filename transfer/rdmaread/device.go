package rdmaread

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer"
)

// maxWindows is how many windows have a place on a port at once, of all links
// together. One of them fills a port, where a queue pair can.
const maxWindows = 16

// device is an open device with this node's memory registered.
type device struct {
	t          *Transport
	dev        *rdma.Device
	pd         *rdma.PD
	arenas     [id.MaxRanks]arena
	open       []*rdma.Region // all that is registered, in order
	local      [id.MaxRanks]region
	offered    regions // as answers tell, but for a ring
	staged     bool    // one of the arenas is
	landing    region  // the buffers of the transport's pool, where one of them is
	registered uint64  // bytes
	ports      []*port
	stop       context.CancelFunc
	watching   sync.WaitGroup
}

// port is a port of a device. It stays in the descriptor while it is down.
type port struct {
	d       *device
	number  int
	windows chan struct{} // one a window under way; whoever waits gets its turn in order

	mu    sync.Mutex
	info  rdma.Port
	gids  []rdma.GID // that may be used, the best first; empty if there are none now
	down  error      // why no lane may use it; nil: it works
	dead  bool       // down for good: its device has failed
	since time.Time  // of down becoming nil
}

// name is the device's name, with the port if it has several.
func (p *port) name() string {
	if p.number == 1 {
		return p.d.dev.Name()
	}
	return p.d.dev.Name() + ":" + strconv.Itoa(p.number)
}

// openDevices opens what the options name, or every device with an active port,
// and registers the memory.
func (t *Transport) openDevices() error {
	if err := rdma.Load(t.o.Library); err != nil {
		return err
	}
	wanted := t.o.Devices
	named := len(wanted) > 0
	if !named {
		all, err := rdma.Devices()
		if err != nil {
			return err
		}
		wanted = all
	}
	var why []error // of devices that nobody named
	for _, text := range wanted {
		name, number, err := parseDevice(text)
		if err != nil {
			return err
		}
		err = t.openDevice(name, number)
		switch {
		case err != nil && named:
			return err
		case err != nil:
			why = append(why, err)
		}
	}
	if len(t.ports) > maxPorts {
		return fmt.Errorf("%d ports, at most %d can be used; name those that are to be", len(t.ports), maxPorts)
	}
	if len(t.ports) == 0 {
		if len(why) == 0 {
			return fmt.Errorf("no device: %w", rdma.ErrUnavailable)
		}
		return fmt.Errorf("no device will do: %w: %w", rdma.ErrUnavailable, errors.Join(why...))
	}
	for _, e := range why {
		t.o.Logger.Warn("an RDMA device is not used", "err", e)
	}
	return t.register()
}

// parseDevice takes "mlx5_0" or "mlx5_0:1"; number 0 is any.
func parseDevice(text string) (name string, number int, err error) {
	name, port, found := strings.Cut(text, ":")
	if err := id.Node(name).Validate(); err != nil || len(name) > maxName {
		return "", 0, fmt.Errorf("device %q: no name of a device", text)
	}
	if !found {
		return name, 0, nil
	}
	if number, err = strconv.Atoi(port); err != nil || number < 1 || number > 255 {
		return "", 0, fmt.Errorf("device %q: want a port from 1 to 255 behind the colon", text)
	}
	return name, number, nil
}

// openDevice adds the active ports of a device, or one.
func (t *Transport) openDevice(name string, number int) error {
	var d *device
	for _, known := range t.devices {
		if known.dev.Name() == name {
			d = known
		}
	}
	if d == nil {
		dev, err := rdma.Open(name)
		if err != nil {
			return err
		}
		d = &device{t: t, dev: dev}
		t.devices = append(t.devices, d)
	}
	numbers := []int{number}
	if number == 0 {
		numbers = d.numbers()
	}
	var why []error
	for _, n := range numbers {
		if slices.ContainsFunc(d.ports, func(p *port) bool { return p.number == n }) {
			continue
		}
		p := &port{d: d, number: n, windows: make(chan struct{}, maxWindows)}
		if err := p.refresh(); err != nil {
			why = append(why, err)
			continue
		}
		d.ports = append(d.ports, p)
		t.ports = append(t.ports, p)
	}
	if number != 0 && len(why) == 0 || number == 0 && len(d.ports) > 0 {
		return nil
	}
	if len(d.ports) > 0 { // the port that was named
		return errors.Join(why...)
	}
	t.devices = slices.DeleteFunc(t.devices, func(other *device) bool { return other == d })
	return errors.Join(append(why, d.dev.Close())...)
}

// numbers are the ports of a device, which the library tells by failing.
func (d *device) numbers() (list []int) {
	for n := 1; n < 256; n++ {
		if _, err := d.dev.Port(n); err != nil {
			break
		}
		list = append(list, n)
	}
	if len(list) == 0 {
		list = []int{1} // whose error tells
	}
	return list
}

// refresh reads state and addresses of a port, and fails if it can't be used.
func (p *port) refresh() error {
	info, err := p.d.dev.Port(p.number)
	if err != nil {
		return err
	}
	gids, err := p.d.dev.GIDs(p.number)
	if err != nil {
		return err
	}
	gids, err = usable(gids, info.Link, p.d.t.o.GIDIndex)
	if !info.Active {
		err = fmt.Errorf("it is %s", info.State)
	} else if info.Link != rdma.LinkEthernet && info.Link != rdma.LinkInfiniBand {
		err = fmt.Errorf("its link layer is unknown (%d)", info.Link)
	} else if info.ActiveMTU < minMTU || info.ActiveMTU > maxMTU {
		err = fmt.Errorf("its MTU is unknown (%d)", info.ActiveMTU)
	}
	if err != nil {
		err = fmt.Errorf("port %d of %s can't be used: %w", p.number, p.d.dev.Name(), err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.info, p.gids = info, gids
	return err
}

// usable are the entries of an address table that may be used, the best first:
// the one that was named; else no link-local one, and none that routers do not
// pass on, unless there is nothing else.
func usable(gids []rdma.GID, link rdma.LinkLayer, index *int) ([]rdma.GID, error) {
	if index != nil {
		for _, g := range gids {
			if g.Index == *index {
				return []rdma.GID{g}, nil
			}
		}
		return nil, fmt.Errorf("it has no GID with the index %d", *index)
	}
	left := slices.Clone(gids)
	if link == rdma.LinkEthernet {
		for _, worse := range []func(rdma.GID) bool{
			func(g rdma.GID) bool { a := g.Addr.Unmap(); return a.IsLinkLocalUnicast() || a.IsLoopback() },
			func(g rdma.GID) bool { return g.Type != rdma.GIDRoCEv2 },
		} {
			if !slices.ContainsFunc(left, func(g rdma.GID) bool { return !worse(g) }) {
				continue
			}
			left = slices.DeleteFunc(left, worse)
		}
	}
	var list []rdma.GID
	for len(left) > 0 {
		best, err := rdma.ChooseGID(left, link, netip.Addr{})
		if err != nil {
			return nil, err
		}
		list = append(list, best)
		left = slices.DeleteFunc(left, func(g rdma.GID) bool { return g.Index == best.Index })
	}
	if len(list) == 0 {
		return nil, errors.New("it has no address: bring its network device up, with an IP address, in this network namespace")
	}
	return list, nil
}

// SpareBytes must be left of the lock limit on each device for links: queues and
// the places of seal words are locked too, some 130 KiB a lane. So this is for a
// hundred lanes, or a dozen peers. A node with more asks for no limit at all.
const SpareBytes = 16 << 20

// closeDevices closes what has been opened, in reverse order.
func (t *Transport) closeDevices() error {
	var errs []error
	for _, d := range slices.Backward(t.devices) {
		if d.stop != nil {
			d.stop()
		}
		d.watching.Wait()
		for _, r := range slices.Backward(d.open) {
			errs = append(errs, r.Close())
		}
		if d.pd != nil {
			errs = append(errs, d.pd.Close())
		}
		errs = append(errs, d.dev.Close())
	}
	for _, p := range []*transfer.Pool{t.landing, t.rings} {
		if p != nil {
			errs = append(errs, p.Close())
		}
	}
	return errors.Join(errs...)
}

// watch begins to listen for events of the device.
func (d *device) watch() {
	ctx, cancel := context.WithCancel(context.Background())
	d.stop = cancel
	d.watching.Go(func() { d.listen(ctx) })
}

// listen does what events ask for, until ctx ends.
func (d *device) listen(ctx context.Context) {
	err := d.dev.Watch(ctx, d.happened)
	if err == nil || ctx.Err() != nil {
		return
	}
	for _, p := range d.ports {
		p.fail(fmt.Errorf("the events of %s can't be read: %w", d.dev.Name(), err))
	}
}

// happened takes one event.
func (d *device) happened(e rdma.Event) {
	if e.Kind == rdma.QPFatal {
		d.t.breakLanes(func(n *lane) bool { return n.path.port.d == d && n.queue.qp.Num() == e.Element },
			fmt.Errorf("%s says of queue pair %d: %s", d.dev.Name(), e.Element, e.Text))
		return
	}
	for _, p := range d.ports {
		if e.Kind != rdma.DeviceFatal && int(e.Element) != p.number {
			continue
		}
		switch e.Kind {
		case rdma.DeviceFatal:
			p.die(fmt.Errorf("%s has failed: %s; look at the kernel's log, and start this process anew", d.dev.Name(), e.Text))
			d.t.dropServed(p)
		case rdma.PortError:
			p.fail(fmt.Errorf("port %d of %s is down: %s; look at its cable, its switch, or its network device", p.number, d.dev.Name(), e.Text))
		case rdma.PortActive, rdma.GIDChange: // an address may come after its port
			p.returned()
		default: // of no meaning to reads
		}
	}
}

// die is fail, for good.
func (p *port) die(why error) {
	p.fail(why)
	p.mu.Lock()
	p.dead, p.down = true, why
	p.mu.Unlock()
}

// fail breaks the lanes of a port, and lets it carry no others.
func (p *port) fail(why error) {
	p.mu.Lock()
	was := p.down
	if !p.dead {
		p.down = why
	}
	p.mu.Unlock()
	if was == nil {
		p.d.t.o.Logger.Warn("an RDMA port is not used any more", "device", p.d.dev.Name(), "port", p.number, "err", why)
	}
	p.d.t.breakLanes(func(n *lane) bool { return n.path.port == p }, why)
}

// returned reads a port anew, and lets one that was away carry lanes again, after
// a moment.
func (p *port) returned() {
	err := p.refresh()
	log := p.d.t.o.Logger.With("device", p.d.dev.Name(), "port", p.number)
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.dead:
	case p.down == nil && err != nil: // what is open may go on
		log.Warn("the addresses of an RDMA port have changed", "err", err)
	case p.down == nil:
	case err != nil:
		p.down = err
	default:
		p.down, p.since = nil, time.Now()
		log.Info("an RDMA port is back")
	}
}

// works returns what a lane needs to know of a port, or why it can't have one.
func (p *port) works() (rdma.Port, []rdma.GID, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.down != nil:
		return p.info, nil, p.down
	case time.Since(p.since) < p.d.t.o.hold:
		return p.info, nil, fmt.Errorf("port %d of %s is only just back", p.number, p.d.dev.Name())
	case len(p.gids) == 0:
		return p.info, nil, fmt.Errorf("port %d of %s has no address any more", p.number, p.d.dev.Name())
	}
	return p.info, p.gids, nil
}

// describe is what the descriptor tells of a port, and pairing looks at.
func (p *port) describe() remotePort {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := remotePort{
		name: p.d.dev.Name(), link: p.info.Link, lid: p.info.LID,
		reads: uint8(max(1, min(p.d.dev.Limits().MaxReadsServed, maxReads))),
	}
	for _, g := range p.gids[:min(len(p.gids), maxGIDs)] {
		out.gids = append(out.gids, g.Addr)
	}
	return out
}

func (t *Transport) describe() (list []remotePort) {
	for _, p := range t.ports {
		list = append(list, p.describe())
	}
	return list
}

func (p *port) status() Path {
	_, _, err := p.works()
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Path{Device: p.d.dev.Name(), Port: p.number, Link: p.info.Link.String(), State: "active"}
	s.Memory, s.Why = p.d.reached()
	if len(p.gids) > 0 {
		s.GID = p.gids[0].Addr.Unmap().String()
	}
	if err != nil {
		s.State = err.Error()
	}
	return s
}

// self is our end of a queue pair on a port.
func (p *port) self(info rdma.Port, gid netip.Addr, qp *rdma.QP, reads int) end {
	mtu := info.ActiveMTU
	if want := mtuOf(p.d.t.o.MTU); want != 0 {
		mtu = min(mtu, want)
	}
	return end{qpn: qp.Num(), psn: newPSN(), gid: gid, lid: info.LID, link: info.Link, mtu: mtu, reads: uint8(reads)}
}

// route is the way from our end of a queue pair to the other.
func (p *port) route(gid rdma.GID, ours, theirs end) (rdma.Path, error) {
	if ours.link != theirs.link {
		return rdma.Path{}, fmt.Errorf("the link layer is %s here and %s there: %w", ours.link, theirs.link, transfer.ErrUnavailable)
	}
	o := &p.d.t.o
	to := rdma.Path{
		Port: uint8(p.number), GIDIndex: uint8(gid.Index), HopLimit: 64, TrafficClass: o.TrafficClass, SL: o.ServiceLevel,
		MTU: min(ours.mtu, theirs.mtu), Timeout: o.Timeout, RetryCount: o.RetryCount, RNRRetry: 6, MinRNRTimer: 12,
		DLID: theirs.lid, DestQPN: theirs.qpn, RecvPSN: theirs.psn, SendPSN: ours.psn, DestGID: theirs.gid.As16(),
		Global: ours.link == rdma.LinkEthernet || !sameSubnet(ours.gid, theirs.gid),
	}
	if ours.link == rdma.LinkEthernet && ours.gid.Is4In6() != theirs.gid.Is4In6() {
		return rdma.Path{}, fmt.Errorf("the address is %s here and %s there, of another family: %w", ours.gid.Unmap(), theirs.gid.Unmap(), transfer.ErrUnavailable)
	}
	return to, nil
}

// sameSubnet compares the prefixes of two addresses of InfiniBand.
func sameSubnet(a, b netip.Addr) bool {
	x, y := a.As16(), b.As16()
	return cmp.Compare(string(x[:8]), string(y[:8])) == 0
}
