package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

func newStatus(t *target) *cobra.Command {
	l := &look[*kvferrypb.StatusResponse]{
		target: t,
		ask: func(ctx context.Context, a kvferrypb.AdminClient) (*kvferrypb.StatusResponse, error) {
			return a.Status(ctx, &kvferrypb.StatusRequest{})
		},
		show: showStatus,
	}
	return l.command(&cobra.Command{
		Use:   "status",
		Short: "Show a node: who it is, what it holds, which transports it has",
	})
}

func showStatus(w io.Writer, s *kvferrypb.StatusResponse) {
	list := newTable(w)
	add := func(name string, value any) { list.AppendRow([]any{name, value}) }
	add("node", s.GetNode())
	add("incarnation", s.GetIncarnation())
	add("role", s.GetRole())
	add("group", s.GetGroup())
	add("version", s.GetVersion())
	add("uptime", formatDuration(s.GetUptime()))
	ready := yesNo(s.GetReady())
	if !s.GetReady() {
		ready += ": " + strings.Join(s.GetNotReady(), "; ")
	}
	add("ready", ready)
	add("draining", yesNo(s.GetDraining()))
	add("security", cmp.Or(s.GetSecurity(), "none: whoever reaches the ports is trusted"))
	g := s.GetGeometry()
	add("model", formatModel(g))
	add("geometry", formatGeometry(g))
	add("ranks", fmt.Sprintf("%d of %d", s.GetRanks(), g.GetWorldSize()))
	for _, a := range s.GetAddresses() {
		add(a.GetName(), a.GetAddress())
	}
	add("memory", formatMemory(s.GetMemory()))
	for _, d := range s.GetDevices() {
		add(fmt.Sprintf("gpu %d", d.GetOrdinal()), formatDevice(d))
	}
	add("pages", formatPages(s.GetPages()))
	add("host pages", formatHostPages(s.GetPages()))
	add("requests", s.GetRequests())
	add("sessions", s.GetSessions())
	add("publications", s.GetPublications())
	add("retrievals", s.GetRetrievals())
	add("members", s.GetMembers())
	list.Render()
	fmt.Fprintln(w)
	rows := newTable(w, "transport", "available", "read", "served", "staged", "reads", "failures", "stale", "reason")
	for _, t := range s.GetTransports() {
		served := "-" // peers read by themselves, or not at all
		if t.ServedBytes != nil {
			served = formatBytes(t.GetServedBytes())
		}
		rows.AppendRow([]any{
			t.GetName(), t.GetAvailable(), formatBytes(t.GetReadBytes()), served, formatBytes(t.GetStagedBytes()),
			t.GetReads(), t.GetFailures(), t.GetStale(), orDash(t.GetReason()),
		})
	}
	rows.Render()
	showPorts(w, s.GetTransports())
}

// showPorts shows those of the devices that a node reads with, if it has any.
func showPorts(w io.Writer, transports []*kvferrypb.TransportStatus) {
	rows := newTable(w, "port", "link", "address", "lanes", "memory", "state")
	for _, t := range transports {
		for _, p := range t.GetPorts() {
			rows.AppendRow([]any{
				fmt.Sprintf("%s:%d", p.GetDevice(), p.GetPort()), p.GetLink(), orDash(p.GetGid()), p.GetLanes(), formatReach(p), p.GetState(),
			})
		}
	}
	if rows.Length() > 0 {
		fmt.Fprintln(w)
		rows.Render()
	}
}

// formatReach is how a card reaches the arenas.
func formatReach(p *kvferrypb.TransportStatus_Port) string {
	if p.GetWhy() == "" {
		return p.GetMemory()
	}
	return fmt.Sprintf("%s: %s", p.GetMemory(), p.GetWhy())
}

// formatMemory says where the arenas lie, once if it is one place.
func formatMemory(all []*kvferrypb.Memory) string {
	var places []string
	for _, m := range all {
		places = append(places, m.GetPlace())
	}
	if one := slices.Compact(slices.Clone(places)); len(one) == 1 {
		return one[0]
	}
	for i, m := range all {
		places[i] = fmt.Sprintf("rank %d: %s", m.GetRank(), places[i])
	}
	return strings.Join(places, "; ")
}

func formatDevice(d *kvferrypb.Device) string {
	if d.GetFailed() != "" {
		return fmt.Sprintf("%s, %s: %s", d.GetName(), d.GetUuid(), d.GetFailed())
	}
	said := []string{d.GetName(), d.GetUuid(), d.GetBus(), formatBytes(d.GetBytes()), fmt.Sprintf("CUDA %d.%d", d.GetDriver()/1000, d.GetDriver()%1000/10)}
	for _, can := range []struct {
		is   bool
		what string
	}{{d.GetBatch(), "batches"}, {d.GetDmabuf(), "dma-buf"}, {d.GetPeermem(), "peermem"}} {
		if can.is {
			said = append(said, can.what)
		}
	}
	return strings.Join(said, ", ")
}

func formatModel(g *kvferrypb.Geometry) string {
	return strings.TrimSpace(g.GetModel() + " " + g.GetRevision())
}

func formatGeometry(g *kvferrypb.Geometry) string {
	return fmt.Sprintf("%s %s, %d layers, %d KV heads of %d, %d tokens a page", g.GetDtype(), g.GetOrder(), g.GetLayers(), g.GetHeads(), g.GetHeadDim(), g.GetPageSize())
}

func formatPages(p *kvferrypb.PageCounts) string {
	engine := ""
	if n := p.GetEngine(); n > 0 {
		engine = fmt.Sprintf(", %d the engine's", n)
	}
	return fmt.Sprintf("%d: %d free, %d owned, %d limbo, %d quarantine, %d sink%s; %d published",
		p.GetTotal(), p.GetFree(), p.GetOwned(), p.GetLimbo(), p.GetQuarantine(), p.GetSink(), engine, p.GetPublished())
}

func formatHostPages(p *kvferrypb.PageCounts) string {
	if p.GetHostTotal() == 0 {
		return "none"
	}
	return fmt.Sprintf("%d: %d free", p.GetHostTotal(), p.GetHostFree())
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
