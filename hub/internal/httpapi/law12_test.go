package httpapi

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"

	hubapi "github.com/gpuaas/gpuaas/hub/api"
)

// marker stands for a submitted value that may be a secret: no answer may repeat it.
const marker = "HUSH-HUSH"

// tripwire has no operation behind it: whatever gets through the checks panics and becomes a 500.
type tripwire struct{ StrictServerInterface }

const envelope = `{"payloadType":"application/x","payload":"YQ==","signatures":[{"keyid":"` + hex64 +
	`","sig":"YQ=="}]}`

const hex64 = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

// samples has one good body for each operation that takes one, with every key that the contract knows for it.
func samples() map[string]string {
	out := accountSamples()
	maps.Copy(out, instanceSamples())
	return out
}

const sshKeySample = `{"user":"ubuntu","expires_at":"2036-01-01T00:00:00Z","public_key":` +
	`"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFbl9P7hcNN6NDTv6fh2tHvuHJEhkXVmFXdP+/zWJ5JB me"}`

func accountSamples() map[string]string {
	return map[string]string{
		"mintServiceAccountToken": `{"service_account_id":"` + someID + `","key_id":"` + someID +
			`","private_key_pem":"pem","assertion":"jwt",` +
			`"grant_type":"urn:ietf:params:oauth:grant-type:jwt-bearer"}`,
		"rotateServiceAccountKey": `{"overlap_seconds":60}`,
		"login":                   `{"email":"a@b","password":"p","code":"123456"}`,
		"changePassword": `{"current_password":"p","code":"123456","new_password":"0123456789ab",` +
			`"totp":{"secret":"ABCDEFGHIJKLMNOPQRSTUVWXYZ","code":"123456"},"remove_one_time_codes":false}`,
		"finishBrowserLogin": `{"state":"s","code":"c"}`,
		"finishDeviceLogin":  `{"handle":"h"}`,
		"refreshSession":     `{"refresh_token":"t"}`,
		"acceptInvitation": `{"token":"t","display_name":"A","password":"0123456789ab","totp":{"secret":"` +
			`ABCDEFGHIJKLMNOPQRSTUVWXYZ","code":"123456"}}`,
		"createInvitation": `{"email":"a@b","roles":["org_member"],"custom_roles":["` + someID +
			`"],"expires_in_seconds":60}`,
		"explainAccess": `{"permission":"apps.instance.read","org_id":"` + someID + `","project_id":"` + someID +
			`","app_instance_id":"` + someID + `","principal":{"type":"user","id":"` + someID + `"}}`,
		"createOrg":     `{"slug":"acme","display_name":"Acme"}`,
		"createProject": `{"org_id":"` + someID + `","slug":"p","display_name":"P","platform":true}`,
		"createServiceAccount": `{"name":"n","slug":"s","description":"d","role":"app_operator","custom_role":"` +
			someID + `"}`,
		"createUser": `{"org_id":"` + someID +
			`","email":"a@b","display_name":"A","platform_admin":false,"roles":["org_admin"],"custom_roles":["` + someID + `"]}`,
		"createUserToken":  `{"description":"d","expires_in_seconds":60}`,
		"putUserRoles":     `{"roles":["org_member"],"platform_admin":false,"custom_roles":["` + someID + `"]}`,
		"putProjectRoles":  `{"roles":["viewer"],"custom_roles":["` + someID + `"]}`,
		"createCustomRole": `{"slug":"s","display_name":"S","description":"d","permissions":["apps.instance.read"]}`,
		"putCustomRole":    `{"display_name":"S","description":"d","permissions":["apps.instance.read"]}`,
		"putOrgQuota":      `{"limits":[{"name":"users","limit":5}]}`,
		"transferAppSlug":  `{"org_id":"` + someID + `"}`,
		"registerManifest": `{"manifest_envelope":` + envelope + `}`,
		"putEntitlement": `{"enabled":true,"policy_overrides":{"allowed_operating_modes":["tenant_dedicated"],` +
			`"allowed_control_plane_scopes":["project"],"allowed_versions":["1"],"max_accelerators":1}}`,
		"putPackageIndex": `{"url":"https://packages.example/simple","username":"u","password":"p","ca_pem":"pem"}`,
		"createPublishIntent": `{"app_slug":"a","app_version":"1","artifact_name":"runtime","artifact_kind":"oci",` +
			`"source_type":"oci_registry","channel":"dev"}`,
		"registerArtifact": `{"app_slug":"a","app_version":"1","artifact_name":"runtime","artifact_kind":"oci",` +
			`"source_type":"oci_registry","repository":"org/a/b",` +
			`"digest":"sha256:` + hex64 + `","tag":"t","media_type":"m","source_uri":"u","channel":"dev"}`,
		"promoteArtifact":     `{"channel":"prod","reason":"r"}`,
		"deprecateArtifact":   `{"reason":"r"}`,
		"promoteAppVersion":   `{"status":"canary","canary_percent":5,"reason":"r"}`,
		"publishAppVersion":   `{"reason":"r"}`,
		"deprecateAppVersion": `{"reason":"r"}`,
		"retireAppVersion":    `{"reason":"r"}`,
		"retireArtifact":      `{"reason":"r"}`,
		"revokeArtifact":      `{"reason":"r"}`,
		"createAllocation": `{"node_id":"` + someID +
			`","sku":"s","capacity_shape":"gpu_slice","accelerator_count":0,"accelerator_model":"m","cpu_cores":1,` +
			`"memory_mib":64}`,
		"putOperatorSSHKeys":     `{"keys":[` + sshKeySample + `]}`,
		"putAppSSHKeys":          `{"keys":[` + sshKeySample + `]}`,
		"createVolume":           `{"name":"v","size_mib":64,"allocation_id":"` + someID + `"}`,
		"createAccessCredential": `{"name":"bootstrap"}`,
		"unwrap":                 `{"token":"gpuaas_wrap_x"}`,
		"createSecret":           `{"name":"token","value":"v"}`,
		"rotateSecret":           `{"value":"v"}`,
		"restoreVolume":          `{"snapshot_id":"` + someID + `"}`,
		"resizeVolume":           `{"size_mib":64}`,
		"createVolumeSnapshot":   `{"description":"d"}`,
	}
}

