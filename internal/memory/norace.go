//go:build !race

package memory

// race: see race.go.
const race = false
