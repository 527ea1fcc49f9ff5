package instance

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// AddMember adds a member that an external worker is to make part of a running instance. The caller has reserved its
// allocation, and adds the task.
func AddMember(ctx context.Context, tx db.Tx, i Instance, c manifest.Component, m Member, now time.Time,
) (Change, error) {
	if err := lifecycle.ChangeMembers(i.Lifecycle); err != nil {
		return Change{}, err
	}
	if i.countRole(c.Role) >= c.Max {
		return Change{}, outOfBounds("as many members of this role as the version allows").
			WithField("/role", "has no room for another member")
	}
	m.InstanceID, m.Role, m.Status, m.External = i.ID, c.Role, protocol.WorkloadStatus_PENDING, true
	i.Members = append(slices.Clip(i.Members), m)
	return Change{Instance: i}, insertMember(ctx, tx, m, now)
}

// RemoveMember marks a member as going; the end of its task frees its allocation.
func RemoveMember(ctx context.Context, tx db.Tx, i Instance, c *manifest.Component, id string, now time.Time,
) (Change, error) {
	if err := lifecycle.ChangeMembers(i.Lifecycle); err != nil {
		return Change{}, err
	}
	m, err := i.member(id)
	if err != nil {
		return Change{}, err
	}
	// A member that is being removed is not counted any more: changeMember refuses its second removal, as busy.
	if m.settled() && c != nil && c.Role == m.Role && i.countRole(c.Role) <= c.Min {
		return Change{}, outOfBounds("as few members of this role as the version needs")
	}
	return changeMember(ctx, tx, i, m, protocol.WorkloadStatus_STOPPING, now)
}

// RecoverMember marks a member that has failed or is degraded as starting again.
func RecoverMember(ctx context.Context, tx db.Tx, i Instance, id string, now time.Time) (Change, error) {
	if err := lifecycle.ChangeMembers(i.Lifecycle); err != nil {
		return Change{}, err
	}
	m, err := i.member(id)
	if err != nil {
		return Change{}, err
	}
	if m.Status == protocol.WorkloadStatus_READY {
		return Change{}, errMemberBusy()
	}
	return changeMember(ctx, tx, i, m, protocol.WorkloadStatus_STARTING, now)
}

// changeMember saves the status of a member that no task is about.
func changeMember(ctx context.Context, tx db.Tx, i Instance, m Member, status protocol.WorkloadStatus_Status,
	now time.Time,
) (Change, error) {
	if !m.settled() {
		return Change{}, errMemberBusy()
	}
	members, _, err := setMembers(ctx, tx, i.Members, now, func(o *Member) bool {
		if o.ID == m.ID {
			o.Status, o.Reason, o.Detail = status, 0, ""
		}
		return o.ID == m.ID
	})
	if err != nil {
		return Change{}, err
	}
	i.Members = members
	return saveUnnumbered(ctx, tx, i, i.Lifecycle, nil, now)
}

// MemberReport is what an external worker says of a member.
type MemberReport struct {
	MemberID string
	Status   protocol.WorkloadStatus_Status
	Reason   protocol.WorkloadStatus_Reason
	Detail   string
}

// ReportMember records what an external worker says of a member that no task is about, and when. It reports whether
// anything but the time is new; the change numbers one event for that.
func ReportMember(ctx context.Context, tx db.Tx, i Instance, r MemberReport, now time.Time) (Change, bool, error) {
	if err := lifecycle.ChangeMembers(i.Lifecycle); err != nil {
		return Change{}, false, err
	}
	m, err := i.member(r.MemberID)
	if err != nil {
		return Change{}, false, err
	}
	if !m.External {
		return Change{}, false, fault.New(fault.Conflict, codeMemberOfNode, "The member's node runs it and reports it; only "+
			"members that an external worker operates are reported here.", nil).Permanent()
	}
	if !m.settled() {
		return Change{}, false, errMemberBusy()
	}
	r.Detail = truncate(r.Detail, maxDetailBytes)
	return saveReport(ctx, tx, i, m, r, now, now)
}

