package rendezvous

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// errUser: the process at the other end is another user's.
var errUser = errors.New("another user")

// checkUser refuses a connection with a process of another user than ours and
// root.
func checkUser(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) {
		cred, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if failed != nil {
		return fmt.Errorf("read the peer's user: %w", failed)
	}
	return allowed(int(cred.Uid), os.Getuid(), unmappedUser())
}

// allowed is the rule. unmapped is the number that stands for every user that
// this user namespace has no number for, -1 if it has one for all.
func allowed(theirs, ours, unmapped int) error {
	switch {
	case theirs == unmapped:
		return fmt.Errorf("the peer's user has no number in this user namespace; run both nodes in one user namespace: %w", errUser)
	case theirs != ours && theirs != 0:
		return fmt.Errorf("the peer is of user %d, we are user %d; run both nodes as one user: %w", theirs, ours, errUser)
	}
	return nil
}

func unmappedUser() int {
	const all = "0 0 4294967295" // of the first user namespace
	b, err := os.ReadFile("/proc/self/uid_map")
	if err == nil && strings.Join(strings.Fields(string(b)), " ") == all {
		return -1
	}
	overflow, err := os.ReadFile("/proc/sys/kernel/overflowuid")
	if err != nil {
		return 65534
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(overflow)))
	if err != nil {
		return 65534
	}
	return n
}
