package protocol

// Version is the protocol that this build speaks best. Hello, usage upload and release fetch of version 1 are served
// for ever.
//
// History:
//
//	1  2026-11-20  first version: hello, desired state, leases, bundle, report, usage, fetch, logs tunnel.
//	   2026-11-21  before any release: Hello.last_session, Welcome.posted_sha256 and quarantined, UsageAck.posted_sha256.
//	2  2026-11-21  a restored hub asks for what a node has accepted: bring in the welcome, brought up the control stream.
//	   2026-11-22  before any release: Workload.first_named_at.
//	   2026-11-22  expires_at and min_versions in bundles; a bundle is fetched as the successor of the one
//	               that the node holds.
const Version = 2

// BringVersion is the first that knows of Brought.
const BringVersion = 2

// ALPN is the application protocol of a session (RFC 7301).
const ALPN = "gpuaas/1"

// Features that a workload may need; an agent lists those that it has in Hello.
const (
	// FeatureSingleService: one container a workload.
	FeatureSingleService = "single_service"
)
