package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func samplesTo(n int) (s Samples) {
	for i := range n {
		s = append(s, float64(i+1))
	}
	return s
}

func TestA99thPercentileNeedsAHundredSamples(t *testing.T) {
	require.Zero(t, samplesTo(99).Into(Result{}).P99)
	require.Greater(t, samplesTo(99).P99(), 1e9, "no target is reached")
	require.InDelta(t, 99, samplesTo(100).Into(Result{}).P99, 0)
	require.Zero(t, Result{}.single(7).P99)
	require.Zero(t, merge([]Result{{Name: "a", N: 10, P99: 3}}, nil, []string{"a"})[0].P99)
}

func TestSamplesAreKeptInTheOrderInWhichTheyWereTaken(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "samples")
	require.NoError(t, keepRaw(dir, []Result{Samples{3, 1.5, 2}.Into(Result{Name: "a.b"}), {Name: "none"}}))
	text, err := os.ReadFile(filepath.Join(dir, "a.b.txt"))
	require.NoError(t, err)
	require.Equal(t, "3\n1.5\n2\n", string(text))
	require.NoFileExists(t, filepath.Join(dir, "none.txt"))
}

func TestALineOfAnotherCommitIsMarked(t *testing.T) {
	results := []Result{
		{Conditions: &Conditions{Commit: "a"}},
		{Conditions: &Conditions{Commit: "b"}},
		{},
		{Conditions: &Conditions{Commit: "a", Dirty: true}},
	}
	markOthers(results, "a")
	var marked []bool
	for _, r := range results {
		marked = append(marked, r.OtherCommit)
	}
	require.Equal(t, []bool{false, true, true, true}, marked)
}

func TestConditionsSayCommitLimitsAndKernelSettings(t *testing.T) {
	c, err := conditions(t.Context(), filepath.Join("..", ".."))
	require.NoError(t, err)
	require.Regexp(t, "^[0-9a-f]{40}", c.Commit)
	require.NotEmpty(t, c.Limits["nofile"])
	require.NotEmpty(t, c.Kernel["/proc/sys/net/core/somaxconn"])
}
