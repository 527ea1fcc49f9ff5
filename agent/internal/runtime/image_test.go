package runtime_test

import (
	"archive/tar"
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	goruntime "runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// An image that is found while it is removed is not taken to be there afterwards.
func TestAnImageThatIsRemovedIsNotRemembered(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	ref, err := runtime.ParseImage(image)
	require.NoError(t, err)
	for range 10 {
		require.NoError(t, f.ensure(image))
		var asking sync.WaitGroup
		removed, asked := make(chan struct{}), make(chan struct{})
		asking.Go(func() {
			for first := true; ; first = false {
				_, _ = f.rt.HasImage(t.Context(), ref) // the one during the removal may say either
				if first {
					close(asked)
				}
				select {
				case <-removed:
					return
				default:
				}
			}
		})
		<-asked
		require.NoError(t, f.rt.RemoveUnusedImages(t.Context()))
		close(removed)
		asking.Wait()
		has, err := f.rt.HasImage(t.Context(), ref)
		require.NoError(t, err)
		require.False(t, has)
	}
}

func TestImageIsPulledOnceVerifiedAndKept(t *testing.T) {
	f := newFixture(t)
	image := f.registry.push("org/acme/"+f.word, appImage(t))
	ref, err := runtime.ParseImage(image)
	require.NoError(t, err)
	has, err := f.rt.HasImage(t.Context(), ref)
	require.NoError(t, err)
	require.False(t, has)
	require.NoError(t, f.ensure(image))
	require.Positive(t, f.registry.pulls.Load())

	// Garbage collection takes neither the image nor its remapped copy, and a second time needs no registry.
	f.collectGarbage()
	f.registry.server.Close()
	require.NoError(t, f.ensure(image))
	has, err = f.rt.HasImage(t.Context(), ref)
	require.NoError(t, err)
	require.True(t, has)
	spec := f.spec(image, "wait")
	f.start(spec)
	list, err := f.rt.Images(t.Context())
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.Equal(t, []any{image, true}, []any{list[0].Name, list[0].InUse})
	require.Positive(t, list[0].SizeBytes)

	// Unused ones go only when asked for, with everything of theirs.
	require.NoError(t, f.rt.RemoveUnusedImages(t.Context()))
	require.NoError(t, f.rt.Stop(t.Context(), spec.ID, 0))
	require.NoError(t, f.rt.Remove(t.Context(), spec.ID))
	require.NoError(t, f.rt.RemoveUnusedImages(t.Context(), ref))
	has, err = f.rt.HasImage(t.Context(), ref)
	require.NoError(t, err)
	require.True(t, has)
	require.NoError(t, f.rt.RemoveUnusedImages(t.Context()))
	require.Empty(t, f.snapshots())
}

// An image that was built on a machine of another kind is pushed easily, and waiting makes nothing of it.
func TestAnImageOfOtherPlatformsIsRefusedByName(t *testing.T) {
	f := newFixture(t)
	own := v1.Platform{OS: "linux", Architecture: goruntime.GOARCH}
	require.NoError(t, f.ensure(f.registry.pushIndex("org/acme/"+f.word, appImage(t), own)))
	image := f.registry.pushIndex("org/acme/"+f.word, appImage(t), v1.Platform{OS: "linux", Architecture: "s390x"})
	err := f.ensure(image)
	require.True(t, fault.IsPermanent(err), "%v", err)
	require.ErrorContains(t, err, "linux/"+goruntime.GOARCH)
}

func TestImageThatSomebodyRemovedIsNoticedAtTheNextStart(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	first := f.spec(image, "wait")
	f.start(first)
	require.NoError(t, f.rt.RemoveMember(t.Context(), first.MemberID))
	require.NoError(t, f.daemon.Client(t).ImageService().Delete(f.ns(), image, images.SynchronousDelete()))
	spec := f.spec(image, "wait")
	_, err := f.rt.Start(t.Context(), spec)
	require.ErrorContains(t, err, "image_missing")
	left, err := f.rt.Leftovers(t.Context(), spec.MemberID)
	require.NoError(t, err)
	require.Empty(t, left)
	ref, err := runtime.ParseImage(image)
	require.NoError(t, err)
	has, err := f.rt.HasImage(t.Context(), ref)
	require.NoError(t, err)
	require.False(t, has, "so that it is pulled again")
}

func TestManyMembersShareOnePull(t *testing.T) {
	f := newFixture(t)
	image := f.registry.push("org/acme/"+f.word, appImage(t))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			ref, _ := runtime.ParseImage(image)
			ref.RegistryHost = f.registry.host
			if err := f.rt.EnsureImage(t.Context(), ref, f.registry.credentials, f.registry.tls); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	// One manifest by HEAD and GET, one configuration, one layer.
	require.LessOrEqual(t, f.registry.pulls.Load(), int64(6))
}

func TestImageThatIsNotItsDigestIsRefused(t *testing.T) {
	f := newFixture(t)
	image := f.registry.push("org/acme/"+f.word, appImage(t))
	f.registry.corrupt.Store(true)
	err := f.ensure(image)
	require.EqualValues(t, "image_digest_mismatch", fault.As(err).Code)
	require.True(t, fault.IsPermanent(err))
	f.registry.corrupt.Store(false)
	require.NoError(t, f.ensure(image), "and nothing of the wrong bytes is kept")
}

func TestPullFailuresSayWhy(t *testing.T) {
	f := newFixture(t, func(c *runtime.Config) { c.MaxImageBytes = 1 << 20 })
	image := f.registry.push("org/acme/"+f.word, appImage(t))
	ref, err := runtime.ParseImage(image)
	require.NoError(t, err)
	ref.RegistryHost = f.registry.host
	ensure := func(ref runtime.ImageRef, creds runtime.Credentials) error {
		return f.rt.EnsureImage(t.Context(), ref, creds, f.registry.tls)
	}
	require.ErrorContains(t, ensure(ref, f.registry.credentials), "larger than this node allows")
	require.ErrorContains(t, ensure(ref, nil), "may not be pulled with this node's credentials")
	wrong := func(context.Context, string) (string, string, error) { return testUser, "wrong", nil }
	require.ErrorContains(t, ensure(ref, wrong), "may not be pulled with this node's credentials")
	denied := func(context.Context, string) (string, string, error) {
		return "", "", fault.New(fault.Unavailable, "no_credential", "The hub gives no credential now.", nil)
	}
	require.EqualValues(t, "no_credential", fault.As(ensure(ref, denied)).Code)
	none := ref
	none.Digest = "sha256:" + zeros
	err = ensure(none, f.registry.credentials)
	require.True(t, fault.Is(err, fault.NotFound), err)
	require.True(t, fault.IsPermanent(err), "another try does not find it either")
	refused := func(status int) error {
		f.registry.refuse.Store(int64(status))
		defer f.registry.refuse.Store(0)
		return ensure(ref, f.registry.credentials)
	}
	err = refused(http.StatusForbidden)
	require.ErrorContains(t, err, "the registry refuses")
	require.True(t, fault.IsPermanent(err))
	for _, status := range []int{
		http.StatusUnauthorized, http.StatusTooManyRequests, http.StatusInternalServerError,
		http.StatusServiceUnavailable,
	} {
		err = refused(status)
		require.True(t, fault.Is(err, fault.Unavailable), err)
		require.False(t, fault.IsPermanent(err), "it may pass: %d", status)
	}
	gone := ref
	gone.RegistryHost = "127.0.0.1:1"
	err = ensure(gone, f.registry.credentials)
	require.ErrorContains(t, err, "could not be pulled")
	require.False(t, fault.IsPermanent(err))
	require.ErrorContains(t, f.rt.EnsureImage(t.Context(), ref, f.registry.credentials, nil), "could not be pulled",
		"an unknown certificate")
	for _, bad := range []string{"", "x", "a/b:latest", "a/b@sha256:123", "../b@sha256:" + zeros, "A/b@sha256:" + zeros} {
		_, err := runtime.ParseImage(bad)
		require.Error(t, err, bad)
	}
	require.Empty(t, f.snapshots())
}

// TestPullThatWasCutOffIsMadeGood cuts a pull in the middle of a layer, as a crash would, with its lease still there.
func TestPullThatWasCutOffIsMadeGood(t *testing.T) {
	f := newFixture(t)
	image := f.registry.push("org/acme/"+f.word, appImage(t))
	c := f.daemon.Client(t)
	lease, err := c.LeasesService().Create(f.ns(), leases.WithRandomID(), leases.WithExpiration(time.Hour))
	require.NoError(t, err)
	_, err = c.SnapshotService("overlayfs").Prepare(leases.WithLease(f.ns(), lease.ID), "half-made", "")
	require.NoError(t, err)
	require.NoError(t, f.rt.Close())
	f.rt = f.open()
	require.Empty(t, f.snapshots())
	left, err := c.LeasesService().List(f.ns())
	require.NoError(t, err)
	require.Empty(t, left)
	require.NoError(t, f.ensure(image))
}

func TestAnImageWhosePullWasCancelledIsPulledAnew(t *testing.T) {
	f := newFixture(t)
	image := f.registry.push("org/acme/"+f.word, appImage(t))
	mayGoOn := make(chan struct{})
	goOn := sync.OnceFunc(func() { close(mayGoOn) })
	t.Cleanup(goOn)
	f.registry.hold.Store(&mayGoOn)
	ctx, cancel := context.WithCancel(t.Context())
	ref, err := runtime.ParseImage(image)
	require.NoError(t, err)
	ref.RegistryHost = f.registry.host
	first := make(chan error, 1)
	go func() { first <- f.rt.EnsureImage(ctx, ref, f.registry.credentials, f.registry.tls) }()
	<-f.registry.holding
	cancel()
	require.ErrorIs(t, <-first, context.Canceled)
	require.Eventually(t, func() bool {
		_, pulling := f.rt.PullProgress(image)
		return !pulling
	}, 20*time.Second, 10*time.Millisecond, "the pull goes on")
	goOn()
	require.NoError(t, f.ensure(image))
}

func TestUserNamesOfImageAreItsOwn(t *testing.T) {
	f := newFixture(t)
	image := f.image(func(c *v1.Config) { c.User = "jovyan" })
	in := seen(t, f, f.spec(image, "inspect"))
	require.EqualValues(t, 1000, in["uid"])
	other := f.registry.push("org/acme/"+f.word, withLayers(t, gzipLayer(t, tarOf(t, entry{
		Header: tar.Header{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644}, content: "jovyan:x:1001:100::/:/app\n",
	}))))
	require.NoError(t, f.ensure(other))
	spec := f.spec(other, "inspect")
	spec.Service.User = "jovyan"
	require.EqualValues(t, 1001, seen(t, f, spec)["uid"], "the other image's name is remembered beside it")
	require.Empty(t, f.inspectSnapshots(), "looking into the image leaves nothing")
}

func TestLayersAreNotFetchedOverHTTP2(t *testing.T) {
	f := newFixture(t)
	f.image()
	require.Positive(t, f.registry.pulls.Load())
	require.Zero(t, f.registry.http2.Load())
}

func TestADamagedImageIsPulledAnew(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	for name, damaged := range map[string]func(config []byte) []byte{
		"cut off": func([]byte) []byte { return []byte("x") },
		"altered": func(config []byte) []byte { return append([]byte("x"), config[1:]...) },
	} {
		f.daemon.DamageBlob(t, func(blob []byte) bool {
			return bytes.HasPrefix(blob, []byte("{")) && bytes.Contains(blob, []byte(`"rootfs"`))
		}, damaged)
		f.rt = f.open() // as after a restart: the image is not remembered
		require.NoError(t, f.ensure(image), name)
		f.start(f.spec(image, "wait"))
	}
}

// A registry may send a pull to an object store, and nobody to where the way is not encrypted.
func TestAPullIsNotRedirectedToPlainHTTP(t *testing.T) {
	f := newFixture(t)
	image := f.registry.push("org/acme/"+f.word, appImage(t))
	var asked atomic.Int64
	plain := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		asked.Add(1)
		f.registry.open.ServeHTTP(w, req)
	}))
	t.Cleanup(plain.Close)
	f.registry.server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if strings.Contains(req.URL.Path, "/blobs/") {
			http.Redirect(w, req, plain.URL+req.URL.Path, http.StatusTemporaryRedirect)
			return
		}
		f.registry.ServeHTTP(w, req)
	})
	require.Error(t, f.ensure(image))
	require.Zero(t, asked.Load())
}
