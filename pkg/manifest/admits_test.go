package manifest_test

import (
	"crypto/ed25519"
	"maps"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// world is a root that trusts a catalog key, and a publisher to whom it delegated.
type world struct {
	bundle     protocol.Bundle
	catalog    ed25519.PrivateKey
	publisher  ed25519.PrivateKey
	delegation *protocol.Envelope
	now        time.Time
}

func public(t testing.TB, key ed25519.PrivateKey) *protocol.PublicKey {
	t.Helper()
	pub, ok := key.Public().(ed25519.PublicKey)
	require.True(t, ok)
	return &protocol.PublicKey{KeyId: protocol.KeyID(pub), Ed25519: pub}
}

func newWorld(t testing.TB, prefix, orgSlug string) world {
	t.Helper()
	root, catalog, publisher := newKey(t), newKey(t), newKey(t)
	now := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	role := func(name string, key ed25519.PrivateKey) *protocol.Role {
		return &protocol.Role{Name: name, Threshold: 1, Keys: []*protocol.PublicKey{public(t, key)}}
	}
	env, err := protocol.SignMessage(protocol.PayloadBundle, &protocol.TrustBundle{
		TrustDomain: "gpuaas.test", Version: 1, Epoch: 1, IssuedAt: timestamppb.New(now),
		Roles: []*protocol.Role{role(protocol.RoleRoot, root), role(protocol.RoleCatalog, catalog)},
	}, protocol.NewEd25519Signer(root))
	require.NoError(t, err)
	bundle, err := protocol.VerifyBundle(env, protocol.FingerprintPrefix+public(t, root).GetKeyId())
	require.NoError(t, err)
	w := world{bundle: bundle, catalog: catalog, publisher: publisher, now: now}
	w.delegation, err = protocol.SignMessage(protocol.PayloadDelegation, &protocol.Delegation{
		Publisher: public(t, publisher), OrgSlug: orgSlug, RepositoryPrefixes: []string{prefix},
		IssuedAt: timestamppb.New(now), ExpiresAt: timestamppb.New(now.Add(time.Hour)),
	}, protocol.NewEd25519Signer(catalog))
	require.NoError(t, err)
	return w
}

func (w world) verify(t testing.TB, doc string) (*protocol.Envelope, manifest.Verified) {
	t.Helper()
	env, err := manifest.Sign([]byte(doc), protocol.NewEd25519Signer(w.publisher))
	require.NoError(t, err)
	v, err := manifest.Verify(env, w.delegation, w.bundle, w.now)
	require.NoError(t, err)
	return env, v
}

func admittedWorkload(t testing.TB, env *protocol.Envelope, v manifest.Verified) *protocol.Workload {
	t.Helper()
	const params = `{"password_hash":"` + goodHash + `","threads":8}`
	values, err := v.Manifest().CheckParameters([]byte(params))
	require.NoError(t, err)
	services, err := manifest.Lower(v.Manifest(), manifest.Inputs{Parameters: values}, manifest.Shape{
		CPUMillis:   2000,
		MemoryBytes: 512 << 20,
		Volumes:     chosenVolumes(v.Manifest()),
	})
	require.NoError(t, err)
	return &protocol.Workload{
		Id: "m", InstanceId: "i", OrgSlug: "acme", AppSlug: "jupyter", AppVersion: "24.05.0", Revision: 1, Manifest: env,
		Services: services, ParametersJson: params, ReadinessTimeoutSeconds: 300,
	}
}

// deviation is a change that the manifest does not allow, and the field that the fault names.
type deviation struct {
	change  func(*protocol.Workload, *protocol.Service)
	pointer string
}

// otherProgram lists deviations in what runs: image, command, variables, parameters.
func otherProgram() map[string]deviation {
	return map[string]deviation{
		"another digest": {
			func(_ *protocol.Workload, s *protocol.Service) { s.Image = s.Image[:len(s.Image)-1] + "2" },
			"/services/0/image",
		},
		"another repository": {func(_ *protocol.Workload, s *protocol.Service) {
			s.Image = "org/evil/jupyter/runtime" + s.Image[24:]
		}, "/services/0/image"},
		"another variant": {
			func(_ *protocol.Workload, s *protocol.Service) { s.ImageVariant = "cuda" },
			"/accelerator_count",
		},
		"unknown variant": {func(_ *protocol.Workload, s *protocol.Service) {
			s.ImageVariant = "x"
		}, "/services/0/image_variant"},
		"another command": {
			func(_ *protocol.Workload, s *protocol.Service) { s.Command[0] = "/bin/sh" },
			"/services/0/command",
		},
		"one more argument": {func(_ *protocol.Workload, s *protocol.Service) {
			s.Command = append(s.Command, "--allow-root")
		}, "/services/0/command"},
		"no command": {func(_ *protocol.Workload, s *protocol.Service) { s.Command = nil }, "/services/0/command"},
		"one more variable": {func(_ *protocol.Workload, s *protocol.Service) {
			s.Env = append(s.Env, &protocol.EnvVar{Name: "A"})
		}, "/services/0/env"},
		"another variable": {
			func(_ *protocol.Workload, s *protocol.Service) { s.Env[0].Value = "/root" },
			"/services/0/env",
		},
		"value not parameter": {func(_ *protocol.Workload, s *protocol.Service) { s.Env[1].Value = "9" }, "/services/0/env"},
		"parameter not value": {func(w *protocol.Workload, _ *protocol.Service) {
			w.ParametersJson = `{"password_hash":"` + goodHash + `","threads":9}`
		}, "/services/0/env"},
		"parameter out of schema": {func(w *protocol.Workload, _ *protocol.Service) {
			w.ParametersJson = `{"password_hash":"` + goodHash + `","threads":99}`
		}, "/parameters/threads"},
		"parameters not JSON": {func(w *protocol.Workload, _ *protocol.Service) { w.ParametersJson = "{" }, "/parameters"},
	}
}

// otherIsolation lists deviations in ports, user, file systems and resources.
func otherIsolation() map[string]deviation {
	return map[string]deviation{
		"another port": {
			func(_ *protocol.Workload, s *protocol.Service) { s.Ports[0].ContainerPort = 22 },
			"/services/0/ports",
		},
		"one more port": {
			func(_ *protocol.Workload, s *protocol.Service) { s.Ports = append(s.Ports, s.Ports[0]) },
			"/services/0/ports",
		},
		"a public port": {
			func(_ *protocol.Workload, s *protocol.Service) { s.Ports[0].Expose = "public" },
			"/services/0/ports",
		},
		"root":             {func(_ *protocol.Workload, s *protocol.Service) { s.User = "0:0" }, "/services/0/user"},
		"the image's user": {func(_ *protocol.Workload, s *protocol.Service) { s.User = "" }, "/services/0/user"},
		"a writable root": {
			func(_ *protocol.Workload, s *protocol.Service) { s.ReadOnlyRoot = false },
			"/services/0/read_only_root",
		},
		"another directory": {func(_ *protocol.Workload, s *protocol.Service) {
			s.WorkingDir = "/"
		}, "/services/0/working_dir"},
		"more scratch": {
			func(_ *protocol.Workload, s *protocol.Service) { s.Scratch[0].SizeBytes++ },
			"/services/0/scratch",
		},
		"too much memory": {
			func(_ *protocol.Workload, s *protocol.Service) { s.Resources.MemoryBytes = 1 << 50 },
			"/memory_bytes",
		},
		"no memory limit": {
			func(_ *protocol.Workload, s *protocol.Service) { s.Resources.MemoryBytes = 0 },
			"/services/0/resources",
		},
		"too much CPU": {
			func(_ *protocol.Workload, s *protocol.Service) { s.Resources.CpuMillis = 9000 },
			"/cpu_millis",
		},
		"no CPU limit": {
			func(_ *protocol.Workload, s *protocol.Service) { s.Resources.CpuMillis = 0 },
			"/services/0/resources",
		},
		"more processes": {func(_ *protocol.Workload, s *protocol.Service) {
			s.Resources.Pids++
		}, "/services/0/resources"},
	}
}

// otherIdentity lists deviations in accelerators, probe, and what the workload says it is.
func otherIdentity() map[string]deviation {
	unknownField := protowire.AppendVarint(protowire.AppendTag(nil, 999, protowire.VarintType), 1)
	return map[string]deviation{
		"no resources": {func(_ *protocol.Workload, s *protocol.Service) {
			s.Resources = nil
		}, "/services/0/resources"},
		"an accelerator": {func(_ *protocol.Workload, s *protocol.Service) {
			s.Resources.AcceleratorIds = []string{"GPU-1"}
		}, "/accelerator_vendor"},
		"an accelerator twice": {func(_ *protocol.Workload, s *protocol.Service) {
			s.Resources.AcceleratorIds = []string{"GPU-1", "GPU-1"}
		}, "/services/0/resources/accelerator_ids"},
		"a shell as probe": {
			func(_ *protocol.Workload, s *protocol.Service) { s.Readiness.Command = []string{"/bin/sh"} },
			"/services/0/readiness",
		},
		"no probe": {func(_ *protocol.Workload, s *protocol.Service) { s.Readiness = nil }, "/services/0/readiness"},
		"another grace": {func(_ *protocol.Workload, s *protocol.Service) {
			s.StopGraceSeconds++
		}, "/services/0/stop_grace_seconds"},
		"a start beside another": {func(_ *protocol.Workload, s *protocol.Service) {
			s.StartFirst = true
		}, "/services/0/start_first"},
		"no start beside another": {func(_ *protocol.Workload, s *protocol.Service) {
			s.Recreate = true
		}, "/services/0/recreate"},
		"another name": {func(_ *protocol.Workload, s *protocol.Service) { s.Name = "x" }, "/services/0/name"},
		"a field of later": {
			func(_ *protocol.Workload, s *protocol.Service) { s.ProtoReflect().SetUnknown(unknownField) },
			"/services/0/",
		},
		"one more service": {
			func(w *protocol.Workload, s *protocol.Service) { w.Services = append(w.Services, s) },
			"/services",
		},
		"no service":      {func(w *protocol.Workload, _ *protocol.Service) { w.Services = nil }, "/services"},
		"a nil service":   {func(w *protocol.Workload, _ *protocol.Service) { w.Services[0] = nil }, "/services/0"},
		"another app":     {func(w *protocol.Workload, _ *protocol.Service) { w.AppSlug = "x" }, "/app_slug"},
		"another version": {func(w *protocol.Workload, _ *protocol.Service) { w.AppVersion = "x" }, "/app_version"},
		"another org":     {func(w *protocol.Workload, _ *protocol.Service) { w.OrgSlug = "evil" }, "/org_slug"},
		"another manifest": {
			func(w *protocol.Workload, _ *protocol.Service) { w.Manifest.Payload = []byte("x") },
			"/manifest",
		},
		"no manifest": {func(w *protocol.Workload, _ *protocol.Service) { w.Manifest = nil }, "/manifest"},
		"another readiness": {
			func(w *protocol.Workload, _ *protocol.Service) { w.ReadinessTimeoutSeconds = 0 },
			"/readiness_timeout_seconds",
		},
	}
}

func TestLaw01OnlyWhatThePublisherAllowedIsAdmitted(t *testing.T) {
	w := newWorld(t, "org/acme/", "acme")
	env, v := w.verify(t, document(t))
	require.NoError(t, manifest.Admits(v, admittedWorkload(t, env, v)))
	require.True(t, fault.Is(manifest.Admits(manifest.Verified{}, admittedWorkload(t, env, v)), fault.Forbidden))
	require.True(t, fault.Is(manifest.Admits(v, nil), fault.Forbidden))

	cases := otherProgram()
	maps.Copy(cases, otherIsolation())
	maps.Copy(cases, otherIdentity())
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			changed, ok := proto.Clone(admittedWorkload(t, env, v)).(*protocol.Workload)
			require.True(t, ok)
			c.change(changed, changed.GetServices()[0])
			err := manifest.Admits(v, changed)
			require.Error(t, err)
			f := fault.As(err)
			require.Equal(t, manifest.CodeNotAdmitted, f.Code)
			require.True(t, fault.IsPermanent(err))
			var at []string
			for _, field := range f.Fields {
				at = append(at, "/"+trimSlash(field.Pointer))
			}
			require.Contains(t, at, c.pointer)
		})
	}
}

