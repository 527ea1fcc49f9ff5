package artifact_test

import (
	"bytes"
	"crypto/ed25519"
	"fmt"
	"io"
	"io/fs"
	"math"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/opencontainers/go-digest"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/imagesign"
	"github.com/gpuaas/gpuaas/protocol"
)

// pusher sends single requests with the token of an intent.
type pusher struct {
	b     *bench
	c     *http.Client
	repo  string
	token string
}

func (b *bench) pusher(t *testing.T, repo string) pusher {
	t.Helper()
	mine := b.intent(t, repo)
	c := b.client(t, "")
	_, tok := token(t, c, b.host, mine.Username, mine.Password, "repository:"+repo+":pull,push")
	return pusher{b, c, repo, tok}
}

// do answers with the status, the place of the upload and the body.
func (p pusher) do(t *testing.T, method, path string, body io.Reader) (int, string, string) {
	t.Helper()
	if !strings.HasPrefix(path, "/v2/") {
		path = "/v2/" + p.repo + path
	}
	req, err := http.NewRequestWithContext(t.Context(), method, "https://"+p.b.host+path, body)
	require.NoError(t, err)
	req.Header.Set("Authorization", "Bearer "+p.token)
	req.Header.Set("Content-Type", "application/octet-stream")
	res, err := p.c.Do(req)
	require.NoError(t, err)
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	return res.StatusCode, res.Header.Get("Location"), string(text)
}

// chunked hides the length of a body.
func chunked(n int) io.Reader {
	return struct{ io.Reader }{bytes.NewReader(bytes.Repeat([]byte{7}, n))}
}

func (b *bench) files(t *testing.T, pattern string) (n int) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(b.dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() && strings.Contains(path, pattern) {
			n++
		}
		return err
	}))
	return n
}

func TestAPushBeyondTheQuotaIsRefusedAndNothingOfItIsKept(t *testing.T) {
	b := newBench(t)
	b.quota.Store(1000)
	signer, _ := newSigner(t)
	_, err := appkit.Push(t.Context(), image(t, strings.Repeat("x", 10)), b.intent(t, repository), signer, nil)
	require.EqualValues(t, "quota_exceeded", fault.As(err).Code, "%v", err)

	p := b.pusher(t, repository)
	for name, body := range map[string]io.Reader{
		"length told":     bytes.NewReader(make([]byte, 2000)),
		"length not told": chunked(2000),
	} {
		t.Run(name, func(t *testing.T) {
			before := b.registry.UsedBytes("acme")
			status, upload, _ := p.do(t, http.MethodPost, "/blobs/uploads/", nil)
			require.Equal(t, http.StatusAccepted, status)
			status, upload, text := p.do(t, http.MethodPatch, upload, chunked(100))
			require.Equal(t, http.StatusAccepted, status, text)
			status, _, text = p.do(t, http.MethodPatch, upload, body)
			require.Equal(t, http.StatusForbidden, status, text)
			require.Contains(t, text, "quota_exceeded: the org's quota registry_bytes is 1000")
			require.Equal(t, before, b.registry.UsedBytes("acme"))
		})
	}
	other := b.pusher(t, "org/other/demo/runtime")
	status, upload, _ := other.do(t, http.MethodPost, "/blobs/uploads/", nil)
	require.Equal(t, http.StatusAccepted, status)
	status, _, _ = other.do(t, http.MethodPatch, upload, chunked(900))
	require.Equal(t, http.StatusAccepted, status, "another org has its own")
	require.EqualValues(t, 900, b.registry.UsedBytes("other"))
}

