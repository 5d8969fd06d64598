package rdmaread

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer"
)

const (
	version = 1
	magic   = "kvr"

	headerBytes = 5

	maxDescriptor = 4 << 10
	maxPorts      = 16 // of a node, in its descriptor
	maxGIDs       = 4  // of a port, in the descriptor
	maxName       = 32 // bytes of a device's name
	maxReads      = 128
	maxKeys       = 1 << 15  // of all regions of an answer
	maxAnswer     = 64 << 10 // bytes that a Call carries
	maxStretches  = 1024     // of a gather, so that as many as may be asked for at once fit into a stream that nobody reads
	maxBuffers    = 16       // of a ring
	maxReason     = 255      // bytes
)

var (
	// errGarbage: what came does not follow the protocol.
	errGarbage = errors.New("not a message of this protocol")
	// errOwnerClosed: there will be no lane to this life of the owner any more.
	errOwnerClosed = errors.New("its transport is closing")
)

type kind uint8

const (
	kindDescriptor kind = iota + 1
	kindHello
	kindAnswer
	kindRefusal
	kindGather
	kindGathered
)

// refusal is why an owner gives a reader no queue pair.
type refusal uint8

const (
	refusedLife     refusal = iota + 1 // the hello was meant for another life
	refusedStranger                    // the reader is not the one that it says
	refusedReader                      // the reader has as many lanes as may be
	refusedFull                        // all readers together have
	refusedPort                        // the port that was asked for does not work now
	refusedPath                        // nothing of the port is reached from the reader's address
	refusedVerb                        // the device gave no queue pair
	refusedClosed                      // the transport is closing
	refusedRing                        // its memory is staged, and there is no room for another ring
)

func (r refusal) err() error {
	switch r {
	case refusedLife:
		return fmt.Errorf("refused by the owner: %w", transfer.ErrIdentity)
	case refusedStranger:
		return errors.New("refused by the owner: it knows this reader by another name or life")
	case refusedReader:
		return fmt.Errorf("refused by the owner: this reader has %d queue pairs there already", maxLanesOfReader)
	case refusedFull:
		return fmt.Errorf("refused by the owner: it has %d queue pairs, and gives no more", maxAccepted)
	case refusedPort:
		return errors.New("refused by the owner: its port does not work now; its log and its status say why")
	case refusedPath:
		return fmt.Errorf("refused by the owner: its port has no address of the family of ours, or another link layer: %w", transfer.ErrUnavailable)
	case refusedVerb:
		return errors.New("refused by the owner: its device gave no queue pair; its log says why")
	case refusedClosed:
		return fmt.Errorf("refused by the owner: %w", errOwnerClosed)
	case refusedRing:
		return fmt.Errorf("refused by the owner: its memory is staged through its host, which has no room for another lane; raise transfer.staging there: %w", transfer.ErrUnavailable)
	default:
		return fmt.Errorf("refusal %d: %w", uint8(r), errGarbage)
	}
}

// remotePort is one port of a node, as its descriptor tells.
type remotePort struct {
	name  string // of the device, for messages
	link  rdma.LinkLayer
	reads uint8 // that it serves at once, of one queue pair
	lid   uint16
	gids  []netip.Addr // that may be dialled, the best first
}

// descriptor is what [Transport.Descriptor] says.
type descriptor struct {
	owner id.Life
	ports []remotePort
}

func (d descriptor) encode() []byte {
	b := appendLife(header(kindDescriptor), d.owner)
	b = append(b, byte(len(d.ports)))
	for _, p := range d.ports {
		b = append(b, byte(len(p.name)))
		b = append(b, p.name...)
		b = append(b, byte(p.link), p.reads)
		b = binary.BigEndian.AppendUint16(b, p.lid)
		b = append(b, byte(len(p.gids)))
		for _, g := range p.gids {
			b = appendAddr(b, g)
		}
	}
	return b
}

