package httpapi

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	hubapi "github.com/gpuaas/gpuaas/hub/api"
	"github.com/gpuaas/gpuaas/hub/internal/etag"
)

// TestNoOperationChangesAnotherVersionThanIfMatchNames walks every operation of the contract that changes a resource.
func TestNoOperationChangesAnotherVersionThanIfMatchNames(t *testing.T) {
	s := newStage(t)
	operations, err := loadContract(hubapi.OpenAPI)
	require.NoError(t, err)
	before := fingerprint(t, s.d)
	walked := 0
	for _, key := range slices.Sorted(maps.Keys(operations)) {
		op := operations[key]
		if op.resource == "" || !op.mutates() {
			continue
		}
		walked++
		for _, stale := range []string{`"another"`, `W/"1"`, `"a", "b"`} {
			res := s.send(t, s.admin, op, http.Header{ifMatchHeader: {stale}})
			require.Equal(t, http.StatusPreconditionFailed, res.status, "%s: %s", op.id, res.raw)
			require.Equal(t, "etag_stale", res.text("code"), op.id)
			require.Regexp(t, `^"[0-9a-z]+"$`, res.header.Get("ETag"), op.id)
		}
	}
	require.Greater(t, walked, 30)
	after := fingerprint(t, s.d)
	delete(before, "audit_rows")
	delete(after, "audit_rows")
	require.Equal(t, before, after)
	require.Empty(t, s.removed, "a node removes an environment for good")
}

// TestEveryResourceThatIsReadHasAnETag walks every GET of a resource.
func TestEveryResourceThatIsReadHasAnETag(t *testing.T) {
	s := newStage(t)
	operations, err := loadContract(hubapi.OpenAPI)
	require.NoError(t, err)
	for _, op := range operations {
		if op.resource == "" || op.mutates() {
			continue
		}
		res := s.send(t, s.admin, op, http.Header{})
		require.Equal(t, http.StatusOK, res.status, "%s: %s", op.id, res.raw)
		tag := res.header.Get("ETag")
		require.Regexp(t, `^"[0-9a-z]+"$`, tag, op.id)
		if !op.takes(ifNoneMatchHeader) {
			continue
		}
		for _, has := range []string{tag, "W/" + tag, `"another", ` + tag, "*"} {
			res = s.send(t, s.admin, op, http.Header{ifNoneMatchHeader: {has}})
			require.Equal(t, http.StatusNotModified, res.status, op.id)
			require.Empty(t, res.raw, op.id)
			require.Equal(t, tag, res.header.Get("ETag"), op.id)
		}
		require.Equal(t, http.StatusOK, s.send(t, s.admin, op, http.Header{ifNoneMatchHeader: {`"another"`}}).status)
		res = s.send(t, s.stranger, op, http.Header{ifNoneMatchHeader: {tag}})
		if op.resource != "sku" {
			require.GreaterOrEqual(t, res.status, 400, "%s tells a stranger the version", op.id)
			require.Empty(t, res.header.Get("ETag"), op.id)
		}
	}
}

// TestAChangeMovesTheETagOn: what a GET answers fits a change, whose answer fits the next one, and no other does.
func TestAChangeMovesTheETagOn(t *testing.T) {
	s := newStage(t)
	operations, err := loadContract(hubapi.OpenAPI)
	require.NoError(t, err)
	byID := map[string]*operation{}
	for _, op := range operations {
		byID[op.id] = op
	}
	for get, change := range map[string]string{
		"getUser": "putUserRoles", "getCustomRole": "putCustomRole", "getEntitlement": "putEntitlement",
		"getOrgQuota": "putOrgQuota", "getPackageIndex": "putPackageIndex", "getSKU": "retireSKU", "getNode": "drainNode",
		"getAppInstance": "changeAppInstance", "getArtifact": "retireArtifact",
	} {
		first := s.send(t, s.admin, byID[get], http.Header{}).header.Get("ETag")
		res := s.send(t, s.admin, byID[change], http.Header{ifMatchHeader: {first}})
		require.Equal(t, http.StatusOK, res.status, "%s: %s", change, res.raw)
		second := res.header.Get("ETag")
		require.NotEqual(t, first, second, change)
		require.Equal(t, second, s.send(t, s.admin, byID[get], http.Header{}).header.Get("ETag"), get)
		res = s.send(t, s.admin, byID[change], http.Header{ifMatchHeader: {first}})
		require.Equal(t, http.StatusPreconditionFailed, res.status, change)
		require.Equal(t, second, res.header.Get("ETag"), change)
		require.Equal(t, http.StatusOK, s.send(t, s.admin, byID[change], http.Header{ifMatchHeader: {`*`}}).status, change)
	}
}

// What was taken away meanwhile is not made again for a caller who means to change it.
func TestIfMatchMakesNothing(t *testing.T) {
	s := newStage(t)
	index := "/projects/" + s.ids["project_id"] + "/package-index"
	s.must(t, s.boss, "DELETE", index, "", "", http.StatusNoContent)
	operations, err := loadContract(hubapi.OpenAPI)
	require.NoError(t, err)
	for _, op := range operations {
		if op.id != "putPackageIndex" {
			continue
		}
		for _, has := range []string{`"1"`, `"2"`, "*"} {
			res := s.send(t, s.boss, op, http.Header{ifMatchHeader: {has}})
			require.Equal(t, http.StatusPreconditionFailed, res.status, res.raw)
		}
	}
	s.must(t, s.boss, "GET", index, "", "", http.StatusNotFound)
}

// TestARepeatedRequestGetsItsAnswerAlthoughItMovedTheETagOn: idempotency comes before the condition.
func TestARepeatedRequestGetsItsAnswerAlthoughItMovedTheETagOn(t *testing.T) {
	s := newStage(t)
	path := "/projects/" + s.ids["project_id"] + "/service-accounts/" + s.ids["service_account_id"] + "/disable"
	first := s.askIf(t, s.boss, "POST", path, "k1", `"1"`)
	require.Equal(t, http.StatusOK, first.status, first.raw)
	require.Equal(t, `"2"`, first.header.Get("ETag"))
	again := s.askIf(t, s.boss, "POST", path, "k1", `"1"`)
	require.Equal(t, http.StatusOK, again.status, again.raw)
	require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))
	require.Empty(t, again.header.Get("ETag"), "the version of the first answer is past")
	require.Equal(t, http.StatusPreconditionFailed, s.askIf(t, s.boss, "POST", path, "k2", `"1"`).status)
}

// moving is a server whose quotas change as soon as they are read.
type moving struct {
	StrictServerInterface
	version int64
}

func (m *moving) ETag(context.Context, etag.Resource) (string, error) {
	return etag.From(strconv.FormatInt(m.version, 10)), nil
}

func (m *moving) GetOrgQuota(context.Context, GetOrgQuotaRequestObject) (GetOrgQuotaResponseObject, error) {
	read := GetOrgQuota200JSONResponse{OrgID: someID, Items: []OrgQuotaItem{{
		Name: "users", Limit: m.version, DefaultLimit: m.version, Used: 0,
	}}}
	m.version++
	return read, nil
}

// An ETag that is newer than its answer would let a caller overwrite a change that it has not seen.
func TestAnETagIsNoNewerThanTheAnswer(t *testing.T) {
	d := newTestAPI(t, &moving{version: 1})
	res := d.do(t, ask{method: http.MethodGet, path: "/api/v1/orgs/" + someID + "/quota", header: bearer(goodToken)})
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusOK, res.StatusCode)
	require.Equal(t, `"1"`, res.Header.Get("ETag"))
}
