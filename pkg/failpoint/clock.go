//go:build failpoint

package failpoint

import (
	"os"
	"strings"
	"time"
)

// clockEnv names a file with how far the machine's clock is off (a Go duration such as "-24h") and, after a blank, the
// id of the boot that the machine seems to be in. Every reading of the clock reads it, so that the clock can jump.
const clockEnv = "GPUAAS_FAILPOINT_CLOCK"

// clock is what the file says; nothing where there is none.
func clock() (off time.Duration, boot string) {
	path := os.Getenv(clockEnv)
	if path == "" {
		return 0, ""
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, ""
	}
	word, rest, _ := strings.Cut(strings.TrimSpace(string(text)), " ")
	off, err = time.ParseDuration(word)
	if err != nil {
		panic("failpoint: " + path + ": " + err.Error())
	}
	return off, strings.TrimSpace(rest)
}

// Now is the machine's clock as the file sets it. Like a clock that is set, it has no monotonic reading.
func Now() time.Time { return Machine(time.Now()) }

// Machine converts the time of another program on this machine to the clock that Now reads.
func Machine(t time.Time) time.Time {
	off, _ := clock()
	return t.Round(0).Add(off)
}

// BootID is the one in the file, or else the kernel's.
func BootID(kernels string) string {
	if _, boot := clock(); boot != "" {
		return boot
	}
	return kernels
}
