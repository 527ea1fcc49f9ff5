package runtime

import (
	"errors"
	"os"
	"syscall"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Volume is a directory of the host that a container has at a path of its own.
type Volume struct {
	// Dir is mounted without set-user-ID programs and devices; it is the volume's own file system, or part of one.
	Dir      string
	Path     string
	ReadOnly bool
}

func (v Volume) mount() specs.Mount {
	options := "rbind,rw,nosuid,nodev"
	if v.ReadOnly {
		options = "rbind,ro,nosuid,nodev"
	}
	m := mountOf("bind", v.Path, options)
	m.Source = v.Dir
	return m
}

// ownVolumes gives new volumes, which the host's root owns, to the container's user.
func (r *Runtime) ownVolumes(p *Pending) error {
	user := p.oci.Process.User
	base := uint32(0)
	if r.host.userNamespaces {
		base = r.uidMap().HostID
	}
	for _, v := range p.Spec.Volumes {
		info, err := os.Lstat(v.Dir)
		if err != nil {
			return directoryFault(v.Dir, err)
		}
		if st, is := info.Sys().(*syscall.Stat_t); !is || st.Uid != 0 || st.Gid != 0 {
			continue
		}
		err = os.Lchown(v.Dir, int(base+user.UID), int(base+user.GID))
		if err != nil && !errors.Is(err, unix.EROFS) { // an environment is written before, by the same user
			return directoryFault(v.Dir, err)
		}
	}
	return nil
}
