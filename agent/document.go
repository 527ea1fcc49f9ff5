package agent

import (
	"crypto/sha256"
	"encoding/hex"
	"time"

	"github.com/gpuaas/gpuaas/protocol"
)

// NewWorkload is a signed document as Diff needs it, without its fallback.
func NewWorkload(memberID string, d *protocol.Workload) Workload {
	w := Workload{
		MemberID:         memberID,
		InstanceID:       d.GetInstanceId(),
		Revision:         d.GetRevision(),
		CorrelationID:    d.GetCorrelationId(),
		Traceparent:      d.GetTraceparent(),
		OrgID:            d.GetOrgId(),
		ProjectID:        d.GetProjectId(),
		AppVersion:       d.GetAppVersion(),
		RollsBack:        d.GetRollsBack(),
		Stopped:          d.GetStopped(),
		ReadinessTimeout: time.Duration(d.GetReadinessTimeoutSeconds()) * time.Second,
		Sealed:           protocol.SealedParameters(d.GetParametersJson()),
	}
	w.SealedIndex = w.Sealed[protocol.PackageIndexParameter]
	delete(w.Sealed, protocol.PackageIndexParameter)
	digests := protocol.SpecDigests(d)
	for _, s := range d.GetServices() {
		digest := digests[s.GetName()]
		w.Services = append(w.Services, Service{
			Name:           s.GetName(),
			Images:         s.Images(),
			SpecDigest:     digest,
			Copy:           copyOf(s.GetStartFirst(), digest),
			Recreate:       s.GetRecreate(),
			Spec:           s,
			StopGrace:      time.Duration(s.GetStopGraceSeconds()) * time.Second,
			AcceleratorIDs: s.GetResources().GetAcceleratorIds(),
			ConfigSHA256:   configSHA256(s.GetConfig()),
			SecretsSHA256:  secretsSHA256(s, w.Sealed),
			PortsDigest:    portsDigest(s),
			DependsOn:      dependenciesOf(s),

			Environment:       environmentID(d.GetProjectId(), s),
			BuildsEnvironment: s.GetEnvironment().GetBuilds(),
			BuildTimeout:      time.Duration(s.GetEnvironment().GetBuildTimeoutSeconds()) * time.Second,
		})
	}
	return w
}

func dependenciesOf(s *protocol.Service) []Dependency {
	var out []Dependency
	for _, d := range s.GetDependsOn() {
		out = append(out, Dependency{d.GetService(), d.GetCondition()})
	}
	return out
}

func portsDigest(s *protocol.Service) string {
	return protocol.ServiceDigest(&protocol.Service{Name: s.GetName(), Ports: s.GetPorts()})
}

// secretsSHA256 is empty where there are none: then the container has no directory for them.
func secretsSHA256(s *protocol.Service, sealed map[string][]byte) string {
	if len(sealed) == 0 || !protocol.KeepsSecrets(s) {
		return ""
	}
	return protocol.SealedDigest(sealed)
}

func configSHA256(c *protocol.Config) string {
	if c == nil {
		return ""
	}
	sum := sha256.Sum256([]byte(c.GetJson()))
	return hex.EncodeToString(sum[:])
}
