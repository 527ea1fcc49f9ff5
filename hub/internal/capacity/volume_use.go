package capacity

import (
	"context"
	"slices"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// VolumeUse is a volume that a member has.
type VolumeUse struct {
	VolumeID string
	ReadOnly bool
}

// volumeUses returns the volumes of the project that services mount; one that any of them may write to is written.
func volumeUses(services []*protocol.Service) (uses []VolumeUse) {
	for _, s := range services {
		for _, m := range s.GetVolumes() {
			at := slices.IndexFunc(uses, func(u VolumeUse) bool { return u.VolumeID == m.GetVolumeId() })
			switch {
			case m.GetVolumeId() == "":
			case at < 0:
				uses = append(uses, VolumeUse{VolumeID: m.GetVolumeId(), ReadOnly: m.GetReadOnly()})
			default:
				uses[at].ReadOnly = uses[at].ReadOnly && m.GetReadOnly()
			}
		}
	}
	return uses
}

// Usable reports as a fault that containers cannot have the volume now.
func (v Volume) Usable() error {
	if v.Status != VolumeReady && v.Status != VolumeResizing {
		return errVolumeStatus(v)
	}
	return nil
}

// CheckVolumesOf reports as a fault that containers of a member cannot have one of its volumes now.
func CheckVolumesOf(ctx context.Context, tx db.Tx, memberID string) error {
	volumes, err := selectVolumes(ctx, tx, `WHERE v.id IN (SELECT volume_id FROM reserved_volumes WHERE member_id = $1)
		ORDER BY v.id`, memberID)
	for _, v := range volumes {
		if err := v.Usable(); err != nil {
			return err
		}
	}
	return err
}

// ReserveVolumes gives a member the project's volumes that its services mount, beside those that it has.
func ReserveVolumes(ctx context.Context, tx db.Tx, memberID, allocationID string, services []*protocol.Service) error {
	return reserveVolumes(ctx, tx, memberID, allocationID, volumeUses(services))
}

// reserveVolumes relies on the unique index on writers where two members ask at the same time.
func reserveVolumes(ctx context.Context, tx db.Tx, memberID, allocationID string, uses []VolumeUse) error {
	for _, u := range uses {
		tag, err := tx.Exec(ctx, `INSERT INTO reserved_volumes (volume_id, member_id, allocation_id, read_only)
			SELECT $1::UUID, $2::UUID, $3::UUID, $4::BOOL WHERE $4::BOOL OR NOT EXISTS (
				SELECT 1 FROM reserved_volumes w WHERE w.volume_id = $1 AND NOT w.read_only AND w.member_id <> $2)
			ON CONFLICT (volume_id, member_id) DO UPDATE SET read_only = reserved_volumes.read_only AND excluded.read_only`,
			u.VolumeID, memberID, allocationID, u.ReadOnly)
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			return fault.New(fault.Conflict, codeVolumeInUse, "Another app instance writes to the volume; a volume has one "+
				"writer.", nil).WithField("/volumes", "names a volume that another instance writes to")
		}
	}
	return nil
}

// keepVolumes ends a member's use of all other volumes. Those of these that it only reads may have another writer now.
func keepVolumes(ctx context.Context, tx db.Tx, memberID string, uses []VolumeUse) error {
	kept, read := []string{}, []string{}
	for _, u := range uses {
		kept = append(kept, u.VolumeID)
		if u.ReadOnly {
			read = append(read, u.VolumeID)
		}
	}
	if len(read) > 0 {
		if err := tx.Queue(ctx, `UPDATE reserved_volumes SET read_only = TRUE WHERE member_id = $1
			AND volume_id = ANY($2::UUID[])`, memberID, read); err != nil {
			return err
		}
	}
	return tx.Queue(ctx, `DELETE FROM reserved_volumes WHERE member_id = $1 AND volume_id <> ALL($2::UUID[])`, memberID,
		kept)
}
