package command_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/pkg/manifest/manifesttest"
)

// No node has anything of an instance of an external worker, which reads its config at the hub.
func TestTheConfigOfAnExternalWorkerChanges(t *testing.T) {
	w := newWorld(t)
	w.PublishWorker(strings.TrimRight(manifesttest.External("cluster"), "\n") +
		"\n  config_schema: {type: object, additionalProperties: false, properties: {motd: {type: string}}}\n")
	i, _ := w.launchCluster("cluster", 2)
	w.finish(w.next(i, "deploy"))
	changed, err := w.Commands().ChangeInstance(t.Context(), w.Meta(""), w.Project.ID, i.ID,
		command.ChangeInstanceInput{Config: map[string]any{"motd": "hello"}})
	require.NoError(t, err)
	require.JSONEq(t, `{"motd": "hello"}`, changed.ConfigJSON)
	require.JSONEq(t, `{"motd": "hello"}`, w.Get(i.ID).ConfigJSON)
}
