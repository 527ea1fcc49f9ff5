package local_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/ssh"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/local"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/internal/uplink"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

type observer struct{ report agent.Report }

func (o *observer) Report() agent.Report { return o.report }

// fixture is a server on a real socket over a real store, and a client of it.
type fixture struct {
	t       *testing.T
	client  *local.Client
	store   *state.Store
	creds   *uplink.Credentials
	seen    *observer
	machine *machine
	socket  string
	root    ed25519.PrivateKey
	signer  ed25519.PrivateKey
	// policy is the owner's.
	policy policy.Policy
	// policyErr is what is wrong with the owner's file.
	policyErr error
	// setBack is how far the machine's clock was set back.
	setBack atomic.Int64
}

func newFixture(t *testing.T,
	logs func(ctx context.Context, runID string, tailLines int, follow bool) (io.ReadCloser, error),
) *fixture {
	t.Helper()
	dir := t.TempDir()
	f := &fixture{t: t, seen: &observer{}, machine: &machine{}, socket: filepath.Join(dir, "run", "agent.sock")}
	var err error
	f.creds, err = uplink.OpenCredentials(dir)
	require.NoError(t, err)
	f.store, err = state.Open(filepath.Join(dir, "state"), state.Options{MinFreeBytes: 1})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.store.Close()) })
	_, f.root, err = ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	_, f.signer, err = ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	f.trust(1, f.signer)
	source, err := state.MachineTime()
	require.NoError(t, err)
	rtc := source.RTC
	source.RTC = func() time.Time { return rtc().Add(-time.Duration(f.setBack.Load())) }
	clock := state.NewClock(f.store, source, time.Time{})
	acceptor := accept.New(accept.Config{Store: f.store, Node: f.creds.Node})
	server := &local.Server{
		AgentVersion: "test",
		Store:        f.store,
		Clock:        clock,
		Reconciler:   f.seen,
		Session:      uplink.New(uplink.Config{}, f.creds, f.store, clock, acceptor),
		Acceptor:     acceptor,
		Logs:         logs,
		Images:       f.machine,
		Accelerators: f.machine,
		Node:         f.creds.Node,
		Policy:       func() (policy.Policy, error) { return f.policy, f.policyErr },
		Log:          slog.New(slog.DiscardHandler),
	}
	ctx, cancel := context.WithCancel(context.Background())
	l, err := local.Listen(ctx, f.socket, 0o660)
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- server.Serve(ctx, l) }()
	f.client = local.NewClient(f.socket)
	t.Cleanup(func() {
		f.client.Close()
		cancel()
		require.NoError(t, <-done)
	})
	return f
}

// trust puts a bundle in force under which one key signs states.
func (f *fixture) trust(version uint64, signer ed25519.PrivateKey, revoked ...string) {
	f.t.Helper()
	role := func(name string, k ed25519.PrivateKey) *protocol.Role {
		pub := k.Public().(ed25519.PublicKey)
		return &protocol.Role{Name: name, Threshold: 1, Keys: []*protocol.PublicKey{{
			KeyId:   protocol.KeyID(pub),
			Ed25519: pub,
		}}}
	}
	env, err := protocol.SignMessage(protocol.PayloadBundle, &protocol.TrustBundle{
		TrustDomain: "mesh.example", Version: version, Epoch: 1, IssuedAt: timestamppb.New(time.Now().Add(-time.Hour)),
		Roles: []*protocol.Role{role("root", f.root), role("state", signer)}, RevokedKeyIds: revoked,
	}, protocol.NewEd25519Signer(f.root))
	require.NoError(f.t, err)
	if version > 1 {
		require.NoError(f.t, f.store.AcceptBundle(env))
		return
	}
	b, err := protocol.VerifyBundle(env, protocol.Fingerprint(f.root.Public().(ed25519.PublicKey)))
	require.NoError(f.t, err)
	require.NoError(f.t, f.store.InitBundle(b))
}

// state is a document with one workload, signed by the key, as apply takes it.
func (f *fixture) state(signer ed25519.PrivateKey, generation uint64, keys ...*protocol.SSHKey) local.Document {
	f.t.Helper()
	part, err := proto.Marshal(&protocol.Workload{Id: "m1", AppSlug: "hello", AppVersion: "1.0.0", Revision: 1})
	require.NoError(f.t, err)
	sum := sha256.Sum256(part)
	me := f.creds.Node()
	env, err := protocol.SignMessage(protocol.PayloadState, &protocol.DesiredState{
		NodeId: me.ID, NodeKeySha256: me.KeySHA256[:], Epoch: 1, Generation: generation,
		Parts: []*protocol.PartRef{{Id: "m1", Sha256: sum[:]}}, SshKeys: keys,
	}, protocol.NewEd25519Signer(signer))
	require.NoError(f.t, err)
	raw, err := protocol.EnvelopeToJSON(env)
	require.NoError(f.t, err)
	return local.Document{Envelope: raw, Parts: [][]byte{part}}
}

