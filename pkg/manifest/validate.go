package manifest

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// maxUserID is the highest uid and gid inside a container: a node maps 65536 of them.
const maxUserID = 65535

type findings struct{ fields []fault.Field }

func (f *findings) add(pointer, reason string) { f.hint(pointer, reason, "") }

func (f *findings) hint(pointer, reason, hint string) {
	f.fields = append(f.fields, fault.Field{Pointer: pointer, Reason: reason, Hint: hint})
}

// Validate checks what a JSON Schema cannot say. The fault names each bad field.
func (m Manifest) Validate() error {
	f := &findings{}
	m.checkBackend(f)
	m.checkContract(f)
	m.checkModes(f)
	m.checkSchemas(f)
	m.checkUI(f)
	m.checkConfig(f)
	m.checkIdentity(f)
	if !IsExternal(m.App.RuntimeBackend) {
		m.checkContainers(f)
	}
	if len(f.fields) == 0 {
		return nil
	}
	slices.SortStableFunc(f.fields, func(a, b fault.Field) int { return strings.Compare(a.Pointer, b.Pointer) })
	return invalid(fault.Unprocessable, CodeInvalid, "The manifest contradicts itself or asks for what version 1 cannot "+
		"give.", f.fields)
}

// checkContainers checks what only apps have that nodes run.
func (m Manifest) checkContainers(f *findings) {
	m.checkServices(f)
	m.checkCompatibility(f)
	m.checkAcceleratorRange(f)
	m.checkSharing(f)
	m.checkBindings(f)
	m.checkSecrets(f)
	m.checkEnvironment(f)
	m.checkUpgrade(f)
}

// TenantBoundaryMode is what an operating mode and a control plane scope make of the boundary between tenants; empty
// where they contradict each other.
func TenantBoundaryMode(operatingMode, controlPlaneScope string) string {
	switch {
	case operatingMode == PlatformManaged && controlPlaneScope == "platform":
		return "platform_shared"
	case operatingMode == TenantDedicated && controlPlaneScope == "tenant":
		return "tenant_shared"
	case operatingMode == TenantDedicated && controlPlaneScope == "project":
		return "project_isolated"
	}
	return ""
}

func (m Manifest) checkModes(f *findings) {
	modes := m.App.SupportedModes
	for i, mode := range modes.OperatingModes {
		if !slices.ContainsFunc(modes.ControlPlaneScopes, func(scope string) bool {
			return TenantBoundaryMode(mode, scope) != ""
		}) {
			f.hint(fmt.Sprintf("/app/supported_modes/operating_modes/%d", i), "goes with none of the control_plane_scopes",
				"tenant_dedicated goes with project and tenant, platform_managed with platform")
		}
		if mode == PlatformManaged && IsExternal(m.App.RuntimeBackend) {
			f.hint(fmt.Sprintf("/app/supported_modes/operating_modes/%d", i), "contradicts /app/runtime_backend",
				"an external worker operates the app, on allocations of its project")
		}
	}
}

func (m Manifest) checkBackend(f *findings) {
	if m.Version.RuntimeBackend != "" && m.Version.RuntimeBackend != m.App.RuntimeBackend {
		f.add("/version/runtime_backend", "differs from /app/runtime_backend")
	}
	if m.Version.RuntimeProfile.Kind != m.App.RuntimeBackend {
		f.add("/version/runtime_profile/kind", "differs from /app/runtime_backend")
	}
}

func (s ServiceProfile) checkVariants(f *findings, at, appSlug string) {
	names, served := map[string]bool{}, map[string]string{}
	for i, v := range s.ImageVariants {
		at := fmt.Sprintf("%s/image_variants/%d", at, i)
		if names[v.Name] {
			f.add(at+"/name", "stands twice")
		}
		if by, ok := served[v.Accelerator]; ok {
			f.add(at+"/accelerator", "is served by the variant "+by+" already, which asks for no model, memory or driver")
		}
		names[v.Name] = true
		if v.suitsAll() {
			served[v.Accelerator] = v.Name
		} else if v.Accelerator == AcceleratorNone {
			f.add(at+"/accelerator", "none has no model, memory or driver to ask for")
		}
		checkRepository(f, at+"/image_ref", v.ImageRef, appSlug)
	}
}

