package artifact_test

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func TestPushedImageIsInspectedAndItsSignatureJudged(t *testing.T) {
	b := newBench(t)
	signer, key := newSigner(t)
	_, stranger := newSigner(t)
	var last int64
	pushed, err := appkit.Push(t.Context(), image(t, "one"), b.intent(t, repository), signer, func(done, _ int64) {
		last = done
	})
	require.NoError(t, err)
	require.Positive(t, last)

	img, err := b.registry.Inspect(t.Context(), repository, pushed.Digest)
	require.NoError(t, err)
	require.Equal(t, pushed.MediaType, img.MediaType)
	require.Equal(t, []string{"linux/amd64"}, img.Platforms)
	require.Positive(t, img.SizeBytes)
	require.Len(t, img.Signatures, 1)

	now := *b.now.Load()
	state, evidence := artifact.Judge(img, repository, pushed.Digest, []artifact.SignerKey{stranger, key}, now)
	require.Equal(t, artifact.Verified, state)
	require.Equal(t, key.KeyID, evidence[0].KeyID)
	state, evidence = artifact.Judge(img, repository, pushed.Digest, []artifact.SignerKey{stranger}, now)
	require.Equal(t, artifact.Rejected, state)
	require.Empty(t, evidence)
	state, _ = artifact.Judge(img, "org/evil/demo/runtime", pushed.Digest, []artifact.SignerKey{key}, now)
	require.Equal(t, artifact.Rejected, state)
	img.Signatures = nil
	state, _ = artifact.Judge(img, repository, pushed.Digest, []artifact.SignerKey{key}, now)
	require.Equal(t, artifact.Unverified, state)

	_, err = b.registry.Inspect(t.Context(), repository, "sha256:"+strings.Repeat("0", 64))
	require.Equal(t, artifact.CodeNotPushed, fault.As(err).Code)
	_, err = b.registry.Inspect(t.Context(), "org/acme/demo/other", pushed.Digest)
	require.Equal(t, artifact.CodeNotPushed, fault.As(err).Code)
	_, err = b.registry.Inspect(t.Context(), repository, "latest")
	require.True(t, fault.Is(err, fault.Malformed))
}

// A platform is stored and shown: text that no database takes, and much of it, is refused with its reason.
func TestAnImageWithoutAPlatformIsRefused(t *testing.T) {
	b := newBench(t)
	signer, _ := newSigner(t)
	for _, os := range []string{"", "linux\x00", strings.Repeat("l", 100), "windows"} {
		one, err := mutate.ConfigFile(image(t, "one"), &v1.ConfigFile{OS: os, Architecture: "amd64"})
		require.NoError(t, err)
		pushed, err := appkit.Push(t.Context(), one, b.intent(t, repository), signer, nil)
		require.NoError(t, err)
		_, err = b.registry.Inspect(t.Context(), repository, pushed.Digest)
		require.Equal(t, artifact.CodeUnsupported, fault.As(err).Code, "%q", os)
	}
}

// sizedLayer is a layer of which its manifest says another size.
type sizedLayer struct {
	v1.Layer
	size int64
}

func (l sizedLayer) Size() (int64, error) { return l.size, nil }

// A node fetches as many bytes as the manifest says, and refuses what is longer or shorter.
func TestAnImageWithALayerOfAnotherSizeIsRefused(t *testing.T) {
	b := newBench(t)
	signer, _ := newSigner(t)
	layers, err := image(t, "more").Layers()
	require.NoError(t, err)
	for _, size := range []int64{-1, 1, 1 << 62} {
		one, err := mutate.AppendLayers(image(t, "one"), sizedLayer{layers[0], size})
		require.NoError(t, err)
		pushed, err := appkit.Push(t.Context(), one, b.intent(t, repository), signer, nil)
		require.NoError(t, err)
		_, err = b.registry.Inspect(t.Context(), repository, pushed.Digest)
		require.Equal(t, artifact.CodeUnsupported, fault.As(err).Code, size)
	}
}