func trimSlash(s string) string {
	if s != "" && s[0] == '/' {
		return s[1:]
	}
	return s
}

// What is parsed already is not trusted for it: signatures count each time.
func TestAManifestThatIsParsedOnceIsVerifiedEachTime(t *testing.T) {
	w := newWorld(t, "org/acme/", "acme")
	doc, parsed := []byte(document(t)), manifest.Parsed{}
	env, err := manifest.Sign(doc, protocol.NewEd25519Signer(w.publisher))
	require.NoError(t, err)
	first, err := parsed.Verify(env, w.delegation, w.bundle, w.now)
	require.NoError(t, err)
	require.Len(t, parsed, 1)
	again, err := parsed.Verify(env, w.delegation, w.bundle, w.now)
	require.NoError(t, err)
	require.Equal(t, first, again)
	stranger, err := manifest.Sign(doc, protocol.NewEd25519Signer(newKey(t)))
	require.NoError(t, err)
	_, err = parsed.Verify(stranger, w.delegation, w.bundle, w.now)
	require.Equal(t, protocol.Nack_SIGNATURE_INVALID, protocol.RefusalOf(err))
	_, err = parsed.Verify(env, w.delegation, w.bundle, w.now.Add(2*time.Hour))
	require.Equal(t, protocol.Nack_EXPIRED, protocol.RefusalOf(err))
}

