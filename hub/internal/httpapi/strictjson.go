package httpapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// maxJSONDepth bounds how deep arrays and objects nest; deeper bodies are 400.
	maxJSONDepth = 32
	// maxNumberChars and maxExponent bound a number's text: big decimals are what makes number parsers slow.
	maxNumberChars = 64
	maxExponent    = 300
)

// strictJSON refuses what encoding/json and schema validators let pass: duplicate keys, trailing data, text that is not
// UTF-8, NUL characters (no database column takes them), numbers that no float64 holds, and deep nesting. It returns
// nil or what is wrong, never the value itself.
func strictJSON(body []byte) *fault.Field {
	if !utf8.Valid(body) {
		return &fault.Field{Reason: "is not UTF-8"}
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	s := scanner{d: d, body: body}
	if f := s.value("", 0); f != nil {
		return f
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return &fault.Field{Reason: "has more after the JSON value"}
	}
	return nil
}

type scanner struct {
	d    *json.Decoder
	body []byte
}

func (s scanner) value(at string, depth int) *fault.Field {
	tok, err := s.d.Token()
	if err != nil {
		return s.syntax(at)
	}
	switch tok := tok.(type) {
	case json.Delim:
		if depth == maxJSONDepth {
			return &fault.Field{Pointer: at, Reason: fmt.Sprintf("nests deeper than %d levels", maxJSONDepth)}
		}
		if tok == '{' {
			return s.object(at, depth+1)
		}
		return s.array(at, depth+1)
	case json.Number:
		if !isSaneNumber(tok.String()) {
			return &fault.Field{Pointer: at, Reason: "is a number out of range"}
		}
	case string:
		if strings.ContainsRune(tok, 0) {
			return &fault.Field{Pointer: at, Reason: "must not contain the character U+0000"}
		}
	}
	return nil
}

func (s scanner) object(at string, depth int) *fault.Field {
	seen := map[string]bool{}
	for s.d.More() {
		tok, err := s.d.Token()
		if err != nil {
			return s.syntax(at)
		}
		key, ok := tok.(string)
		if !ok {
			return s.syntax(at)
		}
		child := at + "/" + escapePointer(key)
		if strings.ContainsRune(key, 0) {
			return &fault.Field{Pointer: at, Reason: "has a key with the character U+0000"}
		}
		if seen[key] {
			return &fault.Field{Pointer: child, Reason: "is a duplicate key"}
		}
		seen[key] = true
		if f := s.value(child, depth); f != nil {
			return f
		}
	}
	if _, err := s.d.Token(); err != nil {
		return s.syntax(at)
	}
	return nil
}

func (s scanner) array(at string, depth int) *fault.Field {
	for i := 0; s.d.More(); i++ {
		if f := s.value(at+"/"+strconv.Itoa(i), depth); f != nil {
			return f
		}
	}
	if _, err := s.d.Token(); err != nil {
		return s.syntax(at)
	}
	return nil
}

// syntax says where the text stops being JSON. The decoder's own words quote the text and are not used.
func (s scanner) syntax(at string) *fault.Field {
	// Only a pass over the whole text tells the place: the token stream counts from its last token.
	var bad *json.SyntaxError
	if !errors.As(json.Unmarshal(s.body, new(any)), &bad) || bad.Offset < 1 || bad.Offset > int64(len(s.body)) {
		return &fault.Field{Pointer: at, Reason: "is not JSON"}
	}
	offset := bad.Offset
	if bad.Offset == int64(len(s.body)) && strings.Contains(bad.Error(), "unexpected end") {
		return &fault.Field{Pointer: at, Reason: "ends before the JSON value is complete"}
	}
	before := s.body[:offset-1]
	line := 1 + bytes.Count(before, []byte{'\n'})
	column := len(before) - (bytes.LastIndexByte(before, '\n') + 1) + 1
	f := &fault.Field{Pointer: at, Reason: fmt.Sprintf("is not JSON at line %d, column %d", line, column)}
	if c := s.body[offset-1]; c < 0x20 && c != '\t' || c == '\t' && insideString(before) {
		f.Hint = `a line break or control character inside a string must be escaped; build the body with: jq -n --arg ` +
			`name "$VALUE" '{name: $name}'`
	}
	return f
}

func insideString(before []byte) bool {
	return bytes.Count(before, []byte{'"'})%2 == 1
}

func isSaneNumber(n string) bool {
	if len(n) > maxNumberChars {
		return false
	}
	if i := strings.IndexAny(n, "eE"); i >= 0 {
		exp, err := strconv.Atoi(n[i+1:])
		if err != nil || exp > maxExponent || exp < -maxExponent {
			return false
		}
	}
	_, err := strconv.ParseFloat(n, 64)
	return err == nil
}

// rounded lists the whole numbers that a float64 does not hold exactly: programs that read JSON, among them apps that
// read their parameters and config, would take another number.
func rounded(at string, value any) (fields []fault.Field) {
	switch v := value.(type) {
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(v)) {
			fields = append(fields, rounded(at+"/"+escapePointer(key), v[key])...)
		}
	case []any:
		for i, item := range v {
			fields = append(fields, rounded(at+"/"+strconv.Itoa(i), item)...)
		}
	case json.Number:
		f, _ := v.Float64()
		if !strings.ContainsAny(v.String(), ".eE") && strconv.FormatFloat(f, 'f', -1, 64) != v.String() {
			fields = []fault.Field{{
				Pointer: at, Reason: "is a whole number that is not kept exactly",
				Hint: "use one from -2^53 to 2^53, or a string",
			}}
		}
	}
	return fields
}

//nolint:gochecknoglobals // a constant that is slow to make
var pointerEscapes = strings.NewReplacer("~", "~0", "/", "~1")

// escapePointer writes one RFC 6901 token; keys come from outside, so long ones are cut.
func escapePointer(key string) string {
	const maxKeyBytes = 128
	if len(key) > maxKeyBytes {
		key = strings.ToValidUTF8(key[:maxKeyBytes], "") + "…"
	}
	return pointerEscapes.Replace(key)
}
