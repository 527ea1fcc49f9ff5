//go:build !failpoint

package failpoint

import "time"

// Now is the machine's clock.
func Now() time.Time { return time.Now() }

// Machine is a time that another program on this machine has told.
func Machine(t time.Time) time.Time { return t }

// BootID is the kernel's.
func BootID(kernels string) string { return kernels }
