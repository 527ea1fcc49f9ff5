package httpapi

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// defaultTailLines is how much of a log is shown when nothing is said, maxTailLines when only the time is.
	defaultTailLines = 200
	maxTailLines     = 10_000
)

// ListAppInstances lists a project's instances, the newest first.
func (s *Server) ListAppInstances(ctx context.Context,
	r ListAppInstancesRequestObject,
) (ListAppInstancesResponseObject, error) {
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]instance.Instance, error) {
		return s.Queries.Instances(ctx, principalOf(ctx), instance.Filter{
			ProjectID: r.ProjectID, Status: lifecycle.Status(r.Params.Status), AppSlug: r.Params.AppSlug,
			After: p.After, Limit: p.Limit,
		})
	}, func(v instance.Instance) string { return v.ID })
	if err != nil {
		return nil, err
	}
	out, err := decodedViews(items, instanceView)
	return ListAppInstances200JSONResponse{Items: out, NextCursor: next}, err
}

// GetAppInstance gives one instance, on request once it has changed.
func (s *Server) GetAppInstance(ctx context.Context,
	r GetAppInstanceRequestObject,
) (GetAppInstanceResponseObject, error) {
	i, err := s.Queries.Instance(ctx, principalOf(ctx), r.ProjectID, r.AppInstanceID,
		watchOf(r.Params.After, r.Params.Wait))
	if err != nil {
		return nil, err
	}
	view, err := instanceView(i.Instance)
	view.Cost = costView(i.Cost)
	addInstructions(&view, i)
	addTopology(&view, i)
	for k := range view.Members {
		view.Members[k].ImagePull = pullView(i.Pulls[view.Members[k].ID])
	}
	return GetAppInstance200JSONResponse(view), err
}

func costView(cost ledger.Cost) InstanceCost {
	if cost.Currency == "" {
		return InstanceCost{}
	}
	return InstanceCost{
		Currency: cost.Currency,
		Spent:    ledger.FormatNanos(cost.SpentNanos),
		Held:     ledger.FormatNanos(cost.HeldNanos),
		PerHour:  ledger.FormatNanos(cost.PerHourNanos),
	}
}

// CreateAppInstance deploys an app.
func (s *Server) CreateAppInstance(ctx context.Context,
	r CreateAppInstanceRequestObject,
) (CreateAppInstanceResponseObject, error) {
	view, err := commandedView(s.Commands.CreateInstance(ctx, metaFrom(ctx), command.CreateInstanceInput{
		ProjectID: r.ProjectID, AppSlug: r.Body.AppSlug, Version: r.Body.Version, DisplayName: r.Body.DisplayName,
		OperatingMode: string(r.Body.OperatingMode), ControlPlaneScope: string(r.Body.ControlPlaneScope),
		AllocationIDs: r.Body.PlacementIntent.AllocationIds, Parameters: r.Body.Parameters, Config: r.Body.Config,
		Resources: resourceChoice(r.Body.Resources, r.Body.Ports, r.Body.Volumes, r.Body.Environment),
	}))
	return CreateAppInstance201JSONResponse(view), err
}

// DecommissionAppInstance begins the end of an instance.
func (s *Server) DecommissionAppInstance(ctx context.Context,
	r DecommissionAppInstanceRequestObject,
) (DecommissionAppInstanceResponseObject, error) {
	view, err := commandedView(s.Commands.DecommissionInstance(ctx, metaFrom(ctx), r.ProjectID, r.AppInstanceID))
	return DecommissionAppInstance202JSONResponse(view), err
}

// UpgradeAppInstance begins an upgrade.
func (s *Server) UpgradeAppInstance(ctx context.Context,
	r UpgradeAppInstanceRequestObject,
) (UpgradeAppInstanceResponseObject, error) {
	view, err := commandedView(s.Commands.UpgradeInstance(ctx, metaFrom(ctx), command.UpgradeInstanceInput{
		ProjectID:  r.ProjectID,
		InstanceID: r.AppInstanceID,
		Version:    r.Body.TargetVersion,
		Resources:  resourceChoice(r.Body.Resources, r.Body.Ports, r.Body.Volumes, r.Body.Environment),
		Parameters: r.Body.Parameters,
		Config:     r.Body.Config,
	}))
	return UpgradeAppInstance202JSONResponse(view), err
}