// What an app is called hides no push from the quota.
func TestAPushToAnAppWithAnOddNameIsStillAPush(t *testing.T) {
	for _, app := range []string{"blobs", "manifests"} {
		t.Run(app, func(t *testing.T) {
			b := newBench(t)
			b.quota.Store(1000)
			p := b.pusher(t, "org/acme/"+app+"/web")
			status, upload, text := p.do(t, http.MethodPost, "/blobs/uploads/", nil)
			require.Equal(t, http.StatusAccepted, status, text)
			status, _, text = p.do(t, http.MethodPatch, upload, chunked(2000))
			require.Equal(t, http.StatusForbidden, status, text)
			require.Contains(t, text, "quota_exceeded")

			_, upload, _ = p.do(t, http.MethodPost, "/blobs/uploads/", nil)
			b.ended.Store(true)
			status, _, text = p.do(t, http.MethodPost, "/blobs/uploads/", nil)
			require.Equal(t, http.StatusForbidden, status, text)
			status, _, text = p.do(t, http.MethodPut, "/manifests/latest", strings.NewReader("{}"))
			require.Equal(t, http.StatusForbidden, status, text)
			status, _, text = p.do(t, http.MethodPatch, upload, chunked(10))
			require.Equal(t, http.StatusAccepted, status, "an upload that began before goes on: "+text)
		})
	}
}

func TestUnfinishedUploadsCountUntilTheyEnd(t *testing.T) {
	b := newBench(t)
	b.quota.Store(1000)
	p := b.pusher(t, repository)
	_, first, _ := p.do(t, http.MethodPost, "/blobs/uploads/", nil)
	status, first, text := p.do(t, http.MethodPatch, first, chunked(600))
	require.Equal(t, http.StatusAccepted, status, text)
	_, second, _ := p.do(t, http.MethodPost, "/blobs/uploads/", nil)
	status, _, _ = p.do(t, http.MethodPatch, second, chunked(600))
	require.Equal(t, http.StatusForbidden, status)

	content := bytes.Repeat([]byte{7}, 600)
	status, _, text = p.do(t, http.MethodPut, first+"&digest="+digest.FromBytes(content).String(), nil)
	require.Equal(t, http.StatusCreated, status, text)
	require.EqualValues(t, 600, b.registry.UsedBytes("acme"), "as a blob, once")
	_, third, _ := p.do(t, http.MethodPost, "/blobs/uploads/", nil)
	status, _, _ = p.do(t, http.MethodPatch, third, chunked(300))
	require.Equal(t, http.StatusAccepted, status)
	require.EqualValues(t, 900, b.registry.UsedBytes("acme"))
	_, err := b.registry.PurgeUploads(t.Context(), time.Now().Add(time.Hour))
	require.NoError(t, err)
	require.EqualValues(t, 600, b.registry.UsedBytes("acme"))

	// What is on the disk counts after a restart.
	_, again, _ := p.do(t, http.MethodPost, "/blobs/uploads/", nil)
	status, _, _ = p.do(t, http.MethodPatch, again, chunked(100))
	require.Equal(t, http.StatusAccepted, status)
	restarted := newBench(t, func(c *artifact.RegistryConfig) { c.Dir = b.dir })
	require.EqualValues(t, 700, restarted.registry.UsedBytes("acme"))
}

func TestAPushThatWouldFillTheDiskIsRefused(t *testing.T) {
	b := newBench(t, func(c *artifact.RegistryConfig) { c.MinFreeBytes = math.MaxInt64 / 2 })
	p := b.pusher(t, repository)
	status, _, text := p.do(t, http.MethodPost, "/blobs/uploads/", nil)
	require.Equal(t, http.StatusInsufficientStorage, status)
	require.Contains(t, text, "nearly full")
}

// An upload that began while there was room ends when there is none any more, whether or not it says how long it is.
func TestAnUploadUnderWayEndsBeforeItFillsTheDisk(t *testing.T) {
	var key ed25519.PrivateKey
	roomy := newBench(t, func(c *artifact.RegistryConfig) { key = c.SigningKey })
	tight := newBench(t, func(c *artifact.RegistryConfig) {
		c.Dir, c.SigningKey, c.MinFreeBytes = roomy.dir, key, math.MaxInt64/2
	})
	before, after := roomy.pusher(t, repository), tight.pusher(t, repository)
	for name, body := range map[string]io.Reader{
		"length told":     bytes.NewReader(make([]byte, 2000)),
		"length not told": chunked(2000),
	} {
		t.Run(name, func(t *testing.T) {
			status, upload, text := before.do(t, http.MethodPost, "/blobs/uploads/", nil)
			require.Equal(t, http.StatusAccepted, status, text)
			status, upload, text = before.do(t, http.MethodPatch, upload, chunked(100))
			require.Equal(t, http.StatusAccepted, status, text)
			status, _, text = after.do(t, http.MethodPatch, upload, body)
			require.Equal(t, http.StatusInsufficientStorage, status, text)
			require.Contains(t, text, "nearly full")
		})
	}
}

