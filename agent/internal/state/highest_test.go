package state_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io/fs"
	"math/big"
	mathrand "math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/accept/accepttest"
	"github.com/gpuaas/gpuaas/agent/internal/local"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/internal/uplink"
	"github.com/gpuaas/gpuaas/protocol"
)

// diskNode is a node with a whole data directory, whose agent was killed at several moments.
type diskNode struct {
	usedNode
	t    testing.TB
	live string
	s    *state.Store
}

// newDiskNode has accepted a state with a workload that the next one does not name any more, and a lease for it.
func newDiskNode(t *testing.T) *diskNode {
	t.Helper()
	n := &diskNode{t: t, live: t.TempDir()}
	n.mesh, n.wanted, n.machine = accepttest.New(t, time.Now().Add(-time.Minute)), map[string]*protocol.Workload{},
		newMachine()
	_, err := uplink.OpenCredentials(n.live)
	require.NoError(t, err)
	raw, err := os.ReadFile(filepath.Join(n.live, "node.key"))
	require.NoError(t, err)
	block, _ := pem.Decode(raw)
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	require.NoError(t, err)
	n.mesh.NodeKey = parsed.(ed25519.PrivateKey)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: accepttest.NodeID}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, n.mesh.NodeKey.Public(), n.mesh.NodeKey)
	require.NoError(t, err)
	identity, err := json.Marshal(uplink.Identity{
		NodeID: accepttest.NodeID, HubID: "hub", APIURL: "https://hub",
		RootFingerprint: n.mesh.Pin(),
	})
	require.NoError(t, err)
	for name, content := range map[string][]byte{
		"node.crt":      pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		"identity.json": identity,
	} {
		require.NoError(t, os.WriteFile(filepath.Join(n.live, name), content, 0o600))
	}
	n.s, err = n.start(n.live)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, n.s.Close()) })
	require.NoError(t, n.s.InitBundle(n.mesh.Bundle()))
	require.NoError(t, n.desire(1, n.mesh.Workload("web", 1), n.mesh.Workload("left", 1)))
	_, err = n.acceptor(n.s).Leases(n.mesh.Leases(n.s.Incarnation(), 1, "web", "left"))
	require.NoError(t, err)
	return n
}

func (n *diskNode) acceptor(s *state.Store) *accept.Acceptor {
	return accept.New(accept.Config{Store: s, Node: n.mesh.Node})
}

func (n *diskNode) desire(generation uint64, workloads ...*protocol.Workload) error {
	n.t.Helper()
	env, parts := n.mesh.Desired(generation, workloads...)
	_, err := n.acceptor(n.s).State(context.Background(), env, parts)
	return err
}

// leave accepts the next trust bundle, and a state that names one workload less.
func (n *diskNode) leave() {
	n.t.Helper()
	require.NoError(n.t, n.s.AcceptBundle(n.mesh.NextBundle(n.mesh.Now.Add(time.Second)).Envelope()))
	n.wanted["web"] = n.mesh.Workload("web", 1)
	require.NoError(n.t, n.desire(2, n.wanted["web"]))
	_, err := n.acceptor(n.s).Leases(n.mesh.Leases(n.s.Incarnation(), 2, "web"))
	require.NoError(n.t, err)
}

// start does what the agent does before anything runs.
func (n *diskNode) start(dir string) (*state.Store, error) {
	creds, err := uplink.OpenCredentials(dir)
	if err != nil {
		return nil, err
	}
	s, err := state.Open(filepath.Join(dir, "state"), state.Options{MinFreeBytes: 1, Key: creds.StoreKey()})
	if err != nil {
		return nil, err
	}
	if err = accept.Resume(s, creds.Identity().RootFingerprint, "", creds.Node()); err == nil {
		err = s.Identify(creds.Identity().NodeID, creds.Signer())
	}
	if err != nil {
		require.NoError(n.t, s.Close())
		return nil, err
	}
	return s, nil
}

// killed is the disk of the node as it would be after a kill.
func (n *diskNode) killed(from string) string {
	n.t.Helper()
	to := filepath.Join(n.t.TempDir(), "data")
	require.NoError(n.t, filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(from, path)
		if err != nil || e.IsDir() {
			return os.MkdirAll(filepath.Join(to, name), 0o700)
		}
		return copySparse(path, filepath.Join(to, name))
	}))
	return to
}

