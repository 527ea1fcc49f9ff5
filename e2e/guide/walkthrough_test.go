package guide_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// walkthrough is a platform on which a new user follows a script of testdata.
type walkthrough struct {
	*harness.Testbed
	wheel string
}

// The platform's quickstart with curl, the SDK guide with Python and the manifest guide, each typed as a new user does.
// What differs from them on purpose is in the scripts' comments.
func TestWalkthroughsWorkAsTyped(t *testing.T) {
	w := &walkthrough{Testbed: harness.NewPlatform(t)}
	w.ShipVersion("1.1.0")
	out, err := exec.CommandContext(t.Context(), "go", "-C", harness.Source(t), "run", "./deploy/pythonsdk", "wheel",
		"pkg/client/python", w.Dir).Output()
	require.NoError(t, err)
	w.wheel = strings.TrimSpace(string(out))
	for _, name := range []string{"manifest", "quickstart", "python"} {
		t.Run(name, func(t *testing.T) {
			testscript.Run(t, testscript.Params{
				Files:               []string{filepath.Join("testdata", name+".txtar")},
				Setup:               w.setUp,
				RequireExplicitExec: true,
				Cmds: map[string]func(*testscript.TestScript, bool, []string){
					"record":     record,
					"until":      w.until,
					"push-image": w.pushImage,
				},
			})
		})
	}
}

// setUp exports what the quickstart has its reader export.
func (w *walkthrough) setUp(env *testscript.Env) error {
	for name, value := range map[string]string{
		"API_BASE_URL": w.Hub.Ready.APIURL, "CA_FILE": w.Hub.Ready.CAFile, "CURL_CA_BUNDLE": w.Hub.Ready.CAFile,
		"PROJECT_ID": w.Tenant.Project.ID, "APP_SLUG": harness.AppSlug, "APP_VERSION": "1.0.0",
		"SA_NAME": "app-operator", "SA_SLUG": "app-operator", "HUMAN_TOKEN": w.AdminToken(),
		"HOME": env.WorkDir, "PYTHONPATH": w.wheel, "PYTHONDONTWRITEBYTECODE": "1",
		"PATH": harness.Binaries(w.T) + ":/usr/bin:/bin:" + os.Getenv("PATH"),
	} {
		env.Setenv(name, value)
	}
	return nil
}

// record exports what a filter of jq finds in the last answer: record NAME FILTER.
func record(ts *testscript.TestScript, _ bool, args []string) {
	value, err := jq(ts.ReadFile("stdout"), args[1])
	ts.Check(err)
	if value == "" || value == "null" {
		ts.Fatalf("the answer has no %s", args[1])
	}
	ts.Setenv(args[0], value)
}

// until repeats a command until a filter of jq gives a value: until FILTER VALUE exec COMMAND.
func (w *walkthrough) until(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(harness.Await(w.Ctx, harness.ConvergenceBound, func() error {
		ts.Check(ts.Exec(args[3], args[4:]...))
		value, err := jq(ts.ReadFile("stdout"), args[0])
		ts.Check(err)
		if value != args[1] {
			return fmt.Errorf("%s is %q and not %q", args[0], value, args[1])
		}
		return nil
	}))
}

func jq(text, filter string) (string, error) {
	cmd := exec.Command("jq", "-r", filter)
	cmd.Stdin = strings.NewReader(text)
	out, err := cmd.Output()
	return strings.TrimRight(string(out), "\n"), err
}

// pushImage pushes and signs an image as the publish intent of the last answer says, and exports what to register.
func (w *walkthrough) pushImage(ts *testscript.TestScript, _ bool, _ []string) {
	var intent client.PublishIntent
	ts.Check(json.Unmarshal([]byte(ts.ReadFile("stdout")), &intent))
	pushed, err := appkit.Push(w.Ctx, w.Release("1.0.0").Image, appkit.Target{
		RegistryHost: intent.RegistryHost, Repository: intent.Repository, Tag: intent.Tag,
		Username: intent.Credentials.Username, Password: intent.Credentials.Password, CAFile: w.Hub.Ready.CAFile,
	}, w.Publisher.Signer, nil)
	ts.Check(err)
	ts.Setenv("REPOSITORY", pushed.Repository)
	ts.Setenv("DIGEST", pushed.Digest)
}
