package protocol

// Conditions of a node that the hub's placement depends on. A node may report others; they only inform.
const (
	// ConditionNoUserNamespaces: the root user of a container is the root user of the host.
	ConditionNoUserNamespaces = "user_namespaces_unavailable"
	// ConditionNoSeccomp: containers may call everything that the kernel offers.
	ConditionNoSeccomp = "seccomp_unavailable"
	// ConditionRuncVulnerable: runc lacks the fixes for CVE-2025-31133, CVE-2025-52565 and CVE-2025-52881.
	ConditionRuncVulnerable = "runc_vulnerable"
	// ConditionWeakIsolationShared: the owner lets several orgs use the node in spite of the conditions above.
	ConditionWeakIsolationShared = "weak_isolation_shared"
)

// WeakIsolation lists the conditions that make a node serve one org at a time, unless its owner shares it.
func WeakIsolation() []string {
	return []string{ConditionNoUserNamespaces, ConditionNoSeccomp, ConditionRuncVulnerable}
}
