package daemon

import (
	"fmt"
	"os"
	"strings"
)

// BootID is the id of this run of the machine's kernel (random(4)): another one after each boot.
func BootID() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}