func TestVerifyRefusesStrangersAndForeignRepositories(t *testing.T) {
	w := newWorld(t, "org/acme/", "acme")
	doc := []byte(document(t))
	env, err := manifest.Sign(doc, protocol.NewEd25519Signer(newKey(t)))
	require.NoError(t, err)
	_, err = manifest.Verify(env, w.delegation, w.bundle, w.now)
	require.Equal(t, protocol.Nack_SIGNATURE_INVALID, protocol.RefusalOf(err))

	env, err = manifest.Sign(doc, protocol.NewEd25519Signer(w.publisher))
	require.NoError(t, err)
	_, err = manifest.Verify(env, nil, w.bundle, w.now)
	require.Equal(t, protocol.Nack_SIGNATURE_INVALID, protocol.RefusalOf(err))
	_, err = manifest.Verify(env, w.delegation, w.bundle, w.now.Add(2*time.Hour))
	require.Equal(t, protocol.Nack_EXPIRED, protocol.RefusalOf(err))
	_, err = manifest.Verify(env, w.delegation, protocol.Bundle{}, w.now)
	require.Error(t, err)

	env.Payload = append(env.Payload, '\n')
	_, err = manifest.Verify(env, w.delegation, w.bundle, w.now)
	require.Equal(t, protocol.Nack_SIGNATURE_INVALID, protocol.RefusalOf(err))

	other := newWorld(t, "org/other/", "other")
	env, err = manifest.Sign(doc, protocol.NewEd25519Signer(other.publisher))
	require.NoError(t, err)
	_, err = manifest.Verify(env, other.delegation, other.bundle, other.now)
	require.Equal(t, "/version/runtime_profile/image_variants/0/image_ref", fault.As(err).Fields[0].Pointer)

	env, err = manifest.Sign(doc, protocol.NewEd25519Signer(w.catalog))
	require.NoError(t, err)
	v, err := manifest.Verify(env, nil, w.bundle, w.now)
	require.NoError(t, err)
	require.True(t, v.OK())
}

func TestSignRefusesAnInvalidDocument(t *testing.T) {
	_, err := manifest.Sign([]byte("app: {}"), protocol.NewEd25519Signer(newKey(t)))
	require.True(t, fault.Is(err, fault.Malformed))
}