func TestSocketBelongsToItsOwner(t *testing.T) {
	f := newFixture(t, nil)
	info, err := os.Stat(f.socket)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o660), info.Mode().Perm())
}

func TestStatusAndWorkloadsShowWhatIsKnown(t *testing.T) {
	f := newFixture(t, nil)
	_, err := f.client.Apply(t.Context(), f.state(f.signer, 7))
	require.NoError(t, err)
	require.NoError(t, f.store.OpenRun(state.Run{ID: "m1.1", MemberID: "m1", OpenedAt: time.Now()}))
	f.seen.report = agent.Report{Conditions: []string{"cgroup_v1"}, Workloads: []*protocol.WorkloadStatus{{
		MemberId: "m1", Status: protocol.WorkloadStatus_READY, Endpoints: []*protocol.PublishedEndpoint{{
			Name: "http", Protocol: "http",
			Host: "127.0.0.1", Port: 20000,
		}},
		Services: []*protocol.ServiceStatus{
			{Name: "migrate", Status: protocol.ServiceStatus_COMPLETED, ExitedAt: timestamppb.New(time.Unix(1, 0))},
			{Name: "db", Status: protocol.ServiceStatus_FAILED, Reason: protocol.WorkloadStatus_CRASH_LOOP, Restarts: 3},
		},
	}}}
	s, err := f.client.Status(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 7, s.Generation)
	require.Equal(t, "mesh.example", s.TrustDomain)
	require.Equal(t, []string{"cgroup_v1"}, s.Conditions)
	require.False(t, s.Hub.Connected)
	list, err := f.client.Workloads(t.Context())
	require.NoError(t, err)
	require.Equal(t, []local.Endpoint{{Name: "http", URL: "http://127.0.0.1:20000"}}, list[0].Endpoints)
	require.Equal(t, []string{"m1.1"}, list[0].RunIDs)
	require.Equal(t, "hello", list[0].AppSlug)
	require.Equal(t, []local.Service{
		{Name: "migrate", Status: "completed", ExitedAt: time.Unix(1, 0).UTC()},
		{Name: "db", Status: "failed", Reason: "crash_loop", Restarts: 3},
	}, list[0].Services)
}

func TestApplyGoesTheSameWayAsAHubsPush(t *testing.T) {
	f := newFixture(t, nil)
	applied, err := f.client.Apply(t.Context(), f.state(f.signer, 3))
	require.NoError(t, err)
	require.Equal(t, local.Applied{Document: "state", Epoch: 1, Generation: 3}, applied)

	bundle, err := protocol.EnvelopeToJSON(f.store.Bundle().Envelope())
	require.NoError(t, err)
	huge := `{"payloadType":"x","payload":"` + strings.Repeat("A", 9<<20) + `"}`
	for name, c := range map[string]struct {
		document local.Document
		code     string
	}{
		"older":       {f.state(f.signer, 2), protocol.Nack_GENERATION_OLDER.Text()},
		"forged":      {f.state(f.root, 4), protocol.Nack_SIGNATURE_INVALID.Text()},
		"oversized":   {local.Document{Envelope: []byte(huge)}, protocol.Nack_TOO_LARGE.Text()},
		"no envelope": {local.Document{Envelope: []byte(`"text"`)}, protocol.Nack_MALFORMED.Text()},
		"the part is another": {
			local.Document{Envelope: f.state(f.signer, 4).Envelope, Parts: [][]byte{[]byte("x")}},
			protocol.Nack_PART_DIGEST_MISMATCH.Text(),
		},
		"the bundle it has": {local.Document{Envelope: bundle}, ""},
	} {
		_, err := f.client.Apply(t.Context(), c.document)
		if c.code == "" {
			require.NoError(t, err, name)
			continue
		}
		require.EqualValues(t, c.code, fault.As(err).Code, name)
		require.EqualValues(t, 3, f.store.Accepted().Generation, name)
		s, err := f.client.Status(t.Context())
		require.NoError(t, err)
		require.Contains(t, s.Hub.LastRefusal, c.code, name)
	}
}

