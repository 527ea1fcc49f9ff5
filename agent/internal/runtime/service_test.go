package runtime

import (
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestCommandAndArgumentsFollowKubernetes(t *testing.T) {
	image := ocispec.ImageConfig{Entrypoint: []string{"/entry"}, Cmd: []string{"image", "args"}}
	for _, c := range []struct{ command, args, want []string }{
		{nil, nil, []string{"/entry", "image", "args"}},
		{[]string{"/own"}, nil, []string{"/own"}},
		{nil, []string{"own"}, []string{"/entry", "own"}},
		{[]string{"/own"}, []string{"own"}, []string{"/own", "own"}},
	} {
		got, err := arguments(&protocol.Service{Command: c.command, Args: c.args}, image)
		require.NoError(t, err)
		require.Equal(t, c.want, got)
	}
	_, err := arguments(&protocol.Service{}, ocispec.ImageConfig{})
	require.ErrorContains(t, err, "names a command")
}

// The node checks again what the manifest's schema has checked.
func TestAServiceIsRefusedWhateverItsManifestSays(t *testing.T) {
	file := func(path string, mode uint32) *protocol.Service {
		return &protocol.Service{Name: "db", Files: []*protocol.File{{Path: path, Mode: mode}}}
	}
	for why, s := range map[string]*protocol.Service{
		"no name":              {Name: ""},
		"a name of two lines":  {Name: "db\n10.0.0.1 evil"},
		"an alias with blanks": {Name: "db", Aliases: []string{"a b"}},
		"a dependency's name":  {Name: "db", DependsOn: []*protocol.Dependency{{Service: "a b"}}},
		"too many aliases":     {Name: "db", Aliases: strings.Split(strings.Repeat("a ", 17)+"a", " ")},
		"raw packets":          {Name: "db", Capabilities: []string{"CAP_NET_RAW"}},
		"administration":       {Name: "db", Capabilities: []string{"CAP_SYS_ADMIN"}},
		"a relative file":      file("etc/x", 0o444),
		"a file outside":       file("/etc/../x", 0o444),
		"the hosts file":       file("/etc/hosts", 0o444),
		"the config":           file("/run/gpuaas/config.json", 0o444),
		"the kernel's files":   file("/proc/sys/x", 0o444),
		"a set-user-id bit":    file("/x", 0o4755),
		"a file twice":         {Name: "db", Files: []*protocol.File{{Path: "/x"}, {Path: "/x"}}},
		"a large file": {Name: "db", Files: []*protocol.File{{
			Path: "/x", Content: strings.Repeat("x", maxFilesBytes+1),
		}}},
	} {
		spec := Spec{ID: "m.1", MemberID: "m", Service: s, NetNSPath: "/ns"}
		require.Error(t, spec.check(hostSupport{}), why)
	}
	good := Spec{ID: "m.1", MemberID: "m", NetNSPath: "/ns", Service: &protocol.Service{
		Name: "db", Aliases: []string{"database.shop"}, Capabilities: manifest.Capabilities(),
		Files: []*protocol.File{{Path: "/etc/db.conf", Content: "x", Mode: 0o440}},
	}}
	require.NoError(t, good.check(hostSupport{}))
}

// An added capability is of use to a user that is not root, which has no other.
func TestAddedCapabilitiesReachEachUser(t *testing.T) {
	s := &protocol.Service{Capabilities: []string{"CAP_SYS_NICE"}}
	require.Equal(t, []string{"CAP_SYS_NICE"}, capabilitiesOf(s, user{uid: 1000}).Ambient)
	require.Empty(t, capabilitiesOf(&protocol.Service{}, user{uid: 1000}).Bounding)
	root := capabilitiesOf(s, user{})
	require.Contains(t, root.Effective, "CAP_SYS_NICE")
	require.Contains(t, root.Effective, "CAP_CHOWN")
	require.Empty(t, root.Ambient)
}
