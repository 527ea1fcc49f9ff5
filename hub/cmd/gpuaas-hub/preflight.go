package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/daemon"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// What can be wrong with a machine at start, found before anything is changed, and said with what to do.

const (
	// minFreeBytes is what the data directory's file system must have left: a database that meets a full disk stops.
	minFreeBytes = 256 << 20
	// clockSlack is how far this clock may be behind the one that signed the trust bundle.
	clockSlack = 5 * time.Minute
)

// checkDataDir finds out whether the hub can write below dir and keeps others out. Close the file to let go.
func checkDataDir(dir string) (lock *os.File, err error) {
	path := filepath.Join(dir, "lock")
	lock, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fault.New(fault.Internal, codeDataDirMissing, "There is no data directory "+dir+
			": run `gpuaas-hub init --data-dir "+dir+"` first.", err)
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return nil, fault.New(fault.Internal, codeDataDirUnwritable, fmt.Sprintf("The data directory %s cannot be written "+
			"by this user (uid %d): run the hub as the directory's owner, or chown it.", dir, os.Getuid()), err)
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return nil, diskFull(dir, 0, err)
	case err != nil:
		return nil, fault.New(fault.Internal, fault.CodeDataDirUnusable, "The data directory "+dir+" cannot be used.", err)
	}
	if err := daemon.Lock(lock); err != nil {
		_ = lock.Close()
		return nil, fault.New(fault.Conflict, fault.CodeDataDirInUse, "Another gpuaas-hub works on the data directory "+dir+
			": stop it first, or give this one a directory of its own.", err)
	}
	var stat syscall.Statfs_t
	if err := syscall.Statfs(dir, &stat); err == nil {
		if free := stat.Bavail * uint64(stat.Bsize); free < minFreeBytes {
			_ = lock.Close()
			return nil, diskFull(dir, free, nil)
		}
	}
	return lock, nil
}

func diskFull(dir string, free uint64, cause error) error {
	return fault.New(fault.Internal, fault.CodeDiskFull, fmt.Sprintf("The disk of the data directory %s is full: %d MiB "+
		"are "+
		"free, the hub needs %d MiB to start. Free some space, or move the directory.", dir, free>>20, minFreeBytes>>20),
		cause)
}

// checkClock compares the clock with what cannot lie in its future or past.
func checkClock(keys *trust.Keys, now time.Time) error {
	issued := keys.Bundle().Message().GetIssuedAt().AsTime()
	if now.Add(clockSlack).Before(issued) {
		return fault.New(fault.Internal, fault.CodeClockWrong, fmt.Sprintf("This machine's clock is wrong: it says %s, but "+
			"the "+
			"trust bundle was signed at %s. Set it (timedatectl set-ntp true), then start again.",
			now.UTC().Format(time.RFC3339), issued.UTC().Format(time.RFC3339)), nil)
	}
	for _, role := range []string{protocol.RoleHubCA, protocol.RoleNodeCA} {
		end, ok := keys.AuthorityExpiry(role)
		if ok && now.After(end) {
			return fault.New(fault.Internal, codeClockOrAuthority, fmt.Sprintf("The authority %s expired at %s and this "+
				"machine's clock says %s. If the clock is right, replace the authority with `gpuaas-hub trust revoke`; otherwise "+
				"set the clock.",
				role, end.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339)), nil)
		}
	}
	return nil
}

// listenTCP opens the port of the REST API.
func listenTCP(ctx context.Context, flag, addr string) (net.Listener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, listenTrouble(flag, addr, "TCP", err)
	}
	return l, nil
}

// listenTrouble says what is wrong with a listening address.
func listenTrouble(flag, addr, network string, err error) error {
	var text string
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		tool := "ss -ltnp"
		if network == "UDP" {
			tool = "ss -lunp"
		}
		text = fmt.Sprintf("The %s port of %s is taken by another program (%s shows which): stop that one, or choose "+
			"another address with --%s.", network, addr, tool, flag)
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		text = fmt.Sprintf("This user may not listen on %s (%s): ports below 1024 need CAP_NET_BIND_SERVICE; choose "+
			"another address with --%s.", addr, network, flag)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		text = fmt.Sprintf("No interface of this machine has the address of %s (%s): choose another one with --%s, and say "+
			"with --advertise-api and --advertise-session how nodes reach it.", addr, network, flag)
	default:
		text = fmt.Sprintf("The hub cannot listen on %s (%s): --%s takes HOST:PORT.", addr, network, flag)
	}
	return fault.New(fault.Unavailable, codeListenFailed, text, err)
}
