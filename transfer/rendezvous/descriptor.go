package rendezvous

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/kvferry/kvferry/transfer"
)

// bootID names the host and its start. It is the same in every container.
func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("which host this is: %w: %w", transfer.ErrUnavailable, err)
	}
	host := strings.TrimSpace(string(b))
	if !isHost(host) {
		return "", fmt.Errorf("boot id %.80q is none: %w", host, transfer.ErrUnavailable)
	}
	return host, nil
}

// isHost reports whether s has the form of a boot id.
func isHost(s string) bool {
	return len(s) == 36 && strings.Trim(s, "0123456789abcdef-") == ""
}

// descriptor is what peers get. It is text: the protocol version, the boot id of
// the host, and the name of the socket, with a space between each.
type descriptor struct {
	host, socket string
}

func (d descriptor) encode(p Protocol) []byte {
	return fmt.Appendf(nil, "%d %s %s", p.Version, d.host, d.socket)
}

// parseDescriptor checks what a peer said. The socket's name is one of the
// protocol in form, and so a file of the directory and nothing else.
func parseDescriptor(p Protocol, b []byte) (descriptor, error) {
	if len(b) == 0 {
		return descriptor{}, fmt.Errorf("the peer has no %s: %w", p.Name, transfer.ErrUnavailable)
	}
	ours := strconv.Itoa(int(p.Version))
	v, rest, _ := strings.Cut(string(b), " ")
	if v != ours && isVersion(v) {
		return descriptor{}, fmt.Errorf("the peer speaks protocol version %s, we speak %s: %w", v, ours, transfer.ErrUnavailable)
	}
	host, socket, _ := strings.Cut(rest, " ")
	if v != ours || !isHost(host) || !isSocketName(socket, p.Name, servedMark) {
		return descriptor{}, fmt.Errorf("descriptor %.80q is malformed", b)
	}
	return descriptor{host: host, socket: socket}, nil
}

func isVersion(s string) bool {
	return s != "" && len(s) < 4 && strings.Trim(s, "0123456789") == ""
}
