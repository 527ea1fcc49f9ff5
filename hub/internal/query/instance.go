package query

import (
	"context"
	"maps"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/protocol"
)

// Instance is an app instance with what it cost so far, and the pulls of its members. Both may be newer than the rest.
type Instance struct {
	instance.Instance
	Cost ledger.Cost
	// Hostnames are the names that the nodes of members with endpoints give themselves, by node id.
	Hostnames map[string]string
	// Services are what each member is to run, by member id.
	Services map[string][]*protocol.Service
	// Pulls has the members that wait for their image, by member id.
	Pulls map[string]*protocol.ImagePull
}

// Instances lists a project's app instances, the newest first.
func (s *Service) Instances(ctx context.Context, p iam.Principal, f instance.Filter) ([]instance.Instance, error) {
	return list(ctx, s, access.Project(p, iam.InstanceRead, f.ProjectID), instance.List, f)
}

// Instance reads one app instance. A waiting read also ends when a pull goes on.
func (s *Service) Instance(ctx context.Context, p iam.Principal, projectID, id string, w Watch) (Instance, error) {
	var before *Instance
	w.unsignalled = true // pulls
	return await(ctx, s, id, w, func() (Instance, int64, error) {
		i, err := s.readInstance(ctx, p, projectID, id)
		i.Pulls = s.pulls(i.Members)
		version := i.ResourceVersion
		if before == nil {
			before = &i
		} else if !maps.EqualFunc(i.Pulls, before.Pulls, equalPull) {
			version = -1 // no version that the caller may have
		}
		return i, version, err
	})
}

func equalPull(a, b *protocol.ImagePull) bool { return proto.Equal(a, b) }

// pulls asks for the members that the hub has contact with.
func (s *Service) pulls(members []instance.Member) map[string]*protocol.ImagePull {
	pulls := map[string]*protocol.ImagePull{}
	for _, m := range members {
		if s.ImagePull == nil || m.Unreachable {
			continue
		}
		if pull := s.ImagePull(m.NodeID, m.ID); pull != nil {
			pulls[m.ID] = pull
		}
	}
	return pulls
}

// readInstance asks the database for the version and the cost of an instance that is as it was read last, and else for
// all of it.
func (s *Service) readInstance(ctx context.Context, p iam.Principal, projectID, id string) (Instance, error) {
	if cached, known := s.Cache.get(id); known && cached.instance.ProjectID == projectID {
		now, err := s.Cache.states.read(ctx, id)
		if err != nil {
			return Instance{}, err
		}
		if now.found && cached.has(now.version) {
			return granted(ctx, p, cached, now.cost)
		}
	}
	return db.Query(ctx, s.DB, func(tx db.Tx) (Instance, error) { return s.readWhole(ctx, tx, p, projectID, id) })
}

// readWhole reads what it can in one round trip: what the instance costs, too, which the caller gets only where it may
// read the instance.
func (s *Service) readWhole(ctx context.Context, tx db.Tx, p iam.Principal, projectID, id string) (Instance, error) {
	var (
		read cachedInstance
		cost ledger.Cost
	)
	err := db.Together(ctx, tx, func(tx db.Tx) (err error) {
		read.instance, err = instance.Get(ctx, tx, projectID, id)
		return err
	}, func(tx db.Tx) (err error) {
		cost, err = ledger.CostOf(ctx, tx, id)
		return err
	})
	if fault.Is(err, fault.NotFound) {
		// Check access before reporting NotFound, so that a caller without access learns nothing.
		if _, denied := access.Instance(p, iam.InstanceRead, projectID, id)(ctx, tx); denied != nil {
			return Instance{}, denied
		}
	}
	if err != nil {
		return Instance{}, err
	}
	out, err := granted(ctx, p, read, cost)
	if err != nil {
		return Instance{}, err
	}
	if out.Services, err = instance.Topology(ctx, tx, out.Instance); err != nil {
		return Instance{}, err
	}
	if out.Hostnames, err = hostnames(ctx, tx, out.Members); err != nil {
		return Instance{}, err
	}
	s.Cache.keep(cachedInstance{out.Instance, out.Services, out.Hostnames})
	return out, nil
}

// granted is an instance for a caller who may read it. The instance names its org: a statement less than reading the
// project, in a read that is polled.
func granted(ctx context.Context, p iam.Principal, i cachedInstance, cost ledger.Cost) (Instance, error) {
	telemetry.SetFields(ctx, i.instance.LogFields())
	if err := iam.AuthorizeOn(p, iam.InstanceRead, i.instance.OrgID, i.instance.ProjectID, i.instance.ID); err != nil {
		return Instance{}, err
	}
	return Instance{Instance: i.instance, Cost: cost, Hostnames: i.hostnames, Services: i.services}, nil
}

// hostnames returns the names of the nodes of the members with endpoints.
func hostnames(ctx context.Context, tx db.Tx, members []instance.Member) (map[string]string, error) {
	var nodes []string
	for _, m := range members {
		if len(m.Endpoints) > 0 {
			nodes = append(nodes, m.NodeID)
		}
	}
	if len(nodes) == 0 {
		return nil, nil
	}
	return fleet.Hostnames(ctx, tx, nodes)
}

// InstanceEvents lists the events of an app instance, the oldest first.
func (s *Service) InstanceEvents(ctx context.Context, p iam.Principal, projectID, id string,
	page db.Page,
) ([]event.Event, error) {
	check := instanceIn(p, iam.InstanceRead, projectID, id)
	return read(ctx, s, check, func(tx db.Tx, i instance.Instance) ([]event.Event, error) {
		return event.BySubject(ctx, tx, event.SubjectQuery{
			OrgID: i.OrgID, Subject: i.ID, After: page.After, Limit: page.Limit,
		})
	})
}

// InstanceFor reads an app instance for a caller who has the permission in its project.
func (s *Service) InstanceFor(ctx context.Context, p iam.Principal, permission iam.Permission, projectID,
	id string,
) (instance.Instance, error) {
	return read(ctx, s, instanceIn(p, permission, projectID, id), itself)
}

// CheckLogs reports as a fault that the caller may not read logs in the project.
func (s *Service) CheckLogs(ctx context.Context, p iam.Principal, projectID string) error {
	_, err := read(ctx, s, access.Project(p, iam.InstanceLogs, projectID), itself)
	return err
}

// instanceIn returns an app instance of a project in which the caller has the permission, or one that the project is
// attached to where the caller may do that to it.
func instanceIn(p iam.Principal, permission iam.Permission, projectID, id string) access.Check[instance.Instance] {
	inProject := access.Instance(p, permission, projectID, id)
	return func(ctx context.Context, tx db.Tx) (instance.Instance, error) {
		project, err := inProject(ctx, tx)
		if err != nil {
			return instance.Instance{}, err
		}
		i, on, err := instanceOf(ctx, tx, project.ID, id)
		if err != nil {
			return instance.Instance{}, err
		}
		return i, iam.AuthorizeOperation(p, permission, project.OrgID, project.ID, on)
	}
}

// instanceOf returns an app instance of a project, or one that the project is attached to.
func instanceOf(ctx context.Context, tx db.Tx, projectID, id string) (i instance.Instance, on iam.OnInstance,
	err error,
) {
	i, err = instance.Get(ctx, tx, projectID, id)
	if fault.Is(err, fault.NotFound) {
		i, err = instance.OfAttached(ctx, tx, projectID, id)
		on.Attached = true
	}
	on.ID, on.OperatingMode = i.ID, i.Modes.OperatingMode
	return i, on, err
}
