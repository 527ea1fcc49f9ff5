package httpapi

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// yard is a house from which apps are shipped: a registry behind TLS, a catalog key, and a publisher of the org acme.
type yard struct {
	*house
	keys       *trust.Keys
	init       trust.InitResult
	passphrase string
	caFile     string
	signer     protocol.Signer
	publicPEM  []byte
	registry   *artifact.Registry

	orgID, projectID, boss string
}

func newYard(t *testing.T) *yard {
	t.Helper()
	y := &yard{house: newHouse(t)}
	registry := y.openRegistry(t)
	kek, err := secret.NewKEK([]byte(houseKey))
	require.NoError(t, err)
	api := serverOn(y.d, secret.NewSealer(kek), y.keys)
	api.Queries.Registry, api.Commands.Registry, api.RegistryHost = registry, registry, registry.Host()
	y.Handler, err = NewHandler(api, Config{
		Authenticator: TokenAuthenticator{DB: y.d}, Auditor: &command.Service{DB: y.d}, Registry: registry,
		Log: jsonLog(t, y.log), Now: y.clock, RequestsPerSecond: 1e6, Burst: 1e6,
	})
	require.NoError(t, err)
	y.Handler = conforms(t, y.Handler)
	y.orgID, y.projectID, y.boss = y.tenant(t, "acme")
	return y
}

// openRegistry makes the keys of the hub and of a publisher, and a registry in a house whose handler is served by TLS.
func (y *yard) openRegistry(t *testing.T) *artifact.Registry {
	t.Helper()
	y.passphrase = "correct horse battery"
	dir := t.TempDir()
	var err error
	y.init, err = trust.Init(trust.InitOptions{
		DataDir: filepath.Join(dir, "data"), OfflineDir: filepath.Join(dir, "offline"), TrustDomain: "gpuaas.test",
		Passphrase: y.passphrase, Now: y.clock(), ScryptWorkFactor: 10,
	})
	require.NoError(t, err)
	y.keys, err = trust.Open(filepath.Join(dir, "data"))
	require.NoError(t, err)
	y.signer, err = appkit.GenerateKey(filepath.Join(dir, "publisher.key"), filepath.Join(dir, "publisher.pub"))
	require.NoError(t, err)
	y.publicPEM, err = os.ReadFile(filepath.Join(dir, "publisher.pub"))
	require.NoError(t, err)

	server := httptest.NewUnstartedServer(y)
	access := &query.RegistryAccess{DB: y.d, Now: y.clock}
	ctx, cancel := context.WithCancel(t.Context())
	registry, err := artifact.OpenRegistry(ctx, artifact.RegistryConfig{
		Dir: filepath.Join(dir, "registry"), Host: server.Listener.Addr().String(), SigningKey: y.keys.Token(),
		TrustDomain: "gpuaas.test",
		IntentOpen:  access.IntentOpen, Authenticate: access.Authenticate, MayPull: access.MayPull, Now: y.clock,
		Roots: access.Roots,
	})
	require.NoError(t, err)
	y.registry = registry
	server.StartTLS()
	t.Cleanup(func() {
		server.Close()
		cancel()
	})
	y.caFile = filepath.Join(dir, "ca.pem")
	require.NoError(t,
		os.WriteFile(y.caFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o600))
	return registry
}

func (y *yard) delegate(t *testing.T, orgSlug, prefix string) string {
	t.Helper()
	env, err := trust.Delegate(trust.DelegateOptions{
		CatalogKeyFile: y.init.CatalogKeyFile, Passphrase: y.passphrase, PublisherPEM: y.publicPEM, OrgSlug: orgSlug,
		Prefixes: []string{prefix}, Now: y.clock(), TTL: 24 * time.Hour,
	})
	require.NoError(t, err)
	asJSON, err := protocol.EnvelopeToJSON(env)
	require.NoError(t, err)
	return `{"delegation":` + string(asJSON) + `}`
}

const demoManifest = `
schema: gpuaas.app/v1
app:
  slug: demo
  display_name: Demo
  runtime_backend: launchable_oci
  supported_modes: {operating_modes: [tenant_dedicated, platform_managed], control_plane_scopes: [project, platform]}
version:
  version: ${version}
  runtime_profile:
    kind: launchable_oci
    image_variants: [{name: cpu, accelerator: none, image_ref: "${repository}@${digest}"}]
    command: [/app]
    env: [{name: GREETING, parameter: greeting}]
    ports: [{name: http, container: 8080}]
    resources: {cpu_millis: {min: 50, default: 100, max: 1000}, memory_mib: {min: 16, default: 32, max: 256}}
    readiness: {kind: http, port: http, path: /healthz}
  parameters: {type: object, additionalProperties: false, properties: {greeting: {type: string, maxLength: 20}}}
`

