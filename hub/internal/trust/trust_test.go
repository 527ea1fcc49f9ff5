package trust

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const passphrase = "correct horse battery"

var start = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

func initialised(t *testing.T) (InitOptions, InitResult) {
	t.Helper()
	base := t.TempDir()
	o := InitOptions{
		DataDir: filepath.Join(base, "data"), OfflineDir: filepath.Join(base, "offline"), TrustDomain: "gpuaas.test",
		Passphrase: passphrase, Now: start, ScryptWorkFactor: 8,
	}
	result, err := Init(o)
	require.NoError(t, err)
	return o, result
}

func code(t *testing.T, err error) string {
	t.Helper()
	require.Error(t, err)
	return string(fault.As(err).Code)
}

func TestInitMakesKeysThatSignWhatNodesAccept(t *testing.T) {
	o, result := initialised(t)
	keys, err := Open(o.DataDir)
	require.NoError(t, err)
	require.Equal(t, result.HubID, keys.HubID())
	require.Equal(t, "gpuaas.test", keys.TrustDomain())

	bundle, err := protocol.VerifyBundle(keys.Bundle().Envelope(), result.RootFingerprint)
	require.NoError(t, err)
	me := protocol.NodeIdentity{ID: "n1"}
	env, err := protocol.SignMessage(protocol.PayloadState, &protocol.DesiredState{
		NodeId:        "n1",
		NodeKeySha256: me.KeySHA256[:], Epoch: 1, Generation: 1,
	}, keys.State())
	require.NoError(t, err)
	_, err = protocol.VerifyState(env, bundle, me)
	require.NoError(t, err)
	env, err = protocol.SignMessage(protocol.PayloadLeases, &protocol.LeaseBatch{NodeId: "n1", Epoch: 1}, keys.Lease())
	require.NoError(t, err)
	_, err = protocol.VerifyLeases(env, bundle, me)
	require.NoError(t, err)
}

func TestResetKeyIsTheSameAtEachStartOfAHubAndOfNoOther(t *testing.T) {
	o, _ := initialised(t)
	key := func(o InitOptions) [32]byte {
		keys, err := Open(o.DataDir)
		require.NoError(t, err)
		key, err := keys.ResetKey()
		require.NoError(t, err)
		require.NotZero(t, key)
		return key
	}
	first, second := key(o), key(o)
	require.Equal(t, first, second)
	another, _ := initialised(t)
	require.NotEqual(t, key(o), key(another))
}

func TestPrivateFilesAreForTheirOwnerOnly(t *testing.T) {
	o, result := initialised(t)
	private := 0
	for _, dir := range []string{o.DataDir, o.OfflineDir} {
		require.NoError(t, filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			require.NoError(t, err)
			info, err := entry.Info()
			require.NoError(t, err)
			if entry.IsDir() && path != o.DataDir {
				require.Equal(t, fs.FileMode(0o700), info.Mode().Perm(), path)
			} else if filepath.Ext(path) == ".key" || filepath.Ext(path) == ".age" {
				private++
				require.Equal(t, fs.FileMode(0o600), info.Mode().Perm(), path)
			}
			return nil
		}))
	}
	require.Equal(t, 7, private, "state, lease, token, node-ca, hub-ca, root, catalog")
	for _, path := range []string{result.RootKeyFile, result.CatalogKeyFile} {
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		require.NotContains(t, string(data), pemPrivateKey)
	}
}

func TestOpenRefusesKeysThatOthersCanRead(t *testing.T) {
	o, _ := initialised(t)
	paths, err := filepath.Glob(filepath.Join(o.DataDir, trustDirName, "state-*.key"))
	require.NoError(t, err)
	require.NoError(t, os.Chmod(paths[0], 0o644))
	_, err = Open(o.DataDir)
	require.Equal(t, "keys_unreadable", code(t, err))
}

