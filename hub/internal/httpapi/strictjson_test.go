package httpapi

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

func TestStrictJSONNamesThePlace(t *testing.T) {
	for text, want := range map[string]*fault.Field{
		`{"a":{"b":[1,{"c/~":"x"}]}}`: nil,
		` "x" `:                       nil,
		`{"a":1,"a":2}`:               {Pointer: "/a", Reason: "is a duplicate key"},
		`{"a":1,"\u0061":2}`:          {Pointer: "/a", Reason: "is a duplicate key"},
		`{"a":[{"b":1,"b":1}]}`:       {Pointer: "/a/0/b", Reason: "is a duplicate key"},
		`{"a/~":{"b":1,"b":1}}`:       {Pointer: "/a~1~0/b", Reason: "is a duplicate key"},
		`{"a":1}{}`:                   {Reason: "has more after the JSON value"},
		`{"a":1} x`:                   {Reason: "has more after the JSON value"},
		`{"a":`:                       {Pointer: "/a", Reason: "ends before the JSON value is complete"},
		"{\n\"a\" 1}":                 {Pointer: "/a", Reason: "is not JSON at line 2, column 5"},
		`{"a":1e400}`:                 {Pointer: "/a", Reason: "is a number out of range"},
		`{"a":1e-999999999}`:          {Pointer: "/a", Reason: "is a number out of range"},
		`{"a":"\u0000"}`:              {Pointer: "/a", Reason: "must not contain the character U+0000"},
		`{"\u0000":1}`:                {Reason: "has a key with the character U+0000"},
	} {
		require.Equal(t, want, strictJSON([]byte(text)), text)
	}
}

func TestWholeNumbersThatWouldBeRoundedAreNamed(t *testing.T) {
	for text, want := range map[string]bool{
		"0": false, "-0": false, "9007199254740992": false, "-9007199254740992": false, "1000000000000000000000": false,
		"0.1": false, "1e20": false, "1.5e300": false,
		"9007199254740993": true, "-9007199254740993": true, "18446744073709551615": true, "1152921504606846976": true,
	} {
		fields := rounded("/at", []any{json.Number("1"), map[string]any{"a/b": json.Number(text)}})
		require.Equal(t, want, len(fields) == 1 && fields[0].Pointer == "/at/1/a~1b", text)
		require.Len(t, fields, map[bool]int{true: 1}[want], text)
	}
}

func TestRawNewlineGetsAHint(t *testing.T) {
	f := strictJSON([]byte("{\"private_key_pem\": \"-----BEGIN\nKEY\"}"))
	require.NotNil(t, f)
	require.Contains(t, f.Reason, "line 1")
	require.Contains(t, f.Hint, "jq -n --arg")
}

func FuzzStrictJSON(f *testing.F) {
	for _, seed := range []string{
		`{"a":[1,2.5,{"b":null}],"c":"\u00e9"}`, `[[[[]]]]`, `{"a":1,"a":1}`, "\"\\u0000\"",
		`1e99`, `{"a":1,}`, `[1,]`, ` true `,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		if strictJSON(text) != nil {
			return
		}
		// What passes is JSON that decodes into Go, and decoding loses no key.
		var v any
		if err := json.Unmarshal(text, &v); err != nil {
			t.Fatalf("%q passed: %v", text, err)
		}
		if _, err := json.Marshal(v); err != nil {
			t.Fatal(err)
		}
	})
}
