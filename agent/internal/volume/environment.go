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
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/mountpoint"
	"github.com/gpuaas/gpuaas/pkg/durable"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/keylock"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// environmentFreePart is the part of the disk that environments without a user do not take from others.
	environmentFreePart = 7
	buildPrefix         = ".build-"
)

// Environments are those installed on this node. Each is an image like a volume's, which is written once, by one
// container, and only read afterwards. Its methods may be called at the same time.
type Environments struct {
	cfg Config
	// volumes reserves the space of images.
	volumes *Volumes
	locks   keylock.Map

	mu sync.Mutex
	// building has the orgs of the runs that this process has begun builds for.
	building map[string]string
}

// Environment is what the node remembers of an installed environment.
type Environment struct {
	// ID is that of agent.EnvironmentID.
	ID           string   `json:"id"`
	Image        string   `json:"image"`
	Requirements []string `json:"requirements"`
	// SizeBytes is what it takes of the disk.
	SizeBytes uint64 `json:"size_bytes"`
	// Packages is the directory of its packages, below the environment.
	Packages string    `json:"packages"`
	BuiltAt  time.Time `json:"built_at"`
	// UsedAt is when a container was last given it.
	UsedAt time.Time `json:"-"`
}

// OpenEnvironments removes what an interrupted deletion left. An installation may still run: Collect removes those that
// were interrupted.
func OpenEnvironments(cfg Config, volumes *Volumes) (*Environments, error) {
	e := &Environments{cfg: cfg, volumes: volumes, building: map[string]string{}}
	e.cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, environmentFailed("make its directory", err)
	}
	if err := os.MkdirAll(cfg.MountDir, 0o711); err != nil { //nolint:gosec // a container's root walks through it
		return nil, environmentFailed("make its directory", err)
	}
	deleted, err := filepath.Glob(e.path(deletedPrefix + "*"))
	for _, dir := range deleted {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	if err != nil { // it keeps no other from being used
		e.cfg.Log.Error("a deleted environment cannot be removed", slog.Any("error", err))
	}
	return e, nil
}

func (e *Environments) path(name string) string       { return filepath.Join(e.cfg.Dir, name) }
func (e *Environments) image(name string) string      { return filepath.Join(e.cfg.Dir, name, imageName) }
func (e *Environments) mountPoint(name string) string { return filepath.Join(e.cfg.MountDir, name) }

// Begin makes an empty file system for the container of that run to install an environment in, and returns the
// directory for the container. used has the orgs of the environments that are in use; others may be removed for its
// space.
func (e *Environments) Begin(ctx context.Context, runID, orgID string, sizeBytes uint64,
	used map[string]string,
) (dir string, err error) {
	if err := e.volumes.Supported(); err != nil {
		return "", err
	}
	e.mu.Lock()
	e.building[runID] = orgID
	e.mu.Unlock()
	name := buildPrefix + runID
	err = e.reserve(ctx, name, orgID, sizeBytes, used)
	if err == nil {
		err = mountImage(ctx, e.image(name), e.mountPoint(name), 0)
	}
	dir = filepath.Join(e.mountPoint(name), contentName)
	if err == nil {
		err = os.Mkdir(dir, 0o755) //nolint:gosec // the container's user owns it and gives others nothing
	}
	if err != nil {
		return "", errors.Join(environmentFailed("make", err), e.Discard(context.WithoutCancel(ctx), runID))
	}
	return dir, nil
}

// reserve makes the image of an environment, in place of unused ones where there is no room for it. One org has half of
// the node's at most, so that none keeps others from theirs.
func (e *Environments) reserve(ctx context.Context, name, orgID string, sizeBytes uint64,
	used map[string]string,
) error {
	left, err := e.makeRoom(ctx, used, func(left int) bool { return left < protocol.MaxEnvironments })
	if err != nil {
		return err
	}
	ofOrg, err := e.ofOrg(orgID, used)
	if err != nil {
		return err
	}
	if left >= protocol.MaxEnvironments || ofOrg > protocol.MaxEnvironments/2 {
		return fault.New(fault.Unavailable, agent.CodeVolumeNoSpace, fmt.Sprintf("The node has %d environments in use. It "+
			"may have no more than %d, half of them of one org.", left, protocol.MaxEnvironments), nil).Permanent()
	}
	if err := os.MkdirAll(e.path(name), 0o700); err != nil {
		return err
	}
	err = e.volumes.makeImage(ctx, e.image(name), sizeBytes)
	if err == nil || fault.As(err).Code != agent.CodeVolumeNoSpace {
		return err
	}
	if _, err := e.makeRoom(ctx, used, func(int) bool { return false }); err != nil {
		return err
	}
	return e.volumes.makeImage(ctx, e.image(name), sizeBytes)
}

