// Package kvferrypb is what engines, peers, and operators say to a node: three
// gRPC services, generated from the proto files beside it (make generate).
package kvferrypb
