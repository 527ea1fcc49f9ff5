package runtime

import (
	"archive/tar"
	"context"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// Start makes and starts a container in a network that exists. After an error nothing of it is left.
func (r *Runtime) Start(ctx context.Context, spec Spec) (Run, error) {
	pending, err := r.Prepare(ctx, spec)
	if err != nil {
		return Run{}, err
	}
	defer pending.Close()
	if err = r.CreateTask(ctx, pending); err == nil {
		var run Run
		if run, err = r.StartTask(ctx, pending, spec.IP, spec.Peers); err == nil {
			return run, nil
		}
	}
	pending.Close()
	r.abandon(ctx, spec.ID)
	return Run{}, err
}

// BuildSpec is the OCI spec that Start uses.
func (r *Runtime) BuildSpec(ctx context.Context, spec Spec) (*specs.Spec, error) {
	s, _, err := r.buildSpec(r.ns(ctx), spec)
	return s, err
}

// ShiftEntry is what unpacking in the containers' ids does to an entry of a layer.
func ShiftEntry(h *tar.Header, base, size uint32) error { return idShift{base, size}.entry(h) }

// CgroupOf is the path of a container's cgroup.
func CgroupOf(parent, id string) string {
	return (&Runtime{cfg: Config{CgroupParent: parent}}).cgroupPath(id)
}
