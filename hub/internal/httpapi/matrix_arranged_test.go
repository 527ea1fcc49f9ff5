package httpapi

import (
	"context"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/nodes"
	"github.com/gpuaas/gpuaas/pkg/duplex"
	"github.com/gpuaas/gpuaas/pkg/manifest/manifesttest"
	"github.com/gpuaas/gpuaas/protocol"
)

// coreBody asks for an allocation of a part of a node.
const coreBody = `{"capacity_shape":"gpu_slice","accelerator_count":0,"cpu_cores":1,"memory_mib":512}`

// arrangement is what a request of an operation needs to succeed beside what a stage has.
type arrangement struct {
	// body replaces the sample where it is not empty; ids replace values of the path's parameters.
	body string
	ids  map[string]string
	// before changes the state, in part as the caller; what it returns are ids, too.
	before func(t *testing.T, token string) map[string]string
	// stream is the kind of the stream that the operation opens.
	stream string
}

// arranged is a stage with all that the operations which change something need, made before the first of them.
type arranged struct {
	*stage
	hub *httptest.Server
	// project is the path of the project. deployed is an instance of containers, cluster one of an external worker;
	// both run. shared is another project's.
	project, deployed, cluster, shared string
	// pushed is an artifact that the registry has.
	pushed string
	// spare is an allocation without an instance.
	spare string
	// lost is a node that was never in contact.
	lost string
	// registerArtifact and registerManifest are bodies for a version that is pushed, and for one that is registered.
	registerArtifact, registerManifest string
}

func arrange(t *testing.T, s *stage) *arranged {
	t.Helper()
	a := &arranged{stage: s, project: "/projects/" + s.ids["project_id"]}
	s.ports = map[string]func(context.Context) (duplex.Stream, error){"http": shouter(t)}
	a.hub = httptest.NewServer(s.direct)
	t.Cleanup(a.hub.Close)
	a.lost = s.enroll(t)
	stageNode := s.node
	s.node = s.enroll(t)
	s.connect(t, s.node)
	a.post(t, s.admin, "/admin/credits", `{"org_id":"`+s.ids["org_id"]+`","amount":"1000","currency":"EUR",
		"description":"d"}`, 201)
	a.post(t, s.admin, "/admin/prices", `{"meter":"session_seconds","currency":"EUR","price":"1","per":"hour","from":"`+
		s.clock().Add(time.Second).Format(time.RFC3339)+`"}`, 201)
	s.wait(time.Minute)
	a.share(t)
	s.reports = 1 // as the reports on instances that are there
	a.ship(t)
	a.deployed = a.post(t, s.boss, a.project+"/app-instances", a.launch("demo", "2.0.0", a.allocate(t)), 201).text("id")
	a.report(t, 1, protocol.WorkloadStatus_READY)
	a.makeCluster(t)
	a.spare = a.allocate(t)
	s.node = stageNode
	a.addRows(t)
	return a
}

func (a *arranged) post(t *testing.T, token, path, body string, status int) answer {
	t.Helper()
	return a.must(t, token, "POST", path, db.NewID(), body, status)
}

func (a *arranged) allocate(t *testing.T) (id string) {
	t.Helper()
	return a.post(t, a.boss, a.project+"/allocations", coreBody, 201).text("id")
}

func (a *arranged) launch(slug, version string, allocations ...string) string {
	list := ""
	for _, id := range allocations {
		list += `,"` + id + `"`
	}
	return `{"app_slug":"` + slug + `","version":"` + version + `","display_name":"d","placement_intent":` +
		`{"allocation_ids":[` + list[1:] + `]}}`
}

