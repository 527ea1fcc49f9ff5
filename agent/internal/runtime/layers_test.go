package runtime_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/rand"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/continuity/sysx"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/image-spec/identity"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// builtLayer is a layer whose digests a test may falsify.
type builtLayer struct {
	v1.Layer
	diffID v1.Hash
}

func (l builtLayer) DiffID() (v1.Hash, error) { return l.diffID, nil }

func (l builtLayer) Uncompressed() (io.ReadCloser, error) { return nil, http.ErrNotSupported }

type entry struct {
	tar.Header
	content string
}

func tarOf(t *testing.T, entries ...entry) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		e.Size = int64(len(e.content))
		e.ModTime = time.Unix(1_700_000_000, 0)
		require.NoError(t, w.WriteHeader(&e.Header))
		_, err := io.WriteString(w, e.content)
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	return buf.Bytes()
}

func sumOf(t *testing.T, data []byte) v1.Hash {
	t.Helper()
	sum, _, err := v1.SHA256(bytes.NewReader(data))
	require.NoError(t, err)
	return sum
}

func gzipOf(t *testing.T, plain []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, err := w.Write(plain)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return out.Bytes()
}

func gzipLayer(t *testing.T, plain []byte) v1.Layer {
	t.Helper()
	return builtLayer{static.NewLayer(gzipOf(t, plain), types.OCILayer), sumOf(t, plain)}
}

func zstdLayer(t *testing.T, plain []byte) v1.Layer {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	require.NoError(t, err)
	return builtLayer{static.NewLayer(w.EncodeAll(plain, nil), types.OCILayerZStd), sumOf(t, plain)}
}

func plainLayer(t *testing.T, plain []byte) v1.Layer {
	t.Helper()
	return builtLayer{static.NewLayer(plain, types.OCIUncompressedLayer), sumOf(t, plain)}
}

func withLayers(t *testing.T, layers ...v1.Layer) v1.Image {
	t.Helper()
	img, err := mutate.AppendLayers(appImage(t), layers...)
	require.NoError(t, err)
	return mutate.MediaType(img, types.OCIManifestSchema1)
}

func random(size int) string {
	b := make([]byte, size)
	_, _ = rand.Read(b)
	return string(b)
}

func xattrs(pairs ...string) map[string]string {
	out := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		out["SCHILY.xattr."+pairs[i]] = pairs[i+1]
	}
	return out
}

// awkwardLayers hold each kind of entry that unpacking treats in its own way.
func awkwardLayers(t *testing.T) []v1.Layer {
	t.Helper()
	capability := "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	base := tarOf(
		t,
		entry{Header: tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o700, Uid: 7}},
		entry{Header: tar.Header{
			Name: "data/", Typeflag: tar.TypeDir, Mode: 0o1777, Uid: 12, Gid: 13, PAXRecords: xattrs("user.kind", "base"),
		}},
		entry{Header: tar.Header{Name: "data/inner/", Typeflag: tar.TypeDir, Mode: 0o750, Uid: 5}},
		entry{Header: tar.Header{Name: "data/inner/one", Mode: 0o4755, Uid: 1, Gid: 2}, content: "one"},
		entry{Header: tar.Header{Name: "data/two", Mode: 0o640, PAXRecords: xattrs("user.x", "y",
			"security.capability", capability)}, content: random(300_000)},
		entry{Header: tar.Header{Name: "data/link", Typeflag: tar.TypeLink, Linkname: "data/two"}},
		entry{Header: tar.Header{Name: "data/symlink", Typeflag: tar.TypeSymlink, Linkname: "../etc/passwd"}},
		entry{Header: tar.Header{Name: "gone/file", Mode: 0o600}, content: "x"},
		entry{Header: tar.Header{Name: "opaque/below/file", Mode: 0o600}, content: "x"},
		entry{Header: tar.Header{Name: "turns/into", Mode: 0o600}, content: "x"},
		entry{Header: tar.Header{Name: "lib", Typeflag: tar.TypeSymlink, Linkname: "data/inner"}},
		entry{Header: tar.Header{Name: "fifo", Typeflag: tar.TypeFifo, Mode: 0o622}},
		entry{Header: tar.Header{Name: "null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3, Mode: 0o666}},
	)
	// No entries for the directories below: their attributes come from the layer before.
	second := tarOf(
		t,
		entry{Header: tar.Header{Name: "data/inner/three", Mode: 0o600}, content: "three"},
		entry{Header: tar.Header{Name: "data/inner/.wh.one"}},
		entry{Header: tar.Header{Name: ".wh.gone"}},
		entry{Header: tar.Header{Name: "opaque/.wh..wh..opq"}},
		entry{Header: tar.Header{Name: "opaque/new", Mode: 0o600}, content: "new"},
		entry{Header: tar.Header{Name: "turns", Mode: 0o600}, content: "a file"},
		entry{Header: tar.Header{Name: "lib/through-a-link", Mode: 0o600}, content: "x"},
		entry{Header: tar.Header{Name: "here", Typeflag: tar.TypeSymlink, Linkname: "data"}},
		entry{Header: tar.Header{Name: "here/by-link/file", Mode: 0o600}, content: "x"},
	)
	third := tarOf(
		t,
		entry{Header: tar.Header{Name: "data/late/file", Mode: 0o600}, content: "before its directory"},
		entry{Header: tar.Header{Name: "data/late/", Typeflag: tar.TypeDir, Mode: 0o711, Uid: 44}},
		entry{Header: tar.Header{Name: "data/inner/four", Mode: 0o600}, content: "four"},
		entry{Header: tar.Header{Name: "data/", Typeflag: tar.TypeDir, Mode: 0o755, Uid: 99}},
		entry{Header: tar.Header{Name: "turns/into", Typeflag: tar.TypeDir, Mode: 0o755}},
	)
	return []v1.Layer{gzipLayer(t, base), zstdLayer(t, second), plainLayer(t, third)}
}