func TestIntentCredentialPushesToItsOneRepositoryWhileItIsOpen(t *testing.T) {
	b := newBench(t)
	signer, _ := newSigner(t)
	target := b.intent(t, repository)

	elsewhere := target
	elsewhere.Repository = "org/acme/demo/other"
	_, err := appkit.Push(t.Context(), image(t, "x"), elsewhere, signer, nil)
	require.EqualValues(t, "push_refused", fault.As(err).Code)
	wrong := target
	wrong.Password += "x"
	_, err = appkit.Push(t.Context(), image(t, "x"), wrong, signer, nil)
	require.EqualValues(t, "push_refused", fault.As(err).Code)
	stolenName := target
	stolenName.Username = "intent-0192f0c0-0000-7000-8000-000000000002"
	_, err = appkit.Push(t.Context(), image(t, "x"), stolenName, signer, nil)
	require.EqualValues(t, "push_refused", fault.As(err).Code)

	b.ended.Store(true)
	_, err = appkit.Push(t.Context(), image(t, "x"), target, signer, nil)
	require.EqualValues(t, "push_refused", fault.As(err).Code)
	b.ended.Store(false)
	b.at(time.Now().Add(artifact.IntentLifetime + time.Minute))
	_, err = appkit.Push(t.Context(), image(t, "x"), target, signer, nil)
	require.EqualValues(t, "push_refused", fault.As(err).Code)
	b.at(time.Now())
	_, err = appkit.Push(t.Context(), image(t, "x"), target, signer, nil)
	require.NoError(t, err)
}

func TestLayerOfAnotherRepositoryIsNotMounted(t *testing.T) {
	b := newBench(t)
	signer, _ := newSigner(t)
	secret := image(t, "secret of another org")
	_, err := appkit.Push(t.Context(), secret, b.intent(t, "org/other/app/runtime"), signer, nil)
	require.NoError(t, err)
	layers, err := secret.Layers()
	require.NoError(t, err)
	digest, err := layers[0].Digest()
	require.NoError(t, err)

	mine := b.intent(t, repository)
	c := b.client(t, "")
	status, tok := token(t, c, b.host, mine.Username, mine.Password, "repository:"+repository+
		":pull,push repository:org/other/app/runtime:pull")
	require.Equal(t, http.StatusOK, status)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost,
		"https://"+b.host+"/v2/"+repository+"/blobs/uploads/?mount="+digest.String()+"&from=org/other/app/runtime", nil)
	require.NoError(t, err)
	req.Header.Set("Authorization", "Bearer "+tok)
	res, err := c.Do(req)
	require.NoError(t, err)
	defer res.Body.Close()
	require.Equal(t, http.StatusUnauthorized, res.StatusCode)
}

// A client asks for the token that the answer names.
func TestARefusalNamesTheScopeThatItNeeds(t *testing.T) {
	b := newBench(t)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
		"https://"+b.host+"/v2/"+repository+"/manifests/x", nil)
	require.NoError(t, err)
	res, err := b.client(t, "").Do(req)
	require.NoError(t, err)
	defer res.Body.Close()
	require.Equal(t, http.StatusUnauthorized, res.StatusCode)
	require.Contains(t, res.Header.Get("WWW-Authenticate"), `scope="repository:`+repository+`:pull"`)
}

func TestNodeCredentialWorksOnThatNodesConnectionOnly(t *testing.T) {
	b := newBench(t)
	signer, _ := newSigner(t)
	pushed, err := appkit.Push(t.Context(), image(t, "x"), b.intent(t, repository), signer, nil)
	require.NoError(t, err)
	credential, err := b.registry.NodeCredential(nodeID, repository, *b.now.Load())
	require.NoError(t, err)
	require.Equal(t, b.host, credential.GetRegistryHost())
	user, password := credential.GetUsername(), credential.GetPassword()
	url := "https://" + b.host + "/v2/" + repository + "/manifests/" + pushed.Digest
	scope := "repository:" + repository + ":pull,push"

	node := b.client(t, nodeID)
	status, tok := token(t, node, b.host, user, password, scope)
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, http.StatusOK, get(t, node, url, tok))
	for name, thief := range map[string]*http.Client{"no certificate": b.client(t, ""), "another node": b.client(t,
		otherNodeID)} {
		t.Run(name, func(t *testing.T) {
			status, _ := token(t, thief, b.host, user, password, scope)
			require.Equal(t, http.StatusUnauthorized, status)
			require.Equal(t, http.StatusUnauthorized, get(t, thief, url, tok))
		})
	}
	t.Run("another repository", func(t *testing.T) {
		_, tok := token(t, node, b.host, user, password, "repository:org/acme/demo/other:pull")
		require.Equal(t, http.StatusUnauthorized, get(t, node, strings.Replace(url, "runtime", "other", 1), tok))
	})
	t.Run("push", func(t *testing.T) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+b.host+"/v2/"+repository+
			"/blobs/uploads/", nil)
		require.NoError(t, err)
		req.Header.Set("Authorization", "Bearer "+tok)
		res, err := node.Do(req)
		require.NoError(t, err)
		defer res.Body.Close()
		require.Equal(t, http.StatusUnauthorized, res.StatusCode)
	})
	t.Run("the credential is no token", func(t *testing.T) {
		require.Equal(t, http.StatusUnauthorized, get(t, node, url, password))
	})
	t.Run("later", func(t *testing.T) {
		b.at(time.Now().Add(20 * time.Minute))
		defer b.at(time.Now())
		status, _ := token(t, node, b.host, user, password, scope)
		require.Equal(t, http.StatusUnauthorized, status)
		require.Equal(t, http.StatusUnauthorized, get(t, node, url, tok))
	})
}