func (y *yard) manifest(t *testing.T, version, repository, digest string, signer protocol.Signer) string {
	t.Helper()
	doc, err := appkit.FillTemplate([]byte(demoManifest), map[string]string{
		"version": version, "repository": repository,
		"digest": digest,
	})
	require.NoError(t, err)
	envelope, err := appkit.SignManifest(doc, signer)
	require.NoError(t, err)
	return `{"manifest_envelope":` + string(envelope) + `}`
}

// push asks for an intent, pushes and returns what to register.
func (y *yard) push(t *testing.T, token, version, content string, signer protocol.Signer) appkit.Pushed {
	t.Helper()
	intent := y.must(t, token, "POST", "/projects/"+y.projectID+"/app-artifacts/publish-intents", "intent-"+version+
		content,
		`{"app_slug":"demo","app_version":"`+version+`","artifact_name":"runtime","channel":"dev"}`, 201)
	credentials, ok := intent.body["credentials"].(map[string]any)
	require.True(t, ok)
	username, _ := credentials["username"].(string)
	password, _ := credentials["password"].(string)
	img, err := appkit.ImageFromFiles([]appkit.File{{Path: "/app", Content: []byte(content), Mode: 0o755}},
		appkit.ImageConfig{Architecture: "amd64"})
	require.NoError(t, err)
	pushed, err := appkit.Push(t.Context(), img, appkit.Target{
		RegistryHost: intent.text("registry_host"), Repository: intent.text("repository"), Tag: intent.text("tag"),
		Username: username, Password: password, CAFile: y.caFile,
	}, signer, nil)
	require.NoError(t, err)
	return pushed
}

func registration(version string, p appkit.Pushed) string {
	return `{"app_slug":"demo","app_version":"` + version + `","artifact_name":"runtime","repository":"` + p.Repository +
		`","digest":"` + p.Digest +
		`","tag":"dev-latest","media_type":"` + p.MediaType + `"}`
}

func (y *yard) resolve(t *testing.T, w catalog.Want) (catalog.Resolved, error) {
	t.Helper()
	w.OrgID, w.Now = y.orgID, y.clock()
	if w.ProjectID == "" {
		w.ProjectID = y.projectID
	}
	return db.ReadTx(t.Context(), y.d, func(tx db.Tx) (catalog.Resolved, error) {
		return catalog.Resolve(t.Context(), tx, w)
	})
}

func TestAppGoesFromPushToLaunchable(t *testing.T) {
	y := newYard(t)
	artifacts := "/projects/" + y.projectID + "/app-artifacts"
	y.must(t, y.admin, "POST", "/admin/publishers", "p1", y.delegate(t, "acme", "org/acme/"), 201)
	listed := y.must(t, y.admin, "GET", "/admin/publishers", "", "", 200)
	require.Contains(t, listed.raw, y.signer.KeyID())
	require.Contains(t, listed.raw, `"status":"active"`)

	pushed := y.push(t, y.boss, "1.0.0", "one", y.signer)
	require.Equal(t, "org/acme/demo/runtime", pushed.Repository)
	art := y.must(t, y.boss, "POST", artifacts, "a1", registration("1.0.0", pushed), 201)
	require.Equal(t, "registered", art.text("status"))
	require.Equal(t, "verified", art.text("trust_state"))
	require.Contains(t, art.raw, `"platforms":["linux/amd64"]`)

	version := y.must(t, y.admin, "POST", "/admin/apps/manifests", "m1", y.manifest(t, "1.0.0", pushed.Repository,
		pushed.Digest, y.signer), 201)
	require.Equal(t, "draft", version.text("status"))
	require.Contains(t, version.raw, pushed.Digest)
	y.requireDraftPriced(t)
	entitlement := "/projects/" + y.projectID + "/apps/entitlements/demo"
	y.must(t, y.boss, "GET", entitlement, "", "", 404)
	put := `{"enabled":true,"policy_overrides":{"allowed_operating_modes":["tenant_dedicated"],` +
		`"allowed_control_plane_scopes":["project"],"max_accelerators":2}}`
	y.must(t, y.boss, "PUT", entitlement, "", put, 200)

	_, err := y.resolve(t, catalog.Want{AppSlug: "demo", Version: "1.0.0"})
	require.Equal(t, catalog.CodeVersionNotActive, fault.As(err).Code)
	published := y.must(t, y.admin, "POST", "/admin/apps/catalog/demo/versions/1.0.0/publish", "pub", "", 200)
	require.Equal(t, "active", published.text("status"))
	require.Contains(t, published.raw, `"status":"active","trust_state":"verified"`)
	apps := y.must(t, y.boss, "GET", "/apps/catalog?project_id="+y.projectID, "", "", 200)
	require.Contains(t, apps.raw, `"latest_version":"1.0.0"`)

	y.requireResolved(t)
	y.wait(25 * time.Hour)
	_, err = y.resolve(t, catalog.Want{AppSlug: "demo", Version: "1.0.0"})
	require.Equal(t, catalog.CodePublisherInvalid, fault.As(err).Code)
	y.must(t, y.admin, "POST", "/admin/publishers", "p2", y.delegate(t, "acme", "org/acme/"), 201)
	_, err = y.resolve(t, catalog.Want{AppSlug: "demo", Version: "1.0.0"})
	require.NoError(t, err, "a renewed delegation serves older versions")

	y.must(t, y.admin, "POST", "/admin/apps/catalog/demo/versions/1.0.0/deprecate", "dep", "", 200)
	_, err = y.resolve(t, catalog.Want{AppSlug: "demo", Version: "1.0.0"})
	require.Equal(t, catalog.CodeVersionNotActive, fault.As(err).Code)
	require.NotContains(t, y.log.String(), "eyJ", "no credential in the log")
}

