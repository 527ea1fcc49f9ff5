package api_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/gpuaas/hub/api"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
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
	var reasons []string
	for _, r := range instance.Reasons() {
		reasons = append(reasons, string(r))
	}
	require.Equal(t, reasons, rest.Components.Schemas["StatusReason"].Enum)
}

// TestTheReasonsOfTheAgentAreInTheContract: the hub turns a reason that is not in the list into "internal". The agent's
// constants are read from its source, because neither side imports the other.
func TestTheReasonsOfTheAgentAreInTheContract(t *testing.T) {
	files, err := filepath.Glob("../../agent/*.go")
	require.NoError(t, err)
	reasons := map[string]instance.Reason{}
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		require.NoError(t, err)
		ast.Inspect(file, func(n ast.Node) bool {
			spec, is := n.(*ast.ValueSpec)
			if !is || !strings.HasPrefix(spec.Names[0].Name, "Reason") {
				return true
			}
			require.Len(t, spec.Values, 1, spec.Names[0].Name)
			value, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
			require.NoError(t, err)
			reasons[spec.Names[0].Name] = instance.Reason(value)
			return false
		})
	}
	require.Contains(t, reasons, "ReasonCrashLoop")
	for name, reason := range reasons {
		require.Contains(t, instance.Reasons(), reason, "agent.%s", name)
	}
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
