package compose

import (
	"fmt"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/compose-spec/compose-go/v2/types"

	"github.com/gpuaas/gpuaas/pkg/manifest"
)

// service converts one service. Each step refuses what a manifest cannot say.
func (c *converter) service(name string, main bool) manifest.Service {
	s := c.project.Services[name]
	out := manifest.Service{Name: hostName(name)}
	out.Aliases = c.aliases(name, s)
	out.DependsOn = c.dependsOn(name, s)
	out.Restart = c.restart(name, s, main)
	out.Command, out.Args = c.command(name, s)
	out.Env = c.environment(name, s)
	out.Ports = c.ports(name, s)
	out.Resources = c.resources(name, s, main)
	out.ImageVariants = []manifest.Variant{c.variant(name, s, out.Resources.Accelerators.Min > 0)}
	out.Readiness, out.Liveness = c.probes(name, s)
	out.Scratch, out.Volumes = c.scratch(name, s), c.volumes(name, s)
	out.Files = c.files(name, s)
	out.Capabilities = c.capabilities(name, s)
	out.User, out.ReadOnlyRoot, out.WorkingDir = c.user(name, s), s.ReadOnly, s.WorkingDir
	if s.StopGracePeriod != nil {
		grace := uint32(min(math.Ceil(time.Duration(*s.StopGracePeriod).Seconds()), math.MaxUint32))
		out.StopGraceSeconds = &grace
	}
	return out
}

func (c *converter) variant(name string, s types.ServiceConfig, accelerated bool) manifest.Variant {
	ref := s.Image
	if mapped, ok := c.opts.Images[s.Image]; ok {
		ref = mapped
	}
	if s.Image == "" {
		c.refuse("has no image", "", "services", name)
	} else if repository, digest, _ := strings.Cut(ref, "@"); digest == "" ||
		!strings.HasPrefix(repository, "org/") && !strings.HasPrefix(repository, "apps/") {
		c.refuse("is not a repository of the platform's registry with a digest",
			"push it, then pass --image "+s.Image+"=org/<org-slug>/<app-slug>/<artifact-name>@sha256:<digest>",
			"services", name, "image")
	}
	v := manifest.Variant{Name: "any", Accelerator: manifest.AcceleratorNone, ImageRef: ref}
	if accelerated {
		v.Name, v.Accelerator = c.vendor(s), c.vendor(s)
	}
	return v
}

// aliases are the names of Compose that lead to a service, beside the name that it has in the manifest.
func (c *converter) aliases(name string, s types.ServiceConfig) []string {
	var out []string
	add := func(alias string) {
		if alias != "" && alias != hostName(name) && !slices.Contains(out, alias) {
			out = append(out, alias)
		}
	}
	add(name)
	add(s.ContainerName)
	for _, network := range c.doc.keys("services", name, "networks") {
		if n := s.Networks[network]; n != nil {
			for _, alias := range n.Aliases {
				add(alias)
			}
		}
	}
	return out
}

func (c *converter) dependsOn(name string, s types.ServiceConfig) []manifest.Dependency {
	var out []manifest.Dependency
	for _, on := range slices.Sorted(mapKeys(s.DependsOn)) {
		d := s.DependsOn[on]
		if _, ok := c.project.Services[on]; !ok {
			c.refuse("names no service", "", "services", name, "depends_on", on)
		}
		out = append(out, manifest.Dependency{Service: hostName(on), Condition: d.Condition})
	}
	return out
}

// restart says what Compose's policy means for a service. Without one a service runs as long as the app, unless another
// one waits for its end.
func (c *converter) restart(name string, s types.ServiceConfig, main bool) string {
	switch s.Restart {
	case types.RestartPolicyAlways, types.RestartPolicyUnlessStopped:
		return manifest.RestartAlways
	case types.RestartPolicyOnFailure:
		return manifest.RestartOnFailure
	case types.RestartPolicyNo:
		if main {
			c.refuse("must be always or left out: the main service runs as long as the app", "", "services", name, "restart")
		}
		return manifest.RestartNever
	case "":
		for _, other := range c.project.Services {
			if other.DependsOn[name].Condition == types.ServiceConditionCompletedSuccessfully {
				return manifest.RestartNever
			}
		}
		return ""
	}
	c.refuse("must be no, always, on-failure or unless-stopped", "the platform bounds the attempts itself",
		"services", name, "restart")
	return ""
}

