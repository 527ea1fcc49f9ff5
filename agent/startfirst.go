package agent

import (
	"slices"
	"strings"
)

// copySeparator parts a service's name from its copy in the name of an attachment; it is in no name of a service.
const copySeparator = "."

// nowhere is the copy that ports lead to while they move: after a crash they are published again.
const nowhere = "?"

func attachmentOf(service, of string) string {
	if of == "" {
		return service
	}
	return service + copySeparator + of
}

// ParseAttachment returns the service that an attachment is of, and its copy; of is empty for the only one.
func ParseAttachment(attachment string) (service, of string) {
	service, of, _ = strings.Cut(attachment, copySeparator)
	return service, of
}

// copyOf names the copies of a service that starts first: as many characters of its spec as no two of them share.
func copyOf(startFirst bool, specDigest string) string {
	const length = 12
	if !startFirst {
		return ""
	}
	return specDigest[:min(length, len(specDigest))]
}

// servesBeside reports whether a container of the fallback goes on while the workload's own are started beside it,
// until the workload has the published ports and was confirmed. One of a service that the workload lacks does as well:
// others may need it.
func (d *differ) servesBeside(w Workload, c Container) bool {
	if w.Fallback == nil || c.Status != Running || isCurrent(w, c) || !isReady(*w.Fallback, c) || d.hasSwitched(w) {
		return false
	}
	back, _ := serviceNamed(*w.Fallback, c.Service)
	s, known := serviceNamed(w, c.Service)
	if !known {
		return isAlone(back) && slices.ContainsFunc(w.Services, startsBeside)
	}
	return startsBeside(s) && s.Copy != c.Copy && isAlone(s) && isAlone(back)
}

func startsBeside(s Service) bool { return s.Copy != "" && !s.Recreate }

// hasSwitched reports whether the workload was confirmed, and has all published ports.
func (d *differ) hasSwitched(w Workload) bool {
	return d.observed.Members[w.MemberID].ConfirmedRevision == w.Revision && d.allPublished(w)
}

// isAlone reports whether a container of the service shares nothing with another one of its member.
func isAlone(s Service) bool { return len(s.AcceleratorIDs) == 0 && len(s.Spec.GetVolumes()) == 0 }

// hasBeside reports whether a container of the fallback serves beside the service.
func (d *differ) hasBeside(w Workload, s Service) bool {
	return slices.ContainsFunc(d.containers[w.MemberID], func(c Container) bool {
		return c.Service == s.Name && d.servesBeside(w, c)
	})
}

// anyBeside reports whether any container of the fallback serves beside the workload.
func (d *differ) anyBeside(w Workload) bool {
	return slices.ContainsFunc(d.containers[w.MemberID], func(c Container) bool { return d.servesBeside(w, c) })
}

// allPublished reports whether the published ports of each service lead to its containers.
func (d *differ) allPublished(w Workload) bool {
	return !slices.ContainsFunc(w.Services, func(s Service) bool { return !d.isPublished(w, s) })
}

// isPublished reports whether the published ports of a service lead to its containers.
func (d *differ) isPublished(w Workload, s Service) bool {
	return d.observed.Members[w.MemberID].Services[s.Name].Published == s.Copy
}

// hasReady reports whether a container serves as the service.
func (d *differ) hasReady(w Workload, s Service) bool {
	return slices.ContainsFunc(d.containers[w.MemberID], func(c Container) bool {
		return c.Service == s.Name && isReady(w, c)
	})
}

// publish leads published ports to the workload's own containers once all are ready, or where none of the fallback
// serves beside them, else to those. It reports whether anything has to wait for that.
func (d *differ) publish(w Workload) (due bool) {
	waits := !d.allServe(w) && d.anyBeside(w)
	for _, s := range w.Services {
		to := w
		if waits && d.hasBeside(w, s) {
			to = *w.Fallback
			s, _ = serviceNamed(to, s.Name)
		} else if _, had := d.fallbackService(w, s); waits && startsBeside(s) && !had {
			continue // a new service gets its ports with the others
		}
		if !d.isPublished(w, s) && d.hasNetwork(w, s) && d.mayTry(w, s) {
			d.add(PublishPorts{MemberID: w.MemberID, Revision: w.Revision, Workload: to, Service: s})
			due = true
		}
	}
	return due
}

func (d *differ) fallbackService(w Workload, s Service) (Service, bool) {
	if w.Fallback == nil {
		return Service{}, false
	}
	return serviceNamed(*w.Fallback, s.Name)
}

// runsUnknown reports whether a container of a service runs that the workload lacks.
func (d *differ) runsUnknown(w Workload) bool {
	return slices.ContainsFunc(d.containers[w.MemberID], func(c Container) bool {
		_, known := serviceNamed(w, c.Service)
		return !known && c.Status == Running
	})
}

// runsOther reports whether another copy of the service runs, which may still have connections.
func (d *differ) runsOther(memberID string, s Service) bool {
	return slices.ContainsFunc(d.containers[memberID], func(c Container) bool {
		return c.Service == s.Name && c.Copy != s.Copy && c.Status == Running
	})
}

// hasNetwork reports whether the network of the service's containers is usable.
func (d *differ) hasNetwork(w Workload, s Service) bool {
	return slices.ContainsFunc(d.networks[w.MemberID], func(n Network) bool {
		return n.Service == s.Name && n.Copy == s.Copy && n.Ready && n.PortsDigest == s.PortsDigest
	})
}

// uses reports whether a container of the member is attached to the network.
func (d *differ) uses(n Network) bool {
	return slices.ContainsFunc(d.containers[n.MemberID], func(c Container) bool {
		return c.Service == n.Service && c.Copy == n.Copy
	})
}

// IsPublished reports whether the published ports of a service lead to containers of it, also while they move.
func (m Member) IsPublished(service string) bool {
	to := m.Services[service].Published
	return to == nowhere || m.Services[attachmentOf(service, to)].NetworkReady
}

// Network is the attachment of this name as it was recorded.
func (m Member) Network(attachment string) Network {
	r := m.Services[attachment]
	service, of := ParseAttachment(attachment)
	return Network{MemberID: m.ID, Service: service, Copy: of, PortsDigest: r.PortsDigest, Ready: r.NetworkReady}
}