// RollbackAppInstance begins a rollback; without a body, to the previous version.
func (s *Server) RollbackAppInstance(ctx context.Context,
	r RollbackAppInstanceRequestObject,
) (RollbackAppInstanceResponseObject, error) {
	target := ""
	if r.Body != nil {
		target = r.Body.TargetVersion
	}
	view, err := commandedView(s.Commands.RollbackInstance(ctx, metaFrom(ctx), r.ProjectID, r.AppInstanceID, target))
	return RollbackAppInstance202JSONResponse(view), err
}

// StopAppInstance begins a stop.
func (s *Server) StopAppInstance(ctx context.Context,
	r StopAppInstanceRequestObject,
) (StopAppInstanceResponseObject, error) {
	view, err := commandedView(s.Commands.StopInstance(ctx, metaFrom(ctx), r.ProjectID, r.AppInstanceID))
	return StopAppInstance202JSONResponse(view), err
}

// StartAppInstance begins a start.
func (s *Server) StartAppInstance(ctx context.Context,
	r StartAppInstanceRequestObject,
) (StartAppInstanceResponseObject, error) {
	view, err := commandedView(s.Commands.StartInstance(ctx, metaFrom(ctx), r.ProjectID, r.AppInstanceID))
	return StartAppInstance202JSONResponse(view), err
}

// ChangeAppInstance renames an instance or changes its config.
func (s *Server) ChangeAppInstance(ctx context.Context,
	r ChangeAppInstanceRequestObject,
) (ChangeAppInstanceResponseObject, error) {
	in := command.ChangeInstanceInput{Config: r.Body.Config}
	if r.Body.DisplayName != "" {
		in.DisplayName = &r.Body.DisplayName
	}
	view, err := commandedView(s.Commands.ChangeInstance(ctx, metaFrom(ctx), r.ProjectID, r.AppInstanceID, in))
	return ChangeAppInstance200JSONResponse(view), err
}

// ListAppInstanceEvents tells what happened to an instance, the oldest first.
func (s *Server) ListAppInstanceEvents(ctx context.Context,
	r ListAppInstanceEventsRequestObject,
) (ListAppInstanceEventsResponseObject, error) {
	items, next, err := page(r.Params.Cursor, r.Params.Limit,
		func(p db.Page) ([]event.Event, error) {
			return s.Queries.InstanceEvents(ctx, principalOf(ctx), r.ProjectID, r.AppInstanceID, p)
		}, event.Event.Cursor)
	if err != nil {
		return nil, err
	}
	out, err := decodedViews(items, eventView)
	return ListAppInstanceEvents200JSONResponse{Items: out, NextCursor: next}, err
}

// GetAppInstanceLogs streams what the app wrote, straight from the node.
func (s *Server) GetAppInstanceLogs(ctx context.Context,
	r GetAppInstanceLogsRequestObject,
) (GetAppInstanceLogsResponseObject, error) {
	i, err := s.Queries.InstanceFor(ctx, principalOf(ctx), iam.InstanceLogs, r.ProjectID, r.AppInstanceID)
	if err != nil {
		return nil, err
	}
	member, err := memberOf(i, r.Params.MemberID, "query/member_id")
	if err != nil {
		return nil, err
	}
	request := &protocol.LogsRequest{
		MemberId: member.ID, Service: r.Params.Service, Follow: r.Params.Follow,
		TailLines: uint32(cmp.Or(r.Params.TailLines, defaultTailLines)),
	}
	if !r.Params.Since.IsZero() {
		request.Since = timestamppb.New(r.Params.Since)
		request.TailLines = uint32(cmp.Or(r.Params.TailLines, maxTailLines))
	}
	source, err := s.NodeStreams.Logs(ctx, member.NodeID, i.OrgID, request)
	if err != nil {
		return nil, err
	}
	if err := s.Commands.AuditStream(ctx, metaFrom(ctx), iam.InstanceLogs, i, map[string]any{
		"member_id": member.ID, "service": r.Params.Service, "follow": r.Params.Follow,
	}); err != nil {
		_ = source.Close()
		return nil, err
	}
	again := callOf(ctx).again
	return logStream{source: source, checkEvery: s.logCheckEvery, may: func() error {
		ctx, cancel := context.WithTimeout(ctx, logCheckTimeout)
		defer cancel()
		return s.mayReadLogs(ctx, again, r.ProjectID)
	}}, nil
}

