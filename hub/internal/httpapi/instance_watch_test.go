package httpapi

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestTheReadModelShowsHowFarAPullIs(t *testing.T) {
	s := &theater{house: newHouse(t)}
	orgID, projectID, boss := s.tenant(t, "acme")
	s.open(t)
	allocation := s.must(t, boss, "POST", "/projects/"+projectID+"/allocations", "k1", sliceBody, 201).text("id")
	i := s.instance(t, orgID, projectID, allocation)
	path := "/projects/" + projectID + "/app-instances/" + i.ID
	require.NotContains(t, s.must(t, boss, "GET", path, "", "", 200).raw, "image_pull")
	const most = 1<<63 - 1
	for _, c := range []struct {
		pull        *protocol.ImagePull
		phase       string
		done, total float64
	}{
		{&protocol.ImagePull{Phase: protocol.ImagePull_RESOLVING}, "resolving", 0, 0},
		{&protocol.ImagePull{Phase: protocol.ImagePull_FETCHING, DoneBytes: 3, TotalBytes: 9}, "fetching", 3, 9},
		{&protocol.ImagePull{Phase: protocol.ImagePull_UNPACKING, DoneBytes: 9, TotalBytes: 9}, "unpacking", 9, 9},
		{&protocol.ImagePull{Phase: 77, DoneBytes: 1<<64 - 1, TotalBytes: 1<<64 - 1}, "fetching", most, most},
		{&protocol.ImagePull{Phase: protocol.ImagePull_FETCHING, DoneBytes: 10, TotalBytes: 9}, "fetching", 9, 9},
	} {
		s.pull.Store(c.pull)
		members, _ := s.must(t, boss, "GET", path, "", "", 200).body["members"].([]any)
		require.Len(t, members, 1)
		member, _ := members[0].(map[string]any)
		require.Equal(t, map[string]any{"phase": c.phase, "done_bytes": c.done, "total_bytes": c.total}, member["image_pull"])
	}
	s.pull.Store(nil)
	require.NotContains(t, s.must(t, boss, "GET", path, "", "", 200).raw, "image_pull")
}

func TestAWatcherWaitsForAChangeAndLearnsOfItAtOnce(t *testing.T) {
	s := &theater{house: newHouse(t)}
	orgID, projectID, boss := s.tenant(t, "acme")
	_, _, other := s.tenant(t, "other")
	s.open(t)
	allocation := s.must(t, boss, "POST", "/projects/"+projectID+"/allocations", "k1", sliceBody, 201).text("id")
	i := s.instance(t, orgID, projectID, allocation)
	path := "/projects/" + projectID + "/app-instances/" + i.ID
	after := func(a answer, wait string) string {
		return fmt.Sprintf("?after=%v&wait=%s", a.body["resource_version"], wait)
	}

	first := s.must(t, boss, "GET", path+"?wait=30s", "", "", 200)
	require.Contains(t, first.raw, `"status":"running"`)
	for _, bad := range []string{"?after=x", "?after=-1", "?wait=31s", "?wait=0s", "?wait=1m"} {
		require.Equal(t, 400, s.ask(t, boss, "GET", path+bad, "", "").status, bad)
	}

	began := time.Now()
	answered := make(chan string, 1)
	watch := httptest.NewRequest("GET", "/api/v1"+path+after(first, "30s"), http.NoBody)
	watch.Header.Set("Authorization", "Bearer "+boss)
	go func() {
		w := httptest.NewRecorder()
		s.ServeHTTP(w, watch)
		answered <- w.Body.String()
	}()
	changes := s.d.Changes()
	require.Eventually(t, func() bool { return changes.Subscribers() == 1 }, time.Minute, time.Millisecond)
	s.must(t, boss, "POST", path+"/stop", "k2", "", 202)
	require.Contains(t, <-answered, `"status":"stopping"`)
	require.Less(t, time.Since(began), 29*time.Second)
	require.Zero(t, changes.Subscribers())

	// A foreign instance answers at once, like an absent one, whatever version the caller names.
	mine := s.must(t, boss, "GET", path, "", "", 200)
	for _, id := range []string{i.ID, someID} {
		began := time.Now()
		foreign := s.ask(t, other, "GET", "/projects/"+projectID+"/app-instances/"+id+after(mine, "30s"), "", "")
		require.Equal(t, 404, foreign.status, "law 10")
		require.Less(t, time.Since(began), 20*time.Second, "it waits before it reads, and so shows that the instance is "+
			"there")
	}
	require.NoError(t, s.mayReadLogs(t, boss, projectID))
	require.EqualValues(t, "not_found", fault.As(s.mayReadLogs(t, other, projectID)).Code)

	// Allocations and nodes are watched the same way.
	for token, path := range map[string]string{
		boss: "/projects/" + projectID + "/allocations/" + allocation, s.admin: "/admin/nodes/" + s.node,
	} {
		same := s.must(t, token, "GET", path, "", "", 200)
		require.Equal(t, same.body["resource_version"],
			s.must(t, token, "GET", path+after(same, "1s"), "", "", 200).body["resource_version"])
		require.Equal(t, 200, s.ask(t, token, "GET", path+"?after=1000&wait=30s", "", "").status, "another version")
	}

	// A hub that stops answers with what there is.
	changes.Close()
	began = time.Now()
	require.Equal(t, mine.raw, s.must(t, boss, "GET", path+after(mine, "30s"), "", "", 200).raw)
	require.Less(t, time.Since(began), 20*time.Second)
}
