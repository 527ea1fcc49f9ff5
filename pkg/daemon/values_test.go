package daemon

import (
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
)

func TestADurationOutsideItsBoundsIsRefused(t *testing.T) {
	var resync, lifetime time.Duration
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	DurationVar(f, &resync, "resync", 30*time.Second, 100*time.Millisecond, time.Hour, "")
	DurationVar(f, &lifetime, "lifetime", 400*24*time.Hour, 24*time.Hour, 0, "")
	require.Equal(t, 30*time.Second, resync)
	for _, text := range []string{"0", "-1s", "99ms", "61m", "30"} {
		require.Error(t, f.Set("resync", text), text)
	}
	require.ErrorContains(t, f.Set("lifetime", "0"), "24h0m0s or longer")
	require.NoError(t, f.Set("resync", "100ms"))
	require.NoError(t, f.Set("lifetime", "100000h"))
	require.Equal(t, 100*time.Millisecond, resync)
	require.Equal(t, 100000*time.Hour, lifetime)
}

func TestAnUnknownChoiceIsRefused(t *testing.T) {
	var output string
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	ChoiceVarP(f, &output, "output", "o", "text", []string{"text", "json"}, "")
	require.ErrorContains(t, f.Parse([]string{"-o", "jsn"}), "must be text or json")
	require.Equal(t, "text", output)
	require.NoError(t, f.Parse([]string{"-o", "json"}))
	require.Equal(t, "json", output)
}
