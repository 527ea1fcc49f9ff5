package manifest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// maxExactInteger is the largest integer that JSON readers of every language keep exactly (RFC 8259 §6).
const maxExactInteger = 1 << 53

// CheckParameters reads and validates what a tenant chose, as JSON (empty means none). Pointers of its fault start at
// /parameters.
func (m Manifest) CheckParameters(raw []byte) (map[string]any, error) {
	params, err := parseObject(raw, CodeParametersInvalid, "/parameters")
	if err != nil {
		return nil, err
	}
	if _, err := m.resolveParameters(params); err != nil {
		return nil, err
	}
	return params, nil
}

// CheckConfig reads and validates an instance's config, as JSON (empty means none).
func (m Manifest) CheckConfig(raw []byte) (map[string]any, error) {
	config, err := parseObject(raw, CodeConfigInvalid, "/config")
	if err != nil {
		return nil, err
	}
	if err := checkAgainst(m.Version.ConfigSchema, config, CodeConfigInvalid, "/config",
		"The config does not follow the version's config_schema."); err != nil {
		return nil, err
	}
	return config, nil
}

// resolveParameters validates the parameters and adds the schema's defaults. It returns no sealed ones: nothing of them
// can be validated but that they may be there.
func (m Manifest) resolveParameters(params map[string]any) (map[string]any, error) {
	all := make(map[string]any, len(params))
	maps.Copy(all, params)
	schema := m.withoutSealed(all)
	for name, property := range m.parameterSchemas() {
		if _, given := all[name]; given {
			continue
		}
		if v, has := property["default"]; has {
			all[name] = v
		}
	}
	if err := checkAgainst(schema, all, CodeParametersInvalid, "/parameters",
		"The parameters do not follow the version's schema."); err != nil {
		return nil, err
	}
	return all, nil
}

func (m Manifest) parameterSchemas() map[string]map[string]any {
	properties, _ := m.Version.Parameters["properties"].(map[string]any)
	out := make(map[string]map[string]any, len(properties))
	for name, p := range properties {
		if object, ok := p.(map[string]any); ok {
			out[name] = object
		}
	}
	return out
}

func checkAgainst(schema, value map[string]any, code fault.Code, pointer, public string) error {
	if len(schema) == 0 {
		if len(value) == 0 {
			return nil
		}
		fields := make([]fault.Field, 0, len(value))
		for name := range value {
			fields = append(fields, fault.Field{Pointer: pointer + "/" + escapePointer(name), Reason: "is not a known key"})
		}
		slices.SortFunc(fields, func(a, b fault.Field) int { return strings.Compare(a.Pointer, b.Pointer) })
		return invalid(fault.Unprocessable, code, public, fields)
	}
	fields, err := checkEmbedded(schema, value)
	if err != nil {
		return fault.New(fault.Unprocessable, CodeInvalid, "The version's schema cannot be used.", err).Permanent()
	}
	if len(fields) == 0 {
		return nil
	}
	for i := range fields {
		fields[i].Pointer = pointer + fields[i].Pointer
	}
	return invalid(fault.Unprocessable, code, public, fields)
}

// parseObject reads one JSON object: no duplicate keys, no trailing bytes, bounded depth and size, finite numbers.
func parseObject(raw []byte, code fault.Code, pointer string) (map[string]any, error) {
	refuse := func(at, reason string) error {
		return invalid(fault.Malformed, code, "The JSON cannot be read.", []fault.Field{{Pointer: at, Reason: reason}})
	}
	if len(raw) == 0 || bytes.Equal(bytes.TrimSpace(raw), []byte("null")) {
		return map[string]any{}, nil
	}
	if len(raw) > MaxParametersBytes {
		return nil, fault.New(fault.TooLarge, code, fmt.Sprintf("The JSON has %d bytes; the limit is %d.", len(raw),
			MaxParametersBytes), nil).
			WithField(pointer, "is too large").Permanent()
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	v, err := readValue(dec, pointer, 0, refuse)
	if err != nil {
		if f := (*fault.Error)(nil); errors.As(err, &f) {
			return nil, err
		}
		return nil, refuse(pointer, "is not JSON")
	}
	object, ok := v.(map[string]any)
	if !ok {
		return nil, refuse(pointer, "must be an object")
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, refuse(pointer, "has something behind its end")
	}
	return object, nil
}

func readValue(dec *json.Decoder, pointer string, depth int, refuse func(at, reason string) error) (any, error) {
	if depth > MaxDepth {
		return nil, refuse(pointer, fmt.Sprintf("nests deeper than %d", MaxDepth))
	}
	token, err := dec.Token()
	if err != nil {
		return nil, err
	}
	switch t := token.(type) {
	case json.Delim:
		if t == '{' {
			return readObject(dec, pointer, depth, refuse)
		}
		return readArray(dec, pointer, depth, refuse)
	case json.Number:
		v, ok := number(t)
		if !ok {
			return nil, refuse(pointer, "must be a finite number")
		}
		return v, nil
	}
	return token, nil
}

func readObject(dec *json.Decoder, pointer string, depth int, refuse func(at, reason string) error) (any, error) {
	out := map[string]any{}
	for dec.More() {
		token, err := dec.Token()
		if err != nil {
			return nil, err
		}
		key, ok := token.(string)
		if !ok {
			return nil, refuse(pointer, "is not JSON")
		}
		child := pointer + "/" + escapePointer(key)
		if _, twice := out[key]; twice {
			return nil, refuse(child, "this key stands twice")
		}
		if out[key], err = readValue(dec, child, depth+1, refuse); err != nil {
			return nil, err
		}
	}
	_, err := dec.Token()
	return out, err
}

func readArray(dec *json.Decoder, pointer string, depth int, refuse func(at, reason string) error) (any, error) {
	out := []any{}
	for dec.More() {
		v, err := readValue(dec, pointer+"/"+strconv.Itoa(len(out)), depth+1, refuse)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	_, err := dec.Token()
	return out, err
}

// number bounds what the schema validator has to compute with: it turns numbers into exact fractions, and 1e999999999
// as a fraction fills the memory.
func number(n json.Number) (any, bool) {
	if i, err := strconv.ParseInt(n.String(), 10, 64); err == nil {
		return i, true
	}
	f, err := strconv.ParseFloat(n.String(), 64)
	if err != nil || math.IsInf(f, 0) || math.IsNaN(f) {
		return nil, false
	}
	return f, true
}

// scalarText is the one text form of a parameter's value: hub and node come to the same bytes from int64, float64 or
// json.Number.
func scalarText(v any) (string, bool) {
	switch v := v.(type) {
	case string:
		return v, !strings.ContainsRune(v, 0)
	case bool:
		return strconv.FormatBool(v), true
	case int:
		return strconv.FormatInt(int64(v), 10), true
	case int64:
		return strconv.FormatInt(v, 10), true
	case json.Number:
		n, ok := number(v)
		if !ok {
			return "", false
		}
		return scalarText(n)
	case float64:
		if math.IsInf(v, 0) || math.IsNaN(v) {
			return "", false
		}
		if v == math.Trunc(v) && math.Abs(v) <= maxExactInteger {
			return strconv.FormatInt(int64(v), 10), true
		}
		return strconv.FormatFloat(v, 'f', -1, 64), true
	}
	return "", false
}
