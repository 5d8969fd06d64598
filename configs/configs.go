// Package configs holds the configurations that are shipped: node.yaml, to
// start from; prefill.yaml and decode.yaml, two nodes on one machine; and
// local.yaml, the pattern of a local cluster.
package configs

import (
	_ "embed" // the only way to carry a file
	"strings"
)

var (
	//go:embed local.yaml
	local string
	//go:embed node.yaml
	node string
)

// Local is local.yaml.
func Local() []byte { return []byte(local) }

// Node is node.yaml for a node of that role: prefill, decode, or both.
func Node(role string) []byte {
	return []byte(strings.Replace(node, "role: both", "role: "+role, 1))
}
