package lifecycle_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	api "github.com/gpuaas/gpuaas/pkg/client"
)

const vllmSlug = "vllm-openai"

// endpointOf is the URL of a port of the app.
func endpointOf(w *harness.Testbed, i api.AppInstance, port string) (string, error) {
	w.T.Helper()
	for _, e := range w.Instance(i.ID).Endpoints {
		if e.Name == port {
			return e.URL, nil
		}
	}
	return "", fmt.Errorf("there is no endpoint %s", port)
}

// complete asks the server for a completion.
func complete(w *harness.Testbed, i api.AppInstance, prompt string) error {
	url, err := endpointOf(w, i, "http")
	if err != nil {
		return err
	}
	r, err := http.NewRequestWithContext(w.Ctx, http.MethodPost, url+"/v1/completions",
		strings.NewReader(`{"prompt": "`+prompt+`"}`))
	if err != nil {
		return err
	}
	r.Close = true // a connection that is kept could lead to a container that is gone
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err == nil && !strings.Contains(string(body), prompt) {
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	return err
}

// monitored is what the sidecar says of the server.
type monitored struct {
	Up               bool    `json:"up"`
	PromptTokens     float64 `json:"prompt_tokens"`
	ReadEverySeconds float64 `json:"read_every_seconds"`
}

// monitor asks the sidecar, which finds the server by the name of its service.
func monitor(w *harness.Testbed, i api.AppInstance) (m monitored, err error) {
	url, err := endpointOf(w, i, "monitor")
	if err != nil {
		return m, err
	}
	text, err := scenario.Get(w.Ctx, url+"/")
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal([]byte(text), &m); err != nil || !m.Up {
		return m, fmt.Errorf("the server is not up: %s (%w)", text, err)
	}
	return m, nil
}