// requireDraftPriced: a draft is priced for its owner, and not for those who may not know of it.
func (y *yard) requireDraftPriced(t *testing.T) {
	t.Helper()
	estimate := func(p iam.Principal) error {
		ctx := context.WithValue(t.Context(), callKey{}, &call{principal: p, at: y.clock()})
		_, err := serverOn(y.d, nil, nil).EstimateCost(ctx, EstimateCostRequestObject{
			ProjectID: y.projectID,
			AppSlug:   "demo", Version: "1.0.0",
		})
		return err
	}
	owner := iam.Principal{
		Type: principal.User, ID: db.NewID(), OrgID: y.orgID,
		Bindings: []iam.Binding{{Role: iam.OrgAdmin}},
	}
	require.NoError(t, estimate(owner))
	ofPlatform := func(org any) {
		_, err := db.RunTx(t.Context(), y.d, func(tx db.Tx) (struct{}, error) {
			_, err := tx.Exec(t.Context(), `UPDATE apps SET org_id = $1 WHERE slug = 'demo'`, org)
			return struct{}{}, err
		})
		require.NoError(t, err)
	}
	ofPlatform(nil)
	require.EqualValues(t, "not_found", fault.As(estimate(owner)).Code)
	require.NoError(t, estimate(iam.Principal{Type: principal.User, ID: db.NewID(), PlatformAdmin: true}))
	ofPlatform(y.orgID)
}

// requireResolved: the entitlement and the trust in the publisher decide what a launch resolves to.
func (y *yard) requireResolved(t *testing.T) {
	t.Helper()
	r, err := y.resolve(t, catalog.Want{
		AppSlug: "demo", Version: "1.0.0", OperatingMode: "platform_managed",
		ParametersJSON: []byte(`{"greeting":"hi"}`),
	})
	require.NoError(t, err)
	require.Equal(t, "tenant_dedicated", r.OperatingMode)
	require.Equal(t, "project", r.ControlPlaneScope)
	require.Equal(t, "project_isolated", r.TenantBoundaryMode)
	require.Equal(t, []catalog.Hint{{
		Field: "operating_mode", Requested: "platform_managed", Effective: "tenant_dedicated",
		Reason: "not_allowed_by_policy",
	}}, r.HintResults)
	require.Equal(t, 2, r.MaxAccelerators)
	require.NotEmpty(t, r.ManifestEnvelope)
	require.NotEmpty(t, r.DelegationEnvelope)
	_, err = y.resolve(t, catalog.Want{AppSlug: "demo", Version: "1.0.0", ParametersJSON: []byte(`{"greetign":"hi"}`)})
	require.Equal(t, "/parameters/greetign", fault.As(err).Fields[0].Pointer)
	_, err = y.resolve(t, catalog.Want{AppSlug: "demo", Version: "2.0.0"})
	require.Equal(t, "/version", fault.As(err).Fields[0].Pointer)
	_, err = y.resolve(t, catalog.Want{AppSlug: "demo", Version: "1.0.0", ProjectID: db.NewID()})
	require.Equal(t, catalog.CodeNotEntitled, fault.As(err).Code)
	_, err = y.resolve(t, catalog.Want{AppSlug: "demo", Version: "1.0.0", Revoked: func(id string) bool {
		return id == y.signer.KeyID()
	}})
	require.Equal(t, catalog.CodePublisherInvalid, fault.As(err).Code)
}