// checkRepository admits org/<org>/<app>/<artifact> and apps/<app>/<artifact>: the app is always the last but one.
func checkRepository(f *findings, at, imageRef, appSlug string) {
	steps := strings.Split(RepositoryOf(imageRef), "/")
	if len(steps) < 3 || steps[len(steps)-2] != appSlug {
		f.hint(at, "is not a repository of this app", "org/<org-slug>/"+appSlug+"/<artifact-name> or apps/"+appSlug+
			"/<artifact-name>")
	}
}

// RepositoryOf returns what stands before the digest of an image reference.
func RepositoryOf(imageRef string) string {
	repository, _, _ := strings.Cut(imageRef, "@")
	return repository
}

// DigestOf returns the sha256:<hex> of an image reference.
func DigestOf(imageRef string) string {
	_, digest, _ := strings.Cut(imageRef, "@")
	return digest
}

func (m Manifest) checkCompatibility(f *findings) {
	c, variants := m.Version.Compatibility, m.Version.RuntimeProfile.MainService().ImageVariants
	for i, a := range c.SupportedAccelerators {
		if !slices.ContainsFunc(variants, func(v Variant) bool { return v.Accelerator == a }) {
			f.add(fmt.Sprintf("/version/compatibility/supported_accelerators/%d", i), "no image variant serves it")
		}
	}
	if c.MinGPUCount > 0 && slices.Contains(c.SupportedAccelerators, AcceleratorNone) {
		f.add("/version/compatibility/min_gpu_count", "must be 0 while the accelerator none is supported")
	}
	if c.MinGPUCount == 0 && !slices.Contains(c.SupportedAccelerators, AcceleratorNone) {
		f.add("/version/compatibility/min_gpu_count", "must be at least 1 where every variant needs an accelerator")
	}
}

// checkAcceleratorRange makes sure that the range says nothing else than min_gpu_count and the variants do.
func (m Manifest) checkAcceleratorRange(f *findings) {
	p := m.Version.RuntimeProfile
	at := p.pointer(p.mainIndex()) + "/resources/accelerators"
	r, c := p.MainService().Resources.Accelerators, m.Version.Compatibility
	if r == (Range{}) {
		return
	}
	checkRange(f, at, r)
	if r.Max > MaxAccelerators {
		f.add(at+"/max", "must be at most "+strconv.Itoa(MaxAccelerators))
	}
	if r.Min < uint64(max(c.MinGPUCount, 0)) {
		f.add(at+"/min", "is less than min_gpu_count")
	}
	if !slices.ContainsFunc(c.SupportedAccelerators, func(a string) bool { return a != AcceleratorNone }) {
		f.add(at, "no supported variant uses an accelerator")
	}
}

// check finds what contradicts itself in one service.
func (s ServiceProfile) check(f *findings, at, appSlug string) {
	s.checkVariants(f, at, appSlug)
	checkRange(f, at+"/resources/cpu_millis", s.Resources.CPUMillis)
	checkRange(f, at+"/resources/memory_mib", s.Resources.MemoryMiB)
	checkLeast(f, at+"/resources/cpu_millis/min", s.Resources.CPUMillis.Min, MinCPUMillis)
	checkLeast(f, at+"/resources/memory_mib/min", s.Resources.MemoryMiB.Min, MinMemoryMiB)
	checkRange(f, at+"/resources/disk_mib", s.Resources.DiskMiB.Range)
	checkRange(f, at+"/resources/shm_mib", s.Resources.ShmMiB)
	// tmpfs pages count against the container's memory.
	if s.Resources.ShmMiB.Max > s.Resources.MemoryMiB.Max {
		f.add(at+"/resources/shm_mib/max", "is larger than the memory that an instance can have")
	}
	names, numbers := map[string]bool{}, map[uint32]bool{}
	for i, port := range s.Ports {
		if numbers[port.Container] {
			f.add(fmt.Sprintf("%s/ports/%d/container", at, i), "stands twice")
		}
		names[port.Name], numbers[port.Container] = true, true
	}
	checkProbe(f, at+"/readiness", s.Readiness, names)
	checkProbe(f, at+"/liveness", s.Liveness, names)
	checkScratch(f, at+"/scratch", s)
	checkVolumes(f, at+"/volumes", s)
	for i, m := range s.ImageMounts {
		checkRepository(f, fmt.Sprintf("%s/image_mounts/%d/image_ref", at, i), m.ImageRef, appSlug)
	}
	checkMountPoints(f, at, s)
	checkFiles(f, at+"/files", s)
	if s.User != "" {
		checkUser(f, at+"/user", s.User)
	}
	if s.WorkingDir != "" && path.Clean(s.WorkingDir) != s.WorkingDir {
		f.add(at+"/working_dir", "must be a clean absolute path")
	}
	if InKernelFiles(s.WorkingDir) {
		f.add(at+"/working_dir", "must not be in /proc, /sys or /dev")
	}
}