// ship publishes two versions of the stage's app, and pushes two more.
func (a *arranged) ship(t *testing.T) {
	t.Helper()
	a.post(t, a.admin, "/admin/publishers", a.ships.delegate(t, "acme", "org/acme/"), 201)
	for _, version := range []string{"2.0.0", "3.0.0", "4.0.0", "5.0.0"} {
		pushed := a.ships.push(t, a.boss, version, version, a.ships.signer)
		if version == "5.0.0" {
			a.registerArtifact = registration(version, pushed)
			return
		}
		a.pushed = a.post(t, a.boss, a.project+"/app-artifacts", registration(version, pushed), 201).text("id")
		body := a.ships.manifest(t, version, pushed.Repository, pushed.Digest, a.ships.signer)
		if version == "4.0.0" {
			a.registerManifest = body
			continue
		}
		a.post(t, a.admin, "/admin/apps/manifests", body, 201)
		a.post(t, a.admin, "/admin/apps/catalog/demo/versions/"+version+"/publish", "", 200)
	}
}

// statusOf sets the status of a version of the demo.
func (a *arranged) statusOf(version, status string) func(t *testing.T, token string) map[string]string {
	return func(t *testing.T, _ string) map[string]string {
		a.tx(t, func(ctx context.Context, tx db.Tx) error {
			_, err := tx.Exec(ctx, `UPDATE app_versions SET status = $2 WHERE app_slug = 'demo' AND version = $1`, version,
				status)
			return err
		})
		return nil
	}
}

// report applies what the node says of the deployed instance.
func (a *arranged) report(t *testing.T, revision uint64, status protocol.WorkloadStatus_Status) {
	t.Helper()
	a.reports++
	a.tx(t, func(ctx context.Context, tx db.Tx) error {
		i, err := instance.Get(ctx, tx, a.ids["project_id"], a.deployed)
		if err != nil {
			return err
		}
		return nodes.ApplyReport(ctx, tx, nodes.Report{Report: instance.Report{
			NodeID: i.Members[0].NodeID, SessionNo: 1, Counter: a.reports, Epoch: 1, Generation: revision,
			Statuses: []*protocol.WorkloadStatus{{
				MemberId: i.Members[0].ID, InstanceId: i.ID, Revision: revision, Status: status,
			}},
		}}, a.clock())
	})
}

// makeCluster makes a running instance that an external worker operates.
func (a *arranged) makeCluster(t *testing.T) {
	t.Helper()
	w := &commandtest.World{
		T: t, DB: a.d, Now: a.clock(), Project: iam.Project{ID: a.ids["project_id"], OrgID: a.ids["org_id"]},
	}
	w.NewCatalogKey()
	w.PublishWorker(manifesttest.External("cluster"))
	a.cluster = a.post(t, a.boss, a.project+"/app-instances",
		a.launch("cluster", "1.0.0", a.allocate(t), a.allocate(t)), 201).text("id")
	task := a.project + "/app-instances/" + a.cluster + "/tasks"
	id, _ := items(a.must(t, a.boss, "GET", task, "", "", 200))[0]["id"].(string)
	task += "/" + id
	a.post(t, a.boss, task+"/claim", `{"worker":"a"}`, 200)
	for _, phase := range []string{"install", "start"} {
		a.post(t, a.boss, task+"/progress", `{"attempt":1,"phase":"`+phase+`"}`, 200)
	}
	a.post(t, a.boss, task+"/complete", `{"attempt":1}`, 200)
}

// member is the cluster's member of a number.
func (a *arranged) member(t *testing.T, n int) (id string) {
	t.Helper()
	a.tx(t, func(ctx context.Context, tx db.Tx) error {
		i, err := instance.Get(ctx, tx, a.ids["project_id"], a.cluster)
		id = i.Members[n].ID
		return err
	})
	return id
}

