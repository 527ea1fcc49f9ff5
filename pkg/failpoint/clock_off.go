//go:build !failpoint

package failpoint

import "time"

// Now is the machine's clock.
func Now() time.Time { return time.Now() }

// Machine converts a time of another program on this machine; without failpoints it is that time.
func Machine(t time.Time) time.Time { return t }

// BootID is the kernel's.
func BootID(kernels string) string { return kernels }
