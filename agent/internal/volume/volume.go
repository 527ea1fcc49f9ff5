// Package volume keeps the volumes of this node: each is one image file below the data directory with an ext4 file
// system of its own, mounted through a loop device. It makes, mounts, snapshots, restores and deletes them, and finds
// its way after a crash at any step. It does not know containers; agent/internal/runtime binds a volume into one.
package volume

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/mountpoint"
	"github.com/gpuaas/gpuaas/pkg/durable"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/keylock"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// DefaultReserveBytes is what volumes leave free of the node's disk.
	DefaultReserveBytes = 1 << 30
	// MaxVolumes bounds the volumes of a node; one more is refused.
	MaxVolumes = 512
	// MinBytes is the smallest size of a volume: below it, a journal has no room.
	MinBytes = 16 << 20
)

// Names of files and directories.
const (
	imageName        = "data.img"
	recordName       = "record.json"
	upgradeName      = "upgrade.img"
	snapshotsName    = "snapshots"
	newPrefix        = ".new-"
	deletedPrefix    = ".deleted-"
	unfinishedSuffix = ".unfinished"
	// contentName is the directory of a file system that containers see; lost+found stays outside.
	contentName = "content"
)

// Config says where volumes are.
type Config struct {
	// Dir holds images and records.
	Dir string
	// MountDir has the mount points. User-namespaced containers must be able to walk to it.
	MountDir string
	// ReserveBytes stay free on the disk of Dir; zero takes DefaultReserveBytes.
	ReserveBytes uint64
	Log          *slog.Logger
}

// Volumes are those of one node. Its methods may be called at the same time.
type Volumes struct {
	cfg   Config
	locks keylock.Map
	// space is held while free space is compared and reserved.
	space sync.Mutex
	// unsupported says why the machine can have no volumes.
	unsupported error
}

// Open removes what interrupted operations left, and ends the freeze of a snapshot that was interrupted.
func Open(cfg Config) (*Volumes, error) {
	cfg.ReserveBytes = cmp.Or(cfg.ReserveBytes, DefaultReserveBytes)
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	v := &Volumes{cfg: cfg, unsupported: Check()}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, failed("make its directory", err)
	}
	if err := os.MkdirAll(cfg.MountDir, 0o711); err != nil { //nolint:gosec // a container's root walks through it
		return nil, failed("make its directory", err)
	}
	entries, err := os.ReadDir(cfg.Dir)
	if err != nil {
		return nil, failed("read its directory", err)
	}
	for _, e := range entries {
		if err := v.recover(e.Name()); err != nil { // what needs it fails by itself
			cfg.Log.Error("a volume cannot be recovered", slog.String("volume_id", e.Name()), slog.Any("error", err))
		}
	}
	return v, nil
}

// Supported reports why the machine can have no volumes; nil where it can.
func (v *Volumes) Supported() error { return v.unsupported }

// Conditions names what the machine lacks for volumes.
func (v *Volumes) Conditions() []string {
	if v.unsupported != nil {
		return []string{protocol.ConditionNoVolumes}
	}
	return nil
}

// recover makes one volume usable again after a crash, or removes what a creation or a deletion has left of it.
func (v *Volumes) recover(id string) error {
	if interrupted(id) != id {
		return os.RemoveAll(v.path(id))
	}
	return errors.Join(v.thaw(id), v.removeUnfinished(id))
}

// thaw ends the freeze of a snapshot that was interrupted.
func (v *Volumes) thaw(id string) error {
	name, err := device(v.image(id))
	if err != nil || name == "" || !isMounted(name, v.mountPoint(id)) {
		return err
	}
	return thawDir(v.mountPoint(id))
}

// removeUnfinished removes the half-written files of a volume.
func (v *Volumes) removeUnfinished(id string) error {
	for _, pattern := range []string{
		"*" + unfinishedSuffix, snapshotsName + "/*" + unfinishedSuffix, "." + recordName + ".*",
	} {
		unfinished, err := filepath.Glob(filepath.Join(v.path(id), pattern))
		if err != nil {
			return err
		}
		for _, path := range unfinished {
			if err := removeIfThere(path); err != nil {
				return err
			}
		}
	}
	r, err := v.load(id)
	if err != nil {
		return err
	}
	if r.Upgrade == nil && !r.Restoring {
		return removeIfThere(filepath.Join(v.path(id), upgradeName))
	}
	return nil
}