func copySparse(from, to string) error {
	raw, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	content := bytes.TrimRight(raw, "\x00")
	if err := os.WriteFile(to, content, 0o600); err != nil {
		return err
	}
	return os.Truncate(to, int64(len(raw)))
}

func (n *diskNode) highestFile(dir string) string { return filepath.Join(dir, "state", "highest") }

// replace puts the file of one disk into another.
func (n *diskNode) replace(from, to string) {
	n.t.Helper()
	require.NoError(n.t, copySparse(n.highestFile(from), n.highestFile(to)))
}

// A log of the database that is damaged in the right place leaves a store that is whole, and older.
func TestLaw01AStoreThatLostItsNewestStateStartsNothing(t *testing.T) {
	n := newDiskNode(t)
	before := n.killed(n.live)
	n.leave()
	after := n.killed(n.live)

	crashed := n.killed(after)
	n.replace(before, crashed)
	s, err := n.start(crashed)
	require.NoError(t, err)
	require.Empty(t, s.Unverified(), "a crash between the database and the file is no damage")
	require.EqualValues(t, 2, s.Accepted().Generation)
	require.NoError(t, s.Close())
	repaired, err := os.ReadFile(n.highestFile(crashed))
	require.NoError(t, err)
	last, err := os.ReadFile(n.highestFile(before))
	require.NoError(t, err)
	require.NotEqual(t, last, repaired, "the file follows the store")

	n.replace(after, before)
	s, err = n.start(before)
	require.NoError(t, err)
	require.Contains(t, s.Unverified(), "state")
	require.False(t, s.Bundle().Valid(), "a key may have been revoked since")
	m := newMachine()
	require.Contains(t, n.run(t, s, m).Conditions, "state_unverified")
	require.Empty(t, m.started)
	require.Equal(t, protocol.Nack_GENERATION_OLDER, protocol.RefusalOf(s.InitBundle(n.mesh.Bundles[0])))
	require.NoError(t, s.InitBundle(n.mesh.Bundle()))
	env, parts := n.mesh.Desired(1, n.mesh.Workload("left", 1))
	_, err = n.acceptor(s).State(context.Background(), env, parts)
	require.Equal(t, protocol.Nack_GENERATION_OLDER, protocol.RefusalOf(err))
	env, parts = n.mesh.Desired(3, n.wanted["web"])
	_, err = n.acceptor(s).State(context.Background(), env, parts)
	require.NoError(t, err)
	require.NotContains(t, s.Unverified(), "state")
	require.NoError(t, s.Close())
	s, err = n.start(before)
	require.NoError(t, err)
	require.Empty(t, s.Unverified())
	require.NoError(t, s.Close())
}

func TestLaw01AStoreWithoutItsHighestGenerationStartsNothing(t *testing.T) {
	n := newDiskNode(t)
	n.leave()
	for what, damage := range map[string]func(path string) error{
		"missing": os.Remove,
		"altered": func(path string) error { return os.WriteFile(path, make([]byte, 8<<10), 0o600) },
	} {
		dir := n.killed(n.live)
		require.NoError(t, damage(n.highestFile(dir)), what)
		for range 2 { // the next start does not take it for repaired
			s, err := n.start(dir)
			require.NoError(t, err, what)
			require.Contains(t, s.Unverified(), "state", what)
			m := newMachine()
			n.run(t, s, m)
			require.Empty(t, m.started, what)
			require.NoError(t, s.Close())
		}
		s, err := n.start(dir)
		require.NoError(t, err, what)
		env, parts := n.mesh.Desired(2, n.wanted["web"])
		_, err = n.acceptor(s).State(context.Background(), env, parts)
		require.NoError(t, err, "%s: the hub sends the same again", what)
		require.NoError(t, s.Close())
		s, err = n.start(dir)
		require.NoError(t, err, what)
		require.Empty(t, s.Unverified(), what)
		require.NoError(t, s.Close())
	}
}

// flipsPerFile bounds what the test takes; the log of the database, in which most of the bytes are, gets more.
const (
	flipsPerFile = 3
	flipsPerLog  = 16
)

