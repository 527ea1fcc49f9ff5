package runtime_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/containerfiles"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/e2e/containerdtest"
	"github.com/gpuaas/gpuaas/e2e/leakcheck"
	"github.com/gpuaas/gpuaas/e2e/sandbox"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/protocol"
)

// appBinary is compiled once for all tests.
var appBinary string

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == containerfiles.Name {
		// os.Exit would complain on standard error where coverage is counted, and the agent reads that.
		syscall.Exit(containerfiles.Run(os.Args[2:]))
	}
	// A run that is killed leaves no container, namespace or mount behind.
	os.Exit(sandbox.RunInTree(func() int { return runTests(m) }))
}

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "gpuaas-runtime-app-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	appBinary = filepath.Join(dir, "app")
	build := exec.Command("go", "build", "-trimpath", "-o", appBinary, "./testdata/app")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "compile the test's app: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

var fixtures atomic.Int64

// fixture is a containerd, a registry and a runtime of one test's own.
type fixture struct {
	t        *testing.T
	word     string // in the name of everything that is made
	daemon   *containerdtest.Daemon
	registry *testRegistry
	cfg      runtime.Config
	rt       *runtime.Runtime
	netns    string
	userns   string
}

func newFixture(t *testing.T, change ...func(*runtime.Config)) *fixture {
	t.Helper()
	return newFixtureIn(t, func(string) string { return "" }, change...)
}

// newFixtureOn is one whose containerd keeps everything on a file system of this size.
func newFixtureOn(t *testing.T, size string, change ...func(*runtime.Config)) *fixture {
	t.Helper()
	return newFixtureIn(t, func(dir string) string {
		disk := dir + "/disk"
		require.NoError(t, os.Mkdir(disk, 0o711))
		require.NoError(t, unix.Mount("tmpfs", disk, "tmpfs", 0, "mode=711,size="+size))
		t.Cleanup(func() { require.NoError(t, unix.Unmount(disk, unix.MNT_DETACH)) })
		return disk
	}, change...)
}

// newFixtureIn is one whose containerd keeps everything in the directory that place returns, where it is not empty.
func newFixtureIn(t *testing.T, place func(dir string) string, change ...func(*runtime.Config)) *fixture {
	t.Helper()
	skip.Root(t, "containers")
	f := &fixture{t: t, word: fmt.Sprintf("rt%dx%d", os.Getpid(), fixtures.Add(1))}
	leakcheck.Guard(t, leakcheck.Scope{Contains: []string{f.word}})
	dir := filepath.Join(os.TempDir(), f.word)
	require.NoError(t, os.Mkdir(dir, 0o711))
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	if at := place(dir); at != "" {
		before := os.TempDir()
		t.Setenv("TMPDIR", at)
		f.daemon = containerdtest.Start(t)
		t.Setenv("TMPDIR", before)
	} else {
		f.daemon = containerdtest.Start(t)
	}
	f.cfg = runtime.Config{
		Address: f.daemon.Address, Namespace: f.word, StateDir: dir + "/state", LogDir: dir + "/logs", RuncRoot: dir +
			"/runc", CgroupParent: "/" + f.word,
		ResolvConf: dir + "/resolv.conf",
	}
	require.NoError(t, os.WriteFile(f.cfg.ResolvConf, []byte("nameserver 127.0.0.53\nnameserver 192.0.2.53\nsearch "+
		"example.org\n"), 0o600))
	for _, c := range change {
		c(&f.cfg)
	}
	f.registry = newRegistry(t)
	f.newNamespaces()
	f.rt = f.open()
	t.Cleanup(func() {
		require.NoError(t, f.daemon.Start(context.WithoutCancel(t.Context())))
		require.NoError(t, f.open().Purge(context.WithoutCancel(t.Context())))
	})
	return f
}

func (f *fixture) open() *runtime.Runtime {
	f.t.Helper()
	rt, err := runtime.Open(context.WithoutCancel(f.t.Context()), f.cfg)
	require.NoError(f.t, err)
	f.t.Cleanup(func() { _ = rt.Close() })
	return rt
}

