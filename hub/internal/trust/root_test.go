package trust

import (
	"crypto/x509"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/protocol"
)

const second = "another horse, another battery"

func opened(t *testing.T, o InitOptions) *Keys {
	t.Helper()
	keys, err := Open(o.DataDir)
	require.NoError(t, err)
	return keys
}

// follow leads a node from one bundle to the hub's newest, as the hub does: a step at a time.
func follow(t *testing.T, keys *Keys, node protocol.Bundle) (protocol.Bundle, int) {
	t.Helper()
	steps := 0
	for node.Version() < keys.Bundle().Version() {
		next, err := node.Succeed(keys.BundleAfter(node.Version()).Envelope())
		require.NoError(t, err)
		node = next
		steps++
	}
	return node, steps
}

func TestANodeFollowsRotatedRoots(t *testing.T) {
	o, result := initialised(t)
	node := opened(t, o).Bundle()
	oldPin := opened(t, o).RootFingerprint()
	require.Equal(t, result.RootFingerprint, oldPin)

	rotate := func(present RootKeys, file, retire string, at time.Duration) string {
		next := filepath.Join(o.OfflineDir, file)
		_, err := SignNext(NextBundle{
			DataDir: o.DataDir, Root: present, Add: []NewRootKey{{next, second}}, Retire: retire, Now: start.Add(at),
			ScryptWorkFactor: 8,
		})
		require.NoError(t, err)
		return next
	}
	first := RootKey(result.RootKeyFile, passphrase)
	one := rotate(first, "root-b.age", strings.TrimPrefix(oldPin, protocol.FingerprintPrefix), time.Hour)
	middle := opened(t, o)
	rotate(RootKey(one, second), "root-c.age", strings.TrimPrefix(middle.RootFingerprint(), protocol.FingerprintPrefix),
		2*time.Hour)
	keys := opened(t, o)

	_, err := node.Succeed(keys.Bundle().Envelope())
	require.Error(t, err, "the newest bundle is not signed by the root that the node knows")
	now, steps := follow(t, keys, node)
	require.Equal(t, 2, steps)
	require.Equal(t, keys.Bundle().Version(), now.Version())
	require.True(t, now.Revoked(strings.TrimPrefix(oldPin, protocol.FingerprintPrefix)))

	_, err = protocol.VerifyBundle(keys.Bundle().Envelope(), keys.RootFingerprint())
	require.NoError(t, err, "a node that joins now pins the present root")
	_, err = protocol.VerifyBundle(keys.Bundle().Envelope(), oldPin)
	require.Error(t, err)

	// The retired root signs nothing any more.
	_, err = SignNext(NextBundle{DataDir: o.DataDir, Root: first, Now: start.Add(3 * time.Hour)})
	require.Equal(t, "root_key_wrong", code(t, err))
}

func TestANodeFollowsARootThatBecomesTwoOfThree(t *testing.T) {
	o, result := initialised(t)
	node := opened(t, o).Bundle()
	files := []string{result.RootKeyFile, filepath.Join(o.OfflineDir, "root-2.age"), filepath.Join(o.OfflineDir,
		"root-3.age")}
	_, err := SignNext(NextBundle{
		DataDir: o.DataDir, Root: RootKey(files[0], passphrase), Add: []NewRootKey{{files[1], second}, {files[2], second}},
		Threshold: 2, Now: start.Add(time.Hour), ScryptWorkFactor: 8,
	})
	require.NoError(t, err)
	keys := opened(t, o)
	require.True(t, strings.HasPrefix(keys.RootFingerprint(), protocol.RootRolePrefix), "of several keys, each may be "+
		"the one that did not sign")
	_, err = protocol.VerifyBundle(keys.Bundle().Envelope(), keys.RootFingerprint())
	require.NoError(t, err)
	node, _ = follow(t, keys, node)

	state := keys.State().KeyID()
	_, err = Revoke(RevokeOptions{
		DataDir: o.DataDir, Root: RootKey(files[0], passphrase), KeyID: state,
		Now: start.Add(2 * time.Hour),
	})
	require.Equal(t, "root_key_wrong", code(t, err), "one of them is not enough")
	two := RootKeys{Files: files[1:], Passphrases: []string{second}}
	_, err = Revoke(RevokeOptions{DataDir: o.DataDir, Root: two, KeyID: state, Now: start.Add(2 * time.Hour)})
	require.NoError(t, err, "any two of them, without the first")

	// The first key is lost: the two others replace it.
	lost := strings.TrimPrefix(result.RootFingerprint, protocol.FingerprintPrefix)
	_, err = SignNext(NextBundle{
		DataDir: o.DataDir, Root: two, Add: []NewRootKey{{filepath.Join(o.OfflineDir, "root-4.age"), second}}, Retire: lost,
		Now: start.Add(3 * time.Hour), ScryptWorkFactor: 8,
	})
	require.NoError(t, err)
	keys = opened(t, o)
	require.NoError(t, CheckRoot(two))
	node, steps := follow(t, keys, node)
	require.Equal(t, 1, steps, "the two keys that stay sign for the way in one step")
	require.True(t, node.Revoked(lost))
	require.Equal(t, 2, node.RootThreshold())
}

