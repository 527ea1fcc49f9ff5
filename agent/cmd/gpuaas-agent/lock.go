package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// lockFile is locked as long as an agent, or uninstall, works on the data directory.
const lockFile = "lock"

// lockDataDir keeps a second agent away. Close the file to let go.
func lockDataDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fault.New(fault.Internal, fault.CodeDataDirUnusable,
			fmt.Sprintf("The data directory %s cannot be written: check that it exists, belongs to this user and has free "+
				"space.", dir), err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(fault.New(fault.Conflict, fault.CodeDataDirInUse,
			"Another gpuaas-agent works on the data directory "+dir+": stop it first, or give this one a directory of its own.",
			err), f.Close())
	}
	return f, nil
}