func checkRange(f *findings, at string, r Range) {
	if r.Min > r.Default || r.Default > r.Max {
		f.add(at, "must be min ≤ default ≤ max")
	}
}

func checkLeast(f *findings, at string, value, least uint64) {
	if value < least {
		f.add(at, "must be at least "+strconv.FormatUint(least, 10))
	}
}

func checkProbe(f *findings, at string, p Probe, ports map[string]bool) {
	needsPort := p.Kind == "http" || p.Kind == "tcp"
	switch {
	case needsPort && !ports[p.Port]:
		f.add(at+"/port", "must name a port of the profile")
	case !needsPort && p.Port != "":
		f.add(at+"/port", "belongs to http and tcp probes only")
	}
	if (p.Kind == "http") != (p.Path != "") {
		f.add(at+"/path", "belongs to http probes, which need it")
	}
	if (p.Kind == "exec") != (len(p.Command) > 0) {
		f.add(at+"/command", "belongs to exec probes, which need it")
	}
}

// InKernelFiles says that a path leads into a file system of the kernel. A working directory like /proc/self/fd/7 has
// led out of containers (CVE-2024-21626).
func InKernelFiles(name string) bool {
	return slices.ContainsFunc([]string{"/proc", "/sys", "/dev"}, func(kernel string) bool {
		return isBelow(name, kernel)
	})
}

func isPlatforms(name string) bool {
	own := []string{"/run/gpuaas", "/run/gpuaas-parameters", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}
	return InKernelFiles(name) || slices.ContainsFunc(own, func(dir string) bool { return isBelow(name, dir) })
}

// isBelow says that a path is another one, or lies below it.
func isBelow(name, dir string) bool { return name == dir || strings.HasPrefix(name, dir+"/") }

func checkScratch(f *findings, at string, p ServiceProfile) {
	var total uint64
	for i, s := range p.Scratch {
		here := fmt.Sprintf("%s/%d/path", at, i)
		if path.Clean(s.Path) != s.Path || s.Path == "/" || s.Path == "/etc" {
			f.add(here, "must be a clean absolute path below the root, and not /etc")
		}
		if isPlatforms(s.Path) {
			f.add(here, "is the platform's own")
		}
		for j, other := range p.Scratch {
			if i != j && (s.Path == other.Path && i > j || strings.HasPrefix(s.Path, other.Path+"/")) {
				f.add(here, "lies in another scratch directory")
			}
		}
		total += s.SizeMiB
	}
	// tmpfs pages count against the container's memory: more of them than memory can only end in an OOM kill.
	if total > p.Resources.MemoryMiB.Max {
		f.add(at, "is larger in all than the memory that an instance can have")
	}
}

func checkUser(f *findings, at, user string) {
	uid, gid, _ := strings.Cut(user, ":")
	for _, id := range []string{uid, gid} {
		if n, err := strconv.Atoi(id); err != nil || n > maxUserID {
			f.add(at, "must be uid:gid, each at most "+strconv.Itoa(maxUserID))
			return
		}
	}
}

func (m Manifest) checkUI(f *findings) {
	ui := m.Version.UI
	if ui.ExtensionKind != "embedded" {
		if ui.Port != "" || ui.Path != "" {
			f.add("/version/ui", "port and path belong to the kind embedded")
		}
		return
	}
	if !slices.ContainsFunc(m.Version.RuntimeProfile.All(), func(s Service) bool {
		return slices.ContainsFunc(s.Ports, func(p Port) bool { return p.Name == ui.Port && p.Protocol == "http" })
	}) {
		f.add("/version/ui/port", "must name an http port of the profile")
	}
}

func (m Manifest) checkConfig(f *findings) {
	c := m.Version.Config
	if c.OnChange != "" && m.Version.ConfigSchema == nil {
		f.add("/version/config", "needs a config_schema")
	}
	c.checkSignal("/version/config", f)
	m.Version.Secrets.checkSignal("/version/secrets", f)
	if m.Version.Secrets.OnChange != "" && !m.HasSecrets() && !m.HasIdentity() {
		f.add("/version/secrets", "needs a parameter that is writeOnly, or an instance_identity")
	}
}

