package tcp

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/kvferry/kvferry/transfer"
)

func addrs(ss ...string) (as []netip.AddrPort) {
	for _, s := range ss {
		as = append(as, netip.MustParseAddrPort(s))
	}
	return as
}

func TestListenNamesATakenPort(t *testing.T) {
	n := newNode(t, ownerLife, 4096)
	first := n.listen(t, Options{})
	_, err := Listen(Options{Local: n.local, Bind: first.Bound()})
	if !errors.Is(err, ErrPort) {
		t.Errorf("Listen on a taken port: %v, want ErrPort", err)
	}
	if port := fmt.Sprint(first.Bound().Port()); err != nil && !strings.Contains(err.Error(), port) {
		t.Errorf("error %q does not name port %s", err, port)
	}
}

func TestListenWants(t *testing.T) {
	n := newNode(t, ownerLife, 4096)
	bind := netip.MustParseAddrPort("127.0.0.1:0")
	nameless, sealless := n.local, n.local
	nameless.Life.Node = ""
	sealless.Seals = nil
	for name, o := range map[string]Options{
		"no address":             {Local: n.local},
		"no seal table":          {Local: sealless, Bind: bind},
		"no name":                {Local: nameless, Bind: bind},
		"an address of nobody":   {Local: n.local, Bind: netip.MustParseAddrPort("203.0.113.7:0")},
		"unspecified for others": {Local: n.local, Bind: bind, Advertise: netip.MustParseAddrPort("0.0.0.0:80")},
	} {
		if tr, err := Listen(o); err == nil {
			t.Errorf("Listen with %s: no error", name)
			_ = tr.Close()
		}
	}
}

func TestAdvertised(t *testing.T) {
	for name, tt := range map[string]struct {
		ask, bound string
		want       string // "" is an error
	}{
		"what was bound":                 {bound: "192.0.2.1:7902", want: "192.0.2.1:7902"},
		"what was bound, loopback":       {bound: "127.0.0.1:7902", want: "127.0.0.1:7902"},
		"IPv6":                           {bound: "[2001:db8::1]:7902", want: "[2001:db8::1]:7902"},
		"what was asked for":             {ask: "198.51.100.1:1234", bound: "0.0.0.0:7902", want: "198.51.100.1:1234"},
		"asked for with the bound port":  {ask: "198.51.100.1:0", bound: "192.0.2.1:7902", want: "198.51.100.1:7902"},
		"loopback to oneself":            {ask: "127.0.0.1:0", bound: "0.0.0.0:7902", want: "127.0.0.1:7902"},
		"loopback for another interface": {ask: "127.0.0.1:0", bound: "192.0.2.1:7902"},
		"unspecified":                    {ask: "0.0.0.0:7902", bound: "192.0.2.1:7902"},
		"unspecified IPv6":               {ask: "[::]:7902", bound: "192.0.2.1:7902"},
		"link-local":                     {ask: "[fe80::1]:7902", bound: "[::]:7902"},
		"bound to link-local":            {bound: "169.254.1.1:7902"},
		"multicast":                      {ask: "224.0.0.1:7902", bound: "192.0.2.1:7902"},
	} {
		var ask netip.AddrPort
		if tt.ask != "" {
			ask = netip.MustParseAddrPort(tt.ask)
		}
		got, err := advertised(ask, netip.MustParseAddrPort(tt.bound))
		switch {
		case tt.want == "" && !errors.Is(err, errAddress):
			t.Errorf("%s: %v, %v, want errAddress", name, got, err)
		case tt.want != "" && (err != nil || len(got) != 1 || got[0].String() != tt.want):
			t.Errorf("%s: %v, %v, want %s", name, got, err, tt.want)
		}
	}
}