// ofOrg counts the environments that an org uses or installs.
func (e *Environments) ofOrg(orgID string, used map[string]string) (n int, err error) {
	all, err := e.List()
	for _, one := range all {
		if used[one.ID] == orgID {
			n++
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, org := range e.building {
		if org == orgID {
			n++
		}
	}
	return n, err
}

// Commit makes what the run has installed the environment of that id. The container must have ended. It is there whole
// or not at all, also after a power cut, and committing it again changes nothing.
func (e *Environments) Commit(ctx context.Context, runID string, made Environment) error {
	unlock, err := e.locks.Lock(ctx, made.ID)
	if err != nil {
		return err
	}
	defer unlock()
	if e.Has(made.ID) {
		return e.Discard(ctx, runID) // another container was faster, or a crash came after the rename
	}
	name := buildPrefix + runID
	// A crash may have come after seal has unmounted it.
	err = mountImage(ctx, e.image(name), e.mountPoint(name), 0)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return environmentFailed("mount", err)
	}
	if made.Packages, err = e.seal(ctx, name); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Stat(e.image(name), &st); err != nil {
		return environmentFailed("measure", err)
	}
	made.SizeBytes = uint64(st.Blocks) * 512
	record, err := json.Marshal(made)
	if err == nil {
		err = durable.Replace(filepath.Join(e.path(name), recordName), record, 0o600)
	}
	if err != nil {
		return environmentFailed("record", err)
	}
	failpoint.Hit("agent/environment/sealed")
	if err := errors.Join(os.Rename(e.path(name), e.path(made.ID)), durable.SyncDir(e.cfg.Dir)); err != nil {
		return environmentFailed("keep", err)
	}
	failpoint.Hit("agent/environment/kept")
	e.forget(runID)
	return nil
}

// seal unmounts what was installed, with all of it on the disk and unused space given back.
func (e *Environments) seal(ctx context.Context, name string) (packages string, err error) {
	at := e.mountPoint(name)
	found, err := filepath.Glob(filepath.Join(at, contentName, "lib", "python3*", "site-packages"))
	if err != nil {
		return "", environmentFailed("read", err)
	}
	for _, path := range found {
		// The path goes into a list that colons separate.
		if info, err := os.Lstat(path); err == nil && info.IsDir() && !strings.Contains(path, ":") {
			packages = strings.TrimPrefix(path, filepath.Join(at, contentName)+"/")
		}
	}
	if packages == "" {
		return "", fault.New(fault.Unprocessable, codeEnvironmentFailed, "Nothing was installed.", nil).Permanent()
	}
	err = onDir(at, func(fd uintptr) error { return unix.Syncfs(int(fd)) })
	if err != nil {
		return "", environmentFailed("sync", err)
	}
	if err := trim(at); err != nil {
		e.cfg.Log.InfoContext(ctx, "an environment keeps its reserved space", slog.Any("error", err))
	}
	if err := mountpoint.Unmount(at); err != nil {
		return "", environmentFailed("unmount", err)
	}
	if err := errors.Join(awaitIdle(ctx, e.image(name)), removeIfThere(at)); err != nil {
		return "", environmentFailed("unmount", err)
	}
	file, err := os.OpenFile(e.image(name), os.O_RDWR, 0)
	if err != nil {
		return "", environmentFailed("sync", err)
	}
	return packages, errors.Join(file.Sync(), file.Close())
}

// Use mounts an environment for a container, and returns its directory and, below it, that of its packages.
func (e *Environments) Use(ctx context.Context, id string) (dir, packages string, err error) {
	unlock, err := e.locks.Lock(ctx, id)
	if err != nil {
		return "", "", err
	}
	defer unlock()
	r, err := e.load(id)
	if err != nil {
		if errors.Is(err, errDamaged) { // it is installed anew
			err = errors.Join(err, e.remove(ctx, id))
		}
		return "", "", environmentFailed("find", err)
	}
	if err := mountImage(ctx, e.image(id), e.mountPoint(id), unix.MS_RDONLY); err != nil {
		if e.lacksFileSystem(id, err) { // it is installed anew
			err = errors.Join(err, e.remove(ctx, id))
		}
		return "", "", environmentFailed("mount", err)
	}
	now := time.Now()
	if err := os.Chtimes(filepath.Join(e.path(id), recordName), now, now); err != nil {
		return "", "", environmentFailed("mark", err)
	}
	return filepath.Join(e.mountPoint(id), contentName), r.Packages, nil
}

// lacksFileSystem reports whether an image could not be mounted because it is gone or holds no whole file system: ext4
// so names a damaged superblock, group or checksum. One that cannot be read at present may be whole.
func (e *Environments) lacksFileSystem(id string, err error) bool {
	_, missing := os.Lstat(e.image(id))
	return errors.Is(missing, fs.ErrNotExist) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EUCLEAN) ||
		errors.Is(err, unix.EBADMSG)
}

