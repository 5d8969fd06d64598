package cluster

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/kvferry/kvferry/internal/id"
)

// Meta is what every member tells all others.
type Meta struct {
	Role        string         // "prefill", "decode" or "both": a hint; at most 16 bytes of a-z
	Group       id.Group       // at most 64 bytes, spelled like a node's name
	Peer        netip.AddrPort // advertised address of the peer service
	Fingerprint uint64         // of the geometry
	Draining    bool           // it takes nothing new and will leave
}

const (
	metaVersion = 1
	maxRole     = 16
	maxGroup    = id.MaxNode
)

func (m Meta) check() error {
	if len(m.Role) > maxRole {
		return fmt.Errorf("role has %d bytes, want at most %d", len(m.Role), maxRole)
	}
	for _, c := range []byte(m.Role) {
		if c < 'a' || c > 'z' {
			return fmt.Errorf("role %q: character %q is not one of a-z", m.Role, c)
		}
	}
	if m.Group != "" {
		if err := id.Node(m.Group).Validate(); err != nil {
			return fmt.Errorf("group: %w", err)
		}
	}
	if m.Peer != (netip.AddrPort{}) {
		if err := checkAddress(m.Peer); err != nil {
			return fmt.Errorf("peer address: %w", err)
		}
	}
	return nil
}

// checkAddress refuses what nobody can send to.
func checkAddress(a netip.AddrPort) error {
	switch ip := a.Addr(); {
	case !ip.IsValid():
		return errors.New("address is missing")
	case ip.Zone() != "":
		return fmt.Errorf("address %s has a zone, which means nothing to others", a)
	case ip.IsUnspecified(), ip.IsMulticast():
		return fmt.Errorf("address %s cannot be reached by others", a)
	case a.Port() == 0:
		return fmt.Errorf("address %s has no port", a)
	}
	return nil
}

// encode writes version, role, group, peer address, fingerprint, and 1 if the
// member drains or 0: at most 120 of the 512 bytes that memberlist allows. A
// later version may only append.
func (m Meta) encode() []byte {
	b := []byte{metaVersion}
	b = appendString(b, m.Role)
	b = appendString(b, string(m.Group))
	b = appendAddress(b, m.Peer)
	b = binary.BigEndian.AppendUint64(b, m.Fingerprint)
	return appendBool(b, m.Draining)
}

func decodeMeta(b []byte) (Meta, error) {
	r := reader{b: b}
	version := r.byte()
	m := Meta{
		Role:  r.string(maxRole),
		Group: id.Group(r.string(maxGroup)),
		Peer:  r.address(),
	}
	m.Fingerprint, m.Draining = r.uint64(), r.bool()
	switch {
	case r.bad || version < metaVersion:
		return Meta{}, fmt.Errorf("decode metadata of %d bytes: %w", len(b), errMalformed)
	case version == metaVersion && len(r.b) > 0:
		return Meta{}, fmt.Errorf("decode metadata: %d bytes too many: %w", len(r.b), errMalformed)
	}
	if err := m.check(); err != nil {
		return Meta{}, fmt.Errorf("decode metadata: %w: %w", err, errMalformed)
	}
	return m, nil
}
