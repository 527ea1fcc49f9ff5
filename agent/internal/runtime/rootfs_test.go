package runtime_test

import (
	"archive/tar"
	"encoding/binary"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	byMounts    = "idmapped mounts"
	byUnpacking = "shifted while unpacking"
	byHost      = "ids of the host"
)

// ways are all in which an image's files get the user ids of containers.
func ways() map[string]func(*runtime.Config) {
	return map[string]func(*runtime.Config){
		byMounts:    func(*runtime.Config) {},
		byUnpacking: func(c *runtime.Config) { c.NoIDMappedMounts = true },
		byHost:      func(c *runtime.Config) { c.NoUserNamespaces = true },
	}
}

// eachWay runs a test in these ways.
func eachWay(t *testing.T, test func(t *testing.T, f *fixture, way string), names ...string) {
	t.Helper()
	for _, way := range names {
		t.Run(way, func(t *testing.T) { test(t, newFixture(t, ways()[way]), way) })
	}
}

// capabilityV2 is cap_net_raw+ep as the value of security.capability.
const capabilityV2 = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// acl is an access list with a named user and a named group.
func acl(user, group uint32) string {
	b := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range []struct {
		tag, perm uint16
		id        uint32
	}{{1, 6, ^uint32(0)}, {2, 4, user}, {4, 4, ^uint32(0)}, {8, 6, group}, {16, 6, ^uint32(0)}, {32, 0, ^uint32(0)}} {
		b = binary.LittleEndian.AppendUint16(b, e.tag)
		b = binary.LittleEndian.AppendUint16(b, e.perm)
		b = binary.LittleEndian.AppendUint32(b, e.id)
	}
	return string(b)
}

// ownedLayers hold files of many owners, with ids in their attributes too, and files for the app's alter.
func ownedLayers(t *testing.T) []v1.Layer {
	t.Helper()
	file := func(name string, change func(*tar.Header)) entry {
		h := tar.Header{Name: "kept/" + name, Mode: 0o644, Uid: 1000, Gid: 100}
		if change != nil {
			change(&h)
		}
		return entry{Header: h, content: name}
	}
	entries := []entry{
		{Header: tar.Header{Name: "kept/", Typeflag: tar.TypeDir, Mode: 0o755}},
		{Header: tar.Header{Name: "kept/dir/", Typeflag: tar.TypeDir, Mode: 0o2775, Uid: 65535, Gid: 65535}},
		file("last", func(h *tar.Header) { h.Uid, h.Gid = 65535, 65535 }),
		file("suid", func(h *tar.Header) { h.Mode, h.Uid = 0o4755, 0 }),
		file("sgid", func(h *tar.Header) { h.Mode, h.Gid = 0o2755, 5 }),
		file("capable", func(h *tar.Header) { h.PAXRecords = xattrs("security.capability", capabilityV2) }),
		file("listed", func(h *tar.Header) {
			h.Mode, h.PAXRecords = 0o660, xattrs("system.posix_acl_access", acl(7, 65535))
		}),
		{Header: tar.Header{
			Name: "kept/listed-dir/", Typeflag: tar.TypeDir, Mode: 0o755,
			PAXRecords: xattrs("system.posix_acl_default", acl(0, 9)),
		}},
		{Header: tar.Header{Name: "kept/cleared/deep/file", Mode: 0o600}, content: "no entries for its directories"},
	}
	for _, name := range []string{"written", "appended", "given", "moved", "removed", "linked", "marked"} {
		entries = append(entries, file(name, nil))
	}
	return append([]v1.Layer{gzipLayer(t, tarOf(t, entries...))}, awkwardLayers(t)...)
}

// inContainer are the lines that the app prints for the files of the layers above.
func inContainer(t *testing.T, f *fixture, image, command string) []string {
	t.Helper()
	spec := f.spec(image, command, "/kept", "/data", "/opaque", "/turns", "/lib", "/here", "/fifo", "/null", "/app",
		"/etc/passwd")
	spec.Service.User = "0:0"
	f.start(spec)
	f.waitForLog(spec.ID, "listed\n")
	require.EqualValues(t, 0, f.wait(spec.ID, runtime.StateExited).ExitCode)
	lines := strings.Split(strings.TrimSpace(f.log(spec.ID)), "\n")
	require.NoError(t, f.rt.Remove(t.Context(), spec.ID))
	return lines
}

