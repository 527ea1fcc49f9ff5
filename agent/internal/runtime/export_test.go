package runtime

import (
	"archive/tar"
	"context"
	"errors"
	"math"
	"os"
	"time"

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

// SetAnswerWithin sets how long a listing waits for containerd.
func (r *Runtime) SetAnswerWithin(d time.Duration) { r.answerWithin = d }

// StartFault is what a start that failed with the error reports.
func StartFault(err error) error { return startFault(err) }

// BuildSpec is the OCI spec that Start uses.
func (r *Runtime) BuildSpec(ctx context.Context, spec Spec) (*specs.Spec, error) {
	s, _, err := r.buildSpec(r.ns(ctx), spec)
	return s, err
}

// ShiftEntry is what unpacking in the containers' ids does to an entry of a layer.
func ShiftEntry(h *tar.Header, base, size uint32) error { return idShift{base, size}.entry(h) }

// LayerUse is what a layer of the container takes of the disk, as far as it is within the limit.
func LayerUse(ctx context.Context, dir string, limit int64) (int64, error) {
	return (&Runtime{}).layerUse(ctx, "none", &layer{dir: dir, limit: limit})
}

// DirUse is what a directory that was found below another one takes of the disk.
func DirUse(ctx context.Context, root *os.Root, name string) (int64, error) {
	count := use{root: root, limit: math.MaxInt64, seen: map[uint64]bool{}}
	err := count.addDir(ctx, name, 1)
	return count.bytes, err
}

// RemovedUse is what the removed files take that threads hold open or mapped; there may be so many of these in all.
func RemovedUse(ctx context.Context, mayOpen int, threads ...int) (int64, error) {
	count := use{limit: math.MaxInt64, seen: map[uint64]bool{}, openLeft: mayOpen}
	var err error
	for _, thread := range threads {
		err = errors.Join(err, count.addRemovedOf(ctx, thread))
	}
	return count.bytes, err
}

// CgroupOf is the path of a container's cgroup.
func CgroupOf(parent, id string) string {
	return (&Runtime{cfg: Config{CgroupParent: parent}}).cgroupPath(id)
}
