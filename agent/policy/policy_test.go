package policy_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestLaw15TheOwnersRulesDecide(t *testing.T) {
	workload := &protocol.Workload{OrgSlug: "acme", AppSlug: "jupyter", Services: []*protocol.Service{
		{Resources: &protocol.Resources{CpuMillis: 1500, MemoryBytes: 2_000_000_001, AcceleratorIds: []string{"a"}}},
		{
			Resources: &protocol.Resources{CpuMillis: 600, AcceleratorIds: []string{"b"}},
			Ports:     []*protocol.Port{{Name: "http"}},
		},
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

// Tenants choose only the ports that the owner names, and none where the owner names none.
func TestLaw15TheOwnerSaysWhichPortsTenantsChoose(t *testing.T) {
	for doc, says := range map[string]string{
		"":                                   "lets nobody choose its ports",
		"host_ports: 30001":                  "",
		"host_ports: 30001-30002":            "",
		"host_ports: 30000-30001":            "",
		"host_ports: 30002-30003":            "from 30002 to 30003; this workload asks for 30001",
		"host_ports: 443":                    "from 443 to 443; this workload asks for 30001",
		"host_ports: 1-65535\nclosed: false": "",
	} {
		p, err := policy.Parse([]byte(doc))
		require.NoError(t, err, doc)
		require.Empty(t, p.Refuses(&protocol.Workload{Services: []*protocol.Service{{Ports: []*protocol.Port{{}}}}}), doc)
		rule := p.Refuses(&protocol.Workload{Services: []*protocol.Service{{}, {
			Ports: []*protocol.Port{{Name: "http"}, {Name: "admin", HostPort: 30001}},
		}}})
		if says == "" {
			require.Empty(t, rule, doc)
		} else {
			require.Contains(t, rule, says, doc)
		}
		require.Equal(t, says == "", p.HostPorts.Contains(30001), doc)
		require.Equal(t, doc == "", p.HostPorts.Protocol() == nil, doc)
	}
}

// A machine whose containers may get out serves one org at a time, unless its owner says otherwise.
func TestAWeaklyIsolatedMachineServesOneOrg(t *testing.T) {
	acme, other := &protocol.Workload{OrgSlug: "acme"}, &protocol.Workload{OrgSlug: "other"}
	weak := []string{"runc_vulnerable", "seccomp_unavailable"}
	closed, err := policy.Parse(nil)
	require.NoError(t, err)
	require.Empty(t, closed.ForOneOrg("acme", weak).Refuses(acme))
	require.Equal(t, "This node isolates containers weakly (runc_vulnerable, seccomp_unavailable) and is in use by "+
		"another organization.",
		closed.ForOneOrg("acme", weak).Refuses(other))
	require.Empty(t, closed.ForOneOrg("acme", nil).Refuses(other))
	open, err := policy.Parse([]byte("share_weak_isolation: true"))
	require.NoError(t, err)
	require.Empty(t, open.ForOneOrg("acme", weak).Refuses(other))
}

func TestAPolicyWithAnErrorInItIsRefusedAsAWhole(t *testing.T) {
	for doc, says := range map[string]string{
		"close: true":                          "field close not found",
		"orgs: acme":                           "cannot unmarshal",
		"apps: {never: ['']}":                  "apps.never must list",
		"closed: true\n---\nclosed: false":     "must be one document",
		"largest_workload: {cpu_millis: -1}":   "cannot unmarshal",
		"closed: [":                            "cannot be read",
		"egress: some":                         "none, internet or all",
		"egress: [none]":                       "none, internet or all",
		"egress: {modus: none}":                "field modus not found",
		"egress: {allow: [router]}":            "no IPv4 address or network",
		"egress: {allow: ['10.1.2.3/8']}":      "no IPv4 address or network",
		"egress: {allow: ['fd00::1']}":         "no IPv4 address or network",
		"egress: {allow: ['10.1.2.3:0']}":      "no IPv4 address or network",
		"egress: {allow: ['10.1.2.3:9-8']}":    "no IPv4 address or network",
		"egress: {allow: ['127.0.0.1:5432']}":  "the machine itself",
		"host_ports: 0":                        "a port like 8443 or a range",
		"host_ports: 30001-30000":              "a port like 8443 or a range",
		"host_ports: 65536":                    "a port like 8443 or a range",
		"host_ports: [30000, 30001]":           "a port like 8443 or a range",
		"host_ports: {first: 1}":               "a port like 8443 or a range",
		strings.Repeat("#", policy.MaxBytes+1): "the limit is",
	} {
		_, err := policy.Parse([]byte(doc))
		require.ErrorContains(t, err, says, doc)
	}
}

// A rule about a name that no org and no app can have would not hold, without a word.
func TestAPolicyNamesOrgsAndAppsByTheirSlugs(t *testing.T) {
	for doc, says := range map[string]string{
		"orgs: {never: [Initech]}":             `orgs.never has "Initech", which is no slug`,
		"orgs: {never: ['initech ']}":          `orgs.never has "initech ", which is no slug`,
		"orgs: {never: ['initech, globex']}":   `orgs.never has "initech, globex", which is no slug`,
		"orgs: {only: [Acme Inc.]}":            `orgs.only has "Acme Inc.", which is no slug`,
		"apps: {never: [org/acme/xmr]}":        `apps.never has "org/acme/xmr", which is no slug`,
		"apps: {never: [xmr], only: ['jup*']}": `apps.only has "jup*", which is no slug`,
	} {
		_, err := policy.Parse([]byte(doc))
		require.ErrorContains(t, err, says, doc)
	}
	for _, doc := range []string{"orgs: {never: [initech-2]}", "apps: {only: [2048]}", "ssh_users: [_Ada.Backup]"} {
		_, err := policy.Parse([]byte(doc))
		require.NoError(t, err, doc)
	}
}

func TestTheOwnerSaysWhatMembersReachOutside(t *testing.T) {
	destination := func(network string, first, last uint16) policy.Destination {
		return policy.Destination{Prefix: netip.MustParsePrefix(network), FirstPort: first, LastPort: last}
	}
	for doc, want := range map[string]policy.Egress{
		"":                    {},
		"egress: none":        {Mode: policy.EgressNone},
		"egress: internet":    {Mode: policy.EgressInternet},
		"egress: {mode: all}": {Mode: policy.EgressAll},
		"egress: {allow: []}": {},
		"egress: {mode: none, allow: [10.1.2.3, 10.1.0.0/16, '192.168.1.9:443', '10.0.0.0/8:8000-8010']}": {
			Mode: policy.EgressNone,
			Allow: []policy.Destination{
				destination("10.1.2.3/32", 0, 0),
				destination("10.1.0.0/16", 0, 0),
				destination("192.168.1.9/32", 443, 443),
				destination("10.0.0.0/8", 8000, 8010),
			},
		},
	} {
		p, err := policy.Parse([]byte(doc))
		require.NoError(t, err, doc)
		require.Equal(t, want.Mode, p.Egress.Mode, doc)
		require.ElementsMatch(t, want.Allow, p.Egress.Allow, doc)
	}
}
