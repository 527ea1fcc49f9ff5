package harness

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	api "github.com/gpuaas/gpuaas/pkg/client"
)

// The greetings of the app's versions.
const (
	FirstGreeting  = "Hello from GPUaaS"
	SecondGreeting = "Hello from the second version"
)

// ShipVersion ships another version of the app with the same image: the manifest is what differs.
func (w *Testbed) ShipVersion(version string, changes ...string) {
	w.T.Helper()
	r := w.Release(version)
	r.Template = []byte(strings.NewReplacer(changes...).Replace(string(r.Template)))
	_, err := w.Tenant.Ship(w.Ctx, w.Publisher, r)
	require.NoError(w.T, err)
}

// Instance reads an instance as its operator.
func (w *Testbed) Instance(id string) api.AppInstance {
	w.T.Helper()
	i, err := api.Read[api.AppInstance](w.Operator.GetAppInstance(w.Ctx, w.Tenant.Project.ID, id))
	require.NoError(w.T, err)
	return i
}

// Events lists an instance's events without pulls, of which a node reports only those that take a while.
func (w *Testbed) Events(id string) []api.Event {
	w.T.Helper()
	events, err := w.Tenant.Events(w.Ctx, w.Operator, id)
	require.NoError(w.T, err)
	return slices.DeleteFunc(events, func(e api.Event) bool { return e.Type == "apps.instance.image_pull" })
}

// EventTypes lists the types of Events without their common prefix.
func (w *Testbed) EventTypes(id string) (types []string) {
	w.T.Helper()
	for _, e := range w.Events(id) {
		types = append(types, strings.TrimPrefix(e.Type, "apps.instance."))
	}
	return types
}

// RequireRuns compares the bill of an ended instance with what containerd saw: the number of runs, each measured
// without a gap and none overlapping another, and every second charged once. Containers that run together are one run.
func (w *Testbed) RequireRuns(containers *ContainerdOracle, i api.AppInstance, runs int) {
	w.T.Helper()
	postings := w.FinalPostings(i)
	usage, err := w.Tenant.Usage(w.Ctx, i.ID)
	require.NoError(w.T, err)
	mine := slices.DeleteFunc(sessionRecords(usage), func(u api.UsageRecord) bool { return u.EndedAt.Equal(u.StartedAt) })
	for _, u := range mine {
		require.Equal(w.T, mine[0].AllocationID, u.AllocationID)
	}
	total := SessionSeconds(w.T, usage)
	require.Equal(w.T, runs-1, countGaps(w.T, mine), "one gap between two runs, none within one")
	member, slack := i.Members[0].ID, time.Duration(runs)*EventDelay
	RequireBilledBetween(w.T, total, containers.RunningTimeOf(w.T, member)-MeteringInterval-slack,
		containers.LongestOf(w.T, member)+slack)
	RequireCost(w.T, postings, total, 1)
}

// Edited replaces texts, each of which must be there.
func Edited(t *testing.T, text []byte, changes ...string) []byte {
	t.Helper()
	for n := 0; n < len(changes); n += 2 {
		require.Contains(t, string(text), changes[n])
		text = bytes.Replace(text, []byte(changes[n]), []byte(changes[n+1]), 1)
	}
	return text
}