func TestHubDoesNotStartWithRootInside(t *testing.T) {
	o, result := initialised(t)
	data, err := os.ReadFile(result.RootKeyFile)
	require.NoError(t, err)
	deep := filepath.Join(o.DataDir, "backup")
	require.NoError(t, os.Mkdir(deep, 0o700))
	stray := filepath.Join(deep, "renamed.txt")
	require.NoError(t, os.WriteFile(stray, data, 0o600))
	_, err = Open(o.DataDir)
	require.Equal(t, "root_key_in_data_dir", code(t, err))

	plain, err := readOffline(result.RootKeyFile, protocol.RoleRoot, passphrase)
	require.NoError(t, err)
	der, err := x509.MarshalPKCS8PrivateKey(plain)
	require.NoError(t, err)
	decrypted := pem.EncodeToMemory(&pem.Block{
		Type:    pemOfflineKey,
		Headers: map[string]string{headerRole: protocol.RoleRoot}, Bytes: der,
	})
	for name, content := range map[string][]byte{
		"decrypted": decrypted,
		"armoured":  []byte("-----BEGIN AGE ENCRYPTED FILE-----\n" + base64.StdEncoding.EncodeToString(data)),
	} {
		require.NoError(t, os.WriteFile(stray, content, 0o600))
		_, err = Open(o.DataDir)
		require.Equal(t, "root_key_in_data_dir", code(t, err), name)
	}

	require.NoError(t, os.Remove(stray))
	require.NoError(t, os.Symlink(result.RootKeyFile, stray))
	_, err = Open(o.DataDir)
	require.Equal(t, "root_key_in_data_dir", code(t, err))
}

func TestInitRefuses(t *testing.T) {
	base := t.TempDir()
	good := InitOptions{
		DataDir: filepath.Join(base, "data"), OfflineDir: filepath.Join(base, "off"),
		TrustDomain: "gpuaas.test", Passphrase: passphrase, Now: start,
	}
	link := filepath.Join(base, "link")
	require.NoError(t, os.Mkdir(good.DataDir, 0o700))
	require.NoError(t, os.Symlink(good.DataDir, link))
	for name, c := range map[string]struct {
		change func(*InitOptions)
		code   string
	}{
		"offline inside": {
			func(o *InitOptions) { o.OfflineDir = filepath.Join(o.DataDir, "off") },
			"offline_dir_inside",
		},
		"offline is the data dir":    {func(o *InitOptions) { o.OfflineDir = o.DataDir }, "offline_dir_inside"},
		"short passphrase":           {func(o *InitOptions) { o.Passphrase = "123456789012345" }, "passphrase_short"},
		"a name that is none":        {func(o *InitOptions) { o.ServerNames = []string{"hub example"} }, "tls_name_invalid"},
		"trust domain without a dot": {func(o *InitOptions) { o.TrustDomain = "localhost" }, "trust_domain_invalid"},
		"trust domain in upper case": {func(o *InitOptions) { o.TrustDomain = "Gpuaas.test" }, "trust_domain_invalid"},
		"offline inside after a link": {
			func(o *InitOptions) { o.OfflineDir = filepath.Join(link, "off") },
			"offline_dir_inside",
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := good
			c.change(&o)
			_, err := Init(o)
			require.Equal(t, c.code, code(t, err))
		})
	}
	o, _ := initialised(t)
	_, err := Init(o)
	require.Equal(t, "already_initialised", code(t, err), "a second init must not overwrite keys")
	_, err = Open(t.TempDir())
	require.Equal(t, "not_initialised", code(t, err))
}

func nodeCSR(t *testing.T, key any) string {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{DNSNames: []string{"evil.example"}},
		key)
	require.NoError(t, err)
	return string(pem.EncodeToMemory(&pem.Block{Type: pemCertificateRequest, Bytes: der}))
}

