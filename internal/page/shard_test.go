package page

import (
	"errors"
	"fmt"
	"testing"
)

// TestSpec has the numbered case of M*'s behaviour that is about heads.
func TestSpec(t *testing.T) {
	t.Run("091 heads of a rank", func(t *testing.T) {
		for _, c := range []struct {
			kv, qo, world int
			want          string
		}{
			{8, 32, 4, "2/8"},
			{8, 32, 4, "2/8"},
			{8, 32, 8, "1/4"},
			{8, 32, 16, "1/2"},
			{8, 32, 1, "8/32"},
			{4, 32, 8, "1/4"},
			{8, 32, 3, ""},
			{6, 32, 4, ""},
			{8, 12, 4, ""},
			{16, 8, 4, ""},
			{2, 30, 3, ""},
			{6, 36, 4, ""},
			{8, 32, 64, ""},
			{0, 32, 4, ""},
			{8, 0, 4, ""},
			{8, 32, 0, ""},
			{8, 32, -1, ""},
		} {
			kv, qo, err := Shard(c.kv, c.qo, c.world)
			if got := fmt.Sprintf("%d/%d", kv, qo); c.want != "" && (err != nil || got != c.want) {
				t.Errorf("%+v: %s, %v", c, got, err)
			}
			if c.want == "" && !errors.Is(err, ErrInvalid) {
				t.Errorf("%+v: %v", c, err)
			}
		}
	})
}
