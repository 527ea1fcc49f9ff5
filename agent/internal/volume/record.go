package volume

import (
	"encoding/json"
	"slices"
)

// Revision is what is about to use a volume: one revision of a member.
type Revision struct {
	No uint64
	// AppVersion is the version of the app that the revision runs.
	AppVersion string
	// FallbackNo and FallbackVersion are those of the revision that it replaces and to which the node may fall back; zero
	// where there is none.
	FallbackNo      uint64
	FallbackVersion string
	// RollsBack says that the tenant returns to AppVersion.
	RollsBack bool
	// Snapshot asks for a snapshot before an upgrade.
	Snapshot bool
}

// record is what the node remembers of a volume beside its image.
type record struct {
	SizeBytes uint64 `json:"size_bytes"`
	// ProjectID is the project of a volume that outlives its members; empty for one of an instance.
	ProjectID string `json:"project_id,omitempty"`
	// RestoreNo is the last restore of a project's volume.
	RestoreNo uint64 `json:"restore_no,omitempty"`
	// Revision and AppVersion used the volume last; zero before the first use, and for a project's volume.
	Revision   uint64 `json:"revision,omitempty"`
	AppVersion string `json:"app_version,omitempty"`
	// Upgrade is the snapshot of the last upgrade that asked for one.
	Upgrade *upgradeSnapshot `json:"upgrade,omitempty"`
	// Restoring says that the upgrade's snapshot is to take the place of the image before anything else happens.
	Restoring bool `json:"restoring,omitempty"`
	// Writer is the member that may write to a project's volume; Readers are the others that have it.
	Writer  string   `json:"writer,omitempty"`
	Readers []string `json:"readers,omitempty"`
}

// upgradeSnapshot is the content as the given revision left it, the fallback of the upgrade. It may be a later one than
// has started a container with the volume: a service that a revision does not change goes on.
type upgradeSnapshot struct {
	Revision   uint64 `json:"revision"`
	AppVersion string `json:"app_version"`
	SizeBytes  uint64 `json:"size_bytes"`
}

// step is what must happen to a volume before a revision uses it.
type step int

const (
	keep step = iota
	takeSnapshot
	restoreSnapshot
)

// next decides the step, and returns the record as it is once that is done. A revision below the last one is the
// fallback of an upgrade.
func (r record) next(to Revision) (step, record) {
	after := r
	after.Revision, after.AppVersion = to.No, to.AppVersion
	switch {
	case r.Revision == 0, r.Revision == to.No:
		return keep, after
	case to.No < r.Revision:
		if r.Upgrade != nil && r.Upgrade.Revision == to.No {
			return restoreSnapshot, after.restoring()
		}
	case to.RollsBack:
		if r.Upgrade != nil && r.Upgrade.AppVersion == to.AppVersion {
			return restoreSnapshot, after.restoring()
		}
	case to.FallbackNo > 0 && to.Snapshot:
		after.Upgrade = &upgradeSnapshot{
			Revision: to.FallbackNo, AppVersion: to.FallbackVersion, SizeBytes: r.SizeBytes,
		}
		return takeSnapshot, after
	}
	return keep, after
}

// restoring returns the record of a volume whose snapshot is to take the place of its image. The size is that of the
// snapshot: a larger one that the failed upgrade asked for is gone.
func (r record) restoring() record {
	r.SizeBytes, r.Upgrade, r.Restoring = r.Upgrade.SizeBytes, nil, true
	return r
}

// isOf reports whether the member has the project's volume.
func (r record) isOf(memberID string) bool {
	return r.Writer == memberID || slices.Contains(r.Readers, memberID)
}

// without returns the record after the member has left; changed is false where it was not there.
func (r record) without(memberID string) (after record, changed bool) {
	if !r.isOf(memberID) {
		return r, false
	}
	if r.Writer == memberID {
		r.Writer = ""
	}
	r.Readers = slices.DeleteFunc(slices.Clone(r.Readers), func(id string) bool { return id == memberID })
	return r, true
}

func (r record) encode() []byte {
	raw, err := json.Marshal(r)
	if err != nil {
		panic(err) // the type has nothing that could fail
	}
	return raw
}