func TestATokenOfABannedNodeEndsWithTheBan(t *testing.T) {
	b := newBench(t)
	signer, _ := newSigner(t)
	pushed, err := appkit.Push(t.Context(), image(t, "x"), b.intent(t, repository), signer, nil)
	require.NoError(t, err)
	url := "https://" + b.host + "/v2/" + repository + "/manifests/" + pushed.Digest
	pull := func(node string) (tokenStatus, pullStatus func() int) {
		credential, err := b.registry.NodeCredential(node, repository, *b.now.Load())
		require.NoError(t, err)
		c := b.client(t, node)
		ask := func() (int, string) {
			return token(t, c, b.host, credential.GetUsername(), credential.GetPassword(), "repository:"+repository+":pull")
		}
		status, tok := ask()
		require.Equal(t, http.StatusOK, status)
		return func() int { status, _ := ask(); return status }, func() int { return get(t, c, url, tok) }
	}
	bannedToken, bannedPull := pull(nodeID)
	otherToken, otherPull := pull(otherNodeID)
	require.Equal(t, http.StatusOK, bannedPull())

	banned := nodeID
	b.shutOut.Store(&banned)
	require.Equal(t, http.StatusUnauthorized, bannedPull(), "the token it has, on the connection it has")
	require.Equal(t, http.StatusUnauthorized, bannedToken(), "another token for the credential it has")
	require.Equal(t, http.StatusOK, otherPull())
	require.Equal(t, http.StatusOK, otherToken())
}

func TestNoUploadBeginsAfterTheEndOfItsIntent(t *testing.T) {
	b := newBench(t)
	target := b.intent(t, repository)
	c := b.client(t, "")
	status, tok := token(t, c, b.host, target.Username, target.Password, "repository:"+repository+":pull,push")
	require.Equal(t, http.StatusOK, status)
	send := func(method, url, body string) (int, string) {
		req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
		require.NoError(t, err)
		req.Header.Set("Authorization", "Bearer "+tok)
		req.Header.Set("Content-Type", "application/octet-stream")
		res, err := c.Do(req)
		require.NoError(t, err)
		defer res.Body.Close()
		at, err := res.Location()
		if err != nil {
			return res.StatusCode, ""
		}
		return res.StatusCode, at.String()
	}
	base := "https://" + b.host + "/v2/" + repository
	status, began := send(http.MethodPost, base+"/blobs/uploads/", "")
	require.Equal(t, http.StatusAccepted, status)

	b.ended.Store(true)
	status, _ = send(http.MethodPost, base+"/blobs/uploads/", "")
	require.Equal(t, http.StatusForbidden, status)
	status, _ = send(http.MethodPut, base+"/manifests/latest", "{}")
	require.Equal(t, http.StatusForbidden, status)
	status, _ = send(http.MethodPatch, began, "x")
	require.Equal(t, http.StatusAccepted, status, "an upload that began before goes on")
}

func TestNodeTokenByOAuthForm(t *testing.T) {
	b := newBench(t)
	credential, err := b.registry.NodeCredential(nodeID, repository, *b.now.Load())
	require.NoError(t, err)
	form := url.Values{
		"grant_type": {"password"}, "username": {credential.GetUsername()}, "password": {credential.GetPassword()},
		"scope": {"repository:" + repository + ":pull"}, "service": {"x"},
	}
	res, err := b.client(t, nodeID).PostForm("https://"+b.host+artifact.TokenPath, form)
	require.NoError(t, err)
	defer res.Body.Close()
	require.Equal(t, http.StatusOK, res.StatusCode)
	form.Set("grant_type", "refresh_token")
	res, err = b.client(t, nodeID).PostForm("https://"+b.host+artifact.TokenPath, form)
	require.NoError(t, err)
	defer res.Body.Close()
	require.Equal(t, http.StatusBadRequest, res.StatusCode)
}