func instanceSamples() map[string]string {
	return map[string]string{
		"createAppInstance": `{"app_slug":"a","version":"1","display_name":"d","operating_mode":"tenant_dedicated",` +
			`"control_plane_scope":"project","placement_intent":{"allocation_ids":["` + someID +
			`"]},"resources":{"cpu_millis":500},"ports":[{"name":"http","host_port":30000}],` +
			`"volumes":[{"name":"data","size_mib":64}],"environment":{"requirements":["a"]},"parameters":{"x":1},` +
			`"config":{}}`,
		"upgradeAppInstance": `{"target_version":"2","resources":{"accelerators":0},"parameters":{"x":1},` +
			`"ports":[{"name":"http","host_port":30000}],"volumes":[{"name":"data","size_mib":64}],` +
			`"environment":{"requirements":["a"]},"config":{}}`,
		"rollbackAppInstance":      `{"target_version":"1"}`,
		"changeAppInstance":        `{"display_name":"d","config":{}}`,
		"addAppInstanceMember":     `{"allocation_id":"` + someID + `","role":"worker"}`,
		"reportAppInstanceMember":  `{"status":"failed","reason":"internal","detail":"d"}`,
		"claimAppInstanceTask":     `{"worker":"w","lease_seconds":60}`,
		"heartbeatAppInstanceTask": `{"attempt":1}`,
		"progressAppInstanceTask":  `{"attempt":1,"phase":"a","detail":"d"}`,
		"completeAppInstanceTask":  `{"attempt":1}`,
		"failAppInstanceTask":      `{"attempt":1,"reason":"internal","detail":"d"}`,
		"execInAppInstance": `{"command":["a","b"],"terminal":true,"rows":24,"columns":80,"service":"main",` +
			`"member_id":"` + someID + `"}`,
		"copyAppInstanceFiles":   `{"path":"/a","into":true,"service":"main","member_id":"` + someID + `"}`,
		"forwardAppInstancePort": `{"port":"http","member_id":"` + someID + `"}`,
		"grantCredit":            `{"org_id":"` + someID + `","amount":"10.5","currency":"EUR","description":"d"}`,
		"createSKU": `{"slug":"gpu-9","capacity_shape":"gpu_slice","accelerator_count":1,` +
			`"accelerator_model":"H200","cpu_cores":9,"memory_mib":9216}`,
		"createPrice": `{"meter":"session_seconds","app_slug":"a","sku":"s","currency":"EUR","price":"1",` +
			`"per":"hour","host_share_percent":50,"from":"2026-01-01T00:00:00Z"}`,
		"createWebhook": `{"url":"https://hooks.example/x","description":"d","types":["apps.instance"],"project_id":"` +
			someID + `"}`,
		"rotateWebhookSecret": `{"overlap_seconds":60}`,
		"replayWebhook":       `{"event_id":"` + someID + `"}`,
		"banNode":             `{"reason":"r"}`,
		"removeNode":          `{"lost":true,"reason":"r"}`,
		"createJoinToken":     `{"description":"d","expires_in_seconds":60}`,
		"registerPublisher":   `{"delegation":` + envelope + `}`,
		"enrollNode":          `{"join_token":"0123456789abcdef","csr_pem":"pem","hostname":"node-1"}`,
		"renewNode": `{"node_id":"` + someID +
			`","csr_pem":"pem","issued_at":"2026-01-01T00:00:00Z","signature":"YQ=="}`,
	}
}

