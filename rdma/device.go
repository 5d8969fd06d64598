//go:build linux && cgo && rdma && (amd64 || arm64)

package rdma

// #include "verbs.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

// withDevices calls f with what the library lists, which lasts as long as f.
func withDevices(f func([]*C.struct_ibv_device) error) error {
	if err := Load(""); err != nil {
		return err
	}
	var n, e C.int
	list := C.rd_device_list(&n, &e)
	if list == nil {
		return fmt.Errorf("%w: list devices: %w (is the module ib_uverbs loaded?)", ErrUnavailable, syscall.Errno(e))
	}
	defer C.rd_free_device_list(list)
	if n == 0 {
		return fmt.Errorf("%w: the verbs library finds no device (is the module ib_uverbs loaded, a provider for the device installed, /dev/infiniband passed to this container?)", ErrUnavailable)
	}
	return f(unsafe.Slice(list, n))
}

// Devices lists the names of this machine's devices, in the library's order.
// The error wraps [ErrUnavailable] if there is no library or no device.
func Devices() ([]string, error) {
	var names []string
	err := withDevices(func(list []*C.struct_ibv_device) error {
		for _, d := range list {
			names = append(names, C.GoString(C.rd_device_name(d)))
		}
		return nil
	})
	return names, err
}

// Device is an open device. It is safe for concurrent use.
type Device struct {
	name   string
	sysfs  string // its directory, as the library tells it
	limits Limits
	c      *C.struct_ibv_context
	parent // of protection domains, and of calls in progress
}

// Open opens a device by name. The error wraps [ErrUnavailable] only if there
// is no library, or no device at all.
func Open(name string) (*Device, error) {
	var d *Device
	err := withDevices(func(list []*C.struct_ibv_device) error {
		var names []string
		for _, found := range list {
			n := C.GoString(C.rd_device_name(found))
			if n == name {
				var err error
				d, err = open(found, name)
				return err
			}
			names = append(names, n)
		}
		return fmt.Errorf("open RDMA device %q: there is none of that name, but %s", name, strings.Join(names, ", "))
	})
	return d, err
}

func open(found *C.struct_ibv_device, name string) (*Device, error) {
	var e C.int
	c := C.rd_open(found, &e)
	if c == nil {
		return nil, verbError("open", name, e, "may this user read and write /dev/infiniband/uverbs*, and is it passed to this container?")
	}
	var a C.struct_ibv_device_attr
	if e := C.rd_query_device(c, &a); e != 0 {
		C.rd_close(c)
		return nil, verbError("query", name, e, "")
	}
	return &Device{
		name:  name,
		sysfs: C.GoString(&found.ibdev_path[0]),
		c:     c,
		limits: Limits{
			MaxQPWR:           int(a.max_qp_wr),
			MaxSGE:            int(a.max_sge),
			MaxSGERead:        int(a.max_sge_rd),
			MaxCQE:            int(a.max_cqe),
			MaxReadsInitiated: int(a.max_qp_init_rd_atom),
			MaxReadsServed:    int(a.max_qp_rd_atom),
			MaxMR:             int(a.max_mr),
			MaxMRSize:         uint64(a.max_mr_size),
		},
	}, nil
}

// Name is the device's name, such as "mlx5_0".
func (d *Device) Name() string { return d.name }

// Limits are what the device can do.
func (d *Device) Limits() Limits { return d.limits }

// NUMANode is the NUMA node that the device is attached to; -1: unknown.
func (d *Device) NUMANode() int { return numaNode(os.DirFS(d.sysfs), ".") }

// GIDs reads the address table of a port, as it is now.
func (d *Device) GIDs(port int) ([]GID, error) {
	list, err := ReadGIDs(os.DirFS(d.sysfs), port)
	if err != nil {
		return nil, fmt.Errorf("%s: %w (%s)", d.name, err, d.sysfs)
	}
	return list, nil
}

