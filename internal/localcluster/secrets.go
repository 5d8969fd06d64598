package localcluster

import (
	"crypto/rand"
	"time"

	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
)

// certified is how long the certificates of a cluster are good for: longer than
// it.
const certified = 10 * 365 * 24 * time.Hour

// secrets are what the nodes of a secure cluster have, and nobody else; nil for
// one that is open. Its authority is never written.
type secrets struct {
	authority *identity.Authority
	key       config.Key // of gossip
}

// secretKeys are the keys that apply sets.
func secretKeys() []string {
	return []string{"security.certificate", "security.key", "security.ca", "cluster.keyring"}
}

func newSecrets(o Options) (*secrets, error) {
	if !o.Secure {
		return nil, nil //nolint:nilnil // which is what an open cluster has
	}
	authority, err := identity.NewAuthority("local cluster "+o.Name, certified)
	if err != nil {
		return nil, err
	}
	s := &secrets{authority, make(config.Key, config.KeyBytes)}
	_, _ = rand.Read(s.key) // it never fails
	return s, nil
}

// apply puts the secrets into a node's configuration.
func (s *secrets) apply(n Node, c *config.Config) {
	if s == nil {
		return
	}
	f := identity.Files(n.Dir, id.Node(n.Node))
	c.Security.Certificate, c.Security.Key, c.Security.CA = f.Certificate, f.Key, f.CA
	c.Cluster.Keyring = []config.Key{s.key}
}

// issue writes the files that apply names.
func (s *secrets) issue(n Node) error {
	if s == nil {
		return nil
	}
	_, err := s.authority.Issue(n.Dir, id.Node(n.Node))
	return err
}