// index makes an image index of two images.
func index(t *testing.T, content string) v1.ImageIndex {
	t.Helper()
	return mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: image(t, content+"-a")},
		mutate.IndexAddendum{Add: image(t, content+"-b")})
}

// later is past the grace.
func (b *bench) later() { b.at(b.now.Load().Add(artifact.CollectGrace + time.Minute)) }

func (b *bench) collect(t *testing.T) artifact.Collected {
	t.Helper()
	gone, err := b.registry.Collect(t.Context())
	require.NoError(t, err)
	return gone
}

func (b *bench) pullable(t *testing.T, repo, ref string) bool {
	t.Helper()
	_, err := b.registry.Inspect(t.Context(), repo, ref)
	if err != nil {
		require.Equal(t, artifact.CodeNotPushed, fault.As(err).Code, "%v", err)
	}
	return err == nil
}

func TestCollectKeepsWhatARootReachesAndNothingElse(t *testing.T) {
	b := newBench(t)
	signer, key := newSigner(t)
	push := func(repo, content string) string {
		pushed, err := appkit.Push(t.Context(), image(t, content), b.intent(t, repo), signer, nil)
		require.NoError(t, err)
		return pushed.Digest
	}
	const shared, open = "org/acme/shared/runtime", "org/acme/open/runtime"
	kept, ended := push(repository, "kept"), push(repository, "ended")
	push(shared, "kept")
	inOpen := push(open, "being pushed")
	list := index(t, "list")
	mine := b.intent(t, repository)
	tag, err := name.NewTag(b.host + "/" + repository + ":list")
	require.NoError(t, err)
	require.NoError(t, remote.WriteIndex(tag, list, remote.WithTransport(b.client(t, "").Transport),
		remote.WithAuth(&authn.Basic{Username: mine.Username, Password: mine.Password})))
	listDigest, err := list.Digest()
	require.NoError(t, err)

	b.roots.Store(&artifact.Roots{
		Images:       []artifact.Ref{{repository, kept}, {repository, listDigest.String()}},
		Repositories: []string{open},
	})
	require.Zero(t, b.collect(t), "nothing that was just pushed")
	b.later()
	before := b.registry.UsedBytes("acme")
	gone := b.collect(t)
	require.NotZero(t, gone.Manifests)
	require.NotZero(t, gone.Layers)
	require.NotZero(t, gone.Blobs)
	require.Less(t, b.registry.UsedBytes("acme"), before)
	require.Zero(t, b.collect(t), "once is enough")

	require.True(t, b.pullable(t, repository, kept))
	require.True(t, b.pullable(t, repository, listDigest.String()), "an index with its images")
	require.True(t, b.pullable(t, open, inOpen))
	require.False(t, b.pullable(t, repository, ended))
	require.False(t, b.pullable(t, shared, kept), "the same digest in a repository that nobody registered")
	img, err := b.registry.Inspect(t.Context(), repository, kept)
	require.NoError(t, err)
	state, _ := artifact.Judge(img, repository, kept, []artifact.SignerKey{key}, *b.now.Load())
	require.Equal(t, artifact.Verified, state, "with its signature")

	b.roots.Store(&artifact.Roots{})
	b.later()
	b.collect(t)
	require.Zero(t, b.files(t, "/blobs/"), "an empty registry has no blobs")
	require.Zero(t, b.files(t, "/link"))
	require.Zero(t, b.registry.UsedBytes("acme"))
	push(repository, "ended")
}

