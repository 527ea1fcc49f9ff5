package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/gpuaas/gpuaas/pkg/daemon"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// lockFile is the file in the data directory that a running agent, enroll or uninstall locks.
const lockFile = "lock"

// lockDataDir locks the data directory against other agents until the file is closed.
func lockDataDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fault.New(fault.Internal, fault.CodeDataDirUnusable,
			fmt.Sprintf("The data directory %s cannot be written: check that it exists, belongs to this user and has free "+
				"space.", dir), err)
	}
	if err := daemon.Lock(f); err != nil {
		return nil, errors.Join(fault.New(fault.Conflict, fault.CodeDataDirInUse,
			"Another gpuaas-agent works on the data directory "+dir+": stop it first, or give this one a directory of its own.",
			err), f.Close())
	}
	return f, nil
}
