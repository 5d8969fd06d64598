package wire

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
)

// Packer puts what one owner's log says into one message, a batch of one group,
// of at most so many bytes. The message has the bytes that [Encode] gives.
type Packer struct {
	most          int
	floor         id.Sequence
	head          []byte // all before the announcements
	count         int
	announcements []byte
	releases      []id.Sequence // ascending
	gaps          int           // their bytes
}

// NewPacker returns an empty message of the batch's owner, incarnation, and
// floor. It has its length also if that is over most.
func NewPacker(b Batch, most int) *Packer {
	head := append(make([]byte, 0, headBytes+2+3*9), magic, version, kindBatch)
	head = appendHeader(head, list, 1)
	head = appendHeader(head, list, 5)
	for _, v := range []uint64{uint64(b.Owner), uint64(b.Incarnation), uint64(b.Floor)} {
		head = appendNumber(head, v)
	}
	return &Packer{most: most, floor: b.Floor, head: head}
}

// Len is the message's length now.
func (p *Packer) Len() int { return p.size(p.count, len(p.announcements), p.gaps) }

func (p *Packer) size(count, announcements, gaps int) int {
	return len(p.head) + headerBytes(list, count) + announcements + headerBytes(blob, gaps) + gaps
}

// Empty says that it has neither announcements nor releases.
func (p *Packer) Empty() bool { return p.count == 0 && len(p.releases) == 0 }

// Announce adds an announcement together with releases, which may be there
// already and are in any order. False: they do not fit, and nothing has
// changed. It fails as [Append] does.
func (p *Packer) Announce(a *Announcement, releases ...id.Sequence) (bool, error) {
	r, err := a.record(p.floor)
	if err != nil {
		return false, fmt.Errorf("encode announcement %d: %w", a.Sequence, err)
	}
	b, err := pack(&r)
	if err != nil {
		return false, err
	}
	before, gaps := p.releases, p.gaps
	if len(releases) > 0 {
		before = slices.Clone(before)
	}
	for _, s := range releases {
		if err := p.release(s); err != nil {
			p.releases, p.gaps = before, gaps
			return false, err
		}
	}
	if p.size(p.count+1, len(p.announcements)+len(b), p.gaps) > p.most {
		p.releases, p.gaps = before, gaps
		return false, nil
	}
	p.announcements = append(p.announcements, b...)
	p.count++
	return true, nil
}

// Release adds a release. False: it does not fit, and nothing has changed. It
// fails as [Append] does.
func (p *Packer) Release(s id.Sequence) (bool, error) {
	before, gaps := len(p.releases), p.gaps
	if err := p.release(s); err != nil {
		return false, err
	}
	if p.Len() > p.most && len(p.releases) > before {
		i, _ := slices.BinarySearch(p.releases, s)
		p.releases, p.gaps = slices.Delete(p.releases, i, i+1), gaps
		return false, nil
	}
	return true, nil
}

func (p *Packer) release(s id.Sequence) error {
	if s <= p.floor {
		return fmt.Errorf("encode release %d under floor %d: %w", s, p.floor, ErrMessage)
	}
	i, found := slices.BinarySearch(p.releases, s)
	if found {
		return nil
	}
	last := p.floor
	if i > 0 {
		last = p.releases[i-1]
	}
	p.gaps += uvarintBytes(uint64(s - last))
	if i < len(p.releases) {
		next := p.releases[i]
		p.gaps += uvarintBytes(uint64(next-s)) - uvarintBytes(uint64(next-last))
	}
	p.releases = slices.Insert(p.releases, i, s)
	return nil
}

// Message returns the message.
func (p *Packer) Message() []byte {
	b := make([]byte, 0, p.Len())
	b = append(b, p.head...)
	b = appendHeader(b, list, p.count)
	b = append(b, p.announcements...)
	b = appendHeader(b, blob, p.gaps)
	last := p.floor
	for _, s := range p.releases {
		b = binary.AppendUvarint(b, uint64(s-last))
		last = s
	}
	return b
}

func appendNumber(b []byte, v uint64) []byte {
	switch {
	case v < 1<<7:
		return append(b, byte(v))
	case v < 1<<8:
		return append(b, 0xcc, byte(v))
	case v < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, 0xcd), uint16(v))
	case v < 1<<32:
		return binary.BigEndian.AppendUint32(append(b, 0xce), uint32(v))
	default:
		return binary.BigEndian.AppendUint64(append(b, 0xcf), v)
	}
}

// appendHeader appends how a list of n elements begins, or a blob of n bytes.
func appendHeader(b []byte, is shape, n int) []byte {
	switch {
	case is == list && n < 16:
		return append(b, 0x90|byte(n))
	case is == blob && n < 1<<8:
		return append(b, 0xc4, byte(n))
	case is == list && n < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, 0xdc), uint16(n))
	case is == list:
		return binary.BigEndian.AppendUint32(append(b, 0xdd), uint32(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, 0xc5), uint16(n))
	default:
		return binary.BigEndian.AppendUint32(append(b, 0xc6), uint32(n))
	}
}

func headerBytes(is shape, n int) int {
	var b [5]byte
	return len(appendHeader(b[:0], is, n))
}