func TestRootFileSystemIsTheSameInEveryWay(t *testing.T) {
	image := withLayers(t, ownedLayers(t)...)
	type lists struct {
		pristine, altered []string
		layers            [][]string
	}
	seen := map[string]lists{}
	eachWay(t, func(t *testing.T, f *fixture, way string) {
		require.Equal(t, way == byUnpacking, slices.Contains(f.rt.Conditions(), protocol.ConditionNoMappedMounts))
		ref := f.registry.push("org/acme/"+f.word, image)
		require.NoError(t, f.ensure(ref))
		l := lists{layers: f.unpacked(ref, way)}
		l.pristine, l.altered = inContainer(t, f, ref, "list"), inContainer(t, f, ref, "alter")
		require.Equal(t, l.pristine, inContainer(t, f, ref, "list"), "what one container changes no other sees")
		require.Equal(t, l.layers, f.unpacked(ref, way), "nothing writes to an image")
		seen[way] = l
	}, slices.Sorted(maps.Keys(ways()))...)
	want := seen[byHost]
	require.Contains(t, strings.Join(want.pristine, "\n"), "/kept/capable mode=100644 owner=1000:100")
	require.Contains(t, strings.Join(want.altered, "\n"), "/kept/given mode=104711 owner=42:43")
	for way, got := range seen {
		require.Equal(t, want.pristine, got.pristine, way)
		require.Equal(t, want.altered, got.altered, way)
	}
	require.Equal(t, want.layers, seen[byMounts].layers)
	require.Len(t, seen[byUnpacking].layers, len(want.layers))
	for i, lines := range want.layers {
		require.Equal(t, shifted(t, lines), seen[byUnpacking].layers[i], "layer %d from the top", i)
	}
}

// unpacked lists the files of each layer of an image, the topmost first.
func (f *fixture) unpacked(image, way string) (layers [][]string) {
	f.t.Helper()
	suffix := ""
	if way == byUnpacking {
		suffix = fmt.Sprintf("-%d-%d", runtime.DefaultUIDMapBase, runtime.DefaultUIDMapSize)
	}
	dirs, _ := layerDirs(f.t, f, f.word, image, suffix)
	for _, dir := range dirs {
		layers = append(layers, listing(f.t, dir))
	}
	return layers
}

var ownerInList = regexp.MustCompile(`owner=(\d+):(\d+)`)

// shifted is the listing of a layer with its ids moved to those of containers, in attributes too.
func shifted(t *testing.T, lines []string) (out []string) {
	t.Helper()
	const base = runtime.DefaultUIDMapBase
	shift := func(id string) string {
		n, err := strconv.Atoi(id)
		require.NoError(t, err)
		return strconv.Itoa(n + base)
	}
	capability := strings.Replace(capabilityV2, "\x02", "\x03", 1) + string(binary.LittleEndian.AppendUint32(nil, base))
	ids := strings.NewReplacer(
		fmt.Sprintf("%q", acl(7, 65535)), fmt.Sprintf("%q", acl(7+base, 65535+base)),
		fmt.Sprintf("%q", acl(0, 9)), fmt.Sprintf("%q", acl(base, 9+base)),
		fmt.Sprintf("%q", capabilityV2), fmt.Sprintf("%q", capability),
	)
	for _, line := range lines {
		owner := ownerInList.FindStringSubmatch(line)
		line = strings.Replace(line, owner[0], "owner="+shift(owner[1])+":"+shift(owner[2]), 1)
		out = append(out, ids.Replace(line))
	}
	return out
}

func TestImageWithAnOwnerBeyondTheContainersIDsIsRefused(t *testing.T) {
	eachWay(t, func(t *testing.T, f *fixture, _ string) {
		for _, h := range []tar.Header{{Name: "file", Uid: 65536}, {Name: "file", Gid: 1 << 30}, {Name: "file", Uid: -1}} {
			err := f.ensure(f.registry.push("org/acme/"+f.word, withLayers(t, gzipLayer(t, tarOf(t, entry{Header: h})))))
			require.True(t, fault.Is(err, fault.Unprocessable), err)
			require.True(t, fault.IsPermanent(err))
			require.Contains(t, fault.As(err).Public, fmt.Sprintf("%d:%d; containers have ids below 65536", h.Uid, h.Gid))
			require.Empty(t, f.snapshots())
		}
	}, byMounts, byUnpacking)
}

