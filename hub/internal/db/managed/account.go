package managed

import (
	"errors"
	"os"
	"os/user"
	"strconv"
	"strings"
	"syscall"
)

// account is who runs the server. same means the hub's own user.
type account struct {
	name     string
	uid, gid uint32
	same     bool
}

// unprivileged finds the server's user: the hub's own unless that is root, whom PostgreSQL refuses.
func unprivileged(wanted string) (account, error) {
	if os.Geteuid() != 0 {
		me, err := user.Current()
		if err != nil {
			return account{}, refuse(codeDatabaseUser, "The hub's own user cannot be found.", err)
		}
		if wanted != "" && wanted != me.Username {
			return account{}, refuse(codeDatabaseUser, "Only root can run the database as another user: leave the database "+
				"user empty.", nil)
		}
		return describe(me, true)
	}
	names := []string{"gpuaas-hub", "gpuaas", "postgres"}
	if wanted != "" {
		names = []string{wanted}
	}
	for _, name := range names {
		u, err := user.Lookup(name)
		if err != nil {
			if _, unknown := errors.AsType[user.UnknownUserError](err); unknown {
				continue
			}
			return account{}, refuse(codeDatabaseUser, "The user "+name+" cannot be read from the list of users.", err)
		}
		if u.Uid == "0" {
			return account{}, refuse(codeDatabaseUser, "PostgreSQL refuses to run as root: name an unprivileged user.", nil)
		}
		return describe(u, false)
	}
	return account{}, refuse(codeDatabaseUser, "PostgreSQL refuses to run as root and none of these users exists: "+
		strings.Join(names, ", ")+". Install Debian's package postgresql, or make one with: useradd --system gpuaas-hub", nil)
}

func describe(u *user.User, same bool) (account, error) {
	uid, uidErr := strconv.ParseUint(u.Uid, 10, 32)
	gid, gidErr := strconv.ParseUint(u.Gid, 10, 32)
	if err := errors.Join(uidErr, gidErr); err != nil {
		return account{}, refuse(codeDatabaseUser, "The number of user "+u.Username+" or of its group cannot be read.", err)
	}
	return account{name: u.Username, uid: uint32(uid), gid: uint32(gid), same: same}, nil
}

// mayEnter says whether the mode bits let the user pass through dir. Access lists are ignored; they can only make
// the server's own error come later.
func (a account) mayEnter(dir string) (bool, error) {
	info, err := os.Stat(dir)
	if err != nil {
		return false, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return true, nil
	}
	mode := info.Mode().Perm()
	switch {
	case st.Uid == a.uid:
		return mode&0o100 != 0, nil
	case st.Gid == a.gid:
		return mode&0o010 != 0, nil
	}
	return mode&0o001 != 0, nil
}

// own gives a path to the server's user.
func (a account) own(path string) error {
	if a.same {
		return nil
	}
	return os.Chown(path, int(a.uid), int(a.gid))
}

// attributes makes a child run as the server's user and die with the hub. The signal is PostgreSQL's fast shutdown: its
// backends end cleanly, where a killed postmaster would leave them to notice by themselves.
func (a account) attributes() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Pdeathsig: syscall.SIGINT, Setpgid: true}
	if !a.same {
		attr.Credential = &syscall.Credential{Uid: a.uid, Gid: a.gid, Groups: []uint32{}}
	}
	return attr
}
