package vllmopenai_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	vllmopenai "github.com/gpuaas/gpuaas/deploy/apps/vllm-openai"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

func TestTheTemplateIsAManifest(t *testing.T) {
	digest := "@sha256:" + strings.Repeat("1", 64)
	doc, err := appkit.FillTemplate(vllmopenai.Template(), map[string]string{
		"server_image": "org/demo/vllm-openai/server" + digest, "monitor_image": "org/demo/vllm-openai/monitor" + digest,
		"version": "1.0.0",
	})
	require.NoError(t, err)
	m, err := manifest.Parse(doc)
	require.NoError(t, err)
	values, err := m.CheckParameters([]byte(`{"model": "org/model", "max_model_len": 2048}`))
	require.NoError(t, err)
	services, err := manifest.Lower(m, manifest.Inputs{Parameters: values}, manifest.Shape{
		AcceleratorVendor: manifest.AcceleratorAMD, AcceleratorIDs: []string{"GPU-1", "GPU-2"},
	})
	require.NoError(t, err)
	require.Len(t, services, 2)
	require.Equal(t, []string{"--host=0.0.0.0", "--port=8000", "--model=org/model", "--max-model-len=2048"},
		services[0].GetArgs())
	require.Equal(t, []string{"GPU-1", "GPU-2"}, services[0].GetResources().GetAcceleratorIds())
	require.Empty(t, services[1].GetResources().GetAcceleratorIds())
	for _, bad := range []string{`{}`, `{"model": "--trust"}`, `{"model": "m", "tensor_parallel_size": 64}`} {
		_, err := m.CheckParameters([]byte(bad))
		require.Error(t, err, bad)
	}
}
