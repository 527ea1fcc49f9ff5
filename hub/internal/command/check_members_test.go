package command

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func (w *world) requireRefused(err error, code fault.Code, field string) {
	w.t.Helper()
	f, is := errors.AsType[*fault.Error](err)
	require.True(w.t, is, "%v", err)
	require.Equal(w.t, code, f.Code)
	require.Len(w.t, f.Fields, 1)
	require.Equal(w.t, field, f.Fields[0].Pointer)
}

// releaseWith publishes a version that takes the greeting over into as many variables.
func (w *world) releaseWith(version string, variables int) {
	w.t.Helper()
	env := make([]string, 0, variables)
	for n := range variables {
		env = append(env, fmt.Sprintf("{name: GREETING_%d, parameter: greeting}", n))
	}
	doc := strings.Replace(demoManifest, "command: [/demo]", "command: [/demo]\n    env: ["+strings.Join(env, ", ")+"]", 1)
	verified, signed := w.sign(strings.Replace(doc, "version: 1.0.0", "version: "+version, 1))
	w.publishVersion(version, verified, signed)
}

// What a node could not hold is refused when it is asked for, with the field to blame, and changes nothing.
func TestInstanceThatExceedsALimitOfItsNodeIsRefusedWhenItIsAskedFor(t *testing.T) {
	const parameterBytes = 60 << 10
	w := newWorld(t)
	w.allocation()
	w.releaseWith("1.1.0", protocol.MaxWorkloadBytes/parameterBytes+1)
	before := w.contents()
	in := w.instanceInput()
	in.Version, in.Parameters = "1.1.0", map[string]any{"greeting": strings.Repeat("x", parameterBytes)}
	_, err := w.commands().CreateInstance(t.Context(), w.meta("large"), in)
	w.requireRefused(err, "member_limit_exceeded", "/parameters")
	require.Equal(t, before, w.contents())

	// One revision fits; during an upgrade a node holds two.
	w.releaseWith("1.2.0", protocol.MaxWorkloadBytes*2/3/parameterBytes)
	w.releaseWith("1.3.0", protocol.MaxWorkloadBytes*2/3/parameterBytes)
	in.Version = "1.2.0"
	i, err := w.commands().CreateInstance(t.Context(), w.meta("fits"), in)
	require.NoError(t, err)
	w.report(1, w.says(i, protocol.WorkloadStatus_READY))
	before = w.contents()
	_, err = w.commands().UpgradeInstance(t.Context(), w.meta("upgrade"), w.project.ID, i.ID, "1.3.0")
	w.requireRefused(err, "member_limit_exceeded", "/target_version")
	require.Equal(t, before, w.contents())
}

// So is a rollback or a start to content that no longer fits: a limit may have become smaller since.
func TestRollbackOrStartToWhatExceedsALimitIsRefused(t *testing.T) {
	outgrow := func(w *world, id string, revision int64) map[string]string {
		w.exec(`UPDATE instance_revisions SET parameters = repeat('x', $3::INT) WHERE instance_id = $1 AND revision = $2`,
			id, revision, protocol.MaxWorkloadBytes)
		return w.contents()
	}
	t.Run("rollback", func(t *testing.T) {
		w := newWorld(t)
		i := w.upgraded()
		ready := w.says(i, protocol.WorkloadStatus_READY)
		ready.Revision = 2
		w.report(2, ready)
		before := outgrow(w, i.ID, 1)
		_, err := w.commands().RollbackInstance(t.Context(), w.meta("back"), w.project.ID, i.ID, "")
		w.requireRefused(err, "member_limit_exceeded", "/target_version")
		require.Equal(t, before, w.contents())
	})
	t.Run("start", func(t *testing.T) {
		w := newWorld(t)
		i := w.stopped()
		before := outgrow(w, i.ID, 1)
		_, err := w.commands().StartInstance(t.Context(), w.meta("start"), w.project.ID, i.ID)
		require.EqualValues(t, "member_limit_exceeded", fault.As(err).Code)
		require.Empty(t, fault.As(err).Fields, "the request has no field to blame")
		require.Equal(t, before, w.contents())
	})
}

// A node with as many members as its state may have gets no other.
func TestNodeWithTheMostMembersGetsNoOther(t *testing.T) {
	w := newWorld(t)
	a := w.allocation()
	w.exec(`INSERT INTO instance_members (id, instance_id, allocation_id, node_id, role, status, status_reason, detail,
			observed_revision, unreachable, endpoints, restarts, exit_code, created_at, updated_at)
		SELECT gen_random_uuid(), gen_random_uuid(), $1, $2, 'node', 'pending', '', '', 0, false, '[]', 0, 0, $3, $3
		FROM generate_series(1, $4::INT8)`, a.ID, w.node, w.now, protocol.MaxParts)
	before := w.contents()
	in := w.instanceInput()
	in.AllocationIDs = []string{a.ID}
	_, err := w.commands().CreateInstance(t.Context(), w.meta(db.NewID()), in)
	w.requireRefused(err, capacity.CodeInsufficient, "/placement_intent/allocation_ids")
	require.Equal(t, before, w.contents())

	w.exec(`UPDATE instance_members SET removed_at = $1 WHERE id = (SELECT min(id::TEXT)::UUID FROM instance_members)`,
		w.now)
	_, err = w.commands().CreateInstance(t.Context(), w.meta(db.NewID()), in)
	require.NoError(t, err)
}
