package oidc

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

// Some providers say in words whether an address is verified.
func TestAClaimMayBeAString(t *testing.T) {
	for text, want := range map[string]boolOrString{
		`true`: true, `"true"`: true, `false`: false, `"false"`: false, `null`: false,
	} {
		var got boolOrString
		require.NoError(t, json.Unmarshal([]byte(text), &got), text)
		require.Equal(t, want, got, text)
	}
	for _, text := range []string{`"yes"`, `1`, `{}`, `""`} {
		require.Error(t, json.Unmarshal([]byte(text), new(boolOrString)), text)
	}
}
