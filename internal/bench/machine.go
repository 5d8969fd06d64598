package bench

import (
	"os"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Machine is where the report was made.
type Machine struct {
	CPU       string `json:"cpu"`
	Cores     int    `json:"cores"`
	MemoryGiB int    `json:"memory_gib"`
	Kernel    string `json:"kernel"`
	OS        string `json:"os"`
	Arch      string `json:"arch"`
	Go        string `json:"go"`
	TCP       string `json:"tcp_congestion"` // default congestion control
	Date      string `json:"date"`           // day, UTC
}

func thisMachine() Machine {
	m := Machine{
		CPU: cpuModel(), Cores: runtime.NumCPU(), OS: "unknown", Arch: runtime.GOARCH, Go: runtime.Version(),
		TCP: firstLine("/proc/sys/net/ipv4/tcp_congestion_control"), Date: time.Now().UTC().Format(time.DateOnly),
		Kernel: firstLine("/proc/sys/kernel/osrelease"),
	}
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err == nil {
		m.MemoryGiB = int((info.Totalram*uint64(info.Unit) + 1<<29) >> 30)
	}
	for line := range strings.Lines(contentOf("/etc/os-release")) {
		if name, ok := strings.CutPrefix(line, "PRETTY_NAME="); ok {
			m.OS = strings.Trim(strings.TrimSpace(name), `"`)
		}
	}
	return m
}

func cpuModel() string {
	for line := range strings.Lines(contentOf("/proc/cpuinfo")) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}

func firstLine(path string) string {
	line, _, _ := strings.Cut(contentOf(path), "\n")
	if line == "" {
		return "unknown"
	}
	return line
}

// contentOf is "" if the file cannot be read.
func contentOf(path string) string {
	b, _ := os.ReadFile(path)
	return string(b)
}