func (v *Volumes) path(id string) string       { return filepath.Join(v.cfg.Dir, id) }
func (v *Volumes) image(id string) string      { return filepath.Join(v.cfg.Dir, id, imageName) }
func (v *Volumes) mountPoint(id string) string { return filepath.Join(v.cfg.MountDir, id) }

// InstanceID is the id on this node of a volume that lives as long as its member.
func InstanceID(memberID, name string) string { return memberID + "." + name }

// Use is a volume as one revision of a member needs it.
type Use struct {
	MemberID string
	// Name is the volume's name in the manifest; VolumeID is the id of a project's volume, empty for one of the instance.
	Name, VolumeID string
	// ProjectID is the project of the member.
	ProjectID string
	// SizeBytes of a volume of the instance.
	SizeBytes uint64
	// ReadOnly says that no service of the revision writes to the volume of a project.
	ReadOnly bool
	Revision Revision
}

func (u Use) id() string { return cmp.Or(u.VolumeID, InstanceID(u.MemberID, u.Name)) }

// Prepare mounts a volume and returns the directory for containers. It makes one of the instance that is not there, and
// snapshots or restores it as the revision demands; Apply makes those of projects. The caller starts no container of
// the revision before, and none of an earlier one afterwards.
func (v *Volumes) Prepare(ctx context.Context, u Use) (dir string, err error) {
	id := u.id()
	unlock, err := v.lock(ctx, id)
	if err != nil {
		return "", err
	}
	defer unlock()
	if u.VolumeID != "" {
		r, err := v.open(id, u)
		if err != nil {
			return "", err
		}
		if _, err := v.join(id, r, u); err != nil {
			return "", err
		}
		return v.mount(ctx, id)
	}
	r, err := v.load(id)
	if errors.Is(err, fs.ErrNotExist) {
		r, err = v.create(ctx, id, record{SizeBytes: u.SizeBytes})
	}
	if err != nil {
		return "", failed("make", err)
	}
	if r, err = v.advance(ctx, id, r, u.Revision); err != nil {
		return "", err
	}
	if err := v.grow(ctx, id, &r, u.SizeBytes); err != nil {
		return "", err
	}
	return v.mount(ctx, id)
}

// advance does what the revision demands of the content.
func (v *Volumes) advance(ctx context.Context, id string, r record, to Revision) (record, error) {
	if r.Restoring {
		var err error
		if r, err = v.finishRestore(ctx, id, r); err != nil {
			return r, err
		}
	}
	what, after := r.next(to)
	if what == takeSnapshot {
		// The record follows: after a crash in between, the snapshot is made again, from an image that nothing has changed.
		if err := v.snapshotUpgrade(ctx, id, r); err != nil {
			return r, failed("snapshot", err)
		}
	}
	if after.Revision != r.Revision || after.AppVersion != r.AppVersion {
		if err := v.store(id, after); err != nil {
			return r, failed("record", err)
		}
	}
	if what != restoreSnapshot {
		return after, nil
	}
	v.cfg.Log.InfoContext(ctx, "restoring a volume to its content before an upgrade", slog.String("volume_id", id),
		slog.Uint64("revision", to.No))
	return v.finishRestore(ctx, id, after)
}

// finishRestore moves the snapshot of an upgrade to the place of the image. It needs no space: that of the snapshot was
// reserved when it was taken.
func (v *Volumes) finishRestore(ctx context.Context, id string, r record) (record, error) {
	if err := v.quiesce(ctx, id); err != nil {
		return r, failed("restore", err)
	}
	err := os.Rename(filepath.Join(v.path(id), upgradeName), v.image(id))
	if err == nil {
		err = durable.SyncDir(v.path(id))
	} else if errors.Is(err, fs.ErrNotExist) {
		err = nil // moved before a crash
	}
	if err != nil {
		return r, failed("restore", err)
	}
	r.Restoring = false
	if err := v.store(id, r); err != nil {
		return r, failed("record", err)
	}
	return r, nil
}