// mayReadLogs reports as a fault that the caller of an open stream may not read logs of the project any more: the
// credential was revoked or has expired, the caller was disabled, or lost the role.
func (s *Server) mayReadLogs(ctx context.Context, again func(context.Context) (iam.Principal, error),
	projectID string,
) error {
	p, err := again(ctx)
	if err != nil {
		return err
	}
	return s.Queries.CheckLogs(ctx, p, projectID)
}

// memberOf returns the named member, or the first one that is not removed; pointer is where the request names it. A
// removed member has nothing to show.
func memberOf(i instance.Instance, id, pointer string) (instance.Member, error) {
	removed := false
	for _, m := range i.Members {
		if id != "" && m.ID != id {
			continue
		}
		if !m.Gone {
			return m, nil
		}
		removed = true
	}
	if removed {
		return instance.Member{}, fault.New(fault.Conflict, codeMemberRemoved, "The instance was removed from its node, "+
			"with its containers and logs.", nil)
	}
	return instance.Member{}, fault.New(fault.Unprocessable, codeMemberUnknown, "The instance has no such member.",
		nil).WithField(pointer, "names no member of the instance")
}

// commandedView views the instance that a command returned.
func commandedView(i instance.Instance, err error) (AppInstance, error) {
	if err != nil {
		return AppInstance{}, err
	}
	return instanceView(i)
}

func resourceChoice(r InstanceResources, ports PortChoices, volumes VolumeChoices,
	environment EnvironmentChoice,
) manifest.Choice {
	c := manifest.Choice{
		AcceleratorModel:   r.AcceleratorModel,
		AcceleratorSharing: string(r.AcceleratorSharing),
		CPUMillis:          uint64(r.CPUMillis),
		MemoryMiB:          uint64(r.MemoryMib),
		DiskMiB:            uint64(r.DiskMib),
		ShmMiB:             uint64(r.ShmMib),
	}
	if r.Accelerators != nil {
		count := int(*r.Accelerators)
		c.Accelerators = &count
	}
	for _, p := range ports {
		c.Ports = append(c.Ports, manifest.PortChoice{Name: p.Name, HostPort: uint32(p.HostPort)})
	}
	c.Environment = environment.Requirements
	for _, v := range volumes {
		c.Volumes = append(c.Volumes, manifest.VolumeChoice{
			Name: v.Name, VolumeID: v.VolumeID, SizeMiB: uint64(v.SizeMib),
		})
	}
	return c
}

func environmentView(c manifest.Choice) EnvironmentChoice {
	return EnvironmentChoice{Requirements: append([]string{}, c.Environment...)}
}

func volumesView(c manifest.Choice) VolumeChoices {
	return views(c.Volumes, func(v manifest.VolumeChoice) VolumeChoice {
		return VolumeChoice{Name: v.Name, VolumeID: v.VolumeID, SizeMib: int64(v.SizeMiB)}
	})
}

func portsView(c manifest.Choice) PortChoices {
	return views(c.Ports, func(p manifest.PortChoice) PortChoice {
		return PortChoice{Name: p.Name, HostPort: int32(p.HostPort)}
	})
}

func resourcesView(c manifest.Choice) InstanceResources {
	out := InstanceResources{
		AcceleratorModel:   c.AcceleratorModel,
		AcceleratorSharing: AcceleratorSharing(c.AcceleratorSharing),
		CPUMillis:          int64(c.CPUMillis),
		MemoryMib:          int64(c.MemoryMiB),
		DiskMib:            int64(c.DiskMiB),
		ShmMib:             int64(c.ShmMiB),
	}
	if c.Accelerators != nil {
		count := int32(*c.Accelerators)
		out.Accelerators = &count
	}
	return out
}

