package protocol

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"
)

// SpecDigests returns, by name, a digest of each service that changes whenever its container must be made anew: with
// its spec, the secret parameters, and each service that it depends on and that has another address for each spec.
func SpecDigests(w *Workload) map[string]string {
	d := specDigests{w, SealedParameters(w.GetParametersJson()), map[string]string{}}
	if d.sealed == nil {
		d.sealed = map[string][]byte{}
	}
	delete(d.sealed, PackageIndexParameter)
	for name, secret := range SecretReferences(w.GetParametersJson()) {
		d.sealed[name] = []byte(secret) // the hub compares workloads before it fills them in
	}
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

// own leaves out a config and secret parameters that running containers take over. A volume is snapshot, and restored,
// between the containers of two versions.
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
	if KeepsSecrets(s) {
		fmt.Fprintf(h, "secrets %t\n", len(d.sealed) > 0)
	} else {
		writeSealed(h, d.sealed)
	}
	if snapshot {
		fmt.Fprintf(h, "version %q\n", d.workload.GetAppVersion())
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Images returns the images of a service: its own, first, and those that it mounts.
func (x *Service) Images() []string {
	images := []string{x.GetImage()}
	for _, m := range x.GetImageMounts() {
		if !slices.Contains(images, m.GetImage()) {
			images = append(images, m.GetImage())
		}
	}
	return images
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

// KeepsSecrets reports whether running containers of a service take over new secret parameters.
func KeepsSecrets(s *Service) bool {
	return s.GetSecrets().GetOnChange() == Config_SIGNAL || s.GetSecrets().GetOnChange() == Config_NONE
}

// SealedDigest is the SHA-256 of the sealed parameters in hex.
func SealedDigest(sealed map[string][]byte) string {
	h := sha256.New()
	writeSealed(h, sealed)
	return hex.EncodeToString(h.Sum(nil))
}

func writeSealed(w io.Writer, sealed map[string][]byte) {
	for _, name := range slices.Sorted(maps.Keys(sealed)) {
		_, _ = fmt.Fprintf(w, "%q %x\n", name, sealed[name]) // to a hash
	}
}
