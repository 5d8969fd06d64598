package page

import "fmt"

// Shard returns the heads of one rank of an engine of world ranks, given those
// of the model (M*'s KVConfig.shard): query heads are divided, and so are KV
// heads until a rank has one; beyond that as many ranks share each. What does
// not divide is an error, which wraps [ErrInvalid].
func Shard(kv, qo, world int) (kvHeads, qoHeads int, err error) {
	switch {
	case kv < 1 || qo < 1 || world < 1:
		return 0, 0, fmt.Errorf("%d KV heads and %d query heads over %d ranks: %w", kv, qo, world, ErrInvalid)
	case qo%world != 0:
		return 0, 0, fmt.Errorf("%d query heads (as many as KV heads unless said otherwise) do not divide by %d ranks: %w", qo, world, ErrInvalid)
	case qo%kv != 0:
		return 0, 0, fmt.Errorf("%d query heads do not divide by %d KV heads: %w", qo, kv, ErrInvalid)
	case kv%world != 0 && world%kv != 0:
		return 0, 0, fmt.Errorf("%d KV heads and %d ranks: neither divides by the other: %w", kv, world, ErrInvalid)
	}
	return max(1, kv/world), qo / world, nil
}
