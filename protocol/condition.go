package protocol

// Conditions that a node reports with its facts and its reports. The hub's placement depends on those of WeakIsolation
// and on ConditionWeakIsolationShared; the others inform.
const (
	// ConditionNoUserNamespaces: the root user of a container is the root user of the host.
	ConditionNoUserNamespaces = "user_namespaces_unavailable"
	// ConditionNoSeccomp: containers may call everything that the kernel offers.
	ConditionNoSeccomp = "seccomp_unavailable"
	// ConditionRuncVulnerable: the runc of the host lacks the fixes for CVE-2025-31133, CVE-2025-52565 and
	// CVE-2025-52881.
	ConditionRuncVulnerable = "runc_vulnerable"
	// ConditionWeakIsolationShared: the owner lets several orgs use the node in spite of the conditions above.
	ConditionWeakIsolationShared = "weak_isolation_shared"

	// ConditionNoMappedMounts: overlay file systems take no idmapped mounts; images are unpacked in the containers' user
	// ids.
	ConditionNoMappedMounts = "idmapped_mounts_unavailable"
	// ConditionNoAppArmor: containers have no AppArmor profile; the kernel or apparmor_parser lacks it.
	ConditionNoAppArmor = "apparmor_unavailable"
	// ConditionNoCoreLimit: root on the host has no CAP_SYS_RESOURCE; containers may dump core.
	ConditionNoCoreLimit = "core_limit_unavailable"
	// ConditionNoSwapLimit: the kernel cannot limit what a container swaps out.
	ConditionNoSwapLimit = "swap_limit_unavailable"
	// ConditionCgroupV1: limits work, but the kernel lacks the newer accounting (pressure, memory.high).
	ConditionCgroupV1 = "cgroup_v1"

	// ConditionFirewallUnguarded: the agent cannot check or repair its firewall table.
	ConditionFirewallUnguarded = "firewall_unguarded"
	// ConditionNoFlowLimits: the kernel cannot limit the flows of a member.
	ConditionNoFlowLimits = "flow_limits_unavailable"
	// ConditionNoFlowTimeouts: the kernel cannot set the timeouts of a member's flows.
	ConditionNoFlowTimeouts = "flow_timeouts_unavailable"
	// ConditionPortInUse: another program took a published port while no agent ran; connections to it reach the member.
	ConditionPortInUse = "published_port_in_use"

	// ConditionDiskFull: a file system of the agent has less than 64 MiB or 1024 inodes free; the node starts nothing new.
	ConditionDiskFull = "disk_full"
	// ConditionSharedDisk: no quota keeps containers from filling the agent's file system; what they write is measured.
	ConditionSharedDisk = "disk_shared_without_quota"
	// ConditionNoVolumes: the machine lacks loop devices, ext4 or e2fsprogs; it has not the feature volumes.
	ConditionNoVolumes = "volumes_unavailable"
	// ConditionStoreLarge: the agent's store takes more than 256 MiB beside usage that waits for the hub.
	ConditionStoreLarge = "agent_store_large"

	// ConditionContainerdUnavailable: no containerd answers at the configured socket.
	ConditionContainerdUnavailable = "containerd_unavailable"
	// ConditionNVIDIAUnresponsive: NVIDIA's driver does not answer; its accelerators are shown as it named them last.
	ConditionNVIDIAUnresponsive = "nvidia_driver_unresponsive"
	// ConditionNotShared: a GPU that the owner wants to share is AMD's or in MIG mode; it is given as without that wish.
	ConditionNotShared = "accelerator_not_shared"
	// ConditionNoMPS: the MPS daemon of a GPU does not start; no container gets a slice of it.
	ConditionNoMPS = "mps_unavailable"
	// ConditionPolicyInvalid: the owner's policy has an error; the last valid one is in force.
	ConditionPolicyInvalid = "policy_invalid"
	// ConditionBundleExpired: the trust bundle is past its end; it stays valid until a newer one arrives.
	ConditionBundleExpired = "trust_bundle_expired"
)

// WeakIsolation lists the conditions that make a node serve one org at a time, unless its owner shares it.
func WeakIsolation() []string {
	return []string{ConditionNoUserNamespaces, ConditionNoSeccomp, ConditionRuncVulnerable}
}
