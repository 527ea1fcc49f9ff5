package auditchain

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"unicode/utf16"
)

// maxInteger is the largest integer that every JSON reader holds exactly: 2^53 - 1.
const maxInteger = 1<<53 - 1

// IsInteger reports whether a JSON number may stand in a record: an integer within ±(2^53-1), written as such. RFC 8785
// writes it as it is.
func IsInteger(n json.Number) bool {
	i, err := strconv.ParseInt(n.String(), 10, 64)
	return err == nil && -maxInteger <= i && i <= maxInteger && strconv.FormatInt(i, 10) == n.String()
}

// Canonical returns a record in the form of RFC 8785 (JSON Canonicalization Scheme).
func Canonical(record []byte) ([]byte, error) {
	members, err := decode(record)
	if err != nil {
		return nil, err
	}
	return appendValue(nil, members)
}

// Hash returns the hash of a record, in hexadecimal: SHA-256 over its canonical form without the member hash.
func Hash(record []byte) (string, error) {
	members, err := decode(record)
	if err != nil {
		return "", err
	}
	return hashOf(members)
}

func hashOf(members map[string]any) (string, error) {
	delete(members, "hash")
	text, err := appendValue(nil, members)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:]), nil
}

func decode(record []byte) (map[string]any, error) {
	dec := json.NewDecoder(bytes.NewReader(record))
	dec.UseNumber()
	var members map[string]any
	if err := dec.Decode(&members); err != nil {
		return nil, fmt.Errorf("no JSON object: %w", err)
	}
	if members == nil || len(bytes.TrimSpace(record[dec.InputOffset():])) > 0 {
		return nil, errors.New("no JSON object, or more than one")
	}
	return members, nil
}

func appendValue(b []byte, v any) (_ []byte, err error) {
	switch v := v.(type) {
	case nil:
		return append(b, "null"...), nil
	case bool:
		return strconv.AppendBool(b, v), nil
	case string:
		return appendString(b, v), nil
	case json.Number:
		if !IsInteger(v) {
			return nil, fmt.Errorf("the number %s is no integer within ±(2^53-1)", v)
		}
		return append(b, v...), nil
	case []any:
		b = append(b, '[')
		for n, item := range v {
			if n > 0 {
				b = append(b, ',')
			}
			if b, err = appendValue(b, item); err != nil {
				return nil, err
			}
		}
		return append(b, ']'), nil
	case map[string]any:
		return appendObject(b, v)
	}
	return nil, fmt.Errorf("a %T is no JSON value", v)
}

func appendObject(b []byte, members map[string]any) (_ []byte, err error) {
	names := slices.SortedFunc(maps.Keys(members), func(a, b string) int {
		return slices.Compare(utf16.Encode([]rune(a)), utf16.Encode([]rune(b)))
	})
	b = append(b, '{')
	for n, name := range names {
		if n > 0 {
			b = append(b, ',')
		}
		b = append(appendString(b, name), ':')
		if b, err = appendValue(b, members[name]); err != nil {
			return nil, err
		}
	}
	return append(b, '}'), nil
}

func appendString(b []byte, s string) []byte {
	b = append(b, '"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b = append(b, '\\', byte(r))
		case r == '\b':
			b = append(b, `\b`...)
		case r == '\t':
			b = append(b, `\t`...)
		case r == '\n':
			b = append(b, `\n`...)
		case r == '\f':
			b = append(b, `\f`...)
		case r == '\r':
			b = append(b, `\r`...)
		case r < ' ':
			b = fmt.Appendf(b, `\u%04x`, r)
		default:
			b = append(b, string(r)...)
		}
	}
	return append(b, '"')
}