type badInput struct {
	name string
	ask
	status int
	// pointer is where the answer must point to.
	pointer string
}

// TestLaw12BadInputIsAClearErrorOnEveryOperation derives bad requests for every operation of the contract from the
// contract itself: each must be a 4xx problem that names place and reason, carries the caller's correlation id, repeats
// no submitted value, reaches no handler and, where the operation would have changed something, is in the audit trail.
func TestLaw12BadInputIsAClearErrorOnEveryOperation(t *testing.T) {
	operations, err := loadContract(hubapi.OpenAPI)
	require.NoError(t, err)
	d := newTestAPI(t, tripwire{}, func(conf *Config) { conf.Now = steps(conf.Now(), time.Minute) })
	for _, key := range slices.Sorted(maps.Keys(operations)) {
		op := operations[key]
		t.Run(op.id, func(t *testing.T) {
			for _, bad := range badInputs(t, op) {
				t.Run(bad.name, func(t *testing.T) { refuses(t, d, op, bad) })
			}
		})
	}
}

func refuses(t *testing.T, d *testAPI, op *operation, bad badInput) {
	d.audits = nil
	bad.method = op.method
	res := d.do(t, bad.ask)
	text, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.NotContains(t, string(text), marker)
	res.Body = io.NopCloser(strings.NewReader(string(text)))
	p := problem(t, res, bad.status)
	if bad.status != http.StatusUnauthorized || bad.pointer != "" {
		var pointers []string
		for _, e := range p.Errors {
			pointers = append(pointers, e.Pointer)
			require.NotEmpty(t, e.Reason)
		}
		require.Contains(t, pointers, bad.pointer, string(text))
	}
	if op.mutates() || bad.status == http.StatusUnauthorized {
		require.Len(t, d.audits, 1)
		require.Equal(t, op.id, d.audits[0].Operation)
		require.EqualValues(t, p.Code, d.audits[0].Code)
	}
	require.NotContains(t, d.log.String(), marker)
}

// TestGoodSamplesPassTheContract keeps the table above honest: the bodies that it breaks one by one are good as they
// are.
func TestGoodSamplesPassTheContract(t *testing.T) {
	operations, err := loadContract(hubapi.OpenAPI)
	require.NoError(t, err)
	d := newTestAPI(t, tripwire{})
	bodies := samples()
	for _, op := range operations {
		res := d.do(t, ask{method: op.method, path: path(op), body: bodies[op.id]})
		require.Equal(t, http.StatusInternalServerError, res.StatusCode, "%s did not reach its handler", op.id)
		require.NoError(t, res.Body.Close())
		require.Equal(t, op.body != nil, bodies[op.id] != "", op.id)
		delete(bodies, op.id)
	}
	require.Empty(t, bodies)
}

// path fills the template with good values.
func path(op *operation) string {
	p := basePath + op.template
	for _, param := range op.params {
		if param.in != "path" {
			continue
		}
		value := "a"
		if strings.HasSuffix(param.name, "_id") {
			value = someID
		}
		p = strings.Replace(p, "{"+param.name+"}", value, 1)
	}
	return p
}

