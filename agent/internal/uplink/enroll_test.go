package uplink_test

import (
	"encoding/pem"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/internal/uplink"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestEnrollmentMakesAKeyThatStaysOnTheNode(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.False(t, n.creds.Enrolled())
	require.NoError(t, n.enroll(h))
	require.True(t, n.creds.Enrolled())
	for _, name := range []string{"node.key", "node.crt", "identity.json"} {
		info, err := os.Stat(filepath.Join(n.dir, name))
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600), info.Mode().Perm(), name)
	}
	again, err := uplink.OpenCredentials(n.dir)
	require.NoError(t, err)
	require.Equal(t, n.creds.Identity(), again.Identity())
	require.Equal(t, n.creds.Node(), again.Node())
	require.Equal(t, nodeID, again.Identity().NodeID)
	require.NoError(t, n.enroll(h), "an answer that was lost costs nothing: the same key gets the same id")
}

// An agent that ended between the files of its enrollment starts again and enrolls once more.
func TestAnEnrollmentThatWasCutOffBetweenItsFilesIsNone(t *testing.T) {
	h, n := newHub(t), openNode(t)
	inTheWay := filepath.Join(n.dir, "node.crt")
	require.NoError(t, os.Mkdir(inTheWay, 0o700))
	require.Error(t, n.enroll(h))
	again, err := uplink.OpenCredentials(n.dir)
	require.NoError(t, err)
	require.False(t, again.Enrolled())
	require.NoError(t, os.Remove(inTheWay))
	require.NoError(t, n.enroll(h))
}

func TestEnrollmentSaysWhatIsWrong(t *testing.T) {
	h := newHub(t)
	good := uplink.Enrollment{APIURL: h.api.URL, RootFingerprint: h.fingerprint(), JoinToken: joinToken, Hostname: "n"}
	taken := openNode(t)
	require.NoError(t, taken.enroll(h))
	for name, c := range map[string]struct {
		change func(*uplink.Enrollment)
		code   string
		says   string
		lasts  bool
	}{
		"wrong fingerprint": {
			func(e *uplink.Enrollment) { e.RootFingerprint = "sha256:" + strings.Repeat("0", 64) },
			"root_fingerprint_mismatch", "Compare the fingerprint", true,
		},
		"pin of no form": {
			func(e *uplink.Enrollment) { e.RootFingerprint = "sha256:00" }, "root_fingerprint_invalid",
			"gpuaas-hub trust show", true,
		},
		"no URL":     {func(e *uplink.Enrollment) { e.APIURL = "https://[" }, "api_url_invalid", "is not a URL", true},
		"used token": {func(*uplink.Enrollment) {}, "join_token_invalid", "Make a new one", true},
		"nobody there": {
			func(e *uplink.Enrollment) { e.APIURL = "https://127.0.0.1:1" }, "hub_unreachable",
			"Check the address", false,
		},
		"no token": {
			func(e *uplink.Enrollment) { e.JoinToken = "" }, "enrollment_incomplete", "--join-token-file",
			true,
		},
		"plain http": {func(e *uplink.Enrollment) { e.APIURL = "http://hub" }, "api_url_invalid", "https://", true},
	} {
		t.Run(name, func(t *testing.T) {
			n, e := openNode(t), good
			c.change(&e)
			err := uplink.Enroll(t.Context(), e, n.creds, n.store, n.clock)
			require.EqualValues(t, c.code, fault.As(err).Code)
			require.Contains(t, fault.As(err).Public, c.says)
			require.Equal(t, c.lasts, fault.IsPermanent(err))
			require.False(t, n.creds.Enrolled())
		})
	}
}

// Many nodes may join at once from one address.
func TestANodeThatIsLimitedByRateMayEnrollLater(t *testing.T) {
	h, n := newHub(t), openNode(t)
	h.limited = true
	err := n.enroll(h)
	require.True(t, fault.Is(err, fault.RateLimited))
	require.False(t, fault.IsPermanent(err))
	h.mu.Lock()
	h.limited = false
	h.mu.Unlock()
	require.NoError(t, n.enroll(h))
}

