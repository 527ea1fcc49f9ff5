package main_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/client"
)

const id = "0192f0c0-0000-7000-8000-000000000001"

// program is the built program with files that it can work with, and a hub.
type program struct {
	path, dir string
	env       map[string]string
}

// hub answers with one instance of the backend, which has no tasks; asked gets each request for tasks.
func newProgram(t *testing.T, backend client.RuntimeBackend, asked chan<- struct{}) program {
	t.Helper()
	p := program{dir: t.TempDir()}
	p.path = filepath.Join(p.dir, "gpuaas-starter")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", p.path, ".").CombinedOutput()
	require.NoError(t, err, string(out))
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body any = client.AppInstance{ID: id, RuntimeBackend: backend, Status: client.AppInstanceStatusRunning}
		switch {
		case strings.HasSuffix(r.URL.Path, "/auth/service-account/token"):
			body = client.Token{AccessToken: "t", ExpiresIn: 900}
		case !strings.Contains(r.URL.Path, "/projects/"+id+"/app-instances/"+id):
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusNotFound)
			_ = json.NewEncoder(w).Encode(client.Problem{Status: 404, Code: "not_found", Detail: "There is no such thing."})
			return
		case strings.HasSuffix(r.URL.Path, "/tasks"):
			asked <- struct{}{}
			<-r.Context().Done()
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(body)
	}))
	t.Cleanup(server.Close)
	_, key, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	der, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	account, err := json.Marshal(client.ServiceAccount{ID: id, Key: client.ServiceAccountKey{
		KeyID: id, PrivateKeyPem: string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})),
	}})
	require.NoError(t, err)
	authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	p.env = map[string]string{
		"CONTROLLER": "slurm", "HUB_URL": server.URL, "HUB_CA": p.file(t, "ca.pem", string(authority)),
		"SERVICE_ACCOUNT": p.file(t, "account.json", string(account)), "PROJECT": id, "INSTANCE": id,
		"MACHINES": p.file(t, "machines.yaml", id+": {address: 10.0.0.5, shell: [ssh, root@10.0.0.5], cpus: 16}\n"),
	}
	return p
}

func (p program) file(t *testing.T, name, text string) (path string) {
	t.Helper()
	path = filepath.Join(p.dir, name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// start starts the program with other values of its environment; what it says goes to out.
func (p program) start(t *testing.T, other map[string]string, out *bytes.Buffer, flags ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), p.path, flags...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	for name, value := range p.env {
		if changed, is := other[name]; is {
			value = changed
		}
		cmd.Env = append(cmd.Env, "GPUAAS_STARTER_"+name+"="+value)
	}
	cmd.Stdout, cmd.Stderr = out, out
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd
}

func TestSettingsThatCannotWorkEndTheProgram(t *testing.T) {
	p := newProgram(t, client.RuntimeBackendSlurm, nil)
	open := p.file(t, "open.json", "{}")
	require.NoError(t, os.Chmod(open, 0o644))
	const secret = "hunter2"
	for name, c := range map[string]struct {
		variable, value, says string
	}{
		"no controller":        {"CONTROLLER", "", "--controller is missing"},
		"no hub":               {"HUB_URL", "", "--hub-url is missing"},
		"no account":           {"SERVICE_ACCOUNT", "", "--service-account is missing"},
		"no project":           {"PROJECT", "", "--project is missing"},
		"no instance":          {"INSTANCE", "", "--instance is missing"},
		"no machines":          {"MACHINES", "", "--machines is missing"},
		"an unknown one":       {"CONTROLLER", "ray", "must be slurm or rke2"},
		"another backend":      {"CONTROLLER", "rke2", "has the backend slurm"},
		"no URL":               {"HUB_URL", "hub.example", "must look like https://host:port"},
		"no authority":         {"HUB_CA", p.file(t, "empty.pem", ""), "is not a PEM certificate"},
		"no file of the key":   {"SERVICE_ACCOUNT", filepath.Join(p.dir, "none"), "read the service account"},
		"a key for all":        {"SERVICE_ACCOUNT", open, "chmod 600"},
		"not a key":            {"SERVICE_ACCOUNT", p.file(t, "text", secret), "is not what gpuaas sa create --save writes"},
		"no file of machines":  {"MACHINES", filepath.Join(p.dir, "none"), "read the machines"},
		"an unknown key":       {"MACHINES", p.file(t, "unknown.yaml", "a: {street: b}\n"), "street"},
		"half a machine":       {"MACHINES", p.file(t, "half.yaml", "a: {address: b}\n"), "needs address, shell and cpus"},
		"another's instance":   {"INSTANCE", "0192f0c0-0000-7000-8000-000000000002", "There is no such thing."},
		"a pause that is none": {"CONTROLLER", "slurm", "report-every"},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			var flags []string
			if c.says == "report-every" {
				flags = []string{"--report-every", "soon"}
			}
			cmd := p.start(t, map[string]string{c.variable: c.value}, &out, flags...)
			require.Error(t, cmd.Wait())
			require.Equal(t, 1, cmd.ProcessState.ExitCode(), out.String())
			require.Contains(t, out.String(), c.says)
			require.NotContains(t, out.String(), secret)
		})
	}
}

func TestTheProgramEndsWhenItIsAskedTo(t *testing.T) {
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		asked := make(chan struct{}, 100)
		p := newProgram(t, client.RuntimeBackendK8S, asked)
		var out bytes.Buffer
		cmd := p.start(t, map[string]string{"CONTROLLER": "rke2"}, &out)
		<-asked
		require.NoError(t, cmd.Process.Signal(signal))
		require.NoError(t, cmd.Wait(), "%s", out.String())
		require.Contains(t, out.String(), `"stopped"`)
	}
}