func (c Config) checkSignal(at string, f *findings) {
	if (c.OnChange == ConfigSignal) != (c.Signal != "") {
		f.add(at+"/signal", "belongs to on_change: signal, which needs it")
	}
}

// checkSchemas makes sure that the two embedded schemas compile, stay within the document and close their top level.
func (m Manifest) checkSchemas(f *findings) {
	for _, s := range []struct {
		pointer string
		schema  map[string]any
	}{{"/version/parameters", m.Version.Parameters}, {"/version/config_schema", m.Version.ConfigSchema}} {
		if s.schema == nil {
			continue
		}
		before := len(f.fields)
		checkReferences(f, s.pointer, s.schema)
		if s.schema["type"] != "object" {
			f.add(s.pointer+"/type", "must be object")
		}
		if s.schema["additionalProperties"] != false {
			f.hint(s.pointer+"/additionalProperties", "must be false", "a misspelt key would otherwise pass unnoticed")
		}
		if countSubschemas(s.schema) > maxSubschemas {
			f.hint(s.pointer, fmt.Sprintf("has more than %d subschemas, its references written out", maxSubschemas),
				"refer to fewer definitions, or to smaller ones")
		}
		if len(f.fields) > before {
			continue
		}
		if _, err := compileSchema(s.schema); err != nil {
			f.add(s.pointer, "is not a JSON Schema of draft 2020-12")
		}
	}
}

func checkReferences(f *findings, at string, v any) {
	switch v := v.(type) {
	case map[string]any:
		for key, child := range v {
			here := at + "/" + escapePointer(key)
			if text, ok := child.(string); ok {
				switch key {
				case "$ref", "$dynamicRef":
					if !strings.HasPrefix(text, "#") {
						f.add(here, "must stay within the document")
					}
				case "$id", "$schema":
					f.add(here, "is not allowed")
				}
			}
			checkReferences(f, here, child)
		}
	case []any:
		for i, child := range v {
			checkReferences(f, at+"/"+strconv.Itoa(i), child)
		}
	}
}

// checkBindings makes sure that whatever goes into the command or the environment is a declared scalar and no secret.
func (m Manifest) checkBindings(f *findings) {
	schemas := m.parameterSchemas()
	for i, s := range m.Version.RuntimeProfile.All() {
		s.checkBindings(f, m.Version.RuntimeProfile.pointer(i), schemas)
	}
	for name, s := range schemas {
		at := "/version/parameters/properties/" + escapePointer(name)
		checkDefault(f, at, s)
	}
}

func (s ServiceProfile) checkBindings(f *findings, at string, schemas map[string]map[string]any) {
	if len(s.Command) > 0 && s.Command[0].Parameter != "" {
		f.add(at+"/command/0", "the program itself cannot be a parameter")
	}
	for key, list := range map[string][]Argument{"command": s.Command, "args": s.Args} {
		for i, a := range list {
			if a.Parameter != "" {
				checkBinding(f, fmt.Sprintf("%s/%s/%d/parameter", at, key, i), schemas, a.Parameter)
			}
		}
	}
	seen := map[string]bool{}
	for i, e := range s.Env {
		at := fmt.Sprintf("%s/env/%d", at, i)
		if seen[e.Name] {
			f.add(at+"/name", "stands twice")
		}
		seen[e.Name] = true
		if strings.HasPrefix(e.Name, "GPUAAS_") || strings.HasPrefix(e.Name, "LD_") {
			f.add(at+"/name", "is reserved")
		}
		if e.Parameter != "" {
			checkBinding(f, at+"/parameter", schemas, e.Parameter)
		}
	}
}

func checkBinding(f *findings, at string, schemas map[string]map[string]any, name string) {
	s, declared := schemas[name]
	if !declared {
		f.add(at, "is not declared in /version/parameters/properties")
		return
	}
	if s["writeOnly"] == true {
		f.hint(at, "is secret", secretHint)
		return
	}
	switch s["type"] {
	case "string", "integer", "number", "boolean":
	default:
		f.add(at, "must have the type string, integer, number or boolean")
	}
}

func checkDefault(f *findings, at string, schema map[string]any) {
	v, has := schema["default"]
	if !has {
		return
	}
	// A reference would point out of the property's own schema; the whole schema checks such a default at the first use.
	if _, refers := schema["$ref"]; refers {
		return
	}
	if fields, err := checkEmbedded(schema, v); err == nil && len(fields) > 0 {
		f.add(at+"/default", "does not follow its own schema")
	}
}
