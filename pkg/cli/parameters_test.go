package cli

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// If this program rounded a number, the hub could not tell that another one was meant.
func TestNumbersOfParametersAreSentAsTheyAreWritten(t *testing.T) {
	file := strings.NewReader(`{"a":1,"b":{"n":18446744073709551615}}`)
	got, err := parameters(file, "-", []string{"a=9007199254740993", "c=1.50", "d=no JSON", `e=["x"]`, "f=1 2"})
	require.NoError(t, err)
	require.Equal(t, map[string]any{
		"a": json.Number("9007199254740993"),
		"b": map[string]any{"n": json.Number("18446744073709551615")},
		"c": json.Number("1.50"),
		"d": "no JSON",
		"e": []any{"x"},
		"f": "1 2",
	}, got)
	for _, bad := range []string{"", "[1]", `{"a":1} {}`, `{"a":`} {
		_, err := parameters(strings.NewReader(bad), "-", nil)
		require.Error(t, err, bad)
	}
}
