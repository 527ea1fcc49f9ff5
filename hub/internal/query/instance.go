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
		i, err := db.Query(ctx, s.DB, func(tx db.Tx) (Instance, error) { return s.readInstance(ctx, tx, p, projectID, id) })
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

// readInstance reads what it can in one round trip: what the instance costs, too, which the caller gets only where it
// may read the instance. Where the instance is as it was read last, that is all, and its version.
func (s *Service) readInstance(ctx context.Context, tx db.Tx, p iam.Principal, projectID, id string) (Instance, error) {
	var (
		out     Instance
		version instance.Version
	)
	cached, known := s.Cache.get(id)
	known = known && cached.instance.ProjectID == projectID
	err := db.Together(ctx, tx, func(tx db.Tx) (err error) {
		if known {
			version, err = instance.VersionOf(ctx, tx, id)
		} else {
			cached.instance, err = instance.Get(ctx, tx, projectID, id)
		}
		return err
	}, func(tx db.Tx) (err error) {
		out.Cost, err = ledger.CostOf(ctx, tx, id)
		return err
	})
	if err == nil && known && !cached.has(version) {
		known = false
		cached.instance, err = instance.Get(ctx, tx, projectID, id)
	}
	if fault.Is(err, fault.NotFound) {
		// Check access before reporting NotFound, so that a caller without access learns nothing.
		if _, denied := access.Instance(p, iam.InstanceRead, projectID, id)(ctx, tx); denied != nil {
			return Instance{}, denied
		}
	}
	if err != nil {
		return Instance{}, err
	}
	i := cached.instance
	telemetry.SetFields(ctx, i.LogFields())
	// The instance names its org: a statement less than reading the project, in a read that is polled.
	if err := iam.AuthorizeOn(p, iam.InstanceRead, i.OrgID, i.ProjectID, i.ID); err != nil {
		return Instance{}, err
	}
	if !known {
		if cached.services, err = instance.Topology(ctx, tx, i); err != nil {
			return Instance{}, err
		}
		if cached.hostnames, err = hostnames(ctx, tx, i.Members); err != nil {
			return Instance{}, err
		}
		s.Cache.keep(cached)
	}
	out.Instance, out.Services, out.Hostnames = i, cached.services, cached.hostnames
	return out, nil
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
