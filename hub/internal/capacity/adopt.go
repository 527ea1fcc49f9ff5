package capacity

import (
	"context"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Adopted is what a member uses according to its signed document.
type Adopted struct {
	MemberID      string
	AllocationID  string
	NodeID        string
	OrgID         string
	ProjectID     string
	CorrelationID string
	Use
}

// Adopt records what a member uses that a restored hub does not know. An unknown allocation is created and grows with
// each of its members, because its size was lost. Claims of other allocations on the member's accelerators end: the
// node has released them since the backup. What others wrote to its volumes they have given up since, too.
func Adopt(ctx context.Context, tx db.Tx, a Adopted, now time.Time) (made bool, at Allocation, err error) {
	at, err = GetAny(ctx, tx, a.AllocationID)
	switch {
	case fault.Is(err, fault.NotFound):
		made = true
		if at, err = makeAdopted(ctx, tx, a, now); err != nil {
			return false, at, err
		}
	case err != nil:
		return false, at, err
	case at.RequestedBy.Type == principal.Recovery:
		if at, err = growAdopted(ctx, tx, at, a, now); err != nil {
			return false, at, err
		}
	}
	if err := take(ctx, tx, at, a, now); err != nil {
		return false, at, err
	}
	if err := reserveVolumes(ctx, tx, a.MemberID, a.AllocationID, a.Volumes); err != nil {
		return false, at, err
	}
	return made, at, Reserve(ctx, tx, Reservation{
		MemberID: a.MemberID, AllocationID: a.AllocationID, NodeID: a.NodeID,
		Choice: plan.Choice{
			Need:           plan.Need{CPUMillis: a.CPUMillis, MemoryBytes: a.MemoryBytes, HostPorts: a.HostPorts},
			AcceleratorIDs: a.AcceleratorIDs,
		},
	}, now)
}

// AdoptUse adds what a newer revision of a member uses to what the rows have reserved for it.
func AdoptUse(ctx context.Context, tx db.Tx, a Adopted, now time.Time) error {
	at, err := GetAny(ctx, tx, a.AllocationID)
	if err != nil {
		return err
	}
	if err := take(ctx, tx, at, a, now); err != nil {
		return err
	}
	c, _, err := inPlace(ctx, tx, a.MemberID)
	if err != nil {
		return err
	}
	return c.reserve(ctx, tx, a.MemberID, a.Use)
}

// take ends what others have, according to the rows, of what a member uses, and claims its accelerators.
func take(ctx context.Context, tx db.Tx, at Allocation, a Adopted, now time.Time) error {
	if err := takeAccelerators(ctx, tx, a, now); err != nil {
		return err
	}
	if err := tx.Queue(ctx, `DELETE FROM reserved_ports WHERE node_id = $1 AND port = ANY($2::INT8[]) AND member_id <> $3`,
		a.NodeID, portNumbers(a.HostPorts), a.MemberID); err != nil {
		return err
	}
	if err := takeVolumes(ctx, tx, a); err != nil {
		return err
	}
	if err := insertClaims(ctx, tx, at, a.AcceleratorIDs, now); err != nil && !fault.Is(err, fault.Conflict) {
		return err // a conflict: the allocation has claimed some already
	}
	return nil
}

func makeAdopted(ctx context.Context, tx db.Tx, a Adopted, now time.Time) (Allocation, error) {
	at := Allocation{
		ID: a.AllocationID, OrgID: a.OrgID, ProjectID: a.ProjectID, NodeID: a.NodeID, Shape: GPUSlice,
		AcceleratorCount: len(a.AcceleratorIDs),
		CPUCores:         roundUp(a.CPUMillis, millisPerCore), MemoryMiB: roundUp(a.MemoryBytes, mebibyte), Status: Active,
		RequestedBy: principal.Actor{Type: principal.Recovery}, CorrelationID: a.CorrelationID, ResourceVersion: 1,
		CreatedAt: now,
		UpdatedAt: now, ActivatedAt: now,
	}
	return at, insertAllocation(ctx, tx, at)
}

func growAdopted(ctx context.Context, tx db.Tx, at Allocation, a Adopted, now time.Time) (Allocation, error) {
	at.CPUCores += roundUp(max(a.CPUMillis-at.FreeCPUMillis, 0), millisPerCore)
	at.MemoryMiB += roundUp(max(a.MemoryBytes-at.FreeMemoryBytes, 0), mebibyte)
	at.AcceleratorCount += len(a.AcceleratorIDs)
	_, err := tx.Exec(ctx,
		`UPDATE allocations SET cpu_cores = $2, memory_mib = $3, accelerator_count = $4, updated_at = $5 WHERE id = $1`,
		at.ID, at.CPUCores, at.MemoryMiB, at.AcceleratorCount, now)
	return at, err
}

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit }

func takeAccelerators(ctx context.Context, tx db.Tx, a Adopted, now time.Time) error {
	if len(a.AcceleratorIDs) == 0 {
		return nil
	}
	if _, err := tx.Exec(ctx,
		`UPDATE claims SET released_at = $4 WHERE node_id = $1 AND accelerator_id = ANY($2) AND allocation_id <> $3
			AND released_at IS NULL`,
		a.NodeID, a.AcceleratorIDs, a.AllocationID, now); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `DELETE FROM reserved_accelerators
		WHERE node_id = $1 AND accelerator_id = ANY($2) AND member_id <> $3 AND freed_at IS NULL`,
		a.NodeID, a.AcceleratorIDs, a.MemberID)
	return err
}

