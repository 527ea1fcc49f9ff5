package telemetry

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode"
)

// Redacted replaces a secret.
const Redacted = "[redacted]"

// IsSecretKey reports whether a field of this name holds a secret: passwords, tokens, private keys and what carries
// them. Names are compared without case, hyphens and underscores.
func IsSecretKey(key string) bool {
	key = strings.Map(letter, key)
	switch key {
	case "authorization", "cookie", "setcookie", "assertion", "jointoken", "databaseurl", "kek", "pin":
		return true
	}
	for _, part := range []string{"password", "passwd", "passphrase", "secret", "privatekey", "apikey", "credential"} {
		if strings.Contains(key, part) {
			return true
		}
	}
	// "token" alone would also hide token_type and tokens (a meter): only a field that *is* a token.
	return key == "token" || strings.HasSuffix(key, "token") || strings.HasSuffix(key, "tokenvalue")
}

// letter gives a character of a name as it is compared; those that only part words are left out.
func letter(r rune) rune {
	switch r {
	case '_', '-', '.':
		return -1
	}
	return unicode.ToLower(r)
}

// Redact returns v as JSON with the value of every field that IsSecretKey replaced, at any depth.
func Redact(v any) (json.RawMessage, error) {
	raw, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("redact: %w", err)
	}
	dec := json.NewDecoder(strings.NewReader(string(raw)))
	dec.UseNumber() // money and counters are wider than a float
	var tree any
	if err := dec.Decode(&tree); err != nil {
		return nil, fmt.Errorf("redact: %w", err)
	}
	return json.Marshal(redactTree(tree))
}

func redactTree(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			if IsSecretKey(key) && !isEmpty(value) {
				v[key] = Redacted
			} else {
				v[key] = redactTree(value)
			}
		}
	case []any:
		for i := range v {
			v[i] = redactTree(v[i])
		}
	}
	return v
}

func isEmpty(v any) bool { return v == nil || v == "" || v == false }