func parseDescriptor(b []byte) (d descriptor, err error) {
	if len(b) == 0 {
		return d, fmt.Errorf("the peer does not read over RDMA: %w", transfer.ErrUnavailable)
	}
	if len(b) > maxDescriptor {
		return d, fmt.Errorf("descriptor of %d bytes: %w", len(b), errGarbage)
	}
	c, err := cut(b, kindDescriptor)
	if err != nil {
		return d, fmt.Errorf("descriptor: %w", err)
	}
	d.owner = c.life()
	n := int(c.byte())
	if n > maxPorts {
		return d, fmt.Errorf("descriptor with %d ports: %w", n, errGarbage)
	}
	for range n {
		p := remotePort{name: c.name(), link: rdma.LinkLayer(c.byte()), reads: c.byte(), lid: c.uint16()}
		gids := int(c.byte())
		if p.reads < 1 || p.reads > maxReads || gids > maxGIDs || p.link != rdma.LinkInfiniBand && p.link != rdma.LinkEthernet {
			c.garbage("a port of link layer %d with %d reads and %d GIDs", p.link, p.reads, gids)
			break
		}
		for range gids {
			p.gids = append(p.gids, c.addr())
		}
		d.ports = append(d.ports, p)
	}
	if err := c.close(); err != nil {
		return descriptor{}, fmt.Errorf("descriptor: %w", err)
	}
	return d, nil
}

// end is what each side tells of its queue pair.
type end struct {
	qpn, psn uint32 // 24 bits each
	gid      netip.Addr
	lid      uint16
	link     rdma.LinkLayer
	mtu      rdma.MTU
	reads    uint8 // a hello: that the reader would have under way; an answer: that the owner serves
}

func appendEnd(b []byte, e end) []byte {
	b = binary.BigEndian.AppendUint32(b, e.qpn)
	b = binary.BigEndian.AppendUint32(b, e.psn)
	b = appendAddr(b, e.gid)
	b = binary.BigEndian.AppendUint16(b, e.lid)
	return append(b, byte(e.link), byte(e.mtu), e.reads)
}

// hello is what a reader says, for each queue pair.
type hello struct {
	generation    uint64 // of the reader's transport; the answer repeats it
	owner, reader id.Life
	port          uint8 // that is asked for, by its place in the owner's descriptor
	end           end
}

func (h hello) encode() []byte {
	b := binary.BigEndian.AppendUint64(header(kindHello), h.generation)
	b = appendLife(appendLife(b, h.owner), h.reader)
	return appendEnd(append(b, h.port), h.end)
}

func parseHello(b []byte) (h hello, err error) {
	c, err := cut(b, kindHello)
	if err != nil {
		return hello{}, fmt.Errorf("hello: %w", err)
	}
	h = hello{generation: c.uint64(), owner: c.life(), reader: c.life(), port: c.byte(), end: c.end()}
	if err := c.close(); err != nil {
		return hello{}, fmt.Errorf("hello: %w", err)
	}
	return h, nil
}

// region is memory that a device may read or write: bytes at addr, with a key for
// each slice. One without keys is the memory of an arena that the device cannot
// reach, so that it is staged: of that there are only the bytes.
type region struct {
	addr, bytes, slice uint64
	keys               []uint32
}

func (r *region) staged() bool { return r.bytes > 0 && len(r.keys) == 0 }

// regions are the owner's, on one device, for one lane.
type regions struct {
	seals   region
	arenas  [id.MaxRanks]region // bytes 0: the owner has none of this rank
	ring    region              // of the lane, where one of the arenas is staged
	buffers int                 // of equal size that the ring has
}

// staged reports whether an arena is.
func (r *regions) staged() bool {
	for i := range r.arenas {
		if r.arenas[i].staged() {
			return true
		}
	}
	return false
}

// buffer is the bytes of one.
func (r *regions) buffer() uint64 { return r.ring.bytes / uint64(r.buffers) }

// answer is what an owner says to a hello that it takes.
type answer struct {
	generation uint64
	owner      id.Life
	end        end
	regions    regions
}

