package command_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func (w *world) requireRefused(err error, code fault.Code, field string) {
	w.T.Helper()
	f, is := errors.AsType[*fault.Error](err)
	require.True(w.T, is, "%v", err)
	require.Equal(w.T, code, f.Code)
	require.Len(w.T, f.Fields, 1)
	require.Equal(w.T, field, f.Fields[0].Pointer)
}

// releaseWith publishes a version that takes the greeting over into as many variables.
func (w *world) releaseWith(version string, variables int) {
	w.T.Helper()
	env := make([]string, 0, variables)
	for n := range variables {
		env = append(env, fmt.Sprintf("{name: GREETING_%d, parameter: greeting}", n))
	}
	doc := strings.Replace(commandtest.Manifest(), "command: [/demo]", "command: [/demo]\n    env: ["+strings.Join(env,
		", ")+"]", 1)
	doc = strings.TrimRight(doc, "\n") +
		"\n  config_schema: {type: object, additionalProperties: false, properties: {motd: {type: string}}}\n"
	verified, signed := w.Sign(strings.Replace(doc, "version: 1.0.0", "version: "+version, 1))
	w.PublishVersion(version, verified, signed)
}

// What a node could not hold is refused when it is asked for, with the field to blame, and changes nothing.
func TestInstanceThatExceedsALimitOfItsNodeIsRefusedWhenItIsAskedFor(t *testing.T) {
	const parameterBytes = 60 << 10
	w := newWorld(t)
	w.Allocation()
	w.releaseWith("1.1.0", protocol.MaxWorkloadBytes/parameterBytes+1)
	before := w.Contents()
	in := w.InstanceInput()
	in.Version, in.Parameters = "1.1.0", map[string]any{"greeting": strings.Repeat("x", parameterBytes)}
	_, err := w.Commands().CreateInstance(t.Context(), w.Meta("large"), in)
	w.requireRefused(err, "member_limit_exceeded", "/parameters")
	require.Equal(t, before, w.Contents())

	// One revision fits; during an upgrade a node holds two.
	w.releaseWith("1.2.0", protocol.MaxWorkloadBytes*2/3/parameterBytes)
	w.releaseWith("1.3.0", protocol.MaxWorkloadBytes*2/3/parameterBytes)
	in.Version = "1.2.0"
	i, err := w.Commands().CreateInstance(t.Context(), w.Meta("fits"), in)
	require.NoError(t, err)
	w.Report(1, w.Says(i, protocol.WorkloadStatus_READY))
	before = w.Contents()
	_, err = w.Commands().UpgradeInstance(t.Context(), w.Meta("upgrade"), command.UpgradeInstanceInput{
		ProjectID: w.Project.ID, InstanceID: i.ID, Version: "1.3.0",
	})
	w.requireRefused(err, "member_limit_exceeded", "/target_version")
	require.Equal(t, before, w.Contents())
}

// So is a config, which each service has in its document.
func TestAConfigThatExceedsALimitOfTheNodeIsRefused(t *testing.T) {
	const parameterBytes, configBytes = 60 << 10, 63 << 10
	w := newWorld(t)
	w.Allocation()
	w.releaseWith("1.1.0", protocol.MaxWorkloadBytes/parameterBytes-2)
	in := w.InstanceInput()
	in.Version, in.Parameters = "1.1.0", map[string]any{"greeting": strings.Repeat("x", parameterBytes)}
	i, err := w.Commands().CreateInstance(t.Context(), w.Meta("fits"), in)
	require.NoError(t, err)
	w.Report(1, w.Says(i, protocol.WorkloadStatus_READY))
	before := w.Contents()
	change := func(bytes int) error {
		return second(w.Commands().ChangeInstance(t.Context(), w.Meta(""), w.Project.ID, i.ID, command.ChangeInstanceInput{
			Config: map[string]any{"motd": strings.Repeat("x", bytes)},
		}))
	}
	w.requireRefused(change(configBytes), "member_limit_exceeded", "/config")
	require.Equal(t, before, w.Contents())
	require.NoError(t, change(1))
}

// So is a rollback or a start to content that no longer fits: a limit may have become smaller since.
func TestRollbackOrStartToWhatExceedsALimitIsRefused(t *testing.T) {
	outgrow := func(w *world, id string, revision int64) map[string]string {
		w.Exec(`UPDATE instance_revisions SET parameters = repeat('x', $3::INT) WHERE instance_id = $1 AND revision = $2`,
			id, revision, protocol.MaxWorkloadBytes)
		return w.Contents()
	}
	t.Run("rollback", func(t *testing.T) {
		w := newWorld(t)
		i := w.Upgraded()
		ready := w.Says(i, protocol.WorkloadStatus_READY)
		ready.Revision = 2
		w.Report(2, ready)
		before := outgrow(w, i.ID, 1)
		_, err := w.Commands().RollbackInstance(t.Context(), w.Meta("back"), w.Project.ID, i.ID, "")
		w.requireRefused(err, "member_limit_exceeded", "/target_version")
		require.Equal(t, before, w.Contents())
	})
	t.Run("start", func(t *testing.T) {
		w := newWorld(t)
		i := w.Stopped()
		before := outgrow(w, i.ID, 1)
		_, err := w.Commands().StartInstance(t.Context(), w.Meta("start"), w.Project.ID, i.ID)
		require.EqualValues(t, "member_limit_exceeded", fault.As(err).Code)
		require.Empty(t, fault.As(err).Fields, "the request has no field to blame")
		require.Equal(t, before, w.Contents())
	})
}

// A node with as many members as its state may have gets no other.
func TestNodeWithTheMostMembersGetsNoOther(t *testing.T) {
	w := newWorld(t)
	a := w.Allocation()
	w.Exec(`INSERT INTO reservations (member_id, allocation_id, cpu_millis, memory_bytes, reserved_at)
		SELECT gen_random_uuid(), $1, 0, 0, $2 FROM generate_series(1, $3::INT8)`, a.ID, w.Now, protocol.MaxParts)
	before := w.Contents()
	in := w.InstanceInput()
	in.AllocationIDs = []string{a.ID}
	_, err := w.Commands().CreateInstance(t.Context(), w.Meta(db.NewID()), in)
	w.requireRefused(err, capacity.CodeInsufficient, "/placement_intent/allocation_ids")
	require.Equal(t, before, w.Contents())

	w.Exec(`DELETE FROM reservations WHERE member_id = (SELECT min(member_id::TEXT)::UUID FROM reservations)`)
	_, err = w.Commands().CreateInstance(t.Context(), w.Meta(db.NewID()), in)
	require.NoError(t, err)
}
