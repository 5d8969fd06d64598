package driver

import _ "embed"

// Header is our cuda.h: what is called, and what the driver's double is built
// against.
//
//go:embed include/cuda.h
var Header string
