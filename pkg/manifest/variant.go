package manifest

import (
	"cmp"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Variant is the image for one kind of accelerator. Of those that suit, the first one is used.
type Variant struct {
	Name        string `json:"name"`
	Accelerator string `json:"accelerator"`
	// ImageRef is <repository>@sha256:<hex>; the registry's host is the hub's and is not part of it.
	ImageRef string `json:"image_ref"`
	// Models are patterns of the models that the image is for; * stands for any text, ? for one character, and case does
	// not count. None: every model.
	Models []string `json:"models,omitempty"`
	// MinMemoryMiB is what each accelerator must have; 0: any.
	MinMemoryMiB uint64 `json:"min_memory_mib,omitempty"`
	// Driver bounds the version of the accelerators' driver.
	Driver VersionRange `json:"driver,omitzero"`
}

// VersionRange is a range of dotted versions, both ends included; an empty end is open. A version is compared with an
// end by as many numbers as the end has: 550.90 lies below the end 550.
type VersionRange struct {
	Min string `json:"min,omitempty"`
	Max string `json:"max,omitempty"`
}

// Suits reports whether the image is for accelerators of this model, memory in bytes and driver. An accelerator that
// does not say what the variant asks for does not suit.
func (v Variant) Suits(model string, memoryBytes uint64, driver string) bool {
	return memoryBytes>>20 >= v.MinMemoryMiB && v.Driver.contains(driver) &&
		(len(v.Models) == 0 || slices.ContainsFunc(v.Models, func(pattern string) bool {
			// The schema allows no pattern that Match cannot read, and no slash, which * would not match.
			ok, err := path.Match(strings.ToLower(pattern), strings.ToLower(strings.ReplaceAll(model, "/", " ")))
			return ok && err == nil
		}))
}

// suitsAll reports whether the variant leaves nothing of its kind of accelerator to those behind it.
func (v Variant) suitsAll() bool {
	return len(v.Models) == 0 && v.MinMemoryMiB == 0 && v.Driver == VersionRange{}
}

func (r VersionRange) contains(version string) bool {
	if r == (VersionRange{}) {
		return true
	}
	numbered := version != "" && version[0] >= '0' && version[0] <= '9'
	return numbered && (r.Min == "" || compareVersions(version, r.Min) >= 0) &&
		(r.Max == "" || compareVersions(version, r.Max) <= 0)
}

// compareVersions compares the first numbers of version with those of end, as many as end has.
func compareVersions(version, end string) int {
	have := strings.Split(version, ".")
	for i, part := range strings.Split(end, ".") {
		var number uint64
		if i < len(have) {
			number = leadingNumber(have[i])
		}
		if c := cmp.Compare(number, leadingNumber(part)); c != 0 {
			return c
		}
	}
	return 0
}

// leadingNumber reads the digits that a part of a version begins with: 5 of 5-1012. Without any it is 0.
func leadingNumber(part string) uint64 {
	digits := part
	if end := strings.IndexFunc(part, func(r rune) bool { return r < '0' || r > '9' }); end >= 0 {
		digits = part[:end]
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil {
		return 0
	}
	return n
}
