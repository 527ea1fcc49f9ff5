package protocol

import "slices"

// What a RemovalProof must name as absent: the node searched each of these kinds and found none that belonged to the
// member (docs/design/laws.md, law 9). Cached images and persistent volumes stay and are not listed.
const (
	AbsentProcess          = "process"
	AbsentContainer        = "container"
	AbsentSnapshot         = "snapshot"
	AbsentCgroup           = "cgroup"
	AbsentNetworkNamespace = "network_namespace"
	AbsentAddress          = "address"
	AbsentPort             = "port"
	AbsentRule             = "rule"
	AbsentDeviceClaim      = "device_claim"
	AbsentScratch          = "scratch"
	AbsentLog              = "log"
	AbsentSecret           = "secret"
)

// RemovalKinds lists every kind that a complete proof names.
func RemovalKinds() []string {
	return []string{
		AbsentProcess, AbsentContainer, AbsentSnapshot, AbsentCgroup, AbsentNetworkNamespace, AbsentAddress,
		AbsentPort, AbsentRule, AbsentDeviceClaim, AbsentScratch, AbsentLog, AbsentSecret,
	}
}

// Complete reports whether the proof has a time and names every kind.
func (p *RemovalProof) Complete() bool {
	if p.GetAt() == nil {
		return false
	}
	for _, kind := range RemovalKinds() {
		if !slices.Contains(p.GetAbsent(), kind) {
			return false
		}
	}
	return true
}
