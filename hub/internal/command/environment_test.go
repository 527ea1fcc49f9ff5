package command_test

import (
	"encoding/pem"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Law 11: the index of a project is stored sealed, and reaches an instance that has an environment as its node alone
// can open it.
func TestLaw11APackageIndexIsStoredSealed(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	doc := strings.Replace(commandtest.Manifest(), "    resources:", "    environment: {path: /opt/environment, "+
		"python: /usr/bin/python3, max_size_mib: 64}\n    resources:", 1)
	require.NotEqual(t, commandtest.Manifest(), doc)
	verified, env := w.Sign(strings.Replace(doc, "version: 1.0.0", "version: 3.0.0", 1))
	w.PublishVersion("3.0.0", verified, env)
	pair := w.sealingNode()
	kek, err := secret.NewKEK([]byte(strings.Repeat("k", 32)))
	require.NoError(t, err)
	commands := w.Commands()
	commands.Sealer = secret.NewSealer(kek)
	caPEM := ""
	put := func(address, username, password string) error {
		return second(commands.PutPackageIndex(t.Context(), w.Meta("index "+address), w.Project.ID, address, username,
			password, caPEM))
	}
	for address, field := range map[string]string{
		"ftp://packages.example":         "/url",
		"https://u:p@packages.example":   "/url",
		"http://packages.example/simple": "/url", // with credentials
		"https://packages.example/?a=b":  "/url",
	} {
		err := put(address, "reader", "correct-horse")
		require.Equal(t, field, fault.As(err).Fields[0].Pointer, address)
	}
	require.Equal(t, fault.CodeNotFound, fault.As(put("", "", "")).Code, "there is none to remove")
	require.NoError(t, put("https://packages.example/simple", "reader", "correct-horse"))

	create := func(requirements ...string) (instance.Instance, error) {
		in := w.InstanceInput()
		in.Version, in.Resources.Environment = "3.0.0", requirements
		return commands.CreateInstance(t.Context(), w.Meta("with packages "+strings.Join(requirements, " ")), in)
	}
	_, err = create("numpy", "-r requirements.txt")
	require.Equal(t, "/environment/requirements/1", fault.As(err).Fields[0].Pointer)
	i, err := create("NumPy>=1")
	require.NoError(t, err)
	require.Equal(t, []string{"numpy>=1"}, i.Resources.Environment)
	full := map[string]string{protocol.PackageIndexParameter: "https://reader:correct-horse@packages.example/simple"}
	require.Equal(t, full, opened(t, pair, i))
	i = w.ready(i)

	caPEM = "no certificate"
	require.Equal(t, "/ca_pem", fault.As(put("https://other.example/simple", "", "")).Fields[0].Pointer)
	authority := httptest.NewUnstartedServer(nil)
	authority.StartTLS()
	authority.Close()
	caPEM = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: authority.Certificate().Raw}))
	require.Equal(t, "/url", fault.As(put("http://other.example/simple", "", "")).Fields[0].Pointer)
	require.NoError(t, put("https://other.example/simple", "", ""))
	i, err = commands.UpgradeInstance(t.Context(), w.Meta("upgrade"), command.UpgradeInstanceInput{
		ProjectID: w.Project.ID, InstanceID: i.ID, Version: "3.0.0",
	})
	require.NoError(t, err)
	require.Equal(t, []string{"numpy>=1"}, i.Resources.Environment, "an upgrade keeps the packages")
	require.Equal(t, "https://other.example/simple\n"+caPEM, opened(t, pair, i)[protocol.PackageIndexParameter])
	w.RequireHidden("correct-horse")
}
