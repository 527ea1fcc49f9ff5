package cli_test

import (
	"context"
	"encoding/pem"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/gpuaas/gpuaas/pkg/cli"
	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	orgID      = "0192f0c0-0000-7000-8000-00000000000a"
	projectID  = "0192f0c0-0000-7000-8000-00000000000b"
	instanceID = "0192f0c0-0000-7000-8000-00000000000c"
	allocation = "0192f0c0-0000-7000-8000-00000000000d"
	artifactID = "0192f0c0-0000-7000-8000-0000000000a1"
	accountID  = "0192f0c0-0000-7000-8000-00000000000e"
	nodeID     = "0192f0c0-0000-7000-8000-00000000000f"
	userID     = "0192f0c0-0000-7000-8000-000000000010"
	tokenID    = "0192f0c0-0000-7000-8000-000000000011"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"gpuaas": func() {
		os.Exit(cli.Main(context.Background(), cli.Env{
			Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv, Version: "test",
		}, os.Args[1:]))
	}})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(env *testscript.Env) error {
			hub := &fakeHub{instances: map[string]*client.AppInstance{}}
			server := httptest.NewTLSServer(hub)
			env.Defer(server.Close)
			env.Setenv("HUB", server.URL)
			env.Setenv("HOME", env.WorkDir)
			env.Setenv("PROJECT_ID", projectID)
			env.Setenv("INSTANCE_ID", instanceID)
			ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
			if err := os.WriteFile(filepath.Join(env.WorkDir, "ca.pem"), ca, 0o600); err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(env.WorkDir, "token"), []byte("good-token\n"), 0o600)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			// exits CODE gpuaas ARGS…: the command must end with this exit code.
			"exits": func(ts *testscript.TestScript, _ bool, args []string) {
				err := ts.Exec(args[1], args[2:]...)
				code := "0"
				if err != nil {
					code = strings.TrimPrefix(err.Error(), "exit status ")
				}
				if code != args[0] {
					ts.Fatalf("exit code %s instead of %s", code, args[0])
				}
			},
			// mode FILE OCTAL
			"mode": func(ts *testscript.TestScript, _ bool, args []string) {
				info, err := os.Stat(ts.MkAbs(args[0]))
				ts.Check(err)
				if got := info.Mode().Perm().String(); got != args[1] {
					ts.Fatalf("%s has mode %s", args[0], got)
				}
			},
		},
	})
}