// listing describes each file of a directory tree in one line.
func listing(t *testing.T, root string) []string {
	t.Helper()
	var out []string
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		require.NoError(t, err)
		var st unix.Stat_t
		require.NoError(t, unix.Lstat(path, &st))
		line := fmt.Sprintf("%s mode=%o owner=%d:%d links=%d dev=%d", strings.TrimPrefix(path, root), st.Mode, st.Uid, st.Gid,
			st.Nlink, st.Rdev)
		if !d.IsDir() && (st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != 0) { // whiteouts have the time they are made
			line += fmt.Sprintf(" mtime=%d", st.Mtim.Sec)
		}
		names, err := sysx.LListxattr(path)
		require.NoError(t, err)
		slices.Sort(names)
		for _, name := range names {
			value, err := sysx.LGetxattr(path, name)
			require.NoError(t, err)
			line += fmt.Sprintf(" %s=%q", name, value)
		}
		switch {
		case d.Type().IsRegular():
			data, err := os.ReadFile(path)
			require.NoError(t, err)
			line += " sum=" + sumOf(t, data).Hex
		case d.Type()&fs.ModeSymlink != 0:
			target, err := os.Readlink(path)
			require.NoError(t, err)
			line += " to=" + target
		}
		out = append(out, line)
		return nil
	}))
	return out
}

// layerDirs are the directories of an unpacked image's layers, the topmost first, and the labels of its top.
func layerDirs(t *testing.T, f *fixture, ns, image, suffix string) ([]string, snapshots.Info) {
	t.Helper()
	ctx := namespaces.WithNamespace(t.Context(), ns)
	c := f.daemon.Client(t)
	img, err := c.GetImage(ctx, image)
	require.NoError(t, err)
	service := c.SnapshotService("overlayfs")
	described, err := c.ContentStore().Info(ctx, img.Target().Digest)
	require.NoError(t, err)
	top, ours := described.Labels["containerd.io/gc.ref.snapshot.overlayfs"]
	if !ours { // unpacked by containerd itself
		diffs, err := img.RootFS(ctx)
		require.NoError(t, err)
		top = identity.ChainID(diffs).String()
	}
	require.True(t, strings.HasSuffix(top, suffix))
	info, err := service.Stat(ctx, top)
	require.NoError(t, err)
	ctx, release, err := c.WithLease(ctx) // else a garbage collection may take the view
	require.NoError(t, err)
	defer func() { require.NoError(t, release(ctx)) }()
	mounts, err := service.View(ctx, "look", top)
	require.NoError(t, err)
	defer func() { require.NoError(t, service.Remove(ctx, "look")) }()
	for _, o := range mounts[0].Options {
		if dirs, is := strings.CutPrefix(o, "lowerdir="); is {
			return strings.Split(dirs, ":"), info
		}
	}
	return []string{mounts[0].Source}, info
}

