package main

import (
	"context"
	_ "embed" // the project's manifest
	"errors"
	"fmt"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	projectSlug = "bench-project"
	// projectServices are in the project, projectPath of them in its longest chain of dependencies.
	projectServices = 5
	projectPath     = 3
	projectSamples  = 15
	// maxProjectRatio is to the sum of the launches along that chain.
	maxProjectRatio = 1.3
)

//go:embed compose.yaml
var projectManifest []byte

// measureProject launches a project of several services whose images are present, and for each the containers of its
// critical path, one after the other, by containerd and CNI alone.
func measureProject(ctx context.Context, e *Env) (_ []Result, err error) {
	s, err := e.Testbed(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.shipProject(ctx); err != nil {
		return nil, err
	}
	bench, end, err := s.Baseline(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, end()) }()
	var launch, path Samples
	request := s.request("project")
	request.AppSlug, request.Version = projectSlug, appVersion
	for n := range 1 + e.Samples(projectSamples) {
		request.DisplayName = fmt.Sprintf("project-%d", n)
		i, took, err := s.Tenant.Launch(ctx, s.Operator, request, nil)
		if err != nil {
			return nil, err
		}
		if err := allReady(i); err != nil {
			return nil, err
		}
		if _, err := s.Decommission(ctx, i.ID); err != nil {
			return nil, err
		}
		var sum float64
		for range projectPath {
			p, err := bench.Measure(ctx)
			if err != nil {
				return nil, err
			}
			sum += float64(p.Total().Microseconds()) / 1000
		}
		if n > 0 { // the first is for warming up
			launch.Add(took)
			path = append(path, sum)
		}
	}
	r := launch.Into(Result{
		Name: "project", What: fmt.Sprintf("POST a project of %d services → running, seen by a watching client",
			projectServices), Unit: "ms",
		Target: fmt.Sprintf("p50 ≤ %g × baseline", maxProjectRatio),
		Note: fmt.Sprintf("images present, each service ready at once; baseline: containerd and CNI launch the %d "+
			"containers of the critical path one after the other, in turn with the launches", projectPath),
	}).against(path.P50())
	r.Reached = r.Ratio <= maxProjectRatio
	return []Result{r}, nil
}

func (s *Testbed) shipProject(ctx context.Context) error {
	if _, err := s.Tenant.Ship(ctx, s.publisher, scenario.Release{
		AppSlug: projectSlug, Version: appVersion, Image: s.image, Template: projectManifest,
	}); err != nil {
		return err
	}
	return errors.Join(s.Tenant.Entitle(ctx, projectSlug), s.Tenant.Price(ctx, projectSlug, price))
}

// allReady makes sure that what was measured is the whole project.
func allReady(i client.AppInstance) error {
	for _, m := range i.Members {
		ready := 0
		for _, s := range m.Services {
			if s.Status == client.MemberServiceStatusReady {
				ready++
			}
		}
		if ready != projectServices {
			return fmt.Errorf("%d of %d services are ready", ready, projectServices)
		}
	}
	return nil
}
