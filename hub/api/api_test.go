package api_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/gpuaas/hub/api"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/protocol"
)

type schemas struct {
	Components struct {
		Schemas map[string]struct {
			Enum []string `yaml:"enum"`
		} `yaml:"schemas"`
	} `yaml:"components"`
}

// TestBothContractsNameTheSameStatesAndReasons: a reader of events and a reader of answers must not meet different
// words.
func TestBothContractsNameTheSameStatesAndReasons(t *testing.T) {
	var events, rest schemas
	require.NoError(t, yaml.Unmarshal(api.AsyncAPI, &events))
	require.NoError(t, yaml.Unmarshal(api.OpenAPI, &rest))
	for _, name := range []string{"AppInstanceStatus", "StatusReason"} {
		require.NotEmpty(t, rest.Components.Schemas[name].Enum, name)
		require.Equal(t, rest.Components.Schemas[name].Enum, events.Components.Schemas[name].Enum, name)
	}
}

// TestTheContractsHaveTheReasonsOfTheCode: what a tenant may read as a reason stands in one list.
func TestTheContractsHaveTheReasonsOfTheCode(t *testing.T) {
	var rest schemas
	require.NoError(t, yaml.Unmarshal(api.OpenAPI, &rest))
	values := protocol.WorkloadStatus_REASON_UNSPECIFIED.Descriptor().Values()
	var reasons []string
	for i := 1; i < values.Len(); i++ {
		reasons = append(reasons, protocol.WorkloadStatus_Reason(values.Get(i).Number()).Text())
	}
	require.Equal(t, reasons, rest.Components.Schemas["StatusReason"].Enum)
}

// TestEveryTypeOfEventIsDescribed: Append writes only event.Types, and asyncapi.yaml has a message in a channel for
// each of them.
func TestEveryTypeOfEventIsDescribed(t *testing.T) {
	type ref struct {
		Ref string `yaml:"$ref"`
	}
	var doc struct {
		Channels map[string]struct {
			Address  string         `yaml:"address"`
			Messages map[string]ref `yaml:"messages"`
		} `yaml:"channels"`
		Components struct {
			Messages map[string]struct {
				Name    string `yaml:"name"`
				Payload ref    `yaml:"payload"`
			} `yaml:"messages"`
			Schemas map[string]any `yaml:"schemas"`
		} `yaml:"components"`
	}
	require.NoError(t, yaml.Unmarshal(api.AsyncAPI, &doc))
	var described []string
	for _, channel := range doc.Channels {
		for key, message := range channel.Messages {
			require.Equal(t, "#/components/messages/"+key, message.Ref)
			m := doc.Components.Messages[key]
			require.True(t, strings.HasPrefix(m.Name, channel.Address), m.Name)
			require.Contains(t, doc.Components.Schemas, strings.TrimPrefix(m.Payload.Ref, "#/components/schemas/"))
			described = append(described, m.Name)
		}
	}
	require.Len(t, doc.Components.Messages, len(described))
	require.ElementsMatch(t, event.Types(), described)
}

// TestEveryOperationHasASuccess: an answer below 400 beside the problems.
func TestEveryOperationHasASuccess(t *testing.T) {
	var doc struct {
		Paths map[string]map[string]struct {
			OperationID string         `yaml:"operationId"`
			Responses   map[string]any `yaml:"responses"`
		} `yaml:"paths"`
	}
	require.NoError(t, yaml.Unmarshal(api.OpenAPI, &doc))
	for _, item := range doc.Paths {
		for _, op := range item {
			successes := 0
			for status := range op.Responses {
				if strings.ContainsAny(status[:1], "123") {
					successes++
				}
			}
			require.NotZero(t, successes, op.OperationID)
		}
	}
}
