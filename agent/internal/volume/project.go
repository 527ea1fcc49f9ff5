package volume

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/host"
	"github.com/gpuaas/gpuaas/pkg/durable"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// CapacityBytes is what volumes may take of the disk in all; 0 where the machine can have none.
func (v *Volumes) CapacityBytes() uint64 {
	var st unix.Statfs_t
	if v.unsupported != nil || unix.Statfs(v.cfg.Dir, &st) != nil {
		return 0
	}
	return max(st.Blocks*uint64(st.Bsize), v.cfg.ReserveBytes) - v.cfg.ReserveBytes
}

// Apply does what a project's volume lacks of its description, as far as that can be done now, and returns where the
// volume is. It can be repeated, also after a crash at any step. mayUse reports whether a member may still have a
// container with the volume: one that may not gives it up to others.
func (v *Volumes) Apply(ctx context.Context, desired *protocol.ProjectVolume, mayUse func(memberID string) bool,
) *protocol.VolumeStatus {
	s := &protocol.VolumeStatus{Id: desired.GetId(), Status: protocol.VolumeStatus_PENDING}
	if err := v.apply(ctx, desired, mayUse, s); err != nil {
		f := fault.As(err)
		s.Reason, s.Detail = string(f.Code), f.Public
		v.cfg.Log.WarnContext(ctx, "a volume of a project is not as it should be", slog.String("volume_id", s.GetId()),
			slog.Any("error", err))
	}
	return s
}

func (v *Volumes) apply(ctx context.Context, desired *protocol.ProjectVolume, mayUse func(memberID string) bool,
	s *protocol.VolumeStatus,
) error {
	id := desired.GetId()
	if err := checkID(id); err != nil {
		return err
	}
	unlock, err := v.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	r, err := v.load(id)
	if errors.Is(err, fs.ErrNotExist) {
		switch {
		case desired.GetDeleted():
			s.Status = protocol.VolumeStatus_DELETED
			return nil
		case desired.GetMade():
			s.Status = protocol.VolumeStatus_MISSING
			return nil
		}
		r, err = v.create(ctx, id, record{SizeBytes: desired.GetSizeBytes(), ProjectID: desired.GetProjectId()})
	}
	if err != nil {
		return failed("make", err)
	}
	if err := r.checkProject(desired.GetProjectId()); err != nil {
		return err
	}
	if r, err = v.leave(id, r, mayUse); err != nil {
		return err
	}
	if desired.GetDeleted() {
		if r.inUse() {
			return errInUse()
		}
		if err := v.delete(ctx, id); err != nil {
			return err
		}
		s.Status = protocol.VolumeStatus_DELETED
		return nil
	}
	s.Status = protocol.VolumeStatus_READY
	r, err = v.change(ctx, id, r, desired, s)
	s.SizeBytes, s.RestoreNo = r.SizeBytes, r.RestoreNo
	return err
}

// change takes and deletes snapshots, restores and grows. What fails keeps nothing else from being done.
func (v *Volumes) change(ctx context.Context, id string, r record, desired *protocol.ProjectVolume,
	s *protocol.VolumeStatus,
) (record, error) {
	var errs []error
	for _, want := range desired.GetSnapshots() {
		status, err := v.applySnapshot(ctx, id, want)
		s.Snapshots = append(s.Snapshots, status)
		errs = append(errs, err)
	}
	others, err := v.otherSnapshots(id, desired.GetSnapshots())
	s.Snapshots, errs = append(s.Snapshots, others...), append(errs, err)
	if desired.GetRestoreNo() > r.RestoreNo {
		restored, err := v.restore(ctx, id, r, desired)
		if err != nil {
			return r, errors.Join(append(errs, err)...)
		}
		r = restored
	}
	if r.inUse() {
		errs = append(errs, v.growInUse(ctx, id, &r, desired.GetSizeBytes()))
	} else {
		errs = append(errs, v.grow(ctx, id, &r, desired.GetSizeBytes()))
	}
	return r, errors.Join(errs...)
}

// growInUse makes a volume as large as desired below the containers that use it: a mounted ext4 takes more blocks,
// from a process that has the capability SYS_RESOURCE.
func (v *Volumes) growInUse(ctx context.Context, id string, r *record, desiredBytes uint64) error {
	if desiredBytes <= r.SizeBytes {
		return nil
	}
	if err := v.remount(ctx, id); err != nil {
		return failed("grow", err)
	}
	name, err := device(v.image(id))
	if err != nil {
		return failed("grow", err)
	}
	if name == "" {
		return v.grow(ctx, id, r, desiredBytes)
	}
	if !host.HasCapability(unix.CAP_SYS_RESOURCE) {
		return fault.New(fault.Conflict, agent.CodeVolumeInUse, "A container uses the volume; this node makes it larger "+
			"when none does.", nil)
	}
	file, err := v.reserve(v.image(id), desiredBytes)
	if err != nil {
		return failed("grow", err)
	}
	err = errors.Join(file.Sync(), file.Close())
	if err == nil {
		err = updateCapacity(name)
	}
	if err == nil {
		err = tool(ctx, nil, "resize2fs", name)
	}
	if err != nil {
		return failed("grow", err)
	}
	return v.storeGrown(id, r, desiredBytes)
}

func (v *Volumes) snapshotImage(id, snapshotID string) string {
	return filepath.Join(v.path(id), snapshotsName, snapshotID)
}