func badInputs(t *testing.T, op *operation) []badInput {
	body := samples()[op.id]
	good := ask{path: path(op), body: body}
	var bad []badInput
	add := func(name string, a ask, pointer string) {
		bad = append(bad, badInput{name: name, ask: a, status: http.StatusBadRequest, pointer: pointer})
	}
	if !op.open {
		for name, header := range map[string]string{
			"without credential": "", "wrong scheme": "Basic " + marker,
			"two words": "Bearer " + marker + " x y",
		} {
			a := good
			a.header = http.Header{"Authorization": nil}
			pointer := "header/Authorization"
			if header != "" {
				a.header = http.Header{"Authorization": {header}}
			}
			if name == "two words" {
				pointer = ""
			}
			bad = append(bad, badInput{name: name, ask: a, status: http.StatusUnauthorized, pointer: pointer})
		}
	}
	add("unknown query parameter", ask{path: good.path + "?surprise=" + marker, body: body}, "query/surprise")
	add("broken query string", ask{path: good.path + "?x=%zz;" + marker, body: body}, "query")
	for _, p := range op.params {
		bad = append(bad, badParameters(op, p, good)...)
	}
	if op.body == nil {
		if op.method == http.MethodPost {
			add("body where none belongs", ask{path: good.path, body: `{"x":"` + marker + `"}`}, "")
		}
		return bad
	}
	if !op.bodyOptional {
		add("no body", ask{path: good.path}, "")
	}
	add("another content type", ask{path: good.path, body: body, header: http.Header{"Content-Type": {"text/" + marker}}},
		"header/Content-Type")
	add("another charset", ask{
		path: good.path, body: body,
		header: http.Header{"Content-Type": {"application/json; charset=latin1"}},
	}, "header/Content-Type")
	for name, text := range map[string]string{
		"not JSON": `{"` + marker, "trailing data": body + `{"x":"` + marker + `"}`, "an array": `["` + marker +
			`"]`, "a string": `"` + marker + `"`, "null": `null`,
		"not UTF-8": "{\"x\":\"\xff" + marker + "\"}", "raw newline": "{\n\"" + marker + "\n\":1}", "huge number": `1e999`,
	} {
		add(name, ask{path: good.path, body: text}, "")
	}
	add("too deep", ask{path: good.path, body: strings.Repeat("[", 40) + strings.Repeat("]", 40)},
		strings.Repeat("/0", maxJSONDepth))
	add("NUL character", ask{path: good.path, body: `{"x":"` + marker + `\u0000"}`}, "/x")
	bad = append(bad, badInput{name: "too large", ask: ask{path: good.path, body: `{"x":"` + strings.Repeat("x",
		int(op.maxBodyBytes)) + `"}`}, status: http.StatusRequestEntityTooLarge})
	return append(bad, badBodies(t, op, good)...)
}

func badParameters(op *operation, p parameter, good ask) []badInput {
	at := p.in + "/" + p.name
	var bad []badInput
	add := func(name string, a ask) {
		a.body = good.body
		bad = append(bad, badInput{name: name, ask: a, status: http.StatusBadRequest, pointer: at})
	}
	switch p.in {
	case "path":
		template := strings.Replace(op.template, "{"+p.name+"}", "\x00", 1)
		for _, wrong := range []string{marker + "%20", strings.Repeat("x", 300), "..%2e", "%00"} {
			filled := path(&operation{template: template, params: op.params})
			add("wrong "+p.name, ask{path: strings.Replace(filled, "\x00", wrong, 1)})
		}
	case "query":
		if p.kind == "array" {
			item := "&" + p.name + "="
			add("too many "+p.name, ask{path: good.path + "?" + strings.Repeat(item+"1", 65)[1:]})
			at += "/0"
			add("empty "+p.name, ask{path: good.path + "?" + item[1:]})
			add("long "+p.name, ask{path: good.path + "?" + item[1:] + strings.Repeat(marker, 50)})
			break
		}
		wrong := marker + "!"
		add("wrong "+p.name, ask{path: good.path + "?" + p.name + "=" + wrong})
		add("empty "+p.name, ask{path: good.path + "?" + p.name + "="})
		add("two "+p.name, ask{path: good.path + "?" + p.name + "=1&" + p.name + "=1"})
		if p.kind == "integer" {
			for _, v := range []string{"0", "-1", "1e2", "1.0", "100000000", "99999999999999999999"} {
				if v == "100000000" && slices.Contains([]string{"after", "from_number", "to_number"}, p.name) {
					continue // versions and numbers of rows have no such bound
				}
				add(p.name+" "+v, ask{path: good.path + "?" + p.name + "=" + v})
			}
		}
	case "header":
		if p.required {
			add("no "+p.name, ask{path: good.path, header: http.Header{http.CanonicalHeaderKey(p.name): nil}})
		}
		add("two "+p.name, ask{path: good.path, header: http.Header{http.CanonicalHeaderKey(p.name): {"a", "b"}}})
		add("long "+p.name,
			ask{path: good.path, header: http.Header{http.CanonicalHeaderKey(p.name): {strings.Repeat("x", 129)}}})
		add("wrong "+p.name, ask{path: good.path, header: http.Header{http.CanonicalHeaderKey(p.name): {marker + " !"}}})
	}
	return bad
}