// command returns the command and the arguments of a service. Without any in the manifest, a service has those of its
// image: command refuses what takes them away, but for an entry point in whose place the command stands.
func (c *converter) command(name string, s types.ServiceConfig) (command, args []manifest.Argument) {
	refuse := func(key string) {
		c.refuse("is empty; a service has the "+key+" of its image, or another one", "leave it out, or write one",
			"services", name, key)
	}
	emptied := s.Entrypoint != nil && strings.Join(s.Entrypoint, "") == "" // [""] is Docker's form
	switch {
	case emptied && len(s.Command) > 0:
		return arguments(s.Command), nil
	case emptied:
		refuse("entrypoint")
	case s.Command != nil && len(s.Command) == 0 && len(s.Entrypoint) == 0:
		refuse("command")
	}
	return arguments(s.Entrypoint), arguments(s.Command)
}

func arguments(list []string) []manifest.Argument {
	var out []manifest.Argument
	for _, text := range list {
		out = append(out, manifest.Argument{Text: text})
	}
	return out
}

func (c *converter) environment(name string, s types.ServiceConfig) []manifest.EnvVar {
	var out []manifest.EnvVar
	for _, key := range slices.Sorted(mapKeys(s.Environment)) {
		value := s.Environment[key]
		if value == nil {
			c.refuse("has no value; nothing is taken from the environment", "write the value",
				"services", name, "environment", key)
		}
		out = append(out, manifest.EnvVar{Name: key, Value: value})
	}
	return out
}

// ports gives each port the name of its service and its number, unless the file names it. The node chooses its own port
// for each, or the tenant.
func (c *converter) ports(name string, s types.ServiceConfig) []manifest.Port {
	var out []manifest.Port
	for i, p := range s.Ports {
		at := []string{"services", name, "ports", strconv.Itoa(i)}
		port := manifest.Port{Name: p.Name, Container: p.Target, Protocol: "tcp"}
		if port.Name == "" {
			port.Name = fmt.Sprintf("%s-%d", hostName(name), p.Target)
		}
		if p.AppProtocol == "http" {
			port.Protocol = "http"
		}
		if p.Protocol != "" && p.Protocol != "tcp" {
			c.refuse("must be a TCP port", "", at...)
		}
		if !slices.ContainsFunc(out, func(q manifest.Port) bool { return q.Container == port.Container }) {
			out = append(out, port)
		}
	}
	return out
}

// probes turns a health check into readiness, which others wait for, and liveness.
func (c *converter) probes(name string, s types.ServiceConfig) (readiness, liveness manifest.Probe) {
	h, at := s.HealthCheck, []string{"services", name, "healthcheck"}
	switch {
	case h == nil || h.Disable:
		return readiness, liveness
	case len(h.Test) == 0:
		c.refuse("has no test; that of the image is not used", "write it", at...)
		return readiness, liveness
	case h.Test[0] == "NONE":
		return readiness, liveness
	}
	liveness = manifest.Probe{
		Kind:              "exec",
		PeriodMillis:      c.millis(h.Interval, 30*time.Second, append(at, "interval")...),
		TimeoutMillis:     c.millis(h.Timeout, 30*time.Second, append(at, "timeout")...),
		FailureThreshold:  3,
		StartPeriodMillis: c.millis(h.StartPeriod, 0, append(at, "start_period")...),
	}
	switch {
	case h.Test[0] == "CMD-SHELL" && len(h.Test) == 2:
		liveness.Command = []string{"/bin/sh", "-c", h.Test[1]}
	case h.Test[0] == "CMD" && len(h.Test) > 1:
		liveness.Command = h.Test[1:]
	default:
		c.refuse("must be NONE, CMD with a command, or CMD-SHELL with a line", "", append(at, "test")...)
	}
	if h.Retries != nil && *h.Retries > 0 {
		liveness.FailureThreshold = uint32(min(*h.Retries, math.MaxUint32))
	}
	readiness = liveness
	if h.StartInterval != nil && *h.StartInterval > 0 {
		readiness.PeriodMillis = c.millis(h.StartInterval, 0, append(at, "start_interval")...)
	}
	return readiness, liveness
}

// millis is a duration that a probe can have; one that is absent, or zero, is otherwise.
func (c *converter) millis(d *types.Duration, otherwise time.Duration, path ...string) uint32 {
	value := otherwise
	if d != nil && *d != 0 {
		value = time.Duration(*d)
	}
	if value < 0 || value > time.Hour {
		c.refuse("must lie between 0 and one hour", "", path...)
		return 0
	}
	if value == 0 {
		return 0
	}
	return uint32(max(value.Milliseconds(), 100))
}

