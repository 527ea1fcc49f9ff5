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
//	1  2026-11-23  Service.aliases to args, Probe thresholds, WorkloadStatus.services; needs the feature services.
//	1  2026-11-23  Service.volumes, Workload.rolls_back; needs the feature volumes.
//	1  2026-11-23  NodeFacts.sealing_key, sealed parameters; needs the manifest feature secret_parameters.
//	1  2026-11-23  DesiredState.volumes, Report.volumes, NodeFacts.volume_bytes; needs the feature project_volumes.
//	1  2026-11-23  Accelerator.health_reason, more values of health; a hub counts those that it does not know as not ok.
//	1  2026-11-23  Service.environment, the reason environment_failed; needs the feature environments.
//	1  2026-11-23  Report.environments, TunnelRequest.remove_environment, IN_USE; an older agent has no environments.
//	1  2026-11-23  Service.start_first; needs the manifest feature start_first.
//	1  2026-11-23  AcceleratorPartition.sharing, Resources.accelerator_sharing; needs the feature accelerator_sharing.
//	1  2026-11-23  Service.recreate; an older agent starts beside the fallback where there is no room reserved.
//	1  2026-11-23  Service.secrets; needs the manifest feature secret_delivery.
//	1  2026-11-24  DesiredState.ssh_keys; needs the feature ssh_keys.
//	1  2026-11-24  Workload.traceparent to runtime_backend, PushState.traceparent, WorkloadStatus.traceparent and the
//	               traceparent of streams; a peer without them ends the trace.
const Version = 1

// ALPN is the application protocol of a session (RFC 7301).
const ALPN = "gpuaas/1"