func instanceView(i instance.Instance) (AppInstance, error) {
	out := AppInstance{
		ID: i.ID, ResourceVersion: i.ResourceVersion, OrgID: i.OrgID, ProjectID: i.ProjectID, AppSlug: i.AppSlug,
		Version: i.Version, DisplayName: i.DisplayName,
		OperatingMode: OperatingMode(i.Modes.OperatingMode), ControlPlaneScope: ControlPlaneScope(i.Modes.ControlPlaneScope),
		RuntimeBackend:     RuntimeBackend(i.Modes.RuntimeBackend),
		TenantBoundaryMode: TenantBoundaryMode(i.Modes.TenantBoundaryMode),
		PlacementIntent:    PlacementIntent{AllocationIds: i.PlacementAllocationIDs},
		Status:             AppInstanceStatus(i.Lifecycle.Status), StatusReason: StatusReason(i.Lifecycle.Reason.Text()),
		Health:   AppInstanceHealth(i.Lifecycle.Health),
		Revision: i.Revision, PreviousVersion: i.PreviousVersion, HintResults: []HintResult{}, Endpoints: endpointViews(i),
		Members:       []Member{},
		Resources:     resourcesView(i.Resources),
		Ports:         portsView(i.Resources),
		Volumes:       volumesView(i.Resources),
		Environment:   environmentView(i.Resources),
		RequestedBy:   RequestedBy{Type: RequestedByType(i.RequestedBy.Type), ID: i.RequestedBy.ID},
		CorrelationID: i.CorrelationID, CreatedAt: i.CreatedAt, UpdatedAt: i.UpdatedAt, ActivatedAt: i.ActivatedAt,
	}
	for _, h := range i.HintResults {
		out.HintResults = append(out.HintResults, HintResult{
			Field: h.Field, Requested: h.Requested, Effective: h.Effective,
			Reason: h.Reason,
		})
	}
	for _, m := range i.Members {
		out.Members = append(out.Members, memberView(i, m))
	}
	if err := json.Unmarshal([]byte(i.ParametersJSON), &out.Parameters); err != nil {
		return AppInstance{}, fmt.Errorf("parameters of instance %s: %w", i.ID, err)
	}
	// The schema marks them writeOnly, or the platform has added them.
	maps.DeleteFunc(out.Parameters, func(_ string, value any) bool {
		_, sealed := protocol.AsSealed(value)
		return sealed || protocol.IsIdentityReference(value)
	})
	if err := json.Unmarshal([]byte(i.ConfigJSON), &out.Config); err != nil {
		return AppInstance{}, fmt.Errorf("config of instance %s: %w", i.ID, err)
	}
	return out, nil
}

func endpointViews(i instance.Instance) []Endpoint {
	out := []Endpoint{}
	for _, m := range i.Members {
		for _, e := range m.Endpoints {
			out = append(out, Endpoint{
				Name: e.Name, URL: e.URL(), NodeID: m.NodeID,
				Access: EndpointAccess("private"),
			})
		}
	}
	return out
}

func memberView(i instance.Instance, m instance.Member) Member {
	return Member{
		ID: m.ID, AllocationID: m.AllocationID, NodeID: m.NodeID, Role: m.Role, Status: MemberStatus(m.Status.Text()),
		StatusReason: StatusReason(m.Reason.Text()),
		Detail:       m.Detail, OwnerRefusal: m.OwnerRefusal, Restarts: int32(m.Restarts), ExitCode: int32(m.ExitCode),
		ConfigCurrent: i.HasConfig(m),
		StartedAt:     m.StartedAt, ReadyAt: m.ReadyAt, HeartbeatAt: m.HeartbeatAt, Services: servicesView(m.Services),
	}
}

// pullView shows what a node says of a pull.
func pullView(p *protocol.ImagePull) ImagePull {
	if p == nil {
		return ImagePull{}
	}
	total := instance.PullBytes(p.GetTotalBytes())
	return ImagePull{
		Phase: ImagePullPhase(instance.PullPhase(p)), TotalBytes: total,
		DoneBytes: min(instance.PullBytes(p.GetDoneBytes()), total),
	}
}

func eventView(e event.Event) (Event, error) {
	ce, err := e.CloudEvent()
	if err != nil {
		return Event{}, err
	}
	out := Event{
		ID: ce.ID, Source: ce.Source, Specversion: EventSpecversion(ce.SpecVersion), Type: ce.Type, Subject: ce.Subject,
		Time:            ce.Time,
		Datacontenttype: EventDatacontenttype(ce.DataContentType), Resourceversion: ce.ResourceVersion, Pos: ce.Pos,
		Traceparent: ce.Traceparent,
	}
	if err := json.Unmarshal(ce.Data, &out.Data); err != nil {
		return Event{}, fmt.Errorf("data of event %s: %w", e.ID, err)
	}
	return out, nil
}
