package cluster

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/hashicorp/memberlist"

	"github.com/kvferry/kvferry/internal/id"
)

func sources(t *testing.T) (*token.FileSet, []*ast.File) {
	t.Helper()
	paths, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	fset := token.NewFileSet()
	var files []*ast.File
	for _, p := range paths {
		if strings.HasSuffix(p, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, p, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	return fset, files
}

// A callback that calls memberlist deadlocks the node, since some of them run
// under its locks. Neither they nor what they call in this package may name one
// of its methods, wait, or start anything.
func TestCallbacksNeverCallMemberlist(t *testing.T) {
	fset, files := sources(t)
	functions := map[string][]*ast.FuncDecl{}
	for _, f := range files {
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Body != nil {
				functions[fn.Name.Name] = append(functions[fn.Name.Name], fn)
			}
		}
	}
	forbidden := map[string]bool{"Sleep": true, "Wait": true, "NewTimer": true, "NewTicker": true, "After": true}
	list := reflect.TypeFor[*memberlist.Memberlist]()
	for m := range list.Methods() {
		forbidden[m.Name] = true
	}
	delete(forbidden, "Join") // also of package strings, which is harmless; the walk below would find a handle

	var next []string
	for _, of := range []reflect.Type{
		reflect.TypeFor[memberlist.Delegate](), reflect.TypeFor[memberlist.EventDelegate](),
		reflect.TypeFor[memberlist.AliveDelegate](), reflect.TypeFor[memberlist.ConflictDelegate](),
	} {
		for m := range of.Methods() {
			if functions[m.Name] == nil {
				t.Errorf("callback %s is not in the sources", m.Name)
			}
			next = append(next, m.Name)
		}
	}
	seen := map[string]bool{}
	for len(next) > 0 {
		name := next[0]
		next = next[1:]
		if seen[name] {
			continue
		}
		seen[name] = true
		for _, fn := range functions[name] {
			ast.Inspect(fn.Body, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.GoStmt:
					t.Errorf("%s: %s, which callbacks reach, starts a goroutine", fset.Position(n.Pos()), name)
				case *ast.CallExpr:
					called := ""
					switch f := n.Fun.(type) {
					case *ast.SelectorExpr:
						called = f.Sel.Name
					case *ast.Ident:
						called = f.Name
					}
					if forbidden[called] {
						t.Errorf("%s: %s, which callbacks reach, calls %s", fset.Position(n.Pos()), name, called)
					}
					if functions[called] != nil {
						next = append(next, called)
					}
				}
				return true
			})
		}
	}
	for _, must := range []string{"admit", "heard", "died", "put", "take", "touch"} {
		if !seen[must] {
			t.Errorf("%s is not reached from the callbacks: the walk is broken", must)
		}
	}
}

// Nor do they hold anything through which they could call it.
func TestCallbacksHoldNoMemberlist(t *testing.T) {
	bad := map[reflect.Type]bool{reflect.TypeFor[memberlist.Memberlist](): true, reflect.TypeFor[Cluster](): true, reflect.TypeFor[transport](): true}
	harmless := reflect.TypeFor[func(id.Node) id.NodeHash]()
	seen := map[reflect.Type]bool{}
	var walk func(path string, of reflect.Type)
	walk = func(path string, of reflect.Type) {
		if seen[of] || of == harmless || strings.HasPrefix(of.PkgPath(), "sync") || of.PkgPath() == "time" || of.PkgPath() == "net/netip" {
			return
		}
		seen[of] = true
		switch of.Kind() {
		case reflect.Struct:
			if bad[of] {
				t.Errorf("%s is a %s", path, of)
				return
			}
			for f := range of.Fields() {
				walk(path+"."+f.Name, f.Type)
			}
		case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Chan:
			walk(path, of.Elem())
		case reflect.Map:
			walk(path, of.Key())
			walk(path, of.Elem())
		case reflect.Func, reflect.Interface:
			t.Errorf("%s is a %s, which may hide anything", path, of)
		default: // a plain value
		}
	}
	walk("callbacks", reflect.TypeFor[callbacks]())
	if !seen[reflect.TypeFor[roster]()] || !seen[reflect.TypeFor[ring]()] {
		t.Error("the walk is broken")
	}
}

