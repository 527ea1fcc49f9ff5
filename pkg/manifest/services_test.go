package manifest_test

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

func chat(t testing.TB) string {
	t.Helper()
	doc, err := os.ReadFile(filepath.Join("testdata", "chat.yaml"))
	require.NoError(t, err)
	return string(doc)
}

func chatWorkload(t testing.TB, env *protocol.Envelope, v manifest.Verified, shape manifest.Shape) *protocol.Workload {
	t.Helper()
	services, err := manifest.Lower(v.Manifest(), manifest.Inputs{ConfigJSON: `{"region":"eu"}`}, shape)
	require.NoError(t, err)
	return &protocol.Workload{
		Id: "m", OrgSlug: "acme", AppSlug: "chat", AppVersion: "1.0.0", Revision: 1, Manifest: env, Services: services,
		ReadinessTimeoutSeconds: 60,
	}
}

func TestEachServiceIsLowered(t *testing.T) {
	m, err := manifest.Parse([]byte(chat(t)))
	require.NoError(t, err)
	require.Contains(t, m.Features(), manifest.FeatureServices)
	asJSON, err := m.JSON()
	require.NoError(t, err)
	again, err := manifest.Parse(asJSON)
	require.NoError(t, err)
	require.Equal(t, m, again)
	services, err := manifest.Lower(m, manifest.Inputs{}, manifest.Shape{
		CPUMillis: 2000, AcceleratorVendor: "nvidia", AcceleratorIDs: []string{"GPU-1"},
		Ports: []manifest.PortChoice{{Name: "sql", HostPort: 30001}},
	})
	require.NoError(t, err)
	lowered, err := protojson.Marshal(&protocol.Workload{Services: services})
	require.NoError(t, err)
	golden(t, "chat.lowered.golden.json", indented(t, lowered))
	one := 1
	choice := m.ChoiceOf(services)
	require.Equal(t, manifest.Choice{
		Accelerators: &one, CPUMillis: 2000, MemoryMiB: 1024, Ports: []manifest.PortChoice{{Name: "sql", HostPort: 30001}},
	}, choice)
	cpu, memory := m.Demand(choice)
	require.EqualValues(t, 2600, cpu)
	require.EqualValues(t, 1344, memory)
	require.Len(t, m.Images(), 4)
}

// Whatever of the bounds a tenant chooses is admitted; whichever field of whichever service is changed then is not.
func TestLaw01NoFieldOfAnyServiceMayDeviate(t *testing.T) {
	w := newWorld(t, "org/acme/", "acme")
	env, v := w.verify(t, chat(t))
	rapid.Check(t, func(rt *rapid.T) {
		shape := manifest.Shape{
			CPUMillis:   uint32(rapid.IntRange(250, 8000).Draw(rt, "cpu")),
			MemoryBytes: uint64(rapid.IntRange(256, 65536).Draw(rt, "memory")) << 20,
		}
		for i := range rapid.IntRange(0, 4).Draw(rt, "accelerators") {
			shape.AcceleratorVendor = "nvidia"
			shape.AcceleratorIDs = append(shape.AcceleratorIDs, fmt.Sprintf("GPU-%d", i))
		}
		if port := rapid.Uint32Range(0, 65535).Draw(rt, "port"); port > 0 {
			shape.Ports = []manifest.PortChoice{{Name: "sql", HostPort: port}}
		}
		workload := chatWorkload(t, env, v, shape)
		require.NoError(t, manifest.Admits(v, workload))
		n, i := 0, rapid.IntRange(0, 2).Draw(rt, "service")
		for change := range deviations(workload.GetServices()[i].ProtoReflect()) {
			changed, ok := proto.Clone(workload).(*protocol.Workload)
			require.True(t, ok)
			change.apply(changed.GetServices()[i].ProtoReflect())
			err := manifest.Admits(v, changed)
			if isChoice(i, change.field) {
				require.False(t, fault.Is(err, fault.Internal), "%v", err)
			} else {
				require.True(t, fault.Is(err, fault.Forbidden), "service %d, %s: %v", i, change.field, err)
			}
			n++
		}
		require.Greater(t, n, 25)
	})
}

// isChoice says that a tenant may choose the field, within bounds.
func isChoice(service int, field string) bool {
	switch field {
	case "ports.host_port":
		return true
	case "resources.cpu_millis", "resources.memory_bytes", "resources.accelerator_ids":
		return service == 0
	}
	return false
}

// change is a change of one field of a message like the one that it was found in.
type change struct {
	field string
	apply func(protoreflect.Message)
}

