package manager

import (
	"fmt"
	"maps"

	"github.com/kvferry/kvferry/internal/id"
)

// maxNeeds bounds the entries of Needs.ByNode and of Needs.ByWalk.
const maxNeeds = 1024

// Needs are the labels that a request needs, looked up in the order ByWalk,
// ByNode, Labels, {main}. An empty list that is present counts as found: a map
// entry, or Labels that are not nil.
type Needs struct {
	Labels []id.Label
	ByNode map[id.GraphNode][]id.Label
	ByWalk map[At][]id.Label
}

// At is where in the model's graph a retrieve happens.
type At struct {
	Node id.GraphNode
	Walk id.Walk
}

var onlyMain = [...]id.Label{id.Main} //nolint:gochecknoglobals // a constant, looked up for every retrieve

// at looks the needed labels up.
func (n *Needs) at(a At) []id.Label {
	if l, ok := n.ByWalk[a]; ok {
		return l
	}
	if l, ok := n.ByNode[a.Node]; ok {
		return l
	}
	if n.Labels != nil {
		return n.Labels
	}
	return onlyMain[:]
}

// RequestConfig is what a request is begun with (M*'s KVReqConfig).
type RequestConfig struct {
	Needs
	// Retention of the streams that have one, by label.
	Retention map[id.Label]Retention
}

// Ingest begins a request; it has the label main, empty. Of a live one it
// changes nothing and returns nil: its streams and what it was first ingested
// with stay. The configuration is copied.
//
// It refuses invalid names and retentions (ErrInvalid) and more requests or
// labels than the bounds allow ([*FullError]).
func (m *Manager) Ingest(r id.Request, c RequestConfig) error {
	if err := r.Validate(); err != nil {
		return fmt.Errorf("ingest: %w: %w", ErrInvalid, err)
	}
	m.mu.Lock()
	defer m.unlock()
	if m.requests[r] != nil {
		return nil
	}
	if len(m.requests) >= m.limits.requests {
		return fmt.Errorf("ingest %q: %w", r, &FullError{"live requests", m.limits.requests})
	}
	needs, err := m.copyNeeds(c.Needs)
	if err != nil {
		return fmt.Errorf("ingest %q: %w", r, err)
	}
	if n := len(c.Retention); n > m.limits.labels {
		return fmt.Errorf("ingest %q: %w", r, &FullError{"labels a request", m.limits.labels})
	}
	for l, keep := range c.Retention {
		if err := keep.validate(l); err != nil {
			return fmt.Errorf("ingest %q: %w", r, err)
		}
	}
	req := &request{id: r, needs: needs, retention: maps.Clone(c.Retention), active: m.tick()}
	req.add(id.Main)
	m.requests[r] = req
	return nil
}

func (m *Manager) copyNeeds(n Needs) (Needs, error) {
	for _, e := range []struct {
		name string
		len  int
	}{{"needs by node", len(n.ByNode)}, {"needs by walk", len(n.ByWalk)}} {
		if e.len > maxNeeds {
			return Needs{}, &FullError{e.name, maxNeeds}
		}
	}
	var c Needs
	var err error
	if c.Labels, err = m.copyLabels(n.Labels); err != nil {
		return Needs{}, err
	}
	for node, l := range n.ByNode {
		if c.ByNode == nil {
			c.ByNode = make(map[id.GraphNode][]id.Label, len(n.ByNode))
		}
		if c.ByNode[node], err = m.copyLabels(l); err != nil {
			return Needs{}, err
		}
	}
	for at, l := range n.ByWalk {
		if c.ByWalk == nil {
			c.ByWalk = make(map[At][]id.Label, len(n.ByWalk))
		}
		if c.ByWalk[at], err = m.copyLabels(l); err != nil {
			return Needs{}, err
		}
	}
	return c, nil
}

// copyLabels keeps nil and empty apart, and the first of equal labels: a label
// is read once.
func (m *Manager) copyLabels(list []id.Label) ([]id.Label, error) {
	if list == nil {
		return nil, nil
	}
	if len(list) > m.limits.labels {
		return nil, &FullError{"labels a request", m.limits.labels}
	}
	c := make([]id.Label, 0, len(list))
	seen := make(map[id.Label]bool, len(list))
	for _, l := range list {
		if err := l.Validate(); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
		}
		if !seen[l] {
			seen[l] = true
			c = append(c, l)
		}
	}
	return c, nil
}