// share makes another project with an instance that every project of the org may attach to.
func (a *arranged) share(t *testing.T) {
	t.Helper()
	project := a.post(t, a.boss, "/projects", `{"slug":"sharing","display_name":"S"}`, 201).text("id")
	allocation := a.post(t, a.boss, "/projects/"+project+"/allocations", coreBody, 201).text("id")
	a.shared = a.instance(t, a.ids["org_id"], project, allocation).ID
	a.tx(t, func(ctx context.Context, tx db.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE app_instances SET control_plane_scope = 'tenant',
			tenant_boundary_mode = 'tenant_shared' WHERE id = $1`, a.shared)
		return err
	})
}

// addRows writes what a node or a worker of the hub would leave.
func (a *arranged) addRows(t *testing.T) {
	t.Helper()
	a.tx(t, func(ctx context.Context, tx db.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO webhook_dead_letters (webhook_id, event_id, pos, type, subject, tries,
			last_error, failed_at) VALUES ($1, $2, 1, 'apps.instance.requested', $3, 1, '', $4)`, a.ids["webhook_id"], someID,
			a.deployed, a.clock())
		if err != nil {
			return err
		}
		if _, err = tx.Exec(ctx, `UPDATE volumes SET status = 'ready' WHERE id = $1`, a.ids["volume_id"]); err != nil {
			return err
		}
		if _, err = tx.Exec(ctx, `INSERT INTO environments (node_id, project_id, digest, description, description_sha256)
			VALUES ($1, $2, $3, '{}', '\x01') ON CONFLICT DO NOTHING`, a.ids["node_id"], a.ids["project_id"],
			a.ids["digest"]); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `INSERT INTO apps (slug, org_id, display_name, description, category, runtime_backend,
			resource_version, created_at, updated_at) VALUES ('unused', $1, '', '', '', '', 1, $2, $2)`, a.ids["org_id"],
			a.clock())
		return err
	})
}

// arrangements are those of the operations whose sample a stage refuses.
func (a *arranged) arrangements(t *testing.T) map[string]arrangement {
	t.Helper()
	all := a.ofResources(t)
	maps.Copy(all, a.ofInstances(t))
	return all
}

func (a *arranged) ofResources(t *testing.T) map[string]arrangement {
	t.Helper()
	return map[string]arrangement{
		"createAllocation": {body: coreBody},
		"createOrg":        {body: `{"slug":"fresh","display_name":"Fresh"}`},
		"createPrice": {body: `{"meter":"session_seconds","currency":"EUR","price":"1","per":"hour",` +
			`"from":"2036-01-01T00:00:00Z"}`},
		"createProject":        {body: `{"org_id":"` + a.ids["org_id"] + `","slug":"fresh","display_name":"P"}`},
		"createSecret":         {body: `{"name":"fresh","value":"v"}`},
		"createServiceAccount": {body: `{"name":"n","slug":"s","description":"d","role":"app_operator"}`},
		"createVolume":         {body: `{"name":"fresh","size_mib":64,"allocation_id":"` + a.ids["allocation_id"] + `"}`},
		"restoreVolume":        {body: `{"snapshot_id":"` + a.ids["snapshot_id"] + `"}`},
		"resizeVolume":         {body: `{"size_mib":128}`},
		"createVolumeSnapshot": {},
		"deprecateAppVersion":  {ids: map[string]string{"version": "2.0.0"}},
		"promoteAppVersion":    {before: a.statusOf("1.0.0", "staged")},
		"publishAppVersion":    {before: a.statusOf("1.0.0", "canary")},
		"retireAppVersion": {
			ids: map[string]string{"version": "3.0.0"}, before: a.statusOf("3.0.0", "deprecated"),
		},
		"verifyArtifact": {ids: map[string]string{"artifact_id": a.pushed}, before: func(t *testing.T,
			_ string,
		) map[string]string {
			a.tx(t, func(ctx context.Context, tx db.Tx) error {
				_, err := tx.Exec(ctx, `UPDATE artifacts SET trust_state = 'rejected' WHERE id = $1`, a.pushed)
				return err
			})
			return nil
		}},
		"registerArtifact":  {body: a.registerArtifact},
		"registerManifest":  {body: a.registerManifest},
		"registerPublisher": {body: a.ships.delegate(t, "acme", "org/acme/")},
		"releaseAllocation": {ids: map[string]string{"allocation_id": a.spare}},
		"releaseAppSlug":    {ids: map[string]string{"app_slug": "unused"}},
		"removeNode":        {ids: map[string]string{"node_id": a.lost}},
		"replayWebhook":     {},
		"enableWebhook": {before: func(t *testing.T, _ string) map[string]string {
			a.tx(t, func(ctx context.Context, tx db.Tx) error {
				_, err := tx.Exec(ctx, `UPDATE webhooks SET status = 'disabled' WHERE id = $1`, a.ids["webhook_id"])
				return err
			})
			return nil
		}},
	}
}

