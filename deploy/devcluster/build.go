package devcluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/gpuaas/gpuaas/pkg/appkit"
)

// DemoApp is the package of the demo's app.
const DemoApp = "./deploy/demo/app"

// Build compiles a program of the source tree into a static binary.
func Build(ctx context.Context, source, program, binary string) error {
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", binary, program)
	build.Dir, build.Env = source, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w: %s", program, err, out)
	}
	return nil
}

// DemoImage is an image with the demo's app and nothing else.
func DemoImage(binary string) (v1.Image, error) {
	return appkit.ImageFromFiles([]appkit.File{{Path: "/app", Source: binary, Mode: 0o755}},
		appkit.ImageConfig{Entrypoint: []string{"/app"}, User: "1000:1000"})
}

// DemoSummary is the last line that `make demo` prints, as JSON.
type DemoSummary struct {
	InstanceID   string  `json:"instance_id"`
	Status       string  `json:"status"`
	EndpointURL  string  `json:"endpoint_url"`
	AppVersion   string  `json:"app_version"`
	LaunchMillis float64 `json:"launch_ms"`
	UsageRecords int     `json:"usage_records"`
	LedgerZero   bool    `json:"ledger_zero"`
	Events       int     `json:"events"`
	HubPID       int     `json:"hub_pid"`
	AgentPID     int     `json:"agent_pid"`
	APIURL       string  `json:"api_url"`
	CAFile       string  `json:"ca_file"`
	TokenFile    string  `json:"token_file"`
}
