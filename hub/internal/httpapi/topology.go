package httpapi

import (
	"slices"

	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/protocol"
)

func servicesView(services []instance.ServiceStatus) []MemberService {
	var out []MemberService
	for _, s := range services {
		out = append(out, MemberService{
			Name: s.Name, Status: MemberServiceStatus(s.Status), StatusReason: StatusReason(s.Reason), Detail: s.Detail,
			Restarts: int32(s.Restarts), ExitCode: int32(s.ExitCode),
			StartedAt: s.StartedAt, ReadyAt: s.ReadyAt, ExitedAt: s.ExitedAt,
		})
	}
	return out
}

// addTopology shows every service that a member is to run, with what it waits for, and which service an endpoint leads
// to. A service that the node has not reported yet waits.
func addTopology(view *AppInstance, i query.Instance) {
	for n := range view.Members {
		m := &view.Members[n]
		wanted := i.Services[m.ID]
		if len(wanted) == 0 {
			continue
		}
		reported := m.Services
		m.Services = nil
		for _, s := range wanted {
			service := MemberService{Name: s.GetName(), Status: MemberServiceStatus(protocol.ServiceStatus_WAITING.Text())}
			if k := slices.IndexFunc(reported, func(r MemberService) bool { return r.Name == s.GetName() }); k >= 0 {
				service = reported[k]
			}
			for _, d := range s.GetDependsOn() {
				service.DependsOn = append(service.DependsOn, ServiceDependency{
					Service: d.GetService(), Condition: ServiceDependencyCondition(d.GetCondition().Text()),
				})
			}
			m.Services = append(m.Services, service)
		}
	}
	n := 0
	for _, m := range i.Members {
		for _, e := range m.Endpoints {
			view.Endpoints[n].Service = serviceOfPort(i.Services[m.ID], e.Name)
			n++
		}
	}
}

// serviceOfPort is empty where no service has a port of the name.
func serviceOfPort(services []*protocol.Service, name string) string {
	for _, s := range services {
		if slices.ContainsFunc(s.GetPorts(), func(p *protocol.Port) bool { return p.GetName() == name }) {
			return s.GetName()
		}
	}
	return ""
}
