// Package ptx holds the kernels, as text that the driver compiles.
package ptx

import _ "embed"

// CopyList copies pieces within the memory of a device: see the file.
//
//go:embed kv_copy_list.ptx
var CopyList string

// Name is that of its entry.
const Name = "kv_copy_list"
