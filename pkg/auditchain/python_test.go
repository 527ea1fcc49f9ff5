package auditchain_test

import (
	"bytes"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/skip"
)

// The program of the document verifies what this package writes, and finds what was changed.
func TestTheDocumentedProgramVerifiesAChain(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		skip.Lacking(t, "python3 is not installed: make deps installs it")
	}
	doc, err := os.ReadFile("../../docs/design/audit.md")
	require.NoError(t, err)
	_, program, found := strings.Cut(string(doc), "```python\n")
	require.True(t, found)
	program, _, found = strings.Cut(program, "```\n")
	require.True(t, found)
	run := func(lines [][]byte) (string, error) {
		c := exec.CommandContext(t.Context(), python, "-c", program)
		c.Stdin = bytes.NewReader(bytes.Join(lines, []byte("\n")))
		out, err := c.CombinedOutput()
		return string(out), err
	}
	lines := chainOf(t, 4, "org")
	out, err := run(lines)
	require.NoError(t, err, out)
	out, err = run(slices.Concat(lines[:1], lines[2:]))
	require.Error(t, err)
	require.Contains(t, out, "record 3 does not follow")
	lines[2] = bytes.Replace(lines[2], []byte(`"user"`), []byte(`"node"`), 1)
	out, err = run(lines)
	require.Error(t, err)
	require.Contains(t, out, "record 3 is changed")
}