// Has reports whether the environment is installed.
func (e *Environments) Has(id string) bool {
	_, err := os.Lstat(filepath.Join(e.path(id), recordName))
	return err == nil
}

func (e *Environments) load(id string) (Environment, error) {
	var r Environment
	path := filepath.Join(e.path(id), recordName)
	info, err := os.Stat(path)
	if err != nil {
		return r, err
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return r, err
	}
	r.UsedAt = info.ModTime()
	if err := json.Unmarshal(raw, &r); err != nil {
		return r, fmt.Errorf("%w: %w", errDamaged, err)
	}
	return r, nil
}

// errDamaged says that an environment's record is none. One that cannot be read at present may be whole.
var errDamaged = errors.New("the record is damaged")

func (e *Environments) isDamaged(id string) bool {
	_, err := e.load(id)
	return errors.Is(err, errDamaged)
}

// List returns the installed environments, the longest unused first.
func (e *Environments) List() ([]Environment, error) {
	entries, err := os.ReadDir(e.cfg.Dir)
	if err != nil {
		return nil, environmentFailed("list", err)
	}
	var all []Environment
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), ".") {
			continue
		}
		if one, err := e.load(entry.Name()); err == nil {
			all = append(all, one)
		} else if !errors.Is(err, fs.ErrNotExist) { // a damaged one hides no other
			e.cfg.Log.Error("the record of an environment cannot be read", slog.String("environment", entry.Name()),
				slog.Any("error", err))
		}
	}
	slices.SortFunc(all, func(a, b Environment) int {
		return cmp.Or(a.UsedAt.Compare(b.UsedAt), cmp.Compare(a.ID, b.ID))
	})
	return all, nil
}

// Discard removes what a run has installed, if it is there. The container must have ended.
func (e *Environments) Discard(ctx context.Context, runID string) error {
	if err := e.remove(ctx, buildPrefix+runID); err != nil {
		return err
	}
	e.forget(runID)
	return nil
}

func (e *Environments) forget(runID string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.building, runID)
}

// Delete removes an environment that no container has.
func (e *Environments) Delete(ctx context.Context, id string) error {
	if !idPattern.MatchString(id) {
		return nil // no environment has such an id
	}
	unlock, err := e.locks.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	return e.remove(ctx, id)
}