// Port tells the state of port n, from 1, as it is now.
func (d *Device) Port(n int) (Port, error) {
	verb := fmt.Sprintf("query port %d", n)
	if n < 1 || n > 255 {
		return Port{}, &OpError{Verb: verb, Device: d.name, Err: syscall.EINVAL}
	}
	if err := d.enter(); err != nil {
		return Port{}, &OpError{Verb: verb, Device: d.name, Err: err}
	}
	defer d.leave()
	var a C.struct_ibv_port_attr
	if e := C.rd_query_port(d.c, C.uint8_t(n), &a); e != 0 {
		return Port{}, verbError(verb, d.name, e, portHint(syscall.Errno(e)))
	}
	return Port{
		Number:    n,
		Active:    a.state == C.IBV_PORT_ACTIVE,
		State:     portState(int(a.state)),
		Link:      LinkLayer(a.link_layer),
		ActiveMTU: MTU(a.active_mtu),
		LID:       uint16(a.lid),
		MaxMsg:    uint32(a.max_msg_sz),
		Rate:      portRate(uint8(a.active_width), uint8(a.active_speed)),
	}, nil
}

func portHint(e syscall.Errno) string {
	if e == syscall.EINVAL {
		return "has the device a port of that number? ibv_devinfo lists them"
	}
	return ""
}

// Watch calls f for every asynchronous event of the device until ctx has
// ended, and then returns its cause. Each event is acknowledged before f sees
// it, so f may take its time, and may close queue pairs.
func (d *Device) Watch(ctx context.Context, f func(Event)) error {
	const verb = "watch events"
	if err := d.enter(); err != nil {
		return &OpError{Verb: verb, Device: d.name, Err: err}
	}
	defer d.leave()
	file, err := pollable(int(d.c.async_fd), "rdma events")
	if err != nil {
		return &OpError{Verb: verb, Device: d.name, Err: err}
	}
	defer file.Close()
	raw, err := file.SyscallConn()
	if err != nil {
		return &OpError{Verb: verb, Device: d.name, Err: err}
	}
	defer context.AfterFunc(ctx, func() {
		file.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // it may be late: the file is closed then
	})()
	for {
		var found, kind C.int
		var element C.uint32_t
		// The poller reports a change, once: it is asked only when there is
		// no event left.
		err := raw.Read(func(uintptr) bool {
			found = C.rd_async_event(d.c, &kind, &element)
			return found != 0
		})
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			return &OpError{Verb: verb, Device: d.name, Err: err}
		case found < 0:
			return verbError(verb, d.name, -found, "the device may have been taken away")
		}
		f(Event{Kind: eventKind(kind), Text: C.GoString(C.rd_event_str(kind)), Element: uint32(element)})
	}
}

func eventKind(kind C.int) EventKind {
	switch kind {
	case C.IBV_EVENT_PORT_ACTIVE:
		return PortActive
	case C.IBV_EVENT_PORT_ERR:
		return PortError
	case C.IBV_EVENT_DEVICE_FATAL:
		return DeviceFatal
	case C.IBV_EVENT_GID_CHANGE:
		return GIDChange
	case C.IBV_EVENT_QP_FATAL, C.IBV_EVENT_QP_REQ_ERR, C.IBV_EVENT_QP_ACCESS_ERR:
		return QPFatal
	default:
		return EventOther
	}
}

// Close closes the device. All that was made of it must have been closed, and
// nobody may watch it. It may be called again.
func (d *Device) Close() error {
	return d.close("close", d.name, "protection domains and watchers", func() C.int { return C.rd_close(d.c) })
}

// pollable hands a descriptor that does not block to Go's poller. It is a
// duplicate: the library closes its own.
func pollable(fd int, name string) (*os.File, error) {
	n, _, e := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_DUPFD_CLOEXEC, 0)
	if e != 0 {
		return nil, fmt.Errorf("duplicate descriptor: %w", e)
	}
	f := os.NewFile(n, name)
	if err := f.SetReadDeadline(time.Time{}); err != nil { // os.ErrNoDeadline: the poller did not take it
		return nil, errors.Join(fmt.Errorf("poll %s: %w", name, err), f.Close())
	}
	return f, nil
}