// newNamespaces makes a network namespace with a loopback interface and, if asked, the user namespace that owns it.
func (f *fixture) newNamespaces() {
	f.t.Helper()
	dir := f.t.TempDir()
	f.netns = filepath.Join(dir, f.word+"-net")
	pairs := map[string]string{"net": f.netns}
	holder := exec.Command("cat")
	holder.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if !f.cfg.NoUserNamespaces {
		f.userns = filepath.Join(dir, f.word+"-user")
		pairs["user"] = f.userns
		ids := []syscall.SysProcIDMap{{HostID: runtime.DefaultUIDMapBase, Size: runtime.DefaultUIDMapSize}}
		holder.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		holder.SysProcAttr.UidMappings, holder.SysProcAttr.GidMappings = ids, ids
	}
	stdin, err := holder.StdinPipe()
	require.NoError(f.t, err)
	require.NoError(f.t, holder.Start())
	for kind, path := range pairs {
		require.NoError(f.t, os.WriteFile(path, nil, 0o600))
		require.NoError(f.t, unix.Mount(fmt.Sprintf("/proc/%d/ns/%s", holder.Process.Pid, kind), path, "", unix.MS_BIND, ""))
		f.t.Cleanup(func() { require.NoError(f.t, unix.Unmount(path, unix.MNT_DETACH)) })
	}
	require.NoError(f.t, stdin.Close())
	require.NoError(f.t, holder.Wait())
	out, err := exec.Command("nsenter", "--net="+f.netns, "ip", "link", "set", "lo", "up").CombinedOutput()
	require.NoError(f.t, err, string(out))
}

// image pushes the app as an image and makes it ready on the node.
func (f *fixture) image(change ...func(*v1.Config)) string {
	f.t.Helper()
	ref := f.registry.push("org/acme/"+f.word, appImage(f.t, change...))
	require.NoError(f.t, f.ensure(ref))
	return ref
}

func (f *fixture) ensure(image string) error {
	f.t.Helper()
	ref, err := runtime.ParseImage(image)
	require.NoError(f.t, err)
	ref.RegistryHost = f.registry.host
	return f.rt.EnsureImage(f.t.Context(), ref, f.registry.credentials, f.registry.tls)
}

// spec is a run of the app with these arguments.
func (f *fixture) spec(image string, args ...string) runtime.Spec {
	member := uuid.Must(uuid.NewV7()).String()
	return runtime.Spec{
		ID: member + ".app.1", MemberID: member, InstanceID: uuid.Must(uuid.NewV7()).String(), Revision: 3,
		SpecDigest: "sha256:abc", NetNSPath: f.netns, UserNSPath: f.userns,
		Service: &protocol.Service{
			Name: "app", Image: image, Command: append([]string{"/app"}, args...),
			Resources: &protocol.Resources{CpuMillis: 500, MemoryBytes: 64 << 20, Pids: 64},
		},
	}
}

func (f *fixture) start(spec runtime.Spec) runtime.Run {
	f.t.Helper()
	run, err := f.rt.Start(f.t.Context(), spec)
	require.NoError(f.t, err)
	return run
}

// startWaiting starts another container that waits, and returns its id.
func (f *fixture) startWaiting(image string) string {
	f.t.Helper()
	spec := f.spec(image, "wait")
	f.start(spec)
	return spec.ID
}

// wait waits until the container is in the state, woken by the runtime's own events.
func (f *fixture) wait(id string, want runtime.State) runtime.Container {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), 60*time.Second)
	defer cancel()
	wake := f.rt.Events(ctx)
	for {
		c, err := f.rt.Get(ctx, id)
		require.NoError(f.t, err)
		if c.State == want {
			return c
		}
		select {
		case <-wake:
		case <-ctx.Done():
			f.t.Fatalf("container is %s, not %s: %s", c.State, want, f.log(id))
		}
	}
}