func TestPeoplePullWhatTheyMayRead(t *testing.T) {
	b := newBench(t)
	signer, _ := newSigner(t)
	pushed, err := appkit.Push(t.Context(), image(t, "x"), b.intent(t, repository), signer, nil)
	require.NoError(t, err)
	allowed := repository
	b.mayPull.Store(&allowed)
	c := b.client(t, "")
	url := "https://" + b.host + "/v2/" + repository + "/manifests/" + pushed.Digest

	status, tok := token(t, c, b.host, "someone", goodToken, "repository:"+repository+":pull,push")
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, http.StatusOK, get(t, c, url, tok))
	require.Equal(t, http.StatusUnauthorized, get(t, c, url, ""))
	require.Equal(t, http.StatusUnauthorized, get(t, c, "https://"+b.host+"/v2/_catalog", tok))
	status, _ = token(t, c, b.host, "someone", "bad", "repository:"+repository+":pull")
	require.Equal(t, http.StatusUnauthorized, status)
	none := "org/other/app/runtime"
	b.mayPull.Store(&none)
	_, tok = token(t, c, b.host, "someone", goodToken, "repository:"+repository+":pull")
	require.Equal(t, http.StatusUnauthorized, get(t, c, url, tok))
}

func TestUnfinishedUploadsArePurged(t *testing.T) {
	b := newBench(t)
	n, err := b.registry.PurgeUploads(t.Context(), time.Now())
	require.NoError(t, err)
	require.Zero(t, n)
	mine := b.intent(t, repository)
	c := b.client(t, "")
	_, tok := token(t, c, b.host, mine.Username, mine.Password, "repository:"+repository+":pull,push")
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+b.host+"/v2/"+repository+
		"/blobs/uploads/", nil)
	require.NoError(t, err)
	req.Header.Set("Authorization", "Bearer "+tok)
	res, err := c.Do(req)
	require.NoError(t, err)
	defer res.Body.Close()
	require.Equal(t, http.StatusAccepted, res.StatusCode)
	require.True(t, strings.HasPrefix(res.Header.Get("Location"), "/v2/"), res.Header.Get("Location"))
	n, err = b.registry.PurgeUploads(t.Context(), time.Now().Add(-time.Hour))
	require.NoError(t, err)
	require.Zero(t, n)
	n, err = b.registry.PurgeUploads(t.Context(), time.Now().Add(time.Hour))
	require.NoError(t, err)
	require.Positive(t, n)
}

// A directory on a read-only file system is what ProtectSystem=strict makes of one that is not in ReadWritePaths=.
func TestADirectoryThatCannotBeWrittenIsSaidAtTheStart(t *testing.T) {
	skip.Root(t, "a mount")
	dir := t.TempDir()
	require.NoError(t, syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_RDONLY, "size=1m"))
	t.Cleanup(func() { require.NoError(t, syscall.Unmount(dir, syscall.MNT_DETACH)) })
	key := ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))
	_, err := artifact.OpenRegistry(t.Context(), artifact.RegistryConfig{Dir: dir, SigningKey: key, Now: time.Now})
	require.EqualValues(t, "registry_unavailable", fault.As(err).Code, "%v", err)
	require.Contains(t, fault.As(err).Public, "ReadWritePaths=")
}

func TestStorageFailureIsToldAndLogged(t *testing.T) {
	b := newBench(t)
	signer, _ := newSigner(t)
	// A file where a directory has to be fails like a full disk does, for root too.
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, "docker"), nil, 0o600))
	_, err := appkit.Push(t.Context(), image(t, "x"), b.intent(t, repository), signer, nil)
	require.EqualValues(t, "push_not_stored", fault.As(err).Code)
	b.server.Close()
	require.Contains(t, b.log.String(), "not a directory")
	require.NotContains(t, b.log.String(), "eyJ")
}

// Each repository of a token request costs the hub two statements: it checks few, and grants no more than it has
// checked. Of a name that no repository has, it asks nobody.
func TestATokenRequestAsksForFewRepositories(t *testing.T) {
	var asked []string
	b := newBench(t, func(c *artifact.RegistryConfig) {
		c.MayPull = func(_ context.Context, _, repo string) error {
			asked = append(asked, repo)
			return nil
		}
	})
	scopes := []string{"repository:org/\x00/demo/r:pull", "repository:org/\xff/demo/r:pull"}
	for n := range 16 {
		scopes = append(scopes, fmt.Sprintf("repository:org/acme/demo/r%d:pull", n))
	}
	status, _ := token(t, b.client(t, ""), b.host, "me", goodToken, strings.Join(scopes, " "))
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, []string{"org/acme/demo/r0", "org/acme/demo/r1", "org/acme/demo/r2", "org/acme/demo/r3"}, asked)
}
