package main

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

func TestTemplateIsAManifest(t *testing.T) {
	template, err := os.ReadFile("manifest.yaml")
	require.NoError(t, err)
	doc, err := appkit.FillTemplate(template, map[string]string{
		"version": "1.0.0",
		"image":   "org/acme/hello/runtime@sha256:" + strings.Repeat("1", 64),
	})
	require.NoError(t, err)
	m, err := manifest.Parse(doc)
	require.NoError(t, err)
	_, err = manifest.Lower(m, manifest.Inputs{}, manifest.Shape{})
	require.NoError(t, err)
}
