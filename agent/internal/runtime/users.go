package runtime

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/google/uuid"
	mobyuser "github.com/moby/sys/user"
)

// maxCachedUsers bounds the memory of resolved users; it is emptied when full.
const maxCachedUsers = 256

// maxUserFileBytes bounds how much of an image's /etc/passwd and /etc/group is read.
const maxUserFileBytes = 1 << 20

// resolveUser turns what a manifest or image says ("", "1000", "1000:100", "jovyan", "jovyan:users") into ids, with the
// help of the image's own /etc/passwd and /etc/group.
func (r *Runtime) resolveUser(ctx context.Context, image client.Image, who string) (user, error) {
	if u, ok := numericUser(who); ok {
		return u, r.checkUser(u)
	}
	key := image.Target().Digest.String() + " " + who
	r.mu.Lock()
	u, ok := r.users[key]
	r.mu.Unlock()
	if ok {
		return u, nil
	}
	u, err := r.findUser(ctx, image, who)
	if err != nil {
		return user{}, err
	}
	if err := r.checkUser(u); err != nil {
		return user{}, err
	}
	r.mu.Lock()
	if len(r.users) >= maxCachedUsers {
		clear(r.users)
	}
	r.users[key] = u
	r.mu.Unlock()
	return u, nil
}

// numericUser needs no mount of the image.
func numericUser(who string) (user, bool) {
	uid, gid, both := strings.Cut(who, ":")
	u, err1 := strconv.ParseUint(uid, 10, 31)
	g, err2 := strconv.ParseUint(gid, 10, 31)
	return user{uid: uint32(u), gid: uint32(g)}, both && err1 == nil && err2 == nil
}

func (r *Runtime) checkUser(u user) error {
	for _, id := range append([]uint32{u.uid, u.gid}, u.groups...) {
		if r.host.userNamespaces && id >= r.cfg.UIDMapSize {
			return badSpec(fmt.Sprintf("User and group ids in a container must be below %d.", r.cfg.UIDMapSize))
		}
	}
	return nil
}

func (r *Runtime) findUser(ctx context.Context, image client.Image, who string) (user, error) {
	parent, err := r.imageSnapshot(ctx, image)
	if err != nil {
		return user{}, err
	}
	ctx, done, err := r.client.WithLease(ctx)
	if err != nil {
		return user{}, fmt.Errorf("lease: %w", err)
	}
	defer func() {
		end, cancel := r.detached(ctx)
		defer cancel()
		_ = done(end)
	}()
	service := r.client.SnapshotService(snapshotter)
	// Each has a view of its own: containers of one image start side by side, and the first to end removes its view.
	key := "inspect-" + uuid.NewString()
	mounts, err := service.View(ctx, key, parent)
	if err != nil {
		return user{}, fmt.Errorf("inspect the image: %w", err)
	}
	defer func() {
		end, cancel := r.detached(ctx)
		defer cancel()
		_ = service.Remove(end, key)
	}()
	var exec *mobyuser.ExecUser
	err = mount.WithReadonlyTempMount(ctx, mounts, func(root string) error {
		exec, err = execUser(root, who)
		return err
	})
	if err != nil {
		return user{}, err
	}
	u := user{uid: uint32(exec.Uid), gid: uint32(exec.Gid)}
	for _, g := range exec.Sgids {
		u.groups = append(u.groups, uint32(g))
	}
	return u, nil
}

func execUser(root, who string) (*mobyuser.ExecUser, error) {
	// os.Root does not follow links out of the image: its passwd must not be the host's.
	dir, err := os.OpenRoot(root)
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }()
	passwd, err := readUserFile(dir, "etc/passwd")
	if err != nil {
		return nil, err
	}
	group, err := readUserFile(dir, "etc/group")
	if err != nil {
		return nil, err
	}
	found, err := mobyuser.GetExecUser(who, &mobyuser.ExecUser{}, bytes.NewReader(passwd), bytes.NewReader(group))
	if err != nil {
		return nil, badSpec("The image does not know the user that the service or the image itself names.")
	}
	return found, nil
}

// readUserFile reads the beginning of a file; a missing file counts as empty. It opens nothing but a regular file: a
// named pipe would block it for ever, and a device would be opened with the host's rights.
func readUserFile(image *os.Root, name string) ([]byte, error) {
	unreadable := badSpec("The image's /" + name + " cannot be read.")
	info, err := image.Stat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil || !info.Mode().IsRegular():
		return nil, unreadable
	}
	f, err := image.Open(name)
	if err != nil {
		return nil, unreadable
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(io.LimitReader(f, maxUserFileBytes))
}
