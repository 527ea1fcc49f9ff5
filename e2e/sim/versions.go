package sim

import (
	"maps"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// versions are the rows of a member's revisions, in worlds with versions. hub/internal/instance keeps the same.
type versions struct {
	// cpuMillis and memoryBytes are what each version gets of the allocation.
	cpuMillis, memoryBytes int64
	revisions              lifecycle.Revisions
	contents               map[int64]content
}

// content is what a revision runs; it never changes.
type content struct {
	*release
	services []*protocol.Service
	named    time.Time
}

func (v *versions) clone() *versions {
	if v == nil {
		return nil
	}
	c := *v
	c.revisions, c.contents = slices.Clone(v.revisions), maps.Clone(v.contents)
	return &c
}

// add makes a revision the desired one.
func (m *memberRow) add(made lifecycle.Revision, c content) {
	made.AppVersion = c.version
	m.versions.revisions = append(m.versions.revisions, made)
	m.versions.contents[made.No] = c
	m.desire(made.No)
}

func (m *memberRow) desire(revision int64) {
	m.revision, m.services = uint64(revision), m.versions.contents[revision].services
}

func (m *memberRow) desired() lifecycle.Revision { return m.versions.revisions.Find(int64(m.revision)) }

// working is the revision to which a change of version may return.
func (m *memberRow) working() int64 { return m.versions.revisions.LastWorking(int64(m.revision)) }

// carriesFallback reports whether the state has the fallback of the desired revision (selectDesired in
// hub/internal/instance).
func (m *memberRow) carriesFallback() bool {
	return m.life.Status == lifecycle.Upgrading || m.life.Status == lifecycle.RollingBack && m.desired().RollsBack
}

// compile adds to a member of the snapshot what its revision fixes, and the fallback.
func (m *memberRow) compile(p plan.Member) plan.Member {
	if m.versions == nil {
		return p
	}
	back := m.desired().Fallback
	out := m.compileRevision(p, int64(m.revision))
	if m.carriesFallback() && back > 0 {
		fallback := m.compileRevision(p, back)
		fallback.Stopped = false
		out.Fallback = &fallback
	}
	return out
}

func (m *memberRow) compileRevision(p plan.Member, no int64) plan.Member {
	c := m.versions.contents[no]
	p.Revision, p.Services, p.Features = uint64(no), c.services, c.features
	p.AppSlug, p.AppVersion, p.OrgSlug = c.app, c.version, "org-"+strconv.Itoa(m.org)
	p.ManifestEnvelope, p.DelegationEnvelope = c.envelope, c.delegation
	p.RollsBack, p.NamedAt, p.ParametersJSON = m.versions.revisions.Find(no).RollsBack, c.named, "{}"
	p.ReadinessTimeout = time.Duration(c.manifest.Version.RuntimeProfile.ReadinessTimeoutSeconds) * time.Second
	return p
}

// createVersion makes an instance of an app's next version.
func (w *World) createVersion(candidates []int, accelerators int, q quality) *memberRow {
	app := apps()[w.rng.IntN(len(apps()))]
	r := w.publish(app, q)
	cpuMillis, memoryMiB := uint64(500*(1+w.rng.IntN(4))), uint64(1+w.rng.IntN(6))<<10
	needs := plan.Needs(r.manifest, manifest.Choice{
		CPUMillis: cpuMillis, MemoryMiB: memoryMiB, Accelerators: &accelerators,
	}, 0)
	if len(needs) == 0 {
		return nil
	}
	need := needs[0]
	// Rows of the simulation have neither shapes nor features: the node decides on features.
	need.Shapes, need.Features = nil, nil
	if w.chance(0.6) { // room for two copies
		need.CPUMillis, need.MemoryBytes = 2*need.CPUMillis, 2*need.MemoryBytes
	}
	m := w.hub.create(candidates, 1+w.rng.IntN(orgs-1), need, 1)
	if m == nil {
		return nil
	}
	m.versions = &versions{
		cpuMillis: int64(cpuMillis), memoryBytes: int64(memoryMiB) << 20, contents: map[int64]content{},
	}
	m.add(lifecycle.Revision{No: 1}, content{r, r.services(w, m, true), w.now.time()})
	return m
}

// serving is the workload beside which the next one may start; without services where none serves.
func (m *memberRow) serving() *protocol.Workload {
	back := m.working()
	if back == 0 || m.life.Status != lifecycle.Running {
		return &protocol.Workload{}
	}
	return &protocol.Workload{
		AppVersion: m.desired().AppVersion, ParametersJson: "{}", Services: m.versions.contents[back].services,
	}
}

// recreate reports whether the services wait for the end of those that serve.
func (m *memberRow) recreate(version string, services []*protocol.Service) bool {
	_, why := manifest.Changed(m.serving(), &protocol.Workload{
		AppVersion: version, ParametersJson: "{}", Services: services,
	})
	return why != "" || 2*m.versions.cpuMillis > m.cpuMillis
}

// upgrade asks for another version.
func (h *hub) upgrade(m *memberRow, r *release) error {
	next, _, err := lifecycle.Upgrade(m.life, m.history())
	if err != nil {
		return err
	}
	made := m.versions.revisions.Upgrade(int64(m.revision))
	services := r.services(h.w, m, m.recreate(r.version, r.services(h.w, m, false)))
	m.add(made, content{r, services, h.w.now.time()})
	m.life = next
	return nil
}

// rollBack asks for an earlier version, whose revision it returns.
func (h *hub) rollBack(m *memberRow, version string) (target lifecycle.Revision, err error) {
	next, _, err := lifecycle.RollBack(m.life, m.history())
	if err != nil {
		return target, err
	}
	v := m.versions
	if target, err = v.revisions.RollbackTarget(int64(m.revision), m.life.Status, version); err != nil {
		return target, err
	}
	if h.w.breaks(BreakRollback) {
		// As if any revision before were good enough.
		target = v.revisions[max(0, len(v.revisions)-2)]
	}
	c := v.contents[target.No]
	first := slices.ContainsFunc(c.services, (*protocol.Service).GetStartFirst)
	wait := m.recreate(c.version, c.services)
	c.services, c.named = cloneServices(c.services), h.w.now.time()
	for _, s := range c.services {
		s.Recreate = s.GetStartFirst() && wait
	}
	m.add(v.revisions.RollBack(int64(m.revision), target, first && !wait), c)
	m.life = next
	return target, nil
}

func cloneServices(in []*protocol.Service) []*protocol.Service {
	out := make([]*protocol.Service, len(in))
	for i, s := range in {
		out[i] = proto.CloneOf(s)
	}
	return out
}

// nextRevision is what a restart runs: the same content under another number.
func (m *memberRow) nextRevision(now time.Time) {
	if m.versions == nil {
		m.revision++
		return
	}
	c := m.versions.contents[int64(m.revision)]
	c.named = now
	m.add(m.versions.revisions.Restart(int64(m.revision)), c)
}

// advanceVersion moves the instance of a member with versions on, as recompute of hub/internal/instance does.
func (h *hub) advanceVersion(row *nodeRow, m *memberRow) {
	replaces := func() bool { return m.life.Status == lifecycle.Upgrading || m.life.Status == lifecycle.RollingBack }
	before := replaces()
	for {
		var steps []lifecycle.Step
		m.life, steps = lifecycle.Advance(m.life, []lifecycle.MemberState{m.State(int64(m.revision))})
		for _, s := range steps {
			if s.To == lifecycle.Running {
				m.versions.worked(int64(m.revision), h.w.now.time())
			}
		}
		if len(steps) == 0 || !steps[len(steps)-1].IsRollbackByNode() {
			break
		}
		m.desire(m.desired().Fallback)
		h.w.trace("fell back", row.i, int64(m.revision), m.id)
		row.rev++
	}
	if replaces() != before {
		row.rev++
	}
}

func (v *versions) worked(revision int64, now time.Time) {
	i := slices.IndexFunc(v.revisions, func(r lifecycle.Revision) bool { return r.No == revision })
	if i >= 0 && !v.revisions[i].Worked() {
		v.revisions[i].ReadyAt = now
	}
}

// adoptVersion makes the rows of the revisions that a node's document names, as adoptRevisions of
// hub/internal/instance does.
func (h *hub) adoptVersion(m *memberRow, w *protocol.Workload) {
	if !h.w.cfg.Versions {
		return
	}
	if m.versions == nil {
		r := w.GetServices()[0].GetResources()
		m.versions = &versions{
			cpuMillis: int64(r.GetCpuMillis()), memoryBytes: int64(r.GetMemoryBytes()), contents: map[int64]content{},
		}
	}
	v := m.versions
	own, fallback := v.revisions.Adopted(w, h.w.now.time())
	if fallback.No != 0 {
		v.insert(fallback, w.GetFallback())
	}
	if own.No != 0 {
		v.insert(own, w)
	}
	m.desire(int64(w.GetRevision()))
}

func (v *versions) insert(made lifecycle.Revision, w *protocol.Workload) {
	r := &release{app: w.GetAppSlug(), version: w.GetAppVersion(), features: w.GetFeatures()}
	r.manifest, _ = manifest.Parse(w.GetManifest().GetPayload())
	r.envelope, _ = proto.Marshal(w.GetManifest())
	if w.GetDelegation() != nil {
		r.delegation, _ = proto.Marshal(w.GetDelegation())
	}
	made.AppVersion = r.version
	v.revisions = append(v.revisions, made)
	slices.SortFunc(v.revisions, func(a, b lifecycle.Revision) int { return int(a.No - b.No) })
	v.contents[made.No] = content{r, w.GetServices(), w.GetFirstNamedAt().AsTime()}
}

// versionCommand is what a user asks for in a world with versions.
func (w *World) versionCommand(live *memberRow) {
	dice := w.rng.IntN(12)
	if live == nil || dice < 3 {
		w.createOn(unique([]int{w.rng.IntN(len(w.nodes)), w.rng.IntN(len(w.nodes))}), w.rng.IntN(2))
		return
	}
	x := w.oracle.members[live.id]
	switch {
	case dice < 4:
		_ = w.hub.decommission(live) // it may have begun already
		x.wanted = false
	case dice < 7:
		if w.hub.upgrade(live, w.publish(live.versions.contents[int64(live.revision)].app, w.drawQuality())) != nil {
			return
		}
		x.forget(live.revision)
	case dice < 10:
		version := ""
		if all := live.versions.revisions; w.chance(0.3) {
			version = all[w.rng.IntN(len(all))].AppVersion
		}
		from := live.image()
		target, err := w.hub.rollBack(live, version)
		if err != nil {
			return
		}
		x.forget(live.revision)
		w.oracle.rolledBack(live, from, live.versions.contents[target.No].services[0].GetImage())
	default:
		act := w.hub.stop
		if live.stopped() {
			act = w.hub.restart
		}
		if act(live) != nil {
			return
		}
		x.forget(live.revision)
	}
	x.stopped = live.stopped()
	w.hub.touch(live.node)
}

func (w *World) drawQuality() quality {
	return []quality{signed, signed, signed, signed, unready, unready, stranger, deviating, later}[w.rng.IntN(9)]
}

// image is the one of the member's desired revision.
func (m *memberRow) image() string { return m.services[0].GetImage() }

// history is what a user's action on the member depends on.
func (m *memberRow) history() lifecycle.History {
	if m.versions != nil {
		return lifecycle.History{Worked: m.working() > 0, Lost: m.Lost()}
	}
	return lifecycle.History{Worked: m.worked, Lost: m.Lost()}
}
