package agent

import (
	"crypto/sha256"
	"encoding/hex"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/protocol"
)

// NewWorkload is a signed document as Diff needs it, without its fallback.
func NewWorkload(memberID string, d *protocol.Workload) Workload {
	w := Workload{
		MemberID:         memberID,
		InstanceID:       d.GetInstanceId(),
		Revision:         d.GetRevision(),
		CorrelationID:    d.GetCorrelationId(),
		Stopped:          d.GetStopped(),
		ReadinessTimeout: time.Duration(d.GetReadinessTimeoutSeconds()) * time.Second,
	}
	for _, s := range d.GetServices() {
		w.Services = append(w.Services, Service{
			Name:           s.GetName(),
			Image:          s.GetImage(),
			SpecDigest:     specDigest(s),
			Spec:           s,
			StopGrace:      time.Duration(s.GetStopGraceSeconds()) * time.Second,
			AcceleratorIDs: s.GetResources().GetAcceleratorIds(),
			ConfigSHA256:   configSHA256(s.GetConfig()),
		})
	}
	return w
}

func configSHA256(c *protocol.Config) string {
	if c == nil {
		return ""
	}
	sum := sha256.Sum256([]byte(c.GetJson()))
	return hex.EncodeToString(sum[:])
}

// specDigest changes whenever anything about the container must: not with a config that running containers take over.
func specDigest(s *protocol.Service) string {
	if s.GetConfig() != nil && s.GetConfig().GetOnChange() != protocol.Config_RESTART {
		s = proto.CloneOf(s)
		s.Config.Json = ""
	}
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(s)
	if err != nil {
		return "" // only for invalid UTF-8, which decoding has refused
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:])
}
