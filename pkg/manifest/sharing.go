package manifest

import (
	"slices"
)

// FeatureSharing is an accelerator that the instances of one org share.
const FeatureSharing = "accelerator_sharing"

// checkSharing finds what keeps an instance of the version from having a slice of an accelerator. An instance has one
// slice: a CUDA program talks to one MPS daemon, and gains nothing from two time slices of one GPU.
func (m Manifest) checkSharing(f *findings) {
	p := m.Version.RuntimeProfile
	at := p.pointer(p.mainIndex()) + "/resources/accelerator_sharing"
	switch {
	case len(p.MainService().Resources.AcceleratorSharing) == 0:
	case !slices.Contains(m.Version.Compatibility.SupportedAccelerators, AcceleratorNVIDIA):
		f.add(at, "needs a variant for "+AcceleratorNVIDIA+": no other accelerator is shared")
	case m.AcceleratorBounds().Min > 1:
		f.add(at, "needs an instance that can do with one accelerator")
	}
}

// findSharing finds what is wrong with a choice to share the accelerator.
func (m Manifest) findSharing(f *findings, c Choice) {
	count := int(m.AcceleratorBounds().Default)
	if c.Accelerators != nil {
		count = *c.Accelerators
	}
	if reason := m.againstSharing(c.AcceleratorSharing); reason != "" {
		f.add("/resources/accelerator_sharing", reason)
	} else if c.AcceleratorSharing != "" && count != 1 {
		f.add("/resources/accelerators", "must be 1 with accelerator_sharing: an instance has one slice")
	}
}

// againstSharing says why an instance may not share its accelerator so; empty where it may, or shares none.
func (m Manifest) againstSharing(sharing string) string {
	allowed := m.Version.RuntimeProfile.MainService().Resources.AcceleratorSharing
	if sharing == "" || slices.Contains(allowed, sharing) {
		return ""
	}
	return "the version does not allow it"
}