func TestAnImageIsOnTheDiskOnce(t *testing.T) {
	const size = 16 << 20
	f := newFixture(t)
	big := gzipLayer(t, tarOf(t, entry{Header: tar.Header{Name: "big", Mode: 0o644}, content: random(size)}))
	ref := f.registry.push("org/acme/"+f.word, withLayers(t, big))
	require.NoError(t, f.ensure(ref))
	f.startWaiting(ref)
	app, err := os.Stat(appBinary)
	require.NoError(t, err)
	stored, err := f.rt.ImageStoreBytes(t.Context())
	require.NoError(t, err)
	require.Less(t, stored, (size+app.Size())*11/10)
}

// mountsAt counts the mounts at a place.
func mountsAt(t *testing.T, dir string) (n int) {
	t.Helper()
	data, err := os.ReadFile("/proc/self/mountinfo")
	require.NoError(t, err)
	for line := range strings.Lines(string(data)) {
		if strings.Fields(line)[4] == dir {
			n++
		}
	}
	return n
}

func TestTheMappedMountIsReadOnlyPrivateAndOne(t *testing.T) {
	f := newFixture(t)
	mapped := filepath.Join(f.cfg.StateDir, ".snapshots")
	first := f.startWaiting(f.image())
	second := f.startWaiting(f.image())
	require.Equal(t, 1, mountsAt(t, mapped))
	require.ErrorIs(t, os.WriteFile(mapped+"/new", nil, 0o600), unix.EROFS)
	files, err := filepath.Glob(mapped + "/*/fs/app")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		require.ErrorIs(t, os.Chmod(file, 0o777), unix.EROFS)
		var st unix.Stat_t
		require.NoError(t, unix.Stat(file, &st))
		require.EqualValues(t, runtime.DefaultUIDMapBase, st.Uid)
	}
	info, err := os.Stat(mapped)
	require.NoError(t, err)
	require.Zero(t, info.Mode().Perm()&0o077, "no user of the node walks through it")

	// An agent that was killed leaves the mount; the next one uses it, and one that ends takes it away. Containers go on.
	next := f.open()
	require.Equal(t, 1, mountsAt(t, mapped))
	require.NoError(t, f.rt.Close())
	require.Zero(t, mountsAt(t, mapped))
	f.rt = next
	for _, id := range []string{first, second} {
		_, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/etc/passwd", f.pidOf(id)))
		require.NoError(t, err)
	}
	// A start makes the mount anew where it is gone, or is of something else.
	f.startWaiting(f.image())
	require.Equal(t, 1, mountsAt(t, mapped))
	require.NoError(t, unix.Unmount(mapped, unix.MNT_DETACH))
	require.NoError(t, unix.Mount("tmpfs", mapped, "tmpfs", 0, ""))
	third := f.startWaiting(f.image())
	require.Equal(t, 1, mountsAt(t, mapped))
	require.Equal(t, runtime.StateRunning, f.wait(third, runtime.StateRunning).State)
}

func TestAnImageOfTheOtherWayIsPulledAnewAndBothGo(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	ref, err := runtime.ParseImage(image)
	require.NoError(t, err)
	for _, shifted := range []bool{true, false, true} {
		require.NoError(t, f.rt.Close())
		f.cfg.NoIDMappedMounts = shifted
		f.rt = f.open()
		require.NoError(t, f.ensure(image))
		spec := f.spec(image, "inspect")
		require.EqualValues(t, 0, seen(t, f, spec)["uid"])
		require.NoError(t, f.rt.Remove(t.Context(), spec.ID))
	}
	has, err := f.rt.HasImage(t.Context(), ref)
	require.NoError(t, err)
	require.True(t, has)
	require.NoError(t, f.rt.RemoveUnusedImages(t.Context()))
	require.Empty(t, f.snapshots())
}

func TestIDsBeyondTheRangeAreTheOnlyOnesThatAShiftRefuses(t *testing.T) {
	for _, id := range []int{0, 1, 65535} {
		h := tar.Header{Name: "f", Uid: id, Gid: id}
		require.NoError(t, runtime.ShiftEntry(&h, 100000, 65536))
		require.Equal(t, []int{id + 100000, id + 100000}, []int{h.Uid, h.Gid})
	}
	for _, value := range []string{
		"", "x", "\x00", capabilityV2[:19], capabilityV2 + "x", "\xff\xff\xff\xff", acl(1, 2)[:30],
	} {
		for _, name := range []string{"security.capability", "system.posix_acl_access", "system.posix_acl_default"} {
			h := tar.Header{Name: "f", PAXRecords: xattrs(name, value)}
			require.NoError(t, runtime.ShiftEntry(&h, 100000, 65536))
			require.Len(t, h.PAXRecords["SCHILY.xattr."+name], len(value), "%s %q", name, value)
		}
	}
}