func TestOnlyVerifiedImagesBecomeLaunchable(t *testing.T) {
	y := newYard(t)
	artifacts := "/projects/" + y.projectID + "/app-artifacts"
	y.must(t, y.admin, "POST", "/admin/publishers", "p1", y.delegate(t, "acme", "org/acme/"), 201)
	stranger, err := appkit.GenerateKey(filepath.Join(t.TempDir(), "k"), filepath.Join(t.TempDir(), "p"))
	require.NoError(t, err)
	pushed := y.push(t, y.boss, "1.0.0", "one", stranger)
	publish := "/admin/apps/catalog/demo/versions/1.0.0/publish"

	for pointer, bad := range map[string]string{
		"/manifest_envelope": y.manifest(t, "1.0.0", pushed.Repository, pushed.Digest, stranger),
		"/manifest_envelope/payload/version/runtime_profile/image_variants/0/image_ref": y.manifest(t, "1.0.0",
			"org/beta/demo/runtime", pushed.Digest, y.signer),
	} {
		refused := y.must(t, y.admin, "POST", "/admin/apps/manifests", strings.ReplaceAll(pointer, "/", "."), bad, 422)
		require.Contains(t, refused.raw, `"pointer":"`+pointer+`"`)
	}
	y.must(t, y.admin, "POST", "/admin/apps/manifests", "m1", y.manifest(t, "1.0.0", pushed.Repository, pushed.Digest,
		y.signer), 201)
	require.EqualValues(t, artifact.CodeNotVerified, y.must(t, y.admin, "POST", publish, "b1", "", 409).text("code"))
	art := y.must(t, y.boss, "POST", artifacts, "a1", registration("1.0.0", pushed), 201)
	require.Equal(t, "rejected", art.text("trust_state"))
	y.must(t, y.admin, "POST", publish, "b2", "", 409)

	// The right signature comes late: pushed again, registered again.
	again := y.push(t, y.boss, "1.0.0", "one", y.signer)
	require.Equal(t, pushed.Digest, again.Digest)
	later := y.must(t, y.boss, "POST", artifacts, "a2", registration("1.0.0", pushed), 201)
	require.Equal(t, "verified", later.text("trust_state"))
	require.Equal(t, art.text("id"), later.text("id"))
	y.must(t, y.admin, "POST", publish, "b3", "", 200)
	require.EqualValues(t, catalog.CodeVersionStatus, y.must(t, y.admin, "POST", publish, "b4", "", 409).text("code"))
	require.Equal(t, "true", y.must(t, y.admin, "POST", publish, "b3", "", 200).header.Get("Idempotency-Replayed"))
	y.must(t, y.admin, "POST", "/admin/apps/manifests", "m2", y.manifest(t, "1.0.0", pushed.Repository, "sha256:"+
		strings.Repeat("a", 64), y.signer), 409)

	wrong := func(from, to string) string { return strings.Replace(registration("1.0.0", pushed), from, to, 1) }
	y.must(t, y.boss, "POST", artifacts, "w1", wrong(pushed.Digest, "sha256:"+strings.Repeat("b", 64)), 422)
	y.must(t, y.boss, "POST", artifacts, "w2", wrong("org/acme/demo/runtime", "org/acme/demo/other"), 422)
	y.must(t, y.boss, "POST", artifacts, "w3", wrong(pushed.MediaType, "application/x"), 422)
	y.must(t, y.boss, "POST", artifacts, "w4", wrong(`"app_slug":"demo"`, `"app_slug":"nope"`), 422)
	y.must(t, y.boss, "POST", artifacts, "w5", wrong(`"app_slug"`, `"artifact_kind":"blob","app_slug"`), 422)
}

