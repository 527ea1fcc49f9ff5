package runtime_test

import (
	"testing"
	"time"

	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/stretchr/testify/require"
)

// TestStartCostsLittleMoreThanItsFloor prints what Start takes beside NewContainer, NewTask and Start of the same spec,
// and fails only when it is a multiple.
func TestStartCostsLittleMoreThanItsFloor(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	c := f.daemon.Client(t)
	var own, floor []time.Duration
	for range 7 {
		spec := f.spec(image, "wait")
		start := time.Now()
		f.start(spec)
		own = append(own, time.Since(start))
		oci, err := f.rt.BuildSpec(t.Context(), spec)
		require.NoError(t, err)
		require.NoError(t, f.rt.Stop(t.Context(), spec.ID, 0))
		record, err := c.LoadContainer(f.ns(), spec.ID)
		require.NoError(t, err)
		task, err := record.Task(f.ns(), nil)
		require.NoError(t, err)
		_, err = task.Delete(f.ns())
		require.NoError(t, err)
		require.NoError(t, record.Delete(f.ns(), client.WithSnapshotCleanup))

		start = time.Now()
		container, err := c.NewContainer(f.ns(), spec.ID, withSnapshotOf(image),
			client.WithRuntime("io.containerd.runc.v2", &runcoptions.Options{Root: f.cfg.RuncRoot}), client.WithSpec(oci))
		require.NoError(t, err)
		task, err = container.NewTask(f.ns(), cio.LogFile(f.cfg.LogDir+"/"+spec.ID+".log"))
		require.NoError(t, err)
		require.NoError(t, task.Start(f.ns()))
		floor = append(floor, time.Since(start))
		require.NoError(t, f.rt.Remove(t.Context(), spec.ID))
	}
	a, b := median(own), median(floor)
	t.Logf("Start %v, floor %v", a, b)
	require.Less(t, a, 4*b)
}