func TestStockQueueIsNotUsed(t *testing.T) {
	fset, files := sources(t)
	for _, f := range files {
		ast.Inspect(f, func(n ast.Node) bool {
			if id, ok := n.(*ast.Ident); ok && (id.Name == "TransmitLimitedQueue" || id.Name == "QueueBroadcast") {
				t.Errorf("%s: memberlist's queue loses messages", fset.Position(id.Pos()))
			}
			return true
		})
	}
}

func TestInboxIsBounded(t *testing.T) {
	c := newCallbacks(id.Life{Node: "a", Incarnation: 1}, Meta{}, localhost, &counters{})
	b := encodeItems([][]byte{[]byte("item")})
	for range inboxMessages + 5 {
		c.NotifyMsg(b)
	}
	for range inboxCalls + 3 { // too many items are no reason to drop them
		c.NotifyMsg([]byte{messageVersion, kindBye})
	}
	for range inboxStates + 2 {
		c.MergeRemoteState(b, false)
	}
	c.NotifyMsg(make([]byte, maxMessage+1))
	c.MergeRemoteState(make([]byte, MaxState+1), false)
	b[0] = 'X' // not ours after the call
	states, messages := c.inbox.take()
	calls := c.inbox.takeCalls()
	if len(states) != inboxStates || len(calls) != inboxCalls || len(messages) != inboxMessages {
		t.Errorf("%d states, %d calls, and %d messages", len(states), len(calls), len(messages))
	}
	if messages[0][0] != messageVersion {
		t.Error("the message was not copied")
	}
	if d, bad := c.count.queueDrops.Load(), c.count.badMessages.Load(); d != 10 || bad != 2 {
		t.Errorf("%d drops and %d bad ones were counted, want 10 and 2", d, bad)
	}
	c.close()
	c.NotifyMsg(b)
	c.NotifyJoin(listed(id.Life{Node: "b", Incarnation: 1}))
	if _, messages := c.inbox.take(); messages != nil || c.roster.alive() != nil {
		t.Error("something was taken after the end")
	}
}

func TestBridge(t *testing.T) {
	var out bytes.Buffer
	c := newCallbacks(id.Life{Node: "self", Incarnation: 1000000}, Meta{}, localhost, &counters{})
	other := listed(id.Life{Node: "other.node", Incarnation: 2000000})
	c.NotifyAlive(other)
	b := &bridge{log: slog.New(slog.NewTextHandler(&out, nil)), roster: &c.roster, count: c.count}
	write := func(line string) string {
		out.Reset()
		b.Write([]byte(line + "\n"))
		return out.String()
	}
	for line, want := range map[string]string{
		"[ERR] memberlist: Failed to send gossip to 127.0.0.1:7: x":             `level=WARN msg=memberlist text="Failed to send gossip to 127.0.0.1:7: x"`,
		"[WARN] memberlist: Refuting a dead message (from: " + other.Name + ")": `level=INFO msg=memberlist text="Refuting a dead message (from: other.node)"`,
		"[WARN] ignoring '" + other.Name + "', not " + c.roster.selfName + ":":  `level=INFO msg=memberlist text="ignoring 'other.node', not self:"`,
	} {
		if got := write(line); !strings.Contains(got, want) {
			t.Errorf("%s\nis written as %s\nwant %s", line, got, want)
		}
	}
	if got := write("[DEBUG] memberlist: chatter"); got != "" {
		t.Errorf("debug line: %s", got)
	}
	write("[WARN] memberlist: handler queue full, dropping message (8)")
	if c.count.queueDrops.Load() != 1 {
		t.Error("a dropped message was not counted")
	}
	for _, line := range []string{
		"[ERR] memberlist: Decrypt packet failed: no installed keys", `[ERR] memberlist: discarding stream with unacceptable label "x": from=1`,
		"[ERR] memberlist: failed to receive: encryption is configured but remote state is not encrypted", "[DEBUG] memberlist: chatter",
	} {
		write(line)
	}
	if got := c.count.badMessages.Load(); got != 3 {
		t.Errorf("%d refusals were counted, want 3", got)
	}
	shown := 0
	for range 1000 {
		if write("[ERR] memberlist: Decrypt packet failed") != "" {
			shown++
		}
	}
	if shown > 2*bridgeLines {
		t.Errorf("%d lines were shown", shown)
	}
	b.closed.Store(true)
	if got := write("[ERR] late"); got != "" {
		t.Errorf("after the end: %s", got)
	}
}