func TestARootThatCannotSignIsNotMade(t *testing.T) {
	o, result := initialised(t)
	root, spare := RootKey(result.RootKeyFile, passphrase), filepath.Join(o.OfflineDir, "spare.age")
	only := strings.TrimPrefix(result.RootFingerprint, protocol.FingerprintPrefix)
	for name, c := range map[string]struct {
		options NextBundle
		code    string
	}{
		"more must sign than there are": {
			NextBundle{Add: []NewRootKey{{spare, second}}, Threshold: 3},
			"root_role_invalid",
		},
		"without any key":           {NextBundle{Retire: only}, "root_role_invalid"},
		"a key that is no root key": {NextBundle{Retire: strings.Repeat("0", 64)}, "key_id_invalid"},
		"inside the data directory": {
			NextBundle{Add: []NewRootKey{{filepath.Join(o.DataDir, "r.age"), second}}},
			"offline_dir_inside",
		},
		"over an existing file": {
			NextBundle{Add: []NewRootKey{{result.RootKeyFile, second}}},
			"key_file_exists",
		},
		"a short passphrase": {
			NextBundle{Add: []NewRootKey{{spare, "123456789012345"}}},
			"passphrase_short",
		},
		"a short life": {NextBundle{BundleTTL: time.Hour}, "bundle_lifetime_invalid"},
	} {
		t.Run(name, func(t *testing.T) {
			c.options.DataDir, c.options.Root, c.options.Now, c.options.ScryptWorkFactor = o.DataDir, root, start, 8
			_, err := SignNext(c.options)
			require.Equal(t, c.code, code(t, err))
			require.EqualValues(t, 1, opened(t, o).Bundle().Version())
			require.NoFileExists(t, spare, "a key that no bundle names")
		})
	}
}

// Nodes order versions part by part, and a part that is no number is above all numbers.
func TestALowestVersionThatNoManifestHasIsRefused(t *testing.T) {
	o, result := initialised(t)
	next := NextBundle{DataDir: o.DataDir, Root: RootKey(result.RootKeyFile, passphrase), Now: start}
	for name, floor := range map[string]*protocol.MinVersion{
		"a comma":           {AppSlug: "jupyter", Version: "1,3"},
		"a space behind it": {AppSlug: "jupyter", Version: "1.3.0 "},
		"an operator":       {AppSlug: "jupyter", Version: ">=1.3.0"},
		"upper case":        {AppSlug: "Jupyter", Version: "1.3.0"},
		"a repository":      {AppSlug: "org/acme/jupyter", Version: "1.3.0"},
		"no slug":           {Version: "1.3.0"},
	} {
		next.MinVersion = floor
		_, err := SignNext(next)
		require.Equal(t, "min_version_invalid", code(t, err), name)
	}
	require.EqualValues(t, 1, opened(t, o).Bundle().Version())
	next.MinVersion = &protocol.MinVersion{AppSlug: "jupyter-lab", Version: "v1.3.0-rc.1+gpu"}
	_, err := SignNext(next)
	require.NoError(t, err)
}

func TestABundleHasAnEndThatRenewalMoves(t *testing.T) {
	o, result := initialised(t)
	keys := opened(t, o)
	end, soon, ok := keys.BundleEnd(start)
	require.True(t, ok)
	require.False(t, soon)
	require.Equal(t, start.Add(DefaultBundleTTL), end)
	_, soon, _ = keys.BundleEnd(end.Add(-bundleWarning + time.Hour))
	require.True(t, soon)
	require.False(t, keys.Bundle().Expired(end))
	require.True(t, keys.Bundle().Expired(end.Add(time.Second)))

	later := end.Add(time.Hour)
	_, err := SignNext(NextBundle{
		DataDir: o.DataDir, Root: RootKey(result.RootKeyFile, passphrase), Now: later,
		BundleTTL: 30 * 24 * time.Hour,
	})
	require.NoError(t, err)
	changed, err := keys.Reload()
	require.NoError(t, err)
	require.True(t, changed)
	end, _, _ = keys.BundleEnd(later)
	require.Equal(t, later.Add(30*24*time.Hour), end)
	require.Empty(t, keys.Bundle().Message().GetRevokedKeyIds(), "the same keys")
}

