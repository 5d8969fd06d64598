package rendezvous_test

import (
	"context"
	"fmt"
	"os"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rendezvous"
)

// protocol is one whose owners give a single file.
func protocol() rendezvous.Protocol {
	return rendezvous.Protocol{Name: "example", Magic: "exa", Version: 1}
}

const label = 7

// give is the owner's side of a connection.
func give(c *rendezvous.Conn, r *memory.Region) error {
	if err := c.Welcome([]byte{byte(r.Size() >> 12)}); err != nil {
		return err
	}
	if err := c.SendFile(label, r.File()); err != nil {
		return err
	}
	if err := c.Settle(); err != nil {
		return err
	}
	return c.Stand() // until the reader needs the memory no more
}

// link is the reader's side.
type link struct{ region *memory.Region }

func (l *link) Attach(_ context.Context, c *rendezvous.Conn) error {
	f, err := c.ReceiveFile(label)
	if err != nil {
		return err
	}
	if l.region, err = memory.Map(f, int64(c.Says()[0])<<12, false); err != nil {
		return err
	}
	return c.Settle()
}

func (l *link) Watch(c *rendezvous.Conn) error { return c.Stand() }

func (l *link) Release() {
	if l.region != nil {
		_ = l.region.Close()
	}
}

func meet() (string, error) {
	dir, err := os.MkdirTemp("", "rendezvous") // both nodes name the same one
	if err != nil {
		return "", err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	region, err := memory.New("example", 4096)
	if err != nil {
		return "", err
	}
	copy(region.Bytes(), "pages of a request")

	prefill, decode := id.Life{Node: "prefill", Incarnation: 7}, id.Life{Node: "decode", Incarnation: 8}
	owner, err := rendezvous.Listen(rendezvous.Options{
		Protocol: protocol(), Dir: dir, Life: prefill,
		Serve: func(c *rendezvous.Conn) error { return give(c, region) },
	})
	if err != nil {
		return "", err
	}
	defer func() { _ = owner.Close() }()
	reader, err := rendezvous.Listen(rendezvous.Options{
		Protocol: protocol(), Dir: dir, Life: decode,
		Serve: func(c *rendezvous.Conn) error { return rendezvous.ErrBusy },
	})
	if err != nil {
		return "", err
	}
	defer func() { _ = reader.Close() }()

	l := &link{}
	hold, err := reader.Open(context.Background(), transfer.Peer{Life: prefill, Descriptor: owner.Descriptor()}, l)
	if err != nil {
		return "", err
	}
	defer hold.Close()
	if err := hold.Begin(); err != nil {
		return "", err
	}
	defer hold.Done()
	return string(l.region.Bytes()[:18]), nil
}

func ExampleServer_Open() {
	fmt.Println(meet())
	// Output: pages of a request <nil>
}
