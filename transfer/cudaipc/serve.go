package cudaipc

import (
	"errors"
	"fmt"
	"os"

	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer/rendezvous"
)

// serve is the owner's side of one connection.
func (t *Transport) serve(c *rendezvous.Conn) error {
	if err := c.Welcome(welcome{pidns: t.pidns, arenas: len(t.exports)}.encode()); err != nil {
		return err
	}
	if err := sendSeals(c, t.local.Seals); err != nil {
		return err
	}
	for _, e := range t.exports {
		if err := c.Send(kindArena, e.says); err != nil {
			return err
		}
		for _, f := range e.files {
			if err := c.SendFile(uint16(e.rank), f); err != nil {
				return err
			}
		}
	}
	if err := c.Settle(); err != nil {
		return err
	}
	return c.Stand()
}

// sendSeals hands the seal table over as a file that is open for reading alone: a
// reader's mistake must not write into it.
func sendSeals(c *rendezvous.Conn, seals *memory.SealTable) error {
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", seals.Region().File().Fd()))
	if err != nil {
		return fmt.Errorf("open the seal table for reading: %w", err)
	}
	return errors.Join(c.SendFile(sealTable, f), f.Close())
}
