package plan

import (
	"cmp"
	"slices"

	"github.com/gpuaas/gpuaas/protocol"
)

// Upload is the verified state that a node uploads to a hub that was restored from a backup.
type Upload struct {
	// Newer: the rows have no state as new as this one, so it was signed after the backup.
	Newer bool
	// Named are the members of the state; Workloads are the documents of those that the node holds.
	Named     []string
	Workloads []*protocol.Workload
}

// RecordedMember is what the restored rows say of a member on the node.
type RecordedMember struct {
	ID           string
	AllocationID string
	Revision     uint64
	Stopped      bool
	// Desired is false once its end was asked for, Gone once the node has proved it.
	Desired bool
	Gone    bool
}

// RecordedClaim is what the restored rows say of an accelerator of the node.
type RecordedClaim struct {
	AcceleratorID string
	AllocationID  string
	OrgID         string
}

// Adoption is how the rows must change before a state may be compiled from them (law 16). Its lists are sorted.
type Adoption struct {
	// Made are members that the rows do not know.
	Made []*protocol.Workload
	// Changed are desired members at a revision, or stopped at one, that the rows do not know.
	Changed []*protocol.Workload
	// Ended are desired members that the newer state does not name: their end was requested after the backup.
	Ended []string
	// Left are all members that the node has removed or is removing, including Ended: their absence from its reports
	// proves that they are gone.
	Left []string
	// Superseded are accelerators that the rows give to another allocation than the newer state does, and parts of a GPU
	// that the newer state gives to another org.
	Superseded []RecordedClaim
	// Missing are members that the rows do not know and whose document the node does not have: they never ran.
	Missing []string
}

// Adopt compares the rows with what the node uploaded. Only what was signed by this hub's own keys may get here; so a
// newer state wins over older rows. The next compiled state has all that runs. oneOrg is that of Node.
func Adopt(members []RecordedMember, claims []RecordedClaim, oneOrg map[string]string, b Upload) Adoption {
	known := map[string]RecordedMember{}
	for _, m := range members {
		known[m.ID] = m
	}
	var out Adoption
	for _, m := range members {
		if m.Gone || slices.Contains(b.Named, m.ID) {
			continue
		}
		if !m.Desired || b.Newer {
			out.Left = append(out.Left, m.ID)
		}
		if m.Desired && b.Newer {
			out.Ended = append(out.Ended, m.ID)
		}
	}
	if b.Newer {
		out.newer(known, b)
		out.supersede(claims, oneOrg, b)
	}
	slices.Sort(out.Left)
	slices.Sort(out.Ended)
	slices.Sort(out.Missing)
	byID := func(a, b *protocol.Workload) int { return cmp.Compare(a.GetId(), b.GetId()) }
	slices.SortFunc(out.Made, byID)
	slices.SortFunc(out.Changed, byID)
	slices.SortFunc(out.Superseded, func(a, b RecordedClaim) int { return cmp.Compare(a.AcceleratorID, b.AcceleratorID) })
	return out
}

func (a *Adoption) newer(known map[string]RecordedMember, b Upload) {
	uploaded := map[string]bool{}
	for _, w := range b.Workloads {
		uploaded[w.GetId()] = true
		m, there := known[w.GetId()]
		switch {
		case !there:
			a.Made = append(a.Made, w)
		case m.Desired && !m.Gone && (w.GetRevision() > m.Revision || w.GetRevision() == m.Revision &&
			w.GetStopped() != m.Stopped):
			a.Changed = append(a.Changed, w)
		}
	}
	for _, id := range b.Named {
		if _, there := known[id]; !there && !uploaded[id] {
			a.Missing = append(a.Missing, id)
		}
	}
}

// supersede finds the claims that had ended before the newer state was signed: it gives their accelerators to others.
func (a *Adoption) supersede(claims []RecordedClaim, oneOrg map[string]string, b Upload) {
	allocation, org := map[string]string{}, map[string]string{}
	for _, w := range b.Workloads {
		for _, s := range w.GetServices() {
			for _, id := range s.GetResources().GetAcceleratorIds() {
				allocation[id] = w.GetAllocationId()
				if gpu := oneOrg[id]; gpu != "" {
					org[gpu] = w.GetOrgId()
				}
			}
		}
	}
	for _, c := range claims {
		by, of := allocation[c.AcceleratorID], org[oneOrg[c.AcceleratorID]]
		if by != "" && by != c.AllocationID || of != "" && of != c.OrgID {
			a.Superseded = append(a.Superseded, c)
		}
	}
}
