package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/kvferry/kvferry/internal/id"
)

// The two processes of a pull speak JSON, a line a message: the owner is given a
// setup and answers with an offer, and then every question with its usage, after
// it has written its arena anew if it is told to. The end of its input ends it.
type (
	offer struct {
		Life        id.Life           `json:"life"`
		Descriptors map[string][]byte `json:"descriptors"` // of its transports, by name
		Refused     map[string]string `json:"refused"`     // those that it could not open, and why
		RDMA        rdmaPort          `json:"rdma"`        // that it has for rdma
		ArenaBytes  int64             `json:"arena_bytes"`
		Seal        uint32            `json:"seal"`
		SealValue   uint64            `json:"seal_value"`
	}
	question struct {
		Write bool `json:"write"`
	}
	usage struct {
		CPUSeconds float64 `json:"cpu_seconds"`
	}
)

// ServeOwner is the other process of a pull: it serves an arena by each
// transport until stdin ends, or ctx. It speaks one JSON line at a time.
func ServeOwner(ctx context.Context, stdin io.Reader, stdout io.Writer) error {
	in := json.NewDecoder(bufio.NewReader(stdin))
	out := json.NewEncoder(stdout)
	var o setup
	if err := in.Decode(&o); err != nil {
		return fmt.Errorf("bench owner: read setup: %w", err)
	}
	s, err := newSide("bench-owner", o, o.ownerDevices())
	if err != nil {
		return fmt.Errorf("bench owner: %w", err)
	}
	defer s.close()
	if t := s.rdma(); t != nil {
		calls, err := startCallServer(ctx, o.Rendezvous, t)
		if err != nil {
			return fmt.Errorf("bench owner: %w", err)
		}
		defer calls.close()
	}
	fillContent(s.arena.Bytes())
	const sequence = 1
	value, _ := id.SealValue(s.life.Incarnation, sequence)
	s.seals.Store(0, value)
	hand := offer{Life: s.life, Descriptors: make(map[string][]byte), Refused: s.refused, RDMA: s.rdmaPort(), ArenaBytes: s.arena.Size(), SealValue: value}
	for name, t := range s.transports {
		hand.Descriptors[name] = t.Descriptor()
	}
	if err := out.Encode(hand); err != nil {
		return fmt.Errorf("bench owner: %w", err)
	}
	for ctx.Err() == nil {
		var q question
		if err := in.Decode(&q); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("bench owner: read question: %w", err)
		}
		if q.Write {
			fillContent(s.arena.Bytes())
		}
		if err := out.Encode(usage{cpuSeconds()}); err != nil {
			return fmt.Errorf("bench owner: %w", err)
		}
	}
	return context.Cause(ctx)
}

// owner is the other process, as the reader holds it.
type owner struct {
	child *child
	offer offer
}

const (
	offerTimeout = 60 * time.Second // it populates its arena
	usageTimeout = 10 * time.Second
)

// startOwner starts the process and returns when it serves. ctx ends it.
func startOwner(ctx context.Context, argv []string, with setup) (*owner, error) {
	c, err := startChild(ctx, nil, argv...)
	if err != nil {
		return nil, fmt.Errorf("start owner: %w", err)
	}
	o := &owner{child: c}
	if err = o.ask(with, &o.offer, offerTimeout); err == nil && o.offer.ArenaBytes < with.ArenaBytes {
		err = fmt.Errorf("arena has %d bytes, %d were ordered", o.offer.ArenaBytes, with.ArenaBytes)
	}
	if err != nil {
		return nil, fmt.Errorf("start owner %q: %w", argv, errors.Join(err, c.close()))
	}
	return o, nil
}

func (o *owner) ask(question, answer any, within time.Duration) error {
	order, err := json.Marshal(question)
	if err != nil {
		return err
	}
	line, err := o.child.ask(append(order, '\n'), within)
	if err != nil {
		return err
	}
	return json.Unmarshal(line, answer)
}

// write has the owner write its arena anew, with what it held.
func (o *owner) write() error {
	if err := o.ask(question{Write: true}, &usage{}, offerTimeout); err != nil {
		return fmt.Errorf("have the owner write: %w", err)
	}
	return nil
}

func (o *owner) cpuSeconds() (float64, error) {
	var u usage
	if err := o.ask(question{}, &u, usageTimeout); err != nil {
		return 0, fmt.Errorf("ask the owner for its CPU time: %w", err)
	}
	return u.CPUSeconds, nil
}
