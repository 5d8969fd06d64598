// Package kvferrypb is what engines, peers, and operators say to a node: three
// gRPC services, generated from the proto files beside it (make generate).
package kvferrypb

const (
	// MaxMessage is the longest message in bytes that a node takes or sends.
	MaxMessage = 16 << 20
	// MaxReaders is how many nodes one publication can wait for.
	MaxReaders = 256
	// SessionKey is the metadata key that carries an engine's session.
	SessionKey = "kvferry-session"
)
