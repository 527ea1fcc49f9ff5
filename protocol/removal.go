package protocol

import "slices"

// What a RemovalProof must name as absent: the node searched each of these kinds and found none that belonged to the
// member (docs/design/laws.md, law 9). Cached images and the volumes of projects stay.
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
	// AbsentVolume: the volumes that live as long as the member.
	AbsentVolume = "volume"
)

// RemovalKinds lists every kind that a complete proof names.
func RemovalKinds() []string {
	return []string{
		AbsentProcess, AbsentContainer, AbsentSnapshot, AbsentCgroup, AbsentNetworkNamespace, AbsentAddress,
		AbsentPort, AbsentRule, AbsentDeviceClaim, AbsentScratch, AbsentLog, AbsentSecret,
		AbsentVolume,
	}
}

// Complete reports whether the proof has a time and names every kind.
func (p *RemovalProof) Complete() bool {
	if p.GetAt() == nil {
		return false
	}
	for _, kind := range RemovalKinds() {
		if kind == AbsentVolume {
			continue // COMPAT(1): an agent without the feature volumes has none and names none
		}
		if !slices.Contains(p.GetAbsent(), kind) {
			return false
		}
	}
	return true
}