func TestNodeCertificateCarriesOnlyTheSPIFFEID(t *testing.T) {
	o, _ := initialised(t)
	keys, err := Open(o.DataDir)
	require.NoError(t, err)
	_, node, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	csr, pub, err := ParseNodeCSR(nodeCSR(t, node))
	require.NoError(t, err)
	require.Equal(t, node.Public(), pub)
	issued, err := keys.IssueNodeCertificate(csr, "0198-node", time.Hour, start)
	require.NoError(t, err)
	block, _ := pem.Decode([]byte(issued.CertificatePEM))
	cert, err := x509.ParseCertificate(block.Bytes)
	require.NoError(t, err)
	require.Empty(t, cert.DNSNames, "names in the request must not be taken over")
	_, err = cert.Verify(x509.VerifyOptions{
		Roots: keys.Bundle().NodeCAs(), CurrentTime: start,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	require.NoError(t, err)
	id, err := protocol.PeerID(cert, "gpuaas.test", protocol.KindNode)
	require.NoError(t, err)
	require.Equal(t, "0198-node", id)
	_, err = cert.Verify(x509.VerifyOptions{
		Roots: keys.Bundle().HubCAs(), CurrentTime: start,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	})
	require.Error(t, err, "a node must not pass as a hub")
}

func TestCSRMustBeEd25519(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	for name, csr := range map[string]string{
		"ecdsa": nodeCSR(t, key), "text": "hello", "empty": "",
		"long": string(make([]byte, MaxCSRBytes+1)),
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := ParseNodeCSR(csr)
			require.Equal(t, "csr_invalid", code(t, err))
			require.Equal(t, "/csr_pem", fault.As(err).Fields[0].Pointer)
		})
	}
}

func TestNodeAuthorityCannotVouchForHostsOrOtherDomains(t *testing.T) {
	o, _ := initialised(t)
	keys, err := Open(o.DataDir)
	require.NoError(t, err)
	pub, _, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	for name, template := range map[string]*x509.Certificate{
		"dns":          {DNSNames: []string{"hub.example"}},
		"ip":           {IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}},
		"other domain": {URIs: nil, DNSNames: nil},
	} {
		if name == "other domain" {
			template.URIs = append(template.URIs, protocol.NodeSPIFFE("evil.test", "n1"))
		}
		template.NotBefore, template.NotAfter = start, start.Add(time.Hour)
		der, err := keys.current().nodeCA.sign(template, pub)
		require.NoError(t, err)
		cert, err := x509.ParseCertificate(der)
		require.NoError(t, err)
		_, err = cert.Verify(x509.VerifyOptions{
			Roots: keys.Bundle().NodeCAs(), CurrentTime: start,
			KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
		})
		require.Error(t, err, name)
	}
}

func TestHTTPSCertificateServesItsNamesAndIsRenewedAtHalfLife(t *testing.T) {
	o, result := initialised(t)
	keys, err := Open(o.DataDir)
	require.NoError(t, err)
	now := start
	server := &Server{Keys: keys, Names: []string{"127.0.0.1", "hub.gpuaas.test"}, TTL: time.Hour, Now: func() time.Time {
		return now
	}}

	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		MinVersion: tls.VersionTLS13, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return server.Certificate()
		},
	})
	require.NoError(t, err)
	web := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter,
		_ *http.Request,
	) {
		_, _ = io.WriteString(w, "here")
	})}
	go func() { _ = web.Serve(listener) }()
	defer func() { require.NoError(t, web.Close()) }()
	ca, err := os.ReadFile(result.CAFile)
	require.NoError(t, err)
	pool := x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM(ca))
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{
		MinVersion: tls.VersionTLS13,
		RootCAs:    pool, Time: func() time.Time { return now },
	}}}
	defer client.CloseIdleConnections()
	response, err := client.Get("https://" + listener.Addr().String())
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())

	first, err := server.Certificate()
	require.NoError(t, err)
	require.Equal(t, MinServerTTL, first.Leaf.NotAfter.Sub(start), "an hour is raised to the lowest lifetime")
	now = start.Add(11 * time.Hour)
	same, err := server.Certificate()
	require.NoError(t, err)
	require.Same(t, first, same)
	now = start.Add(13 * time.Hour)
	renewed, err := server.Certificate()
	require.NoError(t, err)
	require.NotSame(t, first, renewed)
	require.Contains(t, renewed.Leaf.DNSNames, "hub.gpuaas.test")
}