// machine is what the socket's commands change on the node.
type machine struct{ pinned, released string }

func (m *machine) Images(context.Context) ([]runtime.Image, error) {
	return []runtime.Image{{Name: "apps/hello/app@sha256:1", SizeBytes: 7, InUse: true, Pinned: m.pinned != ""}}, nil
}

func (m *machine) PinImage(_ context.Context, name string, pinned bool) error {
	if name == "" {
		return fault.New(fault.NotFound, "image_missing", "There is no such image.", nil)
	}
	if m.pinned = ""; pinned {
		m.pinned = name
	}
	return nil
}

func (m *machine) Release(_ context.Context, id string) error {
	if id != "GPU-a" {
		return fault.New(fault.Conflict, "accelerator_in_use", "A container has it.", nil)
	}
	m.released = id
	return nil
}

func TestImagesArePinnedAndAcceleratorsReleased(t *testing.T) {
	f := newFixture(t, nil)
	require.NoError(t, f.client.PinImage(t.Context(), local.Pin{Name: "apps/hello/app@sha256:1", Pinned: true}))
	list, err := f.client.Images(t.Context())
	require.NoError(t, err)
	require.Equal(t, []runtime.Image{{Name: "apps/hello/app@sha256:1", SizeBytes: 7, InUse: true, Pinned: true}}, list)
	require.True(t, fault.Is(f.client.PinImage(t.Context(), local.Pin{}), fault.NotFound))
	require.NoError(t, f.client.ReleaseAccelerator(t.Context(), "GPU-a"))
	require.Equal(t, "GPU-a", f.machine.released)
	err = f.client.ReleaseAccelerator(t.Context(), "GPU/b")
	require.True(t, fault.Is(err, fault.Conflict))
	require.EqualValues(t, "accelerator_in_use", fault.As(err).Code)
}

func TestVerifyNamesWhatWouldNotBeAcceptedAgain(t *testing.T) {
	f := newFixture(t, nil)
	_, err := f.client.Apply(t.Context(), f.state(f.signer, 1))
	require.NoError(t, err)
	checks, err := f.client.Verify(t.Context())
	require.NoError(t, err)
	verdicts := map[string]bool{}
	for _, c := range checks {
		verdicts[c.Subject] = c.OK
	}
	require.Equal(t, map[string]bool{"trust bundle": true, "desired state": true, "m1": false}, verdicts,
		"m1 has no publisher's manifest")
}

func TestLogsStream(t *testing.T) {
	logs := func(_ context.Context, runID string, _ int, follow bool) (io.ReadCloser, error) {
		if follow {
			return nil, errors.New("not now")
		}
		return io.NopCloser(strings.NewReader("log of " + runID)), nil
	}
	f := newFixture(t, logs)
	require.NoError(t, f.store.OpenRun(state.Run{ID: "m1.1", MemberID: "m1", OpenedAt: time.Now()}))
	r, err := f.client.Logs(t.Context(), local.LogsQuery{MemberID: "m1", TailLines: 1})
	require.NoError(t, err)
	all, err := io.ReadAll(r)
	require.NoError(t, err)
	require.NoError(t, r.Close())
	require.Equal(t, "log of m1.1", string(all))
	_, err = f.client.Logs(t.Context(), local.LogsQuery{MemberID: "m1", TailLines: 1, Follow: true})
	require.True(t, fault.Is(err, fault.Internal))
	_, err = f.client.Logs(t.Context(), local.LogsQuery{MemberID: "other", TailLines: 1})
	require.True(t, fault.Is(err, fault.NotFound))
	for _, lines := range []int{-1, 0, 10_001} {
		_, err = f.client.Logs(t.Context(), local.LogsQuery{MemberID: "m1", TailLines: lines})
		require.True(t, fault.Is(err, fault.Malformed), "%d lines: %v", lines, err)
		require.Contains(t, fault.As(err).Public, "1 to 10000")
	}
}

func TestClientSaysWhenNoAgentIsThere(t *testing.T) {
	_, err := local.NewClient(filepath.Join(t.TempDir(), "none.sock")).Status(t.Context())
	require.EqualValues(t, "agent_away", fault.As(err).Code)
}

