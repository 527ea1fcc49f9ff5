package reconcile

import (
	"context"
	"io"
	goruntime "runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
)

// oneLine is the log of a program that ends no line before its last one.
type oneLine struct {
	bytes int64
	last  string
}

func (oneLine) RotateLogs(context.Context) error { return nil }

func (l oneLine) Logs(context.Context, string, int, bool) (io.ReadCloser, error) {
	return io.NopCloser(io.MultiReader(io.LimitReader(blanks{}, l.bytes), strings.NewReader("\n"+l.last+"\n"))), nil
}

type blanks struct{}

func (blanks) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = '.'
	}
	return len(p), nil
}

// Twelve lines of a log may be all of it, and a package's own build writes them.
func TestTheLogOfAnInstallationIsNotReadIntoMemory(t *testing.T) {
	r := &Reconciler{machine: Machine{Logs: oneLine{bytes: 64 << 20, last: "no matching distribution"}}}
	var before, after goruntime.MemStats
	goruntime.ReadMemStats(&before)
	quoted := r.installLog(t.Context(), agent.Workload{}, "m1.1")
	goruntime.ReadMemStats(&after)
	require.True(t, strings.HasSuffix(quoted, ".\nno matching distribution"))
	require.Len(t, quoted, maxInstallLogBytes)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(4<<20))
}

// The index of a project may change while an installation runs: its log may name the credentials of the one before.
func TestTheQuotedLogNamesNoCredentialsOfAnotherIndex(t *testing.T) {
	r := &Reconciler{machine: Machine{Logs: oneLine{last: "cannot read https://ci:s3cret@index.example/simple/torch/"}}}
	require.Equal(t, "cannot read https://****@index.example/simple/torch/", r.installLog(t.Context(), agent.Workload{},
		"m1.1"))

	r.machine.Logs = oneLine{last: "password is s3cret"}
	r.cfg.Unseal = func(string, string, []byte) ([]byte, error) { return nil, io.ErrUnexpectedEOF }
	require.NotContains(t, r.installLog(t.Context(), agent.Workload{SealedIndex: []byte("sealed anew")}, "m1.1"), "s3cret")
}

// A quotation begins anywhere in a log, also within a secret: it is redacted first, and then cut.
func TestLaw11NoEndOfAnIndexsCredentialsIsQuoted(t *testing.T) {
	const address, end = "https://ci:s3cret-t0ken@index.example/simple", "t0ken"
	r := &Reconciler{}
	r.cfg.Unseal = func(string, string, []byte) ([]byte, error) { return []byte(address), nil }
	for what, secret := range map[string]string{
		"the password alone":           "s3cret-" + end,
		"another password with a name": "cannot read https://ci:0ther-" + end,
	} {
		after := "@index.example "
		after += strings.Repeat(".", maxInstallLogBytes-len(end)-len(after))
		r.machine.Logs = oneLine{bytes: maxInstallLogBytes, last: secret + after}
		quoted := r.installLog(t.Context(), agent.Workload{SealedIndex: []byte("sealed")}, "m1.1")
		require.Len(t, quoted, maxInstallLogBytes, what)
		require.NotContains(t, quoted, end, what)
	}
}

// The error of what is no URL quotes all of it.
func TestLaw11AnIndexThatIsNoURLIsNotQuoted(t *testing.T) {
	r := &Reconciler{}
	r.cfg.Unseal = func(string, string, []byte) ([]byte, error) {
		return []byte("https://reader:s3cr%t@packages.example/simple"), nil
	}
	_, err := r.index(agent.Workload{SealedIndex: []byte("sealed")})
	require.ErrorContains(t, err, "is no URL")
	require.NotContains(t, err.Error(), "s3cr")
}
