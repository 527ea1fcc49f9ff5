package httpapi

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/stretchr/testify/require"

	hubapi "github.com/gpuaas/gpuaas/hub/api"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// save keeps all rows as they are; restore puts them back and returns the tables that had changed.
func (s *stage) save(t *testing.T) (restore func() (changed []string)) {
	t.Helper()
	ctx := t.Context()
	before := fingerprint(t, s.d)
	run := func(statements ...string) {
		t.Helper()
		require.NoError(t, db.WriteTx(ctx, s.d, func(tx db.Tx) error {
			for _, sql := range statements {
				if _, err := tx.Exec(ctx, sql); err != nil {
					return fmt.Errorf("%s: %w", sql, err)
				}
			}
			return nil
		}))
	}
	statements := []string{"CREATE SCHEMA saved"}
	for _, table := range slices.Sorted(maps.Keys(before)) {
		statements = append(statements, fmt.Sprintf("CREATE TABLE saved.%[1]q AS TABLE public.%[1]q", table))
	}
	run(statements...)
	return func() (changed []string) {
		now := fingerprint(t, s.d)
		statements := []string{"SET LOCAL session_replication_role = replica"} // no foreign key asks
		for _, table := range slices.Sorted(maps.Keys(now)) {
			if now[table] != before[table] {
				changed = append(changed, table)
				statements = append(statements, fmt.Sprintf("DELETE FROM public.%q", table),
					fmt.Sprintf("INSERT INTO public.%[1]q SELECT * FROM saved.%[1]q", table))
			}
		}
		run(statements...)
		return changed
	}
}

// TestAllowedRequestsThatChangeSomethingRun sends every request that changes something for every actor who may send it,
// each on the same rows: none is refused for who sends it, what is refused for another reason changes nothing, and each
// operation succeeds for an actor, but for those that refusedByState lists.
func TestAllowedRequestsThatChangeSomethingRun(t *testing.T) {
	s := newStage(t)
	actors := s.actors(t)
	doc, err := openapi3.NewLoader().LoadFromData(hubapi.OpenAPI)
	require.NoError(t, err)
	operations, err := loadContract(hubapi.OpenAPI)
	require.NoError(t, err)
	restore := s.save(t)
	sent, succeeded, refused := 0, 0, map[string]string{}
	for _, key := range slices.Sorted(maps.Keys(operations)) {
		op := operations[key]
		permission, _ := doc.Paths.Value(op.template).Operations()[op.method].Extensions["x-permission"].(string)
		if permission == "" || !op.mutates() {
			continue
		}
		worked := false
		for _, who := range actors {
			if want := s.expect(t, who, op, iam.Permission(permission)); want != 0 && want != http.StatusPreconditionFailed {
				continue
			}
			s.wait(time.Second)
			got := s.sendOver(t, nil, who.token, op, http.Header{})
			sent++
			changed := slices.DeleteFunc(restore(), func(table string) bool { return strings.HasPrefix(table, "audit") })
			if got.status < 300 {
				succeeded++
				worked = true
				require.True(t, len(changed) > 0 || op.id == "transferAppSlug", "%s: %s changes nothing", who.name, op.id)
				continue
			}
			if !slices.Contains([]string{"createProject", "detachAppInstance", "replayWebhook"}, op.id) { // what the body names
				require.NotContains(t, []int{401, 403, 404, 412, 500}, got.status, "%s: %s: %s", who.name, op.id, got.raw)
			}
			require.Empty(t, changed, "%s: %s: %s", who.name, op.id, got.raw)
			refused[op.id] = got.text("code")
		}
		if worked {
			delete(refused, op.id)
		}
	}
	t.Logf("%d allowed requests, %d succeeded; %d operations are refused by the state of the stage", sent, succeeded,
		len(refused))
	require.Equal(t, refusedByState(), refused)
}

// refusedByState are the operations whose sample the state of the stage refuses, with the code of the refusal.
func refusedByState() map[string]string {
	return map[string]string{
		"addAppInstanceMember":     "task_unsupported",
		"attachAppInstance":        "attachment_exists",
		"completeAppInstanceTask":  "task_fenced",
		"copyAppInstanceFiles":     "upgrade_missing",
		"createAllocation":         "sku_unknown",
		"createAppInstance":        "reference_unknown",
		"createOrg":                "already_exists",
		"createPrice":              "price_in_the_past",
		"createSecret":             "secret_exists",
		"createServiceAccount":     "invalid",
		"createVolume":             "allocation_unknown",
		"createVolumeSnapshot":     "volume_status",
		"decommissionAppInstance":  "instance_attached",
		"deprecateAppVersion":      "app_version_status",
		"detachAppInstance":        "subject_not_found",
		"enableWebhook":            "webhook_active",
		"execInAppInstance":        "upgrade_missing",
		"failAppInstanceTask":      "task_fenced",
		"forwardAppInstancePort":   "upgrade_missing",
		"heartbeatAppInstanceTask": "task_fenced",
		"progressAppInstanceTask":  "task_fenced",
		"recoverAppInstanceMember": "task_unsupported",
		"registerArtifact":         "reference_unknown",
		"registerManifest":         "manifest_refused",
		"registerPublisher":        "delegation_refused",
		"releaseAllocation":        "allocation_in_use",
		"releaseAppSlug":           "app_slug_in_use",
		"removeAppInstanceMember":  "task_unsupported",
		"removeNode":               "node_connected",
		"replayWebhook":            "not_found",
		"reportAppInstanceMember":  "member_of_node",
		"resizeVolume":             "volume_status",
		"restoreVolume":            "volume_snapshot_unknown",
		"rollbackAppInstance":      "reference_unknown",
		"startAppInstance":         "instance_running",
		"upgradeAppInstance":       "reference_unknown",
	}
}
