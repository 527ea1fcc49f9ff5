package httpapi

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestTopologyShowsWhatEachServiceWaitsForAndWhereEndpointsLead(t *testing.T) {
	i := query.Instance{
		Instance: instance.Instance{
			ParametersJSON: "{}", ConfigJSON: "{}",
			Members: []instance.Member{{
				ID:        "m",
				Services:  []instance.ServiceStatus{{Name: "db", Status: "ready"}},
				Endpoints: []instance.Endpoint{{Name: "http"}, {Name: "sql"}, {Name: "gone"}},
			}},
		},
		Services: map[string][]*protocol.Service{"m": {
			{Name: "server", Ports: []*protocol.Port{{Name: "http"}}, DependsOn: []*protocol.Dependency{
				{Service: "db", Condition: protocol.Dependency_SERVICE_HEALTHY},
			}},
			{Name: "db", Ports: []*protocol.Port{{Name: "sql"}}},
		}},
	}
	view, err := instanceView(i.Instance)
	require.NoError(t, err)
	addTopology(&view, i)
	require.Equal(t, []MemberService{
		{Name: "server", Status: "waiting", DependsOn: []ServiceDependency{{Service: "db", Condition: "service_healthy"}}},
		{Name: "db", Status: "ready"},
	}, view.Members[0].Services)
	require.Equal(t, "server", view.Endpoints[0].Service)
	require.Equal(t, "db", view.Endpoints[1].Service)
	require.Empty(t, view.Endpoints[2].Service)

	i.Services = nil
	view, err = instanceView(i.Instance)
	require.NoError(t, err)
	addTopology(&view, i)
	require.Len(t, view.Members[0].Services, 1, "what the node reports is shown without the revision's services, too")
}
