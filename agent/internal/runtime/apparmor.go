package runtime

import (
	"errors"
	"io/fs"
	"os"

	"github.com/containerd/containerd/v2/contrib/apparmor"
	hostapparmor "github.com/containerd/containerd/v2/pkg/apparmor"
)

// removeFile takes the names of profiles that the kernel is to forget (apparmorfs).
const removeFile = "/sys/kernel/security/apparmor/.remove"

// profileName is that of the profile of this agent's containers.
func (c Config) profileName() string { return c.Namespace + "-container" }

// loadAppArmor loads containerd's default profile where AppArmor is enabled and apparmor_parser is installed.
func loadAppArmor(profile string) (bool, error) {
	if !hostapparmor.HostSupports() {
		return false, nil
	}
	return true, apparmor.LoadDefaultProfile(profile)
}

// removeAppArmor unloads the profile. Nothing runs under it any more.
func removeAppArmor(profile string) error {
	err := os.WriteFile(removeFile, []byte(profile), 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