func TestLaw01AnAlteredByteOfAnyFileStartsNothing(t *testing.T) {
	n := newDiskNode(t)
	policyFile := filepath.Join(t.TempDir(), "policy.yaml")
	require.NoError(t, os.WriteFile(policyFile, []byte("orgs: {only: [acme]}"), 0o600))
	creds, err := uplink.OpenCredentials(n.live)
	require.NoError(t, err)
	_, err = local.OpenPolicy(policyFile, filepath.Join(n.live, "policy.yaml"), creds.StoreKey())
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(policyFile, []byte("orgs: ["), 0o600))
	n.leave()
	killed := n.killed(n.live)
	closed := n.killed(killed)
	s, err := n.start(closed)
	require.NoError(t, err)
	require.NoError(t, s.Close())
	for _, disk := range []string{killed, closed} {
		require.Equal(t, 1, n.startsOnlyTheNewest(n.killed(disk), "untouched", policyFile),
			"what the newest state wants starts")
	}

	seed := mathrand.Uint64()
	t.Logf("seed %d", seed)
	random := mathrand.New(mathrand.NewPCG(seed, 0))
	for what, disk := range map[string]string{"after a kill": killed, "after an orderly end": closed} {
		for _, name := range n.files(disk) {
			n.flip(disk, name, what, policyFile, random)
		}
	}
}

func (n *diskNode) files(dir string) (names []string) {
	n.t.Helper()
	require.NoError(n.t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			names = append(names, path[len(dir)+1:])
		}
		return err
	}))
	for _, must := range []string{
		"node.key", "node.crt", "identity.json", "policy.yaml", "state/highest", "state/reserve",
		"state/MANIFEST",
	} {
		require.True(n.t, slices.Contains(names, must), must)
	}
	return names
}

func (n *diskNode) flip(disk, name, what, policyFile string, random *mathrand.Rand) {
	t := n.t
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(disk, name))
	require.NoError(t, err)
	used, flips := len(bytes.TrimRight(raw, "\x00")), flipsPerFile
	if used == 0 {
		return // it only takes space
	}
	if filepath.Ext(name) == ".mem" {
		flips = flipsPerLog
	}
	for range flips {
		at, bit := random.IntN(used), byte(1)<<random.IntN(8)
		what := fmt.Sprintf("%s: %s, byte %d of %d, bit %#x", what, name, at, used, bit)
		dir := n.killed(disk)
		file, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR, 0)
		require.NoError(t, err)
		_, err = file.WriteAt([]byte{raw[at] ^ bit}, int64(at))
		require.NoError(t, err)
		require.NoError(t, file.Close())
		n.startsOnlyTheNewest(dir, what, policyFile)
		require.NoError(t, os.RemoveAll(dir))
	}
}

// startsOnlyTheNewest runs the agent's start on the directory, and returns how many containers it has started.
func (n *diskNode) startsOnlyTheNewest(dir, what, policyFile string) int {
	t := n.t
	t.Helper()
	if creds, err := uplink.OpenCredentials(dir); err == nil {
		if owner, err := local.OpenPolicy(policyFile, filepath.Join(dir, "policy.yaml"), creds.StoreKey()); err == nil {
			rules, _ := owner.Read()
			require.Equal(t, []string{"acme"}, rules.Orgs.Only, what)
		}
	}
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), alteredEnv+"="+dir)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		require.Contains(t, stderr.String(), "badger", "%s: %v", what, err)
	}
	m := newMachine()
	for line := range strings.Lines(stdout.String()) {
		var started startedSpec
		require.NoError(t, json.Unmarshal([]byte(line), &started), what)
		service := &protocol.Service{}
		require.NoError(t, proto.Unmarshal(started.Service, service))
		m.started = append(m.started, runtime.Spec{MemberID: started.MemberID, Revision: started.Revision, Service: service})
	}
	n.onlySigned(t, m, what)
	return len(m.started)
}

// startedSpec is a line that alteredAgent prints.
type startedSpec struct {
	MemberID string
	Revision uint64
	Service  []byte
}

const alteredEnv = "GPUAAS_STATE_TEST_ALTERED"

// alteredAgent is a process of its own, because damage may end the one that reads it. It prints each start.
func alteredAgent(dir string) {
	n := &diskNode{t: die{}}
	s, err := n.start(dir)
	if err != nil {
		return // an agent that does not start starts nothing
	}
	m := newMachine()
	m.onStart = func(spec runtime.Spec) {
		service, err := proto.Marshal(spec.Service)
		require.NoError(n.t, err)
		require.NoError(n.t, json.NewEncoder(os.Stdout).Encode(startedSpec{spec.MemberID, spec.Revision, service}))
	}
	n.run(n.t, s, m)
}
