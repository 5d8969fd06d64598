package double_test

import (
	"bytes"
	"embed"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/internal/double"
)

//go:embed testdata
var testdata embed.FS

// newSource is a small library, which this test is the first to build.
func newSource(t *testing.T) double.Source {
	t.Helper()
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	return source(t)
}

func source(t *testing.T) double.Source {
	t.Helper()
	s := double.Source{Name: "test-double", Soname: "libtest.so.1", Packages: "gcc libc6-dev", Files: map[string]string{
		"control.h": double.Header([]double.Constant{{Name: "ANSWER", Value: 42}}), "exports.map": "{ global: answer; local: *; };",
	}}
	if err := s.Add(testdata, "testdata/library"); err != nil {
		t.Fatal(err)
	}
	return s
}

func build(t *testing.T, s double.Source) string {
	t.Helper()
	path, err := s.Build()
	if errors.Is(err, double.ErrUnavailable) && !strings.Contains(err.Error(), "library.c") {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func TestBuildIsDoneOnceForASource(t *testing.T) {
	s := newSource(t)
	path := build(t, s)
	if filepath.Base(path) != s.Soname {
		t.Errorf("built %s", path)
	}
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	s.Files["comment.h"] = "// nothing includes it"
	again := build(t, s)
	if after, err := os.Stat(again); err != nil || again != path || !os.SameFile(before, after) {
		t.Errorf("built %s and %s, %v", path, again, err)
	}
	s.Files["control.h"] += "#undef ANSWER\n#define ANSWER 43\n"
	if other := build(t, s); other == path {
		t.Error("one library for two sources")
	}
	left, err := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(path)), "build-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// A process of TestManyProcessesBuildAtOnce.
func TestBuildInTheCacheThatThereIs(t *testing.T) { t.Logf("built: %s", build(t, source(t))) }

func TestManyProcessesBuildAtOnce(t *testing.T) {
	build(t, newSource(t))
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	var all sync.WaitGroup
	var paths [4][]byte
	for i := range paths {
		all.Go(func() {
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestBuildInTheCacheThatThereIs$", "-test.v")
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%v\n%s", err, out)
			}
			_, paths[i], _ = bytes.Cut(out, []byte("built: "))
			paths[i], _, _ = bytes.Cut(paths[i], []byte("\n"))
		})
	}
	all.Wait()
	for _, p := range paths {
		if !bytes.Equal(p, paths[0]) || !bytes.HasPrefix(p, []byte(os.Getenv("XDG_CACHE_HOME"))) {
			t.Errorf("built %q and %q", p, paths[0])
		}
	}
}

func TestBuildSaysWhatIsMissing(t *testing.T) {
	s := newSource(t)
	build(t, s)
	s.Files["library.c"] = "#include <no/such.h>\n"
	if _, err := s.Build(); !errors.Is(err, double.ErrUnavailable) || !strings.Contains(err.Error(), "no/such.h") || !strings.Contains(err.Error(), s.Packages) {
		t.Errorf("without a header: %v", err)
	}
	t.Setenv("PATH", t.TempDir())
	t.Setenv("CC", "")
	if _, err := s.Build(); !errors.Is(err, double.ErrUnavailable) || !strings.Contains(err.Error(), "no C compiler") {
		t.Errorf("without a compiler: %v", err)
	}
}

func TestProgramIsOfTheSource(t *testing.T) {
	s := newSource(t)
	build(t, s)
	program, err := s.Program(t.TempDir(), "testdata/main.c", "-O1")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), program).CombinedOutput(); err != nil || string(out) != "42\n" {
		t.Errorf("%q, %v", out, err)
	}
}

//nolint:unused // only the header has them
type inner struct{ destQPN, x uint32 }

//nolint:unused // only the header has them
type outer struct {
	poisonNth uint64
	name      [3][4]uint8
	list      [2]inner
	since     int64
}

func TestHeaderIsOfTheTypes(t *testing.T) {
	got := double.Header([]double.Constant{{Name: "SMALL", Value: 1 << 31}, {Name: "LARGE", Value: 1 << 40}}, reflect.TypeFor[inner](), reflect.TypeFor[outer]())
	for _, want := range []string{
		"#define SMALL 0x80000000\n", "#define LARGE 0x10000000000ull\n",
		"struct shared_inner {\n\tuint32_t dest_qpn;\n\tuint32_t x;\n};\n",
		"\tuint64_t poison_nth;\n\tuint8_t name[3][4];\n\tstruct shared_inner list[2];\n\tint64_t since;\n",
		"_Static_assert(sizeof(struct shared_outer) == 48, \"size\");\n", "_Static_assert(offsetof(struct shared_outer, list) == 20, \"list\");\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	defer func() {
		if recover() == nil {
			t.Error("a pointer was taken")
		}
	}()
	double.Header(nil, reflect.TypeFor[struct{ p *int }]())
}

func TestControlIsOneForAll(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	a, err := double.Share[outer](f)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Locked(func(o *outer) error { o.since = 7; return nil }); err != nil {
		t.Error(err)
	}
	if b, err := os.ReadFile(a.Path()); err != nil || len(b) != 48 || b[40] != 7 {
		t.Errorf("%x, %v", b, err)
	}
	failed := errors.New("no")
	if err := a.Locked(func(*outer) error { return failed }); !errors.Is(err, failed) {
		t.Error(err)
	}
	for range 2 {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := a.Locked(func(*outer) error { return nil }); err == nil {
		t.Error("a closed control was read")
	}
}

// A process is alive by its start too: its number is given to others.
func TestAlive(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		t.Fatal(err)
	}
	start, err := strconv.ParseUint(strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')'):]))[20], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	if !double.Alive(uint32(pid), start) || double.Alive(uint32(pid), start+1) || double.Alive(0, start) || double.Alive(uint32(pid), 0) {
		t.Error("of a process that runs")
	}
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if double.Alive(uint32(pid), start) {
		t.Error("a process that has ended is alive")
	}
}