// scratch are the tmpfs of a service: those of the key tmpfs, and volumes of that type.
func (c *converter) scratch(name string, s types.ServiceConfig) []manifest.Scratch {
	const otherwise = 64 << 20
	var out []manifest.Scratch
	for i, text := range s.Tmpfs {
		dir, options, _ := strings.Cut(text, ":")
		size, ok := types.UnitBytes(otherwise), true
		if options != "" {
			var value string
			value, ok = strings.CutPrefix(options, "size=")
			ok = ok && size.DecodeMapstructure(value) == nil
		}
		if !ok {
			c.refuse("may have the option size only", "", "services", name, "tmpfs", strconv.Itoa(i))
		}
		out = append(out, manifest.Scratch{Path: path.Clean(dir), SizeMiB: mebibytes(size)})
	}
	for i, v := range s.Volumes {
		at := []string{"services", name, "volumes", strconv.Itoa(i)}
		switch v.Type {
		case types.VolumeTypeTmpfs:
			size := types.UnitBytes(otherwise)
			if v.Tmpfs != nil && v.Tmpfs.Size > 0 {
				size = v.Tmpfs.Size
			}
			out = append(out, manifest.Scratch{Path: path.Clean(v.Target), SizeMiB: mebibytes(size)})
		case types.VolumeTypeVolume:
		default:
			c.refuse("is a path of the host, which no container sees", "configs with content", at...)
		}
	}
	return out
}

// volumes are the named ones. They live as long as an instance, and services that name the same one share it.
func (c *converter) volumes(name string, s types.ServiceConfig) []manifest.Volume {
	var out []manifest.Volume
	for i, v := range s.Volumes {
		if v.Type != types.VolumeTypeVolume {
			continue
		}
		at := []string{"services", name, "volumes", strconv.Itoa(i)}
		named, ok := c.project.Volumes[v.Source]
		if !ok {
			c.refuse("names no volume of the file", "list it below volumes", at...)
			continue
		}
		for _, other := range c.doc.keys("volumes") {
			if other != v.Source && hostName(other) == hostName(v.Source) {
				c.refuse("would be one volume with "+other+", as "+hostName(v.Source), "give it another name",
					"volumes", v.Source)
			}
		}
		size := manifest.Range{Min: 1024, Default: 10_240, Max: 1 << 20}
		if text, given := named.DriverOpts["size"]; given {
			var bytes types.UnitBytes
			if err := bytes.DecodeMapstructure(text); err != nil {
				c.refuse("must be a size like 20g", "", "volumes", v.Source, "driver_opts", "size")
			}
			size.Min, size.Default = mebibytes(bytes), mebibytes(bytes)
			size.Max = max(size.Max, size.Min)
		}
		out = append(out, manifest.Volume{
			Name: hostName(v.Source), Path: path.Clean(v.Target), SizeMiB: manifest.Quantity{Range: size}, ReadOnly: v.ReadOnly,
		})
	}
	return out
}

// files are the configs of a service; check has refused those whose content stands elsewhere.
func (c *converter) files(name string, s types.ServiceConfig) []manifest.File {
	var out []manifest.File
	for i, use := range s.Configs {
		config, ok := c.project.Configs[use.Source]
		if !ok {
			c.refuse("names no config", "", "services", name, "configs", strconv.Itoa(i))
			continue
		}
		file := manifest.File{Path: use.Target, Content: config.Content}
		if file.Path == "" {
			file.Path = "/" + use.Source
		}
		if use.Mode != nil {
			file.Mode = fmt.Sprintf("%04o", int64(*use.Mode))
		}
		out = append(out, file)
	}
	return out
}

// capabilities leaves out those that every container has.
func (c *converter) capabilities(name string, s types.ServiceConfig) []string {
	granted := []string{
		"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_NET_BIND_SERVICE", "CAP_SETGID", "CAP_SETUID",
	}
	var out []string
	for i, text := range s.CapAdd {
		capability := strings.ToUpper(text)
		if !strings.HasPrefix(capability, "CAP_") {
			capability = "CAP_" + capability
		}
		switch {
		case slices.Contains(granted, capability) || slices.Contains(out, capability):
		case slices.Contains(manifest.Capabilities(), capability):
			out = append(out, capability)
		default:
			c.refuse("is not a capability that a container may have", "of "+strings.Join(manifest.Capabilities(), ", "),
				"services", name, "cap_add", strconv.Itoa(i))
		}
	}
	return out
}

func (c *converter) user(name string, s types.ServiceConfig) string {
	uid, gid, ok := strings.Cut(s.User, ":")
	_, uidErr := strconv.ParseUint(uid, 10, 16)
	_, gidErr := strconv.ParseUint(gid, 10, 16)
	if s.User != "" && (!ok || uidErr != nil || gidErr != nil) {
		c.refuse("must be uid:gid in numbers", "", "services", name, "user")
	}
	return s.User
}