// What is attached to an image may be signed itself, whichever of the tags sorts first.
func TestCollectKeepsTheSignaturesOfSignatures(t *testing.T) {
	b := newBench(t)
	mine := b.intent(t, repository)
	push := func(tag string, img v1.Image) {
		to, err := name.NewTag(b.host + "/" + repository + ":" + tag)
		require.NoError(t, err)
		require.NoError(t, remote.Write(to, img, remote.WithTransport(b.client(t, "").Transport),
			remote.WithAuth(&authn.Basic{Username: mine.Username, Password: mine.Password})))
	}
	digestOf := func(img v1.Image) v1.Hash {
		d, err := img.Digest()
		require.NoError(t, err)
		return d
	}
	signed := digestOf(image(t, "signed"))
	push("signed", image(t, "signed"))
	// attached is pushed as an attachment of the signed image, with a digest before or after that one's.
	attached := func(before bool) v1.Hash {
		for n := 0; ; n++ {
			img := image(t, fmt.Sprint(before, n))
			if d := digestOf(img); d.Hex < signed.Hex == before {
				push("sha256-"+signed.Hex+map[bool]string{true: ".sig", false: ".att"}[before], img)
				return d
			}
		}
	}
	keep := []v1.Hash{signed}
	for _, d := range []v1.Hash{attached(true), attached(false)} {
		of := image(t, "signature of "+d.Hex)
		push("sha256-"+d.Hex+".sig", of)
		keep = append(keep, d, digestOf(of))
	}
	b.roots.Store(&artifact.Roots{Images: []artifact.Ref{{repository, signed.String()}}})
	b.later()
	b.collect(t)
	for n, d := range keep {
		require.True(t, b.pullable(t, repository, d.String()), "%d", n)
	}
}

func TestResolvedContentIsNotCollectedForAWhile(t *testing.T) {
	b := newBench(t)
	signer, _ := newSigner(t)
	pushed, err := appkit.Push(t.Context(), image(t, "x"), b.intent(t, repository), signer, nil)
	require.NoError(t, err)
	b.later()
	require.True(t, b.pullable(t, repository, pushed.Digest), "as before a registration")
	b.collect(t)
	require.True(t, b.pullable(t, repository, pushed.Digest))

	// A hub that has just started does not know what was resolved before.
	restarted := newBench(t, func(c *artifact.RegistryConfig) { c.Dir = b.dir })
	require.Zero(t, restarted.collect(t))
}

func TestARepositoryThatIsBeingUploadedToIsKept(t *testing.T) {
	b := newBench(t)
	p := b.pusher(t, repository)
	_, upload, _ := p.do(t, http.MethodPost, "/blobs/uploads/", nil)
	_, upload, _ = p.do(t, http.MethodPatch, upload, chunked(100))
	status, _, _ := p.do(t, http.MethodPut, upload+"&digest="+digest.FromBytes(bytes.Repeat([]byte{7}, 100)).String(), nil)
	require.Equal(t, http.StatusCreated, status)
	status, _, _ = p.do(t, http.MethodPost, "/blobs/uploads/", nil)
	require.Equal(t, http.StatusAccepted, status)
	b.later()
	require.Zero(t, b.collect(t), "the upload may last longer than the grace")
	_, err := b.registry.PurgeUploads(t.Context(), time.Now().Add(time.Hour))
	require.NoError(t, err)
	require.Equal(t, 1, b.collect(t).Blobs)
}

func TestABrokenRepositoryIsKeptAndHoldsUpNoOther(t *testing.T) {
	b := newBench(t)
	signer, _ := newSigner(t)
	pushed, err := appkit.Push(t.Context(), image(t, "x"), b.intent(t, repository), signer, nil)
	require.NoError(t, err)
	_, err = appkit.Push(t.Context(), image(t, "y"), b.intent(t, "org/other/demo/runtime"), signer, nil)
	require.NoError(t, err)
	b.roots.Store(&artifact.Roots{Images: []artifact.Ref{{repository, "sha256:broken"}, {repository, pushed.Digest}}})
	b.later()
	require.NotZero(t, b.collect(t).Blobs)
	require.True(t, b.pullable(t, repository, pushed.Digest))
	require.Zero(t, b.registry.UsedBytes("other"))
}

