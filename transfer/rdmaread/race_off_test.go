//go:build !race

package rdmaread

const race = false