// deviations yields changes of each field of a message: another value, one more, one less, none.
func deviations(m protoreflect.Message) func(func(change) bool) {
	return func(yield func(change) bool) {
		fields := m.Descriptor().Fields()
		for n := range fields.Len() {
			fd := fields.Get(n)
			name := string(fd.Name())
			switch {
			case fd.IsList():
				deviateList(fd, m.Get(fd).List(), yield)
			case fd.Message() != nil && m.Has(fd):
				yield(change{name, func(m protoreflect.Message) { m.Clear(fd) }})
				inside := func(m protoreflect.Message) protoreflect.Message { return m.Mutable(fd).Message() }
				deviateInside(name, m.Get(fd).Message(), inside, yield)
			case fd.Message() != nil:
				yield(change{name, func(m protoreflect.Message) { m.Mutable(fd) }})
			default:
				yield(change{name, func(m protoreflect.Message) { m.Set(fd, another(fd, m.Get(fd))) }})
			}
		}
	}
}

func deviateList(fd protoreflect.FieldDescriptor, list protoreflect.List, yield func(change) bool) {
	name := string(fd.Name())
	yield(change{name, func(m protoreflect.Message) {
		list := m.Mutable(fd).List()
		list.Append(another(fd, list.NewElement()))
	}})
	for i := range list.Len() {
		yield(change{name, func(m protoreflect.Message) { m.Mutable(fd).List().Truncate(i) }})
		if fd.Message() == nil {
			yield(change{name, func(m protoreflect.Message) {
				list := m.Mutable(fd).List()
				list.Set(i, another(fd, list.Get(i)))
			}})
			continue
		}
		inside := func(m protoreflect.Message) protoreflect.Message { return m.Mutable(fd).List().Get(i).Message() }
		deviateInside(name, list.Get(i).Message(), inside, yield)
	}
}

func deviateInside(name string, m protoreflect.Message, inside func(protoreflect.Message) protoreflect.Message,
	yield func(change) bool,
) {
	for c := range deviations(m) {
		yield(change{name + "." + c.field, func(m protoreflect.Message) { c.apply(inside(m)) }})
	}
}

// another is a value unlike one that the sample holds.
func another(fd protoreflect.FieldDescriptor, v protoreflect.Value) protoreflect.Value {
	switch fd.Kind() { //nolint:exhaustive // no service has fields of the other kinds
	case protoreflect.StringKind:
		return protoreflect.ValueOfString("another")
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(77777)
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(77777)
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(!v.Bool())
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(99)
	}
	return v
}

// badServices is an edit that makes the sample invalid, and how the fault names it.
type badServices struct{ from, to, pointer, reason string }

// badTopology lists services that contradict each other.
func badTopology() map[string]badServices {
	return map[string]badServices{
		"main is no service":     {"main: server", "main: nobody", "/main", "names no service"},
		"no main":                {"    main: server\n", "", "/main", "is required"},
		"a name twice":           {"name: migrate", "name: db", "/services/2/name", "stands twice"},
		"an alias that is taken": {"[api, api.chat]", "[db]", "/services/0/aliases/0", "stands twice"},
		"localhost":              {"[api, api.chat]", "[localhost]", "/services/0/aliases/0", "localhost"},
		"an address":             {"[api, api.chat]", "[10.0.0.1]", "/services/0/aliases/0", "looks like an address"},
		"no host name":           {"name: migrate", "name: my_db", "/services/2/name", "must match"},
		"an unknown service":     {"[{service: db}]", "[{service: dc}]", "/services/2/depends_on/0/service", "names no"},
		"a dependency twice": {
			"[{service: db}]", "[{service: db}, {service: db, condition: service_healthy}]",
			"/services/2/depends_on/1/service", "stands twice",
		},
		"a cycle": {
			"      - name: db\n", "      - name: db\n        depends_on: [{service: server}]\n",
			"/services/0/depends_on", "server waits for db waits for server",
		},
		"itself": {"[{service: db}]", "[{service: migrate}]", "/services/2/depends_on", "migrate waits for migrate"},
		"health without a probe": {
			"        readiness: {kind: exec, command: [pg_isready]}\n", "",
			"/services/0/depends_on/0/condition", "needs a readiness probe",
		},
		"one that never completes": {
			"restart: on_failure", "restart: always", "/services/0/depends_on/1/condition", "never completes",
		},
		"a main that completes": {
			"restart: always", "restart: never", "/services/0/restart", "main service",
		},
		"a port name twice": {"name: sql,", "name: http,", "/services/1/ports/0/name", "stands twice"},
		"a probe of another's port": {
			"{kind: exec, command: [pg_isready]}", "{kind: tcp, port: http}", "/services/1/readiness/port", "must name a port",
		},
		"accelerators beside main": {
			"          disk_mib: 256", "          accelerators: {min: 1, default: 1, max: 1}",
			"/services/2/resources/accelerators", "belongs to the main service",
		},
		"an image for accelerators beside main": {
			"          - name: any\n            accelerator: none", "          - name: any\n            accelerator: amd",
			"/services/1/image_variants/0/accelerator", "must be none",
		},
	}
}

