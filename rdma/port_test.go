package rdma

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
)

func TestPortRate(t *testing.T) {
	for _, tt := range []struct {
		width, speed uint8
		want         uint64
	}{
		{1, 1, 2_500_000_000},
		{2, 4, 40_000_000_000},
		{2, 8, 40_000_000_000},
		{2, 16, 56_000_000_000},
		{1, 32, 25_000_000_000},
		{2, 32, 100_000_000_000},
		{2, 64, 200_000_000_000},
		{16, 64, 100_000_000_000},
		{2, 128, 400_000_000_000},
		{4, 128, 800_000_000_000},
		{8, 4, 120_000_000_000},
		{0, 32, 0},
		{2, 3, 0},
	} {
		if got := portRate(tt.width, tt.speed); got != tt.want {
			t.Errorf("width %d, speed %d: %d bits/s, want %d", tt.width, tt.speed, got, tt.want)
		}
	}
}

func TestMTUBytes(t *testing.T) {
	for m, want := range map[MTU]int{0: 0, 1: 256, 3: 1024, 5: 4096, 6: 0, 255: 0} {
		if got := m.Bytes(); got != want {
			t.Errorf("MTU %d is %d bytes, want %d", m, got, want)
		}
	}
}

func TestWords(t *testing.T) {
	for got, want := range map[string]string{
		portState(4):               "ACTIVE",
		portState(1):               "DOWN",
		portState(77):              "state 77",
		StateErr.String():          "ERR",
		QPState(-1).String():       "state -1",
		LinkEthernet.String():      "Ethernet",
		StatusRetryExcErr.String(): "transport retries exceeded",
		Status(23).String():        "tag matching rendezvous incomplete",
		Status(99).String():        "status 99",
		(&OpError{Verb: "register 4096 bytes of memory", Device: "mlx5_0", Err: syscall.ENOMEM, Hint: "buy more"}).Error(): "register 4096 bytes of memory on mlx5_0: cannot allocate memory (buy more)",
	} {
		if got != want {
			t.Errorf("text %q, want %q", got, want)
		}
	}
}

// An error of a completion says which op, what happened, and, for all that a
// reader can meet, what to look at.
func TestCompletionErrorSaysWhatToLookAt(t *testing.T) {
	for _, s := range []Status{1, 2, 4, 5, 7, 8, 9, 10, 11, 12, 13, 19, 21} {
		text := (&CompletionError{Status: s, Vendor: 0x81, Op: 40, Device: "mlx5_0"}).Error()
		begin := fmt.Sprintf("read op 40 on mlx5_0: %s (status %d, vendor code 0x81): ", s, s)
		if rest, ok := strings.CutPrefix(text, begin); !ok || len(rest) < 20 {
			t.Errorf("text %q", text)
		}
	}
}
