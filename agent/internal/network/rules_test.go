package network

import (
	"net/netip"
	"testing"

	"github.com/google/nftables"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/policy"
)

// fullInput uses every kind of rule.
func fullInput() rulesetInput {
	return rulesetInput{
		bridge: "none0", members: netip.MustParsePrefix("10.77.0.0/24"),
		features: features{limits: true, timeouts: true},
		egress: policy.Egress{Allow: []policy.Destination{
			{Prefix: netip.MustParsePrefix("10.1.2.3/32"), FirstPort: 443, LastPort: 443},
			{Prefix: netip.MustParsePrefix("10.2.0.0/15"), FirstPort: 1000, LastPort: 2000},
			{Prefix: netip.MustParsePrefix("10.4.0.0/30")},
		}},
		resolvers:    parsePrefixes("10.9.9.9/32"),
		connected:    parsePrefixes("192.168.1.0/24", "203.0.113.0/24"),
		maxOpenFlows: 77, natPorts: portRange{1024, 32767},
		earlierLinks: []string{"eth0", "wlan0.7", "br-0:1"},
	}
}

// newTable is an agent's table that the test removes.
func newTable(t *testing.T) *Network {
	t.Helper()
	n, err := Open(t.Context(), Config{
		Bridge: "none0", CIDR: "10.77.0.0/24", StateDir: t.TempDir(), SharedDir: "/nonexistent",
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, n.removeTable()) })
	return n
}

// The check of the table compares generated rules with the kernel's: any form that the kernel gives back differently
// would replace the table in every pass.
func TestTheKernelGivesBackTheRulesThatItWasGiven(t *testing.T) {
	n := newTable(t)
	ports := publications("m1", netip.MustParseAddr("10.77.0.2"), []PortMapping{{21001, 80, "tcp"}, {21001, 53, "udp"}})
	for name, change := range map[string]func(*rulesetInput){
		"everything":        func(*rulesetInput) {},
		"nothing outside":   func(in *rulesetInput) { in.egress.Mode = policy.EgressNone },
		"everything inside": func(in *rulesetInput) { in.egress.Mode = policy.EgressAll },
		"an old kernel":     func(in *rulesetInput) { in.features = features{} },
		"any port":          func(in *rulesetInput) { in.natPorts = portRange{} },
		"one link":          func(in *rulesetInput) { in.earlierLinks = []string{"eth0"} },
	} {
		in := fullInput()
		change(&in)
		want := generateRules(in)
		require.NoError(t, n.replaceTable(want, openings{ports: ports}), name)
		found, err := n.difference(want, openings{ports: ports})
		require.NoError(t, err, name)
		require.Empty(t, found, name)
	}
}

func TestEveryChangeOfTheRulesIsADifference(t *testing.T) {
	n := newTable(t)
	require.NoError(t, n.replaceTable(generateRules(fullInput()), openings{}))
	for name, change := range map[string]func(*rulesetInput){
		"bridge":     func(in *rulesetInput) { in.bridge = "none1" },
		"members":    func(in *rulesetInput) { in.members = netip.MustParsePrefix("10.77.1.0/24") },
		"limits":     func(in *rulesetInput) { in.features.limits = false },
		"timeouts":   func(in *rulesetInput) { in.features.timeouts = false },
		"open flows": func(in *rulesetInput) { in.maxOpenFlows++ },
		"mode":       func(in *rulesetInput) { in.egress.Mode = policy.EgressAll },
		"allowed": func(in *rulesetInput) {
			in.egress.Allow = append([]policy.Destination{}, in.egress.Allow...)
			in.egress.Allow[0].LastPort++
		},
		"resolver":  func(in *rulesetInput) { in.resolvers = nil },
		"connected": func(in *rulesetInput) { in.connected = parsePrefixes("203.0.113.0/25") },
		"ports":     func(in *rulesetInput) { in.natPorts.last-- },
		"links":     func(in *rulesetInput) { in.earlierLinks = []string{"eth0", "wlan0.7", "wlan1"} },
	} {
		in := fullInput()
		change(&in)
		found, err := n.difference(generateRules(in), openings{})
		require.NoError(t, err, name)
		require.NotEmpty(t, found, name)
	}
	port := publications("m1", netip.MustParseAddr("10.77.0.2"), []PortMapping{{21001, 80, "tcp"}})
	found, err := n.difference(generateRules(fullInput()), openings{ports: port})
	require.NoError(t, err)
	require.Equal(t, "tcp port 21001 is not published", found)
}

func TestNetworksThatOverlapOrAdjoinAreOneInterval(t *testing.T) {
	at := func(ip string, end bool) nftables.SetElement {
		return nftables.SetElement{Key: netip.MustParseAddr(ip).AsSlice(), IntervalEnd: end}
	}
	require.Equal(t, []nftables.SetElement{
		at("10.0.0.0", false), at("10.0.2.0", true), at("10.0.3.1", false), at("10.0.3.2", true), at("224.0.0.0", false),
	}, intervals(parsePrefixes("240.0.0.0/4", "10.0.1.0/24", "10.0.3.1/32", "224.0.0.0/4", "10.0.0.0/24", "10.0.1.128/25",
		"10.0.3.1/32")))
}

// More ports than one message can hold.
func TestManyPublishedPortsAreOneTransaction(t *testing.T) {
	n := newTable(t)
	var mappings []PortMapping
	for i := range uint16(3 * maxElements) {
		mappings = append(mappings, PortMapping{20000 + i, 80, "tcp"})
	}
	long := "a-member-with-the-longest-id-that-a-comment-of-the-firewall-can-hold-" +
		"0123456789012345678901234567890123456789012345678901234567"
	require.NoError(t, checkID(long))
	ports := publications(long, netip.MustParseAddr("10.77.0.2"), mappings)
	want := generateRules(fullInput())
	require.NoError(t, n.replaceTable(want, openings{ports: ports}))
	found, err := n.difference(want, openings{ports: ports})
	require.NoError(t, err)
	require.Empty(t, found)
}

// Where the connection table is small, a member has a part of it and not all.
func TestAMemberHasAPartOfASmallConnectionTable(t *testing.T) {
	for size, flows := range map[string]uint32{
		"1048576": 4096, "262144": 4096, "65536": 1024, "7936": 124, "10": 1, "0": 4096, "": 4096,
	} {
		require.Equal(t, flows, shareOf(size), "%q entries", size)
	}
}
