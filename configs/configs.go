// Package configs holds the configurations that are shipped: prefill.yaml and
// decode.yaml to start from, and local.yaml, the pattern of a local cluster.
package configs

import _ "embed" // the only way to carry a file

//go:embed local.yaml
var local string

// Local is local.yaml.
func Local() []byte { return []byte(local) }
