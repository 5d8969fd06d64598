package config

import (
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// maxDocument bounds a document, in bytes, and maxNesting its levels: the parser
// recurses once a level, and takes more than linear time. maxFaults bounds what
// is said about one.
const (
	maxDocument = 64 << 10
	maxNesting  = 16
	maxFaults   = 100 // that are reported: more make nobody wiser
)

// Parse reads a document over the defaults. name is its file name, for errors:
// one [*Error] for each key that is wrong, joined. The result is not validated.
func Parse(name string, b []byte) (*Config, error) {
	c, err := parse(name, b)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// parse is Parse that also returns what it could read of a document some keys
// of which are wrong; nil of one that is none.
func parse(name string, b []byte) (*Config, error) {
	d := document{name: name, config: Default()}
	if len(b) > maxDocument {
		return nil, &Error{Where: name, Problem: fmt.Sprintf("is longer than %d bytes; that is no configuration", maxDocument)}
	}
	if !utf8.Valid(b) {
		return nil, &Error{Where: name, Problem: "is not UTF-8 text"}
	}
	d.lines = strings.Split(string(b), "\n")
	tokens := lexer.Tokenize(string(b))
	if t := tooDeep(tokens); t != nil {
		o := d.origin("", t)
		return nil, &Error{Where: o.where, Excerpt: o.excerpt, Problem: fmt.Sprintf("is nested more than %d levels deep", maxNesting)}
	}
	file, err := parser.Parse(tokens, 0)
	if err != nil {
		return nil, d.syntax(err)
	}
	seen := false
	for _, doc := range file.Docs {
		if doc.Body == nil {
			continue
		}
		if seen {
			return nil, d.fault("", doc.Body, "a second document; a file holds one configuration")
		}
		seen = true
		if !d.group(reflect.ValueOf(d.config).Elem(), "", doc.Body) {
			return nil, errors.Join(d.errs...)
		}
	}
	return d.config, errors.Join(d.errs...)
}

// keyLike matches the base64 of a [Key].
var keyLike = regexp.MustCompile(`[A-Za-z0-9+/]{40,}=*`)

// tooDeep returns the token that opens one level too many: of brackets, or of
// lists that begin on one line. Other nesting takes a line and more indentation
// a level, so maxDocument bounds it.
func tooDeep(tokens token.Tokens) *token.Token {
	brackets, dashes, line := 0, 0, 0
	for _, t := range tokens {
		switch t.Type {
		case token.MappingStartType, token.SequenceStartType:
			brackets++
		case token.MappingEndType, token.SequenceEndType:
			brackets--
		case token.SequenceEntryType, token.MappingKeyType:
			if t.Position.Line != line {
				dashes, line = 0, t.Position.Line
			}
			dashes++
		default:
		}
		if brackets > maxNesting || dashes > maxNesting {
			return t
		}
	}
	return nil
}

// document is a file on its way into a configuration.
type document struct {
	name   string
	lines  []string
	config *Config
	errs   []error // of keys
}

// wrong notes an error; the other keys are read all the same.
func (d *document) wrong(key string, err error) {
	if len(d.errs) < maxFaults {
		d.errs = append(d.errs, err)
	}
	if key != "" {
		d.config.setBroken(key, true)
	}
}

// group stores the keys of a mapping in a struct, and reports whether it is one.
func (d *document) group(group reflect.Value, path string, n ast.Node) bool {
	if n.Type() == ast.NullType {
		return true // all of its keys are commented out
	}
	m, ok := n.(ast.MapNode)
	if !ok {
		d.wrong(path, d.fault(path, n, "is %s, want keys: %s", kind(n), members(group.Type())))
		return false
	}
	for it := m.MapRange(); it.Next(); {
		// The parser refuses a key that stands twice.
		key, ok := it.Key().(*ast.StringNode)
		if !ok {
			d.wrong("", d.fault(path, it.Key(), "has a key that is %s, want a name", kind(it.Key())))
			continue
		}
		v, ok := field(group, key.Value)
		if !ok {
			d.wrong("", d.fault("", key, "%s", unknown(path, key.Value, group.Type())))
			continue
		}
		full := key.Value
		if path != "" {
			full = path + "." + key.Value
		}
		if isGroup(v.Type()) {
			d.group(v, full, it.Value())
			continue
		}
		read := d.scalar
		if v.Kind() == reflect.Slice {
			read = d.list
		}
		if err := read(v, full, it.Value()); err != nil {
			d.wrong(full, err)
			continue
		}
		d.config.setOrigin(full, d.origin(full, it.Value().GetToken()))
	}
	return true
}

func (d *document) list(v reflect.Value, key string, n ast.Node) error {
	s, ok := n.(*ast.SequenceNode)
	if !ok {
		return d.fault(key, n, "is %s, want a list, such as [a, b]", kind(n))
	}
	if len(s.Values) > maxList {
		return d.fault(key, n, "has %d elements, want at most %d", len(s.Values), maxList)
	}
	list := reflect.MakeSlice(v.Type(), len(s.Values), len(s.Values))
	for i, e := range s.Values {
		if err := d.scalar(list.Index(i), key, e); err != nil {
			return err
		}
	}
	v.Set(list)
	return nil
}

func (d *document) scalar(v reflect.Value, key string, n ast.Node) error {
	switch n.(type) {
	case *ast.StringNode, *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
	case *ast.NullNode:
		return d.fault(key, n, "has no value; remove the line for the default")
	default:
		return d.fault(key, n, "is %s, want one plain value; put quotes around one that holds a colon", kind(n))
	}
	text := n.GetToken().Value
	if err := setText(v, text); err != nil {
		return d.fault(key, n, "%s", problem(key, text, err))
	}
	return nil
}

// kind names what a node is.
func kind(n ast.Node) string {
	switch n.Type() {
	case ast.MappingType, ast.MappingValueType:
		return "a group of keys"
	case ast.SequenceType:
		return "a list"
	case ast.NullType:
		return "empty"
	case ast.LiteralType:
		return "a block of text"
	case ast.AnchorType, ast.AliasType, ast.MergeKeyType:
		return "an anchor or alias, which is not supported"
	case ast.TagType, ast.DirectiveType:
		return "a tag or directive, which is not supported"
	default:
		return "a plain value"
	}
}

// fault is an error at a node.
func (d *document) fault(key string, n ast.Node, format string, args ...any) *Error {
	o := d.origin(key, n.GetToken())
	return &Error{Key: key, Where: o.where, Excerpt: o.excerpt, Problem: fmt.Sprintf(format, args...)}
}

// syntax is what the parser says, in our form.
func (d *document) syntax(err error) *Error {
	e := &Error{Where: d.name, Problem: err.Error()}
	if at, ok := errors.AsType[yaml.Error](err); ok {
		o := d.origin("", at.GetToken())
		e.Where, e.Excerpt, e.Problem = o.where, o.excerpt, at.GetMessage()
	}
	return e
}

// origin is the place of a token.
func (d *document) origin(key string, t *token.Token) origin {
	if t == nil || t.Position == nil {
		return origin{where: d.name}
	}
	line, column := t.Position.Line, t.Position.Column
	o := origin{where: fmt.Sprintf("%s:%d:%d", d.name, line, column)}
	if key != secret && line >= 1 && line <= len(d.lines) {
		o.excerpt = excerpt(line, column, d.lines[line-1])
	}
	return o
}

// excerpt shows a line, or 100 characters of a longer one, with a mark below
// the column. What could be a key of the keyring is blotted out.
func excerpt(line, column int, text string) string {
	const width = 100
	text = keyLike.ReplaceAllStringFunc(text, func(s string) string { return strings.Repeat("*", len(s)) })
	runes := []rune(strings.TrimRight(text, "\r"))
	for i, r := range runes {
		if !unicode.IsPrint(r) {
			runes[i] = ' '
		}
	}
	column = min(max(column, 1), len(runes)+1)
	if first := max(0, column-1-width/2); len(runes) > width {
		runes = runes[first:min(first+width, len(runes))]
		column -= first
	}
	number := fmt.Sprintf("%5d", line)
	return fmt.Sprintf("%s | %s\n%s | %s^", number, strings.TrimRight(string(runes), " "), strings.Repeat(" ", len(number)), strings.Repeat(" ", column-1))
}