// badContents lists what no service may have.
func badContents() map[string]badServices {
	return map[string]badServices{
		"a capability of the host": {"[CAP_SYS_NICE]", "[CAP_SYS_ADMIN]", "/services/0/capabilities/0", "must be one of"},
		"a file of the kernel":     {"/etc/server.conf", "/proc/sys/x", "/services/0/files/0/path", "platform's own"},
		"a file of the platform":   {"/etc/server.conf", "/run/gpuaas/x", "/services/0/files/0/path", "platform's own"},
		"a file among parameters": {
			"/etc/server.conf", "/run/gpuaas-parameters/x", "/services/0/files/0/path", "platform's own",
		},
		"a file of the node": {"/etc/server.conf", "/etc/hosts", "/services/0/files/0/path", "platform's own"},
		"scratch over a file of the node": {
			"{path: /tmp,", "{path: /etc/resolv.conf,", "/services/0/scratch/0/path", "platform's own",
		},
		"less CPU than the kernel gives": {
			"cpu_millis: {min: 250,", "cpu_millis: {min: 9,", "/services/0/resources/cpu_millis/min", "at least 10",
		},
		"less memory than a container needs": {
			"memory_mib: {min: 256,", "memory_mib: {min: 7,", "/services/0/resources/memory_mib/min", "at least 8",
		},
		"a file path with dots": {"/etc/server.conf", "/etc/../x", "/services/0/files/0/path", "clean absolute"},
		"a file in scratch":     {"/etc/server.conf", "/tmp/x", "/services/0/files/0/path", "scratch"},
		"a set-user-id file":    {`mode: "0440"`, `mode: "4755"`, "/services/0/files/0/mode", "must match"},
		"a file that is too large": {
			`"log = info\n"`, strings.Repeat("x", 65537), "/services/0/files/0/content", "at most 65536",
		},
		"a file of too many bytes": {
			`"log = info\n"`, strings.Repeat("ä", 32769), "/services/0/files/0/content", "larger than 65536",
		},
		"too many bytes in all": {
			`- {path: /etc/server.conf, content: "log = info\n", mode: "0440"}`,
			"- {path: /1, content: " + strings.Repeat("x", 60000) + "}\n          - {path: /2, content: " +
				strings.Repeat("x", 60000) + "}\n          - {path: /3, content: " + strings.Repeat("x", 20000) + "}",
			"/version/runtime_profile", "131072 bytes in all",
		},
		"another backend": {"runtime_backend: docker_compose", "runtime_backend: ray", "/runtime_profile/kind", "differs"},
		"two kinds":       {"kind: docker_compose", "kind: launchable_oci", "/services", "is not a known key"},
		"a key of one": {
			"    main: server\n", "    main: server\n    command: [x]\n", "/command", "is not a known key",
		},
		"an unknown parameter": {
			"{parameter: model, prefix: --model=}", "{parameter: x}", "/args/1/parameter", "is not declared",
		},
	}
}

func TestServicesThatContradictEachOtherAreRefused(t *testing.T) {
	cases := badTopology()
	maps.Copy(cases, badContents())
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			require.Contains(t, chat(t), c.from)
			_, err := manifest.Parse([]byte(strings.Replace(chat(t), c.from, c.to, 1)))
			require.Error(t, err)
			require.Condition(t, func() bool {
				for _, f := range fault.As(err).Fields {
					if strings.HasSuffix(f.Pointer, c.pointer) && strings.Contains(f.Reason, c.reason) {
						return true
					}
				}
				return false
			}, "%+v", fault.As(err).Fields)
		})
	}
}

func TestEveryImageOfEveryServiceIsThePublishers(t *testing.T) {
	w := newWorld(t, "org/acme/", "acme")
	env, err := manifest.Sign([]byte(strings.Replace(chat(t), "org/acme/chat/db", "org/evil/chat/db", 1)),
		protocol.NewEd25519Signer(w.publisher))
	require.NoError(t, err)
	_, err = manifest.Verify(env, w.delegation, w.bundle, w.now)
	require.Equal(t, "/version/runtime_profile/services/1/image_variants/0/image_ref", fault.As(err).Fields[0].Pointer)
}

func TestOneContainerWithTheKeysOfServicesNeedsTheirFeature(t *testing.T) {
	for _, key := range []string{
		"args: [x]", "capabilities: [CAP_SYS_NICE]", "files: [{path: /x, content: y}]", "liveness: {kind: tcp, port: http}",
	} {
		doc := strings.Replace(document(t), "    stop_grace_seconds: 5", "    "+key, 1)
		m, err := manifest.Parse([]byte(doc))
		require.NoError(t, err, key)
		require.Contains(t, m.Features(), manifest.FeatureServices, key)
	}
	for _, key := range []string{"restart: never", "depends_on: []", "aliases: [x]", "name: x", "main: x"} {
		_, err := manifest.Parse([]byte(strings.Replace(document(t), "    stop_grace_seconds: 5", "    "+key, 1)))
		require.ErrorIs(t, err, manifest.ErrSchema, key)
	}
}
