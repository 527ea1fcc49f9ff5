package protocol

// Byte limits of what crosses the wire. A longer message is refused with RefusalTooLarge before it is read.
const (
	// MaxControlBytes limits one NodeMessage or HubMessage.
	MaxControlBytes = 8 << 20
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
	// MaxFetchBytes limits one FetchResponse.
	MaxFetchBytes = 2 << 20
	// MaxHeaderBytes limits StreamHeader, FetchRequest, TunnelRequest and TunnelResponse.
	MaxHeaderBytes = 64 << 10
)

// Counts that a valid document never exceeds.
const (
	// MaxSignatures limits the signatures of one envelope.
	MaxSignatures = 16
	// MaxParts limits the workloads of one node.
	MaxParts = 4096
	// MaxLeases limits the leases of one batch.
	MaxLeases = 4096
	// MaxSegmentRecords limits the records of one usage segment.
	MaxSegmentRecords = 4096
)
