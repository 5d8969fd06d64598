package rdma

import "testing"

func TestQPOptionsFitTheDevice(t *testing.T) {
	card := Limits{MaxQPWR: 32768, MaxSGE: 30, MaxSGERead: 30, MaxCQE: 4 << 20}
	for name, tt := range map[string]struct {
		o      QPOptions
		limits Limits
		want   QPOptions
	}{
		"defaults":               {QPOptions{}, card, QPOptions{Depth: 1023, SGE: 1, SignalEvery: 255, Chain: 64, MaxMsg: 1 << 20}},
		"as set":                 {QPOptions{Depth: 1000, SGE: 4, SignalEvery: 8, Chain: 16, MaxMsg: 65536, Events: true}, card, QPOptions{Depth: 1000, SGE: 4, SignalEvery: 8, Chain: 16, MaxMsg: 65536, Events: true}},
		"negative is not set":    {QPOptions{Depth: -1, SGE: -1, SignalEvery: -1, Chain: -1, MaxMsg: -1}, card, QPOptions{Depth: 1023, SGE: 1, SignalEvery: 255, Chain: 64, MaxMsg: 1 << 20}},
		"a full queue reports":   {QPOptions{Depth: 16, SignalEvery: 16, Chain: 16}, card, QPOptions{Depth: 16, SGE: 1, SignalEvery: 4, Chain: 4, MaxMsg: 1 << 20}},
		"a queue of one":         {QPOptions{Depth: 1}, card, QPOptions{Depth: 1, SGE: 1, SignalEvery: 1, Chain: 1, MaxMsg: 1 << 20}},
		"fewer pieces for reads": {QPOptions{SGE: 16}, Limits{MaxQPWR: 1024, MaxSGE: 30, MaxSGERead: 2, MaxCQE: 1024}, QPOptions{Depth: 1022, SGE: 2, SignalEvery: 255, Chain: 64, MaxMsg: 1 << 20}},
		"room for the marker":    {QPOptions{}, Limits{MaxQPWR: 64, MaxSGE: 4, MaxCQE: 1024}, QPOptions{Depth: 63, SGE: 1, SignalEvery: 15, Chain: 15, MaxMsg: 1 << 20}},
		"few completions":        {QPOptions{}, Limits{MaxQPWR: 1024, MaxSGE: 4, MaxCQE: 34}, QPOptions{Depth: 32, SGE: 1, SignalEvery: 8, Chain: 8, MaxMsg: 1 << 20}},
		"a device of nothing":    {QPOptions{}, Limits{}, QPOptions{Depth: 1, SGE: 1, SignalEvery: 1, Chain: 1, MaxMsg: 1 << 20}},
		"more than anybody has":  {QPOptions{Depth: 1 << 30, SGE: 1 << 30, MaxMsg: 1 << 40}, Limits{MaxQPWR: 1 << 30, MaxSGE: 1 << 30, MaxCQE: 1 << 30}, QPOptions{Depth: 1 << 16, SGE: 64, SignalEvery: 256, Chain: 64, MaxMsg: 1 << 30}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tt.o.fit(tt.limits); got != tt.want {
				t.Errorf("got  %+v\nwant %+v", got, tt.want)
			}
		})
	}
}

func TestSliceBytes(t *testing.T) {
	for name, tt := range map[string]struct{ limit, page, want uint64 }{
		"no limit told":          {0, 4096, 1 << 30},
		"any number":             {1<<64 - 1, 4096, 1 << 30},
		"exactly 2 GiB":          {2 << 30, 4096, 1 << 30},
		"less, in huge pages":    {100<<20 + 4097, 4096, 100 << 20},
		"less than a huge page":  {1<<20 + 1, 4096, 1 << 20},
		"large pages":            {100_000, 65536, 65536},
		"less than any page":     {100, 4096, 4096},
		"one byte below a limit": {1<<30 - 1, 4096, 1<<30 - 2<<20},
	} {
		t.Run(name, func(t *testing.T) {
			if got := sliceBytes(tt.limit, tt.page); got != tt.want {
				t.Errorf("%d bytes, want %d", got, tt.want)
			}
		})
	}
}
