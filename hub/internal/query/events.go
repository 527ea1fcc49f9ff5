package query

import (
	"context"
	"slices"
	"strings"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// EventFilter says which of the events that a caller may see are read.
type EventFilter struct {
	// OrgID, ProjectID and Subject are empty for all; with an OrgID, events of no org are left out.
	OrgID, ProjectID, Subject string
	// Types are empty for all; each stands for the types that begin with it, too.
	Types []string
	// After is the position of the last event that the caller has. FromNow begins with the next event instead.
	After   int64
	FromNow bool
}

// EventReader reads what one caller may see of the events, in the order of their positions. It is for one goroutine.
type EventReader struct {
	service *Service
	filter  EventFilter
	caller  iam.Principal
	after   int64
	// followed says that the tail had the caller's next event; fellBehind that it lacked one after that.
	followed, fellBehind bool
	// may remembers decisions until the caller is replaced.
	may map[eventScope]bool
}

// eventScope is what the right to see an event depends on.
type eventScope struct{ permission, orgID, projectID string }

// Events returns a reader of events. A caller who may see none reads none.
func (s *Service) Events(ctx context.Context, p iam.Principal, f EventFilter) (*EventReader, error) {
	if f.ProjectID == "" && p.Type == principal.ServiceAccount {
		f.ProjectID = p.ProjectID
	}
	r := &EventReader{service: s, filter: f, after: f.After}
	r.Replace(p)
	return read(ctx, s, r.open, itself)
}

// open checks where the reader begins.
func (r *EventReader) open(ctx context.Context, tx db.Tx) (*EventReader, error) {
	if id := r.filter.ProjectID; id != "" {
		if _, err := access.Project(r.caller, iam.ProjectRead, id)(ctx, tx); err != nil {
			return nil, err
		}
	}
	oldest, newest, err := event.Kept(ctx, tx)
	switch {
	case err != nil:
		return nil, err
	case r.filter.FromNow:
		r.after = newest
	case r.after > 0 && r.after < oldest-1:
		return nil, fault.New(fault.Conflict, codeEventsExpired, "Events after this position are no longer kept. Read "+
			"the resources that you follow anew, and follow the events from now on.", nil).Permanent()
	}
	return r, nil
}

// Replace sets the caller: its rights may have changed.
func (r *EventReader) Replace(p iam.Principal) { r.caller, r.may = p, map[eventScope]bool{} }

// Read returns the next events that the caller may see, and a channel that is closed when there may be more; where it
// is nil, there may be more already. ended says that the hub is stopping. The slice is shared with the
// other readers: it is not to be changed. A caller that holds it for long clones it: it keeps all that the tail had.
func (r *EventReader) Read(ctx context.Context) (events []event.Numbered, _ <-chan struct{}, ended bool, err error) {
	v := r.service.Tail.After(r.after)
	read, changed := v.Events, v.Changed
	behind := r.after < v.Floor || !v.Known
	r.fellBehind = behind && r.followed
	r.followed = r.followed || !behind
	if behind {
		if read, err = r.stored(ctx); err != nil {
			return nil, nil, false, err
		}
		r.after = max(r.after, lastOf(read, v.Floor))
		if len(read) > 0 || v.Known {
			changed = nil
		}
	}
	return r.visible(read), changed, v.Closed, nil
}

// visible returns the events that the caller wants and may see: where these are the first ones of read, a part of it.
func (r *EventReader) visible(read []event.Numbered) []event.Numbered {
	var events []event.Numbered
	for i := range read {
		e := &read[i]
		r.after = e.Pos
		switch {
		case !r.wants(&e.Event) || !r.MaySee(&e.Event):
		case len(events) == i:
			events = read[: i+1 : i+1]
		default:
			events = append(events, *e)
		}
	}
	return events
}

// Position is that of the last event that Read has read, whether the caller may see it or not.
func (r *EventReader) Position() int64 { return r.after }

// FellBehind reports whether the reader, after it had read all there was, has come to lack events that are no longer in
// memory: it reads more slowly than events happen.
func (r *EventReader) FellBehind() bool { return r.fellBehind }

// lastOf is the position up to which the events have been read; without any that is all below the floor.
func lastOf(read []event.Numbered, floor int64) int64 {
	if len(read) == 0 {
		return floor
	}
	return read[len(read)-1].Pos
}

// stored reads from the database what the tail lacks.
func (r *EventReader) stored(ctx context.Context) ([]event.Numbered, error) {
	orgID := r.filter.OrgID
	if orgID == "" && !r.caller.PlatformAdmin {
		orgID = r.caller.OrgID
	}
	return event.After(ctx, r.service.DB, r.after, orgID, r.filter.ProjectID)
}

func (r *EventReader) wants(e *event.Event) bool {
	f := r.filter
	return (f.OrgID == "" || f.OrgID == e.OrgID) && (f.ProjectID == "" || f.ProjectID == e.ProjectID) &&
		(f.Subject == "" || f.Subject == e.Subject) && f.wantsType(e.Type)
}

func (f EventFilter) wantsType(t string) bool {
	return len(f.Types) == 0 || slices.ContainsFunc(f.Types, func(want string) bool {
		return want == t || strings.HasPrefix(t, strings.TrimSuffix(want, ".")+".")
	})
}

// MaySee reports whether the caller may see an event.
func (r *EventReader) MaySee(e *event.Event) bool {
	s := eventScope{permissionOf(e), e.OrgID, e.ProjectID}
	may, known := r.may[s]
	if !known {
		may = s.permission != "" && iam.Authorize(r.caller, s.permission, s.orgID, s.projectID) == nil
		r.may[s] = may
	}
	return may
}

// unpublished are the types of events whose version may not be published.
func unpublished() []string {
	return []string{"apps.version.registered", "apps.version.promoted", "apps.version.retired"}
}

// permissionOf is what a caller needs to see an event. People of no org, and what the platform has not published yet,
// are for platform admins alone: what belongs to the platform is in every org, and the permission to read an org's
// users, or the catalogue, would reach them. A version that is promoted or retired may be one that no other has seen.
func permissionOf(e *event.Event) iam.Permission {
	switch {
	case e.OrgID == "" && strings.HasPrefix(e.Type, "iam."):
		return iam.UserWrite
	case e.OrgID == "" && (slices.Contains(unpublished(), e.Type) || strings.HasPrefix(e.Type, "apps.slug.")):
		return iam.CatalogManage
	}
	return permissionOfEvent(e.Type)
}

// permissionOfEvent is what a caller needs to see events of a type: to read the resource that they are of. Nobody sees
// a type that has none.
func permissionOfEvent(t string) iam.Permission {
	for _, of := range []struct{ prefix, permission string }{
		{"apps.instance.", iam.InstanceRead},
		{"apps.attachment.", iam.AttachmentRead},
		{"apps.artifact.", iam.ArtifactRead},
		{"apps.version.", iam.CatalogRead},
		{"apps.entitlement.", iam.EntitlementRead},
		{"apps.environment.", iam.EnvironmentRead},
		{"iam.access_credential.", iam.AccessCredentialRead},
		{"security.wrapping_token.", iam.AccessCredentialRead},
		{"apps.package_index.", iam.EnvironmentRead},
		{"apps.secret.", iam.SecretRead},
		{"apps.publisher.", iam.PublisherRead},
		{"apps.slug.", iam.ArtifactRead},
		{"capacity.allocation.", iam.AllocationRead},
		{"capacity.ssh_keys.", iam.AllocationRead},
		{"capacity.volume.", iam.VolumeRead},
		{"capacity.volume_snapshot.", iam.VolumeRead},
		{"capacity.sku.", iam.SKURead},
		{"iam.user.", iam.UserRead},
		{"iam.user_token.", iam.UserRead},
		{"iam.session.", iam.UserRead},
		{"iam.invitation.", iam.UserRead},
		{"iam.org.", iam.OrgRead},
		{"iam.project.", iam.ProjectRead},
		{"iam.role.", iam.RoleRead},
		{"iam.service_account.", iam.ServiceAccountRead},
		{"iam.webhook.", iam.WebhookRead},
		{"billing.credit.", iam.LedgerRead},
		{"billing.price.", iam.PriceRead},
		{"fleet.join_token.", iam.JoinTokenRead},
		{"fleet.", iam.NodeRead},
		{"hub.", iam.NodeRead},
	} {
		if strings.HasPrefix(t, of.prefix) {
			return of.permission
		}
	}
	return ""
}