func publisher(t *testing.T) (ed25519.PrivateKey, []byte) {
	t.Helper()
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	der, err := x509.MarshalPKIXPublicKey(pub)
	require.NoError(t, err)
	return key, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
}

func TestDelegationLetsAPublisherSignItsOwnRepositories(t *testing.T) {
	o, result := initialised(t)
	keys, err := Open(o.DataDir)
	require.NoError(t, err)
	key, pub := publisher(t)
	good := DelegateOptions{
		CatalogKeyFile: result.CatalogKeyFile, Passphrase: passphrase, PublisherPEM: pub,
		OrgSlug: "acme", Prefixes: []string{"org/acme/"}, Now: start, TTL: time.Hour,
	}
	delegation, err := Delegate(good)
	require.NoError(t, err)
	env, err := protocol.Sign(protocol.PayloadManifest, []byte("app: {}"), protocol.NewEd25519Signer(key))
	require.NoError(t, err)
	_, who, err := protocol.VerifyPublisher(env, delegation, keys.Bundle(), start)
	require.NoError(t, err)
	require.Equal(t, "acme", who.OrgSlug)
	_, _, err = protocol.VerifyPublisher(env, delegation, keys.Bundle(), start.Add(2*time.Hour))
	require.Equal(t, protocol.Nack_EXPIRED, protocol.RefusalOf(err))

	for name, c := range map[string]struct {
		change func(*DelegateOptions)
		code   string
	}{
		"foreign prefix":   {func(o *DelegateOptions) { o.Prefixes = []string{"org/other/"} }, "prefix_invalid"},
		"no slash":         {func(o *DelegateOptions) { o.Prefixes = []string{"org/acme"} }, "prefix_invalid"},
		"no prefix":        {func(o *DelegateOptions) { o.Prefixes = nil }, "prefix_missing"},
		"wrong passphrase": {func(o *DelegateOptions) { o.Passphrase = "not the right one" }, "passphrase_wrong"},
		"root key":         {func(o *DelegateOptions) { o.CatalogKeyFile = result.RootKeyFile }, "key_file_wrong"},
		"no key":           {func(o *DelegateOptions) { o.PublisherPEM = []byte("x") }, "publisher_key_invalid"},
	} {
		t.Run(name, func(t *testing.T) {
			bad := good
			c.change(&bad)
			_, err := Delegate(bad)
			require.Equal(t, c.code, code(t, err))
		})
	}
}

func TestRevokedStateKeyIsReplacedAndRefusedByItsName(t *testing.T) {
	o, result := initialised(t)
	keys, err := Open(o.DataDir)
	require.NoError(t, err)
	old, lease := keys.State(), keys.Lease().KeyID()
	held := keys.Bundle()

	_, err = Revoke(RevokeOptions{
		DataDir: o.DataDir, Root: RootKey(result.RootKeyFile, passphrase), KeyID: old.KeyID(),
		Now: start.Add(time.Hour),
	})
	require.NoError(t, err)
	changed, err := keys.Reload()
	require.NoError(t, err)
	require.True(t, changed)
	require.Equal(t, uint64(2), keys.Bundle().Version())
	require.NotEqual(t, old.KeyID(), keys.State().KeyID())
	require.Equal(t, lease, keys.Lease().KeyID(), "other keys stay")
	changed, err = keys.Reload()
	require.NoError(t, err)
	require.False(t, changed)

	// A node that held bundle 1 accepts bundle 2, then refuses the old key by name and takes the new one.
	node, err := held.Succeed(keys.Bundle().Envelope())
	require.NoError(t, err)
	me := protocol.NodeIdentity{ID: "n1"}
	state := &protocol.DesiredState{NodeId: "n1", NodeKeySha256: me.KeySHA256[:], Epoch: 1, Generation: 2}
	env, err := protocol.SignMessage(protocol.PayloadState, state, old)
	require.NoError(t, err)
	_, err = protocol.VerifyState(env, node, me)
	require.Equal(t, protocol.Nack_KEY_REVOKED, protocol.RefusalOf(err))
	env, err = protocol.SignMessage(protocol.PayloadState, state, keys.State())
	require.NoError(t, err)
	_, err = protocol.VerifyState(env, node, me)
	require.NoError(t, err)

	paths, err := filepath.Glob(filepath.Join(o.DataDir, trustDirName, "state-*.key"))
	require.NoError(t, err)
	require.Len(t, paths, 1, "the revoked key is gone from the disk")
	_, err = Revoke(RevokeOptions{
		DataDir: o.DataDir, Root: RootKey(result.RootKeyFile, passphrase), KeyID: old.KeyID(),
		Now: start,
	})
	require.Equal(t, "key_revoked_already", code(t, err))
}