// Keys come from the signed state that the node has accepted, as the owner's policy of this moment allows.
func TestKeysAreThoseOfTheAcceptedState(t *testing.T) {
	f := newFixture(t, nil)
	lines, err := f.client.Keys(t.Context(), "ubuntu")
	require.NoError(t, err)
	require.Empty(t, lines, "a node without a state lets nobody in")

	newKey := func() ssh.PublicKey {
		public, _, err := ed25519.GenerateKey(rand.Reader)
		require.NoError(t, err)
		key, err := ssh.NewPublicKey(public)
		require.NoError(t, err)
		return key
	}
	key := newKey()
	named := &protocol.SSHKey{
		AllocationId: "a1", ProjectId: "p1", OrgSlug: "acme", ManagedBy: "operator", User: "ubuntu",
		PublicKey: key.Marshal(),
	}
	expired := proto.CloneOf(named)
	expired.PublicKey, expired.ExpiresAt = newKey().Marshal(), timestamppb.New(time.Now().Add(-time.Minute))
	_, err = f.client.Apply(t.Context(), f.state(f.signer, 1, named, expired))
	require.NoError(t, err)
	lines, err = f.client.Keys(t.Context(), "ubuntu")
	require.NoError(t, err)
	require.Empty(t, lines, "the owner has allowed no account")
	f.policy = policy.Policy{SSHUsers: []string{"ubuntu"}}
	lines, err = f.client.Keys(t.Context(), "ubuntu")
	require.NoError(t, err)
	require.Equal(t, []string{strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key)))}, lines)
	f.setBack.Store(int64(time.Hour))
	lines, err = f.client.Keys(t.Context(), "ubuntu")
	require.NoError(t, err)
	require.Len(t, lines, 1, "a key that has expired does not come back with the machine's clock")
	lines, err = f.client.Keys(t.Context(), "no/such account")
	require.NoError(t, err)
	require.Empty(t, lines)

	_, err = f.client.Apply(t.Context(), f.state(f.signer, 2))
	require.NoError(t, err)
	lines, err = f.client.Keys(t.Context(), "ubuntu")
	require.NoError(t, err)
	require.Empty(t, lines, "a key that the state does not name any more")
}

// letIn has the accepted state name a key for ubuntu, an account that the owner allows.
func (f *fixture) letIn() {
	f.t.Helper()
	f.policy = policy.Policy{SSHUsers: []string{"ubuntu"}}
	public, _, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(f.t, err)
	key, err := ssh.NewPublicKey(public)
	require.NoError(f.t, err)
	_, err = f.client.Apply(f.t.Context(), f.state(f.signer, 1, &protocol.SSHKey{
		AllocationId: "a1", ProjectId: "p1", OrgSlug: "acme", ManagedBy: "operator", User: "ubuntu",
		PublicKey: key.Marshal(),
	}))
	require.NoError(f.t, err)
}

// A typing error in the owner's policy locks nobody out: the policy before it is in force.
func TestKeysOutlastAnErrorInThePolicy(t *testing.T) {
	f := newFixture(t, nil)
	f.letIn()
	f.policyErr = errors.New("line 1: no such field")
	lines, err := f.client.Keys(t.Context(), "ubuntu")
	require.NoError(t, err)
	require.Len(t, lines, 1)
}

// A state counts after its key was rotated out, as a hub that is away cannot sign it anew; not once it is revoked.
func TestKeysOutlastTheRotationOfTheStatesKey(t *testing.T) {
	f := newFixture(t, nil)
	f.letIn()

	_, next, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	f.trust(2, next)
	lines, err := f.client.Keys(t.Context(), "ubuntu")
	require.NoError(t, err)
	require.Len(t, lines, 1)

	f.trust(3, next, protocol.KeyID(f.signer.Public().(ed25519.PublicKey)))
	lines, err = f.client.Keys(t.Context(), "ubuntu")
	require.Error(t, err)
	require.Empty(t, lines)
}

// A killed agent leaves its socket. Any other file at the path is there by mistake, and stays.
func TestTheSocketReplacesNothingButASocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	require.NoError(t, os.WriteFile(path, []byte("whole"), 0o600))
	_, err := local.Listen(t.Context(), path, 0o600)
	require.EqualValues(t, "socket_unusable", fault.As(err).Code)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "whole", string(text))
	require.NoError(t, os.Remove(path))
	for range 2 {
		l, err := local.Listen(t.Context(), path, 0o600)
		require.NoError(t, err)
		l.(*net.UnixListener).SetUnlinkOnClose(false)
		require.NoError(t, l.Close())
	}
}
