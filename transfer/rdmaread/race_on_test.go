//go:build race

package rdmaread

const race = true // what this binary takes is of no account
