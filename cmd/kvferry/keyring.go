package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
)

const (
	keyDigits    = 16  // of an id
	minKeyDigits = 4   // of them, at least, that name a key
	maxKeyText   = 256 // bytes that are read in search of a key
)

func newKeyring(t *target) *cobra.Command {
	l := &look[*kvferrypb.KeyringResponse]{target: t, ask: showKeyring, show: printKeyring}
	cmd := l.command(&cobra.Command{
		Use:   "keyring",
		Short: "Show or change the keys that gossip is encrypted with",
		Long: `Show the gossip keys of a node, by their ids, and whether the other members
have the same. "add", "use", and "remove" change the ring of all members, and
return when every one of them has the change; if not, they say who stands in the
way, and whether it has begun.

A new key takes the place of an old one in three steps: add it, use it, remove
the old one. Before the last step put the new key into cluster.keyring of every
node too, in front: a node that starts with the old one alone may be a stranger.`,
		Example: `  kvferry keyring
  kvferry keyring new | tee new.key | kvferry keyring add -
  kvferry keyring use 9f2c
  kvferry keyring remove 41d0`,
	})
	cmd.Args = onlyCommands
	cmd.AddCommand(newKeyringNew(), newKeyringAdd(t), newKeyringUse(t), newKeyringRemove(t))
	return cmd
}

func showKeyring(ctx context.Context, a kvferrypb.AdminClient) (*kvferrypb.KeyringResponse, error) {
	return a.Keyring(ctx, &kvferrypb.KeyringRequest{})
}

func printKeyring(w io.Writer, m *kvferrypb.KeyringResponse) {
	if len(m.GetKeys()) == 0 {
		fmt.Fprintln(w, "no keys: gossip is plain (cluster.keyring)")
		return
	}
	rows := newTable(w, "key", "primary")
	for _, k := range m.GetKeys() {
		primary := "-"
		if k.GetPrimary() {
			primary = "encrypts"
		}
		rows.AppendRow([]any{k.GetId(), primary})
	}
	rows.Render()
	fmt.Fprintf(w, "generation %d\n\n", m.GetGeneration())
	rows = newTable(w, "member", "generation", "same", "error")
	for _, i := range m.GetMembers() {
		rows.AppendRow([]any{i.GetNode(), i.GetGeneration(), i.GetSame(), orDash(i.GetError())})
	}
	rows.Render()
}

func newKeyringNew() *cobra.Command {
	return &cobra.Command{
		Use:   "new",
		Short: "Make a key and print it; nobody is told",
		Long: `Make a key of 32 random bytes and print it in base64, as cluster.keyring and
"kvferry keyring add" take it. It is made here, no node is asked or told.`,
		Example: `  (umask 077; kvferry keyring new > new.key)`,
		Args:    noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			key := make(config.Key, config.KeyBytes)
			_, _ = rand.Read(key) // never fails
			text, err := key.MarshalText()
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s\n", text)
			return err
		},
	}
}

func newKeyringAdd(t *target) *cobra.Command {
	k := &keyringChange{target: t}
	return k.command(&cobra.Command{
		Use:   "add KEY|-",
		Short: "Let every member read what a key encrypts",
		Long: `Add a key to the ring of every member, as the last one: nothing is encrypted
with it yet, everything that is can be read. KEY is 32 bytes in base64; with -
it is read from standard input, where nobody else on the machine sees it.`,
		Example: `  kvferry keyring add - < new.key`,
		RunE: func(cmd *cobra.Command, args []string) error {
			key, err := readKey(args[0], cmd.InOrStdin())
			if err != nil {
				return usage(cmd, "%w", err)
			}
			before, after, err := k.run(cmd, &kvferrypb.KeyringRequest{Operation: kvferrypb.KeyringRequest_ADD, Key: key}, "")
			switch {
			case err != nil:
				return err
			case slices.Contains(keyIDs(before), key.ID()):
				return k.print(cmd, after, "key %s was there before: every member reads it", key.ID())
			}
			return k.print(cmd, after, "added key %s: every member reads it", key.ID())
		},
	})
}

func newKeyringUse(t *target) *cobra.Command {
	k := &keyringChange{target: t}
	return k.named(&cobra.Command{
		Use:   "use ID",
		Short: "Let every member encrypt with a key that all have",
		Long: `Let every member encrypt, and sign references, with a key that was added. ID is
as "kvferry keyring" shows it, or its beginning.

` + lostMembers,
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &kvferrypb.KeyringRequest{Operation: kvferrypb.KeyringRequest_USE, Force: k.force}
			_, after, err := k.run(cmd, req, args[0])
			if err != nil {
				return err
			}
			return k.print(cmd, after, "every member encrypts with key %s", req.GetId())
		},
	})
}

func newKeyringRemove(t *target) *cobra.Command {
	k := &keyringChange{target: t}
	return k.named(&cobra.Command{
		Use:   "remove ID",
		Short: "Take a key that nobody uses from every member",
		Long: `Take a key from the ring of every member: what it encrypts cannot be read any
more, nor what is published under a reference that it signed. It must not be the
one that encrypts. ID is as "kvferry keyring" shows it, or its beginning.

` + lostMembers,
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &kvferrypb.KeyringRequest{Operation: kvferrypb.KeyringRequest_REMOVE, Force: k.force}
			_, after, err := k.run(cmd, req, args[0])
			if err != nil {
				return err
			}
			return k.print(cmd, after, "removed key %s: no member has it", req.GetId())
		},
	})
}

