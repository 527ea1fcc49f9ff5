package command

import (
	"context"
	"fmt"
	"slices"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

// checkVolumeSizes refuses the choice of a size for a volume of the project, which has its own.
func checkVolumeSizes(chosen manifest.Choice) error {
	for n, v := range chosen.Volumes {
		if v.VolumeID != "" && v.SizeMiB != 0 {
			return fault.New(fault.Unprocessable, manifest.CodeResourcesInvalid, "A volume of the project has a size of its "+
				"own.", nil).WithField(fmt.Sprintf("/volumes/%d/size_mib", n), "does not go with volume_id").Permanent()
		}
	}
	return nil
}

// chooseVolumes fills in the sizes of the chosen volumes of the project. It returns the node that keeps them; empty
// where none is chosen.
func chooseVolumes(ctx context.Context, tx db.Tx, projectID string,
	chosen manifest.Choice,
) (manifest.Choice, string, error) {
	nodeID := ""
	chosen.Volumes = slices.Clone(chosen.Volumes)
	for n, c := range chosen.Volumes {
		if c.VolumeID == "" {
			continue
		}
		at := fmt.Sprintf("/volumes/%d/volume_id", n)
		v, err := capacity.GetVolume(ctx, tx, projectID, c.VolumeID)
		if fault.Is(err, fault.NotFound) {
			return chosen, "", fault.New(fault.Unprocessable, codeVolumeUnknown, "There is no such volume in this project.",
				nil).WithField(at, "names no volume of this project")
		}
		if err != nil {
			return chosen, "", err
		}
		if err := v.Usable(); err != nil {
			return chosen, "", fault.As(err).WithField(at, "names a volume that is not ready")
		}
		if nodeID != "" && v.NodeID != nodeID {
			return chosen, "", errVolumeElsewhere("The volumes are on different nodes.").WithField(at, "is on another node")
		}
		nodeID, chosen.Volumes[n].SizeMiB = v.NodeID, uint64(v.SizeBytes)>>20
	}
	return chosen, nodeID, nil
}

func errVolumeElsewhere(public string) *fault.Error {
	return fault.New(fault.Conflict, capacity.CodeVolumeElsewhere, public, nil)
}

// onNode leaves the candidates on the node that keeps the chosen volumes; all where no volume is chosen.
func onNode(candidates []capacity.Candidate, nodeID string) ([]capacity.Candidate, error) {
	if nodeID == "" {
		return candidates, nil
	}
	there := slices.DeleteFunc(candidates, func(c capacity.Candidate) bool { return c.NodeID != nodeID })
	if len(there) == 0 {
		return nil, errVolumeElsewhere("The volume is kept by another node than the allocation; create or name an "+
			"allocation on node "+nodeID+".").WithField("/placement_intent/allocation_ids", "is not on the volume's node")
	}
	return there, nil
}

// chooseVolumesInPlace is chooseVolumes for an upgrade: the volumes must be on the node of the members.
func chooseVolumesInPlace(ctx context.Context, tx db.Tx, i instance.Instance, asked, chosen manifest.Choice,
) (manifest.Choice, error) {
	if err := checkVolumeSizes(asked); err != nil {
		return chosen, err
	}
	chosen, nodeID, err := chooseVolumes(ctx, tx, i.ProjectID, chosen)
	if err != nil {
		return chosen, err
	}
	for _, m := range i.Members {
		if nodeID != "" && !m.Gone && m.NodeID != nodeID {
			return chosen, errVolumeElsewhere("The volume is kept by another node than the app instance.").
				WithField("/volumes", "names a volume of another node")
		}
	}
	return chosen, nil
}

// checkVolumesReady refuses to start containers while a volume of theirs is being restored, or is missing.
func checkVolumesReady(ctx context.Context, tx db.Tx, i instance.Instance) error {
	for _, m := range i.Members {
		if m.Gone {
			continue
		}
		if err := capacity.CheckVolumesOf(ctx, tx, m.ID); err != nil {
			return err
		}
	}
	return nil
}
