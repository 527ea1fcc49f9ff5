package httpapi

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"
)

// targetsServer writes down what was asked for.
type targetsServer struct {
	stubServer

	asked *ListTargetsParams
}

func (s targetsServer) ListTargets(_ context.Context, r ListTargetsRequestObject) (ListTargetsResponseObject, error) {
	*s.asked = r.Params
	return ListTargets200JSONResponse{Items: []Target{}}, nil
}

// A parameter that is a list is given once for each item.
func TestAParameterMayBeAList(t *testing.T) {
	const other = "0192f0c0-0000-7000-8000-000000000002"
	var asked ListTargetsParams
	d := newTestAPI(t, targetsServer{asked: &asked})
	get := func(q url.Values) (int, Problem) {
		asked = ListTargetsParams{}
		res := d.do(t, ask{
			method: http.MethodGet,
			path:   "/api/v1/projects/" + someID + "/apps/demo/versions/1.0.0/targets?" + q.Encode(),
		})
		var p Problem
		require.NoError(t, json.NewDecoder(res.Body).Decode(&p))
		require.NoError(t, res.Body.Close())
		return res.StatusCode, p
	}
	for _, volumes := range [][]ID{nil, {someID}, {someID, other}} {
		requirements := []string{"numpy>=1.2,<2", "scipy"}
		status, p := get(url.Values{"volume_id": volumes, "requirement": requirements})
		require.Equal(t, http.StatusOK, status, p)
		require.Equal(t, volumes, asked.VolumeID)
		require.Equal(t, requirements, asked.Requirement)
	}
	status, p := get(url.Values{"volume_id": {someID, "x"}})
	require.Equal(t, http.StatusBadRequest, status)
	require.Equal(t, "query/volume_id/1", p.Errors[0].Pointer)
	status, p = get(url.Values{"volume_id": make([]string, 17)})
	require.Equal(t, http.StatusBadRequest, status)
	require.Equal(t, "has more than 16 items", p.Errors[0].Reason)
	status, p = get(url.Values{"cpu_millis": {"100", "200"}})
	require.Equal(t, http.StatusBadRequest, status)
	require.Equal(t, "is given more than once", p.Errors[0].Reason)
}