// lostMembers is the help of --force.
const lostMembers = `A member that was lost in the last 24 hours without a goodbye, and is not known to
have the keys that it would need to come back, stands in the way. Start it, or
leave it behind with --force: it then comes back only after it has been given the
keys, in cluster.keyring.`

// keyringChange is what the commands share that change the ring of all members.
type keyringChange struct {
	target  *target
	timeout time.Duration
	force   bool
	output  *format
}

func (k *keyringChange) command(cmd *cobra.Command) *cobra.Command {
	cmd.Args = oneArgument
	cmd.ValidArgsFunction = cobra.NoFileCompletions
	cmd.Flags().DurationVar(&k.timeout, "timeout", 30*time.Second, "for all members")
	k.output = addFormat(cmd)
	return cmd
}

// named is a command whose argument is the id of a key, or its beginning.
func (k *keyringChange) named(cmd *cobra.Command) *cobra.Command {
	k.command(cmd)
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if err := oneArgument(cmd, args); err != nil {
			return err
		}
		if len(args[0]) < minKeyDigits {
			return fmt.Errorf("id %q: want %d digits or more", args[0], minKeyDigits)
		}
		return nil
	}
	cmd.ValidArgsFunction = k.complete
	cmd.Flags().BoolVar(&k.force, "force", false, "leave lost members behind that may lack the keys")
	return cmd
}

// run makes the change and returns the ring before and after it. An id is
// found by its beginning, and set in the request.
func (k *keyringChange) run(cmd *cobra.Command, req *kvferrypb.KeyringRequest, id string) (before, after *kvferrypb.KeyringResponse, err error) {
	if k.timeout <= 0 {
		return nil, nil, usage(cmd, "--timeout=%v: want more than 0s", k.timeout)
	}
	c, err := k.target.dial()
	if err != nil {
		return nil, nil, err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(cmd.Context(), k.timeout)
	defer cancel()
	before, err = showKeyring(ctx, c.Admin())
	if err != nil {
		return nil, nil, late(err, fmt.Errorf("the node did not answer within --timeout=%v, nothing was changed: give it more time", k.timeout))
	}
	if id != "" {
		if req.Id, err = findKey(keyIDs(before), id); err != nil {
			return nil, nil, err
		}
	}
	after, err = c.Admin().Keyring(ctx, req)
	return before, after, late(err, fmt.Errorf("not known to be done by all after %v: kvferry keyring shows who has it", k.timeout))
}

func (k *keyringChange) print(cmd *cobra.Command, after *kvferrypb.KeyringResponse, format string, args ...any) error {
	if k.output.value != asTable {
		return printMessage(cmd.OutOrStdout(), k.output, after)
	}
	_, err := fmt.Fprintln(cmd.OutOrStdout(), printable(fmt.Sprintf(format, args...)))
	return err
}

// complete offers the ids of a node's keys to the shell.
func (k *keyringChange) complete(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return k.target.completeFrom(cmd.Context(), func(ctx context.Context, a kvferrypb.AdminClient) []cobra.Completion {
		m, err := showKeyring(ctx, a)
		if err != nil {
			return nil
		}
		return keyIDs(m)
	}), cobra.ShellCompDirectiveNoFileComp
}

func keyIDs(m *kvferrypb.KeyringResponse) []string {
	ids := make([]string, 0, len(m.GetKeys()))
	for _, key := range m.GetKeys() {
		ids = append(ids, key.GetId())
	}
	return ids
}

// findKey returns the one id that begins so, or a whole id as it is: that one
// may be a key that was removed here, and not yet everywhere.
func findKey(ids []string, begin string) (string, error) {
	begin = strings.ToLower(begin)
	found := slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return !strings.HasPrefix(id, begin) })
	switch {
	case len(begin) == keyDigits:
		return begin, nil
	case len(ids) == 0:
		return "", fmt.Errorf("find key %.80q: the node has no keyring (cluster.keyring)", begin)
	case len(found) == 0:
		return "", fmt.Errorf("find key %.80q: it is none of the node's: %s", begin, strings.Join(ids, ", "))
	case len(found) > 1:
		return "", fmt.Errorf("find key %.80q: it could be %s: give more digits", begin, strings.Join(found, " or "))
	}
	return found[0], nil
}

// readKey reads a key as it was typed, or from standard input. The error does
// not show it.
func readKey(arg string, stdin io.Reader) (config.Key, error) {
	text := arg
	if arg == "-" {
		raw, err := io.ReadAll(io.LimitReader(stdin, maxKeyText))
		if err != nil {
			return nil, fmt.Errorf("read key: %w", err)
		}
		text = string(raw)
	}
	var key config.Key
	err := key.UnmarshalText([]byte(strings.TrimSpace(text)))
	return key, err
}
