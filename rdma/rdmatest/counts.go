package rdmatest

import (
	"bytes"
	"sync/atomic"

	"github.com/kvferry/kvferry/internal/double"
)

// Tally counts what there is, and what has been.
type Tally struct {
	// Live objects. Those of processes that have died do not count.
	Contexts, PDs, Regions, CQs, QPs, Channels int //nolint:revive // QPs is a plural

	// Totals, of dead processes and closed devices too.
	Posts       uint64 // calls of post_send
	WRs         uint64 // work requests begun
	CQEs        uint64
	Errors      uint64 // work requests that did not succeed, flushed ones among them
	Reads       uint64
	ReadBytes   uint64 // bytes that landed here
	ServedReads uint64
	ServedBytes uint64 // bytes that others, or this process itself, read from here
}

// Counts are the counts of a world, in all and by process and device. Of a
// process whose devices are all closed the totals are kept until their places
// are needed again.
type Counts struct {
	Tally
	Processes map[int]Tally // by pid
	Devices   map[string]Tally
}

// Counts returns what there is now.
func (w *World) Counts() Counts {
	n := Counts{Processes: make(map[int]Tally), Devices: make(map[string]Tally)}
	err := w.control.Locked(func(c *control) error {
		for i := range c.devices {
			n.Devices[c.device[i].label()] = Tally{}
		}
		for i := range c.context {
			x := &c.context[i]
			if x.owner == 0 {
				continue
			}
			var ever, life Tally
			if double.Alive(atomic.LoadUint32(&x.pid), x.start) {
				ever = x.objects()
			}
			life = ever
			ever.add(x, false)
			life.add(x, true)
			n.Tally = n.plus(ever)
			n.Processes[int(x.owner)] = n.Processes[int(x.owner)].plus(life)
			device := c.device[x.device].label()
			n.Devices[device] = n.Devices[device].plus(life)
		}
		return nil
	})
	if err != nil {
		panic("rdmatest: " + err.Error())
	}
	return n
}

func (d *device) label() string {
	name, _, _ := bytes.Cut(d.name[:], []byte{0})
	return string(name)
}

func (x *contextSlot) objects() Tally {
	n := func(kind int) int { return int(atomic.LoadUint32(&x.live[kind])) }
	return Tally{Contexts: n(liveContext), PDs: n(livePD), Regions: n(liveRegion), CQs: n(liveCQ), QPs: n(liveQP), Channels: n(liveChannel)}
}

// add adds a context's totals, of this life alone or of all lives of its slot.
func (t *Tally) add(x *contextSlot, life bool) {
	n := func(total int) uint64 {
		v := atomic.LoadUint64(&x.total[total])
		if life {
			v -= x.base[total]
		}
		return v
	}
	t.Posts += n(totalPosts)
	t.WRs += n(totalWRs)
	t.CQEs += n(totalCQEs)
	t.Errors += n(totalErrors)
	t.Reads += n(totalReads)
	t.ReadBytes += n(totalReadBytes)
	t.ServedReads += n(totalServedReads)
	t.ServedBytes += n(totalServedBytes)
}

func (t Tally) plus(o Tally) Tally {
	return Tally{
		Contexts: t.Contexts + o.Contexts, PDs: t.PDs + o.PDs, Regions: t.Regions + o.Regions, CQs: t.CQs + o.CQs, QPs: t.QPs + o.QPs, Channels: t.Channels + o.Channels,
		Posts: t.Posts + o.Posts, WRs: t.WRs + o.WRs, CQEs: t.CQEs + o.CQEs, Errors: t.Errors + o.Errors, Reads: t.Reads + o.Reads, ReadBytes: t.ReadBytes + o.ReadBytes,
		ServedReads: t.ServedReads + o.ServedReads, ServedBytes: t.ServedBytes + o.ServedBytes,
	}
}
