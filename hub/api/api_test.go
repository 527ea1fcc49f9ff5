package api_test

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/gpuaas/hub/api"
)

type schemas struct {
	Components struct {
		Schemas map[string]struct {
			Enum []string `yaml:"enum"`
		} `yaml:"schemas"`
	} `yaml:"components"`
}

// TestBothContractsNameTheSameStatesAndReasons: a reader of events and a reader of answers must not meet different words.
func TestBothContractsNameTheSameStatesAndReasons(t *testing.T) {
	text, err := os.ReadFile("asyncapi.yaml")
	require.NoError(t, err)
	var events, rest schemas
	require.NoError(t, yaml.Unmarshal(text, &events))
	require.NoError(t, yaml.Unmarshal(api.OpenAPI, &rest))
	for _, name := range []string{"AppInstanceStatus", "StatusReason"} {
		require.NotEmpty(t, rest.Components.Schemas[name].Enum, name)
		require.Equal(t, rest.Components.Schemas[name].Enum, events.Components.Schemas[name].Enum, name)
	}
}

// TestEveryEventOfTheLifecycleIsDescribed holds the list of DESIGN §11 against asyncapi.yaml.
func TestEveryEventOfTheLifecycleIsDescribed(t *testing.T) {
	text, err := os.ReadFile("asyncapi.yaml")
	require.NoError(t, err)
	var doc struct {
		Channels map[string]struct {
			Messages map[string]struct {
				Ref string `yaml:"$ref"`
			} `yaml:"messages"`
		} `yaml:"channels"`
		Components struct {
			Messages map[string]struct {
				Name    string `yaml:"name"`
				Payload struct {
					Ref string `yaml:"$ref"`
				} `yaml:"payload"`
			} `yaml:"messages"`
			Schemas map[string]any `yaml:"schemas"`
		} `yaml:"components"`
	}
	require.NoError(t, yaml.Unmarshal(text, &doc))
	types := []string{
		"requested", "deploying", "running", "upgrade_requested", "upgraded", "rollback_requested", "rolled_back", "start_requested",
		"stop_requested", "stopped", "decommission_requested", "decommissioned", "failed", "changed", "adopted",
	}
	require.Len(t, doc.Components.Messages, len(types))
	for _, name := range types {
		require.Equal(t, "apps.instance."+name, doc.Components.Messages[name].Name)
		require.Equal(t, "#/components/messages/"+name, doc.Channels["appInstances"].Messages[name].Ref)
		payload := doc.Components.Messages[name].Payload.Ref
		require.Contains(t, doc.Components.Schemas, payload[len("#/components/schemas/"):])
	}
}
