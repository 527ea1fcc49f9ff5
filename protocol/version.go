package protocol

// Version is the newest protocol version of this build. Both sides name theirs in Hello and Welcome; the lower one
// counts. Hello, usage upload and release fetch of version 1 are served for ever.
//
// Each change of messages.proto has an entry in the history. Code that exists only for peers or stored documents of an
// earlier release carries the comment COMPAT(version), with the last release that needs it; grep finds what may go.
//
// History:
//
//	1  2026-11-22  first version.
//	1  2026-11-23  Service.config, WorkloadStatus.config_sha256; needs the manifest feature config.
//	1  2026-11-23  Accelerator has address, NUMA node, cores, versions, links and partitions; reports name accelerators.
//	1  2026-11-23  TunnelRequest.connect, exec and copy; an agent without them answers FEATURE_MISSING.
//	1  2026-11-23  Resources.shm_bytes; needs the manifest feature resources.
//	1  2026-11-23  Port.host_port, NodeFacts.host_ports; needs the feature host_ports.
//	1  2026-11-23  LogsRequest.since; an agent without it sends older lines as well.
//	1  2026-11-23  NodeMessage.pull_progress; a hub that does not know it ignores it.
const Version = 1

// ALPN is the application protocol of a session (RFC 7301).
const ALPN = "gpuaas/1"
