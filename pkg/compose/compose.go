// Package compose converts a Compose file into the manifest of an app of several services, before it is signed. All
// comes from the file itself: no environment, no other file, no network. What it does not convert it refuses, by key
// and line; nothing is dropped that would change how the app runs.
package compose

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/compose-spec/compose-go/v2/loader"
	"github.com/compose-spec/compose-go/v2/types"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

// MaxFileBytes is the size of a Compose file.
const MaxFileBytes = 256 << 10

// maxReadinessTimeoutSeconds is the most that a manifest may say.
const maxReadinessTimeoutSeconds = 7200

// Options are what a Compose file does not say.
type Options struct {
	// Slug is the app's; empty: the file's name.
	Slug string
	// Version is the app's version.
	Version string
	// Main names the service that gets the chosen resources and the accelerators; empty: the only one that publishes a
	// port.
	Main string
	// Images gives the repository@digest in the platform's registry for an image as the file names it.
	Images map[string]string
}

// Refusal is one key of a file that cannot be converted.
type Refusal struct {
	Line   int
	Key    string
	Reason string
	Hint   string
}

// Refused is what is wrong with a file, sorted by line.
type Refused []Refusal

// Error has one line for each refusal.
func (r Refused) Error() string {
	lines := make([]string, 0, len(r)+1)
	lines = append(lines, "the Compose file cannot be converted:")
	for _, one := range r {
		text := fmt.Sprintf("  line %d: %s: %s", one.Line, one.Key, one.Reason)
		if one.Hint != "" {
			text += " (" + one.Hint + ")"
		}
		lines = append(lines, text)
	}
	return strings.Join(lines, "\n")
}

// Convert returns the manifest, as YAML that manifest.Parse accepts. The error of a file that cannot be converted is a
// Refused.
func Convert(ctx context.Context, file []byte, opts Options) ([]byte, error) {
	if len(file) > MaxFileBytes {
		return nil, fmt.Errorf("the Compose file has %d bytes; the limit is %d", len(file), MaxFileBytes)
	}
	doc, err := parse(file)
	if err != nil {
		return nil, err
	}
	c := &converter{doc: doc, opts: opts}
	if c.refusals = doc.check(); len(c.refusals) > 0 {
		return nil, c.refused()
	}
	if c.project, err = load(ctx, file); err != nil {
		return nil, err
	}
	m := c.manifest()
	if len(c.refusals) > 0 {
		return nil, c.refused()
	}
	out, err := encode(m)
	if err != nil {
		return nil, err
	}
	if _, err := manifest.Parse(out); err != nil {
		c.refuseFields(m, fault.As(err).Fields)
		return nil, c.refused()
	}
	return out, nil
}

// load reads the file with nothing around it: check has refused what would refer to something else.
func load(ctx context.Context, file []byte) (*types.Project, error) {
	project, err := loader.LoadWithContext(ctx, types.ConfigDetails{
		WorkingDir:  "/",
		ConfigFiles: []types.ConfigFile{{Filename: "compose.yaml", Content: file}},
		Environment: types.Mapping{},
	}, func(o *loader.Options) {
		o.SetProjectName("app", true)
		o.SkipExtends, o.SkipInclude, o.SkipResolveEnvironment, o.SkipResolveLabels = true, true, true, true
		o.SkipNormalization, o.SkipConsistencyCheck, o.ResolvePaths = true, true, false
	})
	if err != nil {
		return nil, fmt.Errorf("read the Compose file: %w", err)
	}
	return project, nil
}

// converter turns one file into a manifest and collects what it cannot convert.
type converter struct {
	doc      document
	opts     Options
	project  *types.Project
	refusals []Refusal
}

func (c *converter) refuse(reason, hint string, path ...string) {
	c.refusals = append(c.refusals, Refusal{
		Line: c.doc.line(path...), Key: strings.Join(path, "."), Reason: reason, Hint: hint,
	})
}

func (c *converter) refused() Refused {
	slices.SortStableFunc(c.refusals, func(a, b Refusal) int { return a.Line - b.Line })
	return slices.Compact(c.refusals)
}

// refuseFields names the services that the faults of a manifest are about.
func (c *converter) refuseFields(m manifest.Manifest, fields []fault.Field) {
	for _, f := range fields {
		const services = "/version/runtime_profile/services/"
		rest, ok := strings.CutPrefix(f.Pointer, services)
		var n int
		if _, err := fmt.Sscanf(rest, "%d", &n); !ok || err != nil || n >= len(m.Version.RuntimeProfile.Services) {
			c.refuse("makes a manifest whose "+f.Pointer+" "+f.Reason, f.Hint, "services")
			continue
		}
		_, key, _ := strings.Cut(rest, "/")
		c.refuse("makes a service whose "+key+" "+f.Reason, f.Hint, "services", c.doc.keys("services")[n])
	}
}

func (c *converter) manifest() manifest.Manifest {
	slug := c.opts.Slug
	if slug == "" {
		slug = c.doc.value("name")
	}
	if slug == "" {
		c.refuse("is missing", "write name: in the file, or pass --slug", "name")
	}
	m := manifest.Manifest{
		Schema: manifest.SchemaV1,
		App:    manifest.App{Slug: slug, DisplayName: slug, RuntimeBackend: manifest.RuntimeDockerCompose},
	}
	p := &m.Version.RuntimeProfile
	m.Version.Version, p.Kind = c.opts.Version, manifest.RuntimeDockerCompose
	names := c.doc.keys("services")
	main := c.mainService(names)
	p.Main = hostName(main)
	for _, name := range names {
		s := c.service(name, name == main)
		if n := s.Resources.Accelerators.Min; n > 0 {
			m.Version.Compatibility.MinGPUCount = int(n)
		}
		p.Services = append(p.Services, s)
		p.ReadinessTimeoutSeconds = max(p.ReadinessTimeoutSeconds, secondsToBeReady(s.Liveness))
	}
	if p.ReadinessTimeoutSeconds <= manifest.DefaultReadinessTimeoutSeconds {
		p.ReadinessTimeoutSeconds = 0
	}
	return m
}

// secondsToBeReady is how long a container of Compose may be unready before it is unhealthy.
func secondsToBeReady(p manifest.Probe) uint32 {
	each := uint64(p.PeriodMillis) + uint64(p.TimeoutMillis)
	millis := uint64(p.StartPeriodMillis) + uint64(p.FailureThreshold)*each
	return uint32(min((millis+999)/1000, maxReadinessTimeoutSeconds))
}

// mainService is the one that was named, or the only one that publishes a port.
func (c *converter) mainService(names []string) string {
	if c.opts.Main != "" {
		if !slices.Contains(names, c.opts.Main) {
			c.refuse("has no service "+c.opts.Main, "", "services")
		}
		return c.opts.Main
	}
	var published []string
	for _, name := range names {
		if len(c.project.Services[name].Ports) > 0 {
			published = append(published, name)
		}
	}
	if len(names) == 1 {
		return names[0]
	}
	if len(published) != 1 {
		c.refuse("has no single service that publishes ports", "pass --main", "services")
		return ""
	}
	return published[0]
}
