package protocol

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"
)

// SpecDigests returns, by name, a digest of each service that changes whenever its container must be made anew: with
// its spec, the secret parameters, and each service that it depends on and that has another address for each spec.
func SpecDigests(w *Workload) map[string]string {
	d := specDigests{w, SealedParameters(w.GetParametersJson()), map[string]string{}}
	delete(d.sealed, PackageIndexParameter)
	for _, s := range w.GetServices() {
		d.of(s)
	}
	return d.done
}

type specDigests struct {
	workload *Workload
	sealed   map[string][]byte
	done     map[string]string
}

func (d specDigests) of(s *Service) string {
	if digest, done := d.done[s.GetName()]; done {
		return digest
	}
	digest := d.own(s)
	d.done[s.GetName()] = digest // dependencies that are a cycle are refused elsewhere
	h := sha256.New()
	h.Write([]byte(digest))
	moves := false
	for _, dep := range s.GetDependsOn() {
		i := slices.IndexFunc(d.workload.GetServices(), func(o *Service) bool { return o.GetName() == dep.GetService() })
		if i < 0 || dep.GetCondition() == Dependency_SERVICE_COMPLETED_SUCCESSFULLY {
			continue
		}
		if on := d.workload.GetServices()[i]; on.GetStartFirst() {
			moves = true
			fmt.Fprintf(h, "%q %s\n", on.GetName(), d.of(on))
		}
	}
	if moves {
		d.done[s.GetName()] = hex.EncodeToString(h.Sum(nil))
	}
	return d.done[s.GetName()]
}

// own leaves out a config that running containers take over. The secret parameters are the container's, too: it gets
// others only when it is made anew. A volume is snapshot, and restored, between the containers of two versions.
func (d specDigests) own(s *Service) string {
	keepsConfig := s.GetConfig() != nil && s.GetConfig().GetOnChange() != Config_RESTART
	if keepsConfig || s.GetRecreate() {
		s = proto.CloneOf(s)
		s.Recreate = false
	}
	if keepsConfig {
		s.Config.Json = ""
	}
	digest := ServiceDigest(s)
	snapshot := slices.ContainsFunc(s.GetVolumes(), (*VolumeMount).GetSnapshotOnUpgrade)
	if len(d.sealed) == 0 && !snapshot {
		return digest
	}
	h := sha256.New()
	h.Write([]byte(digest))
	for _, name := range slices.Sorted(maps.Keys(d.sealed)) {
		fmt.Fprintf(h, "%q %x\n", name, d.sealed[name])
	}
	if snapshot {
		fmt.Fprintf(h, "version %q\n", d.workload.GetAppVersion())
	}
	return hex.EncodeToString(h.Sum(nil))
}

// ServiceDigest is the SHA-256 of a service in hex.
func ServiceDigest(s *Service) string {
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(s)
	if err != nil {
		return "" // only for invalid UTF-8, which decoding has refused
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:])
}
