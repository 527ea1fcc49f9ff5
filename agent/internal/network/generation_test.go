package network

import (
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
)

// EnsureRules is cheap because of this number: every change must increase it, and nothing else.
func TestTheGenerationOfTheRulesTellsOfEveryChange(t *testing.T) {
	generation := func() uint32 {
		g, err := rulesetGeneration()
		require.NoError(t, err)
		return g
	}
	t.Cleanup(func() { _ = exec.Command("nft", "delete", "table", "inet", "generation").Run() })
	was := generation()
	for _, change := range []string{
		"add table inet generation", "add chain inet generation c",
		"add rule inet generation c accept", "flush chain inet generation c", "delete table inet generation",
	} {
		require.Equal(t, was, generation())
		out, err := exec.Command("nft", change).CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.NotEqual(t, was, generation(), change)
		was = generation()
	}
}
