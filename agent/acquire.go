package agent

import (
	"slices"

	"github.com/gpuaas/gpuaas/protocol"
)

// mayTry reports whether the pause after the service's last failure is over. One that is never restarted has one try.
func (d *differ) mayTry(w Workload, s Service) bool {
	m := d.observed.Members[w.MemberID]
	t := m.Services[s.Name].of(w.Revision)
	once := s.Spec.GetRestartPolicy() == protocol.Service_NEVER && t.Reason != protocol.WorkloadStatus_IMAGE_PULL_FAILED
	return !m.of(w.Revision).pausing(d.now) && !t.pausing(d.now) && (!once || !t.GaveUp) && !d.busy(w.MemberID, s.Name)
}

// acquire gets what the workload lacks beside images, for which it does not wait. Containers wait for their image and
// for the networks of all services, whose addresses they are given, and are created in parallel to these.
func (d *differ) acquire(w Workload) {
	services, installs := w.Services, d.installs(w)
	if len(installs) > 0 {
		services = installs
	}
	var lacking, unpublished []string
	for _, s := range services {
		if !d.hasNetwork(w, s) && (!s.BuildsEnvironment || !d.completed(w, s)) {
			lacking = append(lacking, s.Name)
			if len(installs) > 0 || startsBeside(s) && d.anyBeside(w) {
				unpublished = append(unpublished, s.Name)
			}
		}
	}
	if len(lacking) == 0 {
		for _, start := range d.starts(w, services) {
			d.add(start)
		}
		return
	}
	m, busy := d.observed.Members[w.MemberID], d.observed.Busy[w.MemberID]
	if busy.any() || m.of(w.Revision).pausing(d.now) || !slices.ContainsFunc(w.Services, func(s Service) bool {
		return slices.Contains(lacking, s.Name) && d.mayTry(w, s)
	}) {
		return
	}
	d.add(SetupNetwork{
		MemberID: w.MemberID, Revision: w.Revision, Workload: w, Services: lacking, Unpublished: unpublished,
		Start: d.starts(w, services),
	})
}

// starts are the containers that the workload lacks of these services, whose image is there, whose dependencies are
// met, and whose accelerators are free and work.
func (d *differ) starts(w Workload, services []Service) []StartContainer {
	var starts []StartContainer
	for _, s := range services {
		state, _ := d.unusable(s.AcceleratorIDs)
		if state != 0 || d.isTaken(w, s) || d.awaitsVolume(w, s) || d.anyInUse(s.AcceleratorIDs) || !d.hasImages(s) ||
			d.completed(w, s) || !d.mayTry(w, s) || d.unmet(w, s) != "" || !d.mayBuild(w, s) {
			continue
		}
		for _, id := range s.AcceleratorIDs {
			d.inUse[id] = true
		}
		starts = append(starts, StartContainer{
			MemberID: w.MemberID, Revision: w.Revision, LeaseNo: d.leases[w.MemberID].No, Workload: w, Service: s,
		})
	}
	return starts
}

// isTaken reports whether a container stands where the service's is to start.
func (d *differ) isTaken(w Workload, s Service) bool {
	return slices.ContainsFunc(d.containers[w.MemberID], func(c Container) bool {
		return c.Service == s.Name && !d.servesBeside(w, c)
	})
}

// awaitsVolume reports whether a container that is being replaced may still write to a volume of the service: what it
// writes belongs to the content before an upgrade, which is kept for a fallback.
func (d *differ) awaitsVolume(w Workload, s Service) bool {
	return len(s.Spec.GetVolumes()) > 0 && slices.ContainsFunc(d.containers[w.MemberID], func(c Container) bool {
		if c.Status == Exited || isCurrent(w, c) {
			return false
		}
		before, had := d.fallbackService(w, Service{Name: c.Service})
		now, has := serviceNamed(w, c.Service)
		return !had && !has || sharesVolume(s, before) || sharesVolume(s, now)
	})
}

// movesWithVolume reports whether the container of an unchanged service is replaced all the same: it shares a volume
// that is kept before an upgrade with a service that the upgrade replaces, or shared one with a service that returns.
func movesWithVolume(w Workload, c Container, s Service) bool {
	return slices.ContainsFunc(w.Services, func(o Service) bool {
		if o.Name == s.Name || !slices.ContainsFunc(shared(s, o), (*protocol.VolumeMount).GetSnapshotOnUpgrade) {
			return false
		}
		before, had := o, true
		if w.Fallback != nil {
			before, had = serviceNamed(*w.Fallback, o.Name)
		}
		return w.RollsBack || c.Revision > w.Revision || !had || before.SpecDigest != o.SpecDigest
	})
}

func sharesVolume(a, b Service) bool { return len(shared(a, b)) > 0 }

// shared are the volumes of a service that another one has, too.
func shared(a, b Service) []*protocol.VolumeMount {
	return slices.DeleteFunc(slices.Clone(a.Spec.GetVolumes()), func(v *protocol.VolumeMount) bool {
		return !slices.ContainsFunc(b.Spec.GetVolumes(), func(o *protocol.VolumeMount) bool {
			return v.GetName() == o.GetName()
		})
	})
}

// unmet is the first service that the service waits for; empty where it waits for none.
func (d *differ) unmet(w Workload, s Service) string {
	for _, dep := range s.DependsOn {
		on, known := serviceNamed(w, dep.Service)
		met := known && d.completed(w, on)
		if dep.Condition != protocol.Dependency_SERVICE_COMPLETED_SUCCESSFULLY {
			met = met || slices.ContainsFunc(d.containers[w.MemberID], func(c Container) bool {
				return c.Service == dep.Service && c.Status == Running && isCurrent(w, c) &&
					(dep.Condition != protocol.Dependency_SERVICE_HEALTHY || isReady(w, c) && !c.Failing)
			})
		}
		if !met {
			return dep.Service
		}
	}
	return ""
}

// pull pulls the images of the services that have no container yet, if they may be tried; beside says that the fallback
// goes on meanwhile.
func (d *differ) pull(w Workload, beside bool) {
	at := map[string]int{} // index of the image's action
	for _, s := range w.Services {
		if !d.needsImages(w, s) || !d.mayTry(w, s) {
			continue
		}
		for _, image := range s.Images {
			if d.observed.Images[image] || slices.Contains(d.observed.Busy[w.MemberID].Pulling, image) {
				continue
			}
			if i, pulled := at[image]; pulled {
				pull, _ := d.actions[i].(PullImage)
				pull.Services = append(pull.Services, s.Name)
				d.actions[i] = pull
				continue
			}
			at[image] = len(d.actions)
			d.add(PullImage{
				MemberID: w.MemberID, OrgID: w.OrgID, Revision: w.Revision, Image: image, Services: []string{s.Name},
				Beside: beside,
			})
		}
	}
}

// lacksImages reports whether a service cannot start as its image is missing.
func (d *differ) lacksImages(w Workload) bool {
	return slices.ContainsFunc(w.Services, func(s Service) bool { return d.needsImages(w, s) })
}

func (d *differ) needsImages(w Workload, s Service) bool {
	return !d.hasImages(s) && !d.hasCurrent(w, s) && !d.completed(w, s)
}

func (d *differ) hasImages(s Service) bool {
	return !slices.ContainsFunc(s.Images, func(image string) bool { return !d.observed.Images[image] })
}
