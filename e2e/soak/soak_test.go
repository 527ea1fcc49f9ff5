package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// fabricated is a soak of two tests, of which flaky fails at its second run.
func fabricated(t *testing.T, out *bytes.Buffer) (config, map[test]int) {
	ran := map[test]int{}
	flaky := test{Package: "./a", Name: "TestFlaky"}
	return config{
		tests: []test{flaky, {Package: "./b", Name: "TestSound"}}, times: 5, dir: t.TempDir(), out: out,
		run: func(_ context.Context, x test) (string, error) {
			ran[x]++
			if x == flaky && ran[x] == 2 {
				return "what it printed", errors.New("exit status 1")
			}
			return "", nil
		},
	}, ran
}

func TestEachTestRunsAsOftenAsAskedAndFailuresAreListed(t *testing.T) {
	var out bytes.Buffer
	c, ran := fabricated(t, &out)
	failures, err := soak(t.Context(), c)
	require.NoError(t, err)
	require.Equal(t, 1, failures)
	require.Equal(t, map[test]int{c.tests[0]: 5, c.tests[1]: 5}, ran)
	require.Contains(t, out.String(), "failed: ./a TestFlaky: ")
	require.Contains(t, out.String(), "2 tests, 10 runs, 1 failures")
	logs, err := filepath.Glob(filepath.Join(c.dir, "TestFlaky-*.log"))
	require.NoError(t, err)
	require.Len(t, logs, 1)
	text, err := os.ReadFile(logs[0])
	require.NoError(t, err)
	require.Contains(t, string(text), "what it printed")
}

func TestAnInterruptedSoakGoesOnAndForgetsNoFailure(t *testing.T) {
	var out bytes.Buffer
	c, ran := fabricated(t, &out)
	ctx, stop := context.WithCancel(t.Context())
	whole, count := c.run, 0
	c.run = func(ctx context.Context, x test) (string, error) {
		if count++; count == 8 {
			stop() // in the middle of the eighth run, which does not count
			return "", ctx.Err()
		}
		return whole(ctx, x)
	}
	_, err := soak(ctx, c)
	require.ErrorIs(t, err, context.Canceled)
	// A machine that crashes may cut off the last line.
	file, err := os.OpenFile(filepath.Join(c.dir, "runs.jsonl"), os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = file.WriteString("\n{\"package\":\"./a\",\"na")
	require.NoError(t, err)
	require.NoError(t, file.Close())

	failures, err := soak(t.Context(), c)
	require.NoError(t, err)
	require.Equal(t, map[test]int{c.tests[0]: 5, c.tests[1]: 5}, ran)
	require.Equal(t, 1, failures)
	failures, err = soak(t.Context(), c)
	require.NoError(t, err)
	require.Equal(t, 1, failures, "nothing ran, the failure is still there")
	require.Equal(t, 5, ran[c.tests[0]])
}

func TestTheOrderFollowsFromTheSeed(t *testing.T) {
	c, _ := fabricated(t, &bytes.Buffer{})
	first := c.remaining(nil)
	require.Equal(t, first, c.remaining(nil))
	c.seed++
	require.NotEqual(t, first, c.remaining(nil))
	require.ElementsMatch(t, first, c.remaining(nil))
}

func TestTestsAreFoundInTheSource(t *testing.T) {
	names, err := testsIn(".")
	require.NoError(t, err)
	require.Contains(t, names, t.Name())
	require.NotContains(t, names, "TestMain")
}