func (f *fixture) log(id string) string {
	f.t.Helper()
	r, err := f.rt.Logs(context.WithoutCancel(f.t.Context()), id, 0, false)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = r.Close() }()
	data, err := io.ReadAll(r)
	require.NoError(f.t, err)
	return string(data)
}

// waitForLog follows the log until it holds text.
func (f *fixture) waitForLog(id, text string) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), 60*time.Second)
	defer cancel()
	r, err := f.rt.Logs(ctx, id, 0, true)
	require.NoError(f.t, err)
	defer func() { _ = r.Close() }()
	var all bytes.Buffer
	for block := make([]byte, 4096); !strings.Contains(all.String(), text); {
		n, err := r.Read(block)
		all.Write(block[:n])
		require.NoErrorf(f.t, err, "the log ends without %q: %s", text, all.String())
	}
}

func appImage(t *testing.T, change ...func(*v1.Config)) v1.Image {
	t.Helper()
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		app, err := os.ReadFile(appBinary)
		if err != nil {
			return nil, err
		}
		var buf bytes.Buffer
		w := tar.NewWriter(&buf)
		for _, dir := range []string{"etc/", "tmp/", "home/", "scratch/"} {
			if err := w.WriteHeader(&tar.Header{Name: dir, Typeflag: tar.TypeDir, Mode: 0o755}); err != nil {
				return nil, err
			}
		}
		for _, file := range []struct {
			name    string
			content []byte
		}{
			{"app", app},
			{"app32", program32()},
			{"etc/passwd", []byte("root:x:0:0::/:/app\njovyan:x:1000:100::/home:/app\n")},
			{"etc/group", []byte("root:x:0:\nusers:x:100:\nlab:x:200:jovyan\n")},
		} {
			if err := w.WriteHeader(&tar.Header{Name: file.name, Mode: 0o755, Size: int64(len(file.content))}); err != nil {
				return nil, err
			}
			if _, err := w.Write(file.content); err != nil {
				return nil, err
			}
		}
		return io.NopCloser(&buf), w.Close()
	})
	require.NoError(t, err)
	img, err := mutate.AppendLayers(empty.Image, layer)
	require.NoError(t, err)
	cfg := v1.Config{
		Entrypoint: []string{"/app"}, Cmd: []string{"inspect"}, Env: []string{"FROM=image", "BOTH=image"},
		WorkingDir: "/home",
	}
	for _, c := range change {
		c(&cfg)
	}
	img, err = mutate.Config(img, cfg)
	require.NoError(t, err)
	file, err := img.ConfigFile()
	require.NoError(t, err)
	file.OS, file.Architecture = "linux", goruntime.GOARCH
	img, err = mutate.ConfigFile(img, file)
	require.NoError(t, err)
	return img
}

// testRegistry is a real registry over TLS that wants a bearer token, for which it wants user and password.
type testRegistry struct {
	t       *testing.T
	host    string
	tls     *tls.Config
	open    http.Handler
	corrupt atomic.Bool  // answers blobs with other bytes of the same length
	refuse  atomic.Int64 // the status of every answer but tokens
	pulls   atomic.Int64
	http2   atomic.Int64 // requests for blobs over HTTP/2
	server  *httptest.Server
	hold    atomic.Pointer[chan struct{}] // blobs wait for it, all or that of holdBlob
	// holdBlob is the digest of the one blob that waits.
	holdBlob atomic.Pointer[string]
	holding  chan struct{} // told once when one waits

	// cutAfter cuts the answers with blobs that have more bytes; cut counts them. ranges says what
	// happens with a Range. alter changes the answers.
	cutAfter, cut, ranges atomic.Int64
	alter                 atomic.Pointer[func(body []byte) []byte]
}

const (
	testUser, testPassword = "node", "secret"
	testToken              = "a-token"
)

