package main

import (
	"fmt"
	"os"
	"syscall"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/daemon"
)

// thisProcess is what a hub writes into the lease of its database. Its owner is the file that it has locked, under this
// kernel: where that is the same, the process before is gone.
func thisProcess(lock *os.File) (db.Process, error) {
	p := db.Process{ID: db.NewID(), PID: os.Getpid()}
	p.Host, _ = os.Hostname()
	p.Owner = p.ID
	info, err := lock.Stat()
	if err != nil {
		return p, fmt.Errorf("read the lock of the data directory: %w", err)
	}
	boot, err := daemon.BootID() // the kernel keeps the locks on files
	if stat, ok := info.Sys().(*syscall.Stat_t); ok && err == nil {
		p.Owner = fmt.Sprintf("%s/%d:%d", boot, stat.Dev, stat.Ino)
	}
	return p, nil
}
