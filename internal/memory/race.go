//go:build race

package memory

// race says that the race detector runs. It does not see what assembly reads
// and writes, so [Stream] then leaves all to copy, which tells it.
const race = true