func TestTheHubsAuthorityVouchesOnlyForTheHubsNames(t *testing.T) {
	for name, c := range map[string]struct {
		names  []string
		may    []string
		others []string
	}{
		"without names": {
			may:    []string{"localhost", "127.0.0.1", "::1", "10.1.2.3", "192.168.1.1", "hub.gpuaas.test", "this-machine"},
			others: []string{"example.com", "bank.example", "8.8.8.8", "2001:db8::1", "gpuaas.test.example", "evilgpuaas.test"},
		},
		"with names": {
			names:  []string{"hub.example.com", "*.apps.example.com", "203.0.113.7"},
			may:    []string{"localhost", "127.0.0.1", "hub.example.com", "203.0.113.7", "a.apps.example.com", "this-machine"},
			others: []string{"example.com", "10.1.2.3", "203.0.113.8", "hub.gpuaas.test", "evilhub.example.com"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			base := t.TempDir()
			o := InitOptions{
				DataDir: filepath.Join(base, "data"), OfflineDir: filepath.Join(base, "offline"), TrustDomain: "gpuaas.test",
				Passphrase: passphrase,
				Now:        start, ScryptWorkFactor: 8, ServerNames: c.names, Hostname: "This-Machine",
			}
			_, err := Init(o)
			require.NoError(t, err)
			keys := opened(t, o)
			require.True(t, keys.current().hubCA.certificate.PermittedDNSDomainsCritical)
			verify := func(name string) error {
				template := &x509.Certificate{NotBefore: start, NotAfter: start.Add(time.Hour)}
				if ip := net.ParseIP(name); ip != nil {
					template.IPAddresses = []net.IP{ip}
				} else {
					template.DNSNames = []string{name}
				}
				hub := keys.current().hubCA
				der, err := hub.sign(template, hub.key.Public())
				require.NoError(t, err)
				cert, err := x509.ParseCertificate(der)
				require.NoError(t, err)
				_, err = cert.Verify(x509.VerifyOptions{
					Roots: keys.Bundle().HubCAs(), CurrentTime: start,
					KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
				})
				return err
			}
			for _, name := range c.may {
				require.NoError(t, verify(name), name)
				require.True(t, keys.Permits(name), name)
			}
			for _, name := range c.others {
				require.Error(t, verify(name), name)
				require.False(t, keys.Permits(name), name)
			}
			issued, err := keys.IssueHubCertificate(append(c.may, c.others...), time.Hour, start)
			require.NoError(t, err)
			_, err = issued.Leaf.Verify(x509.VerifyOptions{
				Roots: keys.Bundle().HubCAs(), CurrentTime: start,
				KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
			})
			require.NoError(t, err, "names that are not permitted are left out, so that the others work")
		})
	}
}

func TestAReplacedHubAuthorityKeepsItsNamesUnlessOthersAreGiven(t *testing.T) {
	o, result := initialised(t)
	revoke := func(at time.Duration, names ...string) *Keys {
		_, err := Revoke(RevokeOptions{
			DataDir: o.DataDir, Root: RootKey(result.RootKeyFile, passphrase),
			KeyID: opened(t, o).Bundle().Keys(protocol.RoleHubCA)[0].GetKeyId(),
			Now:   start.Add(at), ServerNames: names,
		})
		require.NoError(t, err)
		return opened(t, o)
	}
	require.False(t, revoke(time.Hour).Permits("hub.example.com"))
	require.True(t, revoke(2*time.Hour, "hub.example.com").Permits("hub.example.com"))
	require.False(t, revoke(3*time.Hour).Permits("10.0.0.1"))
}

func TestACatalogKeyIsWrittenOnlyForABundleThatIsSigned(t *testing.T) {
	o, result := initialised(t)
	_, stranger := initialised(t)
	keys, err := Open(o.DataDir)
	require.NoError(t, err)
	revoke := RevokeOptions{
		DataDir: o.DataDir, Root: RootKey(stranger.RootKeyFile, passphrase), Now: start,
		KeyID:            keys.Bundle().Keys(protocol.RoleCatalog)[0].GetKeyId(),
		CatalogKeyFile:   filepath.Join(o.OfflineDir, "catalog-2.age"),
		ScryptWorkFactor: 8,
	}
	_, err = Revoke(revoke)
	require.Equal(t, "root_key_wrong", code(t, err))
	require.NoFileExists(t, revoke.CatalogKeyFile)
	revoke.Root = RootKey(result.RootKeyFile, passphrase)
	bundle, err := Revoke(revoke)
	require.NoError(t, err)
	fresh, err := readOffline(revoke.CatalogKeyFile, protocol.RoleCatalog, passphrase)
	require.NoError(t, err)
	require.True(t, HasCatalogKey(bundle, protocol.NewEd25519Signer(fresh).KeyID()))
}

// A bundle that names a catalog key which nobody has would leave the hub without any.
func TestACatalogKeyThatCannotBeWrittenReplacesNone(t *testing.T) {
	o, result := initialised(t)
	before := opened(t, o).Bundle()
	revoke := RevokeOptions{
		DataDir: o.DataDir, Root: RootKey(result.RootKeyFile, passphrase), Now: start,
		KeyID:            before.Keys(protocol.RoleCatalog)[0].GetKeyId(),
		CatalogKeyFile:   filepath.Join(o.OfflineDir, "catalog-2.age"),
		ScryptWorkFactor: 8,
	}
	require.NoError(t, os.WriteFile(revoke.CatalogKeyFile, []byte("another's"), 0o600))
	_, err := Revoke(revoke)
	require.Equal(t, "catalog_key_not_written", code(t, err))
	require.Equal(t, before.Version(), opened(t, o).Bundle().Version())
	require.NoError(t, os.Remove(revoke.CatalogKeyFile))
	_, err = Revoke(revoke)
	require.NoError(t, err)
}