// saveReport gives a member the status of a report, and the time of the worker's last word.
func saveReport(ctx context.Context, tx db.Tx, i Instance, m Member, r MemberReport, heartbeatAt, now time.Time,
) (Change, bool, error) {
	news := m.Status != r.Status || m.Reason != r.Reason || m.Detail != r.Detail
	members, _, err := setMembers(ctx, tx, i.Members, now, func(o *Member) bool {
		if o.ID == m.ID {
			o.Status, o.Reason, o.Detail, o.HeartbeatAt = r.Status, r.Reason, r.Detail, heartbeatAt
		}
		return o.ID == m.ID
	})
	if err != nil {
		return Change{}, false, err
	}
	i.Members = members
	if !news {
		return Change{Instance: i}, false, nil
	}
	c, err := saveUnnumbered(ctx, tx, i, i.Lifecycle, nil, now)
	if err != nil {
		return Change{}, false, err
	}
	c.Instance.ResourceVersion++
	c.Instance.UpdatedAt = now
	return c, true, updateInstance(ctx, tx, c.Instance)
}

// MemberSilence is how long a worker that reports a member may be silent until the member counts as failed: three
// reports of package worker may be lost.
const MemberSilence = 2 * time.Minute

// SilentMember is a member whose worker is silent.
type SilentMember struct {
	ID, OrgID, NodeID, InstanceID, ProjectID string
}

// SilentMembers lists the serving members of running instances that a worker has reported before, but not within
// MemberSilence, in the order of their ids, from the one after a given id on. A member that no worker has ever reported
// is as its last task left it.
func SilentMembers(ctx context.Context, tx db.Tx, after string, now time.Time, limit int) ([]SilentMember, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[SilentMember],
		`SELECT m.id, i.org_id, m.node_id, m.instance_id, i.project_id
		FROM instance_members m JOIN app_instances i ON i.id = m.instance_id
		WHERE m.external AND m.status IN ('ready', 'degraded') AND m.heartbeat_at <= $1 AND i.status = 'running'
			AND ($2::UUID IS NULL OR m.id > $2::UUID)
		ORDER BY m.id LIMIT $3`, now.Add(-MemberSilence), db.OrNull(after), limit)
}

// MarkSilent fails a member whose worker is silent, with the reason node_unreachable; the worker's next report says how
// it does. It reports false where the worker has said something meanwhile.
func MarkSilent(ctx context.Context, tx db.Tx, s SilentMember, now time.Time) (Change, MemberReport, bool, error) {
	r := MemberReport{
		MemberID: s.ID, Status: protocol.WorkloadStatus_FAILED, Reason: protocol.WorkloadStatus_NODE_UNREACHABLE,
		Detail: "The external worker has not reported the member for " + MemberSilence.String() + ".",
	}
	i, err := Get(ctx, tx, s.ProjectID, s.InstanceID)
	if err != nil {
		return Change{}, r, false, err
	}
	m, err := i.member(s.ID)
	serves := m.Status == protocol.WorkloadStatus_READY || m.Status == protocol.WorkloadStatus_DEGRADED
	if err != nil || !serves || i.Lifecycle.Status != lifecycle.Running || now.Sub(m.HeartbeatAt) < MemberSilence {
		return Change{}, r, false, nil //nolint:nilerr // the member is gone
	}
	c, news, err := saveReport(ctx, tx, i, m, r, m.HeartbeatAt, now)
	return c, r, news, err
}

// settled reports whether no task is about the member.
func (m Member) settled() bool {
	switch m.Status {
	case protocol.WorkloadStatus_READY, protocol.WorkloadStatus_DEGRADED, protocol.WorkloadStatus_FAILED:
		return !m.Gone
	default:
		return false
	}
}

func (i Instance) countRole(role string) (n int) {
	for _, m := range i.Members {
		if m.Role == role && !m.Gone && m.Status != protocol.WorkloadStatus_STOPPING {
			n++
		}
	}
	return n
}

func (i Instance) member(id string) (Member, error) {
	for _, m := range i.Members {
		if m.ID == id && !m.Gone {
			return m, nil
		}
	}
	return Member{}, fault.New(fault.NotFound, fault.CodeNotFound, "The app instance has no such member.", nil)
}

func outOfBounds(has string) *fault.Error {
	return fault.New(fault.Conflict, codeMemberBounds, "The app instance has "+has+".", nil)
}

func errMemberBusy() error {
	return fault.New(fault.Conflict, codeMemberBusy, "The member is coming, going or ready, and that cannot be done with "+
		"it now.", nil)
}
