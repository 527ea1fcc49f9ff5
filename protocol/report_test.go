package protocol_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/protocol"
)

// Volumes and environments are made by tenants: as many as a node may have must not end its session for all others. No
// member adds to what they may take.
func TestAReportOfAllVolumesAndEnvironmentsIsNotTooLarge(t *testing.T) {
	id := strings.Repeat("0", 36)
	report := &protocol.Report{Accelerators: manySlices()}
	for range protocol.MaxVolumes {
		v := &protocol.VolumeStatus{
			Id: id, Status: protocol.VolumeStatus_READY, SizeBytes: 1 << 40, RestoreNo: 1000, Reason: "volume_no_space",
			Detail: "The node's disk has no room for the 1048576 MiB of a volume or of its snapshot.",
		}
		for range 2 * protocol.MaxSnapshots { // those of the state, and others that the node keeps
			v.Snapshots = append(v.Snapshots, &protocol.SnapshotStatus{
				Id: id, Status: protocol.VolumeStatus_READY, SizeBytes: 1 << 40,
			})
		}
		report.Volumes = append(report.Volumes, v)
	}
	const requirementBytes = 96 << 10 // of all environments together
	for range protocol.MaxEnvironments {
		e := &protocol.InstalledEnvironment{
			ProjectId: id, Digest: strings.Repeat("0", 64), Image: strings.Repeat("r", 255) + strings.Repeat("0", 72),
			SizeBytes: 1 << 40, BuiltAt: timestamppb.Now(), UsedAt: timestamppb.Now(),
			Requirements: []string{strings.Repeat("p", requirementBytes/protocol.MaxEnvironments)},
		}
		for range protocol.MaxEnvironmentUsers {
			e.UsedBy = append(e.UsedBy, id)
		}
		report.Environments = append(report.Environments, e)
	}
	message := &protocol.NodeMessage{Message: &protocol.NodeMessage_Report{Report: report}}
	require.Less(t, proto.Size(message), protocol.MaxReportBytes(0))
}