func badBodies(t *testing.T, op *operation, good ask) []badInput {
	var body map[string]any
	require.NoError(t, json.Unmarshal([]byte(good.body), &body))
	schema := resolved(op.body)
	var bad []badInput
	add := func(name string, changed any, pointer string) {
		text, ok := changed.(string)
		if !ok {
			raw, err := json.Marshal(changed)
			require.NoError(t, err)
			text = string(raw)
		}
		bad = append(bad, badInput{
			name: name, ask: ask{path: good.path, body: text}, status: http.StatusBadRequest,
			pointer: pointer,
		})
	}
	with := func(key string, value any) map[string]any {
		m := maps.Clone(body)
		m[key] = value
		return m
	}
	add("unknown key", with("surprise", marker), "/surprise")
	for _, key := range slices.Sorted(maps.Keys(schema.Properties)) {
		require.Contains(t, body, key, "the sample of %s lacks %s", op.id, key)
		at := "/" + key
		raw, err := json.Marshal(body[key])
		require.NoError(t, err)
		add("duplicate "+key, fmt.Sprintf(`{%q:%s,%s`, key, raw, good.body[1:]), at)
		add("another case of "+key, with(strings.ToUpper(key), marker), "/"+strings.ToUpper(key))
		add("null "+key, with(key, nil), at)
		if slices.Contains(schema.Required, key) {
			m := maps.Clone(body)
			delete(m, key)
			add("no "+key, m, at)
		}
		p := resolved(schema.Properties[key])
		for _, wrong := range wrongValues(p) {
			add(fmt.Sprintf("wrong %s %.12v", key, wrong), with(key, wrong), at)
		}
		if p.Types != nil && slices.Contains(p.Types.ToStrings(), "object") && len(p.Properties) > 0 {
			m := maps.Clone(body[key].(map[string]any))
			m["surprise"] = marker
			add("unknown key in "+key, with(key, m), at+"/surprise")
		}
	}
	return bad
}

// wrongValues gives values that the schema must refuse.
func wrongValues(p *jsonschema.Schema) []any {
	wrong := []any{[]any{[]any{marker}}}
	types := p.Types.ToStrings()
	if !slices.Contains(types, "string") {
		wrong = append(wrong, marker)
	}
	if !slices.Contains(types, "object") {
		wrong = append(wrong, map[string]any{marker: marker})
	}
	if !slices.Contains(types, "integer") {
		wrong = append(wrong, 7)
	} else {
		wrong = append(wrong, json.Number("1.5"), json.Number("1.0"), json.Number("1e30"), -1)
	}
	if p.MaxLength != nil {
		wrong = append(wrong, strings.Repeat("a", *p.MaxLength+1))
	}
	if p.MinLength != nil && *p.MinLength > 0 {
		wrong = append(wrong, strings.Repeat("a", *p.MinLength-1))
	}
	if p.Enum != nil || p.Format != nil {
		wrong = append(wrong, marker)
	}
	if p.Pattern != nil {
		wrong = append(wrong, marker+" \n!")
	}
	if slices.Contains(types, "array") {
		wrong = wrong[1:]
		if p.MaxItems != nil {
			many := make([]any, *p.MaxItems+1)
			wrong = append(wrong, many)
		}
	}
	return wrong
}

func resolved(s *jsonschema.Schema) *jsonschema.Schema {
	for s.Ref != nil {
		s = s.Ref
	}
	return s
}
