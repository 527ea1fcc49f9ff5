package manifest

import (
	"crypto/sha256"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Admits reports whether the publisher's manifest allows this workload: nil, or a fault that names what deviates. It
// lowers the manifest again with the workload's own parameters and shape, and requires exactly those services. With the
// hub's online keys alone nobody can change an image, a command, an environment, a port or a user, leave the resource
// bounds, or add a service. A fallback has a manifest of its own and is checked separately.
func Admits(v Verified, w *protocol.Workload) error {
	if !v.ok {
		return notAdmitted("/manifest", "the manifest was not verified")
	}
	if err := v.identifies(w); err != nil {
		return err
	}
	services := w.GetServices()
	if len(services) != v.manifest.countServices(v.manifest.environmentOf(services)) {
		return notAdmitted("/services", "there must be exactly the services of the manifest")
	}
	if i := slices.Index(services, nil); i >= 0 {
		return notAdmitted(fmt.Sprintf("/services/%d", i), "is missing")
	}
	params, err := v.manifest.CheckParameters([]byte(w.GetParametersJson()))
	if err != nil {
		return because(err)
	}
	if err := v.manifest.checkSealed(params); err != nil {
		return err
	}
	// Every service has the same config; compare sees to it.
	config := services[0].GetConfig().GetJson()
	if _, err := v.manifest.CheckConfig([]byte(config)); err != nil {
		return because(err)
	}
	shape, err := v.manifest.shapeOf(services)
	if err != nil {
		return err
	}
	want, err := Lower(v.manifest, Inputs{Parameters: params, ConfigJSON: config}, shape)
	if err != nil {
		return because(err)
	}
	for i := range want {
		if err := compare(fmt.Sprintf("/services/%d/", i), want[i], services[i]); err != nil {
			return err
		}
	}
	return nil
}

func (v Verified) identifies(w *protocol.Workload) error {
	m := v.manifest
	switch {
	case w == nil:
		return notAdmitted("", "the workload is missing")
	case sha256.Sum256(w.GetManifest().GetPayload()) != v.digest:
		return notAdmitted("/manifest", "the workload carries another manifest than the verified one")
	case w.GetAppSlug() != m.App.Slug:
		return notAdmitted("/app_slug", "differs from the manifest")
	case w.GetAppVersion() != m.Version.Version:
		return notAdmitted("/app_version", "differs from the manifest")
	case v.publisher.OrgSlug != "" && w.GetOrgSlug() != v.publisher.OrgSlug:
		return notAdmitted("/org_slug", "the publisher may only publish for its own org")
	case w.GetReadinessTimeoutSeconds() != m.Version.RuntimeProfile.ReadinessTimeoutSeconds:
		return notAdmitted("/readiness_timeout_seconds", "differs from the manifest")
	}
	return nil
}

// shapeOf reads the choices that a workload leaves open, all but the ports from the main service. Absent limits are
// refused: absent means unlimited to a runtime.
func (m Manifest) shapeOf(services []*protocol.Service) (Shape, error) {
	main := m.Version.RuntimeProfile.mainIndex()
	s, at := services[main], fmt.Sprintf("/services/%d", main)
	r := s.GetResources()
	if r.GetCpuMillis() == 0 || r.GetMemoryBytes() == 0 || r.GetPids() == 0 {
		return Shape{}, notAdmitted(at+"/resources", "must set limits for CPU, memory and processes")
	}
	ids := slices.Clone(r.GetAcceleratorIds())
	slices.Sort(ids)
	if len(slices.Compact(ids)) != len(r.GetAcceleratorIds()) || slices.Contains(ids, "") {
		return Shape{}, notAdmitted(at+"/resources/accelerator_ids", "holds an id twice or an empty one")
	}
	for _, v := range m.Version.RuntimeProfile.MainService().ImageVariants {
		if v.Name == s.GetImageVariant() {
			return Shape{
				CPUMillis: r.GetCpuMillis(), MemoryBytes: r.GetMemoryBytes(),
				DiskBytes: r.GetDiskBytes(), ShmBytes: r.GetShmBytes(),
				Variant: v.Name, AcceleratorVendor: v.Accelerator, AcceleratorIDs: r.GetAcceleratorIds(),
				AcceleratorSharing: r.GetAcceleratorSharing(),
				Ports:              portsOf(services), Volumes: volumesOf(services), Environment: m.environmentOf(services),
				Recreate: slices.ContainsFunc(services, (*protocol.Service).GetRecreate),
			}, nil
		}
	}
	return Shape{}, notAdmitted(at+"/image_variant", "is not in the manifest")
}

// compare names the first part that differs; the whole is compared at the end, so that a field which this list does not
// know yet is refused too.
func compare(at string, want, got *protocol.Service) error {
	parts := []struct {
		pointer string
		same    bool
	}{
		{"name", want.GetName() == got.GetName()},
		{"image", want.GetImage() == got.GetImage()},
		{"image_variant", want.GetImageVariant() == got.GetImageVariant()},
		{"command", slices.Equal(want.GetCommand(), got.GetCommand())},
		{"args", slices.Equal(want.GetArgs(), got.GetArgs())},
		{"env", sameMessages(want.GetEnv(), got.GetEnv())},
		{"ports", sameMessages(want.GetPorts(), got.GetPorts())},
		{"resources", proto.Equal(want.GetResources(), got.GetResources())},
		{"readiness", proto.Equal(want.GetReadiness(), got.GetReadiness())},
		{"liveness", proto.Equal(want.GetLiveness(), got.GetLiveness())},
		{"volumes", sameMessages(want.GetVolumes(), got.GetVolumes())},
		{"image_mounts", sameMessages(want.GetImageMounts(), got.GetImageMounts())},
		{"scratch", sameMessages(want.GetScratch(), got.GetScratch())},
		{"files", sameMessages(want.GetFiles(), got.GetFiles())},
		{"stop_grace_seconds", want.GetStopGraceSeconds() == got.GetStopGraceSeconds()},
		{"user", want.GetUser() == got.GetUser()},
		{"read_only_root", want.GetReadOnlyRoot() == got.GetReadOnlyRoot()},
		{"working_dir", want.GetWorkingDir() == got.GetWorkingDir()},
		{"config", proto.Equal(want.GetConfig(), got.GetConfig())},
		{"secrets", proto.Equal(want.GetSecrets(), got.GetSecrets())},
		{"aliases", slices.Equal(want.GetAliases(), got.GetAliases())},
		{"depends_on", sameMessages(want.GetDependsOn(), got.GetDependsOn())},
		{"restart_policy", want.GetRestartPolicy() == got.GetRestartPolicy()},
		{"environment", proto.Equal(want.GetEnvironment(), got.GetEnvironment())},
		{"start_first", want.GetStartFirst() == got.GetStartFirst()},
		{"recreate", want.GetRecreate() == got.GetRecreate()},
		{"capabilities", slices.Equal(want.GetCapabilities(), got.GetCapabilities())},
		{"", proto.Equal(want, got)},
	}
	for _, p := range parts {
		if !p.same {
			return notAdmitted(at+p.pointer, "differs from what the manifest allows")
		}
	}
	return nil
}

func sameMessages[M proto.Message](a, b []M) bool {
	return slices.EqualFunc(a, b, func(a, b M) bool { return proto.Equal(a, b) })
}

func notAdmitted(pointer, reason string) error {
	return invalid(fault.Forbidden, CodeNotAdmitted, "The publisher's manifest does not allow this workload.",
		[]fault.Field{{Pointer: pointer, Reason: reason}})
}

// because keeps the fields of a fault from the shared rules under the code of a refusal.
func because(err error) error {
	f := fault.New(fault.Forbidden, CodeNotAdmitted, "The publisher's manifest does not allow this workload.",
		err).Permanent()
	f.Fields = fault.As(err).Fields
	return f
}