// takeVolumes makes readers of the other members that the rows let write to a volume that the member writes to: each
// keeps the volume until its node has proved that it is gone.
func takeVolumes(ctx context.Context, tx db.Tx, a Adopted) error {
	var written []string
	for _, u := range a.Volumes {
		if !u.ReadOnly {
			written = append(written, u.VolumeID)
		}
	}
	if len(written) == 0 {
		return nil
	}
	return tx.Queue(ctx, `UPDATE reserved_volumes SET read_only = TRUE WHERE volume_id = ANY($1::UUID[])
		AND member_id <> $2 AND NOT read_only`, written, a.MemberID)
}

// EndClaim ends a claim on an accelerator of a node that a newer state gives to others, and what members have of it.
func EndClaim(ctx context.Context, tx db.Tx, nodeID string, c plan.RecordedClaim, now time.Time) error {
	if err := tx.Queue(ctx, `UPDATE claims SET released_at = $4 WHERE node_id = $1 AND accelerator_id = $2
		AND allocation_id = $3 AND released_at IS NULL`, nodeID, c.AcceleratorID, c.AllocationID, now); err != nil {
		return err
	}
	return tx.Queue(ctx, `DELETE FROM reserved_accelerators WHERE node_id = $1 AND accelerator_id = $2
		AND allocation_id = $3 AND freed_at IS NULL`, nodeID, c.AcceleratorID, c.AllocationID)
}

// ClaimsOn lists the active claims on a node's accelerators.
func ClaimsOn(ctx context.Context, tx db.Tx, nodeID string) ([]plan.RecordedClaim, error) {
	held, _, err := SnapshotFor(ctx, tx, nodeID)
	if err != nil {
		return nil, err
	}
	var out []plan.RecordedClaim
	for _, a := range held {
		for _, id := range a.AcceleratorIDs {
			out = append(out, plan.RecordedClaim{AcceleratorID: id, AllocationID: a.ID, OrgID: a.OrgID})
		}
	}
	return out, nil
}

// AdoptVolumes records the volumes of a node that a restored hub does not know, and of the others that they were
// enlarged, restored or, where the state that names them is newer than the rows, deleted. The names of the former,
// whose changes have no status before, are lost.
func AdoptVolumes(ctx context.Context, tx db.Tx, nodeID string, named []*protocol.ProjectVolume, newer bool,
	correlationID string, now time.Time,
) (adopted []VolumeChange, err error) {
	if newer {
		if adopted, err = adoptDeleted(ctx, tx, nodeID, named, now); err != nil {
			return nil, err
		}
	}
	for _, p := range named {
		if p.GetDeleted() || !db.IsID(p.GetId()) {
			continue
		}
		known, err := selectVolumes(ctx, tx, `WHERE v.id = $1`, p.GetId())
		if err != nil {
			return nil, err
		}
		if len(known) > 0 {
			v, changed := known[0].adopt(p)
			if !changed {
				continue
			}
			if v, err = v.changed(ctx, tx, now); err != nil {
				return nil, err
			}
			adopted = append(adopted, VolumeChange{Volume: v, Before: known[0].Status})
			continue
		}
		v := Volume{
			ID: p.GetId(), OrgID: p.GetOrgId(), ProjectID: p.GetProjectId(), NodeID: nodeID, Name: "recovered-" + p.GetId(),
			SizeBytes: int64(p.GetSizeBytes()), Status: VolumePending, RestoreNo: int64(p.GetRestoreNo()),
			RestoreSnapshotID: p.GetRestoreSnapshotId(), RequestedBy: principal.Actor{Type: principal.Recovery},
			CorrelationID: correlationID, ResourceVersion: 1, CreatedAt: now, UpdatedAt: now,
		}
		if p.GetMade() {
			v.Status, v.ReadyAt, v.MadeBytes = VolumeReady, now, v.SizeBytes
		}
		if err := insertVolume(ctx, tx, v); err != nil {
			return nil, err
		}
		if v.Status == VolumeReady {
			if err := updateVolume(ctx, tx, v); err != nil {
				return nil, err
			}
		}
		adopted = append(adopted, VolumeChange{Volume: v})
	}
	return adopted, nil
}

// adoptDeleted has the volumes deleted that a newer state does not name any more, or only to be deleted: it would name
// each other one. The node reports them as deleted.
func adoptDeleted(ctx context.Context, tx db.Tx, nodeID string, named []*protocol.ProjectVolume, now time.Time,
) (deleted []VolumeChange, err error) {
	volumes, _, err := volumesOf(ctx, tx, nodeID)
	if err != nil {
		return nil, err
	}
	for _, v := range volumes {
		before := v.Status
		kept := slices.ContainsFunc(named, func(p *protocol.ProjectVolume) bool {
			return p.GetId() == v.ID && !p.GetDeleted()
		})
		if kept || before == VolumeDeleting {
			continue
		}
		v.Status, v.StatusReason, v.Detail = VolumeDeleting, "", ""
		if v, err = v.changed(ctx, tx, now); err != nil {
			return nil, err
		}
		deleted = append(deleted, VolumeChange{Volume: v, Before: before})
	}
	return deleted, nil
}

// adopt takes over a larger size, and a later restore: under the number of one that it has done, the node would do no
// other. The node's next report ends both.
func (v Volume) adopt(p *protocol.ProjectVolume) (_ Volume, changed bool) {
	size, restores := int64(p.GetSizeBytes()), int64(p.GetRestoreNo())
	larger, restored := size > v.SizeBytes, restores > v.RestoreNo
	usable := v.Status == VolumeReady || v.Status == VolumeResizing
	if larger {
		v.SizeBytes = size
		if usable {
			v.Status = VolumeResizing
		}
	}
	if restored {
		v.RestoreNo, v.RestoreSnapshotID = restores, p.GetRestoreSnapshotId()
		if usable {
			v.Status = VolumeRestoring
		}
	}
	return v, larger || restored
}