func newRegistry(t *testing.T) *testRegistry {
	r := &testRegistry{
		t: t, holding: make(chan struct{}, 16),
		open: registry.New(registry.Logger(log.New(io.Discard, "", 0))),
	}
	r.server = httptest.NewUnstartedServer(r)
	r.server.Config.ErrorLog = log.New(io.Discard, "", 0)
	r.server.EnableHTTP2 = true
	r.server.StartTLS()
	t.Cleanup(r.server.Close)
	r.host = r.server.Listener.Addr().String()
	// Uploads share no connection: one that waits for the registry's lock would keep the others from ending.
	own := r.server.Client().Transport.(*http.Transport)
	own.ForceAttemptHTTP2 = false
	r.tls = own.TLSClientConfig
	return r
}

func (r *testRegistry) credentials(_ context.Context, repository string) (string, string, error) {
	if !strings.HasPrefix(repository, "org/acme/") {
		return "", "", fmt.Errorf("no credentials for %s", repository)
	}
	return testUser, testPassword, nil
}

func (r *testRegistry) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if req.URL.Path == "/token" {
		if user, password, ok := req.BasicAuth(); !ok || user != testUser || password != testPassword {
			http.Error(w, "{}", http.StatusUnauthorized)
			return
		}
		_, _ = fmt.Fprintf(w, `{"token":%q}`, testToken)
		return
	}
	if status := r.refuse.Load(); status != 0 {
		w.WriteHeader(int(status))
		return
	}
	if req.Method == http.MethodGet || req.Method == http.MethodHead {
		if req.Header.Get("Authorization") != "Bearer "+testToken {
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="https://%s/token",service="test"`, r.host))
			http.Error(w, "{}", http.StatusUnauthorized)
			return
		}
		r.pulls.Add(1)
		if req.ProtoMajor == 2 && strings.Contains(req.URL.Path, "/blobs/") {
			r.http2.Add(1)
		}
	}
	only := r.holdBlob.Load()
	if mayGoOn := r.hold.Load(); mayGoOn != nil && req.Method == http.MethodGet && strings.Contains(req.URL.Path,
		"/blobs/") &&
		(only == nil || strings.HasSuffix(req.URL.Path, *only)) {
		r.holding <- struct{}{}
		<-*mayGoOn
	}
	if r.corrupt.Load() && strings.Contains(req.URL.Path, "/blobs/") {
		rec := httptest.NewRecorder()
		r.open.ServeHTTP(rec, req)
		body := rec.Body.Bytes()
		if len(body) > 0 {
			body[len(body)-1] ^= 1
		}
		maps.Copy(w.Header(), rec.Header())
		w.WriteHeader(rec.Code)
		_, _ = w.Write(body)
		return
	}
	if !r.cutAnswer(w, req) {
		r.open.ServeHTTP(w, req)
	}
}

// push stores an image and returns <repository>@<digest>.
func (r *testRegistry) push(repository string, img v1.Image) string {
	r.t.Helper()
	ref, err := name.ParseReference(r.host + "/" + repository + ":latest")
	require.NoError(r.t, err)
	digest, err := img.Digest()
	require.NoError(r.t, err)
	require.NoError(r.t, remote.Write(ref, img, r.letIn()))
	r.pulls.Store(0)
	r.http2.Store(0)
	return repository + "@" + digest.String()
}

// pushIndex stores an index of an image for a platform and returns <repository>@<digest>.
func (r *testRegistry) pushIndex(repository string, img v1.Image, platform v1.Platform) string {
	r.t.Helper()
	index := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{
		Add: img, Descriptor: v1.Descriptor{Platform: &platform},
	})
	ref, err := name.ParseReference(r.host + "/" + repository + ":latest")
	require.NoError(r.t, err)
	digest, err := index.Digest()
	require.NoError(r.t, err)
	require.NoError(r.t, remote.WriteIndex(ref, index, r.letIn()))
	return repository + "@" + digest.String()
}

// letIn is for pushing, which needs no credentials, but go-containerregistry checks for existing layers first.
func (r *testRegistry) letIn() remote.Option {
	return remote.WithTransport(roundTripper(func(req *http.Request) (*http.Response, error) {
		req = req.Clone(req.Context())
		req.Header.Set("Authorization", "Bearer "+testToken)
		return r.server.Client().Transport.RoundTrip(req)
	}))
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
