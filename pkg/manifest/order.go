package manifest

import (
	"cmp"
	"strings"
)

// Older reports whether a version comes before another one. Versions are ordered like those of Semantic Versioning
// 2.0.0 (section 11), as far as they have its form: parts are separated by dots, numbers compare as numbers and come
// before words, a missing part is 0, what follows the first hyphen is a pre-release, what follows a plus does not
// count.
func Older(version, than string) bool {
	core, pre, isPre := splitVersion(version)
	otherCore, otherPre, otherIsPre := splitVersion(than)
	if c := compareParts(core, otherCore, "0"); c != 0 {
		return c < 0
	}
	if isPre != otherIsPre {
		return isPre
	}
	return compareParts(pre, otherPre, "") < 0
}

func splitVersion(version string) (core, pre string, isPre bool) {
	version, _, _ = strings.Cut(version, "+")
	return strings.Cut(strings.TrimPrefix(version, "v"), "-")
}

// compareParts compares part by part; missing stands for the parts that the shorter one lacks.
func compareParts(a, b, missing string) int {
	as, bs := strings.Split(a, "."), strings.Split(b, ".")
	at := func(parts []string, i int) string {
		if i < len(parts) {
			return parts[i]
		}
		return missing
	}
	for i := range max(len(as), len(bs)) {
		if c := comparePart(at(as, i), at(bs, i)); c != 0 {
			return c
		}
	}
	return 0
}

func comparePart(a, b string) int {
	aNumber, bNumber := isNumber(a), isNumber(b)
	switch {
	case a == "" || b == "":
		return cmp.Compare(len(a), len(b))
	case aNumber && bNumber:
		a, b = strings.TrimLeft(a, "0"), strings.TrimLeft(b, "0")
		return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b))
	case aNumber != bNumber:
		if aNumber {
			return -1
		}
		return 1
	}
	return strings.Compare(a, b)
}

func isNumber(s string) bool { return s != "" && strings.Trim(s, "0123456789") == "" }