func (a *arranged) ofInstances(t *testing.T) map[string]arrangement {
	t.Helper()
	deployed, cluster := map[string]string{"app_instance_id": a.deployed}, a.project+"/app-instances/"+a.cluster
	task := a.project + "/app-instances/" + a.ids["app_instance_id"] + "/tasks/" + a.ids["task_id"]
	claimed := arrangement{before: func(t *testing.T, token string) map[string]string {
		a.post(t, token, task+"/claim", `{"worker":"w"}`, 200)
		return nil
	}}
	done := arrangement{before: func(t *testing.T, token string) map[string]string {
		a.post(t, token, task+"/claim", `{"worker":"w"}`, 200)
		a.post(t, token, task+"/progress", `{"attempt":1,"phase":"a"}`, 200)
		return nil
	}}
	worker := map[string]string{"app_instance_id": a.cluster, "member_id": a.member(t, 1)}
	attached := map[string]string{"app_instance_id": a.shared}
	one := a.project + "/app-instances/" + a.deployed
	return map[string]arrangement{
		"createAppInstance":       {body: a.launch("demo", "2.0.0", a.spare)},
		"decommissionAppInstance": {ids: deployed},
		"upgradeAppInstance":      {ids: deployed, body: `{"target_version":"3.0.0"}`},
		"rollbackAppInstance": {ids: deployed, body: `{}`, before: func(t *testing.T, _ string) map[string]string {
			a.post(t, a.boss, one+"/upgrade", `{"target_version":"3.0.0"}`, 202)
			a.report(t, 2, protocol.WorkloadStatus_READY)
			return nil
		}},
		"startAppInstance": {ids: deployed, before: func(t *testing.T, _ string) map[string]string {
			a.post(t, a.boss, one+"/stop", "", 202)
			a.report(t, 1, protocol.WorkloadStatus_STOPPED)
			return nil
		}},
		"attachAppInstance": {ids: attached},
		"detachAppInstance": {ids: attached, before: func(t *testing.T, _ string) map[string]string {
			made := a.post(t, a.boss, a.project+"/app-instances/"+a.shared+"/attachments", "", 201)
			return map[string]string{"attachment_id": made.text("id")}
		}},
		"execInAppInstance":        {stream: "exec", body: `{"command":["a"]}`},
		"copyAppInstanceFiles":     {stream: "copy", body: `{"path":"/a"}`},
		"forwardAppInstancePort":   {stream: "port-forward", body: `{"port":"http"}`},
		"heartbeatAppInstanceTask": claimed,
		"progressAppInstanceTask":  claimed,
		"completeAppInstanceTask":  done,
		"failAppInstanceTask":      claimed,
		"addAppInstanceMember":     {ids: worker, body: `{"allocation_id":"` + a.spare + `","role":"worker"}`},
		"removeAppInstanceMember":  {ids: worker},
		"reportAppInstanceMember":  {ids: worker},
		"recoverAppInstanceMember": {ids: worker, before: func(t *testing.T, _ string) map[string]string {
			a.post(t, a.boss, cluster+"/members/"+worker["member_id"]+"/report", `{"status":"failed","reason":"internal"}`, 200)
			return nil
		}},
	}
}

// sendArranged sends the request of an actor with an arrangement.
func (a *arranged) sendArranged(t *testing.T, who actor, op *operation, of arrangement) answer {
	t.Helper()
	if of.body == "" {
		of.body = samples()[op.id]
	}
	if of.stream == "" {
		return a.sendBody(t, nil, who.token, op, http.Header{}, of.body)
	}
	i := instance.Instance{ID: a.ids["app_instance_id"], ProjectID: a.ids["project_id"]}
	conn, r, res := openStream(t, a.hub, who.token, i, of.stream, of.body)
	require.NoError(t, conn.CloseWrite())
	_, err := io.Copy(io.Discard, r)
	require.NoError(t, err)
	return answer{status: res.StatusCode, header: res.Header}
}