func (v *Volumes) applySnapshot(ctx context.Context, id string, want *protocol.VolumeSnapshot,
) (*protocol.SnapshotStatus, error) {
	s := &protocol.SnapshotStatus{Id: want.GetId(), Status: protocol.VolumeStatus_PENDING}
	if err := checkID(want.GetId()); err != nil {
		return s, err
	}
	image := v.snapshotImage(id, want.GetId())
	if want.GetDeleted() {
		err := removeIfThere(image)
		if err == nil { // the hub never asks again for what it knows as deleted
			err = durable.SyncDir(filepath.Dir(image))
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return s, failed("delete a snapshot of", err)
		}
		s.Status = protocol.VolumeStatus_DELETED
		return s, nil
	}
	info, err := os.Stat(image)
	if errors.Is(err, fs.ErrNotExist) {
		if err = v.remount(ctx, id); err == nil {
			err = v.snapshot(ctx, id, image)
		}
		if err == nil {
			failpoint.Hit("agent/volume/snapshot_taken")
			info, err = os.Stat(image)
		}
	}
	if err != nil {
		return s, failed("snapshot", err)
	}
	s.Status, s.SizeBytes = protocol.VolumeStatus_READY, uint64(info.Size())
	return s, nil
}

// otherSnapshots are those that the node keeps beside the named ones.
func (v *Volumes) otherSnapshots(id string, named []*protocol.VolumeSnapshot) (others []*protocol.SnapshotStatus,
	err error,
) {
	entries, err := os.ReadDir(filepath.Join(v.path(id), snapshotsName))
	if err != nil {
		return nil, failed("list the snapshots of", err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || checkID(e.Name()) != nil || strings.HasSuffix(e.Name(), unfinishedSuffix) ||
			len(others) == protocol.MaxSnapshots || slices.ContainsFunc(named, func(s *protocol.VolumeSnapshot) bool {
			return s.GetId() == e.Name()
		}) {
			continue
		}
		others = append(others, &protocol.SnapshotStatus{
			Id: e.Name(), Status: protocol.VolumeStatus_READY, SizeBytes: uint64(info.Size()),
		})
	}
	return others, nil
}

// remount mounts a file system that containers have, and that the end of one of its members has unmounted on the host.
func (v *Volumes) remount(ctx context.Context, id string) error {
	name, err := device(v.image(id))
	if err != nil || name == "" {
		return err
	}
	return mountImage(ctx, v.image(id), v.mountPoint(id), 0)
}

// restore puts a copy of a snapshot in the place of the image. After a crash before the record is stored it is done
// again: the hub starts no container on the volume before it is reported.
func (v *Volumes) restore(ctx context.Context, id string, r record, desired *protocol.ProjectVolume) (record, error) {
	source := v.snapshotImage(id, desired.GetRestoreSnapshotId())
	if err := checkID(desired.GetRestoreSnapshotId()); err != nil {
		return r, err
	}
	size, err := fileSystemBytes(source)
	if err != nil {
		return r, failed("find a snapshot of", err)
	}
	if err := v.quiesce(ctx, id); err != nil {
		return r, failed("restore", err)
	}
	if err := v.copyImage(ctx, source, v.image(id)); err != nil {
		return r, failed("restore", err)
	}
	failpoint.Hit("agent/volume/restored")
	r.RestoreNo, r.SizeBytes = desired.GetRestoreNo(), size
	if err := v.store(id, r); err != nil {
		return r, failed("record", err)
	}
	return r, nil
}

// open checks that a member may have a project's volume, and returns its record.
func (v *Volumes) open(id string, u Use) (record, error) {
	r, err := v.load(id)
	if errors.Is(err, fs.ErrNotExist) {
		return r, fault.New(fault.Unavailable, agent.CodeVolumeNotReady, "The node does not have the volume.", nil)
	}
	if err != nil {
		return r, failed("read", err)
	}
	return r, r.checkProject(u.ProjectID)
}

// join records which member has a project's volume. A writer whose revision only reads gives the volume up to others.
func (v *Volumes) join(id string, r record, u Use) (record, error) {
	switch {
	case u.ReadOnly && slices.Contains(r.Readers, u.MemberID), !u.ReadOnly && r.Writer == u.MemberID:
		return r, nil
	case u.ReadOnly:
		r, _ = r.without(u.MemberID)
		r.Readers = append(slices.Clone(r.Readers), u.MemberID)
	case r.Writer != "":
		return r, fault.New(fault.Conflict, agent.CodeVolumeInUse, "Another app instance writes to the volume.", nil)
	default:
		r, _ = r.without(u.MemberID)
		r.Writer = u.MemberID
	}
	return r, v.store(id, r)
}

// leave takes the members from a volume that do not use it any more, as after an upgrade to a version without it.
func (v *Volumes) leave(id string, r record, mayUse func(memberID string) bool) (record, error) {
	before := r
	for _, memberID := range append(slices.Clone(r.Readers), r.Writer) {
		if memberID != "" && !mayUse(memberID) {
			r, _ = r.without(memberID)
		}
	}
	if r.Writer == before.Writer && len(r.Readers) == len(before.Readers) {
		return r, nil
	}
	return r, errors.Join(v.unmount(id), v.store(id, r))
}

// checkProject refuses a volume to any project but its own.
func (r record) checkProject(projectID string) error {
	if r.ProjectID == "" || r.ProjectID != projectID {
		return fault.New(fault.Forbidden, codeBadVolume, "The volume belongs to another project.", nil).Permanent()
	}
	return nil
}

func (r record) inUse() bool { return r.Writer != "" || len(r.Readers) > 0 }

func errInUse() error {
	return fault.New(fault.Conflict, agent.CodeVolumeInUse, "A container uses the volume.", nil)
}

// checkID keeps what is no id out of paths.
func checkID(id string) error {
	if !idPattern.MatchString(id) {
		return fault.New(fault.Unprocessable, codeBadVolume, "A volume or a snapshot has no usable id.", nil).Permanent()
	}
	return nil
}
