package requirement_test

import (
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/requirement"
)

func TestEqualListsHaveOneForm(t *testing.T) {
	for _, list := range [][]string{
		{"Django_Rest.Framework>=3.15,<4", "numpy"},
		{"numpy ", "django-rest-framework (<4, >= 3.15)"},
		{"NumPy[]", "django--rest__framework <4,>=3.15,<4"},
	} {
		got, err := requirement.Canonical(list)
		require.NoError(t, err)
		require.Equal(t, []string{"django-rest-framework<4,>=3.15", "numpy"}, got)
	}
	got, err := requirement.Canonical([]string{
		"a==1.*", "b~=2.0", "c!=1!2.0rc1.post2.dev3+Local.1", "d[Zeta, alpha_1,zeta]>1.0A1", "e<=v2",
	})
	require.NoError(t, err)
	require.Equal(t, []string{
		"a==1.*", "b~=2.0", "c!=1!2.0rc1.post2.dev3+local.1", "d[alpha-1,zeta]>1.0a1", "e<=v2",
	}, got)
}

func TestOnlyPackagesOfTheIndexAreRequirements(t *testing.T) {
	for text, reason := range map[string]string{
		"":                                  "is empty",
		"-r requirements.txt":               "is an option",
		"--index-url=x":                     "is an option",
		"numpy --hash=sha256":               "version specifier",
		"pkg @ https://example.com/x.whl":   "is a URL",
		"git+ssh://host/x":                  "is a URL",
		"./local":                           "is a path",
		`c\x`:                               "is a path",
		"..":                                "is a path",
		"numpy; python_version < '3'":       "has a marker",
		"numpy # why":                       "has a comment",
		"numpy\n--pre":                      "must be printable ASCII",
		"nümpy":                             "must be printable ASCII",
		"numpy===1.0":                       "version specifier",
		"numpy>=1.*":                        "version specifier",
		"numpy~=1":                          "version specifier",
		"numpy>=1,":                         "version specifier",
		"numpy 1.0":                         "version specifier",
		"numpy[a,]":                         "has extras",
		"numpy>1.0+local":                   "version specifier",
		"_numpy":                            "must be a name",
		"$(touch x)":                        "must be a name",
		strings.Repeat("a", 201):            "is too long",
		"numpy>=" + strings.Repeat("1", 99): "",
	} {
		_, err := requirement.Canonical([]string{"other", text})
		if reason == "" {
			require.NoError(t, err, text)
			continue
		}
		bad, is := errors.AsType[*requirement.Error](err)
		require.True(t, is, "%q: %v", text, err)
		require.Equal(t, 1, bad.Index, text)
		require.Contains(t, bad.Reason, reason, text)
	}
	_, err := requirement.Canonical([]string{"Foo.Bar", "foo-bar>1"})
	require.ErrorContains(t, err, "for the second time")
	_, err = requirement.Canonical(slices.Repeat([]string{"x"}, requirement.MaxCount+1))
	require.ErrorContains(t, err, "more than 64 entries")
}

func TestTheDigestNamesListAndBase(t *testing.T) {
	base := requirement.Base{ImageDigest: "sha256:1", Platform: "linux/amd64", Python: "/usr/bin/python3", Path: "/env"}
	digest := requirement.Digest(base, []string{"a", "b"})
	require.Regexp(t, `^[0-9a-f]{64}$`, digest)
	require.Equal(t, digest, requirement.Digest(base, []string{"a", "b"}))
	others := map[string]bool{digest: true}
	for _, change := range []func(*requirement.Base){
		func(b *requirement.Base) { b.ImageDigest = "sha256:2" },
		func(b *requirement.Base) { b.Platform = "linux/arm64" },
		func(b *requirement.Base) { b.Python = "/opt/python" },
		func(b *requirement.Base) { b.Path = "/opt/env" },
	} {
		other := base
		change(&other)
		others[requirement.Digest(other, []string{"a", "b"})] = true
	}
	others[requirement.Digest(base, []string{"a,b"})] = true
	require.Len(t, others, 6)
}

// FuzzCanonical: whatever is accepted is its own canonical form, and nothing in it is an option, a URL or a path.
func FuzzCanonical(f *testing.F) {
	for _, seed := range []string{
		"numpy", "a[b,c]>=1,<2", "x (==1.*)", "-e .", "p @ file:///x", "a~=1.2.post3", "n;os_name=='x'", "a!=1+l", "a\n-r b",
	} {
		f.Add(seed, "other==1")
	}
	allowed := regexp.MustCompile(`^[a-z0-9][a-z0-9-]*(\[[a-z0-9,-]+\])?([<>=!~][<>=!~.*+!a-z0-9,_-]*)?$`)
	f.Fuzz(func(t *testing.T, one, other string) {
		list, err := requirement.Canonical([]string{one, other})
		if err != nil {
			if _, is := errors.AsType[*requirement.Error](err); !is {
				t.Fatalf("%v is no *Error", err)
			}
			return
		}
		for _, entry := range list {
			if !allowed.MatchString(entry) {
				t.Fatalf("%q was accepted", entry)
			}
		}
		again, err := requirement.Canonical(list)
		if err != nil || !slices.Equal(list, again) {
			t.Fatalf("%q became %q: %v", list, again, err)
		}
	})
}
