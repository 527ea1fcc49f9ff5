package httpapi

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
)

// registryBytes collects garbage once the grace has passed, and returns what the org stores then.
func (y *yard) registryBytes(t *testing.T) float64 {
	t.Helper()
	y.wait(artifact.CollectGrace + time.Minute)
	_, err := y.registry.Collect(t.Context())
	require.NoError(t, err)
	list := items(y.must(t, y.boss, "GET", "/orgs/"+y.orgID+"/quota", "", "", 200))
	for _, item := range list {
		if item["name"] == "registry_bytes" {
			used, _ := item["used"].(float64)
			return used
		}
	}
	require.Fail(t, "there is no such quota")
	return 0
}

// ready ships a version of the demo, and returns the path of its artifact.
func (y *yard) ready(t *testing.T, version string) string {
	t.Helper()
	artifacts := "/projects/" + y.projectID + "/app-artifacts"
	pushed := y.push(t, y.boss, version, version, y.signer)
	id := y.must(t, y.boss, "POST", artifacts, "a"+version, registration(version, pushed), 201).text("id")
	y.must(t, y.admin, "POST", "/admin/apps/manifests", "m"+version, y.manifest(t, version, pushed.Repository,
		pushed.Digest, y.signer), 201)
	y.must(t, y.admin, "POST", "/admin/apps/catalog/demo/versions/"+version+"/publish", "p"+version, "", 200)
	return artifacts + "/" + id
}

func TestTheContentOfWithdrawnArtifactsLeavesTheRegistry(t *testing.T) {
	y := newYard(t)
	y.must(t, y.admin, "POST", "/admin/publishers", "p", y.delegate(t, "acme", "org/acme/"), 201)
	first, second := y.ready(t, "1.0.0"), y.ready(t, "2.0.0")
	_, _, stranger := y.tenant(t, "other")
	both := y.registryBytes(t)
	require.Positive(t, both)

	const reason = `{"reason":"superseded"}`
	require.Equal(t, "artifact_in_use", y.must(t, y.boss, "POST", first+"/retire", "early", reason, 409).text("code"))
	y.must(t, y.admin, "POST", "/admin/apps/catalog/demo/versions/1.0.0/deprecate", "d", "", 200)
	require.InDelta(t, both, y.registryBytes(t), 0, "a deprecated version may still be started again")
	for _, verb := range []string{"/retire", "/revoke"} {
		y.must(t, stranger, "POST", first+verb, "theirs"+verb[1:], reason, 404)
		y.must(t, y.boss, "POST", first+verb, "none"+verb[1:], `{}`, 400)
		y.must(t, y.boss, "POST", first+verb, "", reason, 400)
	}
	require.Equal(t, "active", y.must(t, y.boss, "GET", first, "", "", 200).text("status"))

	retired := y.must(t, y.boss, "POST", first+"/retire", "retire", reason, 200)
	require.Equal(t, "retired", retired.text("status"))
	require.Equal(t, "verified", retired.text("trust_state"))
	again := y.must(t, y.boss, "POST", first+"/retire", "retire", reason, 200)
	require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))
	require.Equal(t, retired.body, again.body)
	require.Equal(t, retired.body, y.must(t, y.boss, "GET", first, "", "", 200).body)
	one := y.registryBytes(t)
	require.Less(t, one, both)
	require.Positive(t, one)

	revoked := y.must(t, y.boss, "POST", second+"/revoke", "revoke", `{"reason":"has a backdoor"}`, 200)
	require.Equal(t, "revoked", revoked.text("status"))
	require.Equal(t, "revoked", revoked.text("trust_state"))
	require.Equal(t, "artifact_revoked", y.must(t, y.boss, "POST", second+"/retire", "late", reason, 409).text("code"))
	require.Zero(t, y.registryBytes(t), "although an active version names it")
}

func TestADelegationThatCameLateCountsOnceTheArtifactIsVerified(t *testing.T) {
	y := newYard(t)
	artifacts := "/projects/" + y.projectID + "/app-artifacts"
	pushed := y.push(t, y.boss, "1.0.0", "1.0.0", y.signer)
	made := y.must(t, y.boss, "POST", artifacts, "a", registration("1.0.0", pushed), 201)
	require.Equal(t, "rejected", made.text("trust_state"))
	path := artifacts + "/" + made.text("id")
	const prod = `{"channel":"prod"}`
	require.Equal(t, "artifact_not_verified", y.must(t, y.boss, "POST", path+"/promote", "p0", prod, 409).text("code"))
	same := y.must(t, y.boss, "POST", path+"/verify", "v0", "", 200)
	require.Equal(t, "rejected", same.text("trust_state"))

	y.must(t, y.admin, "POST", "/admin/publishers", "p", y.delegate(t, "acme", "org/acme/"), 201)
	verified := y.must(t, y.boss, "POST", path+"/verify", "v1", "", 200)
	require.Equal(t, "verified", verified.text("trust_state"))
	require.NotEqual(t, same.header.Get("ETag"), verified.header.Get("ETag"))
	require.Equal(t, verified.body, y.must(t, y.boss, "POST", path+"/verify", "v2", "", 200).body, "nothing new is found")
	require.Equal(t, "prod", y.must(t, y.boss, "POST", path+"/promote", "p1", prod, 200).text("channel"))
}