// quiesce unmounts a volume and waits until no container has it.
func (v *Volumes) quiesce(ctx context.Context, id string) error {
	if err := v.unmount(id); err != nil {
		return err
	}
	return awaitIdle(ctx, v.image(id))
}

// create makes a volume that is there whole or not at all.
func (v *Volumes) create(ctx context.Context, id string, r record) (record, error) {
	if r.SizeBytes < MinBytes || !idPattern.MatchString(id) {
		return r, fault.New(fault.Unprocessable, codeBadVolume, fmt.Sprintf("A volume needs a usable name and at least %d "+
			"MiB.", MinBytes>>20), nil).Permanent()
	}
	ids, err := v.ids()
	if err != nil {
		return r, err
	}
	if len(ids) >= MaxVolumes {
		return r, fault.New(fault.Unavailable, agent.CodeVolumeNoSpace, fmt.Sprintf("The node has %d volumes, and may "+
			"have no more.", MaxVolumes), nil).Permanent()
	}
	unfinished := v.path(newPrefix + id)
	if err := os.RemoveAll(unfinished); err != nil {
		return r, err
	}
	if err := os.MkdirAll(filepath.Join(unfinished, snapshotsName), 0o700); err != nil {
		return r, err
	}
	if err := v.makeImage(ctx, filepath.Join(unfinished, imageName), r.SizeBytes); err != nil {
		return r, errors.Join(err, os.RemoveAll(unfinished))
	}
	if err := durable.Replace(filepath.Join(unfinished, recordName), r.encode(), 0o600); err != nil {
		return r, errors.Join(err, os.RemoveAll(unfinished))
	}
	failpoint.Hit("agent/volume/image_made")
	if err := os.Rename(unfinished, v.path(id)); err != nil {
		return r, err
	}
	return r, durable.SyncDir(v.cfg.Dir)
}

// idPattern is that of run ids: the id begins with a member's or is a volume's own.
var idPattern = regexp.MustCompile(`^[A-Za-z0-9]+(?:[._-]+[A-Za-z0-9]+)*$`)

// grow makes a volume that nothing uses as large as desired. A smaller size changes nothing.
func (v *Volumes) grow(ctx context.Context, id string, r *record, desiredBytes uint64) error {
	if desiredBytes <= r.SizeBytes {
		return nil
	}
	if err := v.quiesce(ctx, id); err != nil {
		return failed("grow", err)
	}
	file, err := v.reserve(v.image(id), desiredBytes)
	if err != nil {
		return failed("grow", err)
	}
	if err = toolOn(ctx, file, "e2fsck", "-f", "-p"); err == nil {
		err = toolOn(ctx, file, "resize2fs")
	}
	if err = errors.Join(err, file.Sync(), file.Close()); err != nil {
		return failed("grow", err)
	}
	return v.storeGrown(id, r, desiredBytes)
}

func (v *Volumes) storeGrown(id string, r *record, sizeBytes uint64) error {
	failpoint.Hit("agent/volume/grown")
	r.SizeBytes = sizeBytes
	return v.store(id, *r)
}

// mount mounts the volume and returns what containers see of it.
func (v *Volumes) mount(ctx context.Context, id string) (string, error) {
	at := v.mountPoint(id)
	if err := mountImage(ctx, v.image(id), at, 0); err != nil {
		return "", failed("mount", err)
	}
	content, err := makeContent(at)
	if err != nil {
		return "", failed("prepare", err)
	}
	return content, nil
}

// Detach unmounts the volumes of a member that has no container.
func (v *Volumes) Detach(ctx context.Context, memberID string) error {
	return v.each(ctx, memberID, func(id string, _ record) error { return v.unmount(id) })
}

func (v *Volumes) unmount(id string) error {
	if err := mountpoint.Remove(v.mountPoint(id)); err != nil {
		return failed("unmount", err)
	}
	return nil
}

// RemoveMember deletes the member's own volumes and ends its use of the project's.
func (v *Volumes) RemoveMember(ctx context.Context, memberID string) error {
	return errors.Join(v.removeInterrupted(ctx, memberID), v.each(ctx, memberID, func(id string, r record) error {
		if after, changed := r.without(memberID); changed {
			return errors.Join(v.unmount(id), v.store(id, after))
		}
		return v.delete(ctx, id)
	}))
}

