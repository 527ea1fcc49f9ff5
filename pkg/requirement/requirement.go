// Package requirement validates lists of pip requirements and converts them to one form, which names the environment
// that they make. It is pure: it reads no index and installs nothing.
package requirement

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Limits of a list.
const (
	MaxCount = 64
	// MaxBytes limits one requirement, MaxListBytes all of a list together.
	MaxBytes     = 200
	MaxListBytes = 4 << 10
)

// Error says what of a list is wrong, without quoting it.
type Error struct {
	// Index is that of the bad requirement; -1 for the list itself.
	Index  int
	Reason string
}

func (e *Error) Error() string {
	if e.Index < 0 {
		return "the list of requirements " + e.Reason
	}
	return fmt.Sprintf("requirement %d %s", e.Index, e.Reason)
}

const (
	// name is a distribution's or an extra's (PEP 508).
	name = `[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?`
	// release is the part of a version that a wildcard may follow (PEP 440, appendix B).
	release = `v?(?:[0-9]+!)?[0-9]+(?:\.[0-9]+)*`
	suffix  = `(?:[-_.]?(?:alpha|beta|preview|pre|a|b|c|rc)[-_.]?[0-9]*)?` +
		`(?:-[0-9]+|[-_.]?(?:post|rev|r)[-_.]?[0-9]*)?(?:[-_.]?dev[-_.]?[0-9]*)?`
	local = `(?:\+[a-z0-9]+(?:[-_.][a-z0-9]+)*)?`
)

// patterns are compiled once for a list: the package has no globals.
type patterns struct{ whole, exact, ordered, compatible *regexp.Regexp }

func compile() patterns {
	return patterns{
		whole: regexp.MustCompile(`^(` + name + `)\s*(?:\[([^\]]*)\])?\s*(?:\(([^()]*)\)|([^()]*))$`),
		exact: regexp.MustCompile(`^(==|!=)\s*(` + release + `(?:\.\*|` + suffix + local + `))$`),
		// Only == and != compare local versions and wildcards; ~= needs two numbers at least.
		ordered:    regexp.MustCompile(`^(<=|>=|<|>)\s*(` + release + suffix + `)$`),
		compatible: regexp.MustCompile(`^(~=)\s*(v?(?:[0-9]+!)?[0-9]+(?:\.[0-9]+)+` + suffix + `)$`),
	}
}

// Canonical returns a list in the form that all equal lists share: names and extras normalised (PEP 503), versions in
// lower case, without spaces, sorted. It takes names, extras and version specifiers; URLs, paths, options and markers
// are refused. The error is an *Error.
func Canonical(list []string) ([]string, error) {
	if len(list) > MaxCount {
		return nil, &Error{-1, fmt.Sprintf("has more than %d entries", MaxCount)}
	}
	p, named, total := compile(), map[string]bool{}, 0
	out := make([]string, 0, len(list))
	for i, text := range list {
		total += len(text)
		if len(text) > MaxBytes || total > MaxListBytes {
			return nil, &Error{i, fmt.Sprintf("is too long: one may have %d bytes, all together %d", MaxBytes, MaxListBytes)}
		}
		project, canonical, reason := p.one(text)
		switch {
		case reason != "":
			return nil, &Error{i, reason}
		case named[project]:
			return nil, &Error{i, "names a package for the second time"}
		}
		named[project] = true
		out = append(out, canonical)
	}
	slices.Sort(out)
	return out, nil
}

// one returns the normalised name of a requirement and its canonical form, or what is wrong with it.
func (p patterns) one(text string) (project, canonical, reason string) {
	if strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r > '~' }) {
		return "", "", "must be printable ASCII"
	}
	text = strings.TrimSpace(text)
	if reason := foreign(text); reason != "" {
		return "", "", reason
	}
	parts := p.whole.FindStringSubmatch(text)
	if parts == nil {
		return "", "", "must be a name, extras and version specifiers, like name[extra]>=1.2,<2"
	}
	extras, ok := canonicalExtras(parts[2], strings.Contains(text, "["))
	if !ok {
		return "", "", "has extras that are no names"
	}
	specifiers, ok := p.specifiers(parts[3] + parts[4])
	if !ok {
		return "", "", "has a version specifier that PEP 440 does not know, or ==="
	}
	project = normalize(parts[1])
	return project, project + extras + specifiers, ""
}

// foreign names what pip would take and this package does not.
func foreign(text string) string {
	switch {
	case text == "":
		return "is empty"
	case strings.HasPrefix(text, "-"):
		return "is an option"
	case strings.ContainsAny(text, "@:"):
		return "is a URL; only packages of the index can be installed"
	case strings.ContainsAny(text, `/\`) || strings.HasPrefix(text, "."):
		return "is a path; only packages of the index can be installed"
	case strings.Contains(text, ";"):
		return "has a marker; name only what is to be installed"
	case strings.Contains(text, "#"):
		return "has a comment"
	}
	return ""
}

// normalize is that of PEP 503.
func normalize(name string) string {
	fields := strings.FieldsFunc(strings.ToLower(name), func(r rune) bool { return r == '-' || r == '_' || r == '.' })
	return strings.Join(fields, "-")
}

func canonicalExtras(text string, given bool) (canonical string, ok bool) {
	if strings.TrimSpace(text) == "" {
		return "", true // name[] is name
	}
	if !given {
		return "", false
	}
	one := regexp.MustCompile(`^` + name + `$`)
	var extras []string
	for extra := range strings.SplitSeq(text, ",") {
		extra = strings.TrimSpace(extra)
		if !one.MatchString(extra) {
			return "", false
		}
		extras = append(extras, normalize(extra))
	}
	slices.Sort(extras)
	return "[" + strings.Join(slices.Compact(extras), ",") + "]", true
}

func (p patterns) specifiers(text string) (canonical string, ok bool) {
	if strings.TrimSpace(text) == "" {
		return "", true
	}
	var all []string
	for one := range strings.SplitSeq(strings.ToLower(text), ",") {
		one = strings.TrimSpace(one)
		var parts []string
		for _, pattern := range []*regexp.Regexp{p.exact, p.ordered, p.compatible} {
			if parts = pattern.FindStringSubmatch(one); parts != nil {
				break
			}
		}
		if parts == nil {
			return "", false
		}
		all = append(all, parts[1]+parts[2])
	}
	slices.Sort(all)
	return strings.Join(slices.Compact(all), ","), true
}

// Base is what an environment is built upon.
type Base struct {
	// ImageDigest is sha256:<hex> of the image, Platform its operating system and architecture, like linux/amd64.
	ImageDigest string `json:"image_digest"`
	Platform    string `json:"platform"`
	// Python and Path are the paths of the interpreter and of the environment in a container.
	Python string `json:"python"`
	Path   string `json:"path"`
}

// Digest names an environment by the canonical list and its base, in hex.
func Digest(base Base, canonical []string) string {
	// A struct of strings always encodes.
	document, _ := json.Marshal(struct {
		Format       int      `json:"format"`
		Base         Base     `json:"base"`
		Requirements []string `json:"requirements"`
	}{1, base, canonical})
	sum := sha256.Sum256(document)
	return hex.EncodeToString(sum[:])
}
