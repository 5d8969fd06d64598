package publish

import "time"

// budget lets through so many bytes a second, and a burst.
type budget struct {
	rate, burst float64
	spent       float64 // beyond what has flowed in
	at          time.Time
}

// has says whether there is anything left.
func (b *budget) has(now time.Time) bool {
	b.spent = max(0, b.spent-now.Sub(b.at).Seconds()*b.rate)
	b.at = now
	return b.spent < b.burst
}

func (b *budget) spend(bytes int) { b.spent += float64(bytes) }
