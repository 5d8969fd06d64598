package cluster

import (
	"errors"
	"slices"
	"testing"
	"time"
)

// What a member tells of itself changes within one life: it does not leave.
func TestDrainingIsTold(t *testing.T) {
	t.Parallel()
	all := group(t, 3, nil)
	must(t, all[2].SetDraining())
	must(t, all[2].SetDraining())
	want := []string{"joined n2.1", "updated n2.1 draining=true"}
	for i, m := range all[:2] {
		within(t, 5*time.Second, "the handler is told", func() bool { return slices.Equal(m.about("n2"), want) })
		at := slices.IndexFunc(m.Members(), func(o Member) bool { return o.Life == all[2].Life() })
		if !m.Members()[at].Meta.Draining {
			t.Errorf("n%d lists it as %+v", i, m.Members()[at])
		}
	}
	if at := slices.IndexFunc(all[2].Members(), func(o Member) bool { return o.Self }); !all[2].Members()[at].Meta.Draining {
		t.Error("it does not list itself as draining")
	}
	// Who joins later hears of it, too; who has no others to tell is done at once.
	late := launch(t, options("late", 1, "127.0.0.1:0", all[0].Gossip().String()))
	within(t, 5*time.Second, "a late one knows", func() bool {
		return slices.ContainsFunc(late.Members(), func(o Member) bool { return o.Life == all[2].Life() && o.Meta.Draining })
	})
	must(t, launch(t, options("alone", 1, "127.0.0.1:0")).SetDraining())
	late.Close()
	if err := late.SetDraining(); !errors.Is(err, ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}
