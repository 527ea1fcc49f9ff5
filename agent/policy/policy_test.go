package policy_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestLaw15TheOwnersRulesDecide(t *testing.T) {
	workload := &protocol.Workload{OrgSlug: "acme", AppSlug: "jupyter", Services: []*protocol.Service{
		{Resources: &protocol.Resources{CpuMillis: 1500, MemoryBytes: 2_000_000_001, AcceleratorIds: []string{"a"}}},
		{Resources: &protocol.Resources{CpuMillis: 600, AcceleratorIds: []string{"b"}}},
	}}
	for doc, says := range map[string]string{
		"":                              "",
		"# nothing is said":             "",
		"closed: false":                 "",
		"closed: true":                  "accepts no workloads at present",
		"orgs: {only: [acme]}":          "",
		"orgs: {only: [other]}":         "this organization",
		"orgs: {never: [acme]}":         "this organization",
		"orgs: {never: [other]}":        "",
		"apps: {only: [demo, jupyter]}": "",
		"apps: {only: [demo]}":          "this app",
		"apps: {only: [jupyter], never: [jupyter]}":           "this app",
		"largest_workload: {cpu_millis: 2100}":                "",
		"largest_workload: {cpu_millis: 2099}":                "at most 2099 thousandths of a core; this one asks for 2100",
		"largest_workload: {memory_mb: 2001}":                 "",
		"largest_workload: {memory_mb: 2000}":                 "at most 2000 MB of memory; this one asks for 2001",
		"largest_workload: {accelerators: 2}":                 "",
		"largest_workload: {accelerators: 1}":                 "at most 1 accelerators; this one asks for 2",
		"orgs: {only: [acme]}\napps: {never: [bitcoin, xmr]}": "",
	} {
		p, err := policy.Parse([]byte(doc))
		require.NoError(t, err, doc)
		if says == "" {
			require.Empty(t, p.Refuses(workload), doc)
			continue
		}
		require.Contains(t, p.Refuses(workload), says, doc)
	}
}

func TestAPolicyWithAnErrorInItIsRefusedAsAWhole(t *testing.T) {
	for doc, says := range map[string]string{
		"close: true":                          "field close not found",
		"orgs: acme":                           "cannot unmarshal",
		"apps: {never: ['']}":                  "apps.never must list",
		"closed: true\n---\nclosed: false":     "must be one document",
		"largest_workload: {cpu_millis: -1}":   "cannot unmarshal",
		"closed: [":                            "cannot be read",
		strings.Repeat("#", policy.MaxBytes+1): "the limit is",
	} {
		_, err := policy.Parse([]byte(doc))
		require.ErrorContains(t, err, says, doc)
	}
}
