package instance

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// ServiceStatus is what a node reports of one service of a member.
type ServiceStatus struct {
	Name string `json:"name"`
	// Status is one of the contract's: waiting, starting, ready, unhealthy, completed, failed, stopped.
	Status string `json:"status"`
	// Reason is empty where nothing is wrong.
	Reason    string    `json:"reason,omitempty"`
	Detail    string    `json:"detail,omitempty"`
	Restarts  int64     `json:"restarts,omitempty"`
	ExitCode  int64     `json:"exit_code,omitempty"`
	StartedAt time.Time `json:"started_at,omitzero"`
	ReadyAt   time.Time `json:"ready_at,omitzero"`
	ExitedAt  time.Time `json:"exited_at,omitzero"`
}

func (s ServiceStatus) equal(o ServiceStatus) bool {
	return s.Name == o.Name && s.Status == o.Status && s.Reason == o.Reason && s.Detail == o.Detail &&
		s.Restarts == o.Restarts && s.ExitCode == o.ExitCode && s.StartedAt.Equal(o.StartedAt) &&
		s.ReadyAt.Equal(o.ReadyAt) && s.ExitedAt.Equal(o.ExitedAt)
}

// serviceStatuses keeps the contract's lists closed: of a newer node, a status counts as waiting, a reason as internal.
func serviceStatuses(reported []*protocol.ServiceStatus) []ServiceStatus {
	var out []ServiceStatus
	for _, s := range reported[:min(len(reported), maxServices)] {
		status := s.GetStatus()
		if _, known := protocol.ServiceStatus_Status_name[int32(status)]; !known || status == 0 {
			status = protocol.ServiceStatus_WAITING
		}
		out = append(out, ServiceStatus{
			Name:      truncate(s.GetName(), maxEndpointBytes),
			Status:    status.Text(),
			Reason:    lifecycle.KnownReason(s.GetReason()).Text(),
			Detail:    truncate(s.GetDetail(), maxServiceDetailBytes),
			Restarts:  int64(s.GetRestarts()),
			ExitCode:  int64(s.GetExitCode()),
			StartedAt: dbTime(s.GetStartedAt()),
			ReadyAt:   dbTime(s.GetReadyAt()),
			ExitedAt:  dbTime(s.GetExitedAt()),
		})
	}
	return out
}

// FailingService names the service that gives a reason to the instance's status; empty where none is known to.
func (i Instance) FailingService(reason protocol.WorkloadStatus_Reason) string {
	if reason == 0 {
		return ""
	}
	for _, m := range i.Members {
		for _, s := range m.Services {
			if s.Reason == reason.Text() {
				return s.Name
			}
		}
	}
	return ""
}

// Topology returns the services that each member is to run at the instance's revision, by member id; none for an app of
// one service.
func Topology(ctx context.Context, tx db.Tx, i Instance) (map[string][]*protocol.Service, error) {
	if i.Modes.RuntimeBackend != manifest.RuntimeDockerCompose {
		return nil, nil
	}
	out := map[string][]*protocol.Service{}
	for _, m := range i.Members {
		if m.Gone {
			continue
		}
		services, err := Services(ctx, tx, m.ID, i.Revision)
		if err != nil {
			return nil, err
		}
		out[m.ID] = services
	}
	return out, nil
}