func (a *answer) encode() []byte {
	b := binary.BigEndian.AppendUint64(header(kindAnswer), a.generation)
	b = appendEnd(appendLife(b, a.owner), a.end)
	b = appendRegion(b, a.regions.seals)
	count := len(b)
	b = append(b, 0)
	for rank := range a.regions.arenas {
		if r := a.regions.arenas[rank]; len(r.keys) > 0 {
			b[count]++
			b = appendRegion(append(b, byte(rank)), r)
		}
	}
	if !a.regions.staged() {
		return b
	}
	b = append(appendRegion(b, a.regions.ring), byte(a.regions.buffers))
	count = len(b)
	b = append(b, 0)
	for rank := range a.regions.arenas {
		if r := a.regions.arenas[rank]; r.staged() {
			b[count]++
			b = binary.BigEndian.AppendUint64(append(b, byte(rank)), r.bytes)
		}
	}
	return b
}

func appendRegion(b []byte, r region) []byte {
	b = binary.BigEndian.AppendUint64(b, r.addr)
	b = binary.BigEndian.AppendUint64(b, r.bytes)
	b = binary.BigEndian.AppendUint64(b, r.slice)
	for _, k := range r.keys { // as many as there are slices
		b = binary.BigEndian.AppendUint32(b, k)
	}
	return b
}

// parseAnswer takes an answer, or the refusal instead of one, of which the
// generation is returned too.
func parseAnswer(b []byte) (a answer, why refusal, err error) {
	if len(b) >= headerBytes && kind(b[4]) == kindRefusal {
		c, err := cut(b, kindRefusal)
		if err != nil {
			return answer{}, 0, fmt.Errorf("refusal: %w", err)
		}
		a.generation, why = c.uint64(), refusal(c.byte())
		if why == 0 {
			c.garbage("reason 0")
		}
		if err := c.close(); err != nil {
			return answer{}, 0, fmt.Errorf("refusal: %w", err)
		}
		return a, why, nil
	}
	c, err := cut(b, kindAnswer)
	if err != nil {
		return answer{}, 0, fmt.Errorf("answer: %w", err)
	}
	a.generation, a.owner, a.end = c.uint64(), c.life(), c.end()
	a.regions.seals = c.region()
	if want := uint64(memory.Words * 8); a.regions.seals.bytes < want {
		c.garbage("a seal table of %d bytes, want %d", a.regions.seals.bytes, want)
	}
	c.ranks(func(rank int) { a.regions.arenas[rank] = c.region() })
	if len(c.b) > 0 {
		c.staged(&a.regions)
	}
	if err := c.close(); err != nil {
		return answer{}, 0, fmt.Errorf("answer: %w", err)
	}
	return a, 0, nil
}

// staged takes what an owner says whose memory is staged.
func (c *cursor) staged(r *regions) {
	r.ring, r.buffers = c.region(), int(c.byte())
	if n := uint64(r.buffers); c.err == nil && (n < 1 || n > maxBuffers || r.ring.bytes%n != 0 || r.ring.bytes/n%8 != 0) {
		c.garbage("a ring of %d bytes in %d buffers", r.ring.bytes, n)
	}
	n := c.ranks(func(rank int) {
		bytes := c.uint64()
		if r.arenas[rank].bytes > 0 || bytes == 0 || bytes > math.MaxInt64 {
			c.garbage("rank %d is staged, with %d bytes, and registered with %d", rank, bytes, r.arenas[rank].bytes)
			return
		}
		r.arenas[rank] = region{bytes: bytes}
	})
	if n == 0 {
		c.garbage("a ring, and nothing that is staged")
	}
}

// ranks takes a list of what there is of ranks, which ascend.
func (c *cursor) ranks(take func(rank int)) int {
	count, last := int(c.byte()), -1
	for n := count; n > 0 && c.err == nil; n-- {
		rank := int(c.byte())
		if rank <= last || rank >= id.MaxRanks {
			c.garbage("rank %d after rank %d", rank, last)
			break
		}
		take(rank)
		last = rank
	}
	return count
}

// gather asks an owner to copy stretches of staged arenas into a buffer of the
// lane's ring, one behind the other: that of the number, modulo the buffers.
type gather struct {
	number uint64          // of the lane's, from 0
	copies []transfer.Copy // whose Local means nothing
}