func TestNoOneShipsIntoAnotherOrg(t *testing.T) {
	y := newYard(t)
	_, otherProject, otherBoss := y.tenant(t, "beta")
	intent := `{"app_slug":"demo","app_version":"1.0.0","artifact_name":"runtime","channel":"dev"}`
	first := y.must(t, y.boss, "POST", "/projects/"+y.projectID+"/app-artifacts/publish-intents", "i1", intent, 201)
	replayed := y.must(t, y.boss, "POST", "/projects/"+y.projectID+"/app-artifacts/publish-intents", "i1", intent, 201)
	require.JSONEq(t, first.raw, replayed.raw)
	var stored string
	_, err := db.ReadTx(t.Context(), y.d, func(tx db.Tx) (int, error) {
		return 0, tx.QueryRow(t.Context(), `SELECT encode(response, 'escape') FROM idempotency WHERE key = 'i1'`).Scan(
			&stored)
	})
	require.NoError(t, err)
	require.NotContains(t, stored, "eyJ")

	y.must(t, otherBoss, "POST", "/projects/"+otherProject+"/app-artifacts/publish-intents", "i2", intent, 409)
	y.must(t, otherBoss, "POST", "/projects/"+y.projectID+"/app-artifacts/publish-intents", "i3", intent, 404)
	y.must(t, otherBoss, "GET", "/projects/"+y.projectID+"/app-artifacts", "", "", 404)
	y.must(t, otherBoss, "GET", "/apps/catalog/demo/versions", "", "", 404)
	y.must(t, otherBoss, "PUT", "/projects/"+otherProject+"/apps/entitlements/demo", "", `{"enabled":true}`, 404)
	y.must(t, y.boss, "POST", "/admin/apps/manifests", "m",
		`{"manifest_envelope":{"payloadType":"x","payload":"eA==","signatures":[{"keyid":"`+strings.Repeat("0", 64)+
			`","sig":"eA=="}]}}`, 403)
	y.must(t, y.boss, "POST", "/admin/publishers", "p", y.delegate(t, "acme", "org/acme/"), 403)
	y.must(t, y.admin, "POST", "/admin/publishers", "p", y.delegate(t, "nobody", "org/nobody/"), 422)
	forged := strings.Replace(y.delegate(t, "acme", "org/acme/"), `"payload": "`, `"payload": "AAAA`, 1)
	y.must(t, y.admin, "POST", "/admin/publishers", "p3", forged, 422)

	sa := y.must(t, y.boss, "POST", "/projects/"+y.projectID+"/service-accounts", "sa", `{"name":"CI","slug":"ci"}`, 201)
	token := y.must(t, "", "POST", "/auth/service-account/token", "", mintBody(sa), 200).text("access_token")
	y.must(t, token, "POST", "/projects/"+y.projectID+"/app-artifacts/publish-intents", "i4", intent, 201)
	y.must(t, token, "PUT", "/projects/"+y.projectID+"/apps/entitlements/demo", "", `{"enabled":true}`, 403)
	y.must(t, token, "GET", "/apps/registry", "", "", 200)
}

func TestLaw08ShippingWritesEventAndAuditWithTheChange(t *testing.T) {
	y := newYard(t)
	count := func() (events, audits int) {
		_, err := db.ReadTx(t.Context(), y.d, func(tx db.Tx) (int, error) {
			return 0, tx.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM events WHERE type LIKE 'apps.%'),
				(SELECT count(*) FROM audit_rows WHERE outcome = 'done'
				AND resource_type IN ('app_version', 'publisher', 'entitlement', 'publish_intent', 'artifact'))`).Scan(&events,
				&audits)
		})
		require.NoError(t, err)
		return events, audits
	}
	y.must(t, y.admin, "POST", "/admin/publishers", "p1", y.delegate(t, "acme", "org/acme/"), 201)
	pushed := y.push(t, y.boss, "1.0.0", "one", y.signer)
	y.must(t, y.boss, "POST", "/projects/"+y.projectID+"/app-artifacts", "a1", registration("1.0.0", pushed), 201)
	y.must(t, y.admin, "POST", "/admin/apps/manifests", "m1", y.manifest(t, "1.0.0", pushed.Repository, pushed.Digest,
		y.signer), 201)
	y.must(t, y.boss, "PUT", "/projects/"+y.projectID+"/apps/entitlements/demo", "", `{"enabled":true}`, 200)
	events, audits := count()
	require.Equal(t, 5, events)
	require.Equal(t, 5, audits)
	y.must(t, y.admin, "POST", "/admin/apps/catalog/demo/versions/1.0.0/publish", "pub", "", 200)
	events, audits = count()
	require.Equal(t, 7, events, "the version and its artifact")
	require.Equal(t, 7, audits)

	y.must(t, y.admin, "POST", "/admin/apps/catalog/demo/versions/1.0.0/publish", "again", "", 409)
	y.must(t, y.boss, "PUT", "/projects/"+y.projectID+"/apps/entitlements/nope", "", `{"enabled":true}`, 404)
	e, a := count()
	require.Equal(t, []int{events, audits}, []int{e, a}, "a refusal changes nothing")
	var shown map[string]any
	require.NoError(t, json.Unmarshal([]byte(y.must(t, y.boss, "GET", "/projects/"+y.projectID+"/apps/entitlements", "",
		"", 200).raw), &shown))
	require.Len(t, shown["items"], 1)
}
