package protocol

// Byte limits of what crosses the wire. A longer message is refused with Nack_TOO_LARGE before it is read.
const (
	// MaxControlBytes limits one HubMessage, and a NodeMessage that carries a StateUpload.
	MaxControlBytes = 8 << 20
	// MaxHelloBytes limits the first message of a node, which a hub reads before it knows more than the certificate. It
	// names the node's accelerators: sixteen of 48 slices each need a third of it.
	MaxHelloBytes = 256 << 10
	// MaxReportBaseBytes and MaxReportMemberBytes limit every other NodeMessage: base + members of the node × member
	// bytes. All volumes with their snapshots, environments and slices of a node need two thirds of the base.
	MaxReportBaseBytes   = 1 << 20
	MaxReportMemberBytes = 16 << 10
	// MaxEnvelopeBytes limits the payload of one signed document.
	MaxEnvelopeBytes = 4 << 20
	// MaxBundleBytes limits the payload of a trust bundle.
	MaxBundleBytes = 256 << 10
	// MaxManifestBytes limits the payload of a manifest.
	MaxManifestBytes = 256 << 10
	// MaxWorkloadBytes limits one Workload document.
	MaxWorkloadBytes = 1 << 20
	// MaxPushPartsBytes limits all parts carried inside one PushState; the node fetches the others.
	MaxPushPartsBytes = 2 << 20
	// MaxSegmentBytes limits one signed usage segment.
	MaxSegmentBytes = 1 << 20
	// MaxRefusalBytes limits one signed refusal of a node's owner.
	MaxRefusalBytes = 4 << 10
	// MaxSealingKeyBytes limits one signed sealing key.
	MaxSealingKeyBytes = 1 << 10
	// MaxFetchBytes limits one FetchResponse.
	MaxFetchBytes = 2 << 20
	// MinVolumeBytes is the smallest size of a volume: below it, its file system has no room for a journal.
	MinVolumeBytes = 16 << 20
	// MaxHeaderBytes limits StreamHeader, FetchRequest, TunnelRequest and TunnelResponse.
	MaxHeaderBytes = 64 << 10
)

// Counts that a valid document never exceeds.
const (
	// MaxElements limits the nested messages and list entries of one message, counted on the wire before it is decoded: 16
	// for each of MaxParts members in a report.
	MaxElements = 1 << 16
	// MaxAccelerators limits the accelerators of one node; those beyond it are left out.
	MaxAccelerators = 256
	// MaxAcceleratorParts limits the links, and the partitions, of one accelerator; those beyond it are left out.
	MaxAcceleratorParts = 64
	// MaxEnvironments limits the environments of a node, which removes an unused one before it installs one more. Half of
	// them are one org's at most.
	MaxEnvironments = 64
	// MaxEnvironmentUsers limits the users of one environment in a report; those beyond are left out.
	MaxEnvironmentUsers = 16
	// MaxConditions limits the conditions, and the features, of one node; those beyond it are left out.
	MaxConditions = 64
	// MaxSignatures limits the signatures of one envelope.
	MaxSignatures = 16
	// MaxMinVersions limits how many apps have a lowest version in a trust bundle.
	MaxMinVersions = 1024
	// MaxParts limits the workloads of one node.
	MaxParts = 4096
	// MaxVolumes limits the volumes of projects on one node.
	MaxVolumes = 256
	// MaxSSHKeys limits the SSH keys of one node.
	MaxSSHKeys = 1024
	// MaxSSHKeyBytes limits one of them: an RSA key of 8192 bits has 1 KiB.
	MaxSSHKeyBytes = 2 << 10
	// MaxSnapshots limits the snapshots of one volume.
	MaxSnapshots = 16
	// MaxLeases limits the leases of one batch.
	MaxLeases = 4096
	// MaxSegmentRecords limits the records of one usage segment.
	MaxSegmentRecords = 4096
)

// MaxReportBytes limits a NodeMessage of a node with so many members.
func MaxReportBytes(members int) int {
	return min(MaxReportBaseBytes+members*MaxReportMemberBytes, MaxControlBytes)
}