// An unspecified bind address is never what peers are told.
func TestUnspecifiedBindIsNotAdvertised(t *testing.T) {
	for _, bind := range []string{"0.0.0.0:0", "[::]:0"} {
		owner, reader := newNode(t, ownerLife, 4096), newNode(t, readerLife, 4096)
		tr, err := Listen(Options{Local: owner.local, Bind: netip.MustParseAddrPort(bind)})
		if err != nil {
			if errors.Is(err, syscall.EAFNOSUPPORT) {
				continue // no IPv6
			}
			if !errors.Is(err, errAddress) || !strings.Contains(err.Error(), "advertise") {
				t.Errorf("Listen on %s: %v, want what to set", bind, err)
			}
			continue // a machine without a network
		}
		owner.t = tr
		for _, a := range tr.Advertised() {
			if a.Addr().IsUnspecified() || a.Addr().IsLoopback() || a.Port() != tr.Bound().Port() {
				t.Errorf("bound to %s, advertised is %s", bind, a)
			}
		}
		reader.listen(t, Options{})
		open(t, reader, owner.peer())
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestParseDescriptor(t *testing.T) {
	const here, there = "0123456789abcdef", "fedcba9876543210"
	for name, tt := range map[string]struct {
		d           string
		secure      bool             // this node has a certificate
		want        []netip.AddrPort // nil is an error
		unavailable bool
	}{
		"one":                              {d: "1 " + there + " 192.0.2.1:7902", want: addrs("192.0.2.1:7902")},
		"two":                              {d: "1 - 192.0.2.1:7902 [2001:db8::1]:7902", want: addrs("192.0.2.1:7902", "[2001:db8::1]:7902")},
		"loopback of this machine":         {d: "1 " + here + " 127.0.0.1:7902", want: addrs("127.0.0.1:7902")},
		"loopback of an unknown one":       {d: "1 - 127.0.0.1:7902", want: addrs("127.0.0.1:7902")},
		"loopback of another machine":      {d: "1 " + there + " 127.0.0.1:7902", unavailable: true},
		"loopback of another, and another": {d: "1 " + there + " [::1]:7902 192.0.2.1:7902", want: addrs("192.0.2.1:7902")},
		"none":                             {d: "", unavailable: true},
		"another version":                  {d: "2 - 192.0.2.1:7902", unavailable: true},
		"no address":                       {d: "1 -"},
		"no machine":                       {d: "1 192.0.2.1:7902"},
		"no version":                       {d: "- - 192.0.2.1:7902"},
		"port 0":                           {d: "1 - 192.0.2.1:0"},
		"unspecified":                      {d: "1 - 0.0.0.0:7902"},
		"a name":                           {d: "1 - example.com:7902"},
		"two spaces":                       {d: "1 -  192.0.2.1:7902"},
		"tls on both":                      {d: "1 tls " + there + " 192.0.2.1:7902", secure: true, want: addrs("192.0.2.1:7902")},
		"tls on both, no machine":          {d: "1 tls - [2001:db8::1]:7902", secure: true, want: addrs("[2001:db8::1]:7902")},
		"tls there alone":                  {d: "1 tls " + there + " 192.0.2.1:7902", unavailable: true},
		"tls here alone":                   {d: "1 " + there + " 192.0.2.1:7902", secure: true, unavailable: true},
		"tls and no machine":               {d: "1 tls 192.0.2.1:7902", secure: true},
		"tls and no address":               {d: "1 tls -", secure: true},
		"tls twice and no address":         {d: "1 tls tls", secure: true},
		"tls alone":                        {d: "1 tls", secure: true},
		"tls first":                        {d: "tls 1 - 192.0.2.1:7902", secure: true},
		"tls last":                         {d: "1 - 192.0.2.1:7902 tls", secure: true},
		"tls of another version":           {d: "2 tls - 192.0.2.1:7902", secure: true, unavailable: true},
		"tls there alone, a bad address":   {d: "1 tls - 0.0.0.0:7902"},
		"nine addresses with tls":          {d: "1 tls -" + strings.Repeat(" 192.0.2.1:7902", 9), secure: true},
		"nine addresses":                   {d: "1 -" + strings.Repeat(" 192.0.2.1:7902", 9)},
		"too long":                         {d: "1 - 192.0.2.1:7902" + strings.Repeat(" ", maxDescriptor)},
	} {
		got, err := parseDescriptor([]byte(tt.d), tt.secure, here)
		if fmt.Sprint(got) != fmt.Sprint(tt.want) || (err == nil) != (tt.want != nil) {
			t.Errorf("%s: %v, %v, want %v", name, got, err, tt.want)
		}
		if errors.Is(err, transfer.ErrUnavailable) != tt.unavailable {
			t.Errorf("%s: %v, ErrUnavailable should be %v", name, err, tt.unavailable)
		}
	}
}

// FuzzDescriptor: what a peer may say of where it is.
func FuzzDescriptor(f *testing.F) {
	const here = "0123456789abcdef"
	f.Add("1 - 192.0.2.1:7902", false)
	f.Add("1 tls "+here+" [2001:db8::1]:7902 127.0.0.1:7902", true)
	f.Add("1 tls tls 192.0.2.1:7902", true)
	f.Add("1 tls - 192.0.2.1:7902", false)
	f.Fuzz(func(t *testing.T, d string, secure bool) {
		got, err := parseDescriptor([]byte(d), secure, here)
		if (err == nil) != (len(got) > 0) || len(got) > maxAddresses {
			t.Fatalf("%d addresses, %v", len(got), err)
		}
		if err != nil {
			return
		}
		if (strings.Split(d, " ")[1] == withTLS) != secure {
			t.Errorf("%q is taken by a node whose TLS is %v", d, secure)
		}
		for _, a := range got {
			if a.Port() == 0 || dialable(a.Addr()) != nil {
				t.Errorf("%q leads to %s", d, a)
			}
		}
	})
}

// The first address with a route is dialled; one without costs no attempt.
func TestConnectTakesTheFirstRoute(t *testing.T) {
	n := newNode(t, ownerLife, 4096)
	n.listen(t, Options{})
	// No socket of this family can reach a multicast address.
	c, err := connect(t.Context(), append(addrs("[ff0e::1%lo]:9"), n.t.Bound()))
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	if _, err := connect(t.Context(), addrs("[ff0e::1%lo]:9")); !errors.Is(err, transfer.ErrUnavailable) {
		t.Errorf("connect without a route: %v, want ErrUnavailable", err)
	}
}