// remove unmounts an image and deletes it. It is gone once its directory has another name.
func (e *Environments) remove(ctx context.Context, name string) error {
	if _, err := os.Lstat(e.path(name)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := mountpoint.Remove(e.mountPoint(name)); err != nil {
		return environmentFailed("unmount", err)
	}
	if err := awaitIdle(ctx, e.image(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return environmentFailed("unmount", err)
	}
	gone := e.path(deletedPrefix + strings.TrimPrefix(name, "."))
	if err := errors.Join(os.RemoveAll(gone), os.Rename(e.path(name), gone), durable.SyncDir(e.cfg.Dir)); err != nil {
		return environmentFailed("delete", err)
	}
	return os.RemoveAll(gone)
}

// makeRoom removes environments that used does not name, the longest unused first, until enough says so of how many are
// left. One that a container still has, as its member has only just left the state, keeps no other from going.
func (e *Environments) makeRoom(ctx context.Context, used map[string]string, enough func(left int) bool) (int, error) {
	all, err := e.List()
	left := len(all)
	for _, one := range all {
		if enough(left) || ctx.Err() != nil {
			break
		}
		if _, is := used[one.ID]; is {
			continue
		}
		if err := e.Delete(ctx, one.ID); err != nil {
			e.cfg.Log.WarnContext(ctx, "an environment cannot be removed", slog.String("environment", one.ID),
				slog.Any("error", err))
			continue
		}
		e.cfg.Log.InfoContext(ctx, "an environment that nothing uses was removed", slog.String("environment", one.ID))
		left--
	}
	return left, errors.Join(err, ctx.Err())
}

// Collect unmounts the environments that used does not name, removes of these the damaged ones and, while the disk is
// short of space, the longest unused, and removes installations whose run does not exist any more.
func (e *Environments) Collect(ctx context.Context, used map[string]string, exists func(runID string) bool) error {
	entries, err := os.ReadDir(e.cfg.Dir)
	if err != nil {
		return environmentFailed("list", err)
	}
	var errs []error
	for _, entry := range entries {
		runID, isBuild := strings.CutPrefix(entry.Name(), buildPrefix)
		e.mu.Lock()
		_, begun := e.building[runID]
		e.mu.Unlock()
		_, isUsed := used[entry.Name()]
		switch {
		case isBuild && !begun && !exists(runID):
			errs = append(errs, e.Discard(ctx, runID))
		case isBuild || isUsed || strings.HasPrefix(entry.Name(), "."):
		case e.isDamaged(entry.Name()):
			errs = append(errs, e.Delete(ctx, entry.Name()))
		default:
			errs = append(errs, e.detach(ctx, entry.Name()))
		}
	}
	_, err = e.makeRoom(ctx, used, func(int) bool {
		var st unix.Statfs_t
		err := unix.Statfs(e.cfg.Dir, &st)
		return err != nil || st.Bavail >= st.Blocks/environmentFreePart
	})
	return errors.Join(append(errs, err)...)
}

func (e *Environments) detach(ctx context.Context, id string) error {
	unlock, err := e.locks.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	return mountpoint.Remove(e.mountPoint(id))
}

// RemoveMember removes what a member's containers were installing. A run's id begins with its member's.
func (e *Environments) RemoveMember(ctx context.Context, memberID string) error {
	entries, err := os.ReadDir(e.cfg.Dir)
	if err != nil {
		return environmentFailed("list", err)
	}
	var errs []error
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), deletedPrefix+strings.TrimPrefix(buildPrefix, ".")+memberID+".") {
			errs = append(errs, os.RemoveAll(e.path(entry.Name()))) // a crash interrupted it
		} else if strings.HasPrefix(entry.Name(), buildPrefix+memberID+".") {
			errs = append(errs, e.Discard(ctx, strings.TrimPrefix(entry.Name(), buildPrefix)))
		}
	}
	return errors.Join(errs...)
}

// Purge deletes all environments. For uninstalling.
func (e *Environments) Purge(ctx context.Context) error {
	entries, err := os.ReadDir(e.cfg.Dir)
	if err != nil {
		return environmentFailed("list", err)
	}
	for _, entry := range entries {
		if err := e.remove(ctx, entry.Name()); err != nil {
			return err
		}
	}
	return errors.Join(os.RemoveAll(e.cfg.MountDir), os.RemoveAll(e.cfg.Dir))
}

// environmentFailed is failed in words for environments.
func environmentFailed(what string, err error) error {
	return failure(codeEnvironmentFailed, what+" an environment", err)
}
