package node_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/cluster"
	"github.com/kvferry/kvferry/internal/config"
)

// keyring makes one call of the admin service.
func (m *member) keyring(req *kvferrypb.KeyringRequest) (*kvferrypb.KeyringResponse, error) {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	return m.admin.Keyring(ctx, req)
}

func keyIDs(res *kvferrypb.KeyringResponse) (ids []string) {
	for i, k := range res.GetKeys() {
		if k.GetPrimary() != (i == 0) {
			ids = append(ids, "?")
		}
		ids = append(ids, k.GetId())
	}
	return ids
}

// newKey is a gossip key and its id.
func newKey(t testing.TB) (key []byte, id string) {
	t.Helper()
	key = make([]byte, cluster.KeyBytes)
	rand.Read(key)
	return key, cluster.IDOf(key).String()
}

// TestRotation: add, use, remove, while requests run. References live as long as
// the key that has signed them.
func TestRotation(t *testing.T) {
	prefill, decode := startPair(t, [2]string{"cluster.keyring", testKey})
	p, d := openEngine(t, prefill), openEngine(t, decode)
	old, err := base64.StdEncoding.DecodeString(testKey)
	if err != nil {
		t.Fatal(err)
	}
	oldID := cluster.IDOf(old).String()
	key, newID := newKey(t)
	p.ingest("before")
	p.write("before", 20)
	before := p.publish("before", true).GetReference()

	requests := 0
	step := func(what string, req *kvferrypb.KeyringRequest, want ...string) {
		t.Helper()
		res, err := decode.keyring(req)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if got := keyIDs(res); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("after %s the ring is %v, want %v", what, got, want)
		}
		if m := res.GetMembers(); len(m) != 1 || m[0].GetNode() != "prefill" || !m[0].GetSame() || m[0].GetGeneration() != res.GetGeneration() || m[0].GetError() != "" {
			t.Errorf("after %s the others: %v", what, m)
		}
		requests++
		r := fmt.Sprintf("r%d", requests)
		carry(t, r, bring{chunks: chunks(), reference: true}, p, d)
		carry(t, r+" by gossip", bring{chunks: chunks()}, d, p)
	}
	step("nothing", &kvferrypb.KeyringRequest{}, oldID)
	step("add", &kvferrypb.KeyringRequest{Operation: kvferrypb.KeyringRequest_ADD, Key: key}, oldID, newID)
	step("use", &kvferrypb.KeyringRequest{Operation: kvferrypb.KeyringRequest_USE, Id: newID}, newID, oldID)
	d.ingest("before")
	if _, err := d.retrieve("before", before, 0, deadline); err != nil {
		t.Errorf("by a reference of the former key: %v", err)
	}
	p.ingest("signed before")
	p.write("signed before", 20)
	after := p.publish("signed before", true).GetReference()
	step("remove", &kvferrypb.KeyringRequest{Operation: kvferrypb.KeyringRequest_REMOVE, Id: oldID}, newID)
	d.remove("before")
	d.ingest("before")
	if _, err := d.retrieve("before", before, 0, deadline); client.CodeOf(err) != kvferrypb.Failure_INVALID || !strings.Contains(err.Error(), "no key of 1 has signed it") {
		t.Errorf("by a reference of a key that is gone: %v, want INVALID", err)
	}
	d.ingest("signed before")
	if _, err := d.retrieve("signed before", after, 0, deadline); err != nil {
		t.Errorf("by a reference of the key in use: %v", err)
	}

	// Both come back with the new ring, although their configuration has the old one.
	for _, n := range []*member{prefill, decode} {
		b, err := os.ReadFile(filepath.Join(n.config.Node.StateDir, "keyring"))
		if err != nil || !bytes.Contains(b, []byte(base64.StdEncoding.EncodeToString(key))) {
			t.Errorf("%s keeps %q, %v", n.Life(), b, err)
		}
	}
	decode.close()
	again := startWith(t, decode.config, nil)
	awaitPeers(t, prefill, again)
	res, err := again.keyring(&kvferrypb.KeyringRequest{})
	if err != nil || len(res.GetKeys()) != 1 || res.GetKeys()[0].GetId() != newID || res.GetGeneration() != 3 {
		t.Errorf("after a restart: %v, %v", res, err)
	}
	carry(t, "after a restart", bring{chunks: chunks(), reference: true}, p, openEngine(t, again))
}

