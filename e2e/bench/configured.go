package main

import (
	"bytes"
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	// configuredVersion is the same app with a volume, a config document and a secret parameter.
	configuredVersion = "1.2.0"
	// configuredSamples is the number of launches of either kind.
	configuredSamples = 100
)

func configuredManifest() []byte {
	with := bytes.Replace(appManifest, []byte("    user:"), []byte(`    volumes:
      - {name: data, path: /data, size_mib: {min: 16, default: 64, max: 1024}}
    user:`), 1)
	return bytes.Replace(with, []byte("    additionalProperties: false\n"), []byte(`    additionalProperties: false
    properties:
      token: {type: string, writeOnly: true}
  config_schema:
    type: object
    additionalProperties: false
    properties: {workers: {type: integer}, origin: {type: string}}
  config: {on_change: none}
`), 1)
}

// measureConfigured launches an instance with a volume, config, resources and a secret, in turn with one without.
func measureConfigured(ctx context.Context, e *Env) (_ []Result, err error) {
	s, err := e.Testbed(ctx)
	if err != nil {
		return nil, err
	}
	version := s.version
	err = s.release(ctx, configuredVersion, configuredManifest())
	s.version = version
	if err != nil {
		return nil, err
	}
	var plain, configured Samples
	for i := range warmUpSamples + e.Samples(configuredSamples) {
		without := s.request(fmt.Sprintf("plain-%d", i))
		with := s.request(fmt.Sprintf("configured-%d", i))
		with.Version = configuredVersion
		with.Config = map[string]any{"workers": 4, "origin": fmt.Sprintf("https://%d.bench.internal", i)}
		with.Parameters = map[string]any{"token": fmt.Sprintf("token-%d", i)}
		with.Resources = client.InstanceResources{CPUMillis: 200, MemoryMib: 64}
		with.Volumes = client.VolumeChoices{{Name: "data", SizeMib: 128}}
		before, err := s.launchOnce(ctx, without)
		if err != nil {
			return nil, err
		}
		after, err := s.launchOnce(ctx, with)
		if err != nil {
			return nil, err
		}
		if i < warmUpSamples {
			continue
		}
		plain.Add(before)
		configured.Add(after)
	}
	r := configured.Into(Result{
		Name: "launch-configured", What: "POST an app-instance with volume, config, resources and a secret → running, seen " +
			"by a watching client", Unit: "ms", Target: "p50 ≤ 1.0 × baseline",
		Note: "image present, app ready at once, the volume of 128 MiB is new; baseline: the launch of the row lifecycle, " +
			"in turn",
	}).against(plain.P50())
	r.Reached = r.Ratio <= 1
	return []Result{r}, nil
}

// launchOnce launches an instance and decommissions it; it returns how long the launch took.
func (s *Testbed) launchOnce(ctx context.Context, in client.AppInstanceCreate) (time.Duration, error) {
	i, took, err := s.Tenant.Launch(ctx, s.Operator, in, nil)
	if err != nil {
		return 0, err
	}
	_, err = s.Decommission(ctx, i.ID)
	return took, err
}
