package manager

import (
	"fmt"
	"slices"
)

// Stage admits a step ahead of its time (M*'s pre-plan): while the lane's step
// before it runs, or after that was committed. Its plan may be made at once;
// Admit of an equal step gets it, if nothing has changed that it stands on, and
// of another one drops it. Until then it can't be committed, and its forks are
// not copied.
//
// It refuses what Admit refuses, and a second one in the same lane (ErrStaged).
func (m *Manager) Stage(s Step) (Token, error) {
	m.mu.Lock()
	defer m.unlock()
	if t, ok := m.staged[s.Lane]; ok {
		return 0, fmt.Errorf("stage: step %d of lane %d: %w", t, s.Lane, ErrStaged)
	}
	t, err := m.open(s, s.clone())
	if err != nil {
		return 0, fmt.Errorf("stage: %w", err)
	}
	m.staged[s.Lane] = t
	return t, nil
}

// Unstage drops the lane's staged step (M*'s clear_preplan): the labels that it
// made are gone with their pages, lengths and bytes are as they were, and pages
// reserved for streams that stay are their reserve. Without one it does nothing.
func (m *Manager) Unstage(l Lane) {
	m.mu.Lock()
	defer m.unlock()
	if t, ok := m.staged[l]; ok {
		delete(m.staged, l)
		m.drop(t)
	}
}

// drop ends a staged step without a trace.
func (m *Manager) drop(t Token) {
	a := m.steps[t]
	m.retire(a)
	m.uncreate(a)
	m.end(t)
}

// uncreate takes back the labels that a step has made and put nothing into, once
// its marks are off: an empty label that is published says that nothing belongs
// there.
func (m *Manager) uncreate(a *step) {
	for _, g := range slices.Backward(a.created) {
		// Since a reset it is not the step's: a retrieve may fill it. Nor is it
		// while another step is on the request, or a publication has listed it.
		if st := g.stream; g.live() && st.stored == 0 && !st.listed && g.request.inFlight == 0 && st.state == Resident {
			m.unspend(st.pages, g.request, st.label)
			g.request.drop(st)
		}
	}
}
