package config

import (
	"encoding"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// maxList bounds the elements of any list.
const maxList = 64

// secret is the key whose text no error shows.
const secret = "cluster.keyring"

// Keys lists every key that can be set, such as "arena.pages", in the order of
// the file.
func Keys() []string {
	var keys []string
	walk(reflect.TypeFor[Config](), "", func(key string) { keys = append(keys, key) })
	return keys
}

// walk calls visit for every leaf under a group.
func walk(group reflect.Type, prefix string, visit func(key string)) {
	for f := range group.Fields() {
		name := f.Tag.Get("yaml")
		switch {
		case name == "":
		case isGroup(f.Type):
			walk(f.Type, prefix+name+".", visit)
		default:
			visit(prefix + name)
		}
	}
}

// isGroup tells a struct of keys from a value that happens to be a struct.
func isGroup(t reflect.Type) bool {
	return t.Kind() == reflect.Struct && !reflect.PointerTo(t).Implements(reflect.TypeFor[encoding.TextUnmarshaler]())
}

// field returns the member of a group that the name stands for.
func field(group reflect.Value, name string) (reflect.Value, bool) {
	for f, v := range group.Fields() {
		if name != "" && f.Tag.Get("yaml") == name {
			return v, true
		}
	}
	return reflect.Value{}, false
}

// members lists the names in a group, for errors.
func members(group reflect.Type) string {
	var names []string
	for f := range group.Fields() {
		if name := f.Tag.Get("yaml"); name != "" {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// Set gives a key a value, as --set does. Elements of a list are separated by
// commas; "" is the empty list.
func (c *Config) Set(key, value string) error { return c.SetBy("--set", key, value) }

// SetBy is Set by a flag of another name, which errors show.
func (c *Config) SetBy(flag, key, value string) error {
	return c.set(key, value, origin{where: flag + " " + key})
}

func (c *Config) set(key, value string, o origin) error {
	group := reflect.ValueOf(c).Elem()
	path := strings.Split(key, ".")
	for i, name := range path {
		v, ok := field(group, name)
		last := i == len(path)-1
		switch {
		case !ok:
			return &Error{Where: o.where, Problem: unknown(strings.Join(path[:i], "."), name, group.Type())}
		case isGroup(v.Type()) && last:
			return &Error{Where: o.where, Problem: fmt.Sprintf("%s is a group; set one of its keys: %s", key, members(v.Type()))}
		case isGroup(v.Type()):
			group = v
			continue
		case !last:
			return &Error{Where: o.where, Problem: fmt.Sprintf("%s has no keys below it", strings.Join(path[:i+1], "."))}
		}
		c.setOrigin(key, o)
		err := c.setValue(key, v, value)
		c.setBroken(key, err != nil)
		return err
	}
	return nil
}

func (c *Config) setValue(key string, v reflect.Value, value string) error {
	if v.Kind() == reflect.Slice {
		return c.setList(key, v, value)
	}
	if err := setText(v, value); err != nil {
		return c.fault(key, "%s", problem(key, value, err))
	}
	return nil
}

func (c *Config) setList(key string, v reflect.Value, value string) error {
	var parts []string
	if value != "" {
		parts = strings.Split(value, ",")
	}
	if len(parts) > maxList {
		return c.fault(key, "has %d elements, want at most %d", len(parts), maxList)
	}
	list := reflect.MakeSlice(v.Type(), len(parts), len(parts))
	for i, part := range parts {
		part = strings.TrimSpace(part)
		if err := setText(list.Index(i), part); err != nil {
			return c.fault(key, "%s", problem(key, part, err))
		}
	}
	v.Set(list)
	return nil
}

// SetEnviron applies the variables KVFERRY_GROUP_KEY among environ, each
// "name=value". One that starts like a key and is none is an error; others
// that start with KVFERRY_ are not for this package. Every one that is wrong is
// reported, and all others apply.
func (c *Config) SetEnviron(environ []string) error {
	var errs []error
	keys := make(map[string]string)
	for _, key := range Keys() {
		keys[variable(key)] = key
	}
	for _, entry := range environ {
		name, value, _ := strings.Cut(entry, "=")
		if key, ok := keys[name]; ok {
			errs = append(errs, c.set(key, value, origin{where: name}))
			continue
		}
		for f := range reflect.TypeFor[Config]().Fields() {
			group := f.Tag.Get("yaml")
			if group == "" || !strings.HasPrefix(name, variable(group)+"_") {
				continue
			}
			known := slices.DeleteFunc(slices.Sorted(maps.Keys(keys)), func(k string) bool { return !strings.HasPrefix(k, variable(group)+"_") })
			errs = append(errs, &Error{Where: name, Problem: "unknown variable; known are " + strings.Join(known, ", ")})
			break
		}
	}
	return errors.Join(errs...)
}

// variable is the environment's name of a key.
func variable(key string) string {
	return "KVFERRY_" + strings.ToUpper(strings.ReplaceAll(key, ".", "_"))
}

// setText stores a value that is not a list.
func setText(v reflect.Value, text string) error {
	switch p := v.Addr().Interface().(type) {
	case encoding.TextUnmarshaler:
		return p.UnmarshalText([]byte(text))
	case *string:
		switch {
		case strings.Contains(text, "-----BEGIN"):
			return errPEM
		case !utf8.ValidString(text), strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }):
			return errors.New("has what cannot be printed")
		}
		*p = text
	case *int:
		n, err := strconv.Atoi(text)
		if err != nil || text[0] == '+' {
			return errors.New("is not a whole number")
		}
		*p = n
	case *time.Duration:
		d, err := time.ParseDuration(text)
		if err != nil {
			return errors.New("is not a duration; want a number and a unit, such as 30s, 500ms, or 5m")
		}
		*p = d
	default:
		panic("config: no text for a " + v.Type().String())
	}
	return nil
}

// errPEM stands for a text that may be a private key.
var errPEM = errors.New("is PEM itself; want the path of a file that holds it")

// problem says what is wrong with the text of a value.
func problem(key, text string, err error) string {
	if key == secret || errors.Is(err, errPEM) {
		return err.Error()
	}
	switch key {
	case "node.bind", "node.advertise", "telemetry.bind":
		return fmt.Sprintf("%.80q is not an IP address, such as 192.0.2.7 or fd00::7", text)
	}
	return fmt.Sprintf("%.80q %v", text, err)
}

// unknown says that a group has no such member.
func unknown(group, name string, t reflect.Type) string {
	if group == "" {
		return fmt.Sprintf("unknown key %.80q; the groups are %s", name, members(t))
	}
	return fmt.Sprintf("unknown key %.80q in %s; known are %s", name, group, members(t))
}