func TestAnEnrollingNodeShowsItsTokenOnlyToAHubThatThePinnedRootSigned(t *testing.T) {
	h, n := newHub(t), openNode(t)
	// Another hub: it lists the true root's public key beside its own, and signs with its own only.
	honest, thief := h.bundle, newKey(t)
	m := honest.Message()
	m.Roles[0].Keys = append(m.Roles[0].Keys, &protocol.PublicKey{KeyId: protocol.KeyID(pub(thief)), Ed25519: pub(thief)})
	forged, err := protocol.SignMessage(protocol.PayloadBundle, m, protocol.NewEd25519Signer(thief))
	require.NoError(t, err)
	h.bundle, err = protocol.VerifyBundle(forged, protocol.RootRoleDigest(m.Roles[0]))
	require.NoError(t, err)

	require.EqualValues(t, "root_fingerprint_mismatch", fault.As(n.enroll(h)).Code)
	require.False(t, n.store.Bundle().Valid())
	require.False(t, h.used, "the join token was shown")

	h.bundle = honest
	e := uplink.Enrollment{
		APIURL:          h.api.URL,
		RootFingerprint: protocol.RootRoleDigest(honest.Message().GetRoles()[0]),
		JoinToken:       joinToken,
		Hostname:        "n",
	}
	require.NoError(t, uplink.Enroll(t.Context(), e, n.creds, n.store, n.clock), "the digest of the root role is a pin, "+
		"too")
}

func TestCertificateThatIsOverWhenItIsIssuedIsNotRenewedWithoutEnd(t *testing.T) {
	h, n := newHub(t), openNode(t)
	h.mu.Lock()
	h.lifetime = -time.Hour
	h.mu.Unlock()
	require.NoError(t, n.enroll(h))
	renewals := func() int {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.renewals
	}
	n.run(uplink.Config{})
	require.Eventually(t, func() bool { return renewals() > 0 }, 20*time.Second, time.Millisecond)
	require.Never(t, func() bool { return renewals() > 1 }, 500*time.Millisecond, 10*time.Millisecond)
}

func TestRenewalShowsTheCertificateWhileItCounts(t *testing.T) {
	h, n := newHub(t), openNode(t)
	h.mu.Lock()
	h.lifetime, h.age = time.Hour, 50*time.Minute
	h.mu.Unlock()
	require.NoError(t, n.enroll(h))
	h.mu.Lock()
	h.age = 0
	h.mu.Unlock()
	n.run(uplink.Config{})
	require.Eventually(t, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.renewals > 0
	}, 20*time.Second, time.Millisecond)
	h.mu.Lock()
	defer h.mu.Unlock()
	require.Equal(t, h.renewals, h.shown)
}

func TestCertificateIsRenewedAlsoAfterItHasExpired(t *testing.T) {
	h, n := newHub(t), openNode(t)
	h.mu.Lock()
	h.lifetime = -time.Hour
	h.mu.Unlock()
	require.NoError(t, n.enroll(h))
	h.mu.Lock()
	h.lifetime = time.Hour
	h.mu.Unlock()
	n.run(uplink.Config{})
	h.next()
	h.mu.Lock()
	defer h.mu.Unlock()
	require.Equal(t, 1, h.renewals)
	again, err := uplink.OpenCredentials(n.dir)
	require.NoError(t, err)
	cert, err := again.Certificate()
	require.NoError(t, err)
	require.True(t, cert.Leaf.NotAfter.After(time.Now()))
}

// A renewed certificate counts although there is no room for it: else a full disk would end the node's session with the
// certificate of before, and nobody could end anything on the node any more.
func TestARenewedCertificateCountsOnAFullDisk(t *testing.T) {
	skip.Root(t, "mounts")
	dir := t.TempDir()
	require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, 0)) })
	creds, err := uplink.OpenCredentials(dir)
	require.NoError(t, err)
	h, id := newMesh(t), uplink.Identity{NodeID: nodeID, SessionAddr: "hub.example:1"}
	chain := func(life time.Duration) []byte {
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: h.certificate(h.nodeCACert, h.nodeCA,
			creds.PublicKey(), protocol.NodeSPIFFE(domain, nodeID), time.Now(), life)})
	}
	ends := func() time.Time {
		cert, err := creds.Certificate()
		require.NoError(t, err)
		return cert.Leaf.NotAfter
	}
	fill := func() {
		ballast, err := os.Create(filepath.Join(dir, "ballast"))
		require.NoError(t, err)
		for err == nil {
			_, err = ballast.Write(make([]byte, 4096))
		}
		require.ErrorIs(t, err, unix.ENOSPC)
		require.NoError(t, ballast.Close())
	}
	fill()
	require.EqualValues(t, "disk_full", fault.As(creds.Save(id, chain(time.Hour))).Code)
	require.False(t, creds.Enrolled(), "an enrollment is there whole or not at all")

	require.NoError(t, os.Remove(filepath.Join(dir, "ballast")))
	require.NoError(t, creds.Save(id, chain(time.Hour)))
	first := ends()
	fill()
	id.SessionAddr = "hub.example:2"
	require.NoError(t, creds.Save(id, chain(2*time.Hour)))
	require.True(t, ends().After(first))
	require.Equal(t, id, creds.Identity())

	creds, err = uplink.OpenCredentials(dir)
	require.NoError(t, err)
	require.Equal(t, first, ends(), "the next agent renews that of before")
	require.NoError(t, os.Remove(filepath.Join(dir, "ballast")))
	require.NoError(t, creds.Save(id, chain(3*time.Hour)))
	creds, err = uplink.OpenCredentials(dir)
	require.NoError(t, err)
	require.True(t, ends().After(first))
}