// TestCollectingWhilePushesGoOnLosesNothing pushes the same few images again and again to several repositories, while
// garbage is collected without a pause and time leaps past the grace: what was registered is whole at the end, and all
// else is gone.
func TestCollectingWhilePushesGoOnLosesNothing(t *testing.T) {
	const pushers, contents = 3, 4
	for seed := range uint64(2) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			b := newBench(t)
			p := pushes{b: b, open: map[string]int{}, registered: map[artifact.Ref]bool{}}
			p.signer, _ = newSigner(t)
			for i := range contents {
				p.images = append(p.images, image(t, fmt.Sprint("content ", i)))
			}
			var pushing, collecting sync.WaitGroup
			done := make(chan struct{})
			collecting.Go(func() {
				for {
					select {
					case <-done:
						return
					default:
						_, err := b.registry.Collect(t.Context())
						assertNoError(t, err)
					}
				}
			})
			for n := range pushers {
				pushing.Go(func() { p.run(t, rand.New(rand.NewPCG(seed, uint64(n)))) })
			}
			pushing.Wait()
			close(done)
			collecting.Wait()
			b.later()
			b.collect(t)
			for ref := range p.registered {
				require.True(t, b.pullable(t, ref.Repository, ref.Digest), "%v", ref)
			}
			kept := b.files(t, "/data")
			b.roots.Store(&artifact.Roots{})
			b.later()
			gone := b.collect(t)
			require.Equal(t, kept, gone.Blobs, "nothing but what was registered had stayed")
			require.Zero(t, b.files(t, "/data"))
		})
	}
}

// pushes are concurrent pushes of images, some of which are registered, and the roots that follow from them.
type pushes struct {
	b      *bench
	signer protocol.Signer
	images []v1.Image
	// leaping excludes leaps of the clock from pushes, whose tokens would end.
	leaping sync.RWMutex

	mu         sync.Mutex
	open       map[string]int
	registered map[artifact.Ref]bool
}

// publish changes what is open or registered, and gives the registry the new roots.
func (p *pushes) publish(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
	roots := artifact.Roots{}
	for repo, n := range p.open {
		if n > 0 {
			roots.Repositories = append(roots.Repositories, repo)
		}
	}
	for ref := range p.registered {
		roots.Images = append(roots.Images, ref)
	}
	p.b.roots.Store(&roots)
}

// run pushes images at random, registers a third of them, and lets the clock leap between pushes.
func (p *pushes) run(t *testing.T, random *rand.Rand) {
	t.Helper()
	const pushesEach = 8
	for range pushesEach {
		repo := fmt.Sprintf("org/acme/app-%d/runtime", random.IntN(2))
		img, keep, leap := p.images[random.IntN(len(p.images))], random.IntN(3) == 0, random.IntN(2) == 0
		p.leaping.RLock()
		p.publish(func() { p.open[repo]++ })
		pushed, err := appkit.Push(t.Context(), img, p.b.intent(t, repo), p.signer, nil)
		assertNoError(t, err)
		if err == nil && keep {
			_, err := p.b.registry.Inspect(t.Context(), repo, pushed.Digest)
			assertNoError(t, err)
			p.publish(func() { p.registered[artifact.Ref{Repository: repo, Digest: pushed.Digest}] = true })
		}
		p.publish(func() { p.open[repo]-- })
		p.leaping.RUnlock()
		if leap {
			p.leaping.Lock()
			p.b.later()
			p.leaping.Unlock()
		}
	}
}

func assertNoError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

func TestImageReferencesAreFoundInAnyManifest(t *testing.T) {
	d := "sha256:" + strings.Repeat("a", 64)
	text := []byte("\x00\x12" + `{"image_ref":"org/acme/demo/runtime@` + d + `","services":[{"image":"apps/x/y@` + d +
		`"}],"note":"a@b"}`)
	require.Equal(t, []artifact.Ref{{"org/acme/demo/runtime", d}, {"apps/x/y", d}}, artifact.RefsIn(text))
	require.Equal(t, imagesign.Tag(d), "sha256-"+strings.Repeat("a", 64)+".sig", "by which signatures are kept")
}