// TestKeyringRefuses: what would make members deaf is not done, and the answer
// says who is in the way.
func TestKeyringRefuses(t *testing.T) {
	old, err := base64.StdEncoding.DecodeString(testKey)
	if err != nil {
		t.Fatal(err)
	}
	oldID := cluster.IDOf(old).String()
	key, newID := newKey(t)
	t.Run("one after the other", func(t *testing.T) {
		n := startNode(t, "alone", nil, [2]string{"cluster.keyring", testKey})
		for name, tt := range map[string]struct {
			req  *kvferrypb.KeyringRequest
			want kvferrypb.Failure_Code
		}{
			"a short key":         {&kvferrypb.KeyringRequest{Operation: kvferrypb.KeyringRequest_ADD, Key: key[:16]}, kvferrypb.Failure_INVALID},
			"use of the unknown":  {&kvferrypb.KeyringRequest{Operation: kvferrypb.KeyringRequest_USE, Id: newID}, kvferrypb.Failure_NOT_FOUND},
			"no id":               {&kvferrypb.KeyringRequest{Operation: kvferrypb.KeyringRequest_USE}, kvferrypb.Failure_INVALID},
			"removal of the used": {&kvferrypb.KeyringRequest{Operation: kvferrypb.KeyringRequest_REMOVE, Id: oldID}, kvferrypb.Failure_INVALID},
			"another operation":   {&kvferrypb.KeyringRequest{Operation: 9}, kvferrypb.Failure_INVALID},
		} {
			res, err := n.keyring(tt.req)
			if f := failureOf(t, err); f.GetCode() != tt.want {
				t.Errorf("%s: %v, %v, want %v", name, res, f, tt.want)
			} else if strings.Contains(f.GetMessage(), base64.StdEncoding.EncodeToString(key[:16])) {
				t.Errorf("%s: %v gives the key away", name, f)
			}
		}
	})
	t.Run("plain gossip", func(t *testing.T) {
		n := startNode(t, "alone", nil)
		res, err := n.keyring(&kvferrypb.KeyringRequest{Operation: kvferrypb.KeyringRequest_ADD, Key: key})
		if f := failureOf(t, err); f.GetCode() != kvferrypb.Failure_INVALID || !strings.Contains(f.GetMessage(), "set cluster.keyring") {
			t.Errorf("%v, %v", res, f)
		}
		if res, err := n.keyring(&kvferrypb.KeyringRequest{}); err != nil || len(res.GetKeys()) != 0 {
			t.Errorf("%v, %v", res, err)
		}
	})
	t.Run("a member in the way", func(t *testing.T) {
		n := startNode(t, "alone", nil, [2]string{"cluster.keyring", testKey})
		imp := startImpostor(t, n, nil)
		add := &kvferrypb.KeyringRequest{Operation: kvferrypb.KeyringRequest_ADD, Key: key}
		if res, err := n.keyring(add); err != nil {
			t.Fatalf("%v, %v", res, err)
		}
		imp.cluster.Close() // without a goodbye, and without the new ring for its next life
		await(t, "the impostor to be lost", func(ctx context.Context) error {
			res, err := n.admin.Members(ctx, &kvferrypb.MembersRequest{})
			if err != nil || len(res.GetItems()) != 1 {
				return fmt.Errorf("%v, %w", res, err)
			}
			return nil
		})
		third, thirdID := newKey(t)
		if res, err := n.keyring(&kvferrypb.KeyringRequest{Operation: kvferrypb.KeyringRequest_ADD, Key: third}); err != nil {
			t.Fatalf("%v, %v", res, err)
		}
		use := &kvferrypb.KeyringRequest{Operation: kvferrypb.KeyringRequest_USE, Id: thirdID}
		res, err := n.keyring(use)
		f := failureOf(t, err)
		if f.GetCode() != kvferrypb.Failure_BLOCKED || !strings.Contains(f.GetMessage(), "impostor") || f.GetRemedy() == "" {
			t.Errorf("%v, %v, want BLOCKED that names the impostor", res, f)
		}
		use.Force = true
		if res, err := n.keyring(use); err != nil || res.GetKeys()[0].GetId() != thirdID {
			t.Errorf("by force: %v, %v", res, err)
		}
	})
}