// appendGather appends the message to b, which may be used again.
func appendGather(b []byte, number uint64, copies []transfer.Copy) []byte {
	b = append(append(b, magic...), version, byte(kindGather))
	b = binary.BigEndian.AppendUint64(b, number)
	b = binary.BigEndian.AppendUint16(b, uint16(len(copies)))
	for i := range copies {
		c := &copies[i]
		b = append(b, byte(c.Rank))
		b = binary.BigEndian.AppendUint64(b, uint64(c.Remote))
		b = binary.BigEndian.AppendUint32(b, uint32(c.Bytes))
	}
	return b
}

// parseGather appends the stretches to copies. Whether there is memory where they
// lie is for the owner to say.
func parseGather(b []byte, copies []transfer.Copy) (gather, error) {
	c, err := cut(b, kindGather)
	if err != nil {
		return gather{}, fmt.Errorf("gather: %w", err)
	}
	g := gather{number: c.uint64()}
	n := int(c.uint16())
	if n < 1 || n > maxStretches {
		c.garbage("%d stretches", n)
	}
	for ; n > 0 && c.err == nil; n-- {
		s := transfer.Copy{Rank: id.Rank(c.byte()), Remote: int64(c.uint64()), Bytes: int64(c.uint32())}
		if c.err == nil && (s.Rank.Validate() != nil || s.Remote < 0 || s.Bytes == 0) {
			c.garbage("%d bytes at %d of rank %d", s.Bytes, s.Remote, int(s.Rank))
		}
		copies = append(copies, s)
	}
	if err := c.close(); err != nil {
		return gather{}, fmt.Errorf("gather: %w", err)
	}
	g.copies = copies
	return g, nil
}

// encodeGathered answers the gather of a number: it is there, or why not.
func encodeGathered(number uint64, why error) []byte {
	text := ""
	if why != nil {
		text = cmp.Or(printable(why.Error()), "it does not say why")
	}
	b := binary.BigEndian.AppendUint64(header(kindGathered), number)
	return append(append(b, byte(len(text))), text...)
}

func parseGathered(b []byte) (number uint64, why string, err error) {
	c, err := cut(b, kindGathered)
	if err != nil {
		return 0, "", fmt.Errorf("gathered: %w", err)
	}
	number = c.uint64()
	why = string(c.take(int(c.byte())))
	if why != printable(why) {
		c.garbage("a reason of other characters")
	}
	if err := c.close(); err != nil {
		return 0, "", fmt.Errorf("gathered: %w", err)
	}
	return number, why, nil
}

// printable is a text as it may end up in the other side's log.
func printable(s string) string {
	s = strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
	for len(s) > maxReason {
		_, last := utf8.DecodeLastRuneInString(s)
		s = s[:len(s)-last]
	}
	return s
}

func encodeRefusal(generation uint64, why refusal) []byte {
	return append(binary.BigEndian.AppendUint64(header(kindRefusal), generation), byte(why))
}

func header(k kind) []byte { return append([]byte(magic), version, byte(k)) }

func appendLife(b []byte, l id.Life) []byte {
	b = append(b, byte(len(l.Node)))
	b = append(b, l.Node...)
	return binary.BigEndian.AppendUint64(b, uint64(l.Incarnation))
}

func appendAddr(b []byte, a netip.Addr) []byte {
	all := a.As16()
	return append(b, all[:]...)
}

// cursor reads a message. After the first error it gives zeros.
type cursor struct {
	b    []byte
	keys int // taken
	err  error
}

// cut takes the header of a message of one kind.
func cut(b []byte, want kind) (*cursor, error) {
	switch {
	case len(b) < headerBytes:
		return nil, fmt.Errorf("%d bytes: %w", len(b), errGarbage)
	case string(b[:3]) != magic:
		return nil, fmt.Errorf("magic %x: %w", b[:3], errGarbage)
	case b[3] != version:
		return nil, fmt.Errorf("protocol version %d, want %d: %w", b[3], version, errGarbage)
	case kind(b[4]) != want:
		return nil, fmt.Errorf("kind %d, want %d: %w", b[4], want, errGarbage)
	}
	return &cursor{b: b[headerBytes:]}, nil
}

