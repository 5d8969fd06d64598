//go:build linux && cgo && cuda && (amd64 || arm64)

package cudatest

const builtIn = true
