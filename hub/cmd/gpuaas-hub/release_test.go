package main

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/release"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/hub/internal/db/managed"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
)

// lastRecording is what e2e/release/record recorded with the programs of the last release.
const lastRecording = "../../../.cache/release/last"

// told is what people were told before the upgrade.
type told struct {
	NodeID    string              `json:"node_id"`
	ProjectID string              `json:"project_id"`
	Instances []map[string]any    `json:"instances"`
	Postings  []map[string]any    `json:"postings"`
	Usage     []map[string]any    `json:"usage"`
	Events    map[string][]string `json:"events"`
}

// The rows, keys and documents that the release before this one left on a hub's disk are taken over: each caller gets
// the answers of before, with the credentials of before.
func TestTheLastReleasesHubIsTakenOver(t *testing.T) {
	if _, err := os.Stat(lastRecording); err != nil {
		skip.Except(t, skip.NoRelease, "make release-fixture VERSION=<tag or commit> records one")
	}
	h := recordedHome(t)
	var before told
	text, err := os.ReadFile(filepath.Join(lastRecording, "answers.json"))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &before))
	require.Len(t, before.Instances, 3)
	require.NotEmpty(t, before.Postings)
	require.NotEmpty(t, before.Usage)

	forever := 100 * 365 * 24 * time.Hour
	hub := start(t, h, func(c *config) {
		c.retention = periodic.Retention{
			Events: forever, Audit: forever, Suspense: forever, Leases: forever, History: forever, Credentials: forever,
			Segments: forever,
		}
	})
	defer hub.end(t)
	token := readToken(t, hub)
	require.NotContains(t, hub.printed, token, "the recorded token opens the hub; no new one is made")
	project := "/projects/" + before.ProjectID
	for _, was := range before.Instances {
		id, _ := was["id"].(string)
		status, is := hub.api(t, http.MethodGet, project+"/app-instances/"+id, token, "")
		require.Equal(t, http.StatusOK, status, "%v", is)
		for _, field := range []string{
			"id", "project_id", "org_id", "app_slug", "version", "display_name", "status",
			"revision", "previous_version", "endpoints", "created_at", "activated_at", "requested_by",
		} {
			require.Equal(t, was[field], is[field], "%s of %s", field, was["display_name"])
		}
		status, events := hub.api(t, http.MethodGet, project+"/app-instances/"+id+"/events?limit=200", token, "")
		require.Equal(t, http.StatusOK, status)
		var types []string
		for _, e := range items(t, events) {
			kind, _ := e["type"].(string)
			types = append(types, kind)
		}
		require.Equal(t, before.Events[id], types)
		requireTold(t, hub, token, "/billing/ledger?limit=200&app_instance_id="+id, "posting_id",
			of(before.Postings, "subject", id))
		requireMeasured(t, hub, token, id, of(before.Usage, "app_instance_id", id))
	}
	status, node := hub.api(t, http.MethodGet, "/admin/nodes/"+before.NodeID, token, "")
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, before.NodeID, node["id"])
}

// requireTold asks for a list and finds in it everything that was told before, field by field; a release may add
// fields.
func requireTold(t *testing.T, hub *running, token, path, key string, before []map[string]any) {
	t.Helper()
	status, list := hub.api(t, http.MethodGet, path, token, "")
	require.Equal(t, http.StatusOK, status, "%v", list)
	now := map[any]map[string]any{}
	for _, item := range items(t, list) {
		now[item[key]] = item
	}
	for _, was := range before {
		is := now[was[key]]
		require.NotNil(t, is, "%s %v is gone", path, was[key])
		for field, value := range was {
			require.Equal(t, value, is[field], "%s of %v", field, was[key])
		}
	}
}

// requireMeasured adds up the hours of an instance: the recording gets older, and single records are kept for a day.
func requireMeasured(t *testing.T, hub *running, token, instance string, before []map[string]any) {
	t.Helper()
	first := "2026-01-01T00:00:00Z" // before any recording
	status, list := hub.api(t, http.MethodGet, "/billing/usage/hourly?limit=200&from="+first+"&app_instance_id="+instance,
		token, "")
	require.Equal(t, http.StatusOK, status, "%v", list)
	require.Equal(t, quantities(t, before), quantities(t, items(t, list)))
}

// quantities adds up usage by meter.
func quantities(t *testing.T, usage []map[string]any) map[string]string {
	t.Helper()
	sums := map[string]*big.Rat{}
	for _, u := range usage {
		meter, _ := u["meter"].(string)
		text, _ := u["quantity"].(string)
		quantity, ok := new(big.Rat).SetString(text)
		require.True(t, ok, "%v", u)
		if sums[meter] == nil {
			sums[meter] = new(big.Rat)
		}
		sums[meter].Add(sums[meter], quantity)
	}
	texts := map[string]string{}
	for meter, sum := range sums {
		texts[meter] = sum.FloatString(6)
	}
	return texts
}

func items(t *testing.T, list map[string]any) []map[string]any {
	t.Helper()
	raw, ok := list["items"].([]any)
	require.True(t, ok, "%v", list)
	var out []map[string]any
	for _, item := range raw {
		m, ok := item.(map[string]any)
		require.True(t, ok)
		out = append(out, m)
	}
	return out
}

// of keeps what is about the instance; a posting without that field at its top is found by its subject.
func of(all []map[string]any, field, id string) []map[string]any {
	var mine []map[string]any
	for _, item := range all {
		switch v := item[field].(type) {
		case string:
			if v == id {
				mine = append(mine, item)
			}
		case map[string]any:
			if v["app_instance_id"] == id {
				mine = append(mine, item)
			}
		}
	}
	return mine
}

// recordedHome puts the recording on disk, the rows into a private PostgreSQL as the hub keeps them.
func recordedHome(t *testing.T) home {
	t.Helper()
	//nolint:usetesting // what is above t.TempDir() lets nobody else pass
	dir, err := os.MkdirTemp("/tmp", "gpuaas-hub-test-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o711))
	h := home{dir: dir, data: filepath.Join(dir, "data")}
	require.NoError(t, os.Mkdir(h.data, 0o711))
	require.NoError(t, release.Unpack(filepath.Join(lastRecording, "hub.tar.gz"), h.data))
	server, err := managed.Start(t.Context(), managed.Config{Dir: filepath.Join(h.data, "postgres")})
	require.NoError(t, err)
	defer func() { require.NoError(t, server.Close()) }()
	require.NoError(t, load(t.Context(), server.URL(), filepath.Join(lastRecording, "database.sql.gz")))
	return h
}

func load(ctx context.Context, databaseURL, path string) (err error) {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	plain, err := gzip.NewReader(file)
	if err != nil {
		return err
	}
	statements, err := io.ReadAll(plain)
	if err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, databaseURL)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close(ctx)) }()
	// All statements in one go, as they stand in the file.
	_, err = conn.PgConn().Exec(ctx, string(statements)).ReadAll()
	return err
}