func (c *cursor) garbage(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf(format+": %w", append(args, errGarbage)...)
	}
	c.b = nil
}

// close returns the first error; bytes that are left are one.
func (c *cursor) close() error {
	if len(c.b) > 0 {
		c.garbage("%d bytes too many", len(c.b))
	}
	return c.err
}

// take returns n bytes, zeros if there are fewer.
func (c *cursor) take(n int) []byte {
	if len(c.b) < n {
		c.garbage("cut off")
		return make([]byte, n)
	}
	b := c.b[:n]
	c.b = c.b[n:]
	return b
}

func (c *cursor) byte() byte     { return c.take(1)[0] }
func (c *cursor) uint16() uint16 { return binary.BigEndian.Uint16(c.take(2)) }
func (c *cursor) uint32() uint32 { return binary.BigEndian.Uint32(c.take(4)) }
func (c *cursor) uint64() uint64 { return binary.BigEndian.Uint64(c.take(8)) }

// addr is never the unspecified address, and as IPv6: IPv4 is mapped.
func (c *cursor) addr() netip.Addr {
	a := netip.AddrFrom16([16]byte(c.take(16)))
	if a.IsUnspecified() || a.IsMulticast() {
		c.garbage("address %s", a)
	}
	return a
}

// name is a device's name; it ends up in logs.
func (c *cursor) name() string {
	n := int(c.byte())
	if n == 0 || n > maxName {
		c.garbage("name of %d bytes", n)
		return ""
	}
	s := string(c.take(n))
	if err := id.Node(s).Validate(); err != nil && c.err == nil {
		c.garbage("device: %v", err)
	}
	return s
}

func (c *cursor) life() id.Life {
	s := id.Node(c.take(int(c.byte())))
	if err := s.Validate(); err != nil && c.err == nil {
		c.garbage("%v", err)
	}
	return id.Life{Node: s, Incarnation: id.Incarnation(c.uint64())}
}

func (c *cursor) end() end {
	e := end{qpn: c.uint32(), psn: c.uint32(), gid: c.addr(), lid: c.uint16(), link: rdma.LinkLayer(c.byte()), mtu: rdma.MTU(c.byte()), reads: c.byte()}
	switch {
	case c.err != nil:
	case e.qpn == 0 || e.qpn >= 1<<24 || e.psn >= 1<<24:
		c.garbage("queue pair %#x, PSN %#x", e.qpn, e.psn)
	case e.link != rdma.LinkInfiniBand && e.link != rdma.LinkEthernet:
		c.garbage("link layer %d", e.link)
	case e.mtu < minMTU || e.mtu > maxMTU:
		c.garbage("MTU %d", e.mtu)
	case e.reads < 1 || e.reads > maxReads:
		c.garbage("%d reads", e.reads)
	}
	return e
}

// enum ibv_mtu
const (
	minMTU rdma.MTU = 1
	maxMTU rdma.MTU = 5
)

// region is never empty, and no address in it overflows.
func (c *cursor) region() region {
	r := region{addr: c.uint64(), bytes: c.uint64(), slice: c.uint64()}
	if c.err != nil {
		return region{}
	}
	if r.bytes == 0 || r.bytes > math.MaxInt64 || r.addr > math.MaxUint64-r.bytes || r.slice == 0 || r.slice < r.bytes && r.slice%8 != 0 || r.addr%8 != 0 {
		c.garbage("region of %d bytes at %#x in slices of %d", r.bytes, r.addr, r.slice)
		return region{}
	}
	n := (r.bytes-1)/r.slice + 1
	if n > uint64(maxKeys-c.keys) {
		c.garbage("region of %d slices", n)
		return region{}
	}
	c.keys += int(n)
	if uint64(len(c.b)) < 4*n {
		c.garbage("cut off")
		return region{}
	}
	r.keys = make([]uint32, n)
	for i := range r.keys {
		r.keys[i] = c.uint32()
	}
	return r
}