// TestJoinTwo: two that know nothing of each other become one cluster.
func TestJoinTwo(t *testing.T) {
	prefill, decode := startNode(t, "prefill", nil), startNode(t, "decode", nil)
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	res, err := decode.admin.Join(ctx, &kvferrypb.JoinRequest{Seeds: []string{prefill.Addresses().Gossip.String()}})
	if err != nil || res.GetMembers() != 2 {
		t.Fatalf("%v, %v, want two members", res, err)
	}
	awaitPeers(t, prefill, decode)
	carry(t, "r1", bring{chunks: chunks(), target: "decode"}, openEngine(t, prefill), openEngine(t, decode))

	many := make([]string, 65)
	for i := range many {
		many[i] = fmt.Sprintf("192.0.2.7:%d", i+1)
	}
	for name, seeds := range map[string][]string{
		"none": nil, "too many": many, "no port": {"host"}, "port 0": {"host:0"}, "no number": {"host:gossip"}, "garbage": {"a b:1"}, "no host": {":7900"},
		"itself": {decode.Addresses().Gossip.String()},
	} {
		start := time.Now()
		_, err := decode.admin.Join(ctx, &kvferrypb.JoinRequest{Seeds: seeds})
		if f := failureOf(t, err); f.GetCode() != kvferrypb.Failure_INVALID || f.GetRemedy() == "" {
			t.Errorf("%s: %v, want INVALID", name, f)
		}
		if took := time.Since(start); took > deadline/2 {
			t.Errorf("%s: it took %v", name, took)
		}
	}
	// Nobody there: the reason comes before the caller stops waiting for it.
	err = inTime(t, func(ctx context.Context) error {
		_, err := decode.admin.Join(ctx, &kvferrypb.JoinRequest{Seeds: []string{"127.0.0.1:1"}})
		return err
	})
	if f := failureOf(t, err); f.GetCode() != kvferrypb.Failure_DEADLINE || f.GetRemedy() == "" ||
		!strings.Contains(f.GetMessage(), "none of them lists us") || !strings.Contains(f.GetMessage(), "connection refused") {
		t.Errorf("%v, %v, want DEADLINE that says why", f, err)
	}
}

// inTime is the answer to a call that has a second, of which the node leaves a part
// for it to come back: once in time, also on a machine that may sleep over that.
func inTime(t testing.TB, call func(context.Context) error) (answer error) {
	t.Helper()
	await(t, "an answer in time", func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		answer = call(ctx)
		if answer != nil && client.CodeOf(answer) == kvferrypb.Failure_UNSPECIFIED { // not the node's
			return answer
		}
		return nil
	})
	return answer
}

// TestConfiguration: it is shown as it counts, without its secrets.
func TestConfiguration(t *testing.T) {
	n := startNode(t, "alone", nil, [2]string{"cluster.keyring", testKey}, [2]string{"timers.hold", "17s"})
	res, err := n.admin.Configuration(t.Context(), &kvferrypb.ConfigurationRequest{})
	if err != nil || strings.Contains(res.GetYaml(), testKey) {
		t.Fatalf("%v, %v", res, err)
	}
	key, err := base64.StdEncoding.DecodeString(testKey)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"name: alone", "hold: 17s", "max_hold: 15m0s", config.Key(key).ID()} {
		if !strings.Contains(res.GetYaml(), want) {
			t.Errorf("no %q in\n%s", want, res.GetYaml())
		}
	}
}

// TestDrainingMember: the others see who drains, and push nothing to it but what
// ends.
func TestDrainingMember(t *testing.T) {
	n := startNode(t, "prefill", nil)
	pushed := make(chan *kvferrypb.PushRequest, 16)
	imp := startDisguised(t, n, nil, disguise{pushed: pushed})
	awaitImpostor(t, n, false)
	p := openEngine(t, n)
	offer := func(r string) *kvferrypb.PublishResponse {
		p.ingest(r)
		p.write(r, 8)
		return p.publish(r, true, to("impostor"))
	}
	first := offer("before")
	if got := <-pushed; got.GetAnnouncement().GetRequest() != "before" {
		t.Fatalf("%v", got)
	}
	if _, err := callPeer(t, n).Lease(p.ctx(), &kvferrypb.LeaseRequest{
		Incarnation: uint64(n.Life().Incarnation), Reader: imp.truth.GetLife(), Items: []*kvferrypb.LeaseItem{{Sequence: first.GetPublication()}},
	}); err != nil {
		t.Fatal(err)
	}
	if err := imp.cluster.SetDraining(); err != nil {
		t.Fatal(err)
	}
	await(t, "the others to see that it drains", func(ctx context.Context) error {
		res, err := n.admin.Members(ctx, &kvferrypb.MembersRequest{})
		if err != nil {
			return err
		}
		for _, m := range res.GetItems() {
			if m.GetDraining() != (m.GetNode() == "impostor") {
				return fmt.Errorf("%v", m)
			}
		}
		return nil
	})
	offer("after")
	if _, err := n.admin.Revoke(p.ctx(), &kvferrypb.RevokeRequest{Publication: first.GetPublication()}); err != nil {
		t.Fatal(err)
	}
	if got := <-pushed; got.GetEnded().GetSequence() != first.GetPublication() {
		t.Errorf("%v was pushed to a node that drains", got)
	}
}
