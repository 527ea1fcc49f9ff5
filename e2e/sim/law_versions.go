package sim

import (
	"slices"
	"strings"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/protocol"
)

// versionFacts are what the oracle knows of the versions of a member.
type versionFacts struct {
	// ready are the images of which a container was ready, fallbacks the images to which a node went back from a revision.
	ready     map[string]bool
	fallbacks map[uint64]string
	// targets are the images to which a revision rolls back.
	targets map[uint64]string
}

func newVersionFacts() versionFacts {
	return versionFacts{ready: map[string]bool{}, fallbacks: map[uint64]string{}, targets: map[uint64]string{}}
}

// forget is for a revision that is made, also under the number of one that a restored hub has forgotten.
func (f versionFacts) forget(revision uint64) {
	delete(f.fallbacks, revision)
	delete(f.targets, revision)
}

// appOf is the app of an image.
func appOf(image string) string {
	_, rest, _ := strings.Cut(image, "/")
	app, _, _ := strings.Cut(rest, "/")
	return app
}

// startedVersion checks laws 1 and 15 when a container's process begins.
func (o *oracle) startedVersion(n *node, c *container) {
	if !o.w.cfg.Versions {
		return
	}
	if q := o.w.qualities[c.image]; !q.mayRun() {
		o.w.fail(1, "%s runs %s on %s: it is %s", c.MemberID, c.image, n.id, q)
	}
	if n.refuses(appOf(c.image)) && c.began > n.admissions.since {
		o.w.fail(15, "%s runs on %s, whose owner refuses %s", c.MemberID, n.id, appOf(c.image))
	}
}

// rolledBack checks that a rollback returns to what was ready once.
func (o *oracle) rolledBack(m *memberRow, from, target string) {
	x := o.members[m.id]
	switch {
	case !x.ready[target]:
		o.w.fail(13, "%s rolls back to %s, of which no container was ever ready", m.id, target)
	case target == from && m.life.Status != lifecycle.RollingBack:
		o.w.fail(13, "%s rolls back to what it runs", m.id)
	}
	x.targets[m.revision] = target
}

// fallingBack checks what a node goes back to by itself.
func (o *oracle) fallingBack(n *node, a agent.FallBack) {
	if !o.w.cfg.Versions {
		return
	}
	x := o.members[a.MemberID]
	all := n.desired().Workloads
	i := slices.IndexFunc(all, func(w agent.Workload) bool { return w.MemberID == a.MemberID })
	if i < 0 || all[i].Revision != a.Revision || all[i].Fallback == nil {
		o.w.fail(1, "%s goes back from revision %d on %s, for which no fallback is signed", a.MemberID, a.Revision, n.id)
		return
	}
	image := all[i].Fallback.Services[0].Images[0]
	if !x.ready[image] {
		o.w.fail(3, "%s goes back to %s on %s, of which no container was ever ready", a.MemberID, image, n.id)
	}
	x.fallbacks[a.Revision] = image
}

// replacing checks that a container is stopped for another one of what the member is to run.
func (o *oracle) replacing(law int, n *node, c *container) {
	w, wanted := n.workload(c.MemberID)
	if !wanted || len(w.Services) == 0 {
		return
	}
	if w.Services[0].SpecDigest == c.SpecDigest && w.Revision == c.Revision {
		o.w.fail(law, "%s was stopped on %s: it is what revision %d runs", c.MemberID, n.id, w.Revision)
	}
}

// versionAtRest checks what runs of a member at rest: exactly the content of its desired revision, if that may run.
func (o *oracle) versionAtRest(n *node, m *memberRow) {
	x := o.members[m.id]
	if m.versions == nil || m.Gone || !m.Desired || x.lowFunds {
		return
	}
	running := n.imagesOf(m.id)
	image, compared := m.image(), o.w.result.Compared
	for _, is := range running {
		if is != image {
			o.w.fail(13, "%s is to run %s on %s, and %s runs", m.id, image, n.id, is)
		}
	}
	if n.refuses(appOf(image)) {
		compared["refused by the owner"]++
		if len(running) > 0 {
			o.w.fail(15, "%s runs on %s, whose owner refuses %s", m.id, n.id, appOf(image))
		}
		return
	}
	if q := o.w.qualities[image]; !q.mayRun() {
		compared[string(q)]++
		if m.life.Status == lifecycle.Upgrading {
			o.w.fail(13, "the upgrade of %s on %s to %s goes on, which is %s", m.id, n.id, image, q)
		}
		return
	}
	if m.stopped() || x.crashChance > 0 || m.Status != protocol.WorkloadStatus_READY {
		return
	}
	if len(running) != 1 {
		o.w.fail(13, "%s is ready on %s, and %d containers of it run", m.id, n.id, len(running))
	}
	o.returned(m, image)
}

// returned checks a member that has returned to an earlier version.
func (o *oracle) returned(m *memberRow, image string) {
	x, compared := o.members[m.id], o.w.result.Compared
	if m.desired().RollsBack {
		compared["rolled back"]++
		if target, known := x.targets[m.revision]; known && target != image {
			o.w.fail(13, "%s was to roll back to %s and runs %s", m.id, target, image)
		}
	}
	for from, to := range x.fallbacks {
		if from < m.revision || m.versions.revisions.Find(int64(from)).Fallback != int64(m.revision) {
			continue
		}
		compared["fell back"]++
		if to != image {
			o.w.fail(13, "%s went back from revision %d to %s and runs %s", m.id, from, to, image)
		}
	}
}

// imagesOf are the images of a member's running containers.
func (n *node) imagesOf(memberID string) (images []string) {
	for _, c := range n.containers {
		if c.MemberID == memberID && c.Status == agent.Running {
			images = append(images, c.image)
		}
	}
	return images
}

// becameReady notes what was ready once.
func (o *oracle) becameReady(c *container) {
	if x := o.members[c.MemberID]; x != nil && x.ready != nil {
		x.ready[c.image] = true
	}
}

// mayWait reports whether the workload need not run: it is refused, or on its way to another version.
func (o *oracle) mayWait(w agent.Workload) bool {
	return w.Refused != 0 || w.Fallback != nil || o.w.qualities[w.Services[0].Images[0]] == unready
}