// each calls do for the volumes that a member has, with their locks.
func (v *Volumes) each(ctx context.Context, memberID string, do func(id string, r record) error) error {
	ids, err := v.ids()
	if err != nil {
		return err
	}
	var errs []error
	for _, id := range ids {
		own := strings.HasPrefix(id, memberID+".")
		if r, err := v.load(id); !own && err == nil && !r.isOf(memberID) {
			continue // its lock may be taken for hours, by a copy
		}
		errs = append(errs, func() error {
			unlock, err := v.lock(ctx, id)
			if err != nil {
				return err
			}
			defer unlock()
			if _, err := os.Lstat(v.path(id)); errors.Is(err, fs.ErrNotExist) {
				return nil // deleted meanwhile
			}
			r, err := v.load(id)
			switch {
			case own:
				return do(id, r) // whether or not its record can be read
			case err != nil: // one of another member, or of a project
				v.cfg.Log.ErrorContext(ctx, "the record of a volume cannot be read", slog.String("volume_id", id),
					slog.Any("error", err))
				return nil
			case !r.isOf(memberID):
				return nil
			}
			return do(id, r)
		}())
	}
	return errors.Join(errs...)
}

// delete removes a volume that nothing uses, with its snapshots. It is gone once its directory has another name. A
// repair of the disk may have taken its image away.
func (v *Volumes) delete(ctx context.Context, id string) error {
	if err := v.quiesce(ctx, id); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return failed("delete", err)
	}
	gone := v.path(deletedPrefix + id)
	if err := errors.Join(os.RemoveAll(gone), os.Rename(v.path(id), gone), durable.SyncDir(v.cfg.Dir)); err != nil {
		return failed("delete", err)
	}
	return os.RemoveAll(gone)
}

// snapshot copies the image. A mounted one stays frozen meanwhile.
func (v *Volumes) snapshot(ctx context.Context, id, to string) (err error) {
	name, err := device(v.image(id))
	if err != nil {
		return err
	}
	if name != "" && !isMounted(name, v.mountPoint(id)) {
		if err := awaitIdle(ctx, v.image(id)); err != nil {
			return err
		}
	} else if name != "" {
		thaw, err := freeze(v.mountPoint(id))
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, thaw()) }()
	}
	return v.copyImage(ctx, v.image(id), to)
}

// Leftovers lists what still exists of a member's own volumes, as "<kind> <what>" with the kinds of package protocol.
func (v *Volumes) Leftovers(memberID string) ([]string, error) {
	var left []string
	for _, dir := range []string{v.cfg.Dir, v.cfg.MountDir} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, failed("read its directory", err)
		}
		for _, e := range entries {
			if strings.HasPrefix(interrupted(e.Name()), memberID+".") {
				left = append(left, protocol.AbsentVolume+" "+filepath.Join(dir, e.Name()))
			}
		}
	}
	return left, nil
}

// Purge deletes all volumes, of projects too. For uninstalling.
func (v *Volumes) Purge(ctx context.Context) error {
	ids, err := v.ids()
	if err != nil {
		return err
	}
	for _, id := range ids {
		if err := v.delete(ctx, id); err != nil {
			return err
		}
	}
	return errors.Join(os.RemoveAll(v.cfg.MountDir), os.RemoveAll(v.cfg.Dir))
}

func (v *Volumes) ids() ([]string, error) {
	entries, err := os.ReadDir(v.cfg.Dir)
	if err != nil {
		return nil, failed("read its directory", err)
	}
	var ids []string
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

func (v *Volumes) load(id string) (record, error) {
	raw, err := os.ReadFile(filepath.Join(v.path(id), recordName))
	if err != nil {
		return record{}, err
	}
	var r record
	return r, json.Unmarshal(raw, &r)
}

func (v *Volumes) store(id string, r record) error {
	return durable.Replace(filepath.Join(v.path(id), recordName), r.encode(), 0o600)
}

func (v *Volumes) lock(ctx context.Context, id string) (unlock func(), err error) {
	return v.locks.Lock(ctx, id)
}