func TestUnpackedImageIsWhatContainerdItselfUnpacks(t *testing.T) {
	f := newFixture(t)
	image := f.registry.push("org/acme/"+f.word, withLayers(t, awkwardLayers(t)...))
	require.NoError(t, f.ensure(image))
	ours, ourTop := layerDirs(t, f, f.word, image, "")

	// A containerd namespace of its own, so that nothing is shared.
	other := f.word + "-other"
	ctx := namespaces.WithNamespace(t.Context(), other)
	c := f.daemon.Client(t)
	web := &http.Client{Transport: roundTripper(func(req *http.Request) (*http.Response, error) {
		req = req.Clone(req.Context())
		req.Header.Set("Authorization", "Bearer "+testToken)
		return f.registry.server.Client().Transport.RoundTrip(req)
	})}
	hosts := func(host string) ([]docker.RegistryHost, error) {
		return []docker.RegistryHost{{
			Client: web, Host: host, Scheme: "https", Path: "/v2",
			Capabilities: docker.HostCapabilityPull | docker.HostCapabilityResolve,
		}}, nil
	}
	name := f.registry.host + "/" + image
	_, err := c.Pull(ctx, name, client.WithPullUnpack, client.WithPullSnapshotter("overlayfs"),
		client.WithResolver(docker.NewResolver(docker.ResolverOptions{Hosts: hosts})))
	require.NoError(t, err)
	theirs, _ := layerDirs(t, f, other, name, "")

	require.Equal(t, ourTop.Name, ourTop.Labels["containerd.io/snapshot.ref"])
	require.Len(t, ours, len(theirs))
	require.NotEqual(t, theirs, ours)
	for i := range ours {
		require.Equal(t, listing(t, theirs[i]), listing(t, ours[i]), "layer %d from the top", i)
	}
}

// What a registry does when it is asked for a part.
const (
	rangesServed int64 = iota
	rangesIgnored
	rangesRefused
)

// cutAnswer serves a blob only up to so many bytes, and reports whether it did.
func (r *testRegistry) cutAnswer(w http.ResponseWriter, req *http.Request) bool {
	if req.Method != http.MethodGet || !strings.Contains(req.URL.Path, "/blobs/") {
		return false
	}
	var from int64
	if _, err := fmt.Sscanf(req.Header.Get("Range"), "bytes=%d-", &from); err == nil && r.ranges.Load() != rangesRefused {
		req.Header.Del("Range")
	}
	rec := httptest.NewRecorder()
	r.open.ServeHTTP(rec, req)
	body := rec.Body.Bytes()
	if alter := r.alter.Load(); alter != nil {
		body = (*alter)(body)
	}
	maps.Copy(w.Header(), rec.Header())
	if from > 0 && r.ranges.Load() == rangesServed {
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(body)-1, len(body)))
		body, rec.Code = body[from:], http.StatusPartialContent
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	}
	w.WriteHeader(rec.Code)
	upTo := r.cutAfter.Load()
	if upTo == 0 || int64(len(body)) <= upTo {
		_, _ = w.Write(body)
		return true
	}
	r.cut.Add(1)
	_, _ = w.Write(body[:upTo])
	panic(http.ErrAbortHandler)
}

func TestALayerIsFetchedFromTheRegistryWhateverItsManifestNames(t *testing.T) {
	f := newFixture(t)
	var asked atomic.Int64
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		w.WriteHeader(http.StatusNotFound)
	}))
	defer other.Close()
	img, err := mutate.Append(withLayers(t), mutate.Addendum{
		Layer: gzipLayer(t, tarOf(t, entry{Header: tar.Header{Name: "file", Typeflag: tar.TypeReg, Mode: 0o644}})),
		URLs:  []string{other.URL + "/internal"},
	})
	require.NoError(t, err)
	require.NoError(t, f.ensure(f.registry.push("org/acme/"+f.word, img)))
	require.Zero(t, asked.Load(), "a publisher's manifest makes the node ask no other host")
}

func TestLayerThatWasCutGoesOn(t *testing.T) {
	for name, ranges := range map[string]int64{
		"from where it was cut": rangesServed, "though ranges are ignored": rangesIgnored,
		"though ranges are refused": rangesRefused,
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			image := f.registry.push("org/acme/"+f.word, withLayers(t, gzipLayer(t, tarOf(t,
				entry{Header: tar.Header{Name: "large", Mode: 0o644}, content: random(3 << 20)}))))
			f.registry.ranges.Store(ranges)
			f.registry.cutAfter.Store(1 << 20)
			once := func(body []byte) []byte {
				if ranges != rangesServed && f.registry.cut.Load() > 0 {
					f.registry.cutAfter.Store(0)
				}
				return body
			}
			f.registry.alter.Store(&once)
			require.NoError(t, f.ensure(image))
			cuts := int64(1)
			if ranges == rangesServed {
				cuts = 3 // each answer has one MiB
			}
			require.GreaterOrEqual(t, f.registry.cut.Load(), cuts)
			f.start(f.spec(image, "wait"))
		})
	}
}

