package double

import (
	"fmt"
	"reflect"
	"strings"
	"unicode"
)

// Constant is a number that both sides use by name.
type Constant struct {
	Name  string // in C
	Value uint64
}

// Header is the header of constants and structs, in C. A struct stands behind those
// that it consists of. Its fields are numbers, structs, and arrays of these, whose
// places in memory the compiler checks; a name such as poisonNth is poison_nth in C,
// and a struct's has "shared_" in front. A field of another type panics.
func Header(constants []Constant, structs ...reflect.Type) string {
	var b strings.Builder
	b.WriteString("#include <stddef.h>\n#include <stdint.h>\n")
	for _, c := range constants {
		suffix := ""
		if c.Value > 1<<31 {
			suffix = "ull"
		}
		fmt.Fprintf(&b, "#define %s %#x%s\n", c.Name, c.Value, suffix)
	}
	for _, t := range structs {
		name := "struct shared_" + snake(t.Name())
		fmt.Fprintf(&b, "%s {\n", name)
		for f := range t.Fields() {
			fmt.Fprintf(&b, "\t%s;\n", declare(f.Type, snake(f.Name)))
		}
		b.WriteString("};\n")
		fmt.Fprintf(&b, "_Static_assert(sizeof(%s) == %d, \"size\");\n", name, t.Size())
		for f := range t.Fields() {
			fmt.Fprintf(&b, "_Static_assert(offsetof(%s, %s) == %d, \"%s\");\n", name, snake(f.Name), f.Offset, f.Name)
		}
	}
	return b.String()
}

func declare(t reflect.Type, name string) string {
	switch t.Kind() {
	case reflect.Array:
		return declare(t.Elem(), fmt.Sprintf("%s[%d]", name, t.Len()))
	case reflect.Struct:
		return "struct shared_" + snake(t.Name()) + " " + name
	case reflect.Uint8, reflect.Uint32, reflect.Uint64, reflect.Int64:
		return t.String() + "_t " + name
	default:
		panic("double: no such type in C: " + t.String())
	}
}

// snake turns destQPN into dest_qpn.
func snake(s string) string {
	var b strings.Builder
	lower := false
	for _, r := range s {
		if unicode.IsUpper(r) && lower {
			b.WriteByte('_')
		}
		lower = !unicode.IsUpper(r)
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}
