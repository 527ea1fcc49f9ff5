package appkit

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// SignManifest checks a manifest document and returns its envelope in DSSE's JSON form, as admin/apps/manifests takes
// it.
func SignManifest(doc []byte, signer protocol.Signer) ([]byte, error) {
	env, err := manifest.Sign(doc, signer)
	if err != nil {
		return nil, err
	}
	return protocol.EnvelopeToJSON(env)
}

// FillTemplate replaces ${name} in a manifest template. A name without a value, a value that is not used and a value
// that could be anything but a plain word in YAML are errors.
func FillTemplate(template []byte, values map[string]string) ([]byte, error) {
	word := regexp.MustCompile(`^[A-Za-z0-9._:/@+-]+$`)
	text, used := string(template), map[string]bool{}
	for name, v := range values {
		if !word.MatchString(v) {
			return nil, fault.New(fault.Unprocessable, codeTemplateValue, "The value of "+name+" has characters that a "+
				"manifest template does not take.", nil).Permanent()
		}
	}
	var missing []string
	out := regexp.MustCompile(`\$\{([a-z0-9_]+)\}`).ReplaceAllStringFunc(text, func(found string) string {
		name := found[2 : len(found)-1]
		used[name] = true
		v, has := values[name]
		if !has {
			missing = append(missing, name)
		}
		return v
	})
	for name := range values {
		if !used[name] {
			missing = append(missing, name+" (unused)")
		}
	}
	if len(missing) > 0 {
		slices.Sort(missing)
		return nil, fault.New(fault.Unprocessable, codeTemplateValue, fmt.Sprintf("The manifest template and the values do "+
			"not fit: %s.", strings.Join(missing, ", ")), nil).Permanent()
	}
	return []byte(out), nil
}