// A kernel mounts a disk with errors read-only. The node keeps its session on it, and with that its leases.
func TestARenewedCertificateCountsOnADiskThatIsReadOnly(t *testing.T) {
	skip.Root(t, "mounts")
	dir := t.TempDir()
	require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, 0)) })
	remount := func(flags uintptr) { require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT|flags, "")) }
	creds, err := uplink.OpenCredentials(dir)
	require.NoError(t, err)
	h, id := newMesh(t), uplink.Identity{NodeID: nodeID, SessionAddr: "hub.example:1"}
	chain := func(life time.Duration) []byte {
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: h.certificate(h.nodeCACert, h.nodeCA,
			creds.PublicKey(), protocol.NodeSPIFFE(domain, nodeID), time.Now(), life)})
	}
	remount(unix.MS_RDONLY)
	require.ErrorIs(t, creds.Save(id, chain(time.Hour)), unix.EROFS)
	require.False(t, creds.Enrolled(), "an enrollment is there whole or not at all")
	remount(0)
	require.NoError(t, creds.Save(id, chain(time.Hour)))
	first, err := creds.Certificate()
	require.NoError(t, err)
	remount(unix.MS_RDONLY)
	id.SessionAddr = "hub.example:2"
	require.NoError(t, creds.Save(id, chain(2*time.Hour)))
	renewed, err := creds.Certificate()
	require.NoError(t, err)
	require.True(t, renewed.Leaf.NotAfter.After(first.Leaf.NotAfter))
	require.Equal(t, id, creds.Identity())
}

func TestANodeWhoseTrustBundleIsGoneGetsItAgainByItsPin(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	require.NoError(t, n.store.Close())
	require.NoError(t, os.RemoveAll(filepath.Join(n.dir, "state")))
	var err error
	n.store, err = state.Open(filepath.Join(n.dir, "state"), state.Options{MinFreeBytes: 1})
	require.NoError(t, err)
	require.NoError(t, accept.Resume(n.store, n.creds.Identity().RootFingerprint, "", n.creds.Node()))
	source, err := state.MachineTime()
	require.NoError(t, err)
	n.clock = state.NewClock(n.store, source, time.Time{})
	require.False(t, n.store.Bundle().Valid())
	n.run(uplink.Config{AgentVersion: "test"})
	require.EqualValues(t, 1, h.next().hello.GetBundleVersion())
}

// The hub shows a certificate of the new authority at once, also to nodes that have not got the bundle that names it.
func TestLaw13ANodeThatWasAwayFollowsAReplacedAuthorityOfTheHub(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	h.hubCA, h.version = newKey(t), 2
	h.hubCert = selfSigned(t, h.hubCA)
	next, err := h.bundle.Succeed(h.bundleEnvelope())
	require.NoError(t, err)
	h.bundle = next
	h.certify()
	n.run(uplink.Config{AgentVersion: "test"})
	require.EqualValues(t, 2, h.next().hello.GetBundleVersion())
}

// What answers at the hub's address may show any bundle.
func TestANodeFollowsNoBundleThatItsRootHasNotSigned(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	asked := make(chan struct{}, 16)
	h.hubCA, h.root, h.version = newKey(t), newKey(t), 2
	h.hubCert = selfSigned(t, h.hubCA)
	other, err := protocol.VerifyBundle(h.bundleEnvelope(), protocol.Fingerprint(pub(h.root)))
	require.NoError(t, err)
	h.bundle = other
	h.certify()
	h.api.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.mux().ServeHTTP(w, r)
		asked <- struct{}{}
	})
	n.run(uplink.Config{AgentVersion: "test"})
	for range 2 { // at the second the node has judged the first answer
		select {
		case <-asked:
		case <-time.After(20 * time.Second):
			require.Fail(t, "the node does not ask for the bundle")
		}
	}
	require.EqualValues(t, 1, n.store.Bundle().Version())
	require.False(t, n.up.Status().Connected)
}
