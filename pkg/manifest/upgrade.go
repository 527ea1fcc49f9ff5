package manifest

import (
	"slices"

	"github.com/gpuaas/gpuaas/protocol"
)

// FeatureStartFirst is an upgrade whose container starts beside the one that serves.
const FeatureStartFirst = "start_first"

// Upgrade says how the version replaces the one that runs.
type Upgrade struct {
	// Strategy is UpgradeRecreate or UpgradeStartFirst; empty means UpgradeRecreate.
	Strategy string `json:"strategy,omitempty"`
}

// Values of Upgrade.Strategy.
const (
	// UpgradeRecreate ends the container of the version before, then starts the new one.
	UpgradeRecreate = "recreate"
	// UpgradeStartFirst starts the containers that differ beside those that serve, moves the published ports once all are
	// ready, then ends the others.
	UpgradeStartFirst = "start_first"
)

// Changed returns the services of a version that nodes make anew when it replaces the one that serves, all for the same
// member. Where those cannot start beside the others, why says so: two containers never share an accelerator or a
// volume.
func Changed(serves, next *protocol.Workload) (changed []*protocol.Service, why string) {
	before, after := protocol.SpecDigests(serves), protocol.SpecDigests(next)
	note := func(s *protocol.Service, of string) {
		switch {
		case why != "" || s.GetEnvironment().GetBuilds():
		case len(s.GetResources().GetAcceleratorIds()) > 0:
			why = of + " has accelerators"
		case len(s.GetVolumes()) > 0:
			why = of + " has volumes"
		}
	}
	if len(serves.GetServices()) == 0 {
		why = "no version serves"
	}
	for _, s := range next.GetServices() {
		if before[s.GetName()] != after[s.GetName()] {
			changed = append(changed, s)
			note(s, "service "+s.GetName())
		}
	}
	for _, s := range serves.GetServices() {
		if before[s.GetName()] != after[s.GetName()] {
			note(s, "service "+s.GetName()+" of the version before")
		}
	}
	return changed, why
}

// startsFirst reports whether the version asks for start_first.
func (m Manifest) startsFirst() bool { return m.Version.Upgrade.Strategy == UpgradeStartFirst }

// checkUpgrade finds a strategy that no service could follow.
func (m Manifest) checkUpgrade(f *findings) {
	services := m.Version.RuntimeProfile.All()
	if m.startsFirst() && !slices.ContainsFunc(services, func(s Service) bool { return len(s.Volumes) == 0 }) {
		f.add("/version/upgrade/strategy", "start_first needs a service without volumes, which two containers never share")
	}
}

// lowerUpgrade marks a service that may run twice for a while.
func (m Manifest) lowerUpgrade(s *protocol.Service, shape Shape) {
	s.StartFirst = m.startsFirst() && len(s.GetVolumes()) == 0 && len(s.GetResources().GetAcceleratorIds()) == 0
	s.Recreate = s.GetStartFirst() && shape.Recreate
}
