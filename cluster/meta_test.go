package cluster

import (
	"errors"
	"slices"
	"testing"
)

// What a member tells of itself changes within one life: it does not leave.
func TestDrainingIsTold(t *testing.T) {
	t.Parallel()
	p := feel(t)
	all := group(t, 3, nil)
	err := all[2].SetDraining()
	p.claim(t, err == nil, "%v", err) // all will hear of it even so
	must(t, all[2].SetDraining())
	for i, m := range all[:2] {
		p.told(t, m, "n2", "joined n2.1", "updated n2.1 draining=true")
		at := slices.IndexFunc(m.Members(), func(o Member) bool { return o.Life == all[2].Life() })
		if !m.Members()[at].Meta.Draining {
			t.Errorf("n%d lists it as %+v", i, m.Members()[at])
		}
	}
	if at := slices.IndexFunc(all[2].Members(), func(o Member) bool { return o.Self }); !all[2].Members()[at].Meta.Draining {
		t.Error("it does not list itself as draining")
	}
	// Who joins later hears of it, too; who has no others to tell is done at once.
	late := launch(t, options(t, "late", 1, anywhere(), all[0].Gossip().String()))
	within(t, "a late one knows", func() bool {
		return slices.ContainsFunc(late.Members(), func(o Member) bool { return o.Life == all[2].Life() && o.Meta.Draining })
	})
	must(t, launch(t, options(t, "alone", 1, anywhere())).SetDraining())
	late.Close()
	if err := late.SetDraining(); !errors.Is(err, ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}