// The id of a publisher's key is in no bundle, so that only its form tells that it was mistyped.
func TestAKeyIDInAnotherFormRevokesNothing(t *testing.T) {
	o, result := initialised(t)
	keys := opened(t, o)
	id := keys.State().KeyID()
	for name, given := range map[string]string{
		"upper case": strings.ToUpper(id),
		"no hex":     strings.Repeat("g", len(id)),
		"a space":    id[1:] + " ",
		"too short":  id[1:],
	} {
		_, err := Revoke(RevokeOptions{
			DataDir: o.DataDir, Root: RootKey(result.RootKeyFile, passphrase), KeyID: given, Now: start.Add(time.Hour),
		})
		require.Equal(t, "key_id_invalid", code(t, err), name)
	}
	require.Equal(t, keys.Bundle().Version(), opened(t, o).Bundle().Version())
}

func TestRevokingAnAuthorityReplacesTheClientsFile(t *testing.T) {
	o, result := initialised(t)
	keys, err := Open(o.DataDir)
	require.NoError(t, err)
	before, err := os.ReadFile(result.CAFile)
	require.NoError(t, err)
	server := &Server{Keys: keys, TTL: time.Hour, Now: func() time.Time { return start }}
	first, err := server.Certificate()
	require.NoError(t, err)
	id := keys.Bundle().Keys(protocol.RoleHubCA)[0].GetKeyId()
	_, err = Revoke(RevokeOptions{
		DataDir: o.DataDir, Root: RootKey(result.RootKeyFile, passphrase), KeyID: id,
		Now: start,
	})
	require.NoError(t, err)
	_, err = keys.Reload()
	require.NoError(t, err)
	after, err := os.ReadFile(result.CAFile)
	require.NoError(t, err)
	require.NotEqual(t, before, after)
	second, err := server.Certificate()
	require.NoError(t, err)
	require.NotSame(t, first, second, "a certificate of the old authority is not shown any longer")
	_, err = second.Leaf.Verify(x509.VerifyOptions{
		Roots: keys.Bundle().HubCAs(), CurrentTime: start,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
	require.NoError(t, err)
}

func TestForgedBundleOnDiskIsRefused(t *testing.T) {
	o, _ := initialised(t)
	keys, err := Open(o.DataDir)
	require.NoError(t, err)
	_, stranger, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	forged := keys.Bundle().Message()
	forged.Version = 2
	env, err := protocol.SignMessage(protocol.PayloadBundle, forged, protocol.NewEd25519Signer(stranger))
	require.NoError(t, err)
	require.NoError(t, writeBundle(filepath.Join(o.DataDir, trustDirName), env, 2))
	_, err = Open(o.DataDir)
	require.Equal(t, "keys_unreadable", code(t, err))
	_, err = keys.Reload()
	require.Error(t, err)
	require.Equal(t, uint64(1), keys.Bundle().Version(), "a running hub keeps what it has")
}

func TestOnlyAnAuthorityHasAnEnd(t *testing.T) {
	o, _ := initialised(t)
	keys, err := Open(o.DataDir)
	require.NoError(t, err)
	for role, is := range map[string]bool{
		protocol.RoleNodeCA: true, protocol.RoleHubCA: true, protocol.RoleState: false, protocol.RoleRoot: false,
	} {
		end, ok := keys.AuthorityExpiry(role)
		require.Equal(t, is, ok, role)
		require.Equal(t, is, end.After(start), role)
	}
}
