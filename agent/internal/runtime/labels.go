package runtime

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// The labels on a container, by which it is found again after any crash.
const (
	labelPrefix     = "gpuaas."
	labelMember     = labelPrefix + "member"
	labelInstance   = labelPrefix + "instance"
	labelService    = labelPrefix + "service"
	labelCopy       = labelPrefix + "copy"
	labelRevision   = labelPrefix + "revision"
	labelSpecDigest = labelPrefix + "spec-digest"
	labelUserNS     = labelPrefix + "user-namespace"
	labelStopSignal = labelPrefix + "stop-signal"
	labelDiskBytes  = labelPrefix + "disk-bytes"
	labelDependsOn  = labelPrefix + "depends-on"
	// labelImageMounts names the images that the container has beside its own.
	labelImageMounts = labelPrefix + "image-mounts"
	labelStopGrace   = labelPrefix + "stop-grace"
	labelRestart     = labelPrefix + "restart"
	// labelEnvironment has the id of the environment that the container installs.
	labelEnvironment = labelPrefix + "environment"
)

func (s Spec) labels(host hostSupport, uidMap specs.LinuxIDMapping, stopSignal string,
	diskBytes int64,
) map[string]string {
	l := map[string]string{
		labelMember:     s.MemberID,
		labelInstance:   s.InstanceID,
		labelService:    s.Service.GetName(),
		labelRevision:   fmt.Sprint(s.Revision),
		labelSpecDigest: s.SpecDigest,
		labelDiskBytes:  strconv.FormatInt(diskBytes, 10),
		labelUserNS:     "none",
	}
	if host.userNamespaces {
		l[labelUserNS] = fmt.Sprintf("%d:%d", uidMap.HostID, uidMap.Size)
	}
	if s.Copy != "" {
		l[labelCopy] = s.Copy
	}
	if stopSignal != "" {
		l[labelStopSignal] = stopSignal
	}
	if seconds := s.Service.GetStopGraceSeconds(); seconds > 0 {
		l[labelStopGrace] = strconv.FormatUint(uint64(seconds), 10)
	}
	if policy := s.Service.GetRestartPolicy(); policy != 0 {
		l[labelRestart] = strconv.Itoa(int(policy))
	}
	if s.Environment != "" {
		l[labelEnvironment] = s.Environment
	}
	if names := dependenciesOf(s.Service); len(names) > 0 {
		l[labelDependsOn] = strings.Join(names, " ")
	}
	var mounted []string
	for _, m := range s.Service.GetImageMounts() {
		mounted = append(mounted, m.GetImage())
	}
	if len(mounted) > 0 {
		l[labelImageMounts] = strings.Join(mounted, " ")
	}
	s.addClaims(l)
	return l
}