func TestRegistryThatEndsInTheMiddleOfALayerLeavesNothing(t *testing.T) {
	f := newFixture(t)
	image := f.registry.push("org/acme/"+f.word, withLayers(t, gzipLayer(t, tarOf(t,
		entry{Header: tar.Header{Name: "large", Mode: 0o644}, content: random(3 << 20)}))))
	f.registry.cutAfter.Store(1 << 20)
	gone := func(body []byte) []byte {
		f.registry.refuse.Store(http.StatusServiceUnavailable)
		return body
	}
	f.registry.alter.Store(&gone)
	err := f.ensure(image)
	require.True(t, fault.Is(err, fault.Unavailable), err)
	require.False(t, fault.IsPermanent(err), "it may pass")
	require.Empty(t, f.snapshots())
	f.registry.alter.Store(nil)
	f.registry.refuse.Store(0)
	require.NoError(t, f.ensure(image))
}

func parsed(t *testing.T, image string) runtime.ImageRef {
	t.Helper()
	ref, err := runtime.ParseImage(image)
	require.NoError(t, err)
	return ref
}

func TestImagesThatShareLayersArePulledSideBySideAndRemovedOneByOne(t *testing.T) {
	f := newFixture(t)
	shared := awkwardLayers(t)
	var pushed []string
	for n := range 4 {
		own := tarOf(t, entry{Header: tar.Header{Name: fmt.Sprintf("data/own%d", n), Mode: 0o600}, content: "own"})
		image := withLayers(t, append(shared, gzipLayer(t, own))...)
		pushed = append(pushed, f.registry.push(fmt.Sprintf("org/acme/%s%d", f.word, n), image))
	}
	var wg sync.WaitGroup
	var failed atomic.Pointer[error]
	for _, image := range pushed {
		wg.Go(func() {
			if err := f.ensure(image); err != nil {
				failed.Store(&err)
			}
		})
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		t.Fatal(*err)
	}
	// The layers of the app and of awkwardLayers, and one of each image.
	require.Len(t, f.snapshots(), 1+len(shared)+len(pushed))
	f.start(f.spec(pushed[1], "wait"))
	require.NoError(t, f.rt.RemoveUnusedImages(t.Context(), parsed(t, pushed[2])))
	for n, want := range []bool{false, true, true, false} {
		has, err := f.rt.HasImage(t.Context(), parsed(t, pushed[n]))
		require.NoError(t, err)
		require.Equal(t, want, has, n)
	}
	f.start(f.spec(pushed[2], "wait"))
}

func TestPullOfAnAgentThatEndsInTheMiddleLeavesNothing(t *testing.T) {
	eachWay(t, testPullEndsInTheMiddle, byMounts, byUnpacking)
}

func testPullEndsInTheMiddle(t *testing.T, f *fixture, _ string) {
	layers := awkwardLayers(t)
	image := f.registry.push("org/acme/"+f.word, withLayers(t, layers...))
	release := f.registry.holdLayer(layers[1])
	defer release()
	done := make(chan error, 1)
	go func() { done <- f.ensure(image) }()
	<-f.registry.holding
	require.NotEmpty(t, f.snapshots())
	require.NoError(t, f.rt.Close()) // as if it were killed: it can end neither snapshots nor lease
	release()
	require.Error(t, <-done)
	require.NotEmpty(t, f.snapshots())
	f.rt = f.open()
	require.Empty(t, f.snapshots())
	require.NoError(t, f.ensure(image))
}

func TestPullShowsItsProgress(t *testing.T) {
	f := newFixture(t)
	layers := awkwardLayers(t)
	img := withLayers(t, layers...)
	image := f.registry.push("org/acme/"+f.word, img)
	_, pulling := f.rt.PullProgress(image)
	require.False(t, pulling)
	all, err := img.Layers()
	require.NoError(t, err)
	var total, held int64
	for _, l := range all {
		size, err := l.Size()
		require.NoError(t, err)
		total += size
	}
	held, err = layers[1].Size()
	require.NoError(t, err)
	release := f.registry.holdLayer(layers[1])
	defer release()
	done := make(chan error, 1)
	go func() { done <- f.ensure(image) }()
	<-f.registry.holding
	want := runtime.PullProgress{Phase: runtime.PullFetching, DoneBytes: total - held, TotalBytes: total}
	require.Eventually(t, func() bool {
		p, pulling := f.rt.PullProgress(image)
		return pulling && p == want
	}, time.Minute, 5*time.Millisecond)
	release()
	require.NoError(t, <-done)
	_, pulling = f.rt.PullProgress(image)
	require.False(t, pulling)
}
