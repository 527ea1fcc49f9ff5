package main

import (
	"fmt"
	"os"
	"strings"
	"syscall"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// bootIDFile names this run of the machine's kernel, which keeps the locks on its files.
const bootIDFile = "/proc/sys/kernel/random/boot_id"

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
	boot, err := os.ReadFile(bootIDFile)
	if stat, ok := info.Sys().(*syscall.Stat_t); ok && err == nil {
		p.Owner = fmt.Sprintf("%s/%d:%d", strings.TrimSpace(string(boot)), stat.Dev, stat.Ino)
	}
	return p, nil
}
