package cudaipc

import "github.com/kvferry/kvferry/transfer/rendezvous"

// serve is the owner's side of one connection.
func (t *Transport) serve(c *rendezvous.Conn) error {
	if err := c.Welcome(welcome{pidns: t.pidns, arenas: len(t.exports)}.encode()); err != nil {
		return err
	}
	if err := c.SendForReading(sealTable, t.local.Seals.Region().File()); err != nil {
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
